//! A cluster moves from one backend to another while packets and TCP connections go between all
//! pods. `tests/moves.rs` has the moves that need a guest.

pub(crate) mod cluster;
mod impossible;
mod udp;
mod wireguard;

use flannel_core::address::Family;
use flannel_lab::testing::as_root;
use flannel_lab::{Builder, Lab, Signal};

use self::cluster::{Pace, at_once, rolling, under_traffic};

/// Three hosts with both families.
fn dual_stack() -> Builder {
    Lab::builder().families(Family::BOTH)
}

#[test]
fn a_cluster_moves_from_host_gw_to_vxlan_at_once() {
    as_root(|| {
        under_traffic(dual_stack(), Pace::USUAL, "host-gw", |cluster, _| {
            at_once(cluster, "vxlan");
            cluster.wait_for_end("vxlan", &[]);
        });
    });
}

#[test]
fn a_cluster_moves_from_vxlan_to_host_gw_at_once() {
    as_root(|| {
        under_traffic(dual_stack(), Pace::USUAL, "vxlan", |cluster, _| {
            at_once(cluster, "host-gw");
            cluster.wait_for_end("host-gw", &["flannel.1", "flannel-v6.1"]);
            for host in cluster.lab.hosts() {
                assert_eq!(host.subnet_env().unwrap().unwrap().mtu, 1500);
            }
        });
    });
}

#[test]
fn a_cluster_moves_from_host_gw_to_vxlan_by_a_rolling_restart() {
    as_root(|| {
        under_traffic(dual_stack(), Pace::USUAL, "host-gw", |cluster, traffic| {
            rolling(cluster, traffic, ["host-gw", "vxlan"]);
            cluster.lab.hosts().iter().for_each(|it| cluster.wait_for_offers(it, &["vxlan"]));
        });
    });
}

#[test]
fn a_cluster_moves_from_vxlan_to_host_gw_by_a_rolling_restart() {
    as_root(|| {
        under_traffic(dual_stack(), Pace::USUAL, "vxlan", |cluster, traffic| {
            rolling(cluster, traffic, ["vxlan", "host-gw"]);
            cluster.lab.hosts().iter().for_each(|it| cluster.wait_for_offers(it, &["host-gw"]));
        });
    });
}

/// One host is killed in the midst of the move, then the config of all hosts goes back.
#[test]
fn a_move_survives_a_kill_and_goes_back() {
    as_root(|| {
        under_traffic(dual_stack(), Pace::USUAL, "vxlan", |cluster, traffic| {
            let [first, second, third] = cluster.lab.hosts() else { panic!("three hosts") };
            cluster.configure(first, "host-gw");
            cluster.configure(second, "host-gw");
            cluster.wait_for_offers(first, &["vxlan", "host-gw"]);
            cluster.wait_for_offers(second, &["vxlan", "host-gw"]);
            cluster.is_well(second, "host-gw", &["vxlan", "host-gw"]);
            first.stop_daemon(Signal::SIGKILL).unwrap().unwrap();
            traffic.wait_for_arrivals();
            cluster.start_daemon(first);
            traffic.wait_for_arrivals();
            cluster.wait_for_offers(first, &["vxlan", "host-gw"]);
            assert_eq!(cluster.offers(third), ["vxlan"]);
            cluster.configure(second, "vxlan");
            traffic.wait_for_arrivals();
            // All nodes have it as the first offer.
            cluster.wait_for_offers(second, &["vxlan"]);
            assert_eq!(cluster.offers(first), ["vxlan", "host-gw"]);
            traffic.wait_for_arrivals();
            cluster.configure(first, "vxlan");
            for host in [first, second, third] {
                cluster.wait_for_offers(host, &["vxlan"]);
            }
            traffic.wait_for_arrivals();
        });
    });
}
