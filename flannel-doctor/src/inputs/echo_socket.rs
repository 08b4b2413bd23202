//! The sockets for ICMP echoes of one family, and the bytes on them.
//!
//! The sender writes the IP header itself, because the kernel offers an exact size and "don't
//! fragment" for both families only this way. It needs `CAP_NET_RAW`.
//!
//! **Source**: RFC 792, 1191, 4443, 8201; linux `net/ipv4/raw.c: raw_send_hdrinc`,
//! `net/ipv6/raw.c`, `ip_skb_dst_mtu`, `ip6_skb_dst_mtu`.

use std::io::{self, ErrorKind, Read};
use std::net::{IpAddr, SocketAddr, UdpSocket};

use flannel_core::address::Family;
use rustix::net::sockopt::{
    Ipv4PathMtuDiscovery, Ipv6PathMtuDiscovery, set_ip_mtu_discover, set_ipv6_mtu_discover,
};
use socket2::{Domain, Protocol, SockFilter, Socket, Type};

use super::echo::{Answer, Probe};

const EMSGSIZE: i32 = 90;
/// `IPPROTO_RAW`: the sender writes the IP header.
const RAW: i32 = 255;
const ICMP: u8 = 1;
const ICMPV6: u8 = 58;
const HOP_LIMIT: u8 = 64;
/// The first bytes of the payload, which identify echoes of flannel.
const MAGIC: &[u8; 8] = b"flannel?";

/// The sockets of a family.
#[derive(Debug)]
pub struct EchoSocket {
    family: Family,
    out: Socket,
    inbox: Socket,
    id: u16,
}

impl EchoSocket {
    /// Sockets for echoes with this identifier.
    ///
    /// # Errors
    /// The sockets cannot be opened, usually because `CAP_NET_RAW` is missing.
    pub fn open(family: Family, id: u16) -> io::Result<Self> {
        let (domain, icmp) = match family {
            Family::V4 => (Domain::IPV4, Protocol::ICMPV4),
            Family::V6 => (Domain::IPV6, Protocol::ICMPV6),
        };
        let out = Socket::new(domain, Type::RAW, Some(Protocol::from(RAW)))?;
        // A full send buffer must not stop the sender.
        out.set_nonblocking(true)?;
        // The MTU of the device counts, not that of the route, nor one that a router reported once.
        match family {
            Family::V4 => set_ip_mtu_discover(&out, Ipv4PathMtuDiscovery::PROBE)?,
            Family::V6 => set_ipv6_mtu_discover(&out, Ipv6PathMtuDiscovery::PROBE)?,
        }
        let inbox = Socket::new(domain, Type::RAW, Some(icmp))?;
        inbox.attach_filter(&filter(family, id))?;
        Ok(Self { family, out, inbox, id })
    }

    /// The socket that answers arrive at.
    pub fn inbox(&self) -> &Socket {
        &self.inbox
    }

    /// Sends an echo of the socket's family.
    ///
    /// # Errors
    /// The answer, if this host does not send it: [`Answer::TooBig`] or [`Answer::NotSent`].
    pub fn send(&self, probe: &Probe, sequence: u16) -> Result<(), Answer> {
        let sent = source(probe.to).and_then(|from| {
            let packet = packet(from, probe.to, probe.size, self.id, sequence);
            self.out.send_to(&packet, &SocketAddr::new(probe.to, 0).into())
        });
        match sent {
            Ok(_) => Ok(()),
            // As in a full queue of a device, the packet is lost.
            Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(()),
            Err(error) if error.raw_os_error() == Some(EMSGSIZE) => Err(Answer::TooBig(None)),
            Err(error) => Err(Answer::NotSent(error.to_string())),
        }
    }

    /// Reads one message: the sequence number of the echo that it is about, and its content.
    /// `None`: it is not about an echo of this socket.
    ///
    /// # Errors
    /// As `recv`: with a timeout or without blocking, there may be no message.
    pub fn receive(&self) -> io::Result<Option<(u16, IcmpMessage)>> {
        let mut buffer = [0; 2048];
        match (&self.inbox).read(&mut buffer) {
            Ok(len) => Ok(self.parse(&buffer[..len])),
            Err(error) if error.kind() == ErrorKind::Interrupted => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The content of a message from the inbox, as [`EchoSocket::receive`] returns it.
    pub fn parse(&self, message: &[u8]) -> Option<(u16, IcmpMessage)> {
        parse(self.family, message, self.id)
    }
}

/// Lets through replies with this identifier, and reports about the size of packets. A raw socket
/// gets all ICMP packets of the host otherwise.
fn filter(family: Family, id: u16) -> Vec<SockFilter> {
    // BPF instructions; linux/filter.h. X is the length of the IPv4 header.
    const LDX_MSH: u16 = 0xb1;
    const LDB_ABS: u16 = 0x30;
    const LDH_ABS: u16 = 0x28;
    const LDB_IND: u16 = 0x50;
    const LDH_IND: u16 = 0x48;
    const JEQ: u16 = 0x15;
    const RET: u16 = 0x06;
    // A raw socket of Linux passes the IP header with IPv4 only.
    let (head, ldb, ldh, too_big, reply) = match family {
        Family::V4 => (Some(SockFilter::new(LDX_MSH, 0, 0, 0)), LDB_IND, LDH_IND, 3, 0),
        Family::V6 => (None, LDB_ABS, LDH_ABS, 2, 129),
    };
    let rest = [
        SockFilter::new(ldb, 0, 0, 0),
        SockFilter::new(JEQ, 3, 0, too_big),
        SockFilter::new(JEQ, 0, 3, reply),
        SockFilter::new(ldh, 0, 0, 4),
        SockFilter::new(JEQ, 0, 1, id.into()),
        SockFilter::new(RET, 0, 0, u32::MAX),
        SockFilter::new(RET, 0, 0, 0),
    ];
    head.into_iter().chain(rest).collect()
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

/// A message about an echo.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IcmpMessage {
    /// The reply.
    Reply,
    /// A router takes only packets of at most this many bytes.
    TooBig(u32),
}

/// The message in a received packet, and the sequence number of our echo that it is about.
fn parse(family: Family, data: &[u8], id: u16) -> Option<(u16, IcmpMessage)> {
    let number =
        |data: &[u8], at: usize| Some(u16::from_be_bytes(data.get(at..at + 2)?.try_into().ok()?));
    // A raw socket of Linux passes the IP header with IPv4 only.
    let skip = |data: &[u8]| Some(usize::from(data.first()? & 0x0f) * 4);
    let icmp = data.get(if family == Family::V4 { skip(data)? } else { 0 }..)?;
    let ours = |echo: &[u8]| (number(echo, 4)? == id).then(|| number(echo, 6))?;
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
                assert_eq!(parse(family, data, 7), None, "{data:?}");
            }
        }
    }
}
