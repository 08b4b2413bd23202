//! The order in which paths are probed: all in turn, and those that lost an echo in between.

use std::collections::VecDeque;
use std::time::Duration;

use tokio::time::Instant;

/// The least number of probes in a second.
const MIN_RATE: f64 = 4.0;
/// The largest number of probes in a second. The sequence numbers of echoes suffice for it.
const MAX_RATE: f64 = 2_000.0;
/// The pause before a path that lost an echo is probed again.
const RETRY: Duration = Duration::from_millis(500);
/// The pause between two probes of a failing path.
const FAILING: Duration = Duration::from_secs(5);

/// Paths in the order of their next probes. It allows `max(4, paths / interval)` probes a second in
/// turn, and as many of paths that lose packets.
#[derive(Debug)]
pub(crate) struct Agenda<P> {
    /// The time in which each path is probed.
    interval: Duration,
    turns: VecDeque<P>,
    /// Paths that lost an echo, and paths that fail, with the times of their next probes. Each
    /// queue is in the order of time, because its pause is constant.
    lost: VecDeque<(Instant, P)>,
    failing: VecDeque<(Instant, P)>,
    /// The probes that may be sent now: in turn, and of paths that lose packets.
    credit: [f64; 2],
    filled: Instant,
}

impl<P> Agenda<P> {
    pub(crate) fn new(interval: Duration, now: Instant) -> Self {
        let (turns, lost, failing) = Default::default();
        Self { interval, turns, lost, failing, credit: [0.0; 2], filled: now }
    }

    /// Adds a new path. It is probed next.
    pub(crate) fn add(&mut self, path: P) {
        self.turns.push_front(path);
    }

    /// The number of paths that wait for a probe.
    #[cfg(test)]
    fn len(&self) -> usize {
        self.turns.len() + self.lost.len() + self.failing.len()
    }

    /// Drops the paths for which `keep` is false.
    pub(crate) fn retain(&mut self, keep: impl Fn(&P) -> bool) {
        self.turns.retain(&keep);
        self.lost.retain(|(_, path)| keep(path));
        self.failing.retain(|(_, path)| keep(path));
    }

    /// Gives back a path after its probe.
    pub(crate) fn put_back(&mut self, path: P, outcome: Outcome, now: Instant) {
        match outcome {
            Outcome::Settled => self.turns.push_back(path),
            Outcome::Lost => self.lost.push_back((now + RETRY, path)),
            Outcome::Failing => self.failing.push_back((now + FAILING, path)),
        }
    }

    /// Takes the paths to be probed now, of `paths` paths. A path that `has_rested` was not probed
    /// a moment ago.
    pub(crate) fn due(
        &mut self,
        now: Instant,
        paths: usize,
        has_rested: impl Fn(&P) -> bool,
    ) -> Vec<P> {
        let rate = (paths as f64 / self.interval.as_secs_f64()).clamp(MIN_RATE, MAX_RATE);
        let elapsed = now.duration_since(self.filled).as_secs_f64();
        // At most the probes of a second at once.
        self.credit = self.credit.map(|credit| (credit + rate * elapsed).min(rate));
        self.filled = now;
        let mut due = Vec::new();
        let [turns, retries] = &mut self.credit;
        for queue in [&mut self.lost, &mut self.failing] {
            while *retries >= 1.0
                && queue.front().is_some_and(|(at, _)| *at <= now)
                && let Some((_, path)) = queue.pop_front()
            {
                due.push(path);
                *retries -= 1.0;
            }
        }
        // The paths after one that has not rested were probed later.
        while *turns >= 1.0
            && self.turns.front().is_some_and(&has_rested)
            && let Some(path) = self.turns.pop_front()
        {
            due.push(path);
            *turns -= 1.0;
        }
        due
    }
}

/// The outcome of a probe, for the time of the next one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// The path works, or nothing is known of it.
    Settled,
    /// An echo was lost, or a path that lost some may work again.
    Lost,
    /// The path fails.
    Failing,
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    const INTERVAL: Duration = Duration::from_secs(300);

    /// The times of all probes of each path in `seconds`, if `outcome` is that of a probe.
    fn probed(
        paths: u32,
        seconds: u64,
        outcome: impl Fn(u32) -> Outcome,
    ) -> BTreeMap<u32, Vec<Instant>> {
        let start = Instant::now();
        let mut agenda = Agenda::new(INTERVAL, start);
        (0..paths).for_each(|path| agenda.add(path));
        let mut times: BTreeMap<u32, Vec<Instant>> = BTreeMap::new();
        for tick in 1..=seconds * 4 {
            let now = start + Duration::from_millis(250) * u32::try_from(tick).unwrap();
            let has_rested = |path: &u32| {
                let last = times.get(path).and_then(|times| times.last());
                last.is_none_or(|last| now - *last >= Duration::from_secs(1))
            };
            for path in agenda.due(now, paths as usize, has_rested) {
                times.entry(path).or_default().push(now);
                agenda.put_back(path, outcome(path), now);
            }
            assert_eq!(agenda.len(), paths as usize);
        }
        times
    }

    fn total(times: &BTreeMap<u32, Vec<Instant>>) -> usize {
        times.values().map(Vec::len).sum()
    }

    #[test]
    fn each_path_is_probed_within_the_interval() {
        for paths in [5, 1_000, 5_000, 65_000] {
            let times = probed(paths, 301, |_| Outcome::Settled);
            assert_eq!(times.len(), paths as usize);
            let rate = total(&times) as f64 / 301.0;
            let wanted = (f64::from(paths) / 300.0).max(MIN_RATE);
            assert!((wanted * 0.99..wanted * 1.02).contains(&rate), "{paths}: {rate} of {wanted}");
        }
    }

    #[test]
    fn a_single_path_is_not_probed_more_than_once_a_second() {
        assert_eq!(total(&probed(1, 60, |_| Outcome::Settled)), 60);
    }

    #[test]
    fn failing_paths_are_followed_and_keep_no_other_from_its_turn() {
        let fails = |path: u32| if path < 4 { Outcome::Failing } else { Outcome::Settled };
        let times = probed(5_000, 310, fails);
        assert_eq!(times.len(), 5_000);
        for path in 0..4 {
            let longest = times[&path].windows(2).map(|pair| pair[1] - pair[0]).max().unwrap();
            assert!(longest <= FAILING + Duration::from_secs(1), "{longest:?}");
        }
    }

    #[test]
    fn the_rate_at_most_doubles_if_all_paths_fail() {
        let times = probed(5_000, 301, |_| Outcome::Failing);
        assert_eq!(times.len(), 5_000, "each has its turn");
        assert!((9_000..10_100).contains(&total(&times)), "{}", total(&times));
    }

    #[test]
    fn a_lost_echo_is_repeated_at_once() {
        let times = probed(1_000, 2, |_| Outcome::Lost);
        let first = &times[&999];
        assert!(first.len() >= 2 && first[1] - first[0] <= RETRY + RETRY, "{first:?}");
    }

    #[test]
    fn dropped_paths_cost_no_probe() {
        let start = Instant::now();
        let mut agenda = Agenda::new(INTERVAL, start);
        (0..100).for_each(|path| agenda.add(path));
        agenda.put_back(100, Outcome::Lost, start);
        agenda.put_back(101, Outcome::Failing, start);
        agenda.retain(|path| *path == 7);
        let due = agenda.due(start + Duration::from_secs(9), 100, |_| true);
        assert_eq!((due, agenda.len()), (vec![7], 0));
    }
}
