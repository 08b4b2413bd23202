//! The errors that a router sends to the source of a packet.
//!
//! **Source**: the unreachable message of flannel `pkg/backend/udp/proxy_amd64.c:
//! send_net_unreachable`; RFC 792 and RFC 4443 for the others. Different on purpose: to a pod of
//! this node, the source is the address that it wanted to reach. Go flannel uses the address of
//! the device, and Linux drops a packet that arrives with an address of the host
//! (`__fib_validate_source`).

use std::net::IpAddr;

use crate::checksum;
use crate::packet::{Header, ICMP, ICMP_V6, long, pseudo_sum, set_total, set_word, word};

/// The TTL of the messages, as in Go flannel.
const TTL: u8 = 8;
/// The most bytes of the packet in a message, so that it fits into every path.
const MOST_V4: usize = 576 - 28;
const MOST_V6: usize = 1280 - 48;

/// Why a packet is not forwarded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Cause {
    /// No node has the destination.
    Unreachable,
    /// Its lifetime has ended.
    Expired,
    /// It may not be fragmented, and is larger than this number of bytes.
    TooBig(u16),
}

/// The identifier of echoes by which nodes prove addresses: "fl".
const ECHO_ID: u16 = 0x666c;

/// An echo request with a number, between addresses of one family.
pub(crate) fn echo_request(from: IpAddr, to: IpAddr, number: u64) -> Option<Vec<u8>> {
    let kind = if from.is_ipv6() { 128 } else { 8 };
    let message = Message { kind, code: 0, words: [ECHO_ID, 0], body: &number.to_be_bytes() };
    message.packet(from, to, 64)
}

/// The number in an answer to such a request from `own`.
pub(crate) fn echo_number(packet: &[u8], ip: &Header, own: IpAddr) -> Option<u64> {
    let protocol = if ip.is_v6 { ICMP_V6 } else { ICMP };
    let kind = if ip.is_v6 { 129 } else { 0 };
    let message = packet.get(ip.len..ip.total)?.first_chunk::<16>()?;
    let is_whole = !ip.is_fragment && ip.total - ip.len == 16;
    let is_answer = ip.protocol == protocol && message[0] == kind && word(message, 4) == ECHO_ID;
    (is_whole && is_answer && ip.dst == own)
        .then(|| u64::from(long(message, 8)) << 32 | u64::from(long(message, 12)))
}

/// The message to the source of `packet`, or `None` if there must not be one. `from` is the source
/// address of the message.
pub(crate) fn message(error: Cause, packet: &[u8], ip: &Header, from: IpAddr) -> Option<Vec<u8>> {
    let is_unicast = [ip.src, ip.dst].iter().all(|address| match address {
        IpAddr::V4(it) => !(it.is_unspecified() || it.is_multicast() || it.is_broadcast()),
        IpAddr::V6(it) => !(it.is_unspecified() || it.is_multicast()),
    });
    // No error about an error, and none about a fragment that is not the first.
    let is_error = match ip.protocol {
        ICMP => !matches!(packet.get(ip.len), Some(0 | 8)),
        ICMP_V6 => packet.get(ip.len).is_none_or(|kind| kind & 0x80 == 0),
        _ => false,
    };
    let is_later_fragment = !ip.is_v6 && ip.is_fragment && word(packet, 6) & 0x1fff != 0;
    if !is_unicast || is_error || is_later_fragment || from.is_ipv6() != ip.is_v6 {
        return None;
    }
    let (kind, code, mtu) = match (error, ip.is_v6) {
        (Cause::Unreachable, false) => (3, 0, 0),
        (Cause::Expired, false) => (11, 0, 0),
        (Cause::TooBig(mtu), false) => (3, 4, mtu),
        (Cause::Unreachable, true) => (1, 0, 0),
        (Cause::Expired, true) => (3, 0, 0),
        (Cause::TooBig(mtu), true) => (2, 0, mtu),
    };
    let most = if ip.is_v6 { MOST_V6 } else { MOST_V4 };
    let body = &packet[..ip.total.min(most)];
    // IPv4 has 16 bits for the MTU, at the place of the lower half of the 32 bits of IPv6.
    Message { kind, code, words: [0, mtu], body }.packet(from, ip.src, TTL)
}

/// A message of ICMP or ICMPv6.
struct Message<'a> {
    kind: u8,
    code: u8,
    /// The words behind the checksum.
    words: [u16; 2],
    body: &'a [u8],
}

impl Message<'_> {
    /// The packet with this message, or `None` if the addresses are of different families.
    fn packet(&self, from: IpAddr, to: IpAddr, ttl: u8) -> Option<Vec<u8>> {
        let is_v6 = from.is_ipv6();
        let header_len = if is_v6 { 40 } else { 20 };
        let mut packet = vec![0; header_len + 8];
        packet.extend_from_slice(self.body);
        let total = packet.len();
        match (from, to) {
            (IpAddr::V4(from), IpAddr::V4(to)) => {
                packet[0] = 0x45;
                packet[8] = ttl;
                packet[9] = ICMP;
                packet[12..16].copy_from_slice(&from.octets());
                packet[16..20].copy_from_slice(&to.octets());
            }
            (IpAddr::V6(from), IpAddr::V6(to)) => {
                packet[0] = 0x60;
                packet[6] = ICMP_V6;
                packet[7] = ttl;
                packet[8..24].copy_from_slice(&from.octets());
                packet[24..40].copy_from_slice(&to.octets());
            }
            _ => return None,
        }
        set_total(&mut packet, header_len, is_v6, total);
        packet[header_len] = self.kind;
        packet[header_len + 1] = self.code;
        set_word(&mut packet, header_len + 4, self.words[0]);
        set_word(&mut packet, header_len + 6, self.words[1]);
        let pseudo = if is_v6 { pseudo_sum(&packet, true, ICMP_V6, total - header_len) } else { 0 };
        let sum = checksum::add(checksum::sum(&packet[header_len..]), pseudo);
        set_word(&mut packet, header_len + 2, !sum);
        Some(packet)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_an_answer_to_a_request_has_its_number() {
        let pairs: [[IpAddr; 2]; 2] = [
            [[10, 1, 7, 0].into(), [10, 1, 8, 0].into()],
            ["fd00:1:0:7::".parse().unwrap(), "fd00:1:0:8::".parse().unwrap()],
        ];
        for [own, peer] in pairs {
            let number = 0x0123_4567_89ab_cdef;
            let kind = if own.is_ipv6() { 129 } else { 0 };
            let request = echo_request(own, peer, number).unwrap();
            let ip = Header::parse(&request).unwrap();
            assert_eq!((ip.src, ip.dst, ip.total), (own, peer, request.len()));
            let pseudo = if ip.is_v6 { pseudo_sum(&request, true, ICMP_V6, 16) } else { 0 };
            assert_eq!(checksum::add(checksum::sum(&request[ip.len..]), pseudo), 0xffff);
            assert_eq!(echo_number(&request, &ip, peer), None, "a request is not an answer");
            // As the kernel of a peer answers.
            let mut answer = echo_request(peer, own, number).unwrap();
            answer[ip.len] = kind;
            let ip = Header::parse(&answer).unwrap();
            assert_eq!(echo_number(&answer, &ip, own), Some(number));
            assert_eq!(echo_number(&answer, &ip, peer), None);
            answer[ip.len + 4] ^= 1;
            assert_eq!(echo_number(&answer, &ip, own), None, "of another program");
            let cut = Header { total: ip.total - 1, ..ip };
            answer[ip.len + 4] ^= 1;
            assert_eq!(echo_number(&answer, &cut, own), None);
        }
    }
}
