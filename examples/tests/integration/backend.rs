//! The backend `lane` in real daemons: two hosts, their pods, and each verb of the control program.

use std::process::{Command, Output};
use std::time::{Duration, Instant};

use examples::Lane;
use flannel_core::address::Family;
use flannel_core::{Backend, Config};
use flannel_firewall::{Guarded, Usual};
use flannel_lab::testing::as_root;
use flannel_lab::{Host, Lab, Signal};
use serde_json::{Value, json};

pub(crate) const PROGRAM: &str = env!("CARGO_BIN_EXE_lane-node");
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// Two hosts without daemons.
fn hosts(backend: Value) -> Lab {
    let lab = Lab::builder().hosts(2).backend(backend).families(Family::BOTH);
    let lab = lab.config_field("EnableNFTables", true).program(PROGRAM).start().unwrap();
    for host in lab.hosts() {
        for key in ["net/ipv4/conf/all/rp_filter", "net/ipv4/conf/default/rp_filter"] {
            host.namespace().sysctl(key, "0").unwrap();
        }
    }
    lab
}

/// The hosts of [`hosts`], with daemons, and with pods that reach each other.
fn up(backend: Value) -> Lab {
    let lab = hosts(backend);
    for host in lab.hosts() {
        host.start_daemon_with(&["--ip-masq"]).unwrap();
    }
    let matrix = lab.wait_until_reachable(PATIENCE).unwrap_or_else(|error| panic!("{error}"));
    assert!(matrix.is_complete(), "{:#?}", matrix.failures().collect::<Vec<_>>());
    assert_eq!(matrix.pairs.len(), 4, "both ways, by both families");
    lab
}

/// The output of the control program on a host.
pub(crate) fn ctl(lab: &Lab, host: &Host, args: &[&str]) -> Output {
    let mut command = Command::new(PROGRAM);
    command.arg("ctl").args(args);
    command.arg("--registry").arg(format!("dir:{}", lab.registry().display()));
    command.arg("--control-socket").arg(host.dir().join("flanneld.sock"));
    command.arg("--subnet-file").arg(host.subnet_file());
    command.arg("--state-dir").arg(host.dir().join("state"));
    host.namespace().output(&mut command).unwrap()
}

pub(crate) fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

/// The output of a verb, which succeeds.
pub(crate) fn output_of(lab: &Lab, host: &Host, args: &[&str]) -> String {
    let output = ctl(lab, host, args);
    assert!(output.status.success(), "{args:?}: {}", text(&output));
    text(&output)
}

/// The JSON output of a verb.
fn answers(lab: &Lab, host: &Host, args: &[&str]) -> Value {
    let output = ctl(lab, host, &[args, &["--json"]].concat());
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {output:?}"))
}

pub(crate) fn wait_until(mut condition: impl FnMut() -> bool, otherwise: impl Fn() -> String) {
    let deadline = Instant::now() + PATIENCE;
    while !condition() {
        assert!(Instant::now() < deadline, "{}", otherwise());
        std::thread::park_timeout(Duration::from_millis(20));
    }
}

/// The findings of the doctor that do not depend on the machine, each on one line.
fn findings(lab: &Lab, host: &Host) -> Vec<String> {
    let value = answers(lab, host, &["doctor", "--iface", "eth0"]);
    let found = value["findings"].as_array().unwrap().iter();
    found.filter(|f| f["check"] != "bridge-netfilter").map(ToString::to_string).collect()
}

fn lane(backend: &str) -> String {
    format!(r#"{{"Network":"10.1.0.0/16","Backend":{backend}}}"#)
}

/// `config check` and `config set` check the backend's options, and name the wrong field.
#[test]
fn config_is_validated() {
    as_root(|| {
        let lab = hosts(json!({ "Type": "lane", "Lane": 7 }));
        let host = &lab.hosts()[0];
        let file = lab.dir().join("candidate");
        let path = file.display().to_string();
        let output = output_of(&lab, host, &["config", "check"]);
        assert!(output.contains("the config is valid") && output.contains("lane"), "{output}");
        for good in [r#"{"Type":"lane","Lane":4094}"#, r#"{"type":"LANE","lane":1,"port":7000}"#] {
            std::fs::write(&file, lane(good)).unwrap();
            output_of(&lab, host, &["config", "check", &path]);
        }
        for (bad, parts) in [
            (r#"{"Type":"lane"}"#, ["Backend.Lane", "nothing"]),
            (r#"{"Type":"lane","Lane":4095}"#, ["Backend.Lane", "1 to 4094"]),
            (r#"{"Type":"lane","Lane":"7"}"#, ["Backend.Lane", "1 to 4094"]),
            (r#"{"Type":"lane","Lane":7,"Port":-1}"#, ["Backend.Port", "a UDP port"]),
            (
                r#"{"Type":"lame","Lane":7}"#,
                ["Backend.Type", "vxlan, host-gw, ipip, wireguard, udp, extension, alloc, lane"],
            ),
        ] {
            std::fs::write(&file, lane(bad)).unwrap();
            for verb in ["check", "set"] {
                let output = ctl(&lab, host, &["config", verb, &path]);
                assert_eq!(output.status.code(), Some(1));
                let output = text(&output);
                assert!(parts.iter().all(|part| output.contains(part)), "{bad}: {output}");
            }
        }
        let only_v6 = r#"{"EnableIPv4":false,"EnableIPv6":true,"IPv6Network":"fd00:1::/48",
            "Backend":{"Type":"lane","Lane":7}}"#;
        std::fs::write(&file, only_v6).unwrap();
        let output = text(&ctl(&lab, host, &["config", "check", &path]));
        assert!(output.contains("EnableIPv4 is false"), "{output}");
    });
}

/// A daemon does not start with a wrong option, and a running one ignores it.
#[test]
fn a_wrong_option_prevents_a_start_and_a_running_daemon_ignores_it() {
    as_root(|| {
        let lab = hosts(json!({ "Type": "lane", "Lane": 0 }));
        let host = &lab.hosts()[0];
        let log = || host.log().unwrap();
        let link = |name| host.run("ip", &["-d", "link", "show", name]);
        host.start_daemon().unwrap();
        wait_until(|| host.check_daemon().is_err(), log);
        assert!(log().contains("Backend.Lane: 0 is not valid"), "{}", log());

        let patch = r#"{"Backend": {"Lane": 7}}"#;
        output_of(&lab, host, &["config", "patch", patch]);
        host.start_daemon().unwrap();
        wait_until(|| log().contains("in sync"), log);
        assert!(link("lane7").unwrap().contains("dstport 6999"));

        // Without the check of `config set`, as an operator may write it.
        let config = lab.registry().join("config");
        let right = std::fs::read_to_string(&config).unwrap();
        std::fs::write(&config, right.replace(":7", ":70000")).unwrap();
        wait_until(|| log().contains("Backend.Lane: 70000 is not valid"), log);
        host.check_daemon().unwrap();
        link("lane7").unwrap();

        // A valid change is used at once.
        std::fs::write(&config, right.replace(":7", ":8")).unwrap();
        wait_until(|| link("lane8").is_ok(), || right.clone() + &log());
    });
}

/// One cluster from its start to its cleanup.
#[test]
fn a_cluster_is_observed_and_cleaned_up() {
    as_root(|| {
        let lab = up(json!({ "Type": "lane", "Lane": 7, "Port": 7007 }));
        let [first, second] = lab.hosts() else { panic!("two hosts") };
        for host in lab.hosts() {
            assert_eq!(host.subnet_env().unwrap().unwrap().mtu, 1450);
        }
        check_lease_types(&lab);
        status_and_peers(&lab, first);
        why(&lab, first, second);
        firewall(first);
        doctor(&lab, first, second);
        without_a_daemon(&lab, first);
    });
}

#[test]
fn a_device_of_both_families_has_no_guard() {
    let backend = Guarded::new(Lane, "guard-lane", Usual::Off);
    let validate = |families: &str, check: bool| {
        let text = format!(
            r#"{{"Network":"10.1.0.0/16",{families}
                "Backend":{{"Type":"lane","Lane":7,"SourceCheck":{check}}}}}"#
        );
        backend.validate(&Config::parse(&text).unwrap(), None)
    };
    let both = r#""EnableIPv6":true,"IPv6Network":"fd00::/48","#;
    let error = validate(both, true).unwrap_err().to_string();
    assert!(error.contains("the device lane7, which carries both families"), "{error}");
    validate(both, false).unwrap();
    validate("", true).unwrap();
}

/// Only the peer may send packets of the tunnel, with and without ports.
#[test]
fn a_tunnel_that_no_crate_knows_has_a_guard() {
    as_root(|| {
        let backend = json!({ "Type": "lane", "Lane": 7, "Port": 7007, "SourceCheck": true });
        let lab = Lab::builder().hosts(2).backend(backend).families([Family::V4]);
        let lab = lab.program(PROGRAM).start().unwrap();
        for host in lab.hosts() {
            host.start_daemon_with(&["--ip-masq"]).unwrap();
        }
        let matrix = lab.wait_until_reachable(PATIENCE).unwrap_or_else(|error| panic!("{error}"));
        assert!(matrix.is_complete(), "{:#?}", matrix.failures().collect::<Vec<_>>());
        let [first, second] = lab.hosts() else { panic!("two hosts") };
        let [own, other] = [first, second].map(|host| host.addresses().v4.unwrap().to_string());
        let list = || first.run("nft", &["list", "table", "inet", "flannel-guard-lane"]);
        let table = || list().unwrap_or_default();
        let text = || table().split_whitespace().collect::<Vec<_>>().join(" ");
        wait_until(|| text().contains("chain inner"), table);
        let text = text();
        assert!(text.contains(&format!("elements = {{ {other} : 0x")), "{own}: {text}");
        assert!(!text.contains(&format!("{own} : 0x")), "{own}: {text}");
        for transport in ["udp dport 7007", "meta l4proto 253"] {
            let rule = format!("{transport} ip daddr {own} fib saddr . iif");
            assert!(text.contains(&rule), "{rule}: {text}");
        }
        let matrix = lab.wait_until_reachable(PATIENCE).unwrap_or_else(|error| panic!("{error}"));
        assert!(matrix.is_complete(), "{:#?}", matrix.failures().collect::<Vec<_>>());
        assert_eq!(answers(&lab, first, &["status"])["network"]["guard"]["drops"], true);
    });
}

fn check_lease_types(lab: &Lab) {
    for lease in std::fs::read_dir(lab.registry().join("subnets")).unwrap() {
        let lease = std::fs::read_to_string(lease.unwrap().path()).unwrap();
        let lease: Value = serde_json::from_str(&lease).unwrap();
        assert_eq!(lease["BackendType"], "lane/1");
        assert_eq!(lease["BackendData"], json!({ "Lane": 7 }));
    }
}

fn status_and_peers(lab: &Lab, host: &Host) {
    wait_until(
        || answers(lab, host, &["status"])["ready"] == true,
        || output_of(lab, host, &["status"]),
    );
    let status = answers(lab, host, &["status"]);
    let network = &status["network"];
    assert_eq!(network["backend"], "lane");
    assert_eq!(network["devices"], json!({ "IPv4": "lane7", "IPv6": "lane7" }));
    assert_eq!((&network["mtu"], &network["accepted"]), (&json!(1450), &json!(1)), "{network}");
    let page = output_of(lab, host, &["status"]);
    assert!(page.contains("lane") && page.contains("in place"), "{page}");
    let peers = answers(lab, host, &["peers"]);
    assert_eq!(peers["peers"][0]["backend"], "lane/1");
    assert_eq!(peers["peers"][0]["state"], "in place");

    // A reservation has the type that daemons of this backend give their leases.
    let reserve = "10.244.0.0/24,fd00:10:244::/64";
    output_of(lab, host, &["lease", "reserve", reserve, "--public-ip", "192.168.77.200"]);
    let leases = answers(lab, host, &["lease", "list"]).to_string();
    assert_eq!(leases.matches("lane/1").count(), 3, "{leases}");
    output_of(lab, host, &["lease", "release", reserve]);
}

/// The answer lists the objects of the peer's lease, and names a foreign route.
fn why(lab: &Lab, host: &Host, peer: &Host) {
    let pods = peer.pod().unwrap().addresses().to_owned();
    for (_, pod) in pods.iter() {
        let output = output_of(lab, host, &["why", &pod.to_string()]);
        assert!(output.contains("lane/1") && output.contains("lane7"), "{output}");
    }
    let pod = pods.v4.unwrap().to_string();
    let foreign = format!("{pod}/32");
    host.run("ip", &["route", "add", &foreign, "dev", "lo"]).unwrap();
    let output = ctl(lab, host, &["why", &pod]);
    assert_eq!(output.status.code(), Some(1), "{}", text(&output));
    assert!(text(&output).contains(&foreign) || text(&output).contains("lo"), "{}", text(&output));
    host.run("ip", &["route", "del", &foreign]).unwrap();
}

/// Masquerade and forward rules cover the pods' network.
fn firewall(host: &Host) {
    let own = host.subnet_env().unwrap().unwrap().subnets;
    for (table, subnet) in [("ip flannel-ipv4", own.v4), ("ip6 flannel-ipv6", own.v6)] {
        let list = format!("list table {table}");
        let rules = host.run("nft", &list.split(' ').collect::<Vec<_>>()).unwrap();
        assert!(rules.contains("masquerade") && rules.contains("accept"), "{rules}");
        assert!(rules.contains(&subnet.unwrap().to_string()), "{rules}");
    }
}

/// A healthy cluster has no findings, and planted faults are found.
fn doctor(lab: &Lab, host: &Host, peer: &Host) {
    let nft = |command: &str| peer.run("nft", &command.split(' ').collect::<Vec<_>>()).unwrap();
    let is_well = || {
        wait_until(
            || findings(lab, host).is_empty(),
            || format!("{:#?}\n{}", findings(lab, host), host.log().unwrap()),
        );
    };
    let finds = |parts: &[&str]| {
        let found = |line: &String| parts.iter().all(|part| line.contains(part));
        let all = || findings(lab, host);
        wait_until(|| all().iter().any(found), || format!("{parts:?}: {:#?}", all()));
    };
    is_well();
    let page = text(&ctl(lab, host, &["doctor", "--iface", "eth0"]));
    assert!(page.contains("lane7 (1450 bytes)") && page.contains("UDP port 7007"), "{page}");
    let peers = answers(lab, host, &["doctor", "--iface", "eth0"])["peers"].clone();
    let full = &peers[0]["echoes"][0]["public"]["full"];
    assert_eq!(full["size"], 1500, "with the tunnel's header: {peers}");

    nft("add table ip guard");
    nft("add chain ip guard into { type filter hook input priority 0; }");
    nft("add rule ip guard into udp dport 7007 drop");
    finds(&["tunnel", "UDP port 7007 may be blocked"]);
    nft("flush chain ip guard into");
    is_well();

    // The header of the tunnel counts: packets that the external interface carries are large
    // enough.
    nft("add rule ip guard into udp dport 7007 ip length > 1400 drop");
    finds(&["path-mtu", "1450 bytes"]);
    nft("delete table ip guard");
    is_well();
    host.run("ip", &["link", "set", "eth0", "mtu", "1480"]).unwrap();
    wait_until(|| host.subnet_env().unwrap().unwrap().mtu == 1430, || host.log().unwrap());
    host.run("ip", &["link", "set", "eth0", "mtu", "1500"]).unwrap();
    wait_until(|| host.subnet_env().unwrap().unwrap().mtu == 1450, || host.log().unwrap());
    is_well();
}

/// The doctor and `cleanup` know the backend's objects without a daemon too.
fn without_a_daemon(lab: &Lab, host: &Host) {
    host.stop_daemon(Signal::SIGTERM).unwrap().unwrap();
    let page = text(&ctl(lab, host, &["doctor", "--iface", "eth0"]));
    assert!(page.contains("lane7"), "{page}");
    assert!(lab.matrix(PATIENCE).unwrap().is_complete(), "the data path stays");
    let would = output_of(lab, host, &["cleanup", "--dry-run", "--iface", "eth0"]);
    assert!(would.contains("lane7") && would.contains("flannel-ipv4"), "{would}");
    host.run("ip", &["link", "show", "lane7"]).unwrap();

    output_of(lab, host, &["cleanup", "--iface", "eth0"]);
    assert!(host.run("ip", &["link", "show", "lane7"]).is_err(), "the device is gone");
    for list in [["-4", "route"], ["-6", "route"], ["nexthop", "show"]] {
        let left = host.run("ip", &list).unwrap();
        assert!(!left.contains("proto 241") && !left.contains("lane7"), "{left}");
    }
    let rules = host.run("nft", &["list", "tables"]).unwrap();
    assert!(!rules.contains("flannel"), "{rules}");

    host.start_daemon_with(&["--ip-masq"]).unwrap();
    assert!(lab.matrix(PATIENCE).unwrap().is_complete(), "the next start creates all objects");
}
