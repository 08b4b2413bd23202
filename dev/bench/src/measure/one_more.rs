//! One new peer among many: the time from the sending of the view until the event of its last
//! object.

use std::collections::HashSet;
use std::time::Instant;

use crate::parts::cluster::{Families, Peer, leases};
use crate::parts::engine::Engine;
use crate::parts::fixture::Fixture;
use crate::parts::raw::{EventSocket, Id, octets};
use crate::parts::report::{Latency, Report};
use crate::parts::witness::compare;

const P99_MS: f64 = 2.0;
/// The number of peers that warm up, and are not measured.
const WARM_UP: u32 = 50;
/// The number of /24 subnets in 10.0.0.0/8, without the unused subnet and the subnet of this host.
const MOST: u32 = (1 << 16) - 2;

pub(crate) fn run(peers: u32, families: Families, samples: u32) -> anyhow::Result<Report> {
    let all = peers + WARM_UP + samples;
    anyhow::ensure!(
        all <= MOST,
        "{all} peers do not fit: --peers and --samples may be {} together",
        MOST - WARM_UP
    );
    let fixture = Fixture::new()?;
    let mut engine = Engine::start(&fixture, families)?;
    let mut leases = leases(peers, families);
    engine.send(leases.clone());
    engine.wait(peers as usize)?;
    let figures = fixture.netns.run(|| -> anyhow::Result<Vec<f64>> {
        let mut events = EventSocket::open()?;
        let mut figures = Vec::new();
        for number in peers + 2..all + 2 {
            let peer = Peer(number);
            leases.insert(peer.lease(families));
            let view = leases.clone();
            let mut missing = last_objects(peer, families);
            let start = Instant::now();
            engine.send(view);
            events.listen(|object| {
                let part = match object.id {
                    Id::Neigh(_, address) => (0, address),
                    Id::Fdb(_, mac) => (1, mac),
                    Id::Route(dst) => (2, dst),
                    Id::Nexthop(_) => return false,
                };
                missing.remove(&part);
                missing.is_empty()
            })?;
            figures.push(start.elapsed().as_secs_f64() * 1e3);
            engine.wait(number as usize - 1)?;
        }
        Ok(figures.split_off(WARM_UP as usize))
    })?;
    let mut wrong = compare(&fixture.netns, all, families)?;
    drop(engine);
    fixture.clear(all, families, &mut wrong);
    let Latency { samples, p50_ms, p99_ms } = Latency::of(&figures);
    let mut report = Report {
        peers: Some(peers),
        family: Some(families.name()),
        samples: Some(samples),
        p50_ms: Some(p50_ms),
        p99_ms: Some(p99_ms),
        wrong,
        ..Report::default()
    };
    report.at_most("p99_ms", report.p99_ms, P99_MS);
    Ok(report)
}

/// The objects whose events are awaited. A route follows its nexthop object.
fn last_objects(peer: Peer, families: Families) -> HashSet<(u8, Vec<u8>)> {
    families
        .iter()
        .flat_map(|family| {
            let base = octets(peer.subnet(family).base());
            [(0, base.clone()), (1, peer.mac(family).0.to_vec()), (2, base)]
        })
        .collect()
}
