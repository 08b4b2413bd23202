//! ICMP echoes of an exact size that must not be fragmented, to many addresses at once.
//!
//! This module writes the IP header itself, because the kernel offers an exact size and "don't
//! fragment" for both families only this way. It needs `CAP_NET_RAW`.
//!
//! **Source**: RFC 792, 1191, 4443, 8201; linux `net/ipv4/raw.c: raw_send_hdrinc`,
//! `net/ipv6/raw.c`.

use std::io::{self, ErrorKind, Read};
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

use flannel_core::address::Family;
use socket2::{Domain, Protocol, Socket, Type};

/// The maximum number of attempts for each echo.
const ROUNDS: u32 = 3;
const EMSGSIZE: i32 = 90;
/// The maximum number of echoes in flight. With more, answers would overflow the receive buffer.
const GROUP: usize = 64;
/// The number of echoes after which answers are read.
const BURST: usize = 16;
const BURST_PAUSE: Duration = Duration::from_millis(1);
/// `IPPROTO_RAW`: the sender writes the IP header.
const RAW: i32 = 255;
const ICMP: u8 = 1;
const ICMPV6: u8 = 58;
const HOP_LIMIT: u8 = 64;
/// The first bytes of the payload, which identify echoes of flannel.
const MAGIC: &[u8; 8] = b"flannel?";

/// An echo request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Probe {
    /// The destination.
    pub to: IpAddr,
    /// The size of the whole IP packet, in bytes.
    pub size: u16,
}

/// The answer to an echo request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answer {
    /// A reply, after this time.
    Reply(Duration),
    /// A router or this host takes only smaller packets: of at most this many bytes, if known.
    TooBig(Option<u32>),
    /// No reply.
    Nothing,
    /// The request could not be sent, for this reason.
    NotSent(String),
    /// This process lacks the privilege to send echoes.
    NotAllowed,
}

/// Sends all echoes, and waits at most `patience` for the answers of each group.
///
/// # Errors
/// No echo can be sent, usually because `CAP_NET_RAW` is missing.
///
/// # Blocking
/// Until all answers are there, or `patience` is over for each group of 64 of a family.
pub fn echo(probes: &[Probe], patience: Duration) -> io::Result<Vec<Answer>> {
    let mut answers = vec![Answer::Nothing; probes.len()];
    let of = |family| -> io::Result<Vec<(usize, Answer)>> {
        let ours = probes.iter().enumerate().filter(|(_, probe)| Family::of(probe.to) == family);
        let ours: Vec<(usize, Probe)> = ours.map(|(n, probe)| (n, *probe)).collect();
        if ours.is_empty() {
            return Ok(Vec::new());
        }
        let (round, mut found) = (Round::open(family)?, Vec::new());
        for group in ours.chunks(GROUP) {
            found.extend(round.run(found.len(), group, patience)?);
        }
        Ok(found)
    };
    // One thread for each family.
    let both = std::thread::scope(|scope| {
        Family::BOTH
            .map(|family| scope.spawn(move || of(family)))
            .map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    });
    for found in both {
        for (n, answer) in found? {
            answers[n] = answer;
        }
    }
    Ok(answers)
}

/// The sockets of a family.
struct Round {
    family: Family,
    out: Socket,
    inbox: Socket,
    id: u16,
}

impl Round {
    fn open(family: Family) -> io::Result<Self> {
        let (domain, icmp) = match family {
            Family::V4 => (Domain::IPV4, Protocol::ICMPV4),
            Family::V6 => (Domain::IPV6, Protocol::ICMPV6),
        };
        let out = Socket::new(domain, Type::RAW, Some(Protocol::from(RAW)))?;
        let inbox = Socket::new(domain, Type::RAW, Some(icmp))?;
        // The low half of the process id is enough to distinguish processes.
        Ok(Self { family, out, inbox, id: std::process::id() as u16 })
    }

    /// Sends one group. `first` is the sequence number of its first echo.
    fn run(
        &self,
        first: usize,
        probes: &[(usize, Probe)],
        patience: Duration,
    ) -> io::Result<Vec<(usize, Answer)>> {
        let mut answers: Vec<(usize, Answer)> =
            probes.iter().map(|(n, _)| (*n, Answer::Nothing)).collect();
        let mut sent = vec![Instant::now(); probes.len()];
        let start = Instant::now();
        for round in 1..=ROUNDS {
            for (k, (_, probe)) in probes.iter().enumerate() {
                if answers[k].1 != Answer::Nothing {
                    continue;
                }
                sent[k] = Instant::now();
                if let Err(error) = self.send(probe, first + k) {
                    answers[k].1 = match error.raw_os_error() {
                        Some(EMSGSIZE) => Answer::TooBig(None),
                        _ => Answer::NotSent(error.to_string()),
                    };
                }
                if k % BURST == BURST - 1 {
                    self.listen(first, (&mut answers, &sent), Instant::now() + BURST_PAUSE)?;
                }
            }
            self.listen(first, (&mut answers, &sent), start + patience * round / ROUNDS)?;
        }
        Ok(answers)
    }

    /// Reads answers until all are there, or until `end`.
    fn listen(
        &self,
        first: usize,
        (answers, sent): (&mut [(usize, Answer)], &[Instant]),
        end: Instant,
    ) -> io::Result<()> {
        while answers.iter().any(|(_, answer)| *answer == Answer::Nothing) {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            let Some((sequence, answer)) = self.receive(left)? else { continue };
            // Otherwise it is a late answer of the group before.
            let Some(k) = sequence.checked_sub(first) else { continue };
            if let Some((_, known)) =
                answers.get_mut(k).filter(|(_, known)| *known == Answer::Nothing)
            {
                *known = match answer {
                    IcmpMessage::Reply => Answer::Reply(sent[k].elapsed()),
                    IcmpMessage::TooBig(most) => Answer::TooBig(Some(most)),
                };
            }
        }
        Ok(())
    }

    fn send(&self, probe: &Probe, sequence: usize) -> io::Result<()> {
        let from = source(probe.to)?;
        // Sequence numbers suffice, because `doctor` limits the number of peers.
        let packet = packet(from, probe.to, probe.size, self.id, sequence as u16);
        self.out.send_to(&packet, &SocketAddr::new(probe.to, 0).into()).map(drop)
    }

    /// Waits at most `left` for a message. `None`: none came, or it is not about an echo of ours.
    fn receive(&self, left: Duration) -> io::Result<Option<(usize, IcmpMessage)>> {
        self.inbox.set_read_timeout(Some(left))?;
        let mut buffer = [0; 2048];
        match (&self.inbox).read(&mut buffer) {
            Ok(len) => Ok(read(self.family, &buffer[..len], self.id)),
            Err(error)
                if matches!(
                    error.kind(),
                    ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted
                ) =>
            {
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }
}

/// The source address that the kernel chooses.
fn source(to: IpAddr) -> io::Result<IpAddr> {
    let any = Family::of(to).unspecified();
    let socket = UdpSocket::bind((any, 0))?;
    // Connecting a UDP socket sends no packet.
    socket.connect((to, 9))?;
    Ok(socket.local_addr()?.ip())
}

fn bytes(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(a) => a.octets().into(),
        IpAddr::V6(a) => a.octets().into(),
    }
}

/// A whole packet of `size` bytes, or larger if the headers and `MAGIC` need it.
fn packet(from: IpAddr, to: IpAddr, size: u16, id: u16, sequence: u16) -> Vec<u8> {
    let header = if to.is_ipv4() { 20 } else { 40 };
    let size = usize::from(size).max(header + 8 + MAGIC.len());
    let mut icmp = vec![if to.is_ipv4() { 8 } else { 128 }, 0, 0, 0];
    icmp.extend(id.to_be_bytes());
    icmp.extend(sequence.to_be_bytes());
    icmp.extend(MAGIC);
    icmp.resize(size - header, 0x66);
    // The pseudo header comes first, because the data may have an odd number of bytes.
    let mut covered = match to.is_ipv6() {
        true => [
            bytes(from),
            bytes(to),
            (icmp.len() as u32).to_be_bytes().into(),
            vec![0, 0, 0, ICMPV6],
        ]
        .concat(),
        false => Vec::new(),
    };
    covered.extend(&icmp);
    icmp[2..4].copy_from_slice(&checksum(&covered).to_be_bytes());
    let mut packet = match to.is_ipv4() {
        // Version, length, TOS 0, id 0, don't fragment. The kernel writes the checksum.
        true => {
            let mut head = vec![0x45, 0];
            head.extend((size as u16).to_be_bytes());
            head.extend([0, 0, 0x40, 0, HOP_LIMIT, ICMP, 0, 0]);
            head
        }
        // Routers do not fragment IPv6 packets.
        false => {
            let mut head = vec![0x60, 0, 0, 0];
            head.extend((icmp.len() as u16).to_be_bytes());
            head.extend([ICMPV6, HOP_LIMIT]);
            head
        }
    };
    packet.extend(bytes(from));
    packet.extend(bytes(to));
    packet.extend(icmp);
    packet
}

/// The Internet checksum (RFC 1071).
fn checksum(data: &[u8]) -> u16 {
    let word = |pair: &[u8]| u32::from(pair[0]) << 8 | u32::from(*pair.get(1).unwrap_or(&0));
    let mut sum: u32 = data.chunks(2).map(word).fold(0, u32::wrapping_add);
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum IcmpMessage {
    Reply,
    TooBig(u32),
}

/// The message in a received packet, and the sequence number of our echo that it is about.
fn read(family: Family, data: &[u8], id: u16) -> Option<(usize, IcmpMessage)> {
    let number =
        |data: &[u8], at: usize| Some(u16::from_be_bytes(data.get(at..at + 2)?.try_into().ok()?));
    // A raw socket of Linux passes the IP header with IPv4 only.
    let skip = |data: &[u8]| Some(usize::from(data.first()? & 0x0f) * 4);
    let icmp = data.get(if family == Family::V4 { skip(data)? } else { 0 }..)?;
    let ours = |echo: &[u8]| (number(echo, 4)? == id).then(|| number(echo, 6).map(usize::from))?;
    match (family, icmp.first()?, icmp.get(1)?) {
        (Family::V4, 0, _) | (Family::V6, 129, _) if icmp.get(8..16) == Some(MAGIC) => {
            Some((ours(icmp)?, IcmpMessage::Reply))
        }
        // Fragmentation needed. The packet that it is about follows.
        (Family::V4, 3, 4) => {
            let about = icmp.get(8..)?;
            let echo = about.get(skip(about)?..)?;
            (echo.first() == Some(&8)).then_some(())?;
            Some((ours(echo)?, IcmpMessage::TooBig(number(icmp, 6)?.into())))
        }
        (Family::V6, 2, _) => {
            let echo = icmp.get(8 + 40..)?;
            (echo.first() == Some(&128)).then_some(())?;
            Some((
                ours(echo)?,
                IcmpMessage::TooBig(u32::from_be_bytes(icmp.get(4..8)?.try_into().ok()?)),
            ))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use flannel_netlink::testing::{Netns, in_netns, ip};

    use super::*;

    fn probe(to: &str, size: u16) -> Probe {
        Probe { to: to.parse().unwrap(), size }
    }

    #[test]
    fn checksums_match_rfc_1071() {
        assert_eq!(checksum(&[0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7]), !0xddf2);
        assert_eq!(checksum(&[0xff]), !0xff00);
    }

    #[test]
    fn answers_to_other_programs_are_ignored() {
        for family in Family::BOTH {
            for data in [&[][..], &[0x45], &[0; 28], &[129, 0, 0, 0, 0, 7, 0, 0], &[0xff; 60]] {
                assert_eq!(read(family, data, 7), None, "{data:?}");
            }
        }
    }

    #[test]
    fn thousands_of_echoes_are_sent_in_groups() {
        in_netns(|| {
            let probes: Vec<Probe> =
                (0..1000).map(|n| probe(["127.0.0.1", "::1"][n % 2], 1400)).collect();
            let answers = echo(&probes, Duration::from_secs(20)).unwrap();
            assert!(answers.iter().all(|answer| matches!(answer, Answer::Reply(_))), "{answers:?}");
        });
    }

    /// A host behind a router whose far side takes only 1400 bytes.
    #[test]
    fn sizes_are_exact_and_the_mtu_of_a_router_is_reported() {
        in_netns(|| {
            let (router, far) = (Netns::new().unwrap(), Netns::new().unwrap());
            let file = |netns: &Netns| {
                netns.path().display().to_string().replace("self", &std::process::id().to_string())
            };
            ip(&format!("link add eth0 type veth peer name near netns {}", file(&router)));
            router.run(|| {
                ip(&format!("link add far type veth peer name eth0 netns {}", file(&far)));
                ip("link set far mtu 1400");
                for (link, v4, v6) in [
                    ("near", "192.0.2.2/24", "2001:db8:1::2/64"),
                    ("far", "198.51.100.2/24", "2001:db8:2::2/64"),
                ] {
                    ip(&format!("addr add {v4} dev {link}"));
                    ip(&format!("addr add {v6} dev {link} nodad"));
                    ip(&format!("link set {link} up"));
                }
                std::fs::write("/proc/sys/net/ipv4/ip_forward", "1").unwrap();
                std::fs::write("/proc/sys/net/ipv6/conf/all/forwarding", "1").unwrap();
            });
            let host = |v4: &str, v6: &str, via4: &str, via6: &str| {
                ip("link set eth0 up");
                ip(&format!("addr add {v4} dev eth0"));
                ip(&format!("addr add {v6} dev eth0 nodad"));
                ip(&format!("route add default via {via4}"));
                ip(&format!("route add default via {via6}"));
            };
            far.run(|| {
                host("198.51.100.9/24", "2001:db8:2::9/64", "198.51.100.2", "2001:db8:2::2");
            });
            host("192.0.2.1/24", "2001:db8:1::1/64", "192.0.2.2", "2001:db8:1::2");
            ip("route add blackhole 203.0.113.0/24");
            let probes = [
                probe("198.51.100.9", 64),
                probe("198.51.100.9", 1400),
                probe("198.51.100.9", 1401),
                probe("192.0.2.2", 1500),
                probe("192.0.2.2", 1501),
                probe("203.0.113.1", 64),
                probe("2001:db8:2::9", 64),
                probe("2001:db8:2::9", 1400),
                probe("2001:db8:2::9", 1401),
                probe("2001:db8:1::2", 1501),
                // An odd number of bytes.
                probe("198.51.100.9", 1399),
                probe("2001:db8:2::9", 1399),
            ];
            // IPv6 needs a moment before its addresses can send neighbour solicitations.
            let answers = echo(&probes, Duration::from_secs(20)).unwrap();
            let replied = |n: usize| matches!(answers[n], Answer::Reply(_));
            assert!([0, 1, 3, 6, 7, 10, 11].into_iter().all(replied), "{answers:?}");
            for n in [2, 8] {
                assert_eq!(answers[n], Answer::TooBig(Some(1400)), "{:?}", probes[n]);
            }
            for n in [4, 9] {
                assert_eq!(answers[n], Answer::TooBig(None), "{:?}", probes[n]);
            }
            assert!(matches!(answers[5], Answer::NotSent(_)), "{answers:?}");
            let nobody = echo(&[probe("192.0.2.99", 64)], Duration::from_millis(100)).unwrap();
            assert_eq!(nobody, [Answer::Nothing]);
        });
    }
}
