//! The floor: the same objects, encoded beforehand by hand, sent in batches with only the last one acknowledged.
//!
//! Nothing here is shared with the code that is measured but the socket type: no names are resolved, nothing is
//! compared, nothing is kept.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use anyhow::ensure;
use flannel_core::{Family, MacAddr};
use neli::consts::socket::{Msg, NlFamily};
use neli::socket::NlSocket;
use neli::utils::Groups;

use crate::cluster::{Families, Peer, peers};

const NEWROUTE: u16 = 24;
const NEWNEIGH: u16 = 28;
/// REQUEST | CREATE | REPLACE.
const PUT: u16 = 0x1 | 0x400 | 0x100;
const ACK: u16 = 0x4;
const PERMANENT: u16 = 0x80;
const SELF: u8 = 0x02;
const AF_BRIDGE: u8 = 7;
const ONLINK: u8 = 4;

/// Batch sizes that are tried; the best one is the floor.
pub(crate) const BATCHES: [usize; 4] = [16, 64, 128, 256];

/// All messages for these peers, in the order in which the engine puts them.
pub(crate) fn encode(count: u32, families: Families, index: impl Fn(Family) -> u32) -> Vec<Vec<u8>> {
    let each = |message: fn(Peer, Family, u32) -> Vec<u8>| {
        let index = &index;
        families.iter().flat_map(move |family| peers(count).map(move |p| message(p, family, index(family))))
    };
    each(neigh).chain(each(fdb)).chain(each(route)).collect()
}

/// Sends them, and returns how long it took from the first byte to the last acknowledgement.
pub(crate) fn send(messages: &[Vec<u8>], batch: usize) -> anyhow::Result<Duration> {
    let socket = NlSocket::connect(NlFamily::Route, None, Groups::empty())?;
    let batches: Vec<Vec<u8>> = messages
        .chunks(batch)
        .map(|chunk| {
            let mut bytes = chunk.concat();
            let last = bytes.len() - chunk.last().map_or(0, Vec::len);
            let flags = u16::from_ne_bytes([bytes[last + 6], bytes[last + 7]]) | ACK;
            bytes[last + 6..last + 8].copy_from_slice(&flags.to_ne_bytes());
            bytes
        })
        .collect();
    let mut answer = vec![0; 1 << 16];
    let start = Instant::now();
    for bytes in &batches {
        socket.send(bytes, Msg::empty())?;
        let (len, _) = socket.recv(&mut answer, Msg::empty())?;
        let errno = i32::from_ne_bytes([answer[16], answer[17], answer[18], answer[19]]);
        ensure!(len >= 20 && errno == 0, "the kernel refused a message of the floor: errno {}", -errno);
    }
    Ok(start.elapsed())
}

/// A message: its kind, its header and its attributes.
fn message(kind: u16, header: &[u8], attributes: &[(u16, &[u8])]) -> Vec<u8> {
    let mut bytes = vec![0; 16];
    bytes.extend_from_slice(header);
    for (kind, value) in attributes {
        let len = 4 + value.len() as u16;
        bytes.extend_from_slice(&len.to_ne_bytes());
        bytes.extend_from_slice(&kind.to_ne_bytes());
        bytes.extend_from_slice(value);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
    }
    let len = bytes.len() as u32;
    bytes[..4].copy_from_slice(&len.to_ne_bytes());
    bytes[4..6].copy_from_slice(&kind.to_ne_bytes());
    bytes[6..8].copy_from_slice(&PUT.to_ne_bytes());
    bytes
}

fn octets(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(a) => a.octets().to_vec(),
        IpAddr::V6(a) => a.octets().to_vec(),
    }
}

fn af(family: Family) -> u8 {
    match family {
        Family::V4 => 2,
        Family::V6 => 10,
    }
}

/// `struct ndmsg` and NDA_DST, NDA_LLADDR.
fn neighbour(family: u8, index: u32, flags: u8, dst: IpAddr, mac: MacAddr) -> Vec<u8> {
    let mut header = vec![family, 0, 0, 0];
    header.extend_from_slice(&index.to_ne_bytes());
    header.extend_from_slice(&PERMANENT.to_ne_bytes());
    header.extend_from_slice(&[flags, 0]);
    message(NEWNEIGH, &header, &[(1, &octets(dst)), (2, &mac.0)])
}

fn neigh(peer: Peer, family: Family, index: u32) -> Vec<u8> {
    neighbour(af(family), index, 0, peer.subnet(family).base(), peer.mac(family))
}

fn fdb(peer: Peer, family: Family, index: u32) -> Vec<u8> {
    neighbour(AF_BRIDGE, index, SELF, peer.public(family), peer.mac(family))
}

/// `struct rtmsg` (main table, protocol 241, unicast) and RTA_DST, RTA_OIF, RTA_GATEWAY.
fn route(peer: Peer, family: Family, index: u32) -> Vec<u8> {
    let subnet = peer.subnet(family);
    let header = [af(family), subnet.len(), 0, 0, 254, 241, 0, 1, ONLINK, 0, 0, 0];
    let base = octets(subnet.base());
    message(NEWROUTE, &header, &[(1, &base), (4, &index.to_ne_bytes()), (5, &base)])
}
