//! The daemon's knowledge about itself, for health, metrics, the control socket and systemd.
//!
//! Observers read the state when they need it. The daemon notes facts when they change. A
//! [`Snapshot`] joins them with the latest status, view and store status.

mod running;
mod snapshot;
mod trials;

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, SystemTime};

use flannel_core::lease::View;
use flannel_core::remedy::Trouble;
use flannel_core::runtime::lock;
use flannel_core::status::{Status, Waiting};
use flannel_core::subnet::Ownership;
use flannel_core::{Config, Error as CoreError, Remedy, SubnetManager, Subnets};
use flannel_doctor::paths::Paths;
use flannel_firewall::LegacyMemory;
use tokio::sync::watch;

use crate::error::Error;
use running::CountersRead;
pub(crate) use running::{FirewallRules, Running};
pub(crate) use snapshot::{Counters, Facts, NetworkSnapshot, Snapshot};
use trials::Trials;

/// Sets a log filter, or with `None` the filter of the start. Returns the reason if it cannot.
pub(crate) type SetLog = dyn Fn(Option<&str>) -> Result<(), String> + Send + Sync;

/// The timeout of a request to the network for its pending peers, so that a status is quick. A
/// network answers after a round, which takes 16 ms, and after the batch of changes that it began,
/// up to 100 ms. The timeout is longer than both. Otherwise the reported states of peers would
/// alternate.
const BUSY: Duration = Duration::from_millis(150);

/// The largest age of the cached content of the tables of iptables-legacy.
const LEGACY: Duration = Duration::from_secs(30);

/// The source for all observers. Clones share it.
#[derive(Clone)]
pub(crate) struct Observer(Arc<Shared>);

struct Shared {
    known: Mutex<Known>,
    /// Notified when a fact changes.
    phase: watch::Sender<()>,
    /// Notified when everything must be read again.
    reloads: watch::Sender<()>,
    started: SystemTime,
    set_log: Option<Box<SetLog>>,
    /// The configs that the network that runs is asked about.
    trials: Trials,
    /// Cached, because a status may be requested every second.
    legacy: LegacyMemory,
}

#[derive(Default)]
struct Known {
    store: Option<Arc<dyn SubnetManager>>,
    running: Option<Arc<Running>>,
    /// The counters of that network that requests share.
    read: Arc<CountersRead>,
    /// The counters of the networks before it.
    earlier: Counters,
    facts: Facts,
    /// The time of the last change of each lease that changed while the network ran.
    changed: BTreeMap<Subnets, SystemTime>,
}

impl Default for Observer {
    fn default() -> Self {
        Self::new(None)
    }
}

impl fmt::Debug for Observer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Observer").field("started", &self.0.started).finish_non_exhaustive()
    }
}

impl Observer {
    /// The source of a daemon that starts now. `set_log` sets its log filter. It is `None` if the
    /// log belongs to another program, in which the daemon is embedded.
    pub(crate) fn new(set_log: Option<Box<SetLog>>) -> Self {
        Self(Arc::new(Shared {
            known: Mutex::default(),
            phase: watch::channel(()).0,
            reloads: watch::channel(()).0,
            started: SystemTime::now(),
            set_log,
            trials: Trials::default(),
            legacy: LegacyMemory::new(LEGACY),
        }))
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        lock(&self.0.known)
    }

    fn set(&self, set: impl FnOnce(&mut Known)) {
        set(&mut self.known());
        self.0.phase.send_replace(());
    }

    /// Notes facts. Observers are notified if they are new.
    pub(crate) fn note(&self, note: impl FnOnce(&mut Facts)) {
        let mut known = self.known();
        let before = known.facts.clone();
        note(&mut known.facts);
        let new = before != known.facts;
        drop(known);
        if new {
            self.0.phase.send_replace(());
        }
    }

    /// Notes the open registry.
    pub(crate) fn opened(&self, store: Arc<dyn SubnetManager>) {
        self.set(|known| known.store = Some(store));
    }

    /// Notes a network that runs until the guard is dropped.
    pub(crate) fn running(&self, running: Running) -> RunningGuard<'_> {
        self.set(|known| {
            known.running = Some(Arc::new(running));
            known.read = Arc::default();
            known.facts = Facts { networks: known.facts.networks + 1, ..Facts::default() };
            known.changed.clear();
        });
        RunningGuard(self)
    }

    /// Notes the times at which leases change, which no store reports.
    pub(crate) async fn follow(&self, mut views: watch::Receiver<View>) -> Infallible {
        let mut seen = views.borrow_and_update().clone();
        while views.changed().await.is_ok() {
            let now = views.borrow_and_update().clone();
            let mut known = self.known();
            for (subnets, lease) in now.leases.changes_since(&seen.leases) {
                match lease {
                    Some(_) => known.changed.insert(subnets, SystemTime::now()),
                    None => known.changed.remove(&subnets),
                };
            }
            drop(known);
            seen = now;
        }
        // The watch has ended, which the network reports.
        std::future::pending().await
    }

    /// The current state. Takes O(n) for n leases that changed since the network's start.
    pub(crate) fn snapshot(&self) -> Snapshot {
        let known = self.known();
        let mut counters = known.earlier.clone();
        let network = known.running.clone().map(|running| {
            counters.add(&running);
            let status = Arc::clone(&running.handle.status.borrow());
            let view = running.views.borrow().clone();
            NetworkSnapshot {
                running,
                status,
                view,
                waiting: None,
                tunnels: Arc::default(),
                traffic: None,
                refused: None,
                read: Arc::clone(&known.read),
            }
        });
        let store = known.store.as_ref();
        Snapshot {
            time: SystemTime::now(),
            started: self.0.started,
            is_embedded: self.0.set_log.is_none(),
            store: store.map(|store| store.store_status()),
            ownership: store
                .map_or(Ownership::NotAcquired, |store| store.ownership().borrow().clone()),
            facts: known.facts.clone(),
            changed: known.changed.clone(),
            network,
            counters,
        }
    }

    /// The current state, with the pending peers if the status does not have them.
    pub(crate) async fn snapshot_of_peers(&self) -> Snapshot {
        // Asked before the status is read, because the status then has all later changes.
        let waiting = self.waiting().await;
        let mut snapshot = self.snapshot();
        if let Some(network) = &mut snapshot.network {
            network.waiting = waiting;
        }
        snapshot
    }

    async fn waiting(&self) -> Option<Waiting> {
        let running = self.known().running.clone()?;
        let settled = running.handle.status.borrow().settled;
        if settled {
            return None;
        }
        tokio::time::timeout(BUSY, running.handle.waiting()).await.ok()?
    }

    /// A stream of changes of facts and of the status.
    pub(crate) fn changes(&self) -> Changes {
        Changes { phase: self.0.phase.subscribe(), status: self.status(), observer: self.clone() }
    }

    fn status(&self) -> Option<watch::Receiver<Arc<Status>>> {
        self.known().running.as_ref().map(|running| running.handle.status.clone())
    }

    /// The results of the probes of paths. `None` if no network runs, or paths are not probed.
    pub(crate) fn paths(&self) -> Option<Paths> {
        self.known().running.as_ref().and_then(|running| running.paths.clone())
    }

    /// Whether a network runs, and its subnet file is written or will not be.
    pub(crate) fn runs(&self) -> bool {
        let known = self.known();
        known.running.as_ref().is_some_and(|running| running.lapsed || known.facts.subnet_file)
    }

    /// The cached content of the tables of iptables-legacy.
    pub(crate) fn legacy(&self) -> &LegacyMemory {
        &self.0.legacy
    }

    /// Sets the log filter, or with `None` the filter that was given at the start.
    ///
    /// # Errors
    /// The text is not a filter, or the log belongs to another program.
    pub(crate) fn set_log(&self, filter: Option<&str>) -> Result<(), String> {
        match &self.0.set_log {
            Some(set) => set(filter),
            None => Err("the log belongs to the program that embeds flanneld".to_owned()),
        }
    }

    /// A receiver that is notified when everything must be read again.
    pub(crate) fn reloads(&self) -> watch::Receiver<()> {
        self.0.reloads.subscribe()
    }

    /// Makes the task that applies configs read the store at once.
    pub(crate) fn look_again(&self) {
        self.0.reloads.send_replace(());
    }

    /// Asks the network that runs whether another one can be built from `config`. Returns the
    /// obstacle as an error, or `None` if no network runs, so that nothing can be asked.
    pub(crate) async fn try_config(&self, config: Config) -> Option<Result<(), String>> {
        self.known().running.as_ref()?;
        self.0.trials.ask(config).await
    }

    /// Answers [`Self::try_config`] by `check`, until the future is dropped.
    pub(crate) async fn answer_trials(
        &self,
        check: impl AsyncFn(&Config) -> Result<(), Error>,
    ) -> Infallible {
        self.0.trials.answer(check).await
    }

    /// Reads the network config and changed certificates again, and resets the log filter. The task
    /// that applies configs reads the store at once. Without a network the store gets no request,
    /// because the start of the next network reads everything. Returns the result as a sentence
    /// without a full stop.
    pub(crate) async fn reload(&self) -> String {
        // An embedded daemon has no log filter.
        let _ = self.set_log(None);
        let (subnets, used) = {
            let known = self.known();
            let subnets = known.store.clone();
            (subnets, known.running.as_ref().map(|running| running.config.clone()))
        };
        let Some(subnets) = subnets else { return "the registry is not open yet".to_owned() };
        let Some(used) = used else {
            return "no network runs yet, and its start reads everything".to_owned();
        };
        let read = subnets.network_config().await;
        self.look_again();
        match read {
            Ok(config) if config == used => "the network config is unchanged".to_owned(),
            Ok(_) => "the network config has changed".to_owned(),
            Err(error @ (CoreError::Config { .. } | CoreError::NoConfig { .. })) => {
                format!("the network config in use stays: {error}")
            }
            Err(error) => format!("the network config could not be read: {error}"),
        }
    }
}

/// Changes of the daemon. Bursts coalesce.
pub(crate) struct Changes {
    observer: Observer,
    phase: watch::Receiver<()>,
    /// The status of the network that runs.
    status: Option<watch::Receiver<Arc<Status>>>,
}

impl Changes {
    /// Waits for the next change. The first call may return without one.
    ///
    /// # Cancel safety
    /// Dropping the future loses nothing.
    pub(crate) async fn next(&mut self) {
        let status = async {
            match &mut self.status {
                Some(status) => status.changed().await.is_ok(),
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            // Its sender lives as long as the observer.
            _ = self.phase.changed() => self.status = self.observer.status(),
            alive = status => if !alive {
                self.status = None;
            },
        }
    }
}

/// The guard of a network that runs.
pub(crate) struct RunningGuard<'a>(&'a Observer);

impl Drop for RunningGuard<'_> {
    fn drop(&mut self) {
        self.0.set(|known| {
            if let Some(running) = known.running.take() {
                known.earlier.add(&running);
            }
            let trouble = Trouble::new("the network is rebuilt", Remedy::WatchStatus);
            known.facts.waits_for = Some(trouble);
        });
    }
}

#[cfg(test)]
pub(crate) mod tests {
    #![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

    use flannel_core::address::Dual;
    use flannel_core::backend::ExternalInterface;
    use flannel_core::network::NetworkHandle;
    use flannel_core::object::PublicKey;
    use flannel_core::testing::{FakeKernel, FakeSubnets};
    use flannel_doctor::inputs::tunnels::Tunnels;
    use flannel_doctor::path_probe::server;
    use flannel_netlink::{Session, Tunnel};
    use flannel_route::{Host, JoinOptions};

    use super::*;

    /// A device with a peer for each handshake and number of sent bytes. Peer `n` has the subnet
    /// 10.1.(7 + n).0/24.
    pub(crate) fn tunnels_with<const N: usize>(
        sessions: [(Option<SystemTime>, u64); N],
    ) -> Tunnels {
        let session = |(n, (handshake, sent))| {
            let n = n as u8 + 7;
            let allowed = Dual { v4: format!("10.1.{n}.0/24").parse().ok(), v6: None };
            let put = Some(([192, 0, 2, n], 51820).into());
            let (key, psk, endpoint, received) = (PublicKey([n; 32]), None, put, 1);
            Session { key, allowed, psk, put, endpoint, handshake, received, sent }
        };
        let sessions = (0..).zip(sessions).map(session).collect();
        let tunnel = Tunnel { key: PublicKey([1; 32]), port: 51820, sessions };
        Tunnels(vec![("flannel-wg".parse().unwrap(), tunnel)])
    }

    /// A network on fakes, with three peers and this status.
    pub(crate) async fn network(mut status: Status) -> (FakeSubnets, Running) {
        let subnets = FakeSubnets::new("10.1.0.0/16");
        let attrs = flannel_core::lease::LeaseAttrs::from(
            flannel_core::lease::Offer::new(["192.0.2.1".parse().unwrap()].into_iter().collect())
                .with_kind("vxlan"),
        );
        let lease = subnets.acquire_lease(&attrs).await.unwrap();
        for n in [7, 8, 9] {
            subnets.put(&format!("10.1.{n}.0-24"), &format!("192.0.2.{n}"));
        }
        let views = subnets.watch_leases().await.unwrap();
        status.leases = views.borrow().leases.clone();
        let status = watch::channel(Arc::new(status)).1;
        let config = subnets.network_config().await.unwrap();
        let running = Running {
            datapath: flannel_backends::all().datapath(&config),
            links: Vec::new(),
            config,
            iface: ExternalInterface::new(
                "eth0".parse().unwrap(),
                1500,
                Dual { v4: Some("192.0.2.1".parse().unwrap()), v6: None },
            )
            .with_reason("it has the default route"),
            kernel: Arc::new(FakeKernel::with_uplink("eth0")),
            encrypted: None,
            record_keepers: Vec::new(),
            handle: NetworkHandle::new(lease, 1450, status),
            views,
            firewall_rules: watch::channel(FirewallRules::Unwanted).1,
            paths: None,
            lapsed: false,
            since: SystemTime::now(),
        };
        (subnets, running)
    }

    #[tokio::test]
    async fn a_network_is_known_while_it_runs() {
        let observer = Observer::default();
        assert!(observer.snapshot().network.is_none());
        let waits = Some(Trouble::new("a config", Remedy::SetConfig));
        observer.note(|facts| facts.waits_for = waits.clone());
        assert_eq!(observer.snapshot().facts.waits_for, waits);
        let (subnets, running) = network(Status::default()).await;
        let views = running.views.clone();
        let guard = observer.running(running);
        let snapshot = observer.snapshot();
        assert_eq!((snapshot.facts.networks, snapshot.facts.waits_for), (1, None));
        assert_eq!(snapshot.network.unwrap().view.leases.len(), 4);
        let change = async {
            subnets.put("10.1.7.0-24", "192.0.2.77");
            while observer.snapshot().changed.is_empty() {
                tokio::task::yield_now().await;
            }
        };
        tokio::select! {
            biased;
            never = observer.follow(views) => match never {},
            () = change => (),
        }
        let changed: Vec<String> =
            observer.snapshot().changed.keys().map(ToString::to_string).collect();
        assert_eq!(changed, ["10.1.7.0-24"]);
        drop(guard);
        assert!(observer.snapshot().network.is_none());
    }

    #[tokio::test]
    async fn counters_go_on_after_a_rebuild() {
        use flannel_core::object::ObjectKind;
        use flannel_core::status::Damage;

        let observer = Observer::default();
        let what = (ObjectKind::Route, Damage::Deletion);
        let mut firewall = flannel_firewall::Status::default();
        firewall.repairs = 3;
        let (_firewall, firewall) = watch::channel(firewall);
        for networks in 1..=3 {
            let mut status = Status::default();
            (status.applied, status.refused, status.repaired) = (5, 4, 2);
            status.repairs.insert(what, 2);
            status.latency.record(Duration::from_millis(1));
            let (_subnets, mut running) = network(status).await;
            running.firewall_rules = watch::channel(FirewallRules::Kept(firewall.clone())).1;
            let guard = observer.running(running);
            let counted = || {
                let Counters {
                    applied, refused, repaired, repairs, latency, firewall_repairs, ..
                } = observer.snapshot().counters;
                [applied, refused, repaired, repairs[&what], latency.count(), firewall_repairs]
            };
            let expected = [5, 4, 2, 2, 1, 3].map(|one| one * networks);
            assert_eq!(counted(), expected);
            drop(guard);
            assert_eq!(counted(), expected, "between two networks");
        }
    }

    /// Peers without a tunnel or a handshake ask at the public address, even behind NAT or as a
    /// second address of the interface.
    #[tokio::test]
    async fn probes_are_answered_on_the_public_address_too() {
        let (subnets, mut running) = network(Status::default()).await;
        subnets.put("10.1.3.0-24", "127.0.0.1");
        running.iface.name = "lo".parse().unwrap();
        // Addresses of this process only, and ports outside the system's range.
        let [.., high, low] = std::process::id().to_be_bytes();
        let [one, other] = [77, 78].map(|n| std::net::Ipv4Addr::new(127, n, high, low));
        for (backend, own, public, port) in [
            (r#"{"Type":"vxlan","DirectRouting":true}"#, one, other, 31_417),
            (r#"{"Type":"vxlan","DirectRouting":true}"#, one, one, 31_418),
            (r#"{"Type":"wireguard"}"#, one, other, 31_419),
        ] {
            let config = format!(r#"{{"Network":"10.1.0.0/16","Backend":{backend}}}"#);
            running.config = Config::parse(&config).unwrap();
            running.datapath = flannel_backends::all().datapath(&running.config);
            running.iface.address.v4 = Some(own.into());
            running.iface.public.v4 = Some(public.into());
            let peer = async {
                for address in [own, public] {
                    let mut tries = 0;
                    while tokio::net::TcpStream::connect((address, port)).await.is_err() {
                        tries += 1;
                        assert!(tries < 500, "nothing listens on {address}");
                        tokio::time::sleep(Duration::from_millis(10)).await;
                    }
                }
            };
            tokio::select! {
                never = server::serve(running.probe_server(port)) => match never {},
                () = peer => {}
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_busy_network_does_not_delay_a_status() {
        let (subnets, mut running) = network(Status::default()).await;
        let host = Host::new(running.iface.clone(), Arc::clone(&running.kernel), Arc::new(subnets));
        // A network that does not run accepts requests and answers none.
        let busy = host
            .join(
                &**flannel_backends::all().find("host-gw").unwrap(),
                &running.config,
                JoinOptions::default(),
            )
            .await
            .unwrap();
        running.handle = busy.network.handle();
        let views = running.views.clone();
        let observer = Observer::default();
        let _guard = observer.running(running);
        let start = tokio::time::Instant::now();
        let network = observer.snapshot_of_peers().await.network.unwrap();
        assert!(network.waiting.is_none() && !network.status.settled);
        assert!(start.elapsed() <= Duration::from_millis(200), "{:?}", start.elapsed());
        // A status waits for the end of a round.
        let round = async {
            tokio::time::sleep(Duration::from_millis(110)).await;
            busy.network.run(views).await
        };
        let network = tokio::select! {
            ended = round => panic!("{ended:?}"),
            snapshot = observer.snapshot_of_peers() => snapshot.network.unwrap(),
        };
        assert!(network.waiting.is_some());
    }

    #[tokio::test(start_paused = true)]
    async fn observers_are_notified_once_for_each_change() {
        let observer = Observer::default();
        let mut changes = observer.changes();
        let (_subnets, mut running) = network(Status::default()).await;
        let (sender, status) = watch::channel(Arc::new(Status::default()));
        running.handle.status = status;
        sender.send_replace(Arc::default());
        let _guard = observer.running(running);
        let quiet = Duration::from_secs(3600);
        for _ in 0..2 {
            let mut woken = 0;
            while tokio::time::timeout(quiet, changes.next()).await.is_ok() {
                woken += 1;
                assert!(woken <= 2, "one for the phase, and one for the unseen status");
            }
            assert!(woken >= 1);
            sender.send_replace(Arc::default());
        }
    }
}
