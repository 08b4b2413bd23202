//! ICMP messages as a process with raw sockets can send them, a pod for example: with any content
//! and any source address.

use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use socket2::{Domain, Protocol, Socket, Type};

use crate::packet::checksum;

/// `IPPROTO_RAW`: the sender writes the IP header.
const RAW: i32 = 255;

/// Raw sockets for the ICMP of one family, in the network namespace of the calling thread.
#[derive(Debug)]
pub struct RawIcmp {
    is_v6: bool,
    out: Socket,
    inbox: UdpSocket,
}

/// A received echo request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EchoRequest {
    /// Its source.
    pub from: IpAddr,
    /// The ICMP message, without the IP header.
    pub icmp: Vec<u8>,
}

impl RawIcmp {
    /// Opens the sockets, which needs `CAP_NET_RAW`.
    ///
    /// # Panics
    /// The kernel refuses.
    pub fn open(is_v6: bool) -> Self {
        let (domain, icmp) =
            if is_v6 { (Domain::IPV6, Protocol::ICMPV6) } else { (Domain::IPV4, Protocol::ICMPV4) };
        let open = |protocol| Socket::new(domain, Type::RAW, Some(protocol));
        let out = open(Protocol::from(RAW)).expect("a raw socket can be opened");
        let inbox = open(icmp).expect("a raw socket can be opened");
        Self { is_v6, out, inbox: inbox.into() }
    }

    /// The next echo request to this namespace, or `None` if none came in this time.
    ///
    /// # Panics
    /// The socket fails.
    pub fn next_echo(&self, patience: Duration) -> Option<EchoRequest> {
        let end = Instant::now() + patience;
        let mut buffer = [0; 65_536];
        loop {
            let left = end.saturating_duration_since(Instant::now());
            // A timeout of zero is invalid.
            let left = left.max(Duration::from_micros(1));
            self.inbox.set_read_timeout(Some(left)).expect("a timeout can be set");
            match self.inbox.recv_from(&mut buffer) {
                Ok((len, from)) => {
                    // A raw socket of Linux passes the IP header with IPv4 only.
                    let header = if self.is_v6 { 0 } else { usize::from(buffer[0] & 0xf) * 4 };
                    let icmp = &buffer[header..len];
                    if icmp.first() == Some(&request(self.is_v6)) {
                        return Some(EchoRequest { from: from.ip(), icmp: icmp.to_vec() });
                    }
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(error) => panic!("{error}"),
            }
            if Instant::now() >= end {
                return None;
            }
        }
    }

    /// Sends an ICMP message in a packet with these addresses. A packet that the kernel does not
    /// send, for example because a queue is full, is lost.
    pub fn send(&self, from: IpAddr, to: IpAddr, icmp: &[u8]) {
        let _ = self.out.send_to(&packet(from, to, icmp), &SocketAddr::new(to, 0).into());
    }
}

/// An attack on a node's probes of the path to a peer, by a process that does not see them.
#[derive(Debug)]
pub struct Flood {
    /// The address of the attacker.
    pub attacker: IpAddr,
    /// The address at which the node gets the messages.
    pub node: IpAddr,
    /// The address from which the node sends its probes.
    pub source: IpAddr,
    /// The address that is probed.
    pub peer: IpAddr,
    /// The ICMP message of an earlier probe, which the attacker has seen.
    pub earlier: Vec<u8>,
}

impl Flood {
    /// The probes of a node have these sequence numbers first.
    const NUMBERS: u16 = 1024;
    /// The numbers between two pauses. All numbers take less than the second in which a probe
    /// waits.
    const BURST: u16 = 8;
    const PAUSE: Duration = Duration::from_millis(5);

    /// Sends answers to all probes until `over` is true: replies, and reports that only `most`
    /// bytes pass, from the attacker's address and from the peer's. The pauses leave time to
    /// receive the true answers: a forged answer with the secret of the socket takes space in its
    /// buffer.
    #[expect(clippy::disallowed_methods, reason = "the pauses are the rate of the flood")]
    pub fn run(&self, most: u16, over: &AtomicBool) {
        let Self { attacker, node, source, peer, earlier } = self;
        let is_v6 = node.is_ipv6();
        let raw = RawIcmp::open(is_v6);
        let mut echo = earlier.clone();
        for number in (0..Self::NUMBERS).cycle() {
            if over.load(Ordering::Relaxed) {
                break;
            }
            if number.is_multiple_of(Self::BURST) {
                std::thread::sleep(Self::PAUSE);
            }
            echo[6..8].copy_from_slice(&number.to_be_bytes());
            let quoted = packet(*source, *peer, &echo);
            // RFC 792 demands eight bytes.
            let minimal = &quoted[..quoted.len() - echo.len() + 8];
            let messages =
                [reply(&echo), too_big(is_v6, &quoted, most), too_big(is_v6, minimal, most)];
            for message in &messages {
                raw.send(*attacker, *node, message);
                raw.send(*peer, *node, message);
            }
        }
    }
}

fn request(is_v6: bool) -> u8 {
    if is_v6 { 128 } else { 8 }
}

/// The reply to an echo request with the same content.
pub fn reply(request: &[u8]) -> Vec<u8> {
    let kind = if request.first() == Some(&8) { 0 } else { 129 };
    [&[kind], &request[1..]].concat()
}

/// A router's report that a packet, of which it quotes `quoted`, is larger than `most` bytes.
pub fn too_big(is_v6: bool, quoted: &[u8], most: u16) -> Vec<u8> {
    let (kind, code) = if is_v6 { (2, 0) } else { (3, 4) };
    let [high, low] = most.to_be_bytes();
    [&[kind, code, 0, 0, 0, 0, high, low], quoted].concat()
}

/// An IP packet with an ICMP message, whose checksum it computes.
///
/// # Panics
/// The addresses are of different families, or the message is too long.
pub fn packet(from: IpAddr, to: IpAddr, icmp: &[u8]) -> Vec<u8> {
    let mut icmp = icmp.to_vec();
    icmp[2..4].fill(0);
    let len = u16::try_from(icmp.len()).expect("a packet has less than 64 KiB");
    match (from, to) {
        (IpAddr::V4(from), IpAddr::V4(to)) => {
            let sum = checksum(&icmp);
            icmp[2..4].copy_from_slice(&sum.to_be_bytes());
            [v4_header(from, to, len), icmp].concat()
        }
        (IpAddr::V6(from), IpAddr::V6(to)) => {
            let pseudo = [&from.octets()[..], &to.octets(), &[0, 0], &len.to_be_bytes()].concat();
            let sum = checksum(&[&pseudo[..], &[0, 0, 0, 58], &icmp].concat());
            icmp[2..4].copy_from_slice(&sum.to_be_bytes());
            [v6_header(from, to, len), icmp].concat()
        }
        _ => panic!("{from} and {to} are of different families"),
    }
}

/// A header with "don't fragment", without its checksum, which the kernel writes.
fn v4_header(from: Ipv4Addr, to: Ipv4Addr, payload: u16) -> Vec<u8> {
    let [high, low] = (payload + 20).to_be_bytes();
    let fixed = [0x45, 0, high, low, 0, 0, 0x40, 0, 64, 1, 0, 0];
    [&fixed[..], &from.octets(), &to.octets()].concat()
}

fn v6_header(from: Ipv6Addr, to: Ipv6Addr, payload: u16) -> Vec<u8> {
    let [high, low] = payload.to_be_bytes();
    let fixed = [0x60, 0, 0, 0, high, low, 58, 64];
    [&fixed[..], &from.octets(), &to.octets()].concat()
}
