//! Peers that arrive all at once: from the sending of the view to the kernel's last acknowledgement.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use flannel_core::LeaseSet;

use crate::cluster::{Families, leases};
use crate::engine::Engine;
use crate::floor::{self, Form};
use crate::ground::Ground;
use crate::report::{Report, median};
use crate::timed::Timed;
use crate::witness::compare;

/// Floor and subject alternate, so that a machine whose speed drifts misleads nobody.
const PAIRS: u32 = 5;
/// What is over in ten milliseconds says little: of few peers there are so many altogether, at most that many times.
const MEASURED: u32 = 75_000;
const MOST_PAIRS: u32 = 25;
const RATIO: f64 = 1.3;
/// Routes with a gateway each take time by the square of their number: beyond this they are not waited for.
const CLASSIC_MOST: u32 = 30_000;
/// From here on it must be so many times faster than them.
const CLASSIC: (u32, f64) = (30_000, 10.0);

pub(crate) fn run(peers: u32, families: Families) -> anyhow::Result<Report> {
    let all = leases(peers, families);
    let (mut ours, mut floors, mut wrong) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..(MEASURED / peers.max(1)).clamp(PAIRS, MOST_PAIRS) {
        floors.push(floor::measure(peers, families, Form::Nexthops, &mut wrong)?);
        ours.push(run_once(peers, families, &all, &mut wrong)?.as_secs_f64());
    }
    let best = floor::best(&floors).context("no floor")?;
    let floors: Vec<f64> = floors.iter().map(|took| took[best].as_secs_f64()).collect();
    let seconds = median(ours.iter().copied());
    let classic = if peers <= CLASSIC_MOST {
        let took = floor::measure(peers, families, Form::Classic, &mut wrong)?;
        Some(median(took.iter().map(Duration::as_secs_f64)))
    } else {
        None
    };
    let mut report = Report {
        peers: Some(peers),
        family: Some(families.name()),
        seconds: Some(seconds),
        floor_seconds: Some(median(floors.iter().copied())),
        classic_floor_seconds: classic,
        ratio: Some(median(ours.iter().zip(floors).map(|(ours, floor)| ours / floor))),
        wrong,
        ..Report::default()
    };
    report.at_most("ratio", report.ratio, RATIO);
    if let Some(classic) = classic.filter(|_| peers >= CLASSIC.0) {
        report.at_least("classic_floor_seconds / seconds", classic / seconds, CLASSIC.1);
    }
    Ok(report)
}

fn run_once(
    peers: u32,
    families: Families,
    all: &LeaseSet,
    wrong: &mut Vec<String>,
) -> anyhow::Result<Duration> {
    let ground = Ground::new()?;
    let mut timed = None;
    let mut engine =
        Engine::start_on(&ground, families, |kernel| Arc::new(timed.insert(Timed::new(kernel)).clone()))?;
    let leases = all.clone();
    let start = Instant::now();
    engine.send(leases);
    engine.wait_acknowledged(peers as usize)?;
    let acknowledged = timed.as_ref().and_then(Timed::acknowledged).context("the kernel was told nothing")?;
    // What it looks over afterwards must have been right.
    engine.wait(peers as usize)?;
    if engine.repaired() > 0 {
        wrong.push(format!("{} objects were not as they were put", engine.repaired()));
    }
    wrong.extend(compare(&ground.netns, peers, families)?);
    drop(engine);
    ground.clear(peers, families)?;
    Ok(acknowledged - start)
}
