//! Packets flow between pods while daemons are killed, upgraded and reconfigured, and while the
//! hosts' interfaces change.
//!
//! Packets are numbered, so that each loss is reported. A test sends some ten thousand.

use std::fs;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::time::{Duration, Instant};
use test_support::eventually;
use test_support::guest::{in_qemu, in_uml};

use flannel_backend_hostgw::HostGw;
use flannel_backend_vxlan::VxlanBackend;
use flannel_core::address::Family;
use flannel_core::kernel::NexthopBlock;
use flannel_core::{Backend, Config};
use flannel_lab::{Builder, Host, Lab, Signal};
use flannel_netlink::NetlinkKernel;
use flannel_route::ready_for_go;
use serde_json::{Value, json};
use socket2::{Domain, Protocol, Socket, Type};

use crate::moving::cluster::Cluster;
use crate::udp::data_plane;
use flannel_lab::testing::as_root;
use flannel_lab::testing::stream::{Lost, Traffic};

const PATIENCE: Duration = Duration::from_secs(120);

/// The modules that a lab needs in a guest, whose nf_tables have no tables for IPv4.
const MODULES: [&str; 7] =
    ["veth", "bridge", "iptable_nat", "iptable_filter", "xt_MASQUERADE", "xt_comment", "xt_mark"];

/// Three hosts with both families, whose pods reach each other.
pub(crate) fn up(backend: impl Into<Value>) -> Lab {
    up_with(Lab::builder().families(Family::BOTH).backend(backend))
}

fn up_with(builder: Builder) -> Lab {
    let lab = builder.program(env!("CARGO_BIN_EXE_lab")).start().unwrap();
    lab.start_daemons().unwrap();
    let matrix = lab.wait_until_reachable(PATIENCE).unwrap_or_else(|e| panic!("{e}"));
    assert!(matrix.is_complete(), "{:#?}\n{}", matrix.failures().collect::<Vec<_>>(), logs(&lab));
    lab.hosts().iter().for_each(|host| wait_for_log(host, "in sync peers=2", 1));
    lab
}

pub(crate) fn logs(lab: &Lab) -> String {
    lab.hosts().iter().map(|host| format!("--- {}\n{}", host.name(), host.log().unwrap())).collect()
}

/// Waits until the host's log has `text` so many times.
fn wait_for_log(host: &Host, text: &str, times: usize) {
    let log = || host.log().unwrap();
    eventually(
        PATIENCE,
        || {
            host.check_daemon().unwrap();
            log().matches(text).count() >= times
        },
        || format!("{}: {text:?} is not in the log {times} times:\n{}", host.name(), log()),
    );
}

fn ip(host: &Host, args: &str) -> String {
    host.run("ip", &args.split_whitespace().collect::<Vec<_>>()).unwrap_or_else(|e| panic!("{e}"))
}

/// Ends the streams. No packet may be lost.
pub(crate) fn assert_no_loss(traffic: Traffic, lab: &Lab, least: usize) {
    traffic.wait_for_arrivals();
    let (sent, lost) = traffic.end();
    assert!(
        lost.is_empty(),
        "{} of {sent} packets were lost: {lost:#?}\n{}",
        lost.len(),
        logs(lab)
    );
    assert!(sent >= least, "{sent} packets are too few for the test");
}

/// The streams show a loss: only the host whose frames the switch drops loses packets.
#[test]
fn a_loss_is_detected_and_reported() {
    as_root(|| {
        let lab = up("host-gw");
        let traffic = Traffic::start(&lab);
        lab.switch().drop_frames(&lab.hosts()[1]).unwrap();
        traffic.wait_for_sent(2);
        lab.switch().pass_frames(&lab.hosts()[1]).unwrap();
        traffic.wait_for_arrivals();
        let (_, lost) = traffic.end();
        assert!(!lost.is_empty() && lost.iter().all(|lost| lost.hosts.contains(&2)), "{lost:#?}");
    });
}

/// Every daemon is killed and started again in each round: unchanged, or with nexthop objects on
/// or off. `nexthops` is their number on a host if they are on.
fn killed_and_upgraded(lab: &Lab, traffic: Traffic, rounds: usize, nexthops: usize) {
    for round in 1..=rounds {
        let plain = round % 4 < 2;
        let option = if plain { "--nexthop-objects=off" } else { "--nexthop-objects=auto" };
        for host in lab.hosts() {
            let before = host.log().unwrap().matches("in sync peers=2").count();
            host.stop_daemon(Signal::SIGKILL).unwrap().unwrap();
            traffic.wait_for_arrivals();
            host.start_daemon_with(&[option]).unwrap();
            wait_for_log(host, "in sync peers=2", before + 1);
            let objects = ip(host, "nexthop show").lines().count();
            assert_eq!(objects, if plain { 0 } else { nexthops }, "{option}");
            traffic.wait_for_arrivals();
        }
    }
    // Six streams in one family, and twice 25 packets in each for a restart at least.
    assert_no_loss(traffic, lab, 6 * lab.hosts().len() * rounds * 50);
}

#[test]
fn vxlan_daemons_killed_and_upgraded_lose_no_packet() {
    as_root(|| {
        let lab = up("vxlan");
        killed_and_upgraded(&lab, Traffic::start(&lab), 10, 2);
    });
}

#[test]
fn host_gw_daemons_killed_and_upgraded_lose_no_packet() {
    as_root(|| {
        let lab = up("host-gw");
        killed_and_upgraded(&lab, Traffic::start(&lab), 10, 2);
    });
}

#[test]
fn ipip_daemons_killed_and_upgraded_lose_no_packet() {
    in_uml(&[&MODULES[..], &["ipip"]].concat(), || {
        let lab = up_with(Lab::builder().backend("ipip"));
        killed_and_upgraded(&lab, slow_traffic(&lab), 2, 2);
    });
}

#[test]
fn udp_daemons_killed_and_upgraded_lose_no_packet() {
    as_root(|| {
        let lab = up("udp");
        killed_and_upgraded(&lab, Traffic::start(&lab), 4, 0);
    });
}

/// The kernel can move the packets and check their sources, so it does: no process has a socket,
/// and the path is in the status.
#[test]
fn udp_daemons_whose_kernel_moves_packets_lose_none_when_killed() {
    in_qemu(&[&MODULES[..], &["fou", "ipip", "nf_tables", "nft_fib_inet"]].concat(), || {
        let lab = up_with(Lab::builder().backend("udp"));
        for host in lab.hosts() {
            let device = ip(host, "-d link show flannel0");
            assert!(device.contains("ipip") && device.contains("encap fou"), "{device}");
            assert_eq!(data_plane(host), 0);
            // The daemon asks for the path once a second.
            let path = || Cluster::ctl(host, "status").0["network"]["path"].clone();
            eventually(PATIENCE, || path() == "the kernel", || path().to_string());
        }
        killed_and_upgraded(&lab, slow_traffic(&lab), 2, 2);
        forged_packets_are_dropped(&lab);
    });
}

/// A host sends with the address of another host's pod. The check is repaired like all objects.
fn forged_packets_are_dropped(lab: &Lab) {
    let [here, sender, owner] = [0, 1, 2].map(|n| &lab.hosts()[n]);
    let dropped = || {
        let status = Cluster::ctl(here, "status").0;
        let packets = &status["network"]["guard"]["packets"];
        Some(packets["stranger"].as_u64()? + packets["foreign_source"].as_u64()?)
    };
    // Packets may have come from nodes whose leases were not accepted yet.
    let before = dropped().unwrap();
    let to = here.addresses().v4.unwrap();
    let source = owner.pod().unwrap().addresses().v4.unwrap();
    let target = here.pod().unwrap().addresses().v4.unwrap();
    let (IpAddr::V4(source), IpAddr::V4(target)) = (source, target) else { panic!("{source}") };
    let packet = crate::udp::packet(source, target);
    // The device also takes packets without UDP.
    let send = || {
        let udp = UdpSocket::bind((sender.addresses().v4.unwrap(), 0)).unwrap();
        udp.send_to(&packet, (to, 8285)).unwrap();
        let ipip = Socket::new(Domain::IPV4, Type::RAW, Some(Protocol::from(4))).unwrap();
        ipip.send_to(&packet, &SocketAddr::new(to, 0).into()).unwrap();
    };
    sender.namespace().run(send).unwrap();
    let both = || dropped() == Some(before + 2);
    eventually(PATIENCE, both, || format!("{before}, then {:?}", dropped()));
    here.run("nft", &["delete", "table", "inet", "flannel-guard-udp"]).unwrap();
    // The rules with the port come last.
    let rules = || here.run("nft", &["list", "table", "inet", "flannel-guard-udp"]);
    eventually(
        PATIENCE,
        || rules().is_ok_and(|rules| rules.contains("8285")),
        || format!("{:?}\n{}", rules(), logs(lab)),
    );
    let matrix = lab.wait_until_reachable(PATIENCE).unwrap_or_else(|e| panic!("{e}"));
    assert!(matrix.is_complete(), "{:#?}", matrix.failures().collect::<Vec<_>>());
    let before = dropped().unwrap();
    sender.namespace().run(send).unwrap();
    eventually(
        PATIENCE,
        || dropped() == Some(before + 2),
        || format!("{before}, then {:?}", dropped()),
    );
}

/// Streams that a guest can encrypt: a few hundred packets a second.
fn slow_traffic(lab: &Lab) -> Traffic {
    Traffic::start_every(Duration::from_millis(100), lab)
}

/// The modules of [`MODULES`] for IPv6, and WireGuard.
const MORE_MODULES: [&str; 3] = ["ip6table_nat", "ip6table_filter", "wireguard"];

#[test]
fn wireguard_daemons_killed_and_upgraded_lose_no_packet() {
    in_qemu(&[&MODULES[..], &MORE_MODULES].concat(), || {
        let lab = up("wireguard");
        killed_and_upgraded(&lab, slow_traffic(&lab), 1, 0);
    });
}

/// The key of the first host is replaced. Its peers see the new one in its lease. Packets wait in
/// the kernel until the next handshake, at most 128 for each peer (linux `MAX_STAGED_PACKETS`):
/// here 25 seconds of them, because a guest on a busy machine is slow.
#[test]
fn wireguard_loses_no_packet_while_a_key_is_replaced() {
    in_qemu(&[&MODULES[..], &MORE_MODULES].concat(), || {
        let lab = up("wireguard");
        let host = &lab.hosts()[0];
        let peer = &lab.hosts()[1];
        let key = |host: &Host| host.run("wg", &["show", "flannel-wg", "public-key"]).unwrap();
        let known = || peer.run("wg", &["show", "flannel-wg", "peers"]).unwrap();
        let old = key(host);
        assert!(known().contains(old.trim()), "{}", known());
        let traffic = Traffic::start_every(Duration::from_millis(400), &lab);
        let before = host.log().unwrap().matches("in sync peers=2").count();
        host.stop_daemon(Signal::SIGTERM).unwrap().unwrap();
        fs::remove_file(host.dir().join("state/secrets/wireguard-key")).unwrap();
        host.start_daemon().unwrap();
        wait_for_log(host, "in sync peers=2", before + 1);
        let new = key(host);
        assert_ne!(new, old);
        eventually(
            PATIENCE,
            || known().contains(new.trim()) && !known().contains(old.trim()),
            known,
        );
        // 12 streams, 25 packets each at least.
        assert_no_loss(traffic, &lab, 12 * 25);
    });
}

/// Every host is made ready for Go flannel, and then runs this daemon again.
fn to_go_flannel_and_back(backend: &dyn Backend) {
    let lab = up(backend.kind());
    let traffic = Traffic::start(&lab);
    let config =
        Config::parse(&fs::read_to_string(lab.registry().join("config")).unwrap()).unwrap();
    for host in lab.hosts() {
        let before = host.log().unwrap().matches("in sync peers=2").count();
        host.stop_daemon(Signal::SIGTERM).unwrap().unwrap();
        let kernel = NetlinkKernel::open_in(host.namespace().path()).unwrap();
        let mut footprint = backend.footprint(&config, Some("eth0".parse().unwrap())).unwrap();
        footprint.nexthops = NexthopBlock::choose(&kernel, &footprint).unwrap().0;
        let nexthops = || ip(host, "nexthop show").lines().count();
        assert_eq!(nexthops(), 2);
        let report = ready_for_go(&kernel, &footprint, false).unwrap();
        assert!(report.failed.is_empty() && nexthops() == 0, "{report:?}");
        traffic.wait_for_arrivals();
        host.start_daemon().unwrap();
        wait_for_log(host, "in sync peers=2", before + 1);
        assert_eq!(nexthops(), 2);
        traffic.wait_for_arrivals();
    }
    // 12 streams, twice three hosts, 25 packets each at least.
    assert_no_loss(traffic, &lab, 12 * 6 * 25);
}

#[test]
fn vxlan_hosts_made_ready_for_go_flannel_lose_no_packet() {
    as_root(|| {
        to_go_flannel_and_back(&VxlanBackend);
    });
}

#[test]
fn host_gw_hosts_made_ready_for_go_flannel_lose_no_packet() {
    as_root(|| {
        to_go_flannel_and_back(&HostGw);
    });
}

/// The MTU of the first host's interface is lowered and raised, and its daemon follows.
fn another_mtu(backend: &str, overhead: u32) {
    let lab = up(backend);
    let host = &lab.hosts()[0];
    let traffic = Traffic::start(&lab);
    for mtu in [1400, 1500] {
        ip(host, &format!("link set eth0 mtu {mtu}"));
        let env = || host.subnet_env().unwrap().unwrap();
        eventually(
            PATIENCE,
            || env().mtu == mtu - overhead,
            || format!("{:?}\n{}", env(), logs(&lab)),
        );
        if backend == "vxlan" {
            let shown = || ip(host, "link show flannel.1") + &ip(host, "link show flannel-v6.1");
            let has = |text: &str, mtu: u32| text.contains(&format!("mtu {mtu} "));
            eventually(PATIENCE, || has(&shown(), mtu - 50) && has(&shown(), mtu - 70), shown);
        }
        traffic.wait_for_arrivals();
    }
    assert_no_loss(traffic, &lab, 12 * 75);
}

#[test]
fn vxlan_follows_the_interfaces_mtu_and_loses_no_packet() {
    as_root(|| another_mtu("vxlan", 70));
}

#[test]
fn host_gw_follows_the_interfaces_mtu_and_loses_no_packet() {
    as_root(|| another_mtu("host-gw", 0));
}

/// The first host gets other addresses. Packets to and from it may be lost until it and its peers
/// use them. No packet between the others is lost.
fn another_address(backend: &str) {
    let lab = up(backend);
    let host = &lab.hosts()[0];
    // Without it, the kernel deletes an address together with the first one of its subnet.
    host.namespace().sysctl("net/ipv4/conf/eth0/promote_secondaries", "1").unwrap();
    let traffic = Traffic::start(&lab);
    let began = Instant::now();
    for (new, old, len) in
        [("192.168.77.101", "192.168.77.1", 24), ("fd00:77::65", "fd00:77::1", 64)]
    {
        let nodad = if len == 64 { "nodad" } else { "" };
        ip(host, &format!("address add {new}/{len} dev eth0 {nodad}"));
        ip(host, &format!("address del {old}/{len} dev eth0"));
    }
    let known = |peer: &Host| {
        let table = match backend {
            "vxlan" => peer.run("bridge", &["fdb", "show"]).unwrap(),
            _ => ip(peer, "nexthop show") + &ip(peer, "-6 route show"),
        };
        ["192.168.77.101 ", "fd00:77::65 "].iter().all(|address| table.contains(address))
    };
    lab.hosts()[1..].iter().for_each(|peer| eventually(PATIENCE, || known(peer), || logs(&lab)));
    let own = || ip(host, "-d link show type vxlan");
    let local = || own().contains("local 192.168.77.101 ") && own().contains("local fd00:77::65 ");
    eventually(PATIENCE, || backend != "vxlan" || local(), || format!("{}\n{}", own(), logs(&lab)));
    let switched = Instant::now();
    traffic.wait_for_arrivals();
    traffic.wait_for_arrivals();
    let (sent, lost) = traffic.end();
    let is_expected =
        |lost: &Lost| lost.hosts.contains(&1) && lost.at >= began && lost.at <= switched;
    let lost: Vec<_> = lost.into_iter().filter(|lost| !is_expected(lost)).collect();
    assert!(lost.is_empty(), "{} of {sent} packets: {lost:#?}\n{}", lost.len(), logs(&lab));
}

#[test]
fn vxlan_loses_packets_only_until_peers_know_a_changed_address() {
    as_root(|| {
        another_address("vxlan");
    });
}

#[test]
fn host_gw_loses_packets_only_until_peers_know_a_changed_address() {
    as_root(|| {
        another_address("host-gw");
    });
}

/// The network config gets another MTU: every daemon rebuilds its network on the same devices.
#[test]
fn a_changed_mtu_in_the_network_config_loses_no_packet() {
    as_root(|| {
        let lab = up("vxlan");
        let traffic = Traffic::start(&lab);
        let path = lab.registry().join("config");
        for mtu in [1400, 1450, 1400] {
            let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
            config["Backend"] = json!({ "Type": "vxlan", "MTU": mtu });
            let new = lab.dir().join("config.new");
            fs::write(&new, config.to_string()).unwrap();
            fs::rename(&new, &path).unwrap();
            for host in lab.hosts() {
                let shown =
                    || ip(host, "link show flannel.1") + &ip(host, "link show flannel-v6.1");
                let has = |text: &str, mtu: u32| text.contains(&format!("mtu {mtu} "));
                eventually(
                    PATIENCE,
                    || has(&shown(), mtu - 50) && has(&shown(), mtu - 70),
                    || shown() + &logs(&lab),
                );
            }
            traffic.wait_for_arrivals();
        }
        assert_no_loss(traffic, &lab, 12 * 100);
    });
}
