//! A deterministic simulation of many nodes on one store.
//!
//! Faults: lost, late and repeated requests, late replies, crashes with and without state, machines
//! that are off for several leases and start with the wall clock of their end, partitions,
//! suspended machines, clocks that jump and drift, a restarting store, operators who delete,
//! reserve and overwrite keys.
//!
//! Invariants: No two nodes own overlapping subnets at a moment of true time. One node is excepted:
//! it uses a lease of its cache after a restart of its machine, and its wall clock is now further
//! back than when the cache was written, compared with true time. The exception ends as soon as the
//! clock is corrected or the store has confirmed the lease. A node that comes back gets its subnet
//! back, unless another node had it meanwhile. No lease ends without a reason. After the faults,
//! every node that can get a subnet has one, and all views equal the store.
//!
//! `FLANNEL_SIM_SEEDS=n` runs the seeds before n, and with `FLANNEL_SIM_FIRST=m` only the seeds
//! from m on. `FLANNEL_SIM_SEED=n` runs one seed and prints its events.

#![allow(clippy::unwrap_used, reason = "test helpers are test code")]

mod clock;
mod fault;
mod node;
mod store;
mod transport;
mod world;

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use fault::Counts;
use store::Broken;
use world::simulate;

/// The default number of seeds. Without optimization each takes ten times as long.
const SEEDS: u64 = if cfg!(debug_assertions) { 60 } else { 2_000 };
/// The time to live of leases.
const TTL: Duration = Duration::from_secs(120);
/// The time before the end at which a lease is renewed.
const MARGIN: Duration = Duration::from_secs(40);

fn number(name: &str) -> Option<u64> {
    std::env::var(name)
        .ok()
        .map(|text| text.parse().unwrap_or_else(|_| panic!("{name}={text} is not a number")))
}

/// Runs the seeds from `first` to before `seeds` on all processors until one fails. Returns how
/// often each fault happened.
fn run(first: u64, seeds: u64) -> Counts {
    let next = AtomicU64::new(first);
    let work = || {
        let mut counts = Counts::default();
        loop {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= seeds {
                return counts;
            }
            let outcome = simulate(seed, None, false);
            if let Some(wrong) = outcome.wrong {
                next.store(seeds, Ordering::Relaxed);
                panic!(
                    "seed {seed}: {wrong}\nrun it again: FLANNEL_SIM_SEED={seed} cargo test \
                     -p flannel-subnet --test simulation nodes_share -- --nocapture"
                );
            }
            counts.add(&outcome.counts);
        }
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        let mut sum = Counts::default();
        for worker in workers {
            match worker.join() {
                Ok(counts) => sum.add(&counts),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
        sum
    })
}

#[test]
fn nodes_share_a_network_under_all_faults() {
    if let Some(seed) = number("FLANNEL_SIM_SEED") {
        let outcome = simulate(seed, None, true);
        outcome.trace.iter().for_each(|line| println!("{line}"));
        assert_eq!(outcome.wrong, None, "seed {seed}");
        return;
    }
    let first = number("FLANNEL_SIM_FIRST").unwrap_or(0);
    let counts = run(first, number("FLANNEL_SIM_SEEDS").unwrap_or(SEEDS));
    for (fault, times) in counts.iter() {
        println!("{fault:?}: {times}");
        assert!(times > 0, "{fault:?} never happened");
    }
}

#[test]
fn a_seed_reproduces_its_simulation() {
    let one = simulate(7, None, true);
    let other = simulate(7, None, true);
    assert!(one.trace.len() > 1_000);
    for (place, (one, other)) in one.trace.iter().zip(&other.trace).enumerate() {
        assert_eq!(one, other, "line {place}");
    }
    assert_eq!(one.trace.len(), other.trace.len());
}

/// The first seed whose simulation detects the omitted comparison, and the violated invariant.
fn first_detection(broken: Broken, within: u64) -> (u64, String) {
    (0..within)
        .find_map(|seed| simulate(seed, Some(broken), false).wrong.map(|wrong| (seed, wrong)))
        .unwrap_or_else(|| panic!("{broken:?} is not detected within {within} seeds"))
}

#[test]
fn every_omitted_comparison_is_detected() {
    for broken in [Broken::Create, Broken::Update, Broken::Delete, Broken::KeepAlive] {
        let (seed, wrong) = first_detection(broken, 300);
        println!("without the compare of {broken:?}, seed {seed}: {wrong}");
    }
}
