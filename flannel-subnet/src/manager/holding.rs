//! The lease that this node holds, and the ownership of its subnets.
//!
//! The ownership ends one time to live after the last confirmed renewal was *sent*. The store
//! counts from a later moment, so it does not expire the lease earlier. A margin is subtracted for
//! the drift between two clocks.
//!
//! After a restart of the machine, the rest of a lease from the cache is known by the wall clock
//! only, which may be wrong and be set later. Until the store confirms such a lease, it ends when
//! either clock passes its end.

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
    /// It comes from the cache. This process has not asked the store for it.
    pub(super) cached: bool,
}

/// The time for which a lease is held, in boot time.
#[derive(Debug, Clone, Copy)]
pub(super) struct LeaseTerm {
    /// The time at which the last confirmed write or renewal was sent.
    pub(super) sent: Duration,
    pub(super) ttl: Duration,
    /// An end by wall clock, which counts too; `None`: boot time alone counts, as after each answer
    /// of the store.
    pub(super) wall_end: Option<SystemTime>,
}

impl LeaseTerm {
    /// A term that the store has confirmed.
    pub(super) fn confirmed(sent: Duration, ttl: Duration) -> Self {
        Self { sent, ttl, wall_end: None }
    }

    /// A term of a lease from the cache. `None`: the lease has no end.
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

    /// The remaining time by the clock that reaches the end first; `None`: one has passed it.
    fn left(&self, clock: &dyn Clock) -> Option<Duration> {
        let by_boottime = self.end().checked_sub(clock.boottime())?;
        let left = match self.wall_end {
            Some(end) => by_boottime.min(end.duration_since(clock.wall()).ok()?),
            None => by_boottime,
        };
        Some(left).filter(|left| !left.is_zero())
    }

    /// The end by wall clock, or the present if it has passed; `None`: no clock can reach it.
    pub(super) fn expires(&self, clock: &dyn Clock) -> Option<SystemTime> {
        clock.wall().checked_add(self.left(clock).unwrap_or_default())
    }

    /// Ends the term now if the wall clock has passed its end, so that no later setting of the
    /// clock brings it back. Returns whether it did.
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

/// The state of a manager's own lease.
#[derive(Debug, Clone)]
pub(super) enum State {
    NotAcquired,
    Held(HeldLease),
    Ended(SystemTime, LeaseEnd),
}

impl State {
    fn lease(&self) -> Option<&HeldLease> {
        match self {
            Self::Held(lease) => Some(lease),
            Self::NotAcquired | Self::Ended(..) => None,
        }
    }

    /// Ends a term whose end the wall clock has passed. Returns whether it did.
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

/// The lease of one manager. Every change is published.
#[derive(Debug)]
pub(super) struct Holding {
    state: watch::Sender<State>,
    ownership: watch::Sender<Ownership>,
    clock: Arc<dyn Clock>,
    /// The task that publishes the end of the lease. It runs from the first lease on.
    follower: OnceLock<Task>,
}

impl Holding {
    pub(super) fn new(clock: Arc<dyn Clock>) -> Self {
        let (state, ownership) = (State::NotAcquired, Ownership::NotAcquired);
        let (state, ownership) = (watch::channel(state).0, watch::channel(ownership).0);
        Self { state, ownership, clock, follower: OnceLock::new() }
    }

    pub(super) fn get(&self) -> Option<HeldLease> {
        self.state.borrow().lease().cloned()
    }

    pub(super) fn term(&self) -> Option<LeaseTerm> {
        self.state.borrow().lease()?.term
    }

    /// The end of the held lease has passed.
    pub(super) fn has_lapsed(&self) -> bool {
        self.term().is_some_and(|term| term.left(&*self.clock).is_none())
    }

    /// The remaining time unless the lease is renewed; `None` if none is held or it has no end.
    pub(super) fn remaining(&self) -> Option<Duration> {
        self.term()?.left(&*self.clock)
    }

    /// Sets the held lease.
    pub(super) fn set(&self, lease: HeldLease) {
        self.state.send_replace(State::Held(lease));
        self.publish();
        self.follower.get_or_init(|| {
            let (state, ownership) = (self.state.clone(), self.ownership.clone());
            Task::spawn(follow(state, ownership, Arc::clone(&self.clock)))
        });
    }

    /// Notes a confirmed renewal, unless a later request was confirmed already.
    pub(super) fn renew(&self, term: LeaseTerm) {
        self.state.send_modify(|state| {
            if let State::Held(HeldLease { term: Some(old), .. }) = state
                && old.sent <= term.sent
            {
                *old = term;
            }
        });
        self.publish();
    }

    /// Ends the lease.
    pub(super) fn end(&self, end: LeaseEnd) {
        self.state.send_replace(State::Ended(self.clock.wall(), end));
        self.publish();
    }

    /// The ownership of the subnets at this moment.
    pub(super) fn ownership_now(&self) -> Ownership {
        self.state.send_if_modified(|state| state.cut(&*self.clock));
        ownership(&self.state.borrow(), &*self.clock)
    }

    pub(super) fn ownership(&self) -> watch::Receiver<Ownership> {
        self.ownership.subscribe()
    }

    pub(super) fn subscribe(&self) -> watch::Receiver<State> {
        self.state.subscribe()
    }

    fn publish(&self) {
        publish(&self.ownership, self.ownership_now());
    }
}

fn ownership(state: &State, clock: &dyn Clock) -> Ownership {
    let lease = match state {
        State::NotAcquired => return Ownership::NotAcquired,
        State::Ended(since, end) => {
            return Ownership::Lost { since: *since, why: Loss::Ended(end.clone()) };
        }
        State::Held(lease) => lease,
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
    let near = |a: SystemTime, b: SystemTime| {
        a.duration_since(b).or_else(|_| b.duration_since(a)).is_ok_and(|apart| apart < TOLERANCE)
    };
    published.send_if_modified(|old| {
        let same = match (&*old, &now) {
            (Ownership::Held { until: Some(a) }, Ownership::Held { until: Some(b) }) => {
                near(*a, *b)
            }
            (Ownership::Lost { since: a, why: x }, Ownership::Lost { since: b, why: y }) => {
                x == y && near(*a, *b)
            }
            (old, now) => old == now,
        };
        if !same {
            *old = now;
        }
        !same
    });
}

/// Publishes the end of the lease when it comes, and a new wall time of the end when the clock was
/// set.
async fn follow(
    states: watch::Sender<State>,
    published: watch::Sender<Ownership>,
    clock: Arc<dyn Clock>,
) {
    let mut state = states.subscribe();
    loop {
        states.send_if_modified(|state| state.cut(&*clock));
        let (now, end) = {
            let state = state.borrow_and_update();
            let term = state.lease().and_then(|lease| lease.term);
            (ownership(&state, &*clock), term.map(|term| term.end()))
        };
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
            // `states` is one of its senders.
            _ = state.changed() => (),
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
        let (epoch, year) = (SystemTime::UNIX_EPOCH, Duration::from_secs(365 * 86_400));
        let ttl = Duration::from_secs(1000);
        let (start, wall) = (Instant::now(), Mutex::new(epoch));
        let clock = Arc::new(SetClock { start, wall, set: Notify::new() });
        let holding = Holding::new(Arc::clone(&clock) as _);
        let mut ownership = holding.ownership();
        let term = Some(LeaseTerm::confirmed(Duration::ZERO, ttl));
        let subnets = "10.1.5.0-24".parse().unwrap();
        let (attrs, revision) = (LeaseAttrs::default(), Revision(1));
        holding.set(HeldLease { subnets, attrs, revision, term, cached: false });
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
