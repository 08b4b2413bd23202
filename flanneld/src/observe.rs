//! What the daemon knows, for whoever looks: health, metrics, the control socket and systemd all read it here.
//!
//! The one thing to know: it is pulled. The daemon notes what it is doing when that changes, and a [`Snapshot`] puts
//! it together with the latest status, view and store status when somebody asks; nobody is woken for an observer.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::fmt;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use flannel_core::address::Dual;
use flannel_core::backend::{Datapath, ExternalInterface};
use flannel_core::lease::View;
use flannel_core::network::NetworkHandle;
use flannel_core::object::LinkName;
use flannel_core::status::{Status, Waiting};
use flannel_core::subnet::{Ownership, StoreStatus};
use flannel_core::{Config, Error as CoreError, Kernel, SubnetManager, Subnets};
use flannel_doctor::commands::localize_findings;
use flannel_doctor::host::HostReport;
use flannel_doctor::path_probe::server::ServerConfig;
use flannel_firewall::LegacyMemory;
use tokio::sync::watch;

use crate::firewall::Rulebook;
use crate::preflight;

/// Sets another log filter, or says why not; `None`: the one given at the start.
pub(crate) type SetLog = dyn Fn(Option<&str>) -> Result<(), String> + Send + Sync;

/// A network that is at work for longer does not say which peers wait: whoever asks for the status does not wait for it. Longer
/// than a round of new peers (0.1 s), after which it answers: else peers would be in place now and pending then.
const BUSY: Duration = Duration::from_millis(150);

/// What is told of the kernel's older tables is at most so old.
const LEGACY: Duration = Duration::from_secs(30);

/// The one source for all who look. Clones are the same.
#[derive(Clone)]
pub(crate) struct Observer(Arc<Shared>);

struct Shared {
    known: Mutex<Known>,
    /// Told when the daemon does something else than before.
    phase: watch::Sender<()>,
    /// Told when everything is to be read again.
    reloads: watch::Sender<()>,
    started: SystemTime,
    set_log: Option<Box<SetLog>>,
    /// Somebody may look at the status every second.
    legacy: LegacyMemory,
}

#[derive(Default)]
struct Known {
    store: Option<Arc<dyn SubnetManager>>,
    /// What the daemon waits for before it can build the next network; while one runs, only what keeps it from asking for a lease.
    waits_for: Option<String>,
    running: Option<Arc<Running>>,
    /// Pods may start: the subnet file is written.
    subnet_file: bool,
    /// How many networks have run.
    networks: u64,
    /// A config that is used only after a restart.
    waiting_config: Option<Config>,
    /// Why the store's config is not used, though it is one.
    refused_config: Option<String>,
    /// Why the external interface is not used as it is now.
    unfit_interface: Option<String>,
    /// When a lease was seen to change, of those that did while the network ran.
    changed: BTreeMap<Subnets, SystemTime>,
}

/// What the network that runs was built from.
pub(crate) struct Running {
    pub(crate) config: Config,
    pub(crate) backend: &'static str,
    pub(crate) datapath: Datapath,
    /// The devices that it may have.
    pub(crate) links: Vec<LinkName>,
    pub(crate) iface: ExternalInterface,
    pub(crate) kernel: Arc<dyn Kernel>,
    pub(crate) handle: NetworkHandle,
    pub(crate) views: watch::Receiver<View>,
    pub(crate) rulebook: watch::Receiver<Rulebook>,
    /// This node has no lease: its time ran out, and the store does not answer.
    pub(crate) lapsed: bool,
    pub(crate) since: SystemTime,
}

impl Running {
    /// Where other nodes' doctors ask; with port 0, and without a tunnel or a lease, nowhere.
    pub(crate) fn probe_server(&self, port: u16) -> ServerConfig {
        let devices = if self.lapsed { Dual::default() } else { self.datapath.devices };
        let bare = !self.lapsed && self.datapath.bare;
        let (own, iface) = (self.handle.lease.subnets, &self.iface);
        let at = |family, address: Option<IpAddr>| {
            own.family(family).filter(|_| bare)?;
            Some((iface.name, address?))
        };
        ServerConfig {
            port,
            tunnels: Dual::from_fn(|family| Some((devices[family]?, own.family(family)?.base()))),
            bare: Dual::from_fn(|family| at(family, iface.address[family])),
            // Behind NAT nobody comes to it here, which hurts nobody.
            public: Dual::from_fn(|family| {
                at(
                    family,
                    iface.public[family].filter(|public| iface.address[family] != Some(*public)),
                )
            }),
            mtu: self.handle.mtu,
            views: self.views.clone(),
            status: self.handle.status.clone(),
        }
    }
}

/// Everything as it is at one moment.
pub(crate) struct Snapshot {
    pub(crate) time: SystemTime,
    pub(crate) started: SystemTime,
    pub(crate) waits_for: Option<String>,
    /// `None` before the registry was opened.
    pub(crate) store: Option<StoreStatus>,
    pub(crate) ownership: Ownership,
    pub(crate) networks: u64,
    pub(crate) subnet_file: bool,
    pub(crate) waiting_config: Option<Config>,
    pub(crate) refused_config: Option<String>,
    pub(crate) unfit_interface: Option<String>,
    pub(crate) changed: BTreeMap<Subnets, SystemTime>,
    pub(crate) network: Option<NetworkSnapshot>,
}

/// The network that runs, its latest status and what the store's leases are.
pub(crate) struct NetworkSnapshot {
    pub(crate) running: Arc<Running>,
    pub(crate) status: Arc<Status>,
    pub(crate) view: View,
    /// Which peers waited when this was asked for, if that was asked; says nothing about a status that is settled.
    pub(crate) waiting: Option<Waiting>,
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
    /// Of a daemon that starts now, and whose log can be set so; `None`: it cannot.
    pub(crate) fn new(set_log: Option<Box<SetLog>>) -> Self {
        let phase = watch::channel(()).0;
        let legacy = LegacyMemory::new(LEGACY);
        let (known, reloads, started) = (Mutex::default(), watch::channel(()).0, SystemTime::now());
        Self(Arc::new(Shared { known, phase, reloads, started, set_log, legacy }))
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.0.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn note(&self, note: impl FnOnce(&mut Known)) {
        note(&mut self.known());
        self.0.phase.send_replace(());
    }

    /// The registry was opened.
    pub(crate) fn opened(&self, store: Arc<dyn SubnetManager>) {
        self.note(|known| known.store = Some(store));
    }

    /// No network runs, and this is why.
    pub(crate) fn waits_for(&self, reason: impl Into<String>) {
        let reason = Some(reason.into());
        if self.known().waits_for != reason {
            self.note(|known| known.waits_for = reason);
        }
    }

    /// A network runs without a lease, and this is why none is asked for, though the store answers; `None`: it does not.
    pub(crate) fn cannot_follow(&self, why: Option<String>) {
        if self.known().waits_for != why {
            self.note(|known| known.waits_for = why);
        }
    }

    /// A network runs, until the guard is dropped.
    pub(crate) fn running(&self, running: Running) -> RunningGuard<'_> {
        self.note(|known| {
            known.running = Some(Arc::new(running));
            known.networks += 1;
            known.waits_for = None;
            known.subnet_file = false;
            known.waiting_config = None;
            known.refused_config = None;
            known.unfit_interface = None;
            known.changed.clear();
        });
        RunningGuard(self)
    }

    /// The network's subnet file is written.
    pub(crate) fn subnet_file_written(&self) {
        self.note(|known| known.subnet_file = true);
    }

    /// The store holds this config, which is used only after a restart; `None`: it holds no such config any more.
    pub(crate) fn config_waits(&self, config: Option<&Config>) {
        if self.known().waiting_config.as_ref() != config {
            self.note(|known| known.waiting_config = config.cloned());
        }
    }

    /// The store holds a config that does not fit this node, and this is why; `None`: it holds no such config any more.
    pub(crate) fn config_refused(&self, why: Option<String>) {
        if self.known().refused_config != why {
            self.note(|known| known.refused_config = why);
        }
    }

    /// No network can be built with the external interface as it is now, and this is why; `None`: it is what it was.
    pub(crate) fn interface_unfit(&self, why: Option<String>) {
        if self.known().unfit_interface != why {
            self.note(|known| known.unfit_interface = why);
        }
    }

    /// Notes when leases change, which is told by no store.
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
        // Nobody follows the store any more, which the network itself tells.
        std::future::pending().await
    }

    /// Everything that is known now. Costs what changed since the network's start.
    pub(crate) fn snapshot(&self) -> Snapshot {
        let known = self.known();
        let network = known.running.clone().map(|running| {
            let status = Arc::clone(&running.handle.status.borrow());
            let view = running.views.borrow().clone();
            NetworkSnapshot { running, status, view, waiting: None }
        });
        Snapshot {
            time: SystemTime::now(),
            started: self.0.started,
            waits_for: known.waits_for.clone(),
            store: known.store.as_ref().map(|store| store.store_status()),
            ownership: known
                .store
                .as_ref()
                .map_or(Ownership::NotAcquired, |store| store.ownership().borrow().clone()),
            networks: known.networks,
            subnet_file: known.subnet_file,
            waiting_config: known.waiting_config.clone(),
            refused_config: known.refused_config.clone(),
            unfit_interface: known.unfit_interface.clone(),
            changed: known.changed.clone(),
            network,
        }
    }

    /// The same, and which peers wait, where only the network itself can say it.
    pub(crate) async fn snapshot_of_peers(&self) -> Snapshot {
        // Before the status: that one tells what has become of them since.
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

    /// What may be different from now on: another phase, or another status.
    pub(crate) fn changes(&self) -> Changes {
        Changes { phase: self.0.phase.subscribe(), status: self.status(), observer: self.clone() }
    }

    /// The status of the network that runs.
    pub(crate) fn status(&self) -> Option<watch::Receiver<Arc<Status>>> {
        self.known().running.as_ref().map(|running| running.handle.status.clone())
    }

    /// A network runs, and whoever waits for its subnet file need not wait any more.
    pub(crate) fn runs(&self) -> bool {
        let known = self.known();
        known.running.as_ref().is_some_and(|running| running.lapsed || known.subnet_file)
    }

    /// What about this host stands in the way of the network. What takes a process is not looked at each time, unless it was
    /// [forgotten](Self::forget).
    pub(crate) async fn look(&self, network: &NetworkSnapshot) -> HostReport {
        let mut look = preflight::check(network, &self.0.legacy).await;
        let store = self.known().store.as_ref().map(|store| store.store_status().store);
        localize_findings(&mut look.findings, store.as_deref());
        look
    }

    /// Whoever looks next looks anew, once a second at most.
    pub(crate) async fn forget(&self) {
        self.0.legacy.forget().await;
    }

    /// Sets the log filter; `None`: back to the one given at the start.
    ///
    /// # Errors
    /// The filter is none, or the log is not ours to set.
    pub(crate) fn set_log(&self, filter: Option<&str>) -> Result<(), String> {
        let set = self
            .0
            .set_log
            .as_ref()
            .ok_or("the log belongs to the program that flanneld is part of")?;
        set(filter)
    }

    /// Told when everything is to be read again, from now on.
    pub(crate) fn reloads(&self) -> watch::Receiver<()> {
        self.0.reloads.subscribe()
    }

    /// Tells who applies configs to look at once.
    pub(crate) fn look_again(&self) {
        self.0.reloads.send_replace(());
    }

    /// Reads everything again that may have changed behind our back: the network config, by a request that also
    /// reads certificates again if they changed, and the log filter given at the start. Who applies configs is told to look
    /// at once, whatever it was that it missed or waits for. A network that is about to be built
    /// asks for all that itself, and is built from one config: meanwhile the store is asked nothing else. Returns what
    /// was found, as a sentence without a full stop.
    pub(crate) async fn reload(&self) -> String {
        // Without a log of ours there is nothing to set back.
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

/// News of the daemon; bursts coalesce.
pub(crate) struct Changes {
    observer: Observer,
    phase: watch::Receiver<()>,
    /// Of the network that runs.
    status: Option<watch::Receiver<Arc<Status>>>,
}

impl Changes {
    /// Waits for the next one; the first may be none.
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

/// As long as it lives, a network runs.
pub(crate) struct RunningGuard<'a>(&'a Observer);

impl Drop for RunningGuard<'_> {
    fn drop(&mut self) {
        self.0.note(|known| {
            known.running = None;
            known.waits_for = Some("the network is built anew".to_owned());
        });
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "helpers of tests are tests")]
pub(crate) mod tests {
    use flannel_core::testing::{FakeKernel, FakeSubnets};
    use flannel_route::{Host, JoinOptions};

    use super::*;

    /// A network on fakes, with three peers and this status.
    pub(crate) async fn network(mut status: Status) -> (FakeSubnets, Running) {
        let subnets = FakeSubnets::new("10.1.0.0/16");
        let attrs = flannel_core::lease::LeaseAttrs::from(flannel_core::lease::Offer {
            public: ["192.0.2.1".parse().unwrap()].into_iter().collect(),
            kind: "vxlan".into(),
            ..flannel_core::lease::Offer::default()
        });
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
            backend: "vxlan",
            iface: ExternalInterface {
                name: "eth0".parse().unwrap(),
                mtu: 1500,
                address: Dual { v4: Some("192.0.2.1".parse().unwrap()), v6: None },
                public: Dual { v4: Some("192.0.2.1".parse().unwrap()), v6: None },
                reason: "it has the default route".into(),
            },
            kernel: Arc::new(FakeKernel::with_uplink("eth0")),
            handle: NetworkHandle::new(lease, 1450, status),
            views,
            rulebook: watch::channel(Rulebook::Unwanted).1,
            lapsed: false,
            since: SystemTime::now(),
        };
        (subnets, running)
    }

    #[tokio::test]
    async fn what_runs_is_known_while_it_runs() {
        let observer = Observer::default();
        assert!(observer.snapshot().network.is_none());
        observer.waits_for("a config");
        assert_eq!(observer.snapshot().waits_for.as_deref(), Some("a config"));
        let (subnets, running) = network(Status::default()).await;
        let views = running.views.clone();
        let guard = observer.running(running);
        let snapshot = observer.snapshot();
        assert_eq!((snapshot.networks, snapshot.waits_for), (1, None));
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

    /// Peers without a tunnel ask at the address that they are told, be it behind NAT or the second of the interface.
    #[tokio::test]
    async fn peers_are_answered_on_the_public_address_too() {
        let (subnets, mut running) = network(Status::default()).await;
        subnets.put("10.1.3.0-24", "127.0.0.1");
        let config = r#"{"Network":"10.1.0.0/16","Backend":{"Type":"vxlan","DirectRouting":true}}"#;
        running.config = Config::parse(config).unwrap();
        running.datapath = flannel_backends::all().datapath(&running.config);
        running.iface.name = "lo".parse().unwrap();
        // Addresses of this process alone, and ports that the system gives nobody of its own accord.
        let [.., high, low] = std::process::id().to_be_bytes();
        let [one, other] = [77, 78].map(|n| std::net::Ipv4Addr::new(127, n, high, low));
        for (own, public, port) in [(one, other, 31_417), (one, one, 31_418)] {
            running.iface.address.v4 = Some(own.into());
            running.iface.public.v4 = Some(public.into());
            let peer = async {
                for address in [own, public] {
                    let mut tries = 0;
                    while tokio::net::TcpStream::connect((address, port)).await.is_err() {
                        tries += 1;
                        assert!(tries < 500, "nobody listens on {address}");
                        tokio::time::sleep(Duration::from_millis(10)).await;
                    }
                }
            };
            tokio::select! {
                never = flannel_doctor::path_probe::server::serve(running.probe_server(port)) => match never {},
                () = peer => {}
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_network_that_is_at_work_keeps_nobody_waiting() {
        let (subnets, mut running) = network(Status::default()).await;
        let host = Host::new(running.iface.clone(), Arc::clone(&running.kernel), Arc::new(subnets));
        // It takes questions, and answers none while it does not run.
        let busy = host
            .join(
                flannel_backends::all().find("host-gw").unwrap(),
                &running.config,
                JoinOptions::default(),
            )
            .await
            .unwrap();
        running.handle = busy.handle();
        let views = running.views.clone();
        let observer = Observer::default();
        let _guard = observer.running(running);
        let start = tokio::time::Instant::now();
        let network = observer.snapshot_of_peers().await.network.unwrap();
        assert!(network.waiting.is_none() && !network.status.settled);
        assert!(start.elapsed() <= Duration::from_millis(200), "{:?}", start.elapsed());
        // But a round of new peers is waited for.
        let round = async {
            tokio::time::sleep(Duration::from_millis(110)).await;
            busy.run(views).await
        };
        let network = tokio::select! {
            ended = round => panic!("{ended:?}"),
            snapshot = observer.snapshot_of_peers() => snapshot.network.unwrap(),
        };
        assert!(network.waiting.is_some());
    }

    #[tokio::test(start_paused = true)]
    async fn who_waits_for_changes_is_woken_once_for_each() {
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
                assert!(woken <= 2, "the phase, and the status that nobody has seen yet");
            }
            assert!(woken >= 1);
            sender.send_replace(Arc::default());
        }
    }
}
