//! The sockets for ICMP echoes of one family, and the bytes on them.
//!
//! Every process with a raw socket can send ICMP messages to this host, a pod too, and perhaps with
//! a forged source address. So each echo has random numbers that only those can know who see it:
//! the secret of its socket, and a token. A message counts only if it has both, and the address
//! that the echo went to. The kernel already drops messages without the secret, so that a flood of
//! them neither fills the receive buffer nor displaces an answer.
//!
//! A router's report on the size of a packet counts only if it quotes the token. RFC 792 demands
//! only 8 bytes of the quoted packet's payload, which end before it. Such a report is ignored, as
//! if that router reported nothing: the size that passes is then found by echoes of other sizes.
//! Linux quotes up to 576 bytes, and 1280 with IPv6.
//!
//! The sender writes the IP header itself, because the kernel offers an exact size and "don't
//! fragment" for both families only this way. It needs `CAP_NET_RAW`.
//!
//! **Source**: RFC 792, 1191, 1812 (section 4.3.2.3), 4443, 8201; linux `net/ipv4/raw.c:
//! raw_send_hdrinc`, `net/ipv6/raw.c`, `ip_skb_dst_mtu`, `ip6_skb_dst_mtu`.

use std::io::{self, ErrorKind};
use std::net::{IpAddr, SocketAddr, UdpSocket};

use flannel_core::address::Family;
use libc::EMSGSIZE;
use rustix::net::sockopt::{
    Ipv4PathMtuDiscovery, Ipv6PathMtuDiscovery, set_ip_mtu_discover, set_ipv6_mtu_discover,
};
use socket2::{Domain, Protocol, SockFilter, Socket, Type};

use super::echo::EchoResult;
use crate::token::token;

/// `IPPROTO_RAW`: the sender writes the IP header.
const RAW: i32 = 255;
const ICMP: u8 = 1;
const ICMPV6: u8 = 58;
const HOP_LIMIT: u8 = 64;
/// The length of the ICMP header, in bytes.
const ICMP_HEADER: usize = 8;
/// The length of the secret and of the token, in bytes.
const NUMBER: usize = size_of::<u64>();

/// An echo request, and the numbers by which its answers are known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Echo {
    /// The destination.
    pub to: IpAddr,
    /// The sequence number.
    pub sequence: u16,
    /// A random number (`token`). No two echoes with the same address and sequence number may
    /// have the same one.
    pub token: u64,
}

/// The sockets of a family.
#[derive(Debug)]
pub struct EchoSocket {
    family: Family,
    out: Socket,
    /// A raw socket. The calls for UDP work with every socket of datagrams.
    inbox: UdpSocket,
    /// A random number in each echo of this socket.
    secret: u64,
}

impl EchoSocket {
    /// Sockets for echoes of a family.
    ///
    /// # Errors
    /// The sockets cannot be opened, usually because `CAP_NET_RAW` is missing.
    pub fn open(family: Family) -> io::Result<Self> {
        let (domain, icmp) = match family {
            Family::V4 => (Domain::IPV4, Protocol::ICMPV4),
            Family::V6 => (Domain::IPV6, Protocol::ICMPV6),
        };
        let out = Socket::new(domain, Type::RAW, Some(Protocol::from(RAW)))?;
        // A full send buffer must not stop the sender.
        out.set_nonblocking(true)?;
        // The MTU of the device counts, not the MTU of the route, nor one that a router reported.
        match family {
            Family::V4 => set_ip_mtu_discover(&out, Ipv4PathMtuDiscovery::PROBE)?,
            Family::V6 => set_ipv6_mtu_discover(&out, Ipv6PathMtuDiscovery::PROBE)?,
        }
        let secret = token();
        let inbox = Socket::new(domain, Type::RAW, Some(icmp))?;
        inbox.attach_filter(&filter(family, secret))?;
        Ok(Self { family, out, inbox: inbox.into(), secret })
    }

    /// The raw socket that answers arrive at. Ports of senders have no meaning.
    pub fn inbox(&self) -> &UdpSocket {
        &self.inbox
    }

    /// Sends an echo of the socket's family. The whole IP packet has `size` bytes, or as many as
    /// its headers and numbers need: 44, with IPv6 64.
    ///
    /// # Errors
    /// The answer, if this host does not send it: [`EchoResult::TooBig`] or
    /// [`EchoResult::NotSent`].
    pub fn send(&self, echo: &Echo, size: u16) -> Result<(), EchoResult> {
        let sent = source(echo.to).and_then(|from| {
            let packet = packet(from, echo, size, self.secret);
            self.out.send_to(&packet, &SocketAddr::new(echo.to, 0).into())
        });
        match sent {
            Ok(_) => Ok(()),
            // As in a full queue of a device, the packet is lost.
            Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(()),
            Err(error) if error.raw_os_error() == Some(EMSGSIZE) => Err(EchoResult::TooBig(None)),
            Err(error) => Err(EchoResult::NotSent(error.to_string())),
        }
    }

    /// Reads one message from the inbox. Returns the echo that it is about, and its content,
    /// or `None` if it is not about an echo of this socket.
    ///
    /// # Errors
    /// The errors of `recv`, such as [`io::ErrorKind::WouldBlock`] if no message came in time.
    pub fn receive(&self) -> io::Result<Option<(Echo, IcmpMessage)>> {
        let mut buffer = [0; 2048];
        match self.inbox.recv_from(&mut buffer) {
            Ok((len, from)) => Ok(self.parse(from.ip(), &buffer[..len])),
            Err(error) if error.kind() == ErrorKind::Interrupted => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The content of a message from the inbox, and the echo that it is about. `from` is its
    /// sender. `None` if it is not about an echo of this socket.
    ///
    /// The caller compares the echo with those that wait for an answer. A message about any other
    /// one is forged or late.
    pub fn parse(&self, from: IpAddr, message: &[u8]) -> Option<(Echo, IcmpMessage)> {
        parse(self.family, from, message, self.secret)
    }
}

/// A test of a BPF program: it loads a value at an offset and compares it.
struct Check {
    load: u16,
    at: usize,
    value: u32,
}

/// Lets through replies and reports about the size of packets that have this secret.
fn filter(family: Family, secret: u64) -> Vec<SockFilter> {
    // BPF instructions; linux/filter.h. X is the length of the IPv4 header.
    const LDX_MSH: u16 = 0xb1;
    const JEQ: u16 = 0x15;
    // A raw socket of Linux passes the IP header with IPv4 only.
    let (head, byte, word) = match family {
        Family::V4 => (Some(SockFilter::new(LDX_MSH, 0, 0, 0)), 0x50, 0x40),
        Family::V6 => (None, 0x30, 0x20),
    };
    let Types { reply, request, too_big, code } = types(family);
    let is = |at, value: u8| Check { load: byte, at, value: value.into() };
    let has_secret = |at: usize| {
        let [high, low] = [secret >> 32, secret & 0xffff_ffff].map(|half| half as u32);
        [
            Check { load: word, at, value: high },
            Check { load: word, at: at + NUMBER / 2, value: low },
        ]
    };
    let quoted = Quoted::of(family);
    let mut report = vec![is(0, too_big)];
    report.extend(code.map(|code| is(1, code)));
    report.extend(quoted.header.iter().map(|(at, value)| is(ICMP_HEADER + at, *value)));
    let echo = ICMP_HEADER + quoted.len;
    report.push(is(echo, request));
    report.extend(has_secret(echo + ICMP_HEADER));
    let mut answer = vec![is(0, reply)];
    answer.extend(has_secret(ICMP_HEADER));
    let [report, answer] = [report, answer].map(|checks| accept_if(&checks));
    let over_report = u8::try_from(report.len()).expect("some twenty instructions");
    let mut program = Vec::from_iter(head);
    program.push(SockFilter::new(byte, 0, 0, 0));
    program.push(SockFilter::new(JEQ, 0, over_report, too_big.into()));
    program.extend(report);
    program.extend(answer);
    program
}

/// Instructions that accept the packet if all values are there, and drop it otherwise. A load
/// beyond the end of a packet drops it too.
fn accept_if(checks: &[Check]) -> Vec<SockFilter> {
    const JEQ: u16 = 0x15;
    const RET: u16 = 0x06;
    let mut instructions = Vec::new();
    for (n, Check { load, at, value }) in checks.iter().enumerate() {
        // The rest of the checks, and the acceptance.
        let to_drop = 2 * (checks.len() - n - 1) + 1;
        let to_drop = u8::try_from(to_drop).expect("some ten checks");
        let at = u32::try_from(*at).expect("it is in the headers");
        instructions.push(SockFilter::new(*load, 0, 0, at));
        instructions.push(SockFilter::new(JEQ, 0, to_drop, *value));
    }
    instructions.push(SockFilter::new(RET, 0, 0, u32::MAX));
    instructions.push(SockFilter::new(RET, 0, 0, 0));
    instructions
}

/// The types of ICMP messages in a family.
struct Types {
    request: u8,
    reply: u8,
    /// A router's report about the size of a packet.
    too_big: u8,
    /// The code of such a report, or `None` if every code is one.
    code: Option<u8>,
}

fn types(family: Family) -> Types {
    match family {
        Family::V4 => Types { request: 8, reply: 0, too_big: 3, code: Some(4) },
        Family::V6 => Types { request: 128, reply: 129, too_big: 2, code: None },
    }
}

/// The IP header of an echo that a router's report quotes.
struct Quoted {
    /// Its length, in bytes. Echoes have no options.
    len: usize,
    /// Bytes of it, by offset: with IPv4 version and length of the header, and the protocol.
    header: &'static [(usize, u8)],
    /// The offset of the destination.
    to: usize,
}

impl Quoted {
    fn of(family: Family) -> Self {
        match family {
            Family::V4 => Self { len: 20, header: &[(0, 0x45), (9, ICMP)], to: 16 },
            Family::V6 => Self { len: 40, header: &[(6, ICMPV6)], to: 24 },
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

/// A whole packet of `size` bytes, or larger if the headers and numbers need it.
fn packet(from: IpAddr, echo: &Echo, size: u16, secret: u64) -> Vec<u8> {
    let to = echo.to;
    let header = if to.is_ipv4() { 20 } else { 40 };
    let size = usize::from(size).max(header + ICMP_HEADER + 2 * NUMBER);
    let mut icmp = vec![types(Family::of(to)).request, 0, 0, 0];
    // The identifier. Echoes are known by the numbers that follow.
    icmp.extend((echo.token as u16).to_be_bytes());
    icmp.extend(echo.sequence.to_be_bytes());
    icmp.extend(secret.to_be_bytes());
    icmp.extend(echo.token.to_be_bytes());
    icmp.resize(size - header, 0x66);
    // The pseudo header comes first, because the data may have an odd number of bytes.
    let mut covered = if to.is_ipv6() {
        [bytes(from), bytes(to), (icmp.len() as u32).to_be_bytes().into(), vec![0, 0, 0, ICMPV6]]
            .concat()
    } else {
        Vec::new()
    };
    covered.extend(&icmp);
    icmp[2..4].copy_from_slice(&checksum(&covered).to_be_bytes());
    let mut packet = if to.is_ipv4() {
        // Version, length, TOS 0, id 0, don't fragment. The kernel writes the checksum.
        let mut head = vec![0x45, 0];
        head.extend((size as u16).to_be_bytes());
        head.extend([0, 0, 0x40, 0, HOP_LIMIT, ICMP, 0, 0]);
        head
    } else {
        // Routers do not fragment IPv6 packets.
        let mut head = vec![0x60, 0, 0, 0];
        head.extend((icmp.len() as u16).to_be_bytes());
        head.extend([ICMPV6, HOP_LIMIT]);
        head
    };
    packet.extend(bytes(from));
    packet.extend(bytes(to));
    packet.extend(icmp);
    packet
}

/// The Internet checksum (RFC 1071).
fn checksum(data: &[u8]) -> u16 {
    let mut sum: u32 = data
        .chunks(2)
        .map(|pair| u32::from(pair[0]) << 8 | u32::from(*pair.get(1).unwrap_or(&0)))
        .fold(0, u32::wrapping_add);
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

/// A message about an echo.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IcmpMessage {
    /// The reply.
    Reply,
    /// A router takes only packets of at most this many bytes.
    TooBig(u32),
}

/// The message in a received packet, and the echo with this secret that it is about.
fn parse(family: Family, from: IpAddr, data: &[u8], secret: u64) -> Option<(Echo, IcmpMessage)> {
    // A raw socket of Linux passes the IP header with IPv4 only.
    let icmp = match family {
        Family::V4 => data.get(usize::from(data.first()? & 0x0f) * 4..)?,
        Family::V6 => data,
    };
    let Types { request, reply, too_big, code } = types(family);
    let kind = *icmp.first()?;
    if kind == reply {
        return Some((echo(from, icmp, secret)?, IcmpMessage::Reply));
    }
    if kind != too_big || code.is_some_and(|code| icmp.get(1) != Some(&code)) {
        return None;
    }
    let most = match family {
        Family::V4 => u16::from_be_bytes(at(icmp, 6)?).into(),
        Family::V6 => u32::from_be_bytes(at(icmp, 4)?),
    };
    let quoted = Quoted::of(family);
    let ip = icmp.get(ICMP_HEADER..)?;
    if quoted.header.iter().any(|(at, value)| ip.get(*at) != Some(value)) {
        return None;
    }
    let to: IpAddr = match family {
        Family::V4 => at::<4>(ip, quoted.to)?.into(),
        Family::V6 => at::<16>(ip, quoted.to)?.into(),
    };
    let about = ip.get(quoted.len..)?;
    if about.first() != Some(&request) {
        return None;
    }
    Some((echo(to, about, secret)?, IcmpMessage::TooBig(most)))
}

/// The echo to an address in an ICMP message, or `None` if it has another secret.
fn echo(to: IpAddr, icmp: &[u8], secret: u64) -> Option<Echo> {
    let numbers = icmp.get(ICMP_HEADER..)?;
    if u64::from_be_bytes(at(numbers, 0)?) != secret {
        return None;
    }
    let sequence = u16::from_be_bytes(at(icmp, 6)?);
    let token = u64::from_be_bytes(at(numbers, NUMBER)?);
    Some(Echo { to, sequence, token })
}

/// The bytes at an offset, or `None` if the data are shorter.
fn at<const N: usize>(data: &[u8], offset: usize) -> Option<[u8; N]> {
    data.get(offset..)?.first_chunk().copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksums_match_rfc_1071() {
        assert_eq!(checksum(&[0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7]), !0xddf2);
        assert_eq!(checksum(&[0xff]), !0xff00);
    }

    #[test]
    fn answers_to_other_programs_are_ignored() {
        for family in Family::BOTH {
            for data in [&[][..], &[0x45], &[0; 28], &[129, 0, 0, 0, 0, 7, 0, 0], &[0xff; 60]] {
                assert_eq!(parse(family, family.unspecified(), data, 7), None, "{data:?}");
            }
        }
    }

    const SECRET: u64 = 0x0123_4567_89ab_cdef;

    fn a_host(family: Family, n: u8) -> IpAddr {
        match family {
            Family::V4 => [192, 0, 2, n].into(),
            Family::V6 => [0x2001, 0xdb8, 0, 0, 0, 0, 0, n.into()].into(),
        }
    }

    /// The messages about an echo, as a raw socket gets them: the reply to it, and a router's
    /// report that quotes `quote` bytes of it.
    fn messages(family: Family, echo: &Echo, quote: usize) -> [Vec<u8>; 2] {
        let sent = packet(a_host(family, 1), echo, 1400, SECRET);
        let header = Quoted::of(family).len;
        let Types { reply, too_big, code, .. } = types(family);
        let received = match family {
            Family::V4 => sent[..header].to_vec(),
            Family::V6 => Vec::new(),
        };
        let answer = [&received[..], &[reply], &sent[header + 1..]].concat();
        let mut report = [&received[..], &[too_big, code.unwrap_or(0), 0, 0]].concat();
        report.extend(1350_u32.to_be_bytes());
        report.extend(&sent[..quote.min(sent.len())]);
        [answer, report]
    }

    #[test]
    fn a_message_names_the_echo_that_it_is_about() {
        for family in Family::BOTH {
            let echo = Echo { to: a_host(family, 9), sequence: 7, token: u64::MAX - 9 };
            let router = a_host(family, 3);
            let header = Quoted::of(family).len;
            let enough = header + ICMP_HEADER + 2 * NUMBER;
            let [reply, report] = messages(family, &echo, enough);
            assert_eq!(parse(family, echo.to, &reply, SECRET), Some((echo, IcmpMessage::Reply)));
            let other = Echo { to: router, ..echo };
            assert_eq!(parse(family, router, &reply, SECRET), Some((other, IcmpMessage::Reply)));
            let too_big = IcmpMessage::TooBig(1350);
            assert_eq!(parse(family, router, &report, SECRET), Some((echo, too_big)));
            for message in [&reply, &report] {
                assert_eq!(parse(family, echo.to, message, SECRET ^ 1), None);
            }
            // RFC 792 demands eight bytes.
            for quote in [header + ICMP_HEADER, enough - 1] {
                let [_, short] = messages(family, &echo, quote);
                assert_eq!(parse(family, router, &short, SECRET), None, "{family} {quote}");
            }
        }
    }
}
