//! Many new peers at once: the time from the sending of the view until the kernel has acknowledged
//! the last object.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use flannel_core::address::Family;
use flannel_core::lease::LeaseSet;

use crate::parts::cluster::{Families, leases};
use crate::parts::engine::Engine;
use crate::parts::fixture::Fixture;
use crate::parts::floor::{self, Form, Took, WAYS, Way, fill};
use crate::parts::report::{Report, median};
use crate::parts::timed::Timed;
use crate::parts::witness::compare;

/// The number of rounds. Each round measures the engine and each kind of floor in turn, because the
/// speed of a machine drifts. It is a multiple of the number of measurements, so that each is
/// measured in each position equally often.
const ROUNDS: u32 = WAYS.len() as u32 + 1;
/// The minimum number of peers in all rounds together. A run with fewer takes ten milliseconds,
/// which is too short.
const MEASURED: u32 = 75_000;
const MOST_ROUNDS: u32 = 2 * ROUNDS;
const RATIO: f64 = 1.5;
/// The maximum number of routes with a gateway each. More would take too long, because their time
/// is quadratic.
const CLASSIC_MOST: u32 = 30_000;
/// The way of writing for routes with a gateway each.
const CLASSIC_WAY: Way = Way { group: usize::MAX, batch: 256 };
/// How many times as fast as the writer of such routes the engine must be, and the number of peers
/// from which on this is required.
const CLASSIC: (u32, f64) = (30_000, 10.0);
/// If there are more peers than this, this number is measured in the same rounds too, to compare
/// the growth.
const FEW: u32 = 10_000;
/// The maximum growth of the time, relative to the growth of the number of peers.
const GROWTH: f64 = 7.5 / 6.5;

pub(crate) fn run(peers: u32, families: Families) -> anyhow::Result<Report> {
    let mut wrong = Vec::new();
    let mut all = Runs::new(peers, families);
    let mut few = (peers > FEW).then(|| Runs::new(FEW, families));
    let rounds = (MEASURED / peers.max(1)).next_multiple_of(ROUNDS).clamp(ROUNDS, MOST_ROUNDS);
    for _ in 0..rounds {
        for runs in [Some(&mut all), few.as_mut()].into_iter().flatten() {
            runs.measure(&mut wrong)?;
        }
    }
    let ours = &all.ours;
    let floors = all.floors();
    let seconds = median(ours.iter().copied());
    // IPv6 routes are plain ones anyway, and linear.
    let has_v4 = families.iter().any(|family| family == Family::V4);
    let classic = if has_v4 && peers <= CLASSIC_MOST {
        Some(floor::measure(peers, families, Form::Classic, CLASSIC_WAY, &mut wrong)?.as_secs_f64())
    } else {
        None
    };
    let in_sync = median(all.in_sync.iter().copied());
    let grown = |all: &[f64], few: &[f64]| median(all.iter().zip(few).map(|(all, few)| all / few));
    let mut report = Report {
        peers: Some(peers),
        family: Some(families.name()),
        seconds: Some(seconds),
        in_sync_seconds: Some(in_sync),
        floor_seconds: Some(median(floors.iter().copied())),
        classic_floor_seconds: classic,
        ratio: Some(median(ours.iter().zip(&floors).map(|(ours, floor)| ours / floor))),
        growth: few.as_ref().map(|few| grown(ours, &few.ours)),
        floor_growth: few.as_ref().map(|few| grown(&floors, &few.floors())),
        wrong,
        ..Report::default()
    };
    report.at_most("ratio", report.ratio, RATIO);
    report.at_most("growth", report.growth, GROWTH * f64::from(peers) / f64::from(FEW));
    if let Some(classic) = classic.filter(|_| peers >= CLASSIC.0) {
        report.at_least("classic_floor_seconds / seconds", classic / seconds, CLASSIC.1);
    }
    Ok(report)
}

/// A number of peers, with the times of the engine and of each kind of floor.
///
/// Each forwarding entry takes 40 bytes of the kernel's per-CPU memory. Their allocation takes a
/// fifth to a half of all time: the kernel searches blocks with free but unmapped pages for each
/// entry, if they come before blocks with mapped pages. That depends on the earlier objects, and on
/// the order of their deletion. So before each measurement the raw writer puts as many peers, and
/// deletes them in the order in which they were put.
struct Runs {
    peers: u32,
    families: Families,
    leases: LeaseSet,
    ours: Vec<f64>,
    in_sync: Vec<f64>,
    floors: Vec<Took>,
}

impl Runs {
    fn new(peers: u32, families: Families) -> Self {
        let leases = leases(peers, families);
        Self { peers, families, leases, ours: Vec::new(), in_sync: Vec::new(), floors: Vec::new() }
    }

    /// Runs one round: each kind of floor, and the engine.
    fn measure(&mut self, wrong: &mut Vec<String>) -> anyhow::Result<()> {
        let peers = self.peers;
        let families = self.families;
        let places = WAYS.len() + 1;
        let mut floors = Took::default();
        for place in 0..places {
            let before = Fixture::new()?;
            fill(&before, peers, families)?;
            before.clear(peers, families, wrong);
            drop(before);
            let next = (place + self.floors.len()) % places;
            if let Some(way) = WAYS.get(next) {
                floors[next] = floor::measure(peers, families, Form::Nexthops, *way, wrong)?;
            } else {
                let (acknowledged, in_sync) = run_once(peers, families, &self.leases, wrong)?;
                self.ours.push(acknowledged.as_secs_f64());
                self.in_sync.push(in_sync.as_secs_f64());
            }
        }
        self.floors.push(floors);
        Ok(())
    }

    /// The floor of each round, with the way of writing that was the fastest in all other rounds. A
    /// choice by the same round would prefer chance results.
    fn floors(&self) -> Vec<f64> {
        let floor = |n: usize| {
            let others = self.floors.iter().enumerate().filter(|(m, _)| *m != n);
            let others: Vec<_> = others.map(|(_, took)| took).collect();
            self.floors[n][floor::best(&others)].as_secs_f64()
        };
        (0..self.floors.len()).map(floor).collect()
    }
}

/// The times until the kernel has acknowledged all objects, and until the engine has read them
/// again.
fn run_once(
    peers: u32,
    families: Families,
    all: &LeaseSet,
    wrong: &mut Vec<String>,
) -> anyhow::Result<(Duration, Duration)> {
    let fixture = Fixture::new()?;
    let mut timed = None;
    let mut engine = Engine::start_on(&fixture, families, |kernel| {
        Arc::new(timed.insert(Timed::new(kernel)).clone())
    })?;
    let leases = all.clone();
    let start = Instant::now();
    engine.send(leases);
    engine.wait_acknowledged(peers as usize)?;
    let acknowledged = timed
        .as_ref()
        .and_then(Timed::acknowledged)
        .context("the engine sent nothing to the kernel")?;
    // The later check must find no difference.
    engine.wait(peers as usize)?;
    let in_sync = start.elapsed();
    if engine.repaired() > 0 {
        wrong.push(format!("{} objects differed from those that were put", engine.repaired()));
    }
    wrong.extend(compare(&fixture.netns, peers, families)?);
    drop(engine);
    fixture.clear(peers, families, wrong);
    Ok((acknowledged - start, in_sync))
}
