//! Histograms of durations.

use std::time::Duration;

/// The numbers of durations in buckets whose bounds are 1, 2 or 5 times a power of ten, from 100 µs
/// to 10 s. All nodes and versions use these buckets, so that histograms can be added up.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Histogram {
    counts: [u64; Self::BOUNDS.len() + 1],
    sum: Duration,
}

impl Histogram {
    /// The inclusive upper bounds of the buckets, in microseconds. The last bucket has no bound.
    const BOUNDS: [u64; 16] = [
        100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000, 200_000, 500_000,
        1_000_000, 2_000_000, 5_000_000, 10_000_000,
    ];

    /// Adds a duration.
    pub fn record(&mut self, took: Duration) {
        let bucket = Self::BOUNDS.partition_point(|bound| Duration::from_micros(*bound) < took);
        self.counts[bucket] += 1;
        self.sum = self.sum.saturating_add(took);
    }

    /// Adds the durations of `other`.
    pub fn add(&mut self, other: &Self) {
        self.counts.iter_mut().zip(other.counts).for_each(|(count, more)| *count += more);
        self.sum = self.sum.saturating_add(other.sum);
    }

    /// The number of durations.
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// The sum of the durations.
    pub fn sum(&self) -> Duration {
        self.sum
    }

    /// The inclusive upper bound and the number of durations of each bucket. The bound of the last
    /// bucket is [`Duration::MAX`].
    pub fn buckets(&self) -> impl Iterator<Item = (Duration, u64)> {
        let bounds = Self::BOUNDS.into_iter().map(Duration::from_micros);
        bounds.chain([Duration::MAX]).zip(self.counts)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_duration_has_one_bucket() {
        let mut all = Histogram::default();
        assert_eq!(all.count(), 0);
        for bound in Histogram::BOUNDS.map(Duration::from_micros) {
            for took in [bound, bound + Duration::from_nanos(1)] {
                all.record(took);
            }
        }
        all.record(Duration::ZERO);
        let counts: Vec<u64> = all.buckets().map(|(_, count)| count).collect();
        // 0 and 100 µs share the first; above the last bound there is 10 s and a bit.
        assert_eq!((counts[0], counts[16], all.count()), (2, 1, 33));
        assert!(counts[1..16].iter().all(|count| *count == 2), "{counts:?}");
        assert!(Histogram::BOUNDS.is_sorted());
        let mut twice = all;
        let sum = all.sum();
        twice.add(&all);
        assert_eq!((twice.count(), twice.sum(), twice.counts[16]), (66, 2 * sum, 2));
    }
}
