//! Several daemons on a host, each with a network of its own.

use std::fs;
use std::process::Command;

use flannel_netlink::testing::{in_netns, ip};
use nix::sys::signal::Signal;
use serde_json::Value;

use crate::daemon::{Place, uplink};
use crate::running::{Daemon, wait_until};

/// The config of a network: `10.N.0.0/16` with VNI N.
fn config(n: u8, nftables: bool) -> String {
    format!(
        r#"{{"Network":"10.{n}.0.0/16","EnableNFTables":{nftables},"EnableIPv6":true,
            "IPv6Network":"fd00:{n}::/48","Backend":{{"Type":"vxlan","VNI":{n}}}}}"#
    )
}

fn is_ready(place: &Place) -> bool {
    let status: Value = serde_json::from_str(&place.request("/v1/status")).unwrap();
    status["ready"] == true
}

/// Repairs of firewall rules and of all other objects.
fn repairs(place: &Place) -> Vec<String> {
    let metrics = place.request("/metrics");
    let is_repair =
        |line: &&str| line.contains("repair") && line.contains("_total") && !line.starts_with('#');
    let lines = metrics.lines().filter(is_repair).filter(|line| !line.ends_with(" 0"));
    lines.map(str::to_owned).collect()
}

fn rules() -> String {
    let script = "iptables-save; ip6tables-save; nft list ruleset";
    let output = Command::new("sh").args(["-c", script]).output().unwrap();
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn two_daemons_live_side_by_side_without_repairs() {
    const ARGS: &[&str] = &["--ip-masq", "--iptables-resync=1", "--ip-blackhole-route"];
    in_netns(|| {
        uplink();
        for [first, second] in [[false, false], [true, true], [true, false]] {
            let one = Place::new(&config(1, first));
            let two = Place::new(&config(2, second));
            let start = |place: &Place| {
                let daemon = place.start(ARGS);
                daemon.wait_for_log("running lease");
                wait_until(|| is_ready(place), || daemon.log());
                daemon
            };
            let daemon = start(&one);
            let mut other = start(&two);
            for _ in 0..2 {
                other.signal(Signal::SIGTERM);
                other.ended();
                other = start(&two);
            }
            // Each daemon replaces its rules once more.
            for (place, n, nftables) in [(&one, 1, first), (&two, 2, second)] {
                let list = format!("{{\"IPMasqExclude\":[\"192.0.{n}.0/24\"],");
                let changed = config(n, nftables).replacen('{', &list, 1);
                fs::write(place.registry().join("config"), changed).unwrap();
                wait_until(|| rules().contains(&format!("192.0.{n}.0/24")), rules);
            }
            for (place, daemon) in [(&one, &daemon), (&two, &other)] {
                assert_eq!(repairs(place), [""; 0], "{}", daemon.log());
                assert!(is_ready(place), "{}", daemon.log());
            }
            for network in ["10.1.0.0/16", "10.2.0.0/16", "fd00:1::/48", "fd00:2::/48"] {
                assert!(rules().contains(network), "{network}: {}", rules());
            }
            // Without rules of its own, a daemon leaves those of the other one.
            other.signal(Signal::SIGTERM);
            other.ended();
            let other = two.start(&["--iptables-forward-rules=false"]);
            other.wait_for_log("running lease");
            wait_until(|| !rules().contains("10.2.0.0/16"), || rules() + &other.log());
            assert!(rules().contains("10.1.0.0/16"), "{}", rules());
            assert_eq!(repairs(&one), [""; 0], "{}", daemon.log());
            drop([daemon, other]);
            ip("link del flannel.1");
            ip("link del flannel.2");
            for link in ["flannel-v6.1", "flannel-v6.2"] {
                ip(&format!("link del {link}"));
            }
        }
    });
}

#[test]
fn a_second_daemon_says_which_option_separates_it_from_the_first() {
    in_netns(|| {
        uplink();
        let one = Place::new(&config(1, true));
        let daemon = one.start(&["--healthz-ip=127.0.0.1", "--healthz-port=8471"]);
        daemon.wait_for_log("running lease");
        let before = one.subnet_env();
        let state = one.dir.path().join("state");
        let state = format!("--state-dir={}", state.display());
        let subnet_file = format!("--subnet-file={}", one.subnet_file().display());
        let socket = one.subnet_file().with_file_name("flanneld.sock");
        let socket = format!("--control-socket={}", socket.display());
        let same_vni = config(2, true).replace("\"VNI\":2", "\"VNI\":1");
        let same_network = config(1, true).replace("\"VNI\":1", "\"VNI\":2");
        for (config, args, says) in [
            (same_vni, &[][..], "device flannel-v6.1: stop it; or, if both are to run"),
            (same_network, &[], "pod network 10.1.0.0/16: stop it; or, if both are to run"),
            (config(2, true), &[state.as_str()], "set another --state-dir"),
            (config(2, true), &[&subnet_file, "--control-socket=off"], "another --subnet-file"),
            (config(2, true), &[&socket], "--control-socket"),
            (
                config(2, true),
                &["--healthz-ip=127.0.0.1", "--healthz-port=8471"],
                "--healthz-port 8471",
            ),
        ] {
            let two = Place::new(&config);
            let mut second: Daemon = two.start(args);
            assert_eq!(second.ended().code(), Some(1), "{}", second.log());
            second.wait_for_log(says);
            assert_eq!(one.subnet_env(), before);
        }
        assert!(is_ready(&one) && repairs(&one).is_empty(), "{}", daemon.log());
    });
}
