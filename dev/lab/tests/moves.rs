//! Moves between all backends that are data, in a guest whose kernel has all devices. It takes ten
//! minutes, so `.ci/long` runs it.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

#[allow(dead_code, reason = "the other tests of moves use the rest")]
#[path = "integration/moving/cluster.rs"]
mod cluster;

use std::time::Duration;

use flannel_lab::Lab;
use test_support::guest::in_qemu_for;

use self::cluster::{Pace, at_once, rolling, under_traffic};

const MODULES: [&str; 10] = [
    "veth",
    "bridge",
    "vxlan",
    "ipip",
    "wireguard",
    "iptable_nat",
    "iptable_filter",
    "xt_MASQUERADE",
    "xt_comment",
    "xt_mark",
];

/// A way from backend to backend that has each ordered pair once.
const WAY: [&str; 13] = [
    "host-gw",
    "vxlan",
    "host-gw",
    "ipip",
    "host-gw",
    "wireguard",
    "vxlan",
    "ipip",
    "vxlan",
    "wireguard",
    "ipip",
    "wireguard",
    "host-gw",
];

const LIMIT: Duration = Duration::from_secs(15 * 60);

/// Programs in the guest are slow.
const PACE: Pace = Pace { patience: Duration::from_secs(180), gap: Duration::from_millis(100) };

#[test]
fn a_cluster_moves_between_all_backends_at_once() {
    in_qemu_for(LIMIT, &MODULES, || {
        under_traffic(Lab::builder().hosts(2), PACE, WAY[0], |cluster, traffic| {
            for to in &WAY[1..] {
                at_once(cluster, to);
                cluster.lab.hosts().iter().for_each(|it| cluster.wait_for_offers(it, &[to]));
                traffic.wait_for_arrivals();
                println!("moved to {to}");
            }
        });
    });
}

#[test]
fn a_cluster_moves_between_all_backends_by_rolling_restarts() {
    in_qemu_for(LIMIT, &MODULES, || {
        under_traffic(Lab::builder().hosts(2), PACE, WAY[0], |cluster, traffic| {
            for way in WAY.windows(2) {
                let from = way[0];
                let to = way[1];
                rolling(cluster, traffic, [from, to]);
                cluster.lab.hosts().iter().for_each(|it| cluster.wait_for_offers(it, &[to]));
                traffic.wait_for_arrivals();
                println!("moved to {to}");
            }
        });
    });
}

#[test]
fn each_ordered_pair_is_on_the_way_once() {
    let mut pairs: Vec<_> = WAY.windows(2).map(|way| (way[0], way[1])).collect();
    pairs.sort_unstable();
    pairs.dedup();
    assert_eq!(pairs.len(), 4 * 3);
}
