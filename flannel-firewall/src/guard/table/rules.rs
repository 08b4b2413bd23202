//! The chains of the table and their rules.

use std::collections::BTreeMap;
use std::net::IpAddr;

use flannel_core::Subnet;
use flannel_core::address::Family;
use flannel_core::backend::Transport;
use flannel_core::object::LinkName;
use flannel_netlink::nftables::{
    Base, Chain, Expr, TableFamily, address_of, arrived_by, hook, is_other_device, kind, meta,
    octets, verdict,
};

use super::sets::{self, PrefixLen, map_name};
use super::{Sources, TAG};
use crate::guard::end::TunnelEnd;

/// Before the chains of other programs (`raw` of `nft` is -300), so that none sees the mark.
const FIRST: i32 = -310;
/// After the chains of other programs, for the same reason.
const LAST: i32 = 1000;
const UDP: u8 = 17;
/// The destination port in the UDP header.
const PORT: Expr = Expr::Transport { offset: 2, len: 2 };

/// A chain of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ChainName {
    /// For tunnel packets that arrive.
    Outer,
    /// For packets that this node forwards.
    Forwarded,
    /// For packets that this node sends.
    Sent,
    /// For packets that have left the tunnel.
    Inner,
}

impl ChainName {
    /// All chains, in the order in which they are written and read.
    pub(super) const ALL: [Self; 4] = [Self::Outer, Self::Forwarded, Self::Sent, Self::Inner];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Outer => "outer",
            Self::Forwarded => "forwarded",
            Self::Sent => "sent",
            Self::Inner => "inner",
        }
    }

    pub(super) fn comment(self) -> &'static str {
        match self {
            Self::Outer => "chain to mark tunnel packets from peers",
            Self::Forwarded => "chain to refuse tunnel packets of others than peers to nodes",
            Self::Sent => "chain to refuse tunnel packets to nodes that a proxy sends for others",
            Self::Inner => {
                "chain to refuse packets out of the tunnel with the source of another node"
            }
        }
    }

    fn base(self) -> Base {
        let (hook, priority) = match self {
            Self::Outer => (hook::INPUT, LAST),
            Self::Forwarded => (hook::FORWARD, FIRST),
            Self::Sent => (hook::OUTPUT, FIRST),
            Self::Inner => (hook::PREROUTING, FIRST),
        };
        Base { kind: "filter".to_owned(), hook, priority, policy: verdict::ACCEPT }
    }
}

/// A rule of the table.
struct Rule {
    /// Why it refuses packets, or `None` if it does not refuse any.
    refuses: Option<Reason>,
    exprs: Vec<Expr>,
}

/// Why a packet is refused.
#[derive(Debug, Clone, Copy)]
enum Reason {
    /// It does not come from a peer, or arrives by a device by which the peer cannot be reached.
    Stranger,
    /// It comes from a peer, and has the source of another node.
    ForeignSource,
    /// A pod, or another host behind this one, sends it to the tunnel of a node.
    Pod,
}

impl Reason {
    const ALL: [Self; 3] = [Self::Stranger, Self::ForeignSource, Self::Pod];

    fn name(self) -> &'static str {
        match self {
            Self::Stranger => "stranger",
            Self::ForeignSource => "foreign_source",
            Self::Pod => "pod",
        }
    }
}

/// The rules of all chains.
#[derive(Default)]
struct Rules {
    outer: Vec<Rule>,
    forwarded: Vec<Rule>,
    sent: Vec<Rule>,
    inner: Vec<Rule>,
}

impl Rules {
    fn of(&self, chain: ChainName) -> &[Rule] {
        match chain {
            ChainName::Outer => &self.outer,
            ChainName::Forwarded => &self.forwarded,
            ChainName::Sent => &self.sent,
            ChainName::Inner => &self.inner,
        }
    }
}

impl Sources {
    /// The chains in the order of [`ChainName::ALL`]. Each is `None` without an end of the
    /// tunnel.
    pub(super) fn chains(&self) -> Vec<Option<Chain>> {
        let rules = self.rules();
        ChainName::ALL
            .into_iter()
            .map(|name| {
                if self.ends.is_empty() {
                    return None;
                }
                let rules = rules.of(name).iter().map(|rule| rule.exprs.clone()).collect();
                Some(Chain { base: Some(name.base()), rules })
            })
            .collect()
    }

    fn rules(&self) -> Rules {
        let mut rules = Rules::default();
        rules.outer.push(clear_tag(self.tag));
        let devices = self.ends.values().filter_map(|end| end.device);
        rules.inner.extend(skip_other_devices(devices));
        for (family, end) in self.ends.iter() {
            for transport in &end.transports {
                add_outer_rules(&mut rules, family, end, *transport);
            }
            if let Some(device) = end.device {
                self.add_inner_rules(&mut rules.inner, family, device, end.drops);
            }
        }
        rules
    }

    /// Adds the rules for packets that have left the tunnel by this device.
    fn add_inner_rules(
        &self,
        rules: &mut Vec<Rule>,
        family: Family,
        device: LinkName,
        drops: bool,
    ) {
        for prefix in self.lens.iter().filter(|prefix| prefix.family == family) {
            rules.push(admit(device, *prefix));
        }
        let mut stranger = arrived_by(device).to_vec();
        stranger.extend(load_tag());
        stranger.push(is_not(self.tag.to_ne_bytes().into()));
        rules.push(refuse(Reason::Stranger, drops, stranger));
        let mut foreign = arrived_by(device).to_vec();
        foreign.extend(set_mark(0));
        rules.push(refuse(Reason::ForeignSource, drops, foreign));
    }

    /// The packets that the rules refused, by reason, from the counters of the table's rules.
    pub(in crate::guard) fn refused(
        &self,
        counters: &[(String, u64)],
    ) -> BTreeMap<&'static str, u64> {
        let mut refused: BTreeMap<&'static str, u64> =
            Reason::ALL.iter().map(|reason| (reason.name(), 0)).collect();
        let rules = self.rules();
        for chain in ChainName::ALL {
            let counters = counters.iter().filter(|(name, _)| name == chain.name());
            for (rule, (_, packets)) in rules.of(chain).iter().zip(counters) {
                if let Some(reason) = rule.refuses {
                    *refused.entry(reason.name()).or_default() += packets;
                }
            }
        }
        refused
    }
}

/// Adds the rules for packets in the tunnel: packets that arrive, are forwarded, or are sent.
fn add_outer_rules(rules: &mut Rules, family: Family, end: &TunnelEnd, transport: Transport) {
    let arrives = arrives(family, transport, end.local);
    match end.device {
        Some(_) => rules.outer.extend(mark_peers(family, &arrives)),
        // The program at the other end of the device checks packets itself. It cannot recognize a
        // pod that sends with the address of a peer.
        None => rules.outer.push(refuse_strays(end.drops, arrives)),
    }
    let is_of_tunnel = is_of_tunnel(family, transport);
    let to_peer = [address_of(family, false), map_lookup(family)];
    let to_tunnel_of_peer = [&is_of_tunnel[..], &to_peer].concat();
    rules.forwarded.extend(forward_peers(family, end.drops, &to_tunnel_of_peer));
    rules.sent.push(refuse_proxies(family, end, is_of_tunnel, to_peer));
}

fn is(value: Vec<u8>) -> Expr {
    Expr::Compare { equal: true, value }
}

fn is_not(value: Vec<u8>) -> Expr {
    Expr::Compare { equal: false, value }
}

/// A mark is in the machine's byte order.
fn set_mark(mark: u32) -> [Expr; 2] {
    [Expr::Value(mark.to_ne_bytes().into()), Expr::SetMeta(meta::MARK)]
}

/// Loads the bits of the mark that tell guards apart.
fn load_tag() -> [Expr; 2] {
    [Expr::Meta(meta::MARK), Expr::Mask(TAG.to_ne_bytes().into())]
}

/// Clears a mark that another program, or a process with a privilege, has set: only this table
/// gives marks with its tag. The rule is for all packets, because a device may receive packets that
/// no other rule matches.
fn clear_tag(tag: u32) -> Rule {
    let mut exprs = load_tag().to_vec();
    exprs.push(is(tag.to_ne_bytes().into()));
    exprs.extend(set_mark(0));
    Rule { refuses: None, exprs }
}

/// Refuses the packets that match these conditions, and counts them.
fn refuse(reason: Reason, drops: bool, mut exprs: Vec<Expr>) -> Rule {
    let end = if drops { verdict::DROP } else { verdict::ACCEPT };
    exprs.extend([Expr::Counter, Expr::Verdict(end)]);
    Rule { refuses: Some(reason), exprs }
}

/// Continues only if a packet is one of the tunnel. The family comes last, because most packets of
/// other programs have it.
fn is_of_tunnel(family: Family, transport: Transport) -> Vec<Expr> {
    let mut exprs = vec![Expr::Meta(meta::L4PROTO)];
    match transport {
        Transport::Udp(port) => exprs.extend([is(vec![UDP]), PORT, is(port.to_be_bytes().into())]),
        Transport::Protocol(number) => exprs.push(is(vec![number])),
        // This crate does not know this kind of packets. No packet has this protocol.
        _ => exprs.push(is(vec![u8::MAX])),
    }
    exprs.extend([Expr::Meta(meta::NFPROTO), is(vec![TableFamily::from(family).protocol()])]);
    exprs
}

/// Continues only if a packet is one of the tunnel to this node.
fn arrives(family: Family, transport: Transport, local: IpAddr) -> Vec<Expr> {
    let mut exprs = is_of_tunnel(family, transport);
    exprs.extend([address_of(family, false), is(octets(local))]);
    exprs
}

fn map_lookup(family: Family) -> Expr {
    Expr::Map { map: map_name(family) }
}

/// Continues only if a packet arrived by the device to its source.
fn on_way_back() -> [Expr; 2] {
    [Expr::WayBack, is_not(vec![0; 4])]
}

/// Gives packets of peers their mark.
///
/// A pod may send with the address of a peer, but its packets arrive neither by the device with the
/// address of the tunnel nor by the device to that peer. The first condition is also needed on
/// nodes whose packets to a peer leave by another device than its packets arrive by. It comes first
/// because it usually holds, and is quick.
fn mark_peers(family: Family, arrives: &[Expr]) -> [Rule; 2] {
    let at_home = [Expr::KindAtArrival, is(kind::LOCAL.to_ne_bytes().into())];
    [at_home, on_way_back()].map(|way| {
        let mark = [
            address_of(family, true),
            map_lookup(family),
            Expr::SetMeta(meta::MARK),
            Expr::Verdict(verdict::ACCEPT),
        ];
        Rule { refuses: None, exprs: [arrives, &way, &mark].concat() }
    })
}

/// Refuses packets by a device on which no peer can be. See [`mark_peers`].
fn refuse_strays(drops: bool, mut exprs: Vec<Expr>) -> Rule {
    exprs.extend([Expr::WayBack, is(vec![0; 4])]);
    exprs.extend([Expr::KindAtArrival, is_not(kind::LOCAL.to_ne_bytes().into())]);
    refuse(Reason::Stranger, drops, exprs)
}

/// Forwards the packets of peers for which this host is a router, and refuses all other packets:
/// those that pods and containers of other networks send with their own addresses or the address of
/// a peer. Masqueraded, they would look like packets of this node.
fn forward_peers(family: Family, drops: bool, to_tunnel_of_peer: &[Expr]) -> [Rule; 2] {
    let source = [address_of(family, true), map_lookup(family), Expr::Verdict(verdict::ACCEPT)];
    let exprs = [to_tunnel_of_peer, &on_way_back(), &source].concat();
    let of_peer = Rule { refuses: None, exprs };
    [of_peer, refuse(Reason::Pod, drops, to_tunnel_of_peer.to_vec())]
}

/// Refuses packets that this host sends with the source of another host. IPVS sends the packets of
/// pods to services so, before they are masqueraded. The source is compared first, because most
/// packets have the address of the tunnel.
fn refuse_proxies(
    family: Family,
    end: &TunnelEnd,
    mut exprs: Vec<Expr>,
    to_peer: [Expr; 2],
) -> Rule {
    exprs.extend([address_of(family, true), is_not(octets(end.local))]);
    exprs.extend(to_peer);
    exprs.extend([Expr::SourceKind, is_not(kind::LOCAL.to_ne_bytes().into())]);
    refuse(Reason::Pod, end.drops, exprs)
}

/// Ends the chain for packets that arrive by none of these devices, which saves them all further
/// rules. `None` without devices.
fn skip_other_devices(devices: impl Iterator<Item = LinkName>) -> Option<Rule> {
    let mut exprs = Vec::new();
    for device in devices {
        exprs.extend([Expr::Meta(meta::IIFNAME), is_other_device(device)]);
    }
    if exprs.is_empty() {
        return None;
    }
    exprs.push(Expr::Verdict(verdict::ACCEPT));
    Some(Rule { refuses: None, exprs })
}

/// Admits packets by the device of a tunnel whose mark and source are in the set for this prefix
/// length.
fn admit(device: LinkName, prefix: PrefixLen) -> Rule {
    let family = prefix.family;
    let mut exprs = arrived_by(device).to_vec();
    let protocol = TableFamily::from(family).protocol();
    exprs.extend([Expr::Meta(meta::NFPROTO), is(vec![protocol]), Expr::Meta(meta::MARK)]);
    if let Expr::Header { offset, len } = address_of(family, true) {
        exprs.push(Expr::AppendHeader { offset, len });
    }
    if prefix.len < family.bits() {
        let any = Subnet::new(family.unspecified(), prefix.len).expect("this length exists");
        exprs.push(Expr::MaskAppended(mask(any)));
    }
    exprs.push(Expr::Lookup { set: prefix.set_name(), is_in: true });
    exprs.extend(set_mark(0));
    exprs.push(Expr::Verdict(verdict::ACCEPT));
    Rule { refuses: None, exprs }
}

/// The bits of the addresses of a subnet that are equal.
fn mask(subnet: Subnet) -> Vec<u8> {
    let ones = u128::MAX.checked_shl(u32::from(128 - subnet.len())).unwrap_or(0).to_be_bytes();
    match subnet.family() {
        Family::V4 => ones[..4].to_vec(),
        Family::V6 => ones.to_vec(),
    }
}

/// The end of the tunnel, read from the rules of the chains. The chains are in the order of
/// [`ChainName::ALL`]. `None` if a chain is missing or has no rules for the family.
pub(super) fn end_of(family: Family, chains: &[Option<Chain>]) -> Option<TunnelEnd> {
    let [Some(outer), _, Some(sent), Some(inner)] = chains else { return None };
    let protocol = TableFamily::from(family).protocol();
    let is_of_family =
        |rule: &&Vec<Expr>| value(rule, &Expr::Meta(meta::NFPROTO)) == Some(&[protocol]);
    // The chain has one rule for each transport.
    let of_family: Vec<_> = sent.rules.iter().filter(is_of_family).collect();
    let drops = *of_family.first()?.last()? == Expr::Verdict(verdict::DROP);
    let transports = of_family.iter().filter_map(|rule| transport_of(rule)).collect();
    let arrival = outer.rules.iter().find(is_of_family)?;
    let local = sets::address_of(value(arrival, &address_of(family, false))?)?;
    let device = inner.rules.iter().find(is_of_family).and_then(|rule| device_of(rule));
    Some(TunnelEnd { drops, device, local, transports })
}

fn device_of(rule: &[Expr]) -> Option<LinkName> {
    let name = std::str::from_utf8(value(rule, &Expr::Meta(meta::IIFNAME))?).ok()?;
    name.trim_end_matches('\0').parse().ok()
}

fn transport_of(rule: &[Expr]) -> Option<Transport> {
    match (value(rule, &Expr::Meta(meta::L4PROTO))?, value(rule, &PORT)) {
        ([UDP], Some(port)) => Some(Transport::Udp(u16::from_be_bytes(port.try_into().ok()?))),
        ([number], _) => Some(Transport::Protocol(*number)),
        _ => None,
    }
}

/// The value with which a rule compares what `load` loads.
fn value<'a>(rule: &'a [Expr], load: &Expr) -> Option<&'a [u8]> {
    rule.windows(2).find_map(|pair| match pair {
        [found, Expr::Compare { equal: true, value }] if found == load => Some(&value[..]),
        _ => None,
    })
}
