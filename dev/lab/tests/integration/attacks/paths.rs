//! A pod that forges answers to the probes of paths of its node.

use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use flannel_lab::testing::as_root;
use flannel_lab::{Host, Lab, Namespace};
use serde_json::Value;
use test_support::eventually;
use test_support::forge::{Flood, RawIcmp};

use crate::udp::ctl;

const PATIENCE: Duration = Duration::from_secs(90);
/// The memory by which a daemon may grow, in KiB.
const GROWTH: u64 = 8 << 10;

fn up() -> Lab {
    let lab = Lab::builder().hosts(2).backend("vxlan").program(env!("CARGO_BIN_EXE_lab"));
    let lab = lab.start().unwrap();
    for host in lab.hosts() {
        // The pod can forge source addresses.
        for key in ["net/ipv4/conf/all/rp_filter", "net/ipv4/conf/default/rp_filter"] {
            host.namespace().sysctl(key, "0").unwrap();
        }
        host.start_daemon_with(&["--path-interval", "2", "--path-mtu"]).unwrap();
    }
    pass(&lab);
    lab
}

/// Waits until all pods reach each other. Adds those that are missing.
fn pass(lab: &Lab) {
    let matrix = lab.wait_until_reachable(PATIENCE).unwrap_or_else(|error| panic!("{error}"));
    assert!(matrix.is_complete(), "{:?}", matrix.failures().collect::<Vec<_>>());
}

/// The path to the only peer.
fn path(lab: &Lab, host: &Host) -> Value {
    ctl(lab, host, &["paths"])["paths"][0].clone()
}

/// Waits until the path has a state.
fn until(lab: &Lab, host: &Host, state: &str) -> Value {
    eventually(
        PATIENCE,
        || Some(path(lab, host)).filter(|path| path["state"] == state),
        || format!("not {state}: {:#}", path(lab, host)),
    )
}

/// The tunnel address of a host.
fn tunnel(host: &Host) -> IpAddr {
    host.subnet_env().unwrap().unwrap().subnets.v4.unwrap().base()
}

/// An echo of another host to this one, which an attacker may have seen.
fn seen_at(host: &Host) -> Vec<u8> {
    let namespace = host.namespace();
    namespace.run(|| RawIcmp::open(false).next_echo(PATIENCE)).unwrap().unwrap().icmp
}

/// Drops the packets of the tunnel that arrive at a host.
fn block(namespace: &Namespace) {
    namespace
        .run(|| {
            for command in [
                "add table inet t",
                "add chain inet t c { type filter hook input priority 0; }",
                "add rule inet t c udp dport 8472 drop",
            ] {
                flannel_netlink::testing::run("nft", command);
            }
        })
        .unwrap();
}

#[test]
fn a_pod_that_forges_answers_changes_no_path() {
    as_root(|| {
        let lab = up();
        let [host, other] = lab.hosts() else { panic!("two hosts") };
        until(&lab, host, "ok");
        let pod = host.pod().unwrap();
        let flood = Flood {
            attacker: pod.addresses().v4.unwrap(),
            node: host.addresses().v4.unwrap(),
            source: tunnel(host),
            peer: tunnel(other),
            earlier: seen_at(other),
        };
        let before = host.daemon_rss().unwrap();
        let over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let _ends = Ends(&over);
            scope.spawn(|| pod.namespace().run(|| flood.run(600, &over)).unwrap());
            block(other.namespace());
            let blocked = until(&lab, host, "tunnel blocked");
            eventually(
                PATIENCE,
                || path(&lab, host)["probed"].as_f64() > blocked["probed"].as_f64(),
                || format!("{:#}", path(&lab, host)),
            );
            assert_eq!(path(&lab, host)["state"], "tunnel blocked");
            let status = ctl(&lab, host, &["paths"]);
            assert_eq!(status["summary"]["failing"], 1, "{status:#}");
            other.run("nft", &["delete", "table", "inet", "t"]).unwrap();
            let works = until(&lab, host, "ok");
            assert_eq!(works["mtu"], Value::Null, "{works:#}");
            // The other node's probes and the packets of pods pass meanwhile.
            until(&lab, other, "ok");
            pass(&lab);
        });
        let grown = host.daemon_rss().unwrap().saturating_sub(before);
        assert!(grown < GROWTH, "the daemon grew by {grown} KiB");
    });
}

/// Ends a flood when it is dropped, also after a failed assertion.
struct Ends<'a>(&'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}
