//! A node: a machine with clocks and a disk, and a daemon that is restarted whenever it ends.

use std::future::Future;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::task::Poll;
use std::time::{Duration, SystemTime};

use flannel_core::lease::{LeaseAttrs, Offer, View};
use flannel_core::subnet::LeaseEnd;
use flannel_core::{Error, Lease, SubnetManager, Subnets};
use flannel_subnet::{Cache, Clock, HolderId, Identity, LocalManager};
use tokio::sync::{Notify, watch};
use tokio::task::AbortHandle;
use tokio::time::sleep;

use crate::clock::NodeClock;
use crate::fault::Fault;
use crate::store::{Run, SharedStore, addresses};
use crate::transport::{Link, Transport};
use crate::{MARGIN, TTL};

/// Times are rounded to milliseconds, in milliseconds.
const ROUNDING: i64 = 5;

/// The state that may survive a crash.
#[derive(Debug, Clone)]
pub(crate) struct Disk {
    pub(crate) holder: HolderId,
    /// As in `subnet.env`, with the sequence number at which it was last known to be held.
    pub(crate) previous: Option<(Subnets, u64)>,
    /// If it is `None`, the node has no cache, so each start needs the store.
    pub(crate) cache: Option<Cache>,
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
    /// The clocks of earlier boots.
    past: Mutex<Vec<Arc<NodeClock>>>,
    /// The own lease in the cache when the run began.
    begun_with: Mutex<Option<Subnets>>,
    /// The error of the wall clock when the own lease in the cache was last written, as confirmed.
    written_error: Mutex<i64>,
    pub(crate) disk: Mutex<Disk>,
    pub(crate) daemon: Mutex<Option<Daemon>>,
    pub(crate) publish: Notify,
    /// Its reservation has the attributes of another host, so only an operator can help.
    pub(crate) waits_for_operator: AtomicBool,
    power: Mutex<Option<AbortHandle>>,
    /// The wall clock at the last end of the machine.
    ended: Mutex<Option<SystemTime>>,
    runs: Mutex<u64>,
}

/// An ID that the seed determines, as everything in the simulation.
pub(crate) fn random_holder() -> HolderId {
    HolderId(fastrand::u64(1..=i64::MAX as u64))
}

/// Half of the nodes have a cache.
pub(crate) fn new_cache(node: usize) -> Option<Cache> {
    node.is_multiple_of(2).then(Cache::in_memory)
}

impl Node {
    pub(crate) fn new(id: usize) -> Self {
        Self {
            id,
            link: Arc::new(Link::new()),
            clock: Mutex::new(Arc::new(NodeClock::random())),
            past: Mutex::default(),
            begun_with: Mutex::default(),
            written_error: Mutex::default(),
            disk: Mutex::new(Disk {
                holder: random_holder(),
                previous: None,
                cache: new_cache(id),
            }),
            daemon: Mutex::new(None),
            publish: Notify::new(),
            waits_for_operator: AtomicBool::new(false),
            power: Mutex::new(None),
            ended: Mutex::new(None),
            runs: Mutex::new(0),
        }
    }

    pub(crate) fn is_on(&self) -> bool {
        self.power.lock().unwrap().is_some()
    }

    /// Starts the machine. Its wall clock is right, or is restored from the last end.
    pub(crate) fn power_on(self: &Arc<Self>, store: &SharedStore) {
        let clock = Arc::new(NodeClock::random());
        let old = std::mem::replace(&mut *self.clock.lock().unwrap(), Arc::clone(&clock));
        if let Some(wall) = self.ended.lock().unwrap().take()
            && fastrand::u8(..3) == 0
        {
            clock.restore(wall);
            store.count(Fault::WallRestored);
        }
        self.past.lock().unwrap().push(old);
        let node = Arc::clone(self);
        let store = Arc::clone(store);
        let link = Arc::clone(&self.link);
        let life = tokio::spawn(while_running(link, async move { node.live(&store).await }));
        *self.power.lock().unwrap() = Some(life.abort_handle());
    }

    pub(crate) fn crash(&self, store: &SharedStore) {
        if let Some(power) = self.power.lock().unwrap().take() {
            power.abort();
        }
        *self.ended.lock().unwrap() = Some(self.clock.lock().unwrap().wall());
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

    /// Whether the end of its lease is known by the wall clock only, and that clock, compared with
    /// true time, was set back since the cache was written. No node can notice that.
    pub(crate) fn is_misled(&self) -> bool {
        let daemon = self.daemon.lock().unwrap();
        let relies = daemon.as_ref().is_some_and(|daemon| daemon.manager.relies_on_wall_clock());
        let error = self.clock.lock().unwrap().error();
        relies && error < *self.written_error.lock().unwrap() - ROUNDING
    }

    /// Notes what the cache has when a run begins.
    fn note_cache(&self, store: &SharedStore, run: &Run, disk: &Disk) {
        *self.begun_with.lock().unwrap() = None;
        let Some(Ok(saved)) = disk.cache.as_ref().map(Cache::load) else { return };
        let Some((lease, _)) = &saved.own else { return };
        *self.begun_with.lock().unwrap() = Some(lease.subnets);
        store.stats().begins_with(run, &lease.subnets);
        let (Some(end), Some(expires)) = (&saved.own_end, lease.expires) else { return };
        let past = self.past.lock().unwrap();
        let now = self.clock.lock().unwrap();
        let clock = past.iter().chain([&*now]).find(|clock| clock.id() == end.boot).unwrap();
        let left = expires.duration_since(saved.written).unwrap_or_default();
        *self.written_error.lock().unwrap() = clock.error_at(saved.written, left, end.time);
    }

    fn attrs(&self) -> LeaseAttrs {
        LeaseAttrs::from(Offer::new(addresses(self.id)).with_kind("vxlan"))
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
        let transport =
            Transport { store: Arc::clone(store), link: Arc::clone(&self.link), run: run.clone() };
        let identity = Identity {
            holder: disk.holder,
            previous: disk.previous.map(|(subnets, _)| subnets),
            local_addresses: Vec::new(),
        };
        let clock = Arc::clone(&*self.clock.lock().unwrap());
        let mut manager = LocalManager::with_clock(Arc::new(transport), identity, clock)
            .with_ttl(TTL)
            .with_renew_margin(MARGIN);
        if let Some(cache) = &disk.cache {
            manager = manager.with_opened_cache(cache.clone());
        }
        let manager = Arc::new(manager);
        self.note_cache(store, &run, disk);
        let views = manager.watch_leases().await.unwrap();
        *self.daemon.lock().unwrap() =
            Some(Daemon { run: run.clone(), manager: Arc::clone(&manager), lease: None, views });
        let begin = store.stats().sequence();
        let acquired = manager.acquire_lease(&self.attrs()).await;
        let is_reserved = |error: &Error| {
            matches!(error, Error::Refused { .. }) && error.to_string().contains("a reservation")
        };
        let refused = acquired.as_ref().is_err_and(is_reserved);
        self.waits_for_operator.store(refused, Ordering::Relaxed);
        let lease = match acquired {
            Ok(lease) => lease,
            Err(error) => {
                store.stats().note(|| format!("{run:?} has no lease: {error}"));
                return;
            }
        };
        if manager.relies_on_wall_clock() {
            store.count(Fault::CachedLease);
        }
        let since = self.check_acquired(store, &run, disk, &lease, begin);
        self.hold(store, &run, &manager, lease.clone(), since).await;
    }

    /// A node that comes back gets its previous lease, unless another node had it meanwhile. If the
    /// lease was deleted, or expired while the node used its cache, it gets the store's lease with
    /// its holder ID, from a late write of an earlier run. Returns the time since which it has the
    /// lease.
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
        let found = stats.first_write(self.id, &lease.subnets).is_some_and(|first| first <= begin)
            || stats.came_late(self.id, &lease.subnets);
        if let Some((previous, since)) = disk.previous
            && previous != lease.subnets
            && lease.expires.is_some()
            && !stats.others_wrote(self.id, &previous, since)
            && store.fits_every_config(&previous)
            && !(found && (stats.was_ever_deleted(&previous) || disk.cache.is_some()))
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
            // After a start from the cache, a late write of an earlier run, which made the store
            // know the holder again, hides that the key had expired.
            Ok(LeaseEnd::Deleted) => {
                let from_cache = *self.begun_with.lock().unwrap() == Some(*subnets);
                stats.was_evicted(run, subnets)
                    || (from_cache && stats.wrote_another(self.id, subnets))
            }
            // A reservation has no holder, so a late write of our own looks like another node's.
            Ok(LeaseEnd::Taken { by }) if by.ends_with("as a reservation") => true,
            // After an operator has deleted the key, a late write of our own under an earlier
            // holder ID can be the next one.
            Ok(LeaseEnd::Taken { .. }) => {
                stats.others_wrote(self.id, subnets, since) || stats.was_evicted(run, subnets)
            }
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
