//! Tunnel packets made by hand, from a host that is not a node, from a node with the source of
//! another one, and from pods.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::time::Duration;

use flannel_core::address::Family;
use flannel_core::object::MacAddr;
use flannel_lab::testing::as_root;
use flannel_lab::testing::stream::Traffic;
use flannel_lab::{Host, Lab, Namespace, Signal};
use nix::sys::socket::{setsockopt, sockopt::UdpGsoSegment};
use serde_json::{Value, json};
use socket2::{Domain, Protocol, Socket, Type};
use test_support::guest::in_qemu_for;
use test_support::{eventually, packet, receive_from};

use crate::moving::cluster::Cluster;
use crate::traffic::{assert_no_loss, logs};

const PATIENCE: Duration = Duration::from_secs(120);
/// Programs in a guest are slow.
const LIMIT: Duration = Duration::from_secs(900);
const VXLAN: u16 = 8472;
/// The port of the receiver in a pod.
const RECEIVER: u16 = 5000;
/// The modules of a lab with ipip and a guard in a guest.
const MODULES: [&str; 10] = [
    "veth",
    "bridge",
    "ipip",
    "nf_tables",
    "nft_fib_inet",
    "iptable_nat",
    "iptable_filter",
    "xt_MASQUERADE",
    "xt_comment",
    "xt_mark",
];

fn up(families: &[Family], backend: Value) -> Lab {
    let lab = Lab::builder().families(families.iter().copied()).backend(backend);
    let lab = lab.program(env!("CARGO_BIN_EXE_lab")).start().unwrap();
    lab.hosts().iter().for_each(start_daemon);
    is_reachable(&lab);
    lab
}

/// Packets of pods to other hosts get the address of their node.
fn start_daemon(host: &Host) {
    host.start_daemon_with(&["--ip-masq"]).unwrap();
}

fn is_reachable(lab: &Lab) {
    let matrix = lab.wait_until_reachable(PATIENCE).unwrap_or_else(|error| panic!("{error}"));
    assert!(matrix.is_complete(), "{:#?}\n{}", matrix.failures().collect::<Vec<_>>(), logs(lab));
}

/// A host on the link of all nodes.
fn stranger(lab: &Lab, family: Family) -> Namespace {
    let stranger = Namespace::new("attacker").unwrap();
    let port = if family == Family::V4 { "port-attack4" } else { "port-attack6" };
    let link = format!(
        "link add {port} type veth peer name eth0 netns {}\nlink set {port} master br0 up\n",
        stranger.path().display()
    );
    lab.switch().namespace().ip(&link).unwrap();
    let node = lab.hosts()[0].addresses()[family].unwrap();
    let address = match node {
        IpAddr::V4(node) => {
            let [a, b, c, _] = node.octets();
            format!("{}/24", Ipv4Addr::new(a, b, c, 200))
        }
        IpAddr::V6(node) => {
            let mut segments = node.segments();
            segments[7] = 0x200;
            format!("{}/64", std::net::Ipv6Addr::from(segments))
        }
    };
    let nodad = if family == Family::V4 { "" } else { " nodad" };
    stranger.ip(&format!("link set eth0 up\naddr add {address} dev eth0{nodad}\n")).unwrap();
    stranger
}

fn pod(host: &Host, family: Family) -> IpAddr {
    host.pod().unwrap().addresses()[family].unwrap()
}

/// A packet of UDP to the receiver of a pod.
fn inner(source: IpAddr, target: IpAddr, payload: &[u8]) -> Vec<u8> {
    packet::udp(source, SocketAddr::new(target, RECEIVER), payload)
}

/// The datagram of vxlan with a packet to a host.
fn frame(host: &Host, packet: &[u8]) -> Vec<u8> {
    let device = if packet[0] >> 4 == 4 { "flannel.1" } else { "flannel-v6.1" };
    let shown = host.run("ip", &["-j", "link", "show", device]).unwrap();
    let links: Value = serde_json::from_str(&shown).unwrap();
    let mac: MacAddr = links[0]["address"].as_str().unwrap().parse().unwrap();
    packet::vxlan(mac.0, packet)
}

/// The packets that a host's guard has refused by reason, or `None` if the host has no guard.
fn refused(host: &Host) -> Option<(bool, [u64; 3])> {
    let guard = Cluster::ctl(host, "status").0["network"]["guard"].clone();
    let count = |reason: &str| guard["packets"][reason].as_u64();
    let counts = [count("stranger")?, count("foreign_source")?, count("pod")?];
    Some((guard["drops"].as_bool()?, counts))
}

/// The packets that a host's guard has refused by reason, as soon as there is a guard.
fn counts(host: &Host) -> [u64; 3] {
    let (_, counts) = eventually(PATIENCE, || refused(host), || host.log().unwrap());
    counts
}

/// Waits until a host's guard has refused this many more.
fn until_refused(host: &Host, before: [u64; 3], more: [u64; 3]) {
    let wanted: Vec<u64> = before.iter().zip(more).map(|(before, more)| before + more).collect();
    eventually(
        PATIENCE,
        || refused(host).is_some_and(|(_, now)| now[..] == wanted),
        || format!("{wanted:?}, {:?}", refused(host)),
    );
}

/// The receiver in a host's pod. Gets all datagrams to it so far: a packet of a peer's pod comes
/// behind them.
struct Receiver<'a> {
    host: &'a Host,
    peer: &'a Host,
    family: Family,
    socket: UdpSocket,
}

impl<'a> Receiver<'a> {
    fn new(host: &'a Host, peer: &'a Host, family: Family) -> Self {
        let at = (pod(host, family), RECEIVER);
        let socket = host.pod().unwrap().namespace().run(|| UdpSocket::bind(at).unwrap()).unwrap();
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
        Self { host, peer, family, socket }
    }

    fn forged(&self) -> usize {
        let at = (pod(self.host, self.family), RECEIVER);
        let send =
            || UdpSocket::bind((pod(self.peer, self.family), 0)).unwrap().send_to(b"last", at);
        self.peer.pod().unwrap().namespace().run(send).unwrap().unwrap();
        let mut forged = 0;
        let mut buffer = [0; 9000];
        loop {
            let (len, _) = receive_from(&self.socket, &mut buffer).unwrap();
            if &buffer[..len] == b"last" {
                return forged;
            }
            forged += 1;
        }
    }
}

fn send(from: &Namespace, source: IpAddr, bytes: &[u8], to: (IpAddr, u16)) {
    from.run(|| UdpSocket::bind((source, 0)).unwrap().send_to(bytes, to).unwrap()).unwrap();
}

fn any(family: Family) -> IpAddr {
    family.unspecified()
}

/// Forged packets to the first host with the source of a pod of the last one: from a stranger,
/// whole and in fragments, from another node, in a batch, and by pods. Returns how many reached the
/// pod.
fn attack(lab: &Lab, stranger: &Namespace, family: Family) -> usize {
    let [here, sender, owner] = [0, 1, 2].map(|n| &lab.hosts()[n]);
    let receiver = Receiver::new(here, sender, family);
    let node = (here.addresses()[family].unwrap(), VXLAN);
    let forge =
        |payload: &[u8]| frame(here, &inner(pod(owner, family), pod(here, family), payload));
    let short = forge(b"forged");
    let of_peer = sender.addresses()[family].unwrap();
    send(stranger, any(family), &short, node);
    send(stranger, any(family), &forge(&[0; 1400]), node);
    send(sender.namespace(), of_peer, &short, node);
    let good = frame(here, &inner(pod(sender, family), pod(here, family), b"forged"));
    let batch = [good, short.clone(), short.clone()].concat();
    sender
        .namespace()
        .run(|| {
            let socket = UdpSocket::bind((of_peer, 0)).unwrap();
            setsockopt(&socket, UdpGsoSegment, &(short.len() as i32)).unwrap();
            socket.send_to(&batch, node).unwrap();
        })
        .unwrap();
    // A pod of the same node, with its own address, and a pod of another node, whose packets are
    // masqueraded.
    send(here.pod().unwrap().namespace(), pod(here, family), &short, node);
    send(sender.pod().unwrap().namespace(), pod(sender, family), &short, node);
    // One packet of the batch is right.
    receiver.forged() - 1
}

/// Two packets of a stranger, one of a pod of this node; one of a node, and two of its batch.
const REFUSED: [u64; 3] = [3, 3, 0];

fn guarded_vxlan(families: &[Family]) {
    let lab = up(families, json!({ "Type": "vxlan", "SourceCheck": true }));
    let here = &lab.hosts()[0];
    let sender = &lab.hosts()[1];
    for family in families {
        let stranger = stranger(&lab, *family);
        let before = counts(here);
        let of_sender = counts(sender);
        assert_eq!(attack(&lab, &stranger, *family), 0, "{family}");
        until_refused(here, before, REFUSED);
        until_refused(sender, of_sender, [0, 0, 1]);
    }
    is_reachable(&lab);
}

#[test]
fn forged_packets_of_vxlan_never_reach_a_pod_over_ipv4() {
    as_root(|| guarded_vxlan(&[Family::V4]));
}

#[test]
fn forged_packets_of_vxlan_never_reach_a_pod_over_ipv6() {
    as_root(|| guarded_vxlan(&[Family::V6]));
}

#[test]
fn forged_packets_of_vxlan_never_reach_a_pod_over_both_families() {
    as_root(|| guarded_vxlan(&Family::BOTH));
}

fn table(host: &Host) -> String {
    host.run("nft", &["list", "tables"]).unwrap()
}

/// The daemon is killed, the table is removed by others, the config changes, and the host is made
/// ready for Go flannel.
#[test]
fn a_guard_lives_through_restarts_repairs_and_configs() {
    as_root(|| {
        let family = Family::V4;
        let lab = up(&[family], json!({ "Type": "vxlan", "SourceCheck": true }));
        let here = &lab.hosts()[0];
        let stranger = stranger(&lab, family);
        let traffic = Traffic::start(&lab);
        let in_sync = || here.log().unwrap().matches("in sync peers=2").count();
        // Without a daemon the guard stays, and the next daemon takes it over without a gap.
        let before = counts(here);
        here.stop_daemon(Signal::SIGKILL).unwrap().unwrap();
        assert_eq!(attack(&lab, &stranger, family), 0);
        let before_restart = in_sync();
        start_daemon(here);
        eventually(PATIENCE, || in_sync() > before_restart, || logs(&lab));
        until_refused(here, before, REFUSED);
        assert_no_loss(traffic, &lab, 100);
        // Another program removes everything: it is repaired.
        here.run("nft", &["flush", "ruleset"]).unwrap();
        // The end of the tunnel, which refuses packets, comes after all peers.
        let rules = || here.run("nft", &["list", "ruleset"]).unwrap();
        eventually(PATIENCE, || rules().contains(" drop"), rules);
        is_reachable(&lab);
        let before = counts(here);
        assert_eq!(attack(&lab, &stranger, family), 0);
        until_refused(here, before, REFUSED);
        let traffic = Traffic::start(&lab);
        // `"count"` counts, and lets everything pass. So do the pods' packets to the own node.
        patch(&lab, &json!("count"));
        eventually(PATIENCE, || refused(here).is_some_and(|(drops, _)| !drops), || logs(&lab));
        let sender = &lab.hosts()[1];
        eventually(PATIENCE, || refused(sender).is_some_and(|(drops, _)| !drops), || logs(&lab));
        is_reachable(&lab);
        let before = counts(here);
        // Of the sender's pod it is masqueraded, and has the source of another node.
        let [strangers, foreign, pods] = REFUSED;
        assert_eq!(attack(&lab, &stranger, family), 7);
        until_refused(here, before, [strangers, foreign + 1, pods]);
        // Without the option there is no table.
        patch(&lab, &json!(false));
        eventually(PATIENCE, || !table(here).contains("flannel-guard-vxlan"), || table(here));
        assert_no_loss(traffic, &lab, 100);
        patch(&lab, &json!(true));
        eventually(PATIENCE, || table(here).contains("flannel-guard-vxlan"), || table(here));
        is_reachable(&lab);
        // Go flannel would not add new nodes.
        here.stop_daemon(Signal::SIGTERM).unwrap().unwrap();
        let ctl = env!("CARGO_BIN_EXE_lab");
        let registry = format!("dir:{}", lab.registry().display());
        let state = here.dir().join("state");
        let socket = here.dir().join("flanneld.sock");
        let args = ["ctl", "cleanup", "--for-go", "--registry", &registry, "--state-dir"];
        let args =
            [&args[..], &[state.to_str().unwrap(), "--control-socket", socket.to_str().unwrap()]];
        here.run(ctl, &args.concat()).unwrap_or_else(|error| panic!("{error}"));
        assert!(!table(here).contains("flannel-guard"), "{}", table(here));
    });
}

/// Writes the option into the network config.
fn patch(lab: &Lab, check: &Value) {
    let file = lab.registry().join("config");
    let mut config: Value = serde_json::from_str(&std::fs::read_to_string(&file).unwrap()).unwrap();
    config["Backend"]["SourceCheck"] = check.clone();
    let new = lab.registry().join("config.new");
    std::fs::write(&new, config.to_string()).unwrap();
    std::fs::rename(&new, &file).unwrap();
}

/// Its packets have no ports, and the kernel takes them from every host.
#[test]
fn forged_packets_of_ipip_never_reach_a_pod() {
    in_qemu_for(LIMIT, &MODULES, || {
        let lab = up(&[Family::V4], json!({ "Type": "ipip" }));
        let [here, sender, owner] = [0, 1, 2].map(|n| &lab.hosts()[n]);
        let stranger = stranger(&lab, Family::V4);
        let receiver = Receiver::new(here, sender, Family::V4);
        let before = counts(here);
        let before_sender = counts(sender);
        let forged = inner(pod(owner, Family::V4), pod(here, Family::V4), b"forged");
        let node = SocketAddr::new(here.addresses().v4.unwrap(), 0);
        let send = || {
            let ipip = Socket::new(Domain::IPV4, Type::RAW, Some(Protocol::from(4))).unwrap();
            ipip.send_to(&forged, &node.into()).unwrap();
            let long = inner(pod(owner, Family::V4), pod(here, Family::V4), &[0; 2000]);
            ipip.send_to(&long, &node.into()).unwrap();
        };
        stranger.run(send).unwrap();
        sender.namespace().run(send).unwrap();
        here.pod().unwrap().namespace().run(send).unwrap();
        sender.pod().unwrap().namespace().run(send).unwrap();
        assert_eq!(receiver.forged(), 0);
        until_refused(here, before, [4, 2, 0]);
        // Fragments are counted one by one, unless connections are tracked.
        let of_pods = || refused(sender).map_or(0, |(_, now)| now[2] - before_sender[2]);
        eventually(PATIENCE, || of_pods() >= 2, || format!("{:?}", refused(sender)));
    });
}
