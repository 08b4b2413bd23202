//! Peers that arrive all at once: from the sending of the view to the kernel's last acknowledgement.

use std::time::{Duration, Instant};

use flannel_core::LeaseSet;

use crate::cluster::{Families, leases};
use crate::engine::Engine;
use crate::floor::{self, Form};
use crate::ground::Ground;
use crate::report::{Report, median};
use crate::witness::compare;

/// Floor and subject alternate, so that a machine whose speed drifts misleads nobody.
const PAIRS: usize = 5;
const RATIO: f64 = 1.3;
/// Routes with a gateway each take time by the square of their number: beyond this they are not waited for.
const CLASSIC_MOST: u32 = 30_000;
/// From here on it must be so many times faster than them.
const CLASSIC: (u32, f64) = (30_000, 10.0);

pub(crate) fn run(peers: u32, families: Families) -> anyhow::Result<Report> {
    let all = leases(peers, families);
    let (mut pairs, mut wrong) = (Vec::new(), Vec::new());
    for _ in 0..PAIRS {
        let floor = floor::measure(peers, families, Form::Nexthops, &mut wrong)?;
        let ours = ours(peers, families, &all, &mut wrong)?;
        pairs.push((ours.as_secs_f64(), floor.as_secs_f64()));
    }
    let seconds = median(pairs.iter().map(|pair| pair.0));
    let classic = if peers <= CLASSIC_MOST {
        Some(floor::measure(peers, families, Form::Classic, &mut wrong)?.as_secs_f64())
    } else {
        None
    };
    let mut report = Report {
        bench: "cold-start",
        peers: Some(peers),
        family: Some(families.name()),
        seconds: Some(seconds),
        floor_seconds: Some(median(pairs.iter().map(|pair| pair.1))),
        classic_floor_seconds: classic,
        ratio: Some(median(pairs.iter().map(|pair| pair.0 / pair.1))),
        wrong,
        ..Report::default()
    };
    report.at_most("ratio", report.ratio, RATIO);
    if let Some(classic) = classic.filter(|_| peers >= CLASSIC.0) {
        report.at_least("classic_floor_seconds / seconds", classic / seconds, CLASSIC.1);
    }
    Ok(report)
}

fn ours(peers: u32, families: Families, all: &LeaseSet, wrong: &mut Vec<String>) -> anyhow::Result<Duration> {
    let ground = Ground::new()?;
    let mut engine = Engine::start(&ground, families)?;
    let leases = all.clone();
    let start = Instant::now();
    engine.send(leases);
    engine.wait_acknowledged(peers as usize)?;
    let took = start.elapsed();
    // What it looks over afterwards must have been right.
    engine.wait(peers as usize)?;
    if engine.repaired() > 0 {
        wrong.push(format!("{} objects were not as they were put", engine.repaired()));
    }
    wrong.extend(compare(&ground.netns, peers, families)?);
    drop(engine);
    ground.clear(peers, families)?;
    Ok(took)
}
