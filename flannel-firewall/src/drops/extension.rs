//! Matches and targets of iptables in nf_tables: `struct xt_…_info`.
//!
//! **Source**: linux `include/uapi/linux/netfilter/xt_*.h`.

use flannel_netlink::nftables::program::{Extension, Translation};

use super::packet::{Byte, FROM_PORT, Packet, TCP, UDP};
use super::walk::{Match, Way};
use super::{Effect, Queues};

/// `XT_CONNTRACK_STATE`, and `XT_CONNTRACK_STATE_ALIAS`, which the match `state` sets too. The bits
/// of new and untracked connections in the mask.
const STATE: u16 = 1;
const ALIAS: u16 = 1 << 13;
const NEW: u16 = 1 << 3;
const UNTRACKED: u16 = 1 << 7;
/// The bits of kinds of addresses: `1 << RTN_…`.
const UNICAST: u16 = 1 << 1;
const LOCAL: u16 = 1 << 2;
/// `XT_PHYSDEV_OP_BRIDGED`.
const BRIDGED: u8 = 4;

fn short(info: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(info.get(at..at + 2)?.try_into().ok()?))
}

fn word(info: &[u8], at: usize) -> Option<[u8; 4]> {
    info.get(at..at + 4)?.try_into().ok()
}

/// Whether a packet matches.
pub(super) fn matches(it: &Extension, packet: &Packet) -> Match {
    let info = &it.info;
    let known = match (&*it.name, it.revision) {
        ("comment", _) => Some(true),
        ("conntrack", 1..=3) => state(it, packet),
        ("state", _) => word(info, 0).and_then(|mask| {
            let mask = u32::from_ne_bytes(mask) as u16;
            in_state(mask, packet)
        }),
        ("mark", 1) => mark(info, packet),
        ("addrtype", 1) => kinds(info, packet),
        ("tcp", _) if packet.protocol == TCP => tcp(info, packet),
        ("udp", _) if packet.protocol == UDP => {
            let inverted = info.get(8).copied().unwrap_or_default();
            ports(info, packet)
                .map(|[from, to]| from ^ (inverted & 1 != 0) && to ^ (inverted & 2 != 0))
        }
        ("tcp" | "udp" | "icmp" | "icmp6" | "sctp" | "ah" | "esp" | "owner", _) => Some(false),
        ("multiport", 1) => multiport(info, packet),
        // Packets of pods are routed, not bridged.
        ("physdev", _) if info.get(65) == Some(&BRIDGED) => {
            info.get(64).map(|inverted| inverted & BRIDGED != 0)
        }
        _ => None,
    };
    known.into()
}

/// The flags and masks are after eight addresses of 16 bytes, two times, a protocol and four ports.
fn state(it: &Extension, packet: &Packet) -> Option<bool> {
    let info = &it.info;
    if short(info, 146)? & !ALIAS != STATE {
        return None;
    }
    let inverted = short(info, 148)? & STATE != 0;
    let mask = if it.revision == 1 { u16::from(*info.get(150)?) } else { short(info, 150)? };
    Some(in_state(mask, packet)? ^ inverted)
}

fn in_state(mask: u16, packet: &Packet) -> Option<bool> {
    Some(mask & if packet.tracked? { NEW } else { UNTRACKED } != 0)
}

fn mark(info: &[u8], packet: &Packet) -> Option<bool> {
    let mark = word(info, 0)?;
    let mask = word(info, 4)?;
    let inverted = *info.get(8)? != 0;
    Some(masked_mark(packet.mark, mark, mask)? ^ inverted)
}

/// Whether the bits of the mark in `mask` are `mark`. `None` if a bit is not known.
pub(super) fn masked_mark(is: [Byte; 4], mark: [u8; 4], mask: [u8; 4]) -> Option<bool> {
    let mut known = Some(true);
    for ((is, mark), mask) in is.into_iter().zip(mark).zip(mask) {
        match is {
            Some(is) if is & mask != mark => return Some(false),
            None if mask != 0 => known = None,
            _ => {}
        }
    }
    known
}

/// An address of this node at an end of the packet is local. Other addresses are unicast.
fn kinds(info: &[u8], packet: &Packet) -> Option<bool> {
    let source = short(info, 0)?;
    let destination = short(info, 2)?;
    let flags = word(info, 4)?;
    let inverted = u32::from_ne_bytes(flags);
    let has = |mask: u16, kind: u16, inverse: u32| {
        mask == 0 || ((mask & kind != 0) ^ (inverted & inverse != 0))
    };
    let kind = |is_here| if is_here { LOCAL } else { UNICAST };
    let from = kind(packet.flow.is_sent_here());
    let to = kind(packet.flow.ends_here());
    Some(has(source, from, 1) && has(destination, to, 2))
}

/// Whether the ports of the packet are in the ranges of the source and of the destination.
fn ports(info: &[u8], packet: &Packet) -> Option<[bool; 2]> {
    let is_in =
        |port: u16, at: usize| Some((short(info, at)?..=short(info, at + 2)?).contains(&port));
    Some([is_in(FROM_PORT, 0)?, is_in(packet.port, 4)?])
}

/// The only destination port of a match of `tcp` or `udp`.
pub(super) fn only_port(it: &Extension) -> Option<u16> {
    let is_asked = matches!(&*it.name, "tcp" | "udp");
    let low = short(&it.info, 4)?;
    let high = short(&it.info, 6)?;
    (is_asked && low == high).then_some(low)
}

/// Ports, an option, and flags of the packet, of which only SYN is set.
fn tcp(info: &[u8], packet: &Packet) -> Option<bool> {
    let [from, to] = ports(info, packet)?;
    let [option, mask, wanted, inverted] = word(info, 8)?;
    if option != 0 {
        return None;
    }
    let flags = (2 & mask) == wanted;
    Some(from ^ (inverted & 1 != 0) && to ^ (inverted & 2 != 0) && flags ^ (inverted & 4 != 0))
}

/// A side, a number, 15 ports, 15 flags for those that begin a range, and an inversion.
fn multiport(info: &[u8], packet: &Packet) -> Option<bool> {
    let side = *info.first()?;
    let count = usize::from(*info.get(1)?);
    let mut found = false;
    let mut n = 0;
    while n < count.min(15) {
        let low = short(info, 2 + 2 * n)?;
        let is_range = *info.get(32 + n)? != 0;
        let high = if is_range { short(info, 2 + 2 * (n + 1))? } else { low };
        let has = |port: u16| (low..=high).contains(&port);
        found |= match side {
            0 => has(FROM_PORT),
            1 => has(packet.port),
            _ => has(FROM_PORT) || has(packet.port),
        };
        n += if is_range { 2 } else { 1 };
    }
    Some(found ^ (*info.get(47)? != 0))
}

/// Where a target leads a packet, and the mark that it sets.
pub(super) fn target(it: &Extension, packet: &Packet, queues: &Queues) -> (Way, Option<[Byte; 4]>) {
    let way = match &*it.name {
        "REJECT" => Way::End(Effect::Reject),
        "SNAT" | "NETMAP" => Way::End(Effect::Translate(Translation::Source)),
        "MASQUERADE" => Way::End(Effect::Translate(Translation::Masquerade)),
        "DNAT" => Way::End(Effect::Translate(Translation::Destination)),
        "REDIRECT" => Way::End(Effect::Translate(Translation::Redirect)),
        "NFQUEUE" => {
            let is_one = it.revision == 0 || short(&it.info, 2).is_none_or(|total| total <= 1);
            let bypass = it.revision >= 2 && short(&it.info, 4).is_some_and(|flags| flags & 1 != 0);
            queues.way(short(&it.info, 0).filter(|_| is_one), bypass)
        }
        "MARK" if it.revision == 2 => return (Way::On, set_mark(it, packet)),
        "CONNMARK" => return (Way::On, Some([None; 4])),
        name if is_neutral(name) => Way::On,
        _ => Way::Unknown,
    };
    (way, None)
}

/// Whether a target neither ends the way of a packet nor changes its mark or addresses.
pub(super) fn is_neutral(target: &str) -> bool {
    const NEUTRAL: [&str; 23] = [
        "LOG",
        "NFLOG",
        "ULOG",
        "AUDIT",
        "TRACE",
        "TCPMSS",
        "TCPOPTSTRIP",
        "CHECKSUM",
        "CLASSIFY",
        "DSCP",
        "TOS",
        "TTL",
        "HL",
        "ECN",
        "SET",
        "CT",
        "NOTRACK",
        "SECMARK",
        "CONNSECMARK",
        "IDLETIMER",
        "RATEEST",
        "TEE",
        "LED",
    ];
    NEUTRAL.contains(&target)
}

/// The bits of `mask` are cleared, and those of `mark` inverted.
fn set_mark(it: &Extension, packet: &Packet) -> Option<[Byte; 4]> {
    Some(new_mark(packet.mark, word(&it.info, 0)?, word(&it.info, 4)?))
}

pub(super) fn new_mark(is: [Byte; 4], mark: [u8; 4], mask: [u8; 4]) -> [Byte; 4] {
    std::array::from_fn(|n| match (is[n], mask[n]) {
        (_, 0xff) => Some(mark[n]),
        (is, mask) => is.map(|is| (is & !mask) ^ mark[n]),
    })
}
