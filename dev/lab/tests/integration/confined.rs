//! The data path works with the capabilities, system calls and sockets of the systemd unit.

use std::time::Duration;

use flannel_core::address::Family;
use flannel_lab::testing::as_root;
use flannel_lab::{Host, Lab};
use serde_json::json;
use test_support::{eventually, unit};

const PATIENCE: Duration = Duration::from_secs(60);

#[test]
fn pods_reach_each_other_under_the_restrictions_of_the_unit() {
    as_root(|| {
        confined(json!("host-gw"), false);
        confined(json!({ "Type": "vxlan", "DirectRouting": true }), false);
        confined(json!("vxlan"), true);
        confined(json!("udp"), true);
    });
}

fn confined(backend: serde_json::Value, nftables: bool) {
    let dir = tempfile::tempdir().unwrap();
    let program = dir.path().join("daemon");
    let builder = Lab::builder().hosts(2).families(Family::BOTH).backend(backend);
    let lab = builder.config_field("EnableNFTables", nftables).program(&program).start().unwrap();
    let tests = std::env::current_exe().unwrap();
    let confined = tests.ancestors().nth(2).unwrap().join("examples/confined");
    assert!(confined.exists(), "build {} first: cargo build --examples", confined.display());
    let script = format!(
        "#!/bin/sh\nexec setpriv --no-new-privs --bounding-set=-all{} {} {} \"$@\"\n",
        unit::capabilities().map(|name| format!(",+{name}")).collect::<String>(),
        confined.display(),
        env!("CARGO_BIN_EXE_lab"),
    );
    test_support::write_script(&program, &script);

    for host in lab.hosts() {
        host.start_daemon_with(&["--ip-masq", "--path-mtu"]).unwrap();
    }
    lab.add_pods(PATIENCE).unwrap();
    pass(&lab);
    let host = &lab.hosts()[0];
    let pid = host.daemon_pid().unwrap();
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    for line in ["CapBnd:\t0000000000003000", "NoNewPrivs:\t1", "Seccomp:\t2"] {
        assert!(status.contains(line), "{line}: {status}");
    }
    // Repairs need the same calls, and programs of iptables others.
    damage(host, nftables);
    pass(&lab);
    assert!(!host.log().unwrap().contains("not permitted"), "{}", host.log().unwrap());
}

fn pass(lab: &Lab) {
    let matrix = lab.wait_until_reachable(PATIENCE).unwrap_or_else(|error| panic!("{error}"));
    assert!(matrix.is_complete(), "{:?}", matrix.failures().collect::<Vec<_>>());
}

fn damage(host: &Host, nftables: bool) {
    if nftables {
        host.run("nft", &["flush", "ruleset"]).unwrap();
    } else {
        for program in ["iptables", "ip6tables"] {
            host.run(program, &["-t", "nat", "-F"]).unwrap();
        }
    }
    for device in ["flannel.1", "flannel0"] {
        if host.run("ip", &["link", "show", device]).is_ok() {
            host.run("ip", &["link", "del", device]).unwrap();
        }
    }
    let rules = |program| host.run(program, &["-t", "nat", "-S"]).unwrap();
    eventually(
        PATIENCE,
        || {
            if nftables {
                let tables = host.run("nft", &["list", "tables"]).unwrap();
                ["flannel-ipv4", "flannel-ipv6"].iter().all(|table| tables.contains(table))
            } else {
                ["iptables", "ip6tables"].iter().all(|program| {
                    let rules = rules(program);
                    rules.contains("-A FLANNEL-POSTRTG") && rules.contains("-j FLANNEL-POSTRTG")
                })
            }
        },
        || host.log().unwrap(),
    );
}
