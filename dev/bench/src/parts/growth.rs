//! The memory and the descriptors of daemons over time.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::parts::daemon::figure;

/// The growth of anonymous memory that is allowed, in KiB. An allocator needs it to fill its
/// arenas.
const MEMORY_KIB: u64 = 1024;
/// The number of descriptors that may be open in addition: connections that just come and go.
const DESCRIPTORS: u64 = 3;
/// The number of samples of a daemon that are enough for a comparison.
const ENOUGH: usize = 8;

/// What a process uses at one time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Sample {
    /// Anonymous memory. Pages of files, such as the program's code, are read when they are used
    /// first, and the kernel can take them back.
    memory_kib: u64,
    descriptors: u64,
}

/// The samples of all daemons, by process id.
#[derive(Debug)]
pub(crate) struct Growth {
    /// A daemon is compared with itself from this age on.
    warm_up: Duration,
    daemons: BTreeMap<u32, Daemon>,
}

#[derive(Debug)]
struct Daemon {
    name: String,
    seen: Instant,
    samples: Vec<Sample>,
}

impl Growth {
    pub(crate) fn new(warm_up: Duration) -> Self {
        Self { warm_up, daemons: BTreeMap::new() }
    }

    /// Takes a sample of a daemon that is old enough. A daemon that has ended gets no more samples.
    pub(crate) fn sample(&mut self, name: &str, pid: u32) {
        let daemon = self.daemons.entry(pid).or_insert_with(|| Daemon {
            name: name.to_owned(),
            seen: Instant::now(),
            samples: Vec::new(),
        });
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        let descriptors = std::fs::read_dir(format!("/proc/{pid}/fd")).map(Iterator::count);
        if let Ok(memory_kib) = figure(&status, "RssAnon")
            && let Ok(descriptors) = descriptors
            && daemon.seen.elapsed() >= self.warm_up
        {
            daemon.samples.push(Sample { memory_kib, descriptors: descriptors as u64 });
        }
    }

    /// The number of daemons that lived long enough for a comparison.
    pub(crate) fn compared(&self) -> usize {
        self.daemons.values().filter(|daemon| daemon.samples.len() >= ENOUGH).count()
    }

    /// The largest anonymous memory in all samples, in KiB.
    pub(crate) fn largest_kib(&self) -> Option<u64> {
        let samples = self.daemons.values().flat_map(|daemon| &daemon.samples);
        samples.map(|sample| sample.memory_kib).max()
    }

    /// The daemons that grew.
    pub(crate) fn found(&self) -> Vec<String> {
        let of = |daemon: &Daemon| {
            Some(format!("{}: {}", daemon.name, grew(&daemon.samples, MEMORY_KIB, DESCRIPTORS)?))
        };
        self.daemons.values().filter_map(of).collect()
    }
}

/// Compares the median of the last quarter of the samples with the median of the first quarter. A
/// peak that passes does not count as growth.
fn grew(samples: &[Sample], memory_kib: u64, descriptors: u64) -> Option<String> {
    if samples.len() < ENOUGH {
        return None;
    }
    let quarter = samples.len() / 4;
    let median = |samples: &[Sample], of: fn(&Sample) -> u64| {
        let mut figures: Vec<u64> = samples.iter().map(of).collect();
        figures.sort_unstable();
        figures[figures.len() / 2]
    };
    let first = &samples[..quarter];
    let last = &samples[samples.len() - quarter..];
    let grown = |what: &str, of: fn(&Sample) -> u64, most: u64| {
        let from = median(first, of);
        let to = median(last, of);
        (to > from + most).then(|| format!("{what} grew from {from} to {to}"))
    };
    let memory = grown("the memory in KiB", |sample| sample.memory_kib, memory_kib);
    let files = grown("the number of descriptors", |sample| sample.descriptors, descriptors);
    let all: Vec<String> = memory.into_iter().chain(files).collect();
    (!all.is_empty()).then(|| all.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(figures: impl IntoIterator<Item = (u64, u64)>) -> Option<String> {
        let samples: Vec<_> = figures
            .into_iter()
            .map(|(memory_kib, descriptors)| Sample { memory_kib, descriptors })
            .collect();
        grew(&samples, 100, 3)
    }

    #[test]
    fn a_steady_growth_is_found_and_a_peak_is_not() {
        let steady = found((0..40).map(|n| (1000 + 10 * n, 20)));
        assert_eq!(steady.as_deref(), Some("the memory in KiB grew from 1050 to 1350"));
        let files = found((0..40).map(|n| (1000, 20 + n / 5)));
        assert_eq!(files.as_deref(), Some("the number of descriptors grew from 21 to 27"));
        assert_eq!(found((0..40).map(|n| (if n % 9 == 0 { 9000 } else { 1000 }, 20))), None);
        assert_eq!(found((0..40).map(|n| (1000 + 2 * n, 20 + n % 4))), None);
    }

    #[test]
    fn too_few_samples_show_nothing() {
        assert_eq!(found((0..7).map(|n| (1000 * n, n))), None);
        assert!(found((0..8).map(|n| (1000 * n, n))).is_some());
    }

    #[test]
    fn a_process_is_compared_when_it_is_warm() {
        let mut cold = Growth::new(Duration::MAX);
        let mut warm = Growth::new(Duration::ZERO);
        for _ in 0..ENOUGH {
            cold.sample("this", std::process::id());
            warm.sample("this", std::process::id());
        }
        assert_eq!((cold.compared(), warm.compared()), (0, 1));
        assert!(warm.largest_kib() > Some(100));
    }
}
