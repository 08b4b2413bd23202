//! Rate limits. A burst after a rest does not wait. A steady stream gets a fixed rate.

use std::time::Duration;

use tokio::time::Instant;

/// Lets one event pass in every `gap`. After a rest, as many events pass at once as fit into
/// `rest`.
///
/// **Source**: the generic cell rate algorithm (ITU-T I.371).
#[derive(Debug)]
pub(crate) struct RateLimiter {
    gap: Duration,
    rest: Duration,
    next: Option<Instant>,
}

impl RateLimiter {
    pub(crate) const fn new(gap: Duration, rest: Duration) -> Self {
        Self { gap, rest, next: None }
    }

    /// The time at which the next event may pass. It is `now` or later.
    pub(crate) fn next(&self, now: Instant) -> Instant {
        self.next.map_or(now, |next| next.max(now))
    }

    /// Notes that an event passed. The next one waits for at least `cost`.
    pub(crate) fn pass(&mut self, now: Instant, cost: Duration) {
        let rested = now.checked_sub(self.rest).unwrap_or(now);
        let next = self.next.map_or(rested, |next| next.max(rested)) + self.gap.max(cost);
        self.next = Some(if cost > self.gap { next.max(now + cost) } else { next });
    }

    /// Notes that an event passed, which took this time. After a rest, events pass without a wait
    /// until they took half of the rest. A steady stream takes half of the time. An event waits for
    /// `rest` at most.
    pub(crate) fn pass_after(&mut self, now: Instant, took: Duration) {
        let rested = now.checked_sub(self.rest).unwrap_or(now);
        let next = self.next.map_or(rested, |next| next.max(rested)) + self.gap.max(2 * took);
        self.next = Some(next.min(now + self.rest));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_frequent_events_are_slowed_down() {
        let gap = Duration::from_millis(10);
        let rest = Duration::from_millis(30);
        let mut limiter = RateLimiter::new(gap, rest);
        let start = Instant::now();
        let mut passed = 0;
        for ms in 0..1000 {
            let now = start + Duration::from_millis(ms);
            while limiter.next(now) <= now {
                limiter.pass(now, Duration::ZERO);
                passed += 1;
            }
            assert!(limiter.next(now) <= now + gap);
        }
        assert!((100..=104).contains(&passed), "{passed}");
        for second in 2..10 {
            let now = start + Duration::from_secs(second);
            assert!(limiter.next(now) <= now);
            limiter.pass(start + Duration::from_secs(second), Duration::ZERO);
        }
    }

    #[test]
    fn long_work_passes_after_a_rest_else_takes_half_of_the_time() {
        let took = Duration::from_millis(5);
        let mut limiter = RateLimiter::new(Duration::from_millis(1), Duration::from_millis(100));
        let mut now = Instant::now();
        let start = now;
        let mut waited = Vec::new();
        for _ in 0..1_000 {
            waited.push(limiter.next(now) - now);
            now = limiter.next(now) + took;
            limiter.pass_after(now, took);
        }
        assert!(waited[..20].iter().all(Duration::is_zero), "{waited:?}");
        let worked = 1_000 * took;
        assert!(
            2 * worked <= now - start + Duration::from_millis(100),
            "half of {:?}",
            now - start
        );
        // As long as a round may be, and many of them that did not ask.
        for _ in 0..10 {
            limiter.pass_after(now, Duration::from_millis(100));
            assert_eq!(limiter.next(now) - now, Duration::from_millis(100));
        }
    }

    #[test]
    fn an_expensive_event_delays_the_next_by_its_cost() {
        let mut limiter = RateLimiter::new(Duration::from_millis(10), Duration::from_millis(100));
        let now = Instant::now();
        limiter.pass(now, Duration::from_secs(1));
        assert_eq!(limiter.next(now), now + Duration::from_secs(1));
    }
}
