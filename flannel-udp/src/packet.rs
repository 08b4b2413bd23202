//! IP packets: the fields that a tunnel reads, and the lifetime of packets.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::checksum;

pub(crate) const TCP: u8 = 6;
pub(crate) const UDP: u8 = 17;
pub(crate) const ICMP: u8 = 1;
pub(crate) const ICMP_V6: u8 = 58;

/// The header of an IP packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) is_v6: bool,
    /// The length of the header, in bytes. Extension headers of IPv6 do not count.
    pub(crate) len: usize,
    /// The length of the packet that the header states, in bytes.
    pub(crate) total: usize,
    /// The protocol of the payload.
    pub(crate) protocol: u8,
    /// Whether it is a fragment, the first or another.
    pub(crate) is_fragment: bool,
    pub(crate) src: IpAddr,
    pub(crate) dst: IpAddr,
    /// The TTL or hop limit.
    pub(crate) ttl: u8,
}

impl Header {
    /// Reads the header of a packet. Returns `None` if the packet is malformed.
    pub(crate) fn parse(packet: &[u8]) -> Option<Self> {
        match packet.first()? >> 4 {
            4 => {
                let header = packet.first_chunk::<20>()?;
                let len = usize::from(header[0] & 15) * 4;
                let total = usize::from(word(header, 2));
                (len >= 20 && total >= len && total <= packet.len()).then(|| Self {
                    is_v6: false,
                    len,
                    total,
                    protocol: header[9],
                    is_fragment: word(header, 6) & 0x3fff != 0,
                    src: Ipv4Addr::from_bits(long(header, 12)).into(),
                    dst: Ipv4Addr::from_bits(long(header, 16)).into(),
                    ttl: header[8],
                })
            }
            6 => {
                let header = packet.first_chunk::<40>()?;
                let total = 40 + usize::from(word(header, 4));
                let address = |at: usize| -> Option<IpAddr> {
                    let bytes = header.get(at..)?.first_chunk::<16>()?;
                    Some(Ipv6Addr::from(*bytes).into())
                };
                let src = address(8)?;
                let dst = address(24)?;
                (total <= packet.len()).then_some(Self {
                    is_v6: true,
                    len: 40,
                    total,
                    protocol: header[6],
                    is_fragment: header[6] == 44,
                    src,
                    dst,
                    ttl: header[7],
                })
            }
            _ => None,
        }
    }
}

/// Takes one hop from the lifetime of a packet with this header. Its lifetime must not be 0.
pub(crate) fn decrement_ttl(packet: &mut [u8], header: &Header) {
    if header.is_v6 {
        packet[7] -= 1;
        return;
    }
    let old = word(packet, 8);
    packet[8] -= 1;
    let checksum = checksum::updated(word(packet, 10), old, word(packet, 8));
    set_word(packet, 10, checksum);
}

/// The sum of the pseudo-header of TCP or UDP. `len` is the length of the transport header and the
/// payload, in bytes.
pub(crate) fn pseudo_sum(packet: &[u8], is_v6: bool, protocol: u8, len: usize) -> u16 {
    let addresses = if is_v6 { &packet[8..40] } else { &packet[12..20] };
    // At most 65,535 bytes.
    let rest = checksum::add(u16::from(protocol), len as u16);
    checksum::add(checksum::sum(addresses), rest)
}

/// The place of the checksum of TCP or UDP, if the field has only the sum of the pseudo-header. The
/// kernel of the sender has left the rest to its network card. Such packets arrive over links
/// without a card, such as links between containers or virtual machines of one host.
pub(crate) fn partial_checksum(packet: &[u8], ip: &Header) -> Option<usize> {
    let place = ip.len
        + match ip.protocol {
            TCP if ip.total >= ip.len + 20 => 16,
            UDP if ip.total >= ip.len + 8 => 6,
            _ => return None,
        };
    if ip.is_fragment {
        return None;
    }
    let sum = pseudo_sum(packet, ip.is_v6, ip.protocol, ip.total - ip.len);
    // A datagram with 0 has no checksum.
    (sum != 0 && word(packet, place) == sum).then_some(place)
}

/// Sets the length that the IP header states, and the checksum of IPv4.
pub(crate) fn set_total(packet: &mut [u8], header_len: usize, is_v6: bool, total: usize) {
    // A packet has at most 65,535 bytes.
    if is_v6 {
        set_word(packet, 4, (total - 40) as u16);
        return;
    }
    set_word(packet, 2, total as u16);
    set_word(packet, 10, 0);
    let checksum = !checksum::sum(&packet[..header_len]);
    set_word(packet, 10, checksum);
}

/// The 16-bit word at an offset.
pub(crate) fn word(packet: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([packet[at], packet[at + 1]])
}

/// The 32-bit word at an offset.
pub(crate) fn long(packet: &[u8], at: usize) -> u32 {
    u32::from_be_bytes([packet[at], packet[at + 1], packet[at + 2], packet[at + 3]])
}

pub(crate) fn set_word(packet: &mut [u8], at: usize, word: u16) {
    packet[at..at + 2].copy_from_slice(&word.to_be_bytes());
}
