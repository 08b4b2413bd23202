//! Joins neighbouring packets of a flow, as the kernel's GRO does, so that the kernel handles them
//! as one.
//!
//! **Source**: linux `net/ipv4/tcp_offload.c: tcp_gro_receive`, `net/ipv4/udp_offload.c:
//! udp_gro_receive`. A packet with a wrong checksum is never joined, because the kernel would
//! compute a right one for it.

use std::ops::Range;

use crate::checksum;
use crate::packet::{Header, TCP, UDP, long, pseudo_sum, set_total, set_word, word};
use crate::vnet::{GSO_TCPV4, GSO_TCPV6, GSO_UDP_L4, NEEDS_CSUM, Vnet};

/// The most packets that are joined, so that a write has few parts.
const MOST: usize = 128;
const ACK: u8 = 0x10;
const PSH: u8 = 8;

/// Packets that are written at once: the headers of the first, and the payloads of all.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Group {
    /// The places of the packets in the list of all packets.
    pub(crate) packets: Range<usize>,
    /// The length of the headers of each packet, in bytes. 0 if it is a single packet of any kind.
    pub(crate) headers: usize,
    flow: Option<Flow>,
    /// No packet can follow.
    is_closed: bool,
    /// The length of all payloads.
    len: usize,
}

/// The fields of a packet of TCP or UDP that can be joined with others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Flow {
    is_v6: bool,
    protocol: u8,
    /// The offset of the transport header.
    start: usize,
    /// The length of all headers.
    headers: usize,
    /// The length of the payload, not 0.
    payload: usize,
    id: u16,
    may_fragment: bool,
    seq: u32,
    flags: u8,
}

impl Flow {
    fn of(packet: &[u8], ip: &Header) -> Option<Self> {
        let is_plain = ip.is_v6 || (ip.len == 20 && checksum::sum(&packet[..20]) == 0xffff);
        if ip.is_fragment || !is_plain {
            return None;
        }
        let start = ip.len;
        let transport = match ip.protocol {
            TCP if ip.total >= start + 20 => usize::from(packet[start + 12] >> 4) * 4,
            UDP if ip.total >= start + 8 => 8,
            _ => return None,
        };
        let headers = start + transport;
        let is_tcp = ip.protocol == TCP;
        if (is_tcp && transport < 20) || headers >= ip.total {
            return None;
        }
        let flags = if is_tcp { packet[start + 13] } else { 0 };
        // Only segments that are plain data are joined, and only datagrams with a checksum.
        let is_plain = if is_tcp {
            flags & !PSH == ACK
        } else {
            word(packet, start + 6) != 0 && usize::from(word(packet, start + 4)) == ip.total - start
        };
        is_plain.then(|| Self {
            is_v6: ip.is_v6,
            protocol: ip.protocol,
            start,
            headers,
            payload: ip.total - headers,
            id: word(packet, 4),
            may_fragment: ip.is_v6 || word(packet, 6) & 0x4000 == 0,
            seq: if is_tcp { long(packet, start + 4) } else { 0 },
            flags,
        })
    }

    /// Whether the checksum of the transport header is right, or is the sum of the pseudo-header
    /// only ([`partial_checksum`](crate::packet::partial_checksum)).
    fn is_intact(&self, packet: &[u8]) -> bool {
        let len = self.headers - self.start + self.payload;
        let pseudo = pseudo_sum(packet, self.is_v6, self.protocol, len);
        let place = self.start + if self.protocol == TCP { 16 } else { 6 };
        let end = self.start + len;
        if pseudo != 0 && word(packet, place) == pseudo {
            return true;
        }
        checksum::add(checksum::sum(&packet[self.start..end]), pseudo) == 0xffff
    }

    /// The ranges of the headers that all packets of a group have in common.
    fn common(&self) -> [Range<usize>; 4] {
        let start = self.start;
        // All fields but the length. The id and the checksum of IPv4 may differ too.
        let before_len = if self.is_v6 { 0..4 } else { 0..2 };
        let after_len = if self.is_v6 { 6..40 } else { 6..10 };
        // The addresses of IPv4 and the ports follow each other.
        let ports = if self.is_v6 { start..start + 4 } else { 12..start + 4 };
        // The number of acknowledged bytes, and the length of the header.
        let acknowledged = if self.protocol == TCP { start + 8..start + 13 } else { 0..0 };
        [before_len, after_len, ports, acknowledged]
    }

    fn has_the_headers_of(&self, packet: &[u8], first: &Self, of_first: &[u8]) -> bool {
        let same = |range: Range<usize>| packet[range.clone()] == of_first[range];
        let is_of_kind = self.is_v6 == first.is_v6
            && self.protocol == first.protocol
            && self.headers == first.headers;
        if !is_of_kind || !self.common().into_iter().all(same) {
            return false;
        }
        let window = self.start + 14..self.start + 16;
        let options = self.start + 18..self.headers;
        self.protocol == UDP || (same(window) && same(options))
    }
}

impl Group {
    fn new(n: usize, packet: &[u8], ip: &Header) -> Self {
        let flow = Flow::of(packet, ip);
        let len = flow.map_or(0, |flow| flow.payload);
        let is_closed = flow.is_none_or(|flow| flow.flags & PSH != 0);
        Self { packets: n..n + 1, headers: 0, flow, is_closed, len }
    }

    /// Adds the next packet if it belongs to the group. `first` is the first packet of the group.
    fn take(&mut self, packet: &[u8], ip: &Header, first: &[u8]) -> bool {
        let Some(head) = self.flow else { return false };
        let Some(next) = Flow::of(packet, ip) else { return false };
        let n = self.packets.len();
        // At most 128.
        let is_next_id = next.id == head.id.wrapping_add(n as u16);
        let fits = !self.is_closed
            && n < MOST
            && next.payload <= head.payload
            && head.headers + self.len + next.payload <= 65_535
            && (head.is_v6 || is_next_id || (!head.may_fragment && next.id == head.id))
            && (head.protocol == UDP || next.seq == head.seq.wrapping_add(self.len as u32))
            && next.has_the_headers_of(packet, &head, first)
            // The first is checked when there is a second one.
            && (n > 1 || head.is_intact(first))
            && next.is_intact(packet);
        if fits {
            self.packets.end += 1;
            self.headers = head.headers;
            self.len += next.payload;
            self.is_closed = next.payload < head.payload || next.flags & PSH != 0;
        }
        fits
    }

    /// Makes the headers of the first packet the headers of the group. `last_flags` are the flags
    /// of TCP of the last packet, for its flag PSH.
    pub(crate) fn finish(&self, first: &mut [u8], last_flags: u8) -> Vnet {
        let Some(flow) = self.flow.filter(|_| self.packets.len() > 1) else {
            return Vnet::default();
        };
        let Flow { is_v6, protocol, start, headers, payload, .. } = flow;
        set_total(first, start, is_v6, headers + self.len);
        let transport = headers - start + self.len;
        let offset = if protocol == TCP {
            first[start + 13] |= last_flags & PSH;
            16
        } else {
            set_word(first, start + 4, transport as u16);
            6
        };
        let pseudo = pseudo_sum(first, is_v6, protocol, transport);
        set_word(first, start + offset, pseudo);
        let gso_type = match (protocol, is_v6) {
            (UDP, _) => GSO_UDP_L4,
            (_, false) => GSO_TCPV4,
            (_, true) => GSO_TCPV6,
        };
        // All are at most 65,535.
        Vnet {
            flags: NEEDS_CSUM,
            gso_type,
            hdr_len: headers as u16,
            gso_size: payload as u16,
            csum_start: start as u16,
            csum_offset: offset as u16,
        }
    }

    /// The offset of the flags of TCP, in a packet of a group that has them.
    pub(crate) fn flags_at(&self) -> Option<usize> {
        self.flow.filter(|flow| flow.protocol == TCP).map(|flow| flow.start + 13)
    }
}

/// Which packets are joined.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Joins {
    pub(crate) tcp: bool,
    pub(crate) udp: bool,
}

/// Divides packets into groups. `packet(n)` is packet `n` with its header.
pub(crate) fn join<'a>(
    count: usize,
    joins: Joins,
    packet: impl Fn(usize) -> (&'a [u8], &'a Header),
    groups: &mut Vec<Group>,
) {
    groups.clear();
    for n in 0..count {
        let (bytes, ip) = packet(n);
        let is_candidate = if ip.protocol == TCP { joins.tcp } else { joins.udp };
        if is_candidate
            && let Some(group) = groups.last_mut()
            && group.take(bytes, ip, packet(group.packets.start).0)
        {
            continue;
        }
        groups.push(Group::new(n, bytes, ip));
    }
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, Ipv6Addr};

    use proptest::prelude::*;
    use proptest::sample::Index;

    use super::*;
    use crate::split::{Refused, split};

    /// A packet of TCP or UDP with right checksums. Only the checksum of the transport header is
    /// the sum of the pseudo-header, as the kernel leaves it to hardware.
    fn partial(is_v6: bool, protocol: u8, flags: u8, options: &[u8], payload: &[u8]) -> Vec<u8> {
        let mut packet = if is_v6 {
            let mut header = vec![0x60, 1, 2, 3, 0, 0, protocol, 60];
            header.extend(Ipv6Addr::new(0xfd00, 1, 0, 7, 0, 0, 0, 2).octets());
            header.extend(Ipv6Addr::new(0xfd00, 1, 0, 8, 0, 0, 0, 2).octets());
            header
        } else {
            let mut header = vec![0x45, 0, 0, 0, 0xff, 0xfe, 0x40, 0, 60, protocol, 0, 0];
            header.extend(Ipv4Addr::new(10, 1, 7, 2).octets());
            header.extend(Ipv4Addr::new(10, 1, 8, 2).octets());
            header
        };
        let start = packet.len();
        packet.extend([0x12, 0x34, 0x14, 0x51]);
        if protocol == TCP {
            packet.extend(0xffff_ff00_u32.to_be_bytes());
            packet.extend([9, 8, 7, 6]);
            packet.extend([(5 + options.len() as u8 / 4) << 4, flags, 1, 2]);
            packet.extend([0, 0, 0, 0]);
            packet.extend(options);
        } else {
            packet.extend([0, 0, 0, 0]);
        }
        packet.extend(payload);
        let transport = packet.len() - start;
        if protocol == UDP {
            set_word(&mut packet, start + 4, transport as u16);
        }
        let total = packet.len();
        set_total(&mut packet, start, is_v6, total);
        let pseudo = pseudo_sum(&packet, is_v6, protocol, transport);
        set_word(&mut packet, start + if protocol == TCP { 16 } else { 6 }, pseudo);
        packet
    }

    fn vnet(packet: &[u8], protocol: u8, size: u16) -> Vnet {
        let ip = Header::parse(packet).unwrap();
        let gso_type = match (protocol, ip.is_v6) {
            (UDP, _) => GSO_UDP_L4,
            (_, false) => GSO_TCPV4,
            (_, true) => GSO_TCPV6,
        };
        Vnet {
            flags: NEEDS_CSUM,
            gso_type,
            // The length of the headers is a hint only.
            hdr_len: 0,
            gso_size: size,
            csum_start: ip.len as u16,
            csum_offset: if protocol == TCP { 16 } else { 6 },
        }
    }

    /// The packets into which a packet is split.
    fn segments(packet: &[u8], vnet: &Vnet) -> Vec<Vec<u8>> {
        let mut packet = packet.to_vec();
        let ip = Header::parse(&packet).unwrap();
        let segments = split(&mut packet, &ip, vnet).unwrap();
        (0..segments.count)
            .map(|n| {
                let mut segment = vec![7; 3];
                segments.write_headers(n, &packet, &ip, &mut segment);
                segment.extend_from_slice(&packet[segments.payload_of(n, &packet)]);
                segment.split_off(3)
            })
            .collect()
    }

    /// The packets of groups, and the vnet header of each.
    fn joined(packets: &[Vec<u8>]) -> Vec<(Vec<u8>, Vnet)> {
        let parsed: Vec<Header> = packets.iter().map(|p| Header::parse(p).unwrap()).collect();
        let mut groups = Vec::new();
        let joins = Joins { tcp: true, udp: true };
        join(packets.len(), joins, |n| (&packets[n], &parsed[n]), &mut groups);
        groups.iter().map(|group| joined_group(group, &packets[group.packets.clone()])).collect()
    }

    /// The packet of a group of packets, and its vnet header.
    fn joined_group(group: &Group, packets: &[Vec<u8>]) -> (Vec<u8>, Vnet) {
        if packets.len() == 1 {
            return (packets[0].clone(), Vnet::default());
        }
        let mut bytes = packets[0][..group.headers].to_vec();
        let last = &packets[packets.len() - 1];
        let last_flags = group.flags_at().map_or(0, |at| last[at]);
        let vnet = group.finish(&mut bytes, last_flags);
        for packet in packets {
            bytes.extend(&packet[group.headers..]);
        }
        (bytes, vnet)
    }

    fn is_intact(packet: &[u8]) -> bool {
        let ip = Header::parse(packet).unwrap();
        let pseudo = pseudo_sum(packet, ip.is_v6, ip.protocol, ip.total - ip.len);
        let header = ip.is_v6 || checksum::sum(&packet[..ip.len]) == 0xffff;
        header
            && ip.total == packet.len()
            && checksum::add(checksum::sum(&packet[ip.len..]), pseudo) == 0xffff
    }

    proptest! {
        #[test]
        fn what_is_split_is_joined_again(
            is_v6: bool, is_tcp: bool, pushes: bool, has_options: bool,
            size in 1_u16..1500, count in 1_usize..60, last in 1_usize..1500, seed: u8,
        ) {
            let protocol = if is_tcp { TCP } else { UDP };
            let size = usize::from(size);
            let len = (size * (count - 1) + last.min(size)).min(60_000);
            let payload: Vec<u8> = (0..len).map(|n| (n * 7) as u8 ^ seed).collect();
            let stamps = [1, 1, 8, 10, 0, 0, 0, 1, 0, 0, 0, 2];
            let options = if has_options { &stamps[..] } else { &[] };
            let flags = if pushes { ACK | PSH } else { ACK };
            let packet = partial(is_v6, protocol, flags, options, &payload);
            let vnet = vnet(&packet, protocol, size as u16);
            let parts = segments(&packet, &vnet);
            prop_assert_eq!(parts.len(), len.div_ceil(size));
            prop_assert!(parts.iter().all(|part| is_intact(part)));
            if parts.len() > 1 && parts.len() <= MOST {
                let joined = joined(&parts);
                prop_assert_eq!(joined.len(), 1);
                prop_assert_eq!(&joined[0].0, &packet);
                let hdr_len = (packet.len() - len) as u16;
                prop_assert_eq!(joined[0].1, Vnet { hdr_len, ..vnet });
            }
        }

        /// Whatever is joined, and split again as its vnet header says, is what arrived. The id of
        /// a packet that must not be fragmented has no meaning (RFC 6864).
        #[test]
        fn what_is_joined_is_split_again(
            parts in proptest::collection::vec((any::<bool>(), 0_usize..4, 0_u8..4), 1..40),
            damage in proptest::option::of((any::<Index>(), any::<Index>())),
        ) {
            let base: Vec<u8> = (0..2000).map(|n| n as u8).collect();
            let mut packets = Vec::new();
            for (is_tcp, kind, more) in parts {
                let protocol = if is_tcp { TCP } else { UDP };
                let flags = [ACK, ACK | PSH, ACK | 1, ACK | 2][kind];
                let len = 500 * usize::from(more + 1) - 3;
                let packet = partial(false, protocol, flags, &[], &base[..len]);
                packets.extend(segments(&packet, &vnet(&packet, protocol, 500)));
            }
            if let Some((packet, byte)) = damage {
                // The first bytes stay, because they say where the packet ends.
                let packet = packet.get_mut(&mut packets);
                let at = 8 + byte.index(packet.len() - 8);
                packet[at] ^= 0x55;
            }
            let again: Vec<Vec<u8>> = joined(&packets)
                .iter()
                .flat_map(|(packet, vnet)| match vnet.gso_type {
                    0 => vec![packet.clone()],
                    _ => segments(packet, vnet),
                })
                .collect();
            let without_id = |packet: &Vec<u8>| {
                let mut packet = packet.clone();
                if word(&packet, 6) & 0x4000 != 0 && checksum::sum(&packet[..20]) == 0xffff {
                    set_word(&mut packet, 4, 0);
                    let total = packet.len();
                    set_total(&mut packet, 20, false, total);
                }
                packet
            };
            let same = again.iter().map(without_id).eq(packets.iter().map(without_id));
            prop_assert!(same, "{} packets", packets.len());
        }
    }

    #[test]
    fn a_packet_that_is_not_as_its_vnet_header_says_is_refused() {
        let packet = partial(false, TCP, ACK, &[], &[1; 100]);
        let ip = Header::parse(&packet).unwrap();
        let good = vnet(&packet, TCP, 50);
        for wrong in [
            Vnet { gso_size: 0, ..good },
            Vnet { csum_start: 130, ..good },
            Vnet { csum_start: 0, ..good },
            Vnet { gso_type: GSO_TCPV6, ..good },
            Vnet { gso_type: 77, ..good },
            Vnet { gso_type: 0, csum_start: 139, ..good },
            Vnet { gso_type: 0, csum_offset: 0xffff, ..good },
        ] {
            let refused = split(&mut packet.clone(), &ip, &wrong);
            assert_eq!(refused, Err(Refused::Malformed), "{wrong:?}");
        }
    }
}
