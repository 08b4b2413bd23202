//! Splits a packet that the kernel left to be segmented, as its hardware would.
//!
//! **Source**: linux `net/ipv4/tcp_offload.c: tcp_gso_segment`, `net/ipv4/udp_offload.c:
//! __udp_gso_segment`.

use crate::checksum;
use crate::packet::long;
use crate::packet::{Header, TCP, UDP, pseudo_sum, set_total, set_word, word};
use crate::vnet::{GSO_ECN, GSO_NONE, GSO_TCPV4, GSO_TCPV6, GSO_UDP_L4, NEEDS_CSUM, Vnet};

/// The most bytes of headers of a packet that is split: IPv4 or IPv6 with options, and TCP.
const MOST_HEADERS: usize = 256;
const FIN: u8 = 1;
const PSH: u8 = 8;
const CWR: u8 = 0x80;

/// A packet is not as its vnet header says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Malformed;

/// The segments of a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Segments {
    /// The length of the headers of each segment, in bytes; 0: the packet is the only segment, with
    /// its headers.
    pub(crate) headers: usize,
    /// The payload of each segment but the last, in bytes.
    pub(crate) payload: usize,
    pub(crate) count: usize,
}

/// Completes a packet, or splits it: writes the headers of all segments to the end of `headers`.
/// The payload of segment `i` is `packet[segments.headers + i * segments.payload..]`.
pub(crate) fn split(
    packet: &mut [u8],
    ip: &Header,
    vnet: &Vnet,
    headers: &mut Vec<u8>,
) -> Result<Segments, Malformed> {
    let start = usize::from(vnet.csum_start);
    if vnet.gso_type == GSO_NONE {
        if vnet.flags & NEEDS_CSUM != 0 {
            let place = start + usize::from(vnet.csum_offset);
            if start < ip.len || place + 2 > packet.len() {
                return Err(Malformed);
            }
            // The field has the sum of the pseudo-header.
            let sum = !checksum::sum(&packet[start..]);
            set_word(packet, place, if sum == 0 { 0xffff } else { sum });
        }
        return Ok(Segments { headers: 0, payload: packet.len(), count: 1 });
    }
    let (protocol, least) = match vnet.gso_type & !GSO_ECN {
        GSO_TCPV4 if !ip.is_v6 => (TCP, 20),
        GSO_TCPV6 if ip.is_v6 => (TCP, 20),
        GSO_UDP_L4 => (UDP, 8),
        _ => return Err(Malformed),
    };
    if start < ip.len || start + least > packet.len() || vnet.gso_size == 0 {
        return Err(Malformed);
    }
    let transport = if protocol == TCP { usize::from(packet[start + 12] >> 4) * 4 } else { 8 };
    let (len, payload) = (start + transport, usize::from(vnet.gso_size));
    if transport < least || len >= packet.len() || len > MOST_HEADERS {
        return Err(Malformed);
    }
    let count = (packet.len() - len).div_ceil(payload);
    let (id, seq) = (word(packet, 4), if protocol == TCP { long(packet, start + 4) } else { 0 });
    for (n, part) in packet[len..].chunks(payload).enumerate() {
        let at = headers.len();
        headers.extend_from_slice(&packet[..len]);
        let header = &mut headers[at..];
        // At most 65,535 segments.
        let n16 = n as u16;
        if !ip.is_v6 {
            set_word(header, 4, id.wrapping_add(n16));
        }
        set_total(header, ip.len, ip.is_v6, len + part.len());
        let place = if protocol == TCP {
            let seq = seq.wrapping_add(n as u32 * payload as u32);
            header[start + 4..start + 8].copy_from_slice(&seq.to_be_bytes());
            if n + 1 < count {
                header[start + 13] &= !(FIN | PSH);
            }
            if n > 0 {
                header[start + 13] &= !CWR;
            }
            start + 16
        } else {
            set_word(header, start + 4, (8 + part.len()) as u16);
            start + 6
        };
        set_word(header, place, 0);
        let pseudo = pseudo_sum(header, ip.is_v6, protocol, transport + part.len());
        let sum = checksum::add(checksum::sum(&header[start..]), checksum::sum(part));
        let sum = !checksum::add(sum, pseudo);
        set_word(header, place, if sum == 0 && protocol == UDP { 0xffff } else { sum });
    }
    Ok(Segments { headers: len, payload, count })
}
