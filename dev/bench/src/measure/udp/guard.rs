//! The cost of the guard of vxlan: its throughput with and without it, and the time to load it.

use std::net::Ipv4Addr;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use flannel_core::Subnet;
use flannel_core::backend::Transport;
use flannel_core::kernel::{Outcome, RecordKeeper};
use flannel_core::object::Change;
use flannel_firewall::{Guard, TunnelEnd};
use flannel_lab::Namespace;
use serde_json::json;

use super::{Pair, VXLAN_PORT};
use crate::parts::process::prepare;
use crate::parts::report::{Report, median};

/// The rounds of a figure, in which vxlan with and without the guard alternate.
const ROUNDS: usize = 7;
/// The smallest share of the throughput of one stream without the guard.
const SHARE: f64 = 0.95;
/// The smallest share for small packets. The aim of 0.95 is out of reach for rules of nf_tables
/// where the cores of one machine do the work of both hosts: on the way of each packet its four
/// chains are called seven times, and without any rule in them the share is 0.95 at most.
const SHARE_OF_PACKETS: f64 = 0.8;
/// The longest time for all pairs, in seconds.
const LOAD: f64 = 0.5;

/// Measures throughput for `seconds` in each round, and loads a guard with `peers` pairs.
pub(crate) fn run(peers: u32, seconds: u64) -> anyhow::Result<Report> {
    let interrupter = prepare()?;
    let time = Duration::from_secs(seconds);
    let load = load(peers)?;
    let guarded = json!({ "Type": "vxlan", "SourceCheck": true });
    let guarded = Pair::start(guarded, &interrupter)?;
    let plain = Pair::start(json!({ "Type": "vxlan" }), &interrupter)?;
    let tables = guarded.lab.hosts()[0].run("nft", &["list", "tables"])?;
    ensure!(tables.contains("flannel-guard-vxlan"), "there is no guard: {tables}");
    let [gbps, gbps_off, ratio] = compare(&guarded, &plain, |pair: &Pair| pair.streams(1, time))?;
    let [_, _, pps_ratio] = compare(&guarded, &plain, |pair: &Pair| pair.packets(time))?;
    let mut report = Report {
        peers: Some(peers),
        gbps: Some(gbps),
        gbps_off: Some(gbps_off),
        ratio: Some(ratio),
        pps_ratio: Some(pps_ratio),
        load_s: Some(load),
        ..Report::default()
    };
    report.at_least("one stream with the guard, share", ratio, SHARE);
    report.at_least("64-byte packets with the guard, share", pps_ratio, SHARE_OF_PACKETS);
    report.at_most("the load of the guard, s", Some(load), LOAD);
    Ok(report)
}

/// The medians of a figure with and without the guard, and the median of the ratios. The order
/// changes from round to round.
fn compare(
    guarded: &Pair,
    plain: &Pair,
    measure: impl Fn(&Pair) -> anyhow::Result<f64>,
) -> anyhow::Result<[f64; 3]> {
    let mut on = Vec::new();
    let mut off = Vec::new();
    for round in 0..ROUNDS {
        if round % 2 == 0 {
            on.push(measure(guarded)?);
            off.push(measure(plain)?);
        } else {
            off.push(measure(plain)?);
            on.push(measure(guarded)?);
        }
    }
    let ratio = median(on.iter().zip(&off).map(|(on, off)| on / off));
    Ok([median(on), median(off), ratio])
}

/// The time in which the kernel takes the pairs of so many peers, in seconds.
fn load(peers: u32) -> anyhow::Result<f64> {
    let guard = Guard::new("guard-bench");
    let end = TunnelEnd {
        drops: true,
        device: Some("flannel.1".parse().context("a name")?),
        local: [192, 0, 2, 1].into(),
        transports: vec![Transport::Udp(VXLAN_PORT)],
    };
    let peer = |n: u32| {
        let subnet = Subnet::new(Ipv4Addr::from_bits(0x0a00_0000 + (n << 8)).into(), 24)?;
        Some(guard.peer(subnet, Ipv4Addr::from_bits(0xac10_0000 + n).into()))
    };
    let mut changes = vec![Change::Put(guard.tunnel(&end).into())];
    changes.extend((0..peers).filter_map(peer).map(|record| Change::Put(record.into())));
    let namespace = Namespace::new("guard-bench")?;
    namespace.run(|| {
        let begin = Instant::now();
        let outcomes = guard.apply(&changes);
        let time = begin.elapsed().as_secs_f64();
        outcomes.into_iter().try_for_each(Outcome::into_result)?;
        let found = guard.records()?.len();
        ensure!(found == peers as usize + 1, "the guard has {found} records");
        Ok(time)
    })?
}
