//! WireGuard peers that arrive at once: the time, the messages and the bytes, against a bare writer
//! of the same peers. On a kernel without WireGuard it runs in a guest (`test_support::guest`).
//!
//! A monitor device of the kernel (`nlmon`) sees every message to the WireGuard device.

use std::net::Ipv4Addr;
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use flannel_backend_wireguard::WireguardBackend;
use flannel_core::address::Dual;
use flannel_core::lease::{LeaseAttrs, LeaseSet, Offer, Revision};
use flannel_core::object::PublicKey;
use flannel_core::testing::FakeSubnets;
use flannel_core::{Lease, Subnets};
use flannel_netlink::testing::{ip, run as program};
use neli::consts::socket::NlFamily;
use nix::sys::socket::{
    AddressFamily, LinkAddr, SockFlag, SockProtocol, SockType, recvfrom, setsockopt, socket,
    sockopt,
};
use serde_json::{Value, json};
use test_support::guest::run_in_qemu;

use crate::parts::cluster::{Families, Peer, peers};
use crate::parts::engine::Engine;
use crate::parts::fixture::Fixture;
use crate::parts::raw::{HEADER, Raw, message};
use crate::parts::report::{Report, median};

const DEVICE: &str = "flannel-wg";
const CONFIG: &str =
    r#"{"Network":"10.0.0.0/8","SubnetLen":24,"Backend":{"Type":"wireguard","MTU":1500}}"#;
const MODULES: [&str; 3] = ["nlmon", "veth", "wireguard"];
const ROUNDS: usize = 3;
/// The number of peers in a message, as wgctrl sends them.
const IN_A_MESSAGE: usize = 32;
/// `NETLINK_GENERIC`.
const GENERIC: u16 = 16;
const SET_DEVICE: u8 = 1;
/// The limits of the time, the messages and the bytes, relative to the bare writer.
const TIME: f64 = 1.5;
const TRAFFIC: f64 = 1.05;

/// What a writer sent.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
struct Sent {
    messages: usize,
    bytes: usize,
}

pub(crate) fn run(peers: u32) -> anyhow::Result<Report> {
    let arguments = ["wireguard", "--peers", &peers.to_string()].map(str::to_owned);
    let here = flannel_netlink::testing::Netns::new().is_ok_and(|netns| {
        netns.run(|| {
            let added = std::process::Command::new("ip")
                .args(["link", "add", DEVICE, "type", "wireguard"])
                .output();
            added.is_ok_and(|output| output.status.success())
        })
    });
    let found = if here {
        measure(peers)?
    } else {
        let printed = run_in_qemu(&arguments, &MODULES, || {
            println!("{}", measure(peers).unwrap_or_else(|error| panic!("{error:#}")));
        });
        let line = printed.lines().find(|line| line.starts_with('{'));
        serde_json::from_str(line.context("the guest printed no figures")?)?
    };
    let number = |name: &str| found[name].as_f64().with_context(|| format!("no {name}: {found}"));
    let mut report = Report {
        peers: Some(peers),
        seconds: Some(number("seconds")?),
        floor_seconds: Some(number("floor_seconds")?),
        ratio: Some(number("ratio")?),
        messages_ratio: Some(number("messages_ratio")?),
        bytes_ratio: Some(number("bytes_ratio")?),
        bytes_per_peer: Some(number("bytes_per_peer")?),
        messages_of_one_more: Some(number("messages_of_one_more")?),
        messages_of_restart: Some(number("messages_of_restart")?),
        ..Report::default()
    };
    report.at_most("ratio", report.ratio, TIME);
    report.at_most("messages_ratio", report.messages_ratio, TRAFFIC);
    report.at_most("bytes_ratio", report.bytes_ratio, TRAFFIC);
    report.at_most("messages_of_one_more", report.messages_of_one_more, 1.0);
    report.at_most("messages_of_restart", report.messages_of_restart, 0.0);
    Ok(report)
}

/// The figures, as one JSON object.
fn measure(count: u32) -> anyhow::Result<Value> {
    let mut ours = Vec::new();
    let mut floors = Vec::new();
    let mut traffic = None;
    for _ in 0..ROUNDS {
        let (took, bare) = write_bare(count)?;
        floors.push(took.as_secs_f64());
        let round = write_ours(count)?;
        ours.push(round.took.as_secs_f64());
        traffic = Some((bare, round));
    }
    let (bare, round) = traffic.context("there is a round")?;
    let relative = |ours: usize, floor: usize| ours as f64 / floor as f64;
    Ok(json!({
        "seconds": median(ours.iter().copied()),
        "floor_seconds": median(floors.iter().copied()),
        "ratio": median(ours.iter().zip(&floors).map(|(ours, floor)| ours / floor)),
        "messages_ratio": relative(round.all.messages, bare.messages),
        "bytes_ratio": relative(round.all.bytes, bare.bytes),
        "bytes_per_peer": round.all.bytes as f64 / f64::from(count),
        "messages_of_one_more": round.one_more.messages,
        "messages_of_restart": round.restart.messages,
    }))
}

/// A key that no other peer has.
fn key(peer: Peer) -> [u8; 32] {
    let mut key = [0x55; 32];
    key[..4].copy_from_slice(&peer.0.to_be_bytes());
    key
}

fn endpoint(peer: Peer) -> Ipv4Addr {
    Ipv4Addr::from_bits(0xac10_0000 + peer.0)
}

/// Writes all peers, [`IN_A_MESSAGE`] at a time.
fn write_bare(count: u32) -> anyhow::Result<(Duration, Sent)> {
    let fixture = Fixture::new()?;
    fixture.netns.run(|| {
        ip(&format!("link add {DEVICE} type wireguard"));
        let shown = ip(&format!("-o link show {DEVICE}"));
        let index: u32 = shown.split(':').next().context("a link has an index")?.parse()?;
        let (mut netlink, family) = generic()?;
        let set =
            |attributes: &[(u16, &[u8])]| message(family, 0x5, &[SET_DEVICE, 1, 0, 0], attributes);
        let device = (1, &index.to_ne_bytes()[..]);
        netlink.exchange(&set(&[device, (3, &[0x50; 32]), (6, &51820_u16.to_ne_bytes())]))?;
        let all: Vec<Peer> = peers(count).collect();
        let mut sent = Sent::default();
        let start = Instant::now();
        for some in all.chunks(IN_A_MESSAGE) {
            let list: Vec<(u16, Vec<u8>)> =
                some.iter().map(|peer| (NESTED, peer_attributes(*peer))).collect();
            let list: Vec<(u16, &[u8])> = list.iter().map(|(kind, v)| (*kind, &v[..])).collect();
            let message = set(&[device, (8 | NESTED, &attributes_of(&list))]);
            sent.messages += 1;
            sent.bytes += message.len();
            netlink.exchange(&message)?;
        }
        Ok((start.elapsed(), sent))
    })
}

/// `NLA_F_NESTED`.
const NESTED: u16 = 1 << 15;

/// A peer as flannel's backend defines it.
fn peer_attributes(peer: Peer) -> Vec<u8> {
    let mut address = 2_u16.to_ne_bytes().to_vec();
    address.extend(51820_u16.to_be_bytes());
    address.extend(endpoint(peer).octets());
    address.resize(16, 0);
    let base = (0x0a00_0000 + (peer.0 << 8)).to_be_bytes();
    let subnet = attributes_of(&[(1, &2_u16.to_ne_bytes()), (2, &base), (3, &[24])]);
    attributes_of(&[
        (1, &key(peer)),
        (3, &2_u32.to_ne_bytes()),
        (4, &address),
        (5, &0_u16.to_ne_bytes()),
        (9 | NESTED, &attributes_of(&[(NESTED, &subnet)])),
    ])
}

/// Attributes, one after the other.
fn attributes_of(all: &[(u16, &[u8])]) -> Vec<u8> {
    message(0, 0, &[], all).split_off(HEADER)
}

/// A socket of generic netlink, and the number of the family of WireGuard.
fn generic() -> anyhow::Result<(Raw, u16)> {
    let mut netlink = Raw::open_to(NlFamily::Generic)?;
    let request = message(16, 0x1, &[3, 2, 0, 0], &[(2, b"wireguard\0")]);
    let answer = netlink.ask(&request)?;
    // After the headers of the message and of generic netlink, the first attribute with a
    // number of two bytes is `CTRL_ATTR_FAMILY_ID`.
    let mut attributes = answer.get(HEADER + 4..).context("an answer has attributes")?;
    while let Some([a, b, kind, 0, value @ ..]) = attributes.first_chunk::<6>() {
        if *kind == 1 {
            return Ok((netlink, u16::from_ne_bytes(*value)));
        }
        let len = usize::from(u16::from_ne_bytes([*a, *b])).next_multiple_of(4);
        attributes = attributes.get(len.max(4)..).unwrap_or_default();
    }
    anyhow::bail!("the kernel has no WireGuard")
}

/// One run of the engine.
struct Round {
    took: Duration,
    all: Sent,
    one_more: Sent,
    restart: Sent,
}

fn write_ours(count: u32) -> anyhow::Result<Round> {
    let fixture = Fixture::new()?;
    let monitor = fixture.netns.run(Monitor::start)?;
    let subnets = FakeSubnets::with_config(CONFIG);
    let host = fixture.host(std::sync::Arc::new(subnets.clone()))?;
    let mut engine = Engine::start_with(&host, subnets.clone(), &WireguardBackend)?;
    engine.rest()?;
    monitor.take()?;
    let start = Instant::now();
    engine.send(leases(count));
    engine.wait_acknowledged(count as usize)?;
    let took = start.elapsed();
    engine.wait(count as usize)?;
    let all = monitor.take()?;
    engine.send(leases(count + 1));
    engine.wait(count as usize + 1)?;
    let one_more = monitor.take()?;
    drop(engine);

    let mut again = Engine::start_with(&host, subnets, &WireguardBackend)?;
    again.wait(count as usize + 1)?;
    let restart = monitor.take()?;
    let there = fixture.netns.run(|| program("wg", &format!("show {DEVICE} peers")));
    ensure!(there.lines().count() == count as usize + 1, "not all peers are in the kernel");
    Ok(Round { took, all, one_more, restart })
}

fn leases(count: u32) -> LeaseSet {
    peers(count)
        .map(|peer| {
            let key = PublicKey(key(peer));
            let data = format!(r#"{{"PublicKey":"{key}","Port":51820}}"#);
            let revision = Revision(u64::from(peer.0));
            Lease {
                subnets: Subnets::new(Families::Ipv4.iter().map(|family| peer.subnet(family)))
                    .expect("a family"),
                attrs: LeaseAttrs::from(
                    Offer::new(Dual { v4: Some(endpoint(peer).into()), v6: None })
                        .with_kind("wireguard")
                        .with_data(Dual { v4: Some(data.into()), v6: None }),
                ),
                expires: None,
                since: revision,
                revision,
            }
        })
        .collect()
}

/// Sees the messages of generic netlink in a network namespace.
struct Monitor {
    socket: OwnedFd,
    family: u16,
}

impl Monitor {
    fn start() -> anyhow::Result<Self> {
        ip("link add monitor type nlmon");
        ip("link set monitor up");
        let (_, family) = generic()?;
        let socket = socket(
            AddressFamily::Packet,
            SockType::Raw,
            SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK,
            SockProtocol::EthAll,
        )?;
        setsockopt(&socket, sockopt::RcvBufForce, &(256 << 20))?;
        Ok(Self { socket, family })
    }

    /// The changes of WireGuard devices since the last call.
    fn take(&self) -> anyhow::Result<Sent> {
        let mut sent = Sent::default();
        let mut buffer = vec![0; 1 << 17];
        loop {
            let received = recvfrom::<LinkAddr>(self.socket.as_raw_fd(), &mut buffer);
            let (len, from) = match received {
                Err(nix::errno::Errno::EAGAIN) => return Ok(sent),
                received => received?,
            };
            if from.is_some_and(|from| u16::from_be(from.protocol()) == GENERIC) {
                self.count(&buffer[..len], &mut sent);
            }
        }
    }

    /// Counts the requests in a datagram.
    fn count(&self, mut datagram: &[u8], sent: &mut Sent) {
        while let Some(header) = datagram.first_chunk::<17>() {
            let len = u32::from_ne_bytes([header[0], header[1], header[2], header[3]]) as usize;
            let kind = u16::from_ne_bytes([header[4], header[5]]);
            if kind == self.family && header[16] == SET_DEVICE {
                sent.messages += 1;
                sent.bytes += len;
            }
            datagram = datagram.get(len.next_multiple_of(4).max(4)..).unwrap_or_default();
        }
    }
}
