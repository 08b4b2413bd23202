//! Pauses between attempts: growing, random, and at least as long as the server asks for.
//!
//! Pauses after failures are longer than others and grow separately, because a server that fails
//! may be overloaded, and all nodes of a cluster ask it. They start anew after a time without a
//! failure, so that a server that answers only some requests gets no more of them.
//!
//! **Source**: client-go `tools/cache/reflector.go: NewReflectorWithOptions`: 800 ms, then twice as
//! long each time, and a random part of up to the same length. The limit there is 30 s and here
//! 60 s, so that the random part spreads the nodes over a minute, and the pauses over two.

use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::Failure;

const FIRST: Duration = Duration::from_millis(100);
const LONGEST: Duration = Duration::from_secs(10);
/// The upper limit of the first pause after a failure.
const FIRST_FAILURE: Duration = Duration::from_millis(1_600);
/// The longest pause after a failure.
const LONGEST_FAILURE: Duration = Duration::from_secs(120);
/// After this time without a failure, pauses after failures start anew. It is longer than the
/// longest pause and a request without an answer.
const HEALTHY: Duration = Duration::from_secs(180);
/// The longest pause that a server can request.
const MOST: Duration = Duration::from_secs(60);

/// Pauses that are about twice as long each time.
#[derive(Debug)]
struct Steps {
    first: Duration,
    longest: Duration,
    next: Duration,
}

impl Steps {
    fn new(first: Duration, longest: Duration) -> Self {
        Self { first, longest, next: first }
    }

    /// The next pause: from half of the current length to all of it. `random` is in 0..1.
    fn take(&mut self, random: f64) -> Duration {
        let whole = self.next;
        self.next = (2 * whole).min(self.longest);
        whole.mul_f64(0.5 + random / 2.0)
    }

    fn reset(&mut self) {
        self.next = self.first;
    }
}

#[derive(Debug)]
pub(crate) struct Pause {
    steps: Steps,
    failures: Failures,
}

/// The pauses after failures.
#[derive(Debug)]
struct Failures {
    steps: Steps,
    last: Option<Instant>,
}

impl Failures {
    fn new() -> Self {
        Self { steps: Steps::new(FIRST_FAILURE, LONGEST_FAILURE), last: None }
    }

    /// The pause after a failure at `now`. `random` is in 0..1.
    fn pause(&mut self, now: Instant, random: f64) -> Duration {
        if self.last.is_some_and(|last| now.duration_since(last) >= HEALTHY) {
            self.steps.reset();
        }
        self.last = Some(now);
        self.steps.take(random)
    }
}

impl Pause {
    pub(crate) fn new() -> Self {
        Self::within(FIRST, LONGEST)
    }

    /// The first pause is at most `first`. Later ones grow up to `longest`.
    pub(crate) fn within(first: Duration, longest: Duration) -> Self {
        Self { steps: Steps::new(first, longest), failures: Failures::new() }
    }

    /// The next pause is as short as the first one. Pauses after failures do not change.
    pub(crate) fn reset(&mut self) {
        self.steps.reset();
    }

    /// The next pause, if nothing has failed: from half of the current length to all of it.
    pub(crate) fn next(&mut self) -> Duration {
        self.steps.take(fastrand::f64())
    }

    /// The next pause after a failure: from half of the current length to all of it.
    pub(crate) fn failed(&mut self) -> Duration {
        self.failures.pause(Instant::now(), fastrand::f64())
    }

    /// Waits for the next attempt after a failure.
    pub(crate) async fn after(&mut self, failure: &Failure) {
        let asked = match failure {
            Failure::Busy { after: Some(after), .. } => (*after).min(MOST),
            _ => Duration::ZERO,
        };
        // The random part prevents nodes from retrying at the same moment.
        sleep(asked + self.failed()).await;
    }
}

#[cfg(test)]
mod tests {
    use std::cmp::Reverse;
    use std::collections::BinaryHeap;

    use super::*;

    #[test]
    fn pauses_grow_up_to_a_limit() {
        let mut pause = Pause::within(Duration::from_secs(1), Duration::from_secs(5));
        for longest in [1, 2, 4, 5, 5].map(Duration::from_secs) {
            let next = pause.next();
            assert!(next <= longest && 2 * next >= longest, "{next:?} of {longest:?}");
        }
        pause.reset();
        assert!(pause.next() <= Duration::from_secs(1));
    }

    #[test]
    fn pauses_after_failures_start_anew_only_after_a_time_without_a_failure() {
        let mut failures = Failures::new();
        let mut now = Instant::now();
        let millis = [1_600, 3_200, 6_400, 12_800, 25_600, 51_200, 102_400, 120_000, 120_000];
        for longest in millis.map(Duration::from_millis) {
            assert_eq!(failures.pause(now, 1.0), longest);
            now += longest;
        }
        now += HEALTHY;
        assert_eq!(failures.pause(now, 0.0), FIRST_FAILURE / 2);
        now += HEALTHY - Duration::from_millis(1);
        assert_eq!(failures.pause(now, 0.0), FIRST_FAILURE);
    }

    #[tokio::test(start_paused = true)]
    async fn a_server_can_ask_for_a_longer_pause() {
        for (asks, least) in [(5, 5), (3_600, 60)].map(|(a, b)| (a, Duration::from_secs(b))) {
            let begin = Instant::now();
            let after = Some(Duration::from_secs(asks));
            let busy = Failure::Busy { after, reason: String::new() };
            Pause::new().after(&busy).await;
            assert!(begin.elapsed() > least && begin.elapsed() < least + 2 * FIRST_FAILURE);
        }
    }

    /// The requests per second of many nodes that lose their server at the same moment, from the
    /// first failure on. A request fails as long as the outage lasts, and is the last one of its
    /// node otherwise.
    fn requests(seed: u64, nodes: usize, outage: Duration) -> Vec<usize> {
        let mut random = fastrand::Rng::with_seed(seed);
        let begin = Instant::now();
        let mut nodes: Vec<Failures> = (0..nodes).map(|_| Failures::new()).collect();
        let mut due: BinaryHeap<_> =
            (0..nodes.len()).map(|node| Reverse((Duration::ZERO, node))).collect();
        let mut seconds = Vec::new();
        while let Some(Reverse((when, node))) = due.pop() {
            let second = usize::try_from(when.as_secs()).unwrap();
            seconds.resize(seconds.len().max(second + 1), 0);
            seconds[second] += 1;
            if when < outage {
                let pause = nodes[node].pause(begin + when, random.f64());
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
        // After a short outage the nodes are back soon, and not at once either.
        let seconds = requests(7, 5_000, Duration::from_secs(10));
        let peak = seconds[10..].iter().max().unwrap();
        println!("after 10 s: {} s, peak {peak}", seconds.len() - 10);
        assert!(seconds.len() - 10 <= 15 && *peak <= 1_000, "{seconds:?}");
    }
}
