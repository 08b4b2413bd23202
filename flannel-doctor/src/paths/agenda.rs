//! The order in which paths are probed: all in turn, and those that lost an echo in between.

use std::collections::{HashSet, VecDeque};
use std::hash::Hash;
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
/// The largest number of new paths that do not wait for their turns.
const NEW: usize = 100;

/// The next probes. It allows `max(4, paths / interval)` probes a second in turn, and as many of
/// paths that are new or lose packets.
#[derive(Debug)]
pub(crate) struct Agenda<P> {
    /// The time in which each path is probed.
    interval: Duration,
    /// The path that had its turn last, or `None` if no path had one.
    last: Option<P>,
    /// Paths that are new or lost an echo, and paths that fail, with the times of their next
    /// probes. Each pause is constant, so no path waits long behind one that is due later.
    lost: VecDeque<(Instant, P)>,
    failing: VecDeque<(Instant, P)>,
    /// The paths in either queue.
    queued: HashSet<P>,
    /// The probes that may be sent now: in turn, and of the queues.
    credit: [f64; 2],
    filled: Instant,
}

impl<P: Copy + Eq + Hash> Agenda<P> {
    pub(crate) fn new(interval: Duration, now: Instant) -> Self {
        let (last, lost, failing, queued) = Default::default();
        Self { interval, last, lost, failing, queued, credit: [0.0; 2], filled: now }
    }

    /// Begins the turns after this path, if there was none yet.
    pub(crate) fn begin_after(&mut self, path: P) {
        self.last.get_or_insert(path);
    }

    /// Adds new paths. A few are probed next. Of many, each waits for its turn.
    pub(crate) fn add(&mut self, paths: &[P], now: Instant) {
        let few = self.lost.len() + paths.len() <= NEW;
        for path in paths.iter().filter(|_| few) {
            if self.queued.insert(*path) {
                self.lost.push_back((now, *path));
            }
        }
    }

    /// Drops the paths for which `keep` is false.
    pub(crate) fn retain(&mut self, keep: impl Fn(&P) -> bool) {
        self.lost.retain(|(_, path)| keep(path));
        self.failing.retain(|(_, path)| keep(path));
        self.queued.retain(keep);
    }

    /// Takes the outcome of a probe.
    pub(crate) fn note(&mut self, path: P, outcome: Outcome, now: Instant) {
        let (queue, pause) = match outcome {
            Outcome::Settled => return,
            Outcome::Lost => (&mut self.lost, RETRY),
            Outcome::Failing => (&mut self.failing, FAILING),
        };
        if self.queued.insert(path) {
            queue.push_back((now + pause, path));
        }
    }

    /// The paths to probe now, of this number of `paths`. `next` is the path after another one in
    /// a fixed order; after the last one, and after `None`, the first. A path that was probed just
    /// now has not rested, and is not probed again.
    pub(crate) fn due(
        &mut self,
        now: Instant,
        paths: usize,
        next: impl Fn(Option<P>) -> Option<P>,
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
                if !has_rested(&path) {
                    queue.push_back((now + RETRY, path));
                    continue;
                }
                self.queued.remove(&path);
                due.push(path);
                *retries -= 1.0;
            }
        }
        // After an outage the queues were large.
        if self.queued.is_empty() {
            self.queued.shrink_to_fit();
            self.lost.shrink_to_fit();
            self.failing.shrink_to_fit();
        }
        while *turns >= 1.0
            && let Some(path) = next(self.last)
        {
            self.last = Some(path);
            *turns -= 1.0;
            // A path in a queue has its turns too: the queue may be long.
            if has_rested(&path) && !due.contains(&path) {
                due.push(path);
            }
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

    /// The times of all probes of each path in `seconds`, if a probe of a path has `outcome`.
    fn probed(
        paths: u32,
        seconds: u64,
        outcome: impl Fn(u32) -> Outcome,
    ) -> BTreeMap<u32, Vec<Instant>> {
        let start = Instant::now();
        let mut agenda = Agenda::new(INTERVAL, start);
        agenda.add(&Vec::from_iter(0..paths), start);
        let next = |last: Option<u32>| Some(last.map_or(0, |last| (last + 1) % paths));
        let mut times: BTreeMap<u32, Vec<Instant>> = BTreeMap::new();
        for tick in 1..=seconds * 4 {
            let now = start + Duration::from_millis(250) * u32::try_from(tick).unwrap();
            let has_rested = |path: &u32| {
                let last = times.get(path).and_then(|times| times.last());
                last.is_none_or(|last| now - *last >= Duration::from_secs(1))
            };
            for path in agenda.due(now, paths as usize, next, has_rested) {
                times.entry(path).or_default().push(now);
                agenda.note(path, outcome(path), now);
            }
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
        let times =
            probed(5_000, 310, |path| if path < 4 { Outcome::Failing } else { Outcome::Settled });
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
        let first = &times[&0];
        assert!(first.len() >= 2 && first[1] - first[0] <= RETRY + RETRY, "{first:?}");
    }

    #[test]
    fn a_few_new_paths_are_probed_next_and_dropped_ones_never() {
        let start = Instant::now();
        let mut agenda = Agenda::new(INTERVAL, start);
        agenda.add(&Vec::from_iter(0..1_000), start);
        agenda.add(&[2_000, 2_001, 2_002], start);
        agenda.note(2_003, Outcome::Failing, start);
        agenda.retain(|path| *path != 2_001 && *path != 2_003);
        let now = start + Duration::from_secs(9);
        let mut due = agenda.due(now, 1_000, |_| None, |_| true);
        due.sort_unstable();
        assert_eq!(due, [2_000, 2_002]);
        // A path in a queue has its turn too, one that was probed just now has not.
        agenda.note(7, Outcome::Lost, now);
        let next = |last: Option<u32>| last.map(|last| last + 1).or(Some(0));
        agenda.last = Some(5);
        assert_eq!(agenda.due(now, 1_000, next, |path| *path != 8), [6, 7, 9]);
    }

    #[test]
    fn new_paths_do_not_delay_those_that_lost_an_echo() {
        let start = Instant::now();
        let mut agenda = Agenda::new(INTERVAL, start);
        agenda.note(0, Outcome::Lost, start);
        for tick in 0..50 {
            let new = Vec::from_iter((1..=20).map(|n| tick * 20 + n));
            agenda.add(&new, start);
        }
        assert!(agenda.lost.len() <= NEW + 1);
        let due = agenda.due(start + RETRY, 1_000, |_| None, |_| true);
        assert!(due.contains(&0), "{due:?}");
    }

    #[test]
    fn each_path_has_its_turn_in_time_although_all_lose_packets() {
        for (path, times) in probed(5_000, 700, |_| Outcome::Failing) {
            let longest = times.windows(2).map(|pair| pair[1] - pair[0]).max().unwrap();
            assert!(longest <= INTERVAL + Duration::from_secs(5), "{path}: {longest:?}");
        }
    }
}
