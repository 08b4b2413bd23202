//! `flannelctl doctor` on a healthy lab and on planted faults. Forged leases have the first subnet
//! of the network, which no host gets.

use std::cell::RefCell;
use std::io::{Read, Write};
use std::net::{TcpStream, UdpSocket};
use std::ops::RangeInclusive;
use std::path::Path;
use std::process::Command;
use std::time::Duration;
use test_support::eventually;
use test_support::guest::in_uml;

use flannel_core::address::Family;
use flannel_lab::{Builder, Host, Lab, Signal};
use serde_json::Value;

use flannel_lab::testing::as_root;

/// A daemon tries again after 30 s to listen on a port that was in use.
const PATIENCE: Duration = Duration::from_secs(60);

/// Two hosts with daemons and pods, without the strict `rp_filter` that the machine may have.
fn up(builder: Builder) -> Lab {
    up_with(builder.hosts(2))
}

fn up_with(builder: Builder) -> Lab {
    started(builder.program(env!("CARGO_BIN_EXE_lab")).start().unwrap())
}

fn started(lab: Lab) -> Lab {
    for host in lab.hosts() {
        for key in ["net/ipv4/conf/all/rp_filter", "net/ipv4/conf/default/rp_filter"] {
            host.namespace().sysctl(key, "0").unwrap();
        }
    }
    lab.start_daemons().unwrap();
    pass(&lab);
    lab
}

/// Waits until all pods reach each other. Adds those that are missing.
fn pass(lab: &Lab) {
    let matrix = lab.wait_until_reachable(PATIENCE).unwrap_or_else(|error| panic!("{error}"));
    assert!(matrix.is_complete(), "{:?}", matrix.failures().collect::<Vec<_>>());
}

/// Waits until there is no finding, and all pods reach each other.
fn cured(lab: &Lab, host: &Host) {
    finds_nothing(lab, host);
    pass(lab);
}

/// The doctor's findings on a host, as `check severity text | repair`, without those that depend on
/// the machine. A daemon on a busy machine may not answer in time: then the error is returned.
pub(super) fn findings(lab: &Lab, host: &Host, registry: Option<&str>) -> Vec<String> {
    let value = examine(lab, host, registry, "--json");
    let value: Value =
        serde_json::from_str(&value).unwrap_or_else(|error| panic!("{error}: {value}"));
    let text = |found: &Value, key: &str| found[key].as_str().unwrap_or_default().to_owned();
    let Some(found) = value["findings"].as_array() else { return vec![value.to_string()] };
    found
        .iter()
        .filter(|f| f["check"] != "bridge-netfilter")
        .map(|f| {
            format!(
                "{} {} {} | {}",
                text(f, "check"),
                text(f, "severity"),
                text(f, "text"),
                text(f, "repair")
            )
        })
        .collect()
}

fn examine(lab: &Lab, host: &Host, registry: Option<&str>, form: &str) -> String {
    let registry =
        registry.map_or_else(|| format!("dir:{}", lab.registry().display()), str::to_owned);
    let mut command = Command::new(env!("CARGO_BIN_EXE_lab"));
    command.args(["ctl", "doctor", form, "--iface", "eth0", "--registry", &registry]);
    command.arg("--control-socket").arg(host.dir().join("flanneld.sock"));
    command
        .arg("--subnet-file")
        .arg(host.subnet_file())
        .arg("--state-dir")
        .arg(host.dir().join("state"));
    let output = host.namespace().output(&mut command).unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(
        output.status.code().is_some_and(|code| code < 2),
        "{text}{}",
        String::from_utf8_lossy(&output.stderr)
    );
    text
}

/// Waits until one of the doctor's findings has all the parts.
fn finds(lab: &Lab, host: &Host, parts: &[&str]) -> String {
    finds_one(lab, host, &[parts])
}

/// Waits until one finding has all parts of one of these.
fn finds_one(lab: &Lab, host: &Host, any: &[&[&str]]) -> String {
    let found = RefCell::default();
    let has = |line: &String| any.iter().any(|parts| parts.iter().all(|part| line.contains(part)));
    let line = || {
        found.replace(findings(lab, host, None));
        found.borrow().iter().find(|line| has(line)).cloned()
    };
    eventually(PATIENCE, line, || {
        format!("{any:?} is not in {:#?}\n{}", found.borrow(), host.log().unwrap())
    })
}

/// Waits until there is not a finding.
fn finds_nothing(lab: &Lab, host: &Host) {
    finds_only(lab, host, &[]);
}

/// Waits until the findings are exactly these. Each must have all its parts.
fn finds_only(lab: &Lab, host: &Host, all: &[&[&str]]) {
    let found = RefCell::default();
    eventually(
        PATIENCE,
        || {
            let now = findings(lab, host, None);
            let is_right = now.len() == all.len()
                && now
                    .iter()
                    .zip(all)
                    .all(|(line, parts)| parts.iter().all(|part| line.contains(part)));
            found.replace(now);
            is_right
        },
        || format!("{:#?}\n{}", found.borrow(), host.log().unwrap()),
    );
}

/// Waits until the daemon's probes find this state of all paths.
fn path_is(lab: &Lab, host: &Host, state: &str) {
    let paths = RefCell::default();
    eventually(
        PATIENCE,
        || {
            let mut command = Command::new(env!("CARGO_BIN_EXE_lab"));
            command.args(["ctl", "paths", "--json", "--control-socket"]);
            command.arg(host.dir().join("flanneld.sock"));
            let output = host.namespace().output(&mut command).unwrap();
            let value: Value = serde_json::from_slice(&output.stdout).unwrap();
            let all = value["paths"].as_array().unwrap();
            let is_right = !all.is_empty() && all.iter().all(|path| path["state"] == state);
            paths.replace(value);
            is_right
        },
        || format!("{state}: {:#}\n{}", paths.borrow(), logs(lab)),
    );
}

fn logs(lab: &Lab) -> String {
    lab.hosts().iter().map(|host| format!("--- {}\n{}", host.name(), host.log().unwrap())).collect()
}

/// Waits until the page is right, and returns it.
fn page_that(lab: &Lab, host: &Host, form: &str, is_right: impl Fn(&str) -> bool) -> String {
    let page = RefCell::default();
    eventually(
        PATIENCE,
        || {
            page.replace(examine(lab, host, None, form));
            is_right(&page.borrow())
        },
        || format!("{}\n{}", page.borrow(), logs(lab)),
    );
    page.take()
}

fn healthy(backend: impl Into<Value>, families: &[Family]) {
    let backend = backend.into();
    let lab = up(Lab::builder().backend(backend.clone()).families(families.iter().copied()));
    for host in lab.hosts() {
        finds_nothing(&lab, host);
        let addresses = if backend == "host-gw" { 1 } else { 2 };
        // The other host's daemon may answer later than its pods.
        page_that(&lab, host, "--peers=64", |page| {
            let replies = page.matches(" ms").count();
            page.matches("both ways").count() == families.len()
                && page.contains("NOTHING IS WRONG")
                && page.contains("1 asked")
                // Small and full size.
                && replies == families.len() * addresses * 2
        });
    }
}

macro_rules! tests {
    ($($name:ident: $body:expr;)*) => {$(
        #[test]
        fn $name() {
            as_root(|| $body);
        }
    )*};
}

tests! {
    a_healthy_vxlan_lab_has_no_findings: healthy("vxlan", &Family::BOTH);
    a_healthy_host_gw_lab_has_no_findings: healthy("host-gw", &Family::BOTH);
    a_healthy_lab_with_direct_routing_has_no_findings:
        healthy(serde_json::json!({ "Type": "vxlan", "DirectRouting": true }), &Family::BOTH);
    faults_of_this_host_are_found: of_this_host();
    faults_on_the_path_and_at_the_peer_are_found: on_the_path();
    faults_of_this_hosts_own_network_are_found: underlay();
    faults_are_found_while_the_daemon_is_down: without_a_daemon();
    the_direction_of_a_loss_is_named: directions();
    ten_planted_faults_are_found_and_their_repair_commands_work: ten_faults();
    eight_more_faults_are_found_and_their_repair_commands_work: eight_more_faults();
    faults_of_ipv6_are_found_and_their_repair_commands_work: faults_of_ipv6();
    lost_segments_of_host_gw_are_found: without_a_tunnel("host-gw".into());
    lost_segments_of_direct_routing_are_found:
        without_a_tunnel(serde_json::json!({ "Type": "vxlan", "DirectRouting": true }));
    the_repair_command_mounts_a_store_that_is_not_mounted: not_mounted();
    a_route_has_an_mtu_while_full_size_is_lost: lowered_mtus();
    only_other_nodes_are_answered: only_nodes_are_answered("vxlan");
    only_other_nodes_are_answered_without_a_tunnel: only_nodes_are_answered("host-gw");
}

fn of_this_host() {
    let lab = up(Lab::builder());
    let host = &lab.hosts()[0];
    let sysctl = |key: &str, value: &str| host.namespace().sysctl(key, value).unwrap();

    sysctl("net/ipv4/ip_forward", "0");
    let found = finds(&lab, host, &["forwarding error", "| sysctl -w net.ipv4.ip_forward=1"]);
    assert!(found.contains("forwards no IPv4 packets"), "{found}");
    sysctl("net/ipv4/ip_forward", "1");
    finds_nothing(&lab, host);

    sysctl("net/ipv4/conf/all/rp_filter", "1");
    finds(&lab, host, &["rp-filter warning", "flannel.1 is strict", "rp_filter=2"]);
    sysctl("net/ipv4/conf/all/rp_filter", "0");

    for (key, parts) in [
        ("flannel.1/forwarding", ["forwarding error", "arrive on flannel.1"]),
        ("eth0/forwarding", ["forwarding warning", "arrive on eth0"]),
    ] {
        sysctl(&format!("net/ipv4/conf/{key}"), "0");
        repair(&lab, &[host], &finds(&lab, host, &parts));
        finds_nothing(&lab, host);
    }
    sysctl("net/ipv4/conf/eth0/arp_ignore", "8");
    repair(&lab, &[host], &finds(&lab, host, &["arp error", "arp_ignore of eth0 is 8"]));
    finds_nothing(&lab, host);
    of_another_way(&lab);
    of_another_bridge(&lab);
    of_attached(&lab);
    of_rules(&lab, Family::V4);

    // In another table, where flannel's rules have no effect.
    for command in [
        "add table ip guard",
        "add chain ip guard gate { type filter hook forward priority 5; policy drop; }",
    ] {
        host.run("nft", &command.split(' ').collect::<Vec<_>>()).unwrap();
    }
    finds(
        &lab,
        host,
        &["forward-drop warning", "chain gate of table ip guard", "nft add rule ip guard gate"],
    );
    let found = finds(&lab, host, &["forward-drop warning"]);
    host.run("sh", &["-ec", found.rsplit_once("| ").unwrap().1]).unwrap();
    finds_nothing(&lab, host);
    host.run("nft", &["delete", "table", "ip", "guard"]).unwrap();

    // A more specific route than flannel's.
    let other = lab.hosts()[1].subnet_env().unwrap().unwrap().subnets.v4.unwrap();
    let half = format!("{}/25", other.base());
    host.run(
        "ip",
        &["route", "add", &half, "via", &lab.hosts()[1].addresses().v4.unwrap().to_string()],
    )
    .unwrap();
    finds(&lab, host, &["route error", "shadowed: packets go via", "ip route get"]);
    host.run("ip", &["route", "del", &half]).unwrap();

    // Routes to the same destination: with a TOS, and behind flannel's.
    let router = lab.hosts()[1].addresses().v4.unwrap().to_string();
    for (route, expected) in [
        (format!("add {other} tos 4 via {router} proto static"), "with TOS 4 take it"),
        (format!("append {other} via {router} proto bird"), "while flannel's is absent"),
    ] {
        let arguments: Vec<&str> = ["route"].into_iter().chain(route.split(' ')).collect();
        host.run("ip", &arguments).unwrap();
        let found = finds(&lab, host, &["route warning", "has the route", expected]);
        repair(&lab, &[host], &found);
        finds_nothing(&lab, host);
    }

    // The store disappears and returns.
    let away = lab.dir().join("away");
    std::fs::rename(lab.registry(), &away).unwrap();
    finds(&lab, host, &["store warning", "does not answer"]);
    std::fs::rename(&away, lab.registry()).unwrap();
    finds_nothing(&lab, host);

    // Another node has the same public address.
    let public = host.addresses().v4.unwrap();
    let lease = lab.registry().join("subnets/10.244.0.0-24");
    let value = format!(
        r#"{{"PublicIP":"{public}","BackendType":"vxlan",
            "BackendData":{{"VNI":1,"VtepMAC":"0a:00:00:00:00:fa"}}}}"#
    );
    std::fs::write(&lease, &value).unwrap();
    finds(&lab, host, &[&public.to_string(), "10.244.0.0-24"]);

    // Another node publishes an address of the pod network. No firewall is suspected.
    let taken = lab.hosts().iter().map(|host| host.subnet_env().unwrap().unwrap().subnets.v4);
    let taken: Vec<_> = taken.flatten().collect();
    let mut free = (250..=255).map(|n| std::net::Ipv4Addr::new(10, 244, n, 9));
    let free = free.find(|free| !taken.iter().any(|subnet| subnet.contains((*free).into())));
    let free = free.unwrap().to_string();
    std::fs::write(&lease, value.replace(&public.to_string(), &free)).unwrap();
    let inside = format!("{free} lies inside the pod network");
    finds(&lab, host, &["the lease 10.244.0.0-24 is rejected", &inside]);
    let found = findings(&lab, host, None);
    assert!(!found.iter().any(|line| line.contains("blocked")), "{found:#?}");
    std::fs::remove_file(&lease).unwrap();
    finds_nothing(&lab, host);
}

/// Packets to a peer leave through another device than its packets arrive on.
fn of_another_way(lab: &Lab) {
    let host = &lab.hosts()[0];
    let ip = |args: &str| host.run("ip", &args.split(' ').collect::<Vec<_>>()).unwrap();
    let peer = lab.hosts()[1].addresses().v4.unwrap();
    ip("link add other0 type bridge");
    ip("link set other0 up");
    ip(&format!("route add {peer}/32 dev other0"));
    for (key, parts) in [
        ("rp_filter", ["rp-filter warning", "eth0 is strict"]),
        ("arp_filter", ["arp error", "arp_filter of eth0 is 1"]),
    ] {
        host.namespace().sysctl(&format!("net/ipv4/conf/eth0/{key}"), "1").unwrap();
        let found = finds(lab, host, &parts);
        assert!(found.contains(&peer.to_string()) && found.contains("other0"), "{found}");
        repair(lab, &[host], &found);
        let all = findings(lab, host, None);
        assert!(!all.iter().any(|line| line.starts_with(parts[0])), "{all:#?}");
    }
    ip("link del other0");
    finds_nothing(lab, host);
}

/// Filters and a queue of another program on the tunnel device.
fn of_attached(lab: &Lab) {
    let host = &lab.hosts()[0];
    let tc = |args: &str| host.run("tc", &args.split(' ').collect::<Vec<_>>()).unwrap();
    tc("qdisc add dev flannel.1 clsact");
    tc("filter add dev flannel.1 egress protocol ip u32 match u32 0 0");
    repair(lab, &[host], &finds(lab, host, &["tc-filter warning", "(u32) on flannel.1"]));
    finds_nothing(lab, host);
    tc("qdisc add dev flannel.1 root tbf rate 100mbit burst 64kb latency 400ms");
    repair(lab, &[host], &finds(lab, host, &["qdisc warning", "flannel.1 wait in a queue (tbf)"]));
    finds_nothing(lab, host);
}

/// Routing rules that lead packets of pods elsewhere.
fn of_rules(lab: &Lab, family: Family) {
    let host = &lab.hosts()[0];
    let word = if family == Family::V6 { "-6" } else { "-4" };
    let ip = |args: &str| {
        let args = [word].into_iter().chain(args.split(' ')).collect::<Vec<_>>();
        host.run("ip", &args).unwrap()
    };
    let peer = lab.hosts()[1].subnet_env().unwrap().unwrap().subnets[family].unwrap();
    ip("route add unreachable default table 100");
    for rule in [format!("to {peer} lookup 100"), format!("from {peer} prohibit")] {
        ip(&format!("rule add pref 100 {rule}"));
        let found = finds(lab, host, &["ip-rule error", &format!("rule del pref 100 {rule}")]);
        repair(lab, &[host], &found);
        finds_nothing(lab, host);
    }
    ip("route flush table 100");
}

fn on_the_path() {
    let lab = up(Lab::builder());
    let host = &lab.hosts()[0];
    let other = &lab.hosts()[1];
    let peer = other.subnet_env().unwrap().unwrap().subnets.v4.unwrap();
    let nft = |command: &str| other.run("nft", &command.split(' ').collect::<Vec<_>>()).unwrap();

    nft("add table ip guard");
    nft("add chain ip guard into { type filter hook input priority 0; }");
    nft("add rule ip guard into udp dport 8472 drop");
    let found = finds(&lab, host, &["tunnel error", "UDP port 8472 may be blocked"]);
    assert!(found.contains(&format!("no reply from {}", peer.base())), "{found}");
    nft("flush chain ip guard into");
    finds_nothing(&lab, host);

    // From now on received packets of full size are lost.
    nft("add rule ip guard into udp dport 8472 ip length > 1400 drop");
    finds_only(
        &lab,
        host,
        &[&["path-mtu error", "1450 bytes", "do not arrive there, while small ones do"]],
    );
    finds(
        &lab,
        other,
        &[
            "path-mtu error",
            "1450 bytes",
            "arrive there, but replies of that size are lost on the way back",
        ],
    );
    nft("flush chain ip guard into");

    // The host is unreachable.
    let lease = lab.registry().join("subnets/10.244.0.0-24");
    let value = r#"{"PublicIP":"192.168.77.199","BackendType":"vxlan",
        "BackendData":{"VNI":1,"VtepMAC":"0a:00:00:00:00:fb"}}"#;
    std::fs::write(&lease, value).unwrap();
    finds(
        &lab,
        host,
        &["peer error", "no reply from 10.244.0.0-24, neither", "flannelctl lease release"],
    );
    std::fs::remove_file(&lease).unwrap();

    lab.switch().cut(other).unwrap();
    finds(&lab, host, &["peer error", "neither from its tunnel address"]);
}

/// This host's own network is broken. No lease of a peer is to be released then.
fn underlay() {
    let lab = up_with(Lab::builder().hosts(3));
    let host = &lab.hosts()[0];
    lab.switch().drop_frames(host).unwrap();
    finds_only(&lab, host, &[&["underlay error", "no node replies", "| ip -s link show eth0"]]);
    lab.switch().pass_frames(host).unwrap();
    finds_nothing(&lab, host);

    host.run("ip", &["link", "set", "eth0", "down"]).unwrap();
    let found = finds(&lab, host, &["underlay error", "eth0 is down", "| ip link set eth0 up"]);
    repair(&lab, &[host], &found);
    cured(&lab, host);
}

fn without_a_daemon() {
    let lab = up(Lab::builder());
    let host = &lab.hosts()[0];
    host.stop_daemon(Signal::SIGTERM).unwrap();
    finds_only(&lab, host, &[&["daemon error", "systemctl start"]]);
    // Peers are examined without a daemon too.
    page_that(&lab, host, "--peers=9", |page| {
        page.contains("1 ERROR, 0 WARNINGS") && page.contains(" ms")
    });

    host.run("ip", &["link", "set", "flannel.1", "mtu", "1300"]).unwrap();
    finds(
        &lab,
        host,
        &["mtu error", "flannel.1 takes packets of 1300 bytes", "| ip link set flannel.1 mtu 1450"],
    );
    finds(&lab, host, &["path-mtu error", "this host's own device"]);
    host.run("ip", &["link", "del", "flannel.1"]).unwrap();
    finds(&lab, host, &["device error", "flannel.1 is not there", "| systemctl start flanneld"]);

    // The doctor uses the state that the last daemon kept.
    std::fs::write(lab.dir().join("nowhere"), "a file").unwrap();
    let nowhere = format!("dir:{}/nowhere", lab.dir().display());
    let found = findings(&lab, host, Some(&nowhere));
    assert!(found.iter().any(|line| line.starts_with("store error")), "{found:#?}");
    assert!(found.iter().any(|line| line.contains("flannel.1 is not there")), "{found:#?}");
    host.start_daemon().unwrap();
    finds_nothing(&lab, host);
}

/// The reports of both ends show the direction of a loss. Without one of them, no direction is
/// named.
fn directions() {
    let lab = up(Lab::builder());
    let host = &lab.hosts()[0];
    let other = &lab.hosts()[1];
    let base =
        |host: &Host| host.subnet_env().unwrap().unwrap().subnets.v4.unwrap().base().to_string();
    let nft = |command: &str| other.run("nft", &command.split(' ').collect::<Vec<_>>()).unwrap();
    nft("add table ip guard");
    nft("add chain ip guard into { type filter hook input priority 0; }");
    nft("add chain ip guard out { type filter hook output priority 0; }");

    // Large segments are lost in one direction. Echoes of the same size pass.
    nft("add rule ip guard into iifname flannel.1 tcp dport 8473 ip length > 1000 drop");
    let found = finds(
        &lab,
        host,
        &["segments error", "do not arrive there, while those from there arrive here"],
    );
    assert!(found.contains(&base(other)) && found.contains("| ethtool -K flannel.1"), "{found}");
    let page = examine(&lab, host, None, "--peers=9");
    assert!(page.contains("back only") && page.matches(" ms").count() == 4, "{page}");
    nft("flush chain ip guard into");
    nft("add rule ip guard out oifname flannel.1 tcp sport 8473 ip length > 1000 drop");
    finds(
        &lab,
        host,
        &["segments error", "arrive there, while those from there do not arrive here"],
    );
    assert!(examine(&lab, host, None, "--peers=9").contains("there only"));
    nft("flush chain ip guard out");
    finds_nothing(&lab, host);

    // Tunnel packets to this host are lost, and those from it pass.
    let rule = ["-A", "INPUT", "-p", "udp", "--dport", "8472", "-j", "DROP"];
    host.run("iptables", &rule).unwrap();
    let one_way =
        finds(&lab, host, &["tunnel error", "packets to it arrive", "packets from it are lost"]);
    assert!(one_way.contains(&base(other)), "{one_way}");
    // The other host receives no acknowledgement.
    let found = finds(&lab, other, &["tunnel error", "may be blocked here, on the way or there"]);
    assert!(found.contains(&base(host)), "{found}");
    // The daemons have noticed it too, without a user who asks.
    path_is(&lab, host, "one way");
    path_is(&lab, other, "tunnel blocked");
    repair(&lab, &[host], &one_way);
    path_is(&lab, host, "ok");
    finds_nothing(&lab, host);

    // A peer that runs no daemon of ours, or has the port closed, is not a finding.
    other.stop_daemon(Signal::SIGTERM).unwrap();
    other.start_daemon_with(&["--doctor-port=0"]).unwrap();
    finds_nothing(&lab, host);
    let page = examine(&lab, host, None, "--peers=9");
    assert!(!page.contains("both ways"), "{page}");
    other.stop_daemon(Signal::SIGTERM).unwrap();

    // One host's interface has a smaller MTU, and its daemon uses it.
    other.run("ip", &["link", "set", "eth0", "mtu", "1400"]).unwrap();
    other.start_daemon().unwrap();
    finds(
        &lab,
        host,
        &[
            "mtu warning",
            "pods here may send 1450 bytes",
            "1350",
            "| flannelctl config patch",
            "1400",
        ],
    );
    finds(&lab, other, &["mtu warning", "pods here may send 1350 bytes", "1450"]);
}

/// With `--path-mtu` the daemon lowers the MTU of the route, and the doctor has no finding.
fn lowered_mtus() {
    let lab = up(Lab::builder().families(Family::BOTH));
    let host = &lab.hosts()[0];
    let other = &lab.hosts()[1];
    host.stop_daemon(Signal::SIGTERM).unwrap();
    host.start_daemon_with(&["--path-mtu"]).unwrap();
    let subnets = other.subnet_env().unwrap().unwrap().subnets;
    let ip = |args: &str| host.run("ip", &args.split_whitespace().collect::<Vec<_>>()).unwrap();
    let shown = |n: u8, family| ip(&format!("-{n} route show {}", subnets[family].unwrap()));
    let routes = || [shown(4, Family::V4), shown(6, Family::V6)];
    let mtu = |route: &String| {
        let mtu = route.split_once(" mtu ").map(|(_, rest)| rest.split(' ').next().unwrap());
        mtu.map(|mtu| mtu.trim().parse::<u32>().unwrap())
    };
    let have = |mtus: [RangeInclusive<u32>; 2]| {
        eventually(
            PATIENCE,
            || {
                let found = routes();
                let mut both = found.iter().zip(&mtus);
                both.all(|(route, mtus)| mtu(route).is_some_and(|mtu| mtus.contains(&mtu)))
            },
            || format!("{mtus:?}: {:#?}\n{}", routes(), logs(&lab)),
        );
    };
    let nft = |command: &str| other.run("nft", &[command]).unwrap();
    nft("add table netdev guard");
    nft("add chain netdev guard into { type filter hook ingress device eth0 priority 0; }");
    nft("add rule netdev guard into meta length > 1400 drop");
    path_is(&lab, host, "mtu lowered");
    // 1350 and 1330, but a late echo can make the result a bit too small.
    let wide = || [1331..=1350, 1311..=1330];
    have(wide());
    finds_nothing(&lab, host);
    page_that(&lab, host, "--peers=9", |page| page.contains("2 mtu lowered"));
    Family::BOTH.iter().for_each(|family| full_size_from_a_pod(host, other, *family));

    // Another program removes the MTUs.
    let [four, six] = routes();
    let id = four.split_once("nhid ").unwrap().1.split(' ').next().unwrap();
    ip(&format!("route replace {} nhid {id}", subnets.v4.unwrap()));
    ip(&format!("-6 route replace {}", six.split_once(" mtu").unwrap().0));
    have(wide());

    // The path becomes narrower.
    nft("add rule netdev guard into meta length > 1380 drop");
    have([1280..=1330, 1280..=1310]);
    path_is(&lab, host, "mtu lowered");

    nft("delete table netdev guard");
    path_is(&lab, host, "ok");
    eventually(
        PATIENCE,
        || routes().iter().all(|route| route.contains("flannel") && !route.contains("mtu")),
        || format!("{:#?}\n{}", routes(), logs(&lab)),
    );
    finds_nothing(&lab, host);
}

/// A pod sends TCP segments of full size to the echo service of another one.
fn full_size_from_a_pod(from: &Host, to: &Host, family: Family) {
    let from = from.pod().unwrap();
    let to = to.pod().unwrap();
    // Virtual devices would pass on several segments as one packet, whatever their MTU is.
    from.namespace().ip("link set eth0 gso_max_segs 1\n").unwrap();
    let address = to.addresses()[family].unwrap();
    let mut stream = from.namespace().run(|| TcpStream::connect((address, 7))).unwrap().unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    for _ in 0..4 {
        stream.write_all(&[1; 10_000]).unwrap();
        stream.read_exact(&mut [0; 10_000]).unwrap();
    }
}

/// Losses on a link without a tunnel.
fn without_a_tunnel(backend: Value) {
    let lab = up(Lab::builder().backend(backend));
    let host = &lab.hosts()[0];
    let other = &lab.hosts()[1];
    other.run("nft", &["add table ip guard"]).unwrap();
    other.run("nft", &["add chain ip guard into { type filter hook input priority 0; }"]).unwrap();
    other.run("nft", &["add rule ip guard into tcp dport 8473 ip length > 1000 drop"]).unwrap();
    let lost = ["segments error", "do not arrive there, while those from there arrive here"];
    let found = finds(&lab, host, &lost);
    assert!(found.contains("| ethtool -K eth0 tx off # here;"), "{found}");
    other.run("nft", &["delete table ip guard"]).unwrap();
    finds_nothing(&lab, host);
}

/// The doctor's port is open on devices of peers' packets, and only for nodes.
fn only_nodes_are_answered(backend: &str) {
    let lab = up(Lab::builder().backend(backend).families(Family::BOTH));
    let host = &lab.hosts()[0];
    let other = &lab.hosts()[1];
    let env = other.subnet_env().unwrap().unwrap();
    for family in Family::BOTH {
        let address = match backend {
            "vxlan" => env.subnets[family].unwrap().base(),
            _ => other.addresses()[family].unwrap(),
        };
        let script = format!(
            "exec 3<>/dev/tcp/{address}/8473 && echo 'flannel 1 10 00000000000000ff' >&3 && printf \
             0123456789 >&3 && cat <&3"
        );
        let answer = |namespace: &flannel_lab::Namespace| {
            let output = namespace
                .output(Command::new("timeout").args(["5", "bash", "-c", &script]))
                .unwrap();
            String::from_utf8(output.stdout).unwrap()
        };
        let node = eventually(
            PATIENCE,
            || Some(answer(host.namespace())).filter(|answer| !answer.is_empty()),
            || other.log().unwrap(),
        );
        assert!(
            node.contains("\"received\":10") && node.ends_with("}\nffffffffff"),
            "no more than was sent: {node}"
        );
        for (who, namespace) in [
            ("a pod of another node", lab.hosts()[0].pod().unwrap().namespace()),
            ("a pod of the node", other.pod().unwrap().namespace()),
            ("the node itself", other.namespace()),
            ("the underlay", lab.switch().namespace()),
        ] {
            if who == "the underlay" && backend == "vxlan" {
                let via = other.addresses()[family].unwrap();
                namespace.ip(&format!("route add {address} via {via}\n")).unwrap();
            }
            assert_eq!(answer(namespace), "", "{who}");
        }
    }
    if backend != "vxlan" {
        return;
    }
    // A new tunnel device of the same name.
    other.run("ip", &["link", "del", "flannel.1"]).unwrap();
    eventually(
        PATIENCE,
        || examine(&lab, host, None, "--peers=9").matches("both ways").count() >= 2,
        || other.log().unwrap(),
    );
}

/// Programs for the search path that replace those in the doctor's commands: `flannelctl` for one
/// of the hosts, and `systemctl`, which writes a request to start or restart flanneld.
fn shims(lab: &Lab, host: &Host) -> String {
    let dir = lab.dir().join("shims");
    std::fs::create_dir_all(&dir).unwrap();
    let options = format!(
        "--registry dir:{} --control-socket {} --subnet-file {} --state-dir {}",
        lab.registry().display(),
        host.dir().join("flanneld.sock").display(),
        host.subnet_file().display(),
        host.dir().join("state").display()
    );
    let flannelctl = format!("exec {} ctl {options} \"$@\"", env!("CARGO_BIN_EXE_lab"));
    let systemctl = format!(
        "case \"$*\" in 'start flanneld' | 'restart flanneld') echo $1 >{};; *) exit 1;; esac",
        dir.join("request").display()
    );
    for (name, script) in [("flannelctl", flannelctl), ("systemctl", systemctl)] {
        test_support::write_script(&dir.join(name), &format!("#!/bin/sh\n{script}\n"));
    }
    format!("{}:{}", dir.display(), std::env::var("PATH").unwrap())
}

/// Runs the repair command of a finding, on each of these hosts.
fn repair(lab: &Lab, hosts: &[&Host], finding: &str) {
    let command = finding.split_once(" | ").unwrap().1;
    for host in hosts {
        let mut shell = Command::new("sh");
        shell.args(["-ec", command]).env("PATH", shims(lab, host)).current_dir(lab.dir());
        shell.env("LIBMOUNT_FSTAB", lab.dir().join("fstab"));
        let output = host.namespace().output(&mut shell).unwrap();
        assert!(output.status.success(), "{command}: {}", String::from_utf8_lossy(&output.stderr));
        let request = lab.dir().join("shims/request");
        if let Ok(word) = std::fs::read_to_string(&request) {
            std::fs::remove_file(request).unwrap();
            if word == "restart\n" {
                host.stop_daemon(Signal::SIGTERM).unwrap();
            }
            host.start_daemon().unwrap();
        }
    }
}

/// Ten faults, one after the other. The lab is healthy before and after each.
fn ten_faults() {
    let lab = up(Lab::builder().config_field("EnableNFTables", true));
    finds_nothing(&lab, &lab.hosts()[0]);
    five_between_hosts(&lab, Family::V4);
    three_of_a_host(&lab, Family::V4);
    two_of_no_family(&lab);
}

/// The faults that each family has.
fn faults_of_ipv6() {
    let lab = up(Lab::builder().families(Family::BOTH).config_field("EnableNFTables", true));
    finds_nothing(&lab, &lab.hosts()[0]);
    five_between_hosts(&lab, Family::V6);
    three_of_a_host(&lab, Family::V6);
    of_rules(&lab, Family::V6);
    an_advertised_route_expires(&lab);
    a_device_has_the_port(&lab);
    too_narrow_for_ipv6(&lab);
}

/// A host that forwards packets ignores router advertisements.
fn an_advertised_route_expires(lab: &Lab) {
    let host = &lab.hosts()[0];
    let route = "default via fe80::99 dev eth0 proto ra metric 9000";
    let change = |verb: &str, rest: &str| {
        let command = format!("-6 route {verb} {route}{rest}");
        host.run("ip", &command.split(' ').collect::<Vec<_>>()).unwrap();
    };
    host.namespace().sysctl("net/ipv6/conf/eth0/accept_ra", "1").unwrap();
    change("add", " expires 1800");
    let found = finds(lab, host, &["sysctl warning", "the IPv6 default route of eth0 expires"]);
    repair(lab, &[host], &found);
    cured(lab, host);
    change("del", "");
}

/// Another program made a vxlan device first, whose flags exclude flannel's. The daemon notices its
/// end.
fn a_device_has_the_port(lab: &Lab) {
    let host = &lab.hosts()[0];
    let ip = |args: &str| host.run("ip", &args.split(' ').collect::<Vec<_>>()).unwrap();
    host.stop_daemon(Signal::SIGTERM).unwrap();
    ip("link del flannel.1");
    ip("link del flannel-v6.1");
    ip("link add cilium_vxlan type vxlan external dstport 8472");
    ip("link set cilium_vxlan up");
    host.start_daemon().unwrap();
    let because = "is down, because cilium_vxlan (vxlan) has UDP port 8472 already";
    finds(lab, host, &["port error", "flannel-v6.1", because]);
    repair(lab, &[host], &finds(lab, host, &["port error", "flannel.1", because]));
    cured(lab, host);
}

/// Docker has an address of this node's subnet too.
fn of_another_bridge(lab: &Lab) {
    let host = &lab.hosts()[0];
    let own = host.subnet_env().unwrap().unwrap().subnets.v4.unwrap();
    let address = format!("address add {}/25 dev docker0", own.nth(129).unwrap());
    for command in ["link add docker0 type bridge", "link set docker0 up", &address] {
        host.run("ip", &command.split(' ').collect::<Vec<_>>()).unwrap();
    }
    let found = finds(lab, host, &["clash error", "docker0", "addresses of this node's subnet"]);
    repair(lab, &[host], &found);
    finds_nothing(lab, host);
}

/// A path that no network config repairs gets no config command.
fn too_narrow_for_ipv6(lab: &Lab) {
    let host = &lab.hosts()[0];
    let narrow =
        |mtu: u32| lab.switch().namespace().ip(&format!("link set port-2 mtu {mtu}\n")).unwrap();
    narrow(1340);
    let parts =
        ["path-mtu error", "too few for IPv6 through the tunnel, which takes 1350 | tracepath -n "];
    let found = finds(lab, host, &parts);
    assert!(found.ends_with("must take 1350 bytes at least"), "{found}");
    let repairs: std::collections::BTreeSet<String> = findings(lab, host, None)
        .iter()
        .filter_map(|line| Some(line.split_once(" | ")?.1.to_owned()))
        .collect();
    assert!(
        repairs.len() == 1 && repairs.iter().all(|repair| repair.starts_with("tracepath ")),
        "{repairs:#?}"
    );
    narrow(1500);
    // A host remembers a path MTU for ten minutes.
    for host in lab.hosts() {
        host.run("ip", &["-6", "route", "flush", "cache"]).unwrap();
    }
    finds_nothing(lab, host);
}

/// Writes a forged lease, in all families of the lab.
fn forge_lease(lab: &Lab, public: &str) -> String {
    let both = lab.switch().addresses().v6.is_some();
    let key = if both { "10.244.0.0-24&fd00:10:244::-64" } else { "10.244.0.0-24" };
    let of = |family: Family, nobody: &str| match public.parse().unwrap() {
        address if Family::of(address) == family => public.to_owned(),
        _ => nobody.to_owned(),
    };
    let mut value = serde_json::json!({
        "PublicIP": of(Family::V4, "192.168.77.199"),
        "BackendType": "vxlan",
        "BackendData": { "VNI": 1, "VtepMAC": "0a:00:00:00:00:fa" },
    });
    if both {
        value["PublicIPv6"] = of(Family::V6, "fd00:77::c7").into();
        value["BackendV6Data"] = value["BackendData"].clone();
    }
    std::fs::write(lab.registry().join("subnets").join(key), value.to_string()).unwrap();
    key.to_owned()
}

fn five_between_hosts(lab: &Lab, family: Family) {
    let host = &lab.hosts()[0];
    let other = &lab.hosts()[1];
    let six = family == Family::V6;
    let subnet = other.subnet_env().unwrap().unwrap().subnets[family].unwrap();
    let tunnel = subnet.base().to_string();

    // Wrong MTU. A bridge's port drops silently, and passes four bytes more, for a VLAN tag. With
    // br_netfilter it may report the MTU.
    lab.switch().namespace().ip("link set port-2 mtu 1400\n").unwrap();
    let to = format!("to {tunnel} of");
    let parts = |mtu: &'static str| ["path-mtu error", &to, "| flannelctl config patch", mtu];
    // A late echo can make the result too small once.
    let found = finds_one(lab, host, &[&parts("\"MTU\": 1400}}'"), &parts("\"MTU\": 1404}}'")]);
    repair(lab, &[host], &found);
    finds_nothing(lab, host);
    // Pods keep their MTU.
    for host in lab.hosts() {
        eventually(
            PATIENCE,
            || host.subnet_env().unwrap().is_some_and(|env| env.mtu < 1400),
            || host.log().unwrap(),
        );
        host.remove_pod().unwrap();
    }
    pass(lab);

    // Blocked vxlan port.
    let iptables = if six { "ip6tables" } else { "iptables" };
    other.run(iptables, &["-A", "INPUT", "-p", "udp", "--dport", "8472", "-j", "DROP"]).unwrap();
    let found = finds(
        lab,
        host,
        &["tunnel error", &tunnel, "UDP port 8472 may be blocked", "# on both hosts"],
    );
    repair(lab, &[host, other], &found);
    cured(lab, host);

    // Duplicate public IP.
    let key = forge_lease(lab, &host.addresses()[family].unwrap().to_string());
    let found = finds(
        lab,
        host,
        &["is this node's own: its tunnel packets", "| flannelctl lease release --force"],
    );
    repair(lab, &[host], &found);
    assert!(!lab.registry().join("subnets").join(&key).exists());
    cured(lab, host);

    // Foreign route shadowing a peer.
    let (ip, half) = if six { (vec!["-6"], 65) } else { (vec![], 25) };
    let half = format!("{}/{half}", subnet.base());
    let router = lab.switch().addresses()[family].unwrap().to_string();
    host.run("ip", &[&ip[..], &["route", "add", &half, "via", &router]].concat()).unwrap();
    repair(lab, &[host], &finds(lab, host, &["route error", "shadowed: packets go via"]));
    cured(lab, host);
    if six {
        // IPv4 routes of flannel have the lowest metric, 0.
        let lower = format!("-6 route add {subnet} via {router} metric 1 proto bird");
        host.run("ip", &lower.split(' ').collect::<Vec<_>>()).unwrap();
        repair(lab, &[host], &finds(lab, host, &["route error", "shadowed: packets go via"]));
        cured(lab, host);
    }

    // Stale peer.
    let nobody = if six { "fd00:77::c7" } else { "192.168.77.199" };
    let key = forge_lease(lab, nobody);
    repair(
        lab,
        &[host],
        &finds(lab, host, &["peer error", &format!("no reply from {key}, neither"), nobody]),
    );
    assert!(!lab.registry().join("subnets").join(&key).exists());
    cured(lab, host);
}

fn three_of_a_host(lab: &Lab, family: Family) {
    let host = &lab.hosts()[0];
    let six = family == Family::V6;

    // Missing forwarding.
    let key = if six { "net/ipv6/conf/all/forwarding" } else { "net/ipv4/ip_forward" };
    host.namespace().sysctl(key, "0").unwrap();
    let found = finds(lab, host, &["forwarding error", &format!("forwards no {family} packets")]);
    repair(lab, &[host], &found);
    cured(lab, host);

    // Deleted device. A running daemon would restore it before the doctor runs.
    let device = if six { "flannel-v6.1" } else { "flannel.1" };
    host.stop_daemon(Signal::SIGTERM).unwrap();
    host.run("ip", &["link", "del", device]).unwrap();
    repair(lab, &[host], &finds(lab, host, &["device error", &format!("{device} is not there")]));
    cured(lab, host);

    // FORWARD policy drop. Flannel's rules are in another table here.
    let (iptables, table) =
        if six { ("ip6tables", "ip6 filter") } else { ("iptables", "ip filter") };
    host.run(iptables, &["-P", "FORWARD", "DROP"]).unwrap();
    let chain = format!("chain FORWARD of table {table}");
    repair(lab, &[host], &finds(lab, host, &["forward-drop warning", &chain]));
    cured(lab, host);
}

fn run(program: &str, args: &[&str]) {
    let output = Command::new(program).args(args).output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {args:?}: {error}");
}

/// From now on, only this test and its daemons see new mounts.
fn own_mounts() {
    nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNS).unwrap();
    run("mount", &["--make-rprivate", "/"]);
}

/// The store is a directory that `/etc/fstab` mounts.
fn not_mounted() {
    own_mounts();
    let lab = up(Lab::builder());
    let host = &lab.hosts()[0];
    let registry = lab.registry();
    let disk = lab.dir().join("disk");
    let fstab = format!("{} {} none bind,x-mount.mkdir 0 0\n", disk.display(), registry.display());
    std::fs::write(lab.dir().join("fstab"), fstab).unwrap();
    let leases = |dir: &Path| {
        let entries = std::fs::read_dir(dir.join("subnets")).unwrap();
        entries.map(|entry| entry.unwrap().file_name()).collect::<std::collections::BTreeSet<_>>()
    };
    let before = leases(registry);
    assert_eq!(before.len(), 2);

    // Missing while daemons run.
    std::fs::rename(registry, &disk).unwrap();
    let found = finds(&lab, host, &["store warning", "does not answer", "| mount "]);
    assert!(!registry.exists());
    repair(&lab, &[host], &found);
    finds_nothing(&lab, host);
    assert_eq!(leases(registry), before);

    // Missing while no daemon runs.
    for host in lab.hosts() {
        host.stop_daemon(Signal::SIGTERM).unwrap();
    }
    run("umount", &["-l", registry.to_str().unwrap()]);
    std::fs::remove_dir(registry).unwrap();
    repair(&lab, &[host], &finds(&lab, host, &["store error", "does not answer", "| mount "]));
    repair(
        &lab,
        &lab.hosts().iter().collect::<Vec<_>>(),
        &finds(&lab, host, &["daemon error", "| systemctl start"]),
    );
    finds_nothing(&lab, host);
    assert_eq!(leases(registry), before);
    for host in lab.hosts() {
        host.stop_daemon(Signal::SIGTERM).unwrap();
    }
    run("umount", &["-l", registry.to_str().unwrap()]);
}

fn two_of_no_family(lab: &Lab) {
    let host = &lab.hosts()[0];

    // Store unreachable. Only its owner can restore a directory that is not a mount point.
    let away = lab.dir().join("away");
    std::fs::rename(lab.registry(), &away).unwrap();
    std::fs::write(lab.registry(), "a file").unwrap();
    repair(
        lab,
        &[host],
        &finds(lab, host, &["store warning", "does not answer", "| mount ", " || ls -la "]),
    );
    std::fs::remove_file(lab.registry()).unwrap();
    std::fs::rename(&away, lab.registry()).unwrap();
    cured(lab, host);

    // Strict rp_filter.
    host.namespace().sysctl("net/ipv4/conf/all/rp_filter", "1").unwrap();
    repair(lab, &[host], &finds(lab, host, &["rp-filter warning", "flannel.1 is strict"]));
    cured(lab, host);
}

/// The store, and the files of the first host, are in file systems of their own.
fn eight_more_faults() {
    own_mounts();
    let builder = Lab::builder().config_field("EnableNFTables", true);
    let lab = builder.hosts(2).program(env!("CARGO_BIN_EXE_lab")).start().unwrap();
    let mounts = [lab.registry(), lab.hosts()[0].dir()].map(|dir| dir.to_str().unwrap().to_owned());
    for dir in &mounts {
        let new = format!("{dir}.new");
        std::fs::create_dir(&new).unwrap();
        run("mount", &["-t", "tmpfs", "-o", "size=4m", "none", &new]);
        run("cp", &["-a", &format!("{dir}/."), &new]);
        run("mount", &["--move", &new, dir]);
    }
    let lab = started(lab);
    cured(&lab, &lab.hosts()[0]);
    two_of_mac_addresses(&lab);
    two_of_other_programs(&lab);
    of_a_stale_bridge(&lab);
    two_of_the_store(&lab);
    of_a_full_file_system(&lab);
    for host in lab.hosts() {
        host.stop_daemon(Signal::SIGTERM).unwrap();
    }
    for dir in &mounts {
        run("umount", &["-l", dir]);
    }
}

fn two_of_mac_addresses(lab: &Lab) {
    let host = &lab.hosts()[0];
    let other = &lab.hosts()[1];
    let subnet = other.subnet_env().unwrap().unwrap().subnets.v4.unwrap();
    let path = lab.registry().join("subnets").join(format!("{}-24", subnet.base()));
    let read =
        || -> Value { serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap() };

    // A wrong MAC address in a lease. A running daemon of that node would restore it at once.
    other.stop_daemon(Signal::SIGTERM).unwrap();
    let mut lease = read();
    lease["BackendData"]["VtepMAC"] = "0a:00:00:00:00:fa".into();
    std::fs::write(&path, lease.to_string()).unwrap();
    finds(
        lab,
        host,
        &["tunnel error", &subnet.base().to_string(), "else flannelctl doctor, there"],
    );
    let parts =
        ["device error", "and this node's lease has 0a:00:00:00:00:fa", "| systemctl restart"];
    repair(lab, &[other], &finds(lab, other, &parts));
    finds_nothing(lab, other);
    cured(lab, host);

    // One MAC address twice. The earlier lease keeps it.
    let forged = lab.registry().join("subnets").join(forge_lease(lab, "192.168.77.199"));
    lease = serde_json::from_str(&std::fs::read_to_string(&forged).unwrap()).unwrap();
    lease["BackendData"] = read()["BackendData"].take();
    std::fs::write(&forged, lease.to_string()).unwrap();
    finds(
        lab,
        other,
        &["the lease 10.244.0.0-24", "is this node's own | systemctl restart flanneld"],
    );
    let rejected = format!("{}-24 is rejected", subnet.base());
    let parts = [&*rejected, "by the earlier lease 10.244.0.0-24", "| systemctl restart flanneld"];
    repair(lab, &[other], &finds(lab, host, &parts));
    // Nobody is at the other addresses.
    let nobody: &[&str] = &["peer error", "no reply from 10.244.0.0-24"];
    finds_only(lab, host, &[nobody; 2]);
    std::fs::remove_file(&forged).unwrap();
    cured(lab, host);
}

fn two_of_other_programs(lab: &Lab) {
    let host = &lab.hosts()[0];

    // Another manager deletes neighbours. A flush fails if the daemon restores them faster.
    let script = "for n in $(seq 300); do sleep 0.3; echo neigh flush dev flannel.1 nud permanent; \
                  done | exec ip -force -batch -";
    let mut manager = host.namespace().spawn(Command::new("sh").args(["-c", script])).unwrap();
    let parts = ["repairs warning", "again and again", "by probably ip (process", "| ps -fp "];
    repair(lab, &[host], &finds(lab, host, &parts));
    // With all capabilities, the daemon knows the process.
    host.stop_daemon(Signal::SIGTERM).unwrap();
    host.start_daemon_with(&["--capabilities=all"]).unwrap();
    let parts = ["repairs warning", "again and again", "by ip (process", "/comm && kill "];
    repair(lab, &[host], &finds(lab, host, &parts));
    manager.wait().unwrap();
    cured(lab, host);

    // A firewall that deletes flannel's rules and loads its own.
    let rules = lab.dir().join("rules");
    let text = "flush ruleset\n\
        table inet guard { chain gate { type filter hook forward priority 5; policy drop; }; }\n";
    std::fs::write(&rules, text).unwrap();
    host.run("nft", &["-f", rules.to_str().unwrap()]).unwrap();
    let found = finds(lab, host, &["forward-drop warning", "chain gate of table inet guard"]);
    repair(lab, &[host], &found);
    cured(lab, host);
    eventually(
        PATIENCE,
        || host.run("nft", &["list", "tables"]).unwrap().contains("flannel-ipv4"),
        || host.log().unwrap(),
    );
    host.run("nft", &["delete", "table", "inet", "guard"]).unwrap();
}

fn of_a_stale_bridge(lab: &Lab) {
    let host = &lab.hosts()[0];
    host.remove_pod().unwrap();
    let stale = "link add cni0 type bridge\naddr add 10.244.0.1/24 dev cni0\nlink set cni0 up\n";
    host.namespace().ip(stale).unwrap();
    repair(
        lab,
        &[host],
        &finds(lab, host, &["clash error", "cni0 has 10.244.0.1", "| ip link delete"]),
    );
    cured(lab, host);
}

fn two_of_the_store(lab: &Lab) {
    let host = &lab.hosts()[0];

    // Slow, because another program holds its lock. That process itself becomes `sleep`.
    let lock = lab.registry().join(".lock");
    let mut holder = Command::new("flock");
    let mut holder = holder.arg("-F").arg(lock).args(["sleep", "120"]).spawn().unwrap();
    let parts = ["store warning", "does not answer within 1 s: sleep (process", "| kill "];
    repair(lab, &[host], &finds(lab, host, &parts));
    holder.wait().unwrap();
    cured(lab, host);

    // Read-only.
    run("mount", &["-o", "remount,ro", lab.registry().to_str().unwrap()]);
    repair(
        lab,
        &[host],
        &finds(lab, host, &["files error", "is read-only", "| mount -o remount,rw"]),
    );
    cured(lab, host);
}

/// There is no space for the subnet file.
fn of_a_full_file_system(lab: &Lab) {
    let host = &lab.hosts()[0];
    host.stop_daemon(Signal::SIGTERM).unwrap();
    std::fs::remove_file(host.subnet_file()).unwrap();
    let fill = format!("cat /dev/zero >{} || true", host.dir().join("fill").display());
    run("sh", &["-c", &fill]);
    host.start_daemon().unwrap();
    eventually(PATIENCE, || host.check_daemon().is_err(), || "the daemon runs");
    let file = format!("the file system of {},", host.subnet_file().display());
    let found =
        finds(lab, host, &["files error", &file, "of free space", "| mount -o remount,size="]);
    // The subnet file does not tell which lease is this host's own.
    let all = findings(lab, host, None);
    assert!(!all.iter().any(|line| line.contains("lease release")), "{all:#?}");
    repair(lab, &[host], &found);
    repair(lab, &[host], &finds(lab, host, &["daemon error", "| systemctl start flanneld"]));
    cured(lab, host);
}

/// Limits of the whole kernel, and a program that only its root may load, on a kernel of its own.
/// No daemon runs there.
#[test]
fn faults_of_the_whole_kernel_are_found_and_their_repair_commands_work() {
    in_uml(&["veth", "vxlan", "iptable_nat", "xt_MASQUERADE"], || {
        let run = |line: &str| {
            let output = Command::new("sh").args(["-ec", line]).output().unwrap();
            assert!(output.status.success(), "{line}: {output:?}");
        };
        run("ip link set lo up
            ip link add eth0 type veth peer name far0
            ip link set far0 up
            ip link set eth0 up
            ip address add 192.168.77.1/24 dev eth0
            ip link add flannel.1 type vxlan id 1 dev eth0 dstport 8472 nolearning
            ip link set flannel.1 up
            iptables-legacy -t nat -A POSTROUTING -j MASQUERADE");
        let subnets = Path::new("/run/leases/subnets");
        std::fs::create_dir_all(subnets).unwrap();
        let config = r#"{"Network":"10.244.0.0/16","Backend":{"Type":"vxlan"}}"#;
        std::fs::write("/run/leases/config", config).unwrap();
        for n in 2..5 {
            let lease = format!(
                r#"{{"PublicIP":"192.168.77.{n}","BackendType":"vxlan",
                    "BackendData":{{"VNI":1,"VtepMAC":"0a:00:00:00:00:0{n}"}}}}"#
            );
            std::fs::write(subnets.join(format!("10.244.{n}.0-24")), lease).unwrap();
        }
        // A tracked connection.
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        socket.send_to(b"hello", socket.local_addr().unwrap()).unwrap();
        run("sysctl -w net.ipv4.neigh.default.gc_thresh3=2 net.netfilter.nf_conntrack_max=1");
        std::fs::write("/run/pass.o", xdp_program()).unwrap();
        run("ip link set flannel.1 xdpgeneric obj /run/pass.o sec xdp");
        let findings = || -> Vec<(String, String)> {
            let mut command = Command::new(env!("CARGO_BIN_EXE_lab"));
            command.args(["ctl", "doctor", "--json", "--iface", "eth0"]);
            command.args(["--registry", "dir:/run/leases", "--control-socket", "/run/none.sock"]);
            command.args(["--subnet-file", "/run/subnet.env", "--state-dir", "/run/state"]);
            let output = command.output().unwrap();
            let value: Value = serde_json::from_slice(&output.stdout).unwrap();
            let all = value["findings"].as_array().unwrap().iter();
            let text =
                |found: &Value, key: &str| found[key].as_str().unwrap_or_default().to_owned();
            all.map(|found| (text(found, "check"), text(found, "repair")))
                .filter(|(check, _)| ["neighbours", "conntrack", "xdp"].contains(&&**check))
                .collect()
        };
        let found = eventually(
            PATIENCE,
            || Some(findings()).filter(|found| found.len() == 3),
            || format!("{:?}", findings()),
        );
        found.iter().for_each(|(_, repair)| run(repair));
        eventually(PATIENCE, || findings().is_empty(), || format!("{:?}", findings()));
    });
}

/// An object file for `ip`, with an XDP program in the section `xdp` that passes every packet.
fn xdp_program() -> Vec<u8> {
    let word = |value: u64| value.to_le_bytes();
    // r0 = XDP_PASS; exit. Then its license, its symbol, and the names.
    let code: [u8; 16] = [0xb7, 0, 0, 0, 2, 0, 0, 0, 0x95, 0, 0, 0, 0, 0, 0, 0];
    let names = *b"\0xdp\0license\0.symtab\0.strtab\0\0\0\0";
    let function = [1, 0, 0, 0, 0x12, 0];
    let in_first_section = [1, 0];
    let symbol = [&[0; 24][..], &function, &in_first_section, &word(0), &word(16)].concat();
    let parts: [&[u8]; 4] = [&code, b"GPL\0\0\0\0\0", &symbol, &names];
    // Sections: name, type, flags, then their place in the file; link and info; alignment and size
    // of entries.
    let sections: [(u32, u32, u64, [u32; 2], u64); 4] =
        [(1, 1, 6, [0, 0], 0), (5, 1, 3, [0, 0], 0), (13, 2, 0, [4, 1], 24), (21, 3, 0, [0, 0], 0)];
    let mut at = 64;
    let mut table = vec![0; 64];
    for ((name, kind, flags, [link, info], entry), part) in sections.into_iter().zip(parts) {
        table.extend([name.to_le_bytes(), kind.to_le_bytes()].concat());
        table.extend([word(flags), word(0), word(at), word(part.len() as u64)].concat());
        table.extend([link.to_le_bytes(), info.to_le_bytes()].concat());
        table.extend([word(8), word(entry)].concat());
        at += part.len() as u64;
    }
    // 64-bit, little-endian, relocatable, for BPF.
    let mut file = b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0\x01\0\xf7\0\x01\0\0\0".to_vec();
    file.extend([word(0), word(0), word(at)].concat());
    let header = [0u16, 0, 64, 0, 0, 64, 5, 4];
    file.extend(header.iter().flat_map(|half| half.to_le_bytes()));
    [file, parts.concat(), table].concat()
}
