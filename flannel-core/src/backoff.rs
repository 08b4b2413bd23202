//! Pauses between attempts. Each pause is about twice as long as the pause before it. Pauses are
//! random, so that nodes that failed at the same time do not retry at the same time.

use std::time::Duration;

use tokio::time::Instant;

/// The pauses between attempts.
///
/// ```
/// use flannel_core::backoff::Backoff;
/// use std::time::Duration;
///
/// let mut backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(5));
/// assert!(backoff.pause() <= Duration::from_secs(1));
/// assert!(backoff.pause() <= Duration::from_secs(2));
/// ```
#[derive(Debug)]
pub struct Backoff {
    first: Duration,
    longest: Duration,
    next: Duration,
}

impl Backoff {
    /// Pauses that grow from at most `first` to at most `longest`.
    pub fn new(first: Duration, longest: Duration) -> Self {
        Self { first, longest, next: first }
    }

    /// Makes the next pause as short as the first one.
    pub fn reset(&mut self) {
        self.next = self.first;
    }

    /// The next pause: from half of the current length to all of it.
    pub fn pause(&mut self) -> Duration {
        self.take(fastrand::f64())
    }

    /// The next pause. `random` is in 0..1.
    fn take(&mut self, random: f64) -> Duration {
        let whole = self.next;
        self.next = (2 * whole).min(self.longest);
        whole.mul_f64(0.5 + random / 2.0)
    }
}

/// The pauses after failures of a store. A store that fails may be overloaded, because all nodes of
/// a cluster use it. So a single success does not shorten the pauses: they start anew only after
/// some time without a failure, or after [`Self::reset`].
#[derive(Debug)]
pub struct FailurePauses {
    steps: Backoff,
    /// After this time without a failure, pauses start anew.
    healthy: Duration,
    last: Option<Instant>,
}

impl FailurePauses {
    /// The pauses for a server that all nodes of a cluster share: 0.8 to 1.6 s, then twice as long
    /// each time, up to 60 to 120 s. They start anew after 180 s without a failure, which is longer
    /// than the longest pause and the timeout of a request together.
    ///
    /// After an outage, the requests of all nodes are spread over about the length of the outage,
    /// and over at most two minutes.
    ///
    /// **Source**: client-go `tools/cache/reflector.go: NewReflectorWithOptions`: 800 ms, then
    /// twice as long each time, plus a random part of at most the same length. The limit is 30 s in
    /// client-go and 60 s here, so that the random part spreads the nodes over a minute.
    pub fn of_shared_server() -> Self {
        let steps = Backoff::new(Duration::from_millis(1_600), Duration::from_secs(120));
        Self { steps, healthy: Duration::from_secs(180), last: None }
    }

    /// The pauses for a store that only this machine uses: at most 100 ms, then twice as long each
    /// time, up to 5 s. They start anew after 10 s without a failure.
    pub fn of_local_store() -> Self {
        let steps = Backoff::new(Duration::from_millis(100), Duration::from_secs(5));
        Self { steps, healthy: Duration::from_secs(10), last: None }
    }

    /// Makes pauses start anew, because the store has answered for a while.
    pub fn reset(&mut self) {
        self.steps.reset();
    }

    /// The pause after a failure: from half of the current length to all of it.
    pub fn pause(&mut self) -> Duration {
        self.pause_at(Instant::now(), fastrand::f64())
    }

    /// The pause after a failure at `now`. `random` is in 0..1.
    fn pause_at(&mut self, now: Instant, random: f64) -> Duration {
        if self.last.is_some_and(|last| now.duration_since(last) >= self.healthy) {
            self.steps.reset();
        }
        self.last = Some(now);
        self.steps.take(random)
    }
}

#[cfg(test)]
mod tests {
    use std::cmp::Reverse;
    use std::collections::BinaryHeap;

    use super::*;

    #[test]
    fn pauses_grow_up_to_a_limit() {
        let mut backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(5));
        for longest in [1, 2, 4, 5, 5] {
            let pause = backoff.pause();
            assert!(
                pause <= Duration::from_secs(longest) && 2 * pause >= Duration::from_secs(longest)
            );
        }
        backoff.reset();
        assert!(backoff.pause() <= Duration::from_secs(1));
    }

    #[test]
    fn pauses_after_failures_start_anew_only_after_a_time_without_a_failure() {
        let mut failures = FailurePauses::of_shared_server();
        let first = Duration::from_millis(1_600);
        let mut now = Instant::now();
        let millis = [1_600, 3_200, 6_400, 12_800, 25_600, 51_200, 102_400, 120_000, 120_000];
        for longest in millis.map(Duration::from_millis) {
            assert_eq!(failures.pause_at(now, 1.0), longest);
            now += longest;
        }
        now += failures.healthy;
        assert_eq!(failures.pause_at(now, 0.0), first / 2);
        now += failures.healthy - Duration::from_millis(1);
        assert_eq!(failures.pause_at(now, 0.0), first);
    }

    /// The requests per second of many nodes that lose their server at the same moment, from the
    /// first failure on. A request fails as long as the outage lasts, and is the last one of its
    /// node otherwise.
    fn requests(seed: u64, nodes: usize, outage: Duration) -> Vec<usize> {
        let mut random = fastrand::Rng::with_seed(seed);
        let begin = Instant::now();
        let mut nodes: Vec<FailurePauses> =
            (0..nodes).map(|_| FailurePauses::of_shared_server()).collect();
        let mut due: BinaryHeap<_> =
            (0..nodes.len()).map(|node| Reverse((Duration::ZERO, node))).collect();
        let mut seconds = Vec::new();
        while let Some(Reverse((when, node))) = due.pop() {
            let second = usize::try_from(when.as_secs()).unwrap();
            seconds.resize(seconds.len().max(second + 1), 0);
            seconds[second] += 1;
            if when < outage {
                let pause = nodes[node].pause_at(begin + when, random.f64());
                due.push(Reverse((when + pause, node)));
            }
        }
        seconds
    }

    #[test]
    fn five_thousand_nodes_spread_over_minutes() {
        for seed in 0..20 {
            let seconds = requests(seed, 5_000, Duration::from_secs(600));
            let mean = |seconds: &[usize]| seconds.iter().sum::<usize>() / seconds.len();
            // The server is back, and each node asks it once.
            let after = &seconds[600..];
            let peak = after.iter().max().unwrap();
            println!("seed {seed}: {} s, peak {peak}, mean {}", after.len(), mean(after));
            assert!((90..=120).contains(&after.len()), "seed {seed}: {} s", after.len());
            assert!(*peak <= 120, "seed {seed}: {peak} requests in a second: {after:?}");
            // During the outage no second has far more requests than others.
            let during = &seconds[300..600];
            let peak = during.iter().max().unwrap();
            assert!(*peak <= 2 * mean(during), "seed {seed}: {peak} of {}", mean(during));
            assert!(mean(during) <= 60, "seed {seed}: {}", mean(during));
        }
    }

    /// A node is back soon after a short outage, so the nodes have less time to spread.
    #[test]
    fn after_a_short_outage_five_thousand_nodes_spread_over_about_its_length() {
        for (outage, longest, most) in [(3, 7, 3_500), (10, 15, 1_000), (30, 55, 500)] {
            let seconds = requests(7, 5_000, Duration::from_secs(outage));
            let after = &seconds[usize::try_from(outage).unwrap()..];
            let peak = after.iter().max().unwrap();
            println!("after {outage} s: {} s, peak {peak}", after.len());
            assert!(after.len() <= longest && *peak <= most, "{outage} s: {after:?}");
        }
    }
}
