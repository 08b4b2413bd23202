//! The tunnel device deleted by another program: the time until all peers are in place again.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use flannel_netlink::testing::ip;

use crate::parts::cluster::{Families, device, leases};
use crate::parts::engine::Engine;
use crate::parts::fixture::Fixture;
use crate::parts::floor::{self, Form, Took, WAYS};
use crate::parts::report::{Report, median};
use crate::parts::timed::Timed;
use crate::parts::witness::compare;

const ROUNDS: usize = 7;
const RATIO: f64 = 2.0;

pub(crate) fn run(peers: u32, families: Families) -> anyhow::Result<Report> {
    let mut wrong = Vec::new();
    let mut ours = Vec::new();
    let mut floors = Vec::<Took>::new();
    for _ in 0..ROUNDS {
        let mut took = Took::default();
        for (took, way) in took.iter_mut().zip(WAYS) {
            *took = floor::measure(peers, families, Form::Nexthops, way, &mut wrong)?;
        }
        floors.push(took);
        ours.push(run_once(peers, families, &mut wrong)?.as_secs_f64());
    }
    let best = floor::best(&floors.iter().collect::<Vec<_>>());
    let floor = || floors.iter().map(|took| took[best].as_secs_f64());
    let mut report = Report {
        peers: Some(peers),
        family: Some(families.name()),
        seconds: Some(median(ours.iter().copied())),
        floor_seconds: Some(median(floor())),
        ratio: Some(median(ours.iter().zip(floor()).map(|(ours, floor)| ours / floor))),
        wrong,
        ..Report::default()
    };
    report.at_most("ratio", report.ratio, RATIO);
    Ok(report)
}

/// The time from the end of the deletion until the kernel has acknowledged the last object.
fn run_once(peers: u32, families: Families, wrong: &mut Vec<String>) -> anyhow::Result<Duration> {
    let fixture = Fixture::new()?;
    let mut timed = None;
    let mut engine = Engine::start_on(&fixture, families, |kernel| {
        Arc::new(timed.insert(Timed::new(kernel)).clone())
    })?;
    engine.send(leases(peers, families));
    engine.wait(peers as usize)?;
    let start = fixture.netns.run(|| {
        families.iter().for_each(|family| drop(ip(&format!("link del {}", device(family)))));
        Instant::now()
    });
    engine.wait_repaired(peers as usize)?;
    let acknowledged = timed
        .as_ref()
        .and_then(Timed::acknowledged)
        .context("the engine sent nothing to the kernel")?;
    wrong.extend(compare(&fixture.netns, peers, families)?);
    drop(engine);
    fixture.clear(peers, families, wrong);
    Ok(acknowledged.saturating_duration_since(start))
}
