//! `flannelctl doctor` on a healthy lab, where it finds nothing, and on planted faults, where it names each. Leases that
//! are made up have the first subnet of the network, which no host is given.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::process::Command;
use std::time::{Duration, Instant};

use flannel_core::Family;
use flannel_lab::{Builder, Host, Lab, Signal};
use serde_json::Value;

mod as_root;
use as_root::as_root;

const PATIENCE: Duration = Duration::from_secs(30);

/// Two hosts with daemons and pods.
fn up(builder: Builder) -> Lab {
    let lab = builder.hosts(2).program(env!("CARGO_BIN_EXE_lab")).start().unwrap();
    for host in lab.hosts() {
        for key in ["net/ipv4/conf/all/rp_filter", "net/ipv4/conf/default/rp_filter"] {
            host.namespace().sysctl(key, "0").unwrap();
        }
    }
    lab.start_daemons().unwrap();
    let matrix = lab.wait_until_reachable(PATIENCE).unwrap_or_else(|error| panic!("{error}"));
    assert!(matrix.is_complete(), "{:?}", matrix.failures().collect::<Vec<_>>());
    lab
}

/// What the doctor says on a host: findings as `check severity text | mend`, but for what depends on the machine.
fn findings(lab: &Lab, host: &Host, registry: Option<&str>) -> Vec<String> {
    let value = examine(lab, host, registry, "--json");
    let value: Value = serde_json::from_str(&value).unwrap_or_else(|error| panic!("{error}: {value}"));
    let text = |found: &Value, key: &str| found[key].as_str().unwrap_or_default().to_owned();
    let line = |f: &Value| {
        format!("{} {} {} | {}", text(f, "check"), text(f, "severity"), text(f, "text"), text(f, "mend"))
    };
    let found = value["findings"].as_array().unwrap();
    found.iter().filter(|f| f["check"] != "bridge-netfilter").map(line).collect()
}

fn examine(lab: &Lab, host: &Host, registry: Option<&str>, form: &str) -> String {
    let registry = registry.map_or_else(|| format!("dir:{}", lab.registry().display()), str::to_owned);
    let mut command = Command::new(env!("CARGO_BIN_EXE_lab"));
    command.args(["ctl", "doctor", form, "--iface", "eth0", "--registry", &registry]);
    command.arg("--control-socket").arg(host.dir().join("flanneld.sock"));
    command.arg("--subnet-file").arg(host.subnet_file()).arg("--state-dir").arg(host.dir().join("state"));
    let output = host.output(&mut command).unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(
        output.status.code().is_some_and(|code| code < 2),
        "{text}{}",
        String::from_utf8_lossy(&output.stderr)
    );
    text
}

/// Waits until the doctor finds something that has all the parts, and nothing but what `alone` allows.
fn finds(lab: &Lab, host: &Host, parts: &[&str]) -> String {
    let start = Instant::now();
    loop {
        let found = findings(lab, host, None);
        let hit = found.iter().find(|line| parts.iter().all(|part| line.contains(part)));
        if let Some(line) = hit {
            return line.clone();
        }
        assert!(start.elapsed() < PATIENCE, "{parts:?} is not in {found:#?}\n{}", host.log().unwrap());
    }
}

/// Waits until it finds nothing.
fn is_well(lab: &Lab, host: &Host) {
    let start = Instant::now();
    loop {
        let found = findings(lab, host, None);
        if found.is_empty() {
            return;
        }
        assert!(start.elapsed() < PATIENCE, "{found:#?}\n{}", host.log().unwrap());
    }
}

fn healthy(backend: &str, families: &[Family]) {
    let lab = up(Lab::builder().backend(backend).families(families.iter().copied()));
    for host in lab.hosts() {
        assert_eq!(findings(&lab, host, None), [""; 0], "{backend} {families:?}");
        let page = examine(&lab, host, None, "--peers=64");
        assert!(page.contains("NOTHING IS WRONG") && page.contains("1 asked"), "{page}");
        assert_eq!(
            page.matches("both ways").count(),
            if backend == "vxlan" { families.len() } else { 0 },
            "{page}"
        );
        let replies = page.matches(" ms").count();
        let addresses = if backend == "vxlan" { 2 } else { 1 };
        assert_eq!(replies, families.len() * addresses * 2, "small and full: {page}");
    }
}

macro_rules! tests {
    ($($name:ident: $body:expr;)*) => {$(
        #[test]
        fn $name() {
            as_root(stringify!($name), || $body);
        }
    )*};
}

tests! {
    a_healthy_vxlan_lab_has_no_findings: healthy("vxlan", &Family::BOTH);
    a_healthy_host_gw_lab_has_no_findings: healthy("host-gw", &[Family::V4]);
    faults_of_this_host: of_this_host();
    faults_on_the_way_and_at_the_peer: on_the_way();
    faults_while_the_daemon_is_down: without_a_daemon();
    the_way_that_is_lost_is_named: directions();
    ten_planted_faults_are_found_and_what_is_said_to_mend_them_does: ten_faults();
    a_stale_peer_of_both_families_is_let_go_by_what_is_said_to_mend_it: stale_peer();
    nobody_but_other_nodes_is_answered: strangers();
}

fn of_this_host() {
    let lab = up(Lab::builder());
    let host = &lab.hosts()[0];
    let sysctl = |key: &str, value: &str| host.namespace().sysctl(key, value).unwrap();

    sysctl("net/ipv4/ip_forward", "0");
    let found = finds(&lab, host, &["forwarding error", "| sysctl -w net.ipv4.ip_forward=1"]);
    assert!(found.contains("forwards no IPv4 packets"), "{found}");
    sysctl("net/ipv4/ip_forward", "1");
    is_well(&lab, host);

    sysctl("net/ipv4/conf/all/rp_filter", "1");
    finds(&lab, host, &["rp-filter warning", "flannel.1 is strict", "rp_filter=2"]);
    sysctl("net/ipv4/conf/all/rp_filter", "0");

    // In a table of its own, where flannel's rules do not help.
    for command in [
        "add table ip guard",
        "add chain ip guard gate { type filter hook forward priority 5; policy drop; }",
    ] {
        host.run("nft", &command.split(' ').collect::<Vec<_>>()).unwrap();
    }
    finds(
        &lab,
        host,
        &["forward-drop warning", "chain gate of table ip guard", "nft insert rule ip guard gate"],
    );
    let found = finds(&lab, host, &["forward-drop warning"]);
    host.run("sh", &["-ec", found.rsplit_once("| ").unwrap().1]).unwrap();
    is_well(&lab, host);
    host.run("nft", &["delete", "table", "ip", "guard"]).unwrap();

    // More specific than flannel's.
    let other = lab.hosts()[1].subnet_env().unwrap().unwrap().subnets.v4.unwrap();
    let half = format!("{}/25", other.base());
    host.run("ip", &["route", "add", &half, "via", &lab.hosts()[1].addresses().v4.unwrap().to_string()])
        .unwrap();
    finds(&lab, host, &["route error", "shadowed: packets go via", "ip route get"]);
    host.run("ip", &["route", "del", &half]).unwrap();

    // The store goes away and comes back.
    let away = lab.dir().join("away");
    std::fs::rename(lab.registry(), &away).unwrap();
    finds(&lab, host, &["store warning", "does not answer"]);
    std::fs::rename(&away, lab.registry()).unwrap();
    is_well(&lab, host);

    // Somebody gives another node the same address.
    let public = host.addresses().v4.unwrap();
    let lease = lab.registry().join("subnets/10.244.0.0-24");
    let value = format!(
        r#"{{"PublicIP":"{public}","BackendType":"vxlan","BackendData":{{"VNI":1,"VtepMAC":"0a:00:00:00:00:fa"}}}}"#
    );
    std::fs::write(&lease, value).unwrap();
    finds(&lab, host, &[&public.to_string(), "10.244.0.0-24"]);
    std::fs::remove_file(&lease).unwrap();
    is_well(&lab, host);
}

fn on_the_way() {
    let lab = up(Lab::builder());
    let (host, other) = (&lab.hosts()[0], &lab.hosts()[1]);
    let peer = other.subnet_env().unwrap().unwrap().subnets.v4.unwrap();
    let nft = |command: &str| other.run("nft", &command.split(' ').collect::<Vec<_>>()).unwrap();

    nft("add table ip guard");
    nft("add chain ip guard into { type filter hook input priority 0; }");
    nft("add rule ip guard into udp dport 8472 drop");
    let found = finds(&lab, host, &["tunnel error", "UDP port 8472 may be blocked"]);
    assert!(found.contains(&format!("no reply from {}", peer.base())), "{found}");
    nft("flush chain ip guard into");
    is_well(&lab, host);

    // What comes in full size is lost, which it was not a moment ago.
    nft("add rule ip guard into udp dport 8472 ip length > 1400 drop");
    let found = findings(&lab, host, None);
    let lost = ["path-mtu error", "1450 bytes", "do not arrive there, while small ones do"];
    assert!(found.len() == 1 && lost.iter().all(|part| found[0].contains(part)), "{found:#?}");
    finds(&lab, other, &["path-mtu error", "1450 bytes", "arrive there, and are lost on the way back"]);
    nft("flush chain ip guard into");

    // Nobody is there any more.
    let lease = lab.registry().join("subnets/10.244.0.0-24");
    let value = r#"{"PublicIP":"192.168.77.199","BackendType":"vxlan","BackendData":{"VNI":1,"VtepMAC":"0a:00:00:00:00:fb"}}"#;
    std::fs::write(&lease, value).unwrap();
    finds(&lab, host, &["peer error", "no reply from 10.244.0.0-24, neither", "flannelctl lease release"]);
    std::fs::remove_file(&lease).unwrap();

    lab.switch().cut(other).unwrap();
    finds(&lab, host, &["peer error", "neither from its tunnel address"]);
}

fn without_a_daemon() {
    let lab = up(Lab::builder());
    let host = &lab.hosts()[0];
    host.stop_daemon(Signal::SIGTERM).unwrap();
    let found = findings(&lab, host, None);
    assert!(
        found.len() == 1 && found[0].contains("daemon error") && found[0].contains("systemctl start"),
        "{found:#?}"
    );
    let page = examine(&lab, host, None, "--peers=9");
    assert!(
        page.contains("1 ERROR, 0 WARNINGS") && page.contains(" ms"),
        "peers are asked all the same: {page}"
    );

    host.run("ip", &["link", "set", "flannel.1", "mtu", "1300"]).unwrap();
    finds(
        &lab,
        host,
        &["mtu error", "flannel.1 takes packets of 1300 bytes", "| ip link set flannel.1 mtu 1450"],
    );
    finds(&lab, host, &["path-mtu error", "this host's own device"]);
    host.run("ip", &["link", "del", "flannel.1"]).unwrap();
    finds(&lab, host, &["device error", "flannel.1 is not there", "| systemctl start flanneld"]);

    // What the last daemon kept leads on.
    std::fs::write(lab.dir().join("nowhere"), "a file").unwrap();
    let nowhere = format!("dir:{}/nowhere", lab.dir().display());
    let found = findings(&lab, host, Some(&nowhere));
    assert!(found.iter().any(|line| line.starts_with("store error")), "{found:#?}");
    assert!(found.iter().any(|line| line.contains("flannel.1 is not there")), "{found:#?}");
    host.start_daemon().unwrap();
    is_well(&lab, host);
}

/// What both ends report tells which way something is lost; where one of them cannot, no way is named.
fn directions() {
    let lab = up(Lab::builder());
    let (host, other) = (&lab.hosts()[0], &lab.hosts()[1]);
    let base = |host: &Host| host.subnet_env().unwrap().unwrap().subnets.v4.unwrap().base().to_string();
    let nft = |command: &str| other.run("nft", &command.split(' ').collect::<Vec<_>>()).unwrap();
    nft("add table ip guard");
    nft("add chain ip guard into { type filter hook input priority 0; }");
    nft("add chain ip guard out { type filter hook output priority 0; }");

    // Large segments are lost one way, which echoes of the same size do not notice.
    nft("add rule ip guard into iifname flannel.1 tcp dport 8473 ip length > 1000 drop");
    let found =
        finds(&lab, host, &["segments error", "do not arrive there, while those from there arrive here"]);
    assert!(found.contains(&base(other)) && found.contains("| ethtool -K flannel.1"), "{found}");
    let page = examine(&lab, host, None, "--peers=9");
    assert!(page.contains("back only") && page.matches(" ms").count() == 4, "{page}");
    nft("flush chain ip guard into");
    nft("add rule ip guard out oifname flannel.1 tcp sport 8473 ip length > 1000 drop");
    finds(&lab, host, &["segments error", "arrive there, while those from there do not arrive here"]);
    assert!(examine(&lab, host, None, "--peers=9").contains("there only"));
    nft("flush chain ip guard out");
    is_well(&lab, host);

    // All that goes to this host by the tunnel is lost, and nothing of what it sends.
    host.run("nft", &["add table ip guard"]).unwrap();
    host.run("nft", &["add chain ip guard into { type filter hook input priority 0; }"]).unwrap();
    host.run("nft", &["add rule ip guard into udp dport 8472 drop"]).unwrap();
    let found = finds(&lab, host, &["tunnel error", "what goes there arrives", "only what it sends is lost"]);
    assert!(found.contains(&base(other)), "{found}");
    // Nobody tells the other one.
    let found = finds(&lab, other, &["tunnel error", "may be blocked here, on the way or there"]);
    assert!(found.contains(&base(host)), "{found}");
    host.run("nft", &["delete table ip guard"]).unwrap();
    is_well(&lab, host);

    // A peer that runs no daemon of ours, or has the port closed, is no finding.
    other.stop_daemon(Signal::SIGTERM).unwrap();
    other.start_daemon_with(&["--doctor-port=0"]).unwrap();
    is_well(&lab, host);
    let page = examine(&lab, host, None, "--peers=9");
    assert!(!page.contains("both ways"), "{page}");
    other.stop_daemon(Signal::SIGTERM).unwrap();

    // One host's interface takes less, and its daemon goes by that.
    other.run("ip", &["link", "set", "eth0", "mtu", "1400"]).unwrap();
    other.start_daemon().unwrap();
    finds(
        &lab,
        host,
        &["mtu warning", "pods here may send 1450 bytes", "1350", "| flannelctl config set", "1400"],
    );
    finds(&lab, other, &["mtu warning", "pods here may send 1350 bytes", "1450"]);
}

/// The port is open on the tunnel, for the tunnels of other nodes.
fn strangers() {
    let lab = up(Lab::builder().families(Family::BOTH));
    let (host, other) = (&lab.hosts()[0], &lab.hosts()[1]);
    let env = other.subnet_env().unwrap().unwrap();
    for family in Family::BOTH {
        let address = env.subnets[family].unwrap().base();
        let ask = format!(
            "exec 3<>/dev/tcp/{address}/8473 && echo 'flannel 1 10 00000000000000ff' >&3 && printf 0123456789 >&3 && cat <&3"
        );
        let answer = |namespace: &flannel_lab::Namespace| {
            let output = namespace.output(Command::new("timeout").args(["5", "bash", "-c", &ask])).unwrap();
            String::from_utf8(output.stdout).unwrap()
        };
        let start = Instant::now();
        let node = loop {
            let answer = answer(host.namespace());
            if !answer.is_empty() {
                break answer;
            }
            assert!(start.elapsed() < PATIENCE, "{}", other.log().unwrap());
        };
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
            if who == "the underlay" {
                let via = other.addresses()[family].unwrap();
                namespace.ip(&format!("route add {address} via {via}\n")).unwrap();
            }
            assert_eq!(answer(namespace), "", "{who}");
        }
    }
    // The tunnel's device is another one, of the same name.
    other.run("ip", &["link", "del", "flannel.1"]).unwrap();
    let start = Instant::now();
    while examine(&lab, host, None, "--peers=9").matches("both ways").count() < 2 {
        assert!(start.elapsed() < PATIENCE, "{}", other.log().unwrap());
    }
}

/// Programs that commands of the doctor name and that are others in a lab, first in the search path: `flannelctl` for one of its
/// hosts, and `systemctl start flanneld`, which leaves a wish.
fn shims(lab: &Lab, host: &Host) -> String {
    use std::os::unix::fs::PermissionsExt;

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
    let systemctl = format!("[ \"$*\" = 'start flanneld' ] && touch {}", dir.join("start").display());
    for (name, script) in [("flannelctl", flannelctl), ("systemctl", systemctl)] {
        std::fs::write(dir.join(name), format!("#!/bin/sh\n{script}\n")).unwrap();
        std::fs::set_permissions(dir.join(name), PermissionsExt::from_mode(0o755)).unwrap();
    }
    format!("{}:{}", dir.display(), std::env::var("PATH").unwrap())
}

/// Runs what is said to mend a finding, on each of these hosts.
fn mend(lab: &Lab, hosts: &[&Host], finding: &str) {
    let command = finding.split_once(" | ").unwrap().1;
    for host in hosts {
        let mut shell = Command::new("sh");
        shell.args(["-ec", command]).env("PATH", shims(lab, host)).current_dir(lab.dir());
        let output = host.output(&mut shell).unwrap();
        assert!(output.status.success(), "{command}: {}", String::from_utf8_lossy(&output.stderr));
        let wish = lab.dir().join("shims/start");
        if wish.exists() {
            std::fs::remove_file(wish).unwrap();
            host.start_daemon().unwrap();
        }
    }
}

/// One after the other, in a lab that is well before and after each.
fn ten_faults() {
    let lab = up(Lab::builder().config_field("EnableNFTables", true));
    is_well(&lab, &lab.hosts()[0]);
    five_between_hosts(&lab);
    five_of_a_host(&lab);
}

fn five_between_hosts(lab: &Lab) {
    let (host, other) = (&lab.hosts()[0], &lab.hosts()[1]);
    let lease = |subnet: &str, public: &str| {
        let value = format!(
            r#"{{"PublicIP":"{public}","BackendType":"vxlan","BackendData":{{"VNI":1,"VtepMAC":"0a:00:00:00:00:fa"}}}}"#
        );
        std::fs::write(lab.registry().join("subnets").join(subnet), value).unwrap();
    };

    // Wrong MTU.
    lab.switch().namespace().ip("link set port-2 mtu 1400\n").unwrap();
    let found = finds(lab, host, &["path-mtu error", "1450 bytes", "| flannelctl config set FILE"]);
    let config = std::fs::read_to_string(lab.registry().join("config")).unwrap();
    std::fs::write(lab.dir().join("FILE"), config.replace("\"Type\"", "\"MTU\": 1400, \"Type\"")).unwrap();
    mend(lab, &[host], &found);
    is_well(lab, host);

    // Blocked vxlan port.
    other.run("iptables", &["-A", "INPUT", "-p", "udp", "--dport", "8472", "-j", "DROP"]).unwrap();
    let found = finds(lab, host, &["tunnel error", "UDP port 8472 may be blocked", "# on both hosts"]);
    mend(lab, &[host, other], &found);
    is_well(lab, host);

    // Duplicate public IP.
    lease("10.244.0.0-24", &host.addresses().v4.unwrap().to_string());
    let found = finds(lab, host, &["2 nodes share the public address", "| flannelctl lease release --force"]);
    mend(lab, &[host], &found);
    is_well(lab, host);

    // Foreign route shadowing a peer.
    let subnet = other.subnet_env().unwrap().unwrap().subnets.v4.unwrap();
    let router = lab.switch().addresses().v4.unwrap().to_string();
    host.run("ip", &["route", "add", &format!("{}/25", subnet.base()), "via", &router]).unwrap();
    mend(lab, &[host], &finds(lab, host, &["route error", "shadowed: packets go via"]));
    is_well(lab, host);

    // Stale peer.
    lease("10.244.0.0-24", "192.168.77.199");
    mend(lab, &[host], &finds(lab, host, &["peer error", "no reply from 10.244.0.0-24, neither"]));
    is_well(lab, host);
}

/// Its key has a part for each family, which a shell is not to cut in two.
fn stale_peer() {
    let lab = up(Lab::builder().families(Family::BOTH));
    let host = &lab.hosts()[0];
    is_well(&lab, host);
    let key = "10.244.0.0-24&fd00:10:244::-64";
    let value = r#"{"PublicIP":"192.168.77.199","PublicIPv6":"fd77::c7","BackendType":"vxlan","BackendData":{"VNI":1,"VtepMAC":"0a:00:00:00:00:fb"},"BackendV6Data":{"VNI":1,"VtepMAC":"0a:00:00:00:00:fb"}}"#;
    std::fs::write(lab.registry().join("subnets").join(key), value).unwrap();
    let found = finds(&lab, host, &["peer error", &format!("no reply from {key}, neither")]);
    mend(&lab, &[host], &found);
    assert!(!lab.registry().join("subnets").join(key).exists());
    is_well(&lab, host);
}

fn five_of_a_host(lab: &Lab) {
    let host = &lab.hosts()[0];
    let sysctl = |key: &str, value: &str| host.namespace().sysctl(key, value).unwrap();

    // Missing forwarding.
    sysctl("net/ipv4/ip_forward", "0");
    mend(lab, &[host], &finds(lab, host, &["forwarding error", "forwards no IPv4 packets"]));
    is_well(lab, host);

    // Deleted device; a daemon that runs puts it back before anybody looks.
    host.stop_daemon(Signal::SIGTERM).unwrap();
    host.run("ip", &["link", "del", "flannel.1"]).unwrap();
    mend(lab, &[host], &finds(lab, host, &["device error", "flannel.1 is not there"]));
    is_well(lab, host);

    // FORWARD policy drop; flannel's own rules are in a table of their own here.
    host.run("iptables", &["-P", "FORWARD", "DROP"]).unwrap();
    mend(lab, &[host], &finds(lab, host, &["forward-drop warning", "chain FORWARD of table ip filter"]));
    is_well(lab, host);

    // Store unreachable; the command shows what is wrong with it.
    let away = lab.dir().join("away");
    std::fs::rename(lab.registry(), &away).unwrap();
    std::fs::write(lab.registry(), "a file").unwrap();
    mend(lab, &[host], &finds(lab, host, &["store warning", "does not answer", "| ls -la "]));
    std::fs::remove_file(lab.registry()).unwrap();
    std::fs::rename(&away, lab.registry()).unwrap();
    is_well(lab, host);

    // Rp_filter strict.
    sysctl("net/ipv4/conf/all/rp_filter", "1");
    mend(lab, &[host], &finds(lab, host, &["rp-filter warning", "flannel.1 is strict"]));
    is_well(lab, host);
}
