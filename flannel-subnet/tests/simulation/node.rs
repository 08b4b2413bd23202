//! A node: a machine with clocks and a disk, and a daemon that is restarted whenever it ends.

use std::future::Future;
use std::pin::pin;
use std::sync::{Arc, Mutex};
use std::task::Poll;
use std::time::Duration;

use flannel_core::lease::{LeaseAttrs, Offer, View};
use flannel_core::subnet::LeaseEnd;
use flannel_core::{Error, Lease, SubnetManager, Subnets};
use flannel_subnet::{HolderId, Identity, LocalManager};
use tokio::sync::{Notify, watch};
use tokio::task::AbortHandle;
use tokio::time::sleep;

use crate::clock::NodeClock;
use crate::store::{Run, SharedStore, addresses};
use crate::transport::{Link, Transport};
use crate::{MARGIN, TTL};

/// The state that may survive a crash.
#[derive(Debug, Clone)]
pub(crate) struct Disk {
    pub(crate) holder: HolderId,
    /// As in `subnet.env`, with the sequence number at which it was last known to be held.
    pub(crate) previous: Option<(Subnets, u64)>,
}

/// A running daemon.
#[derive(Debug)]
pub(crate) struct Daemon {
    pub(crate) run: Run,
    pub(crate) manager: Arc<LocalManager>,
    pub(crate) lease: Option<Subnets>,
    pub(crate) views: watch::Receiver<View>,
}

#[derive(Debug)]
pub(crate) struct Node {
    pub(crate) id: usize,
    pub(crate) link: Arc<Link>,
    pub(crate) clock: Mutex<Arc<NodeClock>>,
    pub(crate) disk: Mutex<Disk>,
    pub(crate) daemon: Mutex<Option<Daemon>>,
    pub(crate) publish: Notify,
    power: Mutex<Option<AbortHandle>>,
    runs: Mutex<u64>,
}

/// An ID that the seed determines, as everything in the simulation.
pub(crate) fn random_holder() -> HolderId {
    HolderId(fastrand::u64(1..=i64::MAX as u64))
}

impl Node {
    pub(crate) fn new(id: usize) -> Self {
        Self {
            id,
            link: Arc::new(Link::new()),
            clock: Mutex::new(Arc::new(NodeClock::random())),
            disk: Mutex::new(Disk { holder: random_holder(), previous: None }),
            daemon: Mutex::new(None),
            publish: Notify::new(),
            power: Mutex::new(None),
            runs: Mutex::new(0),
        }
    }

    pub(crate) fn is_on(&self) -> bool {
        self.power.lock().unwrap().is_some()
    }

    pub(crate) fn power_on(self: &Arc<Self>, store: &SharedStore) {
        *self.clock.lock().unwrap() = Arc::new(NodeClock::random());
        let (node, store) = (Arc::clone(self), Arc::clone(store));
        let link = Arc::clone(&self.link);
        let life = tokio::spawn(while_running(link, async move { node.live(&store).await }));
        *self.power.lock().unwrap() = Some(life.abort_handle());
    }

    pub(crate) fn crash(&self, store: &SharedStore) {
        if let Some(power) = self.power.lock().unwrap().take() {
            power.abort();
        }
        self.stopped(store);
    }

    fn stopped(&self, store: &SharedStore) {
        *self.daemon.lock().unwrap() = None;
        store.stats().running.remove(&self.id);
    }

    /// The subnets that this node owns at present, by its own state.
    pub(crate) fn owns(&self) -> Option<(Subnets, Run)> {
        let daemon = self.daemon.lock().unwrap();
        let daemon = daemon.as_ref()?;
        let owner = daemon.manager.ownership_now().is_held();
        daemon.lease.filter(|_| owner).map(|subnets| (subnets, daemon.run.clone()))
    }

    fn attrs(&self) -> LeaseAttrs {
        LeaseAttrs::from(Offer {
            public: addresses(self.id),
            kind: "vxlan".into(),
            ..Offer::default()
        })
    }

    /// Restarts the daemon whenever it ends, like a service manager.
    async fn live(&self, store: &SharedStore) {
        loop {
            let number = {
                let mut runs = self.runs.lock().unwrap();
                *runs += 1;
                *runs
            };
            let disk = self.disk.lock().unwrap().clone();
            let run = Run { node: self.id, number, holder: disk.holder };
            store.stats().running.insert(self.id, run.clone());
            self.daemon(store, run, &disk).await;
            self.stopped(store);
            sleep(Duration::from_millis(fastrand::u64(1_000..15_000))).await;
        }
    }

    /// One run of the daemon.
    async fn daemon(&self, store: &SharedStore, run: Run, disk: &Disk) {
        let (store_, link) = (Arc::clone(store), Arc::clone(&self.link));
        let transport = Transport { store: store_, link, run: run.clone() };
        let identity = Identity {
            holder: disk.holder,
            previous: disk.previous.map(|(subnets, _)| subnets),
            local_addresses: Vec::new(),
        };
        let clock = Arc::clone(&*self.clock.lock().unwrap());
        let manager = LocalManager::with_clock(Arc::new(transport), identity, clock);
        let manager = Arc::new(manager.with_ttl(TTL).with_renew_margin(MARGIN));
        let views = manager.watch_leases().await.unwrap();
        *self.daemon.lock().unwrap() =
            Some(Daemon { run: run.clone(), manager: Arc::clone(&manager), lease: None, views });
        let begin = store.stats().sequence();
        let lease = match manager.acquire_lease(&self.attrs()).await {
            Ok(lease) => lease,
            Err(error) => {
                store.stats().note(|| format!("{run:?} has no lease: {error}"));
                return;
            }
        };
        let since = self.check_acquired(store, &run, disk, &lease, begin);
        self.hold(store, &run, &manager, lease.clone(), since).await;
    }

    /// A node that comes back gets its previous lease, unless another node had it meanwhile. If the
    /// lease was deleted, it gets the store's lease with its holder ID, from a late write of an
    /// earlier run. Returns the time since which it has the lease.
    fn check_acquired(
        &self,
        store: &SharedStore,
        run: &Run,
        disk: &Disk,
        lease: &Lease,
        begin: u64,
    ) -> u64 {
        let mut stats = store.stats();
        stats.note(|| format!("{run:?} acquired {}", lease.subnets));
        let found = stats.first_write(self.id, &lease.subnets).is_some_and(|first| first <= begin);
        if let Some((previous, since)) = disk.previous
            && previous != lease.subnets
            && lease.expires.is_some()
            && !stats.others_wrote(self.id, &previous, since)
            && store.fits_every_config(&previous)
            && !(found && stats.was_ever_deleted(&previous))
        {
            stats.fail(format!(
                "{run:?} had {previous}, which no other node had since, but got {}",
                lease.subnets
            ));
        }
        // An overlapping key that a later node left counts as written since.
        let since =
            stats.first_write(self.id, &lease.subnets).map_or(begin, |first| first.min(begin));
        drop(stats);
        if let Some(daemon) = &mut *self.daemon.lock().unwrap() {
            daemon.lease = Some(lease.subnets);
        }
        self.disk.lock().unwrap().previous = Some((lease.subnets, since));
        since
    }

    async fn hold(
        &self,
        store: &SharedStore,
        run: &Run,
        manager: &LocalManager,
        lease: Lease,
        since: u64,
    ) {
        let mut held = lease.clone();
        let publish = async {
            loop {
                self.publish.notified().await;
                let mut attrs = self.attrs();
                attrs.preferred.data.v4 =
                    Some(format!(r#"{{"VNI":{}}}"#, fastrand::u16(..)).into());
                match manager.publish(&held, &attrs).await {
                    Ok(lease) => held = lease,
                    Err(error) => return error,
                }
            }
        };
        tokio::select! {
            biased;
            end = manager.hold_lease(&lease) => {
                self.check_end(store, run, &lease.subnets, since, &end);
            }
            error = publish => store.stats().note(|| format!("{run:?} ends: {error}")),
        }
    }

    /// Checks that a lease ends for a reason.
    fn check_end(
        &self,
        store: &SharedStore,
        run: &Run,
        subnets: &Subnets,
        since: u64,
        end: &Result<LeaseEnd, Error>,
    ) {
        let mut stats = store.stats();
        stats.note(|| format!("{run:?} held {subnets} until {end:?}"));
        let justified = match end {
            Ok(LeaseEnd::Deleted) => stats.was_evicted(run, subnets),
            // A reservation has no holder, so a late write of our own looks like another node's.
            Ok(LeaseEnd::Taken { by }) if by.ends_with("as a reservation") => true,
            Ok(LeaseEnd::Taken { .. }) => stats.others_wrote(self.id, subnets, since),
            Ok(LeaseEnd::Expired) => true,
            _ => false,
        };
        if !justified {
            stats.fail(format!("{run:?}: {subnets} ended without a reason: {end:?}"));
        }
    }
}

/// Runs the future, except while the machine is suspended.
async fn while_running<F: Future>(link: Arc<Link>, future: F) -> F::Output {
    let mut future = pin!(future);
    loop {
        link.running().await;
        let mut suspended = pin!(link.until(|now| now.suspended));
        let output = std::future::poll_fn(|cx| {
            if suspended.as_mut().poll(cx).is_ready() {
                return Poll::Ready(None);
            }
            future.as_mut().poll(cx).map(Some)
        });
        if let Some(output) = output.await {
            return output;
        }
    }
}
