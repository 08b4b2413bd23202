//! The lease that this node holds, and the ownership of its subnets.
//!
//! The ownership ends one time to live after the last confirmed renewal was *sent*. The store
//! counts from a later moment, so it does not expire the lease earlier. A margin is subtracted for
//! the drift between two clocks.
//!
//! After a restart of the machine, the remaining time of a lease from the cache is known by the
//! wall clock only, which may be wrong and be set later. Until the store confirms such a lease, it
//! ends when either clock passes its end.

use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime};

use flannel_core::Subnets;
use flannel_core::lease::{LeaseAttrs, Revision};
use flannel_core::runtime::{Task, or_never};
use flannel_core::subnet::{LeaseEnd, Loss, Ownership};
use tokio::sync::watch;

use crate::clock::Clock;
use crate::files::cache::SavedEnd;

/// The drift between two clocks is at most one part in this many: the kernel slews a clock by up to
/// 500 ppm.
const DRIFT: u32 = 1000;

/// Ends that differ by less count as equal, because each is computed from two clocks.
const TOLERANCE: Duration = Duration::from_secs(1);

/// The lease that this node holds.
#[derive(Debug, Clone)]
pub(super) struct HeldLease {
    pub(super) subnets: Subnets,
    pub(super) attrs: LeaseAttrs,
    pub(super) revision: Revision,
    /// `None` for a reservation, which has no end.
    pub(super) term: Option<LeaseTerm>,
    /// It comes from the cache, and this process has not requested it from the store.
    pub(super) cached: bool,
}

/// The time for which a lease is held, in boot time.
#[derive(Debug, Clone, Copy)]
pub(super) struct LeaseTerm {
    /// The time at which the last confirmed write or renewal was sent.
    pub(super) sent: Duration,
    pub(super) ttl: Duration,
    /// The end by wall clock, if that counts too. After each answer of the store it is `None`, and
    /// only boot time counts.
    pub(super) wall_end: Option<SystemTime>,
}

impl LeaseTerm {
    /// A term that the store has confirmed.
    pub(super) fn confirmed(sent: Duration, ttl: Duration) -> Self {
        Self { sent, ttl, wall_end: None }
    }

    /// A term of a lease from the cache, or `None` if the lease has no end.
    pub(super) fn cached(end: SavedEnd, clock: &dyn Clock) -> Option<Self> {
        let sent = clock.boottime();
        match end {
            SavedEnd::Never => None,
            SavedEnd::SameBoot(end) => Some(Self::confirmed(sent, end.saturating_sub(sent))),
            SavedEnd::Wall(end) => {
                let ttl = end.duration_since(clock.wall()).unwrap_or_default();
                Some(Self { sent, ttl, wall_end: Some(end) })
            }
        }
    }

    /// The remaining time by the clock that reaches the end first, or `None` if a clock has passed
    /// the end.
    fn left(&self, clock: &dyn Clock) -> Option<Duration> {
        let by_boottime = self.end().checked_sub(clock.boottime())?;
        let left = match self.wall_end {
            Some(end) => by_boottime.min(end.duration_since(clock.wall()).ok()?),
            None => by_boottime,
        };
        Some(left).filter(|left| !left.is_zero())
    }

    /// The end by wall clock, or the present if it has passed. `None` if no clock can reach it.
    pub(super) fn expires(&self, clock: &dyn Clock) -> Option<SystemTime> {
        clock.wall().checked_add(self.left(clock).unwrap_or_default())
    }

    /// Ends the term now if the wall clock has passed its end, so that the term stays ended when
    /// the clock is set back later. Returns whether it ended the term.
    fn cut(&mut self, clock: &dyn Clock) -> bool {
        let is_over = self.wall_end.is_some_and(|end| end <= clock.wall());
        if is_over {
            let ttl = clock.boottime().saturating_sub(self.sent);
            *self = Self::confirmed(self.sent, self.ttl.min(ttl));
        }
        is_over
    }

    /// The end, a thousandth early for the drift between the store's clock and ours.
    pub(super) fn end(&self) -> Duration {
        self.sent.saturating_add(self.ttl - self.ttl / DRIFT)
    }

    /// The time of the next renewal: `margin` before the end, but not in the first third.
    pub(super) fn renewal(&self, margin: Duration) -> Duration {
        self.sent.saturating_add(self.ttl.saturating_sub(margin).max(self.ttl / 3))
    }
}

/// The own lease of a manager.
#[derive(Debug, Clone)]
pub(super) enum OwnLease {
    NotAcquired,
    Held(HeldLease),
    Ended { since: SystemTime, why: LeaseEnd },
}

impl OwnLease {
    fn lease(&self) -> Option<&HeldLease> {
        match self {
            Self::Held(lease) => Some(lease),
            Self::NotAcquired | Self::Ended { .. } => None,
        }
    }

    /// Ends the term if the wall clock has passed its end. Returns whether it ended the term.
    fn cut(&mut self, clock: &dyn Clock) -> bool {
        let Self::Held(HeldLease { subnets, term: Some(term), .. }) = self else { return false };
        let was_cut = term.cut(clock);
        if was_cut {
            tracing::warn!(
                %subnets,
                "the wall clock has passed the end of the lease from the cache, this node does not \
                 own the subnets until the store confirms them"
            );
        }
        was_cut
    }
}

/// The own lease of a manager and the ownership of its subnets. Every change is published.
#[derive(Debug)]
pub(super) struct Holding {
    own_lease: watch::Sender<OwnLease>,
    ownership: watch::Sender<Ownership>,
    clock: Arc<dyn Clock>,
    /// The task that publishes the end of the lease. It runs from the first lease on.
    follower: OnceLock<Task>,
}

impl Holding {
    pub(super) fn new(clock: Arc<dyn Clock>) -> Self {
        Self {
            own_lease: watch::channel(OwnLease::NotAcquired).0,
            ownership: watch::channel(Ownership::NotAcquired).0,
            clock,
            follower: OnceLock::new(),
        }
    }

    pub(super) fn get(&self) -> Option<HeldLease> {
        self.own_lease.borrow().lease().cloned()
    }

    pub(super) fn term(&self) -> Option<LeaseTerm> {
        self.own_lease.borrow().lease()?.term
    }

    /// The end of the held lease has passed.
    pub(super) fn has_lapsed(&self) -> bool {
        self.term().is_some_and(|term| term.left(&*self.clock).is_none())
    }

    /// The remaining time unless the lease is renewed. `None` if no lease is held, or if the lease
    /// has no end.
    pub(super) fn remaining(&self) -> Option<Duration> {
        self.term()?.left(&*self.clock)
    }

    /// Sets the held lease.
    pub(super) fn set(&self, lease: HeldLease) {
        self.own_lease.send_replace(OwnLease::Held(lease));
        self.publish();
        self.follower.get_or_init(|| {
            let own_leases = self.own_lease.clone();
            let published = self.ownership.clone();
            Task::spawn(follow(own_leases, published, Arc::clone(&self.clock)))
        });
    }

    /// Notes a confirmed renewal, unless a later request was confirmed already.
    pub(super) fn renew(&self, term: LeaseTerm) {
        self.own_lease.send_modify(|own_lease| {
            if let OwnLease::Held(HeldLease { term: Some(old), .. }) = own_lease
                && old.sent <= term.sent
            {
                *old = term;
            }
        });
        self.publish();
    }

    /// Ends the lease.
    pub(super) fn end(&self, why: LeaseEnd) {
        self.own_lease.send_replace(OwnLease::Ended { since: self.clock.wall(), why });
        self.publish();
    }

    /// The ownership of the subnets at this moment.
    pub(super) fn ownership_now(&self) -> Ownership {
        self.own_lease.send_if_modified(|own_lease| own_lease.cut(&*self.clock));
        ownership(&self.own_lease.borrow(), &*self.clock)
    }

    pub(super) fn ownership(&self) -> watch::Receiver<Ownership> {
        self.ownership.subscribe()
    }

    pub(super) fn subscribe(&self) -> watch::Receiver<OwnLease> {
        self.own_lease.subscribe()
    }

    fn publish(&self) {
        publish(&self.ownership, self.ownership_now());
    }
}

fn ownership(own_lease: &OwnLease, clock: &dyn Clock) -> Ownership {
    let lease = match own_lease {
        OwnLease::NotAcquired => return Ownership::NotAcquired,
        OwnLease::Ended { since, why } => {
            return Ownership::Lost { since: *since, why: Loss::Ended(why.clone()) };
        }
        OwnLease::Held(lease) => lease,
    };
    let Some(term) = lease.term else { return Ownership::Held { until: None } };
    match term.left(clock) {
        Some(_) => Ownership::Held { until: term.expires(clock) },
        None => {
            let wall = clock.wall();
            let ago = clock.boottime().saturating_sub(term.end());
            Ownership::Lost { since: wall.checked_sub(ago).unwrap_or(wall), why: Loss::Unconfirmed }
        }
    }
}

fn publish(published: &watch::Sender<Ownership>, now: Ownership) {
    published.send_if_modified(|old| {
        let has_changed = !are_equal(old, &now);
        if has_changed {
            *old = now;
        }
        has_changed
    });
}

/// Whether two ownerships are equal, apart from a [`TOLERANCE`] of their times.
fn are_equal(one: &Ownership, other: &Ownership) -> bool {
    match (one, other) {
        (Ownership::Held { until: Some(a) }, Ownership::Held { until: Some(b) }) => {
            are_close(*a, *b)
        }
        (Ownership::Lost { since: a, why: x }, Ownership::Lost { since: b, why: y }) => {
            x == y && are_close(*a, *b)
        }
        (one, other) => one == other,
    }
}

fn are_close(a: SystemTime, b: SystemTime) -> bool {
    a.duration_since(b).or_else(|_| b.duration_since(a)).is_ok_and(|apart| apart < TOLERANCE)
}

/// Publishes the end of the lease when it comes, and a new wall time of the end when the clock was
/// set.
async fn follow(
    own_leases: watch::Sender<OwnLease>,
    published: watch::Sender<Ownership>,
    clock: Arc<dyn Clock>,
) {
    let mut changes = own_leases.subscribe();
    loop {
        own_leases.send_if_modified(|own_lease| own_lease.cut(&*clock));
        let own_lease = changes.borrow_and_update().clone();
        let now = ownership(&own_lease, &*clock);
        let end = own_lease.lease().and_then(|lease| lease.term).map(|term| term.end());
        let until = match &now {
            Ownership::Held { until } => *until,
            _ => None,
        };
        publish(&published, now);
        let over = end.zip(until).map(async |(end, until)| {
            tokio::select! {
                () = clock.sleep_until(end) => (),
                () = clock.sleep_until_wall(until) => (),
            }
        });
        tokio::select! {
            () = or_never(over) => (),
            // It never fails, because this task owns one of the senders.
            _ = changes.changed() => (),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use std::sync::Mutex;

    use async_trait::async_trait;
    use tokio::sync::Notify;
    use tokio::time::{Instant, sleep_until};

    /// Tokio's time, with a wall clock that a test sets.
    #[derive(Debug)]
    struct SetClock {
        start: Instant,
        wall: Mutex<SystemTime>,
        set: Notify,
    }

    impl SetClock {
        fn set(&self, wall: SystemTime) {
            *self.wall.lock().unwrap() = wall;
            self.set.notify_waiters();
        }
    }

    #[async_trait]
    impl Clock for SetClock {
        fn boottime(&self) -> Duration {
            self.start.elapsed()
        }

        fn wall(&self) -> SystemTime {
            *self.wall.lock().unwrap() + self.start.elapsed()
        }

        async fn sleep_until(&self, boottime: Duration) {
            sleep_until(self.start + boottime).await;
        }

        async fn sleep_until_wall(&self, _: SystemTime) {
            self.set.notified().await;
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_end_is_published_again_when_the_clock_is_set() {
        let epoch = SystemTime::UNIX_EPOCH;
        let year = Duration::from_secs(365 * 86_400);
        let ttl = Duration::from_secs(1000);
        let start = Instant::now();
        let clock = Arc::new(SetClock { start, wall: Mutex::new(epoch), set: Notify::new() });
        let holding = Holding::new(Arc::clone(&clock) as _);
        let mut ownership = holding.ownership();
        holding.set(HeldLease {
            subnets: "10.1.5.0-24".parse().unwrap(),
            attrs: LeaseAttrs::default(),
            revision: Revision(1),
            term: Some(LeaseTerm::confirmed(Duration::ZERO, ttl)),
            cached: false,
        });
        let end = Duration::from_secs(999);
        let held = |until| Ownership::Held { until: Some(until) };
        assert_eq!(*ownership.borrow_and_update(), held(epoch + end));
        tokio::task::yield_now().await;
        // A machine without a hardware clock learns the time.
        clock.set(epoch + 50 * year);
        ownership.changed().await.unwrap();
        assert_eq!(*ownership.borrow_and_update(), held(epoch + 50 * year + end));
        assert_eq!(start.elapsed(), Duration::ZERO);
        // The lease ends by boot time.
        ownership.changed().await.unwrap();
        let lost = Ownership::Lost { since: epoch + 50 * year + end, why: Loss::Unconfirmed };
        let published = ownership.borrow_and_update().clone();
        assert!(!published.is_held() && start.elapsed().abs_diff(end) < TOLERANCE, "{published:?}");
        assert!(matches!((&published, &lost),
            (Ownership::Lost { since: a, why: Loss::Unconfirmed }, Ownership::Lost { since: b, .. })
                if a.duration_since(*b).unwrap_or_default() < TOLERANCE));
    }
}
