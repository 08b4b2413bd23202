//! The daemon's knowledge about itself, for health, metrics, the control socket and systemd.
//!
//! Observers read the state when they need it. The daemon notes facts when they change. A
//! [`Snapshot`] joins them with the latest status, view and store status.

mod changes;
mod running;
mod snapshot;
mod trials;

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, SystemTime};

use flannel_api::ProblemCause;
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
use changes::Changes;
use running::CountersRead;
pub(crate) use running::{FirewallRules, Running};
pub(crate) use snapshot::{Counters, Facts, NetworkSnapshot, Snapshot};
use trials::{Answer, Trials};

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
        Changes::of(self)
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
    pub(crate) async fn try_config(&self, config: Config) -> Option<Answer> {
        self.known().running.as_ref()?;
        self.0.trials.ask(config).await
    }

    /// Answers [`Self::try_config`] by `check`, until the future is dropped.
    pub(crate) async fn answer_trials(
        &self,
        check: impl AsyncFn(&Config) -> Result<Vec<ProblemCause>, Error>,
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
pub(crate) mod tests;
