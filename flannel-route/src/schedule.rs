//! The schedule: the times of snapshots, repairs, retries, and rechecks of lookups.
//!
//! Snapshots and repairs are rate-limited. Changes that come from leases are not.

use std::time::Duration;

use tokio::time::Instant;

use crate::engine::{Engine, Reads};
use crate::event_listener::EventListener;
use crate::rate_limiter::RateLimiter;

/// The usual period of complete comparisons.
const RESYNC: Duration = Duration::from_secs(300);
/// The period that means never: 34 years.
const NEVER: Duration = Duration::from_secs(1 << 30);
/// The pause before the first retry after a failure. Each further pause is twice as long.
const RETRY_FIRST: Duration = Duration::from_millis(100);
/// The longest pause before a retry.
const RETRY_LONGEST: Duration = Duration::from_secs(30);
/// The shortest time between two snapshots in the long run. Snapshots take at most a fifth of the
/// time.
const READ_GAP: Duration = Duration::from_millis(100);
/// After a rest of this length, as many cheap snapshots follow without a pause as fit into it.
const READ_REST: Duration = Duration::from_secs(1);
/// The shortest time between two rounds of repairs. Repairs take at most half of the time, because
/// Linux may need milliseconds for a nexthop object.
const REPAIR_GAP: Duration = Duration::from_millis(1);
/// After a rest of this length, repairs follow without a pause until they took half of it.
const REPAIR_REST: Duration = Duration::from_millis(100);
/// The shortest time between two rechecks of the lookups of plans. Rechecks take at most a fifth of
/// the time.
const RECHECK: Duration = Duration::from_secs(1);
/// The shortest time between two rechecks after a change of the link that carries the routes.
const RECHECK_URGENT: Duration = Duration::from_millis(100);

/// The work that the next round may do.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Permits {
    /// Open the stream of kernel events.
    pub(crate) listen: bool,
    /// Try the changes again that the kernel refused.
    pub(crate) retry: bool,
    /// Read the whole kernel, even if nothing is known to be wrong.
    pub(crate) resync: bool,
    /// Read the kernel if something is unread.
    pub(crate) read: bool,
    /// Repeat the stale lookups of plans.
    pub(crate) recheck: bool,
    /// Repeat the stale lookups of plans if they are urgent.
    pub(crate) recheck_urgent: bool,
}

/// The work that a round has done.
pub(crate) struct RoundSummary {
    pub(crate) started: Instant,
    /// The round took in kernel events.
    pub(crate) repairs: bool,
    /// The time that the lookups of plans took, or `None` if none was repeated.
    pub(crate) rechecked: Option<Duration>,
    /// An object failed that did not fail before.
    pub(crate) newly_failing: bool,
}

#[derive(Debug)]
pub(crate) struct Schedule {
    reads: Reads,
    resync: Duration,
    resync_next: Instant,
    /// The time of the next retry, or `None` if nothing fails.
    retry_next: Option<Instant>,
    /// The pause before the retry after that.
    retry_after: Duration,
    /// Whether the next retry reads the kernel. Every other retry only tries the refused changes.
    retry_by_reading: bool,
    read_limiter: RateLimiter,
    repair_limiter: RateLimiter,
    recheck_next: Instant,
    recheck_urgent_next: Instant,
}

impl Schedule {
    /// For `resync` see [`EngineOptions::resync`](crate::EngineOptions::resync).
    pub(crate) fn new(now: Instant, resync: Option<Duration>) -> Self {
        let resync = match resync {
            None => RESYNC,
            Some(Duration::ZERO) => NEVER,
            Some(period) => period.min(NEVER),
        };
        Self {
            reads: Reads::default(),
            resync,
            resync_next: now + resync,
            retry_next: None,
            retry_after: RETRY_FIRST,
            retry_by_reading: false,
            read_limiter: RateLimiter::new(READ_GAP, READ_REST),
            repair_limiter: RateLimiter::new(REPAIR_GAP, REPAIR_REST),
            recheck_next: now,
            recheck_urgent_next: now,
        }
    }

    /// The work that the next round may do.
    pub(crate) fn permits(
        &mut self,
        now: Instant,
        engine: &Engine,
        listener: &EventListener,
    ) -> Permits {
        let resync = now >= self.resync_next;
        if resync {
            self.resync_next = now + self.resync;
        }
        let due = resync || self.retry_next.is_some_and(|next| now >= next);
        // A stream that broke is opened again when a retry is due.
        let listen = !listener.is_open() && (due || listener.error().is_none());
        let refused = engine.is_failing() && engine.survey.error.is_none();
        let retry = due && !resync && !listen && refused && !self.retry_by_reading;
        if due {
            self.retry_by_reading = retry;
        }
        Permits {
            listen,
            retry,
            resync: due && !retry,
            read: due || listen || self.read_limiter.next(now) <= now,
            recheck: now >= self.recheck_next,
            recheck_urgent: now >= self.recheck_urgent_next,
        }
    }

    /// Takes in what a round has done, and decides when the next snapshots, repairs, retries and
    /// rechecks are due.
    pub(crate) fn note(
        &mut self,
        now: Instant,
        done: &RoundSummary,
        engine: &Engine,
        listener: &EventListener,
    ) {
        if let Some(took) = done.rechecked {
            self.recheck_next = now + RECHECK.max(4 * took);
            self.recheck_urgent_next = now + RECHECK_URGENT.max(4 * took);
        }
        let reads = engine.survey.reads;
        let tries = reads.tries - self.reads.tries;
        if tries > 0 {
            self.read_limiter.pass(now, reads.took * 4 * tries);
        } else if done.repairs {
            // A round that took longer was mostly not busy with repairs.
            self.repair_limiter.pass_after(now, (now - done.started).min(REPAIR_REST));
        }
        if done.newly_failing {
            self.retry_after = RETRY_FIRST;
            self.retry_by_reading = false;
        }
        let read = reads.done != self.reads.done;
        self.reads = reads;
        if read {
            self.resync_next = now + self.resync;
        }
        if !engine.is_failing() && listener.is_open() {
            self.retry_after = RETRY_FIRST;
            self.retry_next = None;
            return;
        }
        let next = now + self.retry_after;
        if read || self.retry_next.is_none_or(|next| now >= next) {
            self.retry_next = Some(next);
            self.retry_after = (self.retry_after * 2).min(RETRY_LONGEST);
        } else {
            self.retry_next = self.retry_next.map(|before| before.min(next));
        }
    }

    /// The time of the next round if no input comes before it. `has_events` is whether kernel
    /// events wait.
    pub(crate) fn deadline(&self, now: Instant, engine: &Engine, has_events: bool) -> Instant {
        let may_read = engine.survey.is_unread() && engine.survey.error.is_none();
        let due = [
            self.retry_next,
            has_events.then(|| self.repair_limiter.next(now)),
            may_read.then(|| self.read_limiter.next(now)),
            engine.stale_lookups.is_urgent().then_some(self.recheck_urgent_next),
            engine.stale_lookups.is_any().then_some(self.recheck_next),
        ];
        due.into_iter().flatten().fold(self.resync_next, Instant::min)
    }
}
