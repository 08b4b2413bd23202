//! Everything read and compared, against a bare dump of the same tables.

use std::time::{Duration, Instant};

use anyhow::ensure;
use flannel_core::{Family, Kernel, Owned, State};
use flannel_netlink::NetlinkKernel;

use crate::cluster::{Families, device, leases};
use crate::engine::Engine;
use crate::floor::index_of;
use crate::ground::Ground;
use crate::raw::{
    AF_BRIDGE, DUMP, GETADDR, GETNEIGH, GETNEXTHOP, GETROUTE, Raw, message, ndmsg, nhmsg, rtmsg,
};
use crate::report::{Report, median};
use crate::witness::compare;

const PAIRS: usize = 15;
const RATIO: f64 = 1.5;

pub(crate) fn run(peers: u32, families: Families) -> anyhow::Result<Report> {
    let ground = Ground::new()?;
    let mut engine = Engine::start(&ground, families)?;
    engine.send(leases(peers, families));
    engine.wait(peers as usize)?;
    drop(engine);
    let wrong = compare(&ground.netns, peers, families)?;
    let owned = owned(families)?;
    let kernel = NetlinkKernel::open_in(ground.netns.path())?;
    // The witness has just found that this is what is wanted.
    let want = kernel.snapshot(&owned)?;
    ensure!(want.len() >= 3 * peers as usize, "the snapshot has {} objects", want.len());
    let mut pairs = Vec::new();
    for _ in 0..PAIRS {
        let floor = ground.netns.run(|| bare_dump(families))?;
        pairs.push((read_and_compare(&kernel, &owned, &want)?.as_secs_f64(), floor.as_secs_f64()));
    }
    ground.clear(peers, families)?;
    let mut report = Report {
        bench: "resync",
        peers: Some(peers),
        family: Some(families.name()),
        seconds: Some(median(pairs.iter().map(|pair| pair.0))),
        floor_seconds: Some(median(pairs.iter().map(|pair| pair.1))),
        ratio: Some(median(pairs.iter().map(|pair| pair.0 / pair.1))),
        wrong,
        ..Report::default()
    };
    report.at_most("ratio", report.ratio, RATIO);
    Ok(report)
}

/// What the vxlan backend owns.
fn owned(families: Families) -> anyhow::Result<Owned> {
    Ok(Owned {
        links: Family::BOTH.iter().map(|family| device(*family).parse()).collect::<Result<_, _>>()?,
        networks: families.networks(),
        routes_on: ["eth0".parse()?].into(),
        ..Owned::default()
    })
}

fn read_and_compare(kernel: &NetlinkKernel, owned: &Owned, want: &State) -> anyhow::Result<Duration> {
    let start = Instant::now();
    let there = kernel.snapshot(owned)?;
    let changes = want.diff(&there);
    drop(there);
    let took = start.elapsed();
    ensure!(changes.is_empty(), "{} differences where nothing changed", changes.len());
    Ok(took)
}

/// The same requests that a snapshot makes; what comes is taken from the socket and not looked at.
fn bare_dump(families: Families) -> anyhow::Result<Duration> {
    let mut requests = vec![message(GETNEXTHOP, DUMP, &nhmsg(0, 0, 0), &[])];
    for family in families.iter() {
        let index = index_of(device(family))?;
        requests.push(message(GETADDR, DUMP, &ifaddrmsg(index), &[]));
        requests.push(message(GETNEIGH, DUMP, &ndmsg(0, 0, 0, 0), &[(8, &index.to_ne_bytes())]));
        requests.push(message(GETNEIGH, DUMP, &ndmsg(AF_BRIDGE, index, 0, 0), &[]));
    }
    for family in Family::BOTH {
        let mut header = rtmsg(family, 0, 0, 0);
        // Any kind of route.
        header[7] = 0;
        requests.push(message(GETROUTE, DUMP, &header, &[(15, &254u32.to_ne_bytes())]));
    }
    let mut raw = Raw::open()?;
    let start = Instant::now();
    for request in &requests {
        raw.dump(request, |_| ())?;
    }
    Ok(start.elapsed())
}

/// `struct ifaddrmsg`.
fn ifaddrmsg(index: u32) -> [u8; 8] {
    let [a, b, c, d] = index.to_ne_bytes();
    [0, 0, 0, 0, a, b, c, d]
}
