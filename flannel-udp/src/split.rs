//! Splits a packet that the kernel left to be segmented, as its hardware would.
//!
//! **Source**: linux `net/ipv4/tcp_offload.c: tcp_gso_segment`, `net/ipv4/udp_offload.c:
//! __udp_gso_segment`.

use std::ops::Range;

use crate::checksum;
use crate::packet::long;
use crate::packet::{Header, TCP, UDP, pseudo_sum, set_total, set_word, word};
use crate::vnet::{GSO_ECN, GSO_NONE, GSO_TCPV4, GSO_TCPV6, GSO_UDP_L4, NEEDS_CSUM, Vnet};

/// The most bytes of headers of a packet that is split: IPv4 or IPv6 with options, and TCP.
const MOST_HEADERS: usize = 256;
const FIN: u8 = 1;
const PSH: u8 = 8;
const CWR: u8 = 0x80;

/// The most segments of a packet whose size does not matter (linux `UDP_MAX_SEGMENTS`). The kernel
/// sends no more datagrams at once, and joins no more of them when it receives.
const FEW: usize = 128;
/// The smallest segment of TCP that the kernel makes by itself: options and payload, in bytes
/// (linux `TCP_MIN_SND_MSS`).
const LEAST_MSS: usize = 48;

/// Why a packet is not split.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Refused {
    /// It is not as its vnet header says.
    Malformed,
    /// No kernel makes so many segments of a packet: a pod has written the vnet header.
    TooMany,
}

/// The segments of a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Segments {
    /// The length of the headers of each segment, in bytes. 0 if the packet is the only segment,
    /// with its headers.
    pub(crate) headers: usize,
    /// The payload of each segment but the last, in bytes.
    pub(crate) payload: usize,
    pub(crate) count: usize,
    /// The offset of the transport header.
    start: usize,
    /// The protocol of that header.
    protocol: u8,
}

/// Completes a packet that is one segment, or tells how to split it.
pub(crate) fn split(packet: &mut [u8], ip: &Header, vnet: &Vnet) -> Result<Segments, Refused> {
    let start = usize::from(vnet.csum_start);
    if vnet.gso_type == GSO_NONE {
        if vnet.flags & NEEDS_CSUM != 0 {
            complete_checksum(packet, ip, vnet)?;
        }
        return Ok(Segments {
            headers: 0,
            payload: packet.len(),
            count: 1,
            start,
            protocol: ip.protocol,
        });
    }
    // The protocol, and the least length of its header.
    let (protocol, least) = match vnet.gso_type & !GSO_ECN {
        GSO_TCPV4 if !ip.is_v6 => (TCP, 20),
        GSO_TCPV6 if ip.is_v6 => (TCP, 20),
        GSO_UDP_L4 => (UDP, 8),
        _ => return Err(Refused::Malformed),
    };
    if start < ip.len || start + least > packet.len() || vnet.gso_size == 0 {
        return Err(Refused::Malformed);
    }
    let transport = if protocol == TCP { usize::from(packet[start + 12] >> 4) * 4 } else { least };
    let headers = start + transport;
    if transport < least || headers >= packet.len() || headers > MOST_HEADERS {
        return Err(Refused::Malformed);
    }
    let payload = usize::from(vnet.gso_size);
    let count = (packet.len() - headers).div_ceil(payload);
    let is_small = protocol == UDP || transport - least + payload < LEAST_MSS;
    if count > FEW && is_small {
        return Err(Refused::TooMany);
    }
    Ok(Segments { headers, payload, count, start, protocol })
}

/// Completes the checksum of a transport header that has only the sum of the pseudo-header.
fn complete_checksum(packet: &mut [u8], ip: &Header, vnet: &Vnet) -> Result<(), Refused> {
    let start = usize::from(vnet.csum_start);
    let place = start + usize::from(vnet.csum_offset);
    if start < ip.len || place + 2 > packet.len() {
        return Err(Refused::Malformed);
    }
    let sum = !checksum::sum(&packet[start..]);
    set_word(packet, place, if sum == 0 { 0xffff } else { sum });
    Ok(())
}

impl Segments {
    /// The payload of a segment, in the packet.
    pub(crate) fn payload_of(&self, n: usize, packet: &[u8]) -> Range<usize> {
        let begin = self.headers + n * self.payload;
        begin..packet.len().min(begin + self.payload)
    }

    /// Writes the headers of a segment behind `headers`.
    pub(crate) fn write_headers(
        &self,
        n: usize,
        packet: &[u8],
        ip: &Header,
        headers: &mut Vec<u8>,
    ) {
        if self.headers == 0 {
            return;
        }
        let part = &packet[self.payload_of(n, packet)];
        let at = headers.len();
        headers.extend_from_slice(&packet[..self.headers]);
        let header = &mut headers[at..];
        let start = self.start;
        let transport = self.headers - start;
        if !ip.is_v6 {
            // At most 65,535 segments.
            set_word(header, 4, word(packet, 4).wrapping_add(n as u16));
        }
        set_total(header, ip.len, ip.is_v6, self.headers + part.len());
        let place = if self.protocol == TCP {
            let seq = long(packet, start + 4).wrapping_add(n as u32 * self.payload as u32);
            header[start + 4..start + 8].copy_from_slice(&seq.to_be_bytes());
            if n + 1 < self.count {
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
        let pseudo = pseudo_sum(header, ip.is_v6, self.protocol, transport + part.len());
        let sum = checksum::add(checksum::sum(&header[start..]), checksum::sum(part));
        let sum = !checksum::add(sum, pseudo);
        set_word(header, place, if sum == 0 && self.protocol == UDP { 0xffff } else { sum });
    }
}
