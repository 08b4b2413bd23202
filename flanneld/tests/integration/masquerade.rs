//! The options of masquerading: rules, subnet file and status of a daemon.

use std::fs;
use std::process::Command;

use flannel_netlink::testing::{in_netns, ip};
use nix::sys::signal::Signal;
use serde_json::{Value, json};

use crate::daemon::{Place, uplink};
use crate::running::wait_until;

const DUAL: &str = r#"{"Network":"10.1.0.0/16","SubnetMin":"10.1.128.0","SubnetMax":"10.1.191.0",
    "EnableIPv6":true,"IPv6Network":"fd00:1::/48","Backend":{"Type":"vxlan"}}"#;

fn in_nftables(config: &str) -> String {
    config.replacen('{', r#"{"EnableNFTables":true,"#, 1)
}

fn excluding(config: &str, list: &str) -> String {
    config.replacen('{', &format!("{{\"IPMasqExclude\":{list},"), 1)
}

/// All rules of the host.
fn rules() -> String {
    let output = |command: &str| {
        let output = Command::new("sh").args(["-c", command]).output().unwrap();
        String::from_utf8(output.stdout).unwrap()
    };
    output("iptables-save; ip6tables-save; nft list ruleset")
}

/// Lines of all rules with both words.
fn lines_with(words: [&str; 2]) -> usize {
    let all = rules().to_lowercase();
    all.lines().filter(|line| words.iter().all(|word| line.contains(word))).count()
}

fn status(place: &Place) -> Value {
    serde_json::from_str::<Value>(&place.request("/v1/status")).unwrap()["network"].take()
}

/// As k3s runs it: IPv4 is masqueraded, IPv6 is not, and the CNI plugin masquerades neither.
#[test]
fn one_family_alone_is_masqueraded() {
    in_netns(|| {
        uplink();
        for config in [DUAL.to_owned(), in_nftables(DUAL)] {
            let place = Place::new(&config);
            for (option, v4, v6) in [
                ("--ip-masq=ipv4", true, false),
                ("--ip-masq=ipv6", false, true),
                ("--ip-masq=true", true, true),
            ] {
                let mut daemon = place.start(&[option]);
                daemon.wait_for_log("running lease");
                assert!(place.subnet_env().ends_with("FLANNEL_IPMASQ=true\n"), "{option}");
                let masqueraded = |network| lines_with([network, "masquerade"]) > 0;
                assert_eq!(masqueraded("10.1.0.0/16"), v4, "{option}: {}", rules());
                assert_eq!(masqueraded("fd00:1::/48"), v6, "{option}: {}", rules());
                let families = status(&place)["masquerade"]["families"].take();
                let expected = [("IPv4", v4), ("IPv6", v6)].into_iter().filter(|(_, is)| *is);
                let expected: Vec<_> = expected.map(|(family, _)| family).collect();
                assert_eq!(families, json!(expected), "{option}");
                daemon.signal(Signal::SIGTERM);
                daemon.ended();
            }
            let mut daemon = place.start(&["--ip-masq=false"]);
            daemon.wait_for_log("running lease");
            assert!(place.subnet_env().ends_with("FLANNEL_IPMASQ=false\n"));
            assert_eq!(status(&place)["masquerade"], Value::Null);
            daemon.signal(Signal::SIGTERM);
            daemon.ended();
        }
    });
}

/// The network stays the same one: it is not built again, and its device is not touched.
#[test]
fn exclusions_of_the_network_config_are_followed_by_the_running_network() {
    in_netns(|| {
        uplink();
        for config in [DUAL.to_owned(), in_nftables(DUAL)] {
            let place = Place::new(&excluding(&config, r#"["172.16.0.0/12"]"#));
            let daemon = place.start(&["--ip-masq", "--ip-masq-exclude=198.51.100.0/24,fd00::/8"]);
            daemon.wait_for_log("running lease");
            let device = ip("-d link show flannel.1");
            let say = || format!("{}\n{}", rules(), daemon.log());
            // The rules of iptables may be in nftables too.
            let excluded = |subnet: &str| lines_with([subnet, "return"]).min(1);
            let count = |subnets: [&str; 4]| subnets.map(excluded);
            let all = ["198.51.100.0/24", "fd00::/8", "172.16.0.0/12", "203.0.113.0/24"];
            wait_until(|| count(all) == [1, 1, 1, 0], say);
            for (list, expected) in [
                (r#"["203.0.113.0/24","172.16.0.0/12"]"#, [1, 1, 1, 1]),
                (r#"["203.0.113.0/24","198.51.100.0/24"]"#, [1, 1, 0, 1]),
                ("[]", [1, 1, 0, 0]),
            ] {
                fs::write(place.registry().join("config"), excluding(&config, list)).unwrap();
                wait_until(|| count(all) == expected, say);
                let shown = || status(&place)["masquerade"]["exclude"].to_string();
                let is_shown =
                    || all.map(|subnet| usize::from(shown().contains(subnet))) == expected;
                wait_until(is_shown, || format!("{}\n{}", shown(), say()));
            }
            assert!(!daemon.log().contains("rebuilding the network"), "{}", daemon.log());
            assert_eq!(ip("-d link show flannel.1"), device);
            assert!(
                place.request("/metrics").contains("\nflannel_firewall_repairs_total 0\n"),
                "{}",
                daemon.log()
            );
        }
    });
}

#[test]
fn the_status_shows_address_ports_and_device() {
    in_netns(|| {
        uplink();
        let place = Place::new(&in_nftables(DUAL));
        let daemon = place.start(&[
            "--ip-masq",
            "--ip-masq-source=192.0.2.1",
            "--ip-masq-source=2001:db8::1",
            "--ip-masq-ports=2000-2999",
            "--ip-masq-interface=eth0",
        ]);
        daemon.wait_for_log("running lease");
        let expected = json!({
            "families": ["IPv4", "IPv6"], "exclude": [], "sources": ["192.0.2.1", "2001:db8::1"],
            "ports": "2000-2999", "interfaces": ["eth0"],
        });
        assert_eq!(status(&place)["masquerade"], expected);
        let rule = r#"oifname "eth0" meta l4proto udp snat to 192.0.2.1:2000-2999 fully-random"#;
        assert!(rules().contains(rule), "{}", rules());
        let rule = r#"oifname "eth0" snat to 2001:db8::1 fully-random"#;
        assert!(rules().contains(rule), "{}", rules());
    });
}
