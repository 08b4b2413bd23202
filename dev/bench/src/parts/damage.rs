//! Changes that another program can make to a peer's objects.

use std::fmt;

use anyhow::Context;
use flannel_core::address::Family;
use flannel_core::object::MacAddr;

use crate::parts::cluster::Peer;
use crate::parts::raw::{
    AF_BRIDGE, BLACKHOLE, DELNEIGH, DELNEXTHOP, DELROUTE, HEADER, Id, NEWNEIGH, NEWNEXTHOP,
    NEWROUTE, ONLINK, PERMANENT, PLAIN, PROTOCOL, PUT, REACHABLE, RawObject, SELF, SITE, STATIC,
    af, message, ndmsg, nhmsg, octets, rtmsg,
};

/// A peer, and its objects in the kernel.
pub(crate) struct Victim<'a> {
    pub(crate) peer: Peer,
    /// Another peer, whose objects are used for this one.
    pub(crate) other: Peer,
    pub(crate) family: Family,
    /// The tunnel device.
    pub(crate) index: u32,
    pub(crate) uplink: u32,
    pub(crate) neigh: &'a RawObject,
    pub(crate) fdb: &'a RawObject,
    pub(crate) route: &'a RawObject,
    pub(crate) nexthop: Option<&'a RawObject>,
    pub(crate) other_nexthop: Option<&'a RawObject>,
}

/// A kind of object, and the change to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Damage {
    Neigh(Entry),
    Fdb(Entry),
    Nexthop(Hop),
    Route(Path),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Entry {
    Delete,
    /// Another MAC address of a neighbour, another destination of a forwarding entry.
    Value,
    /// No longer permanent.
    State,
    /// A flag: of a neighbour `router`, of a forwarding entry `sticky`.
    Mark,
    /// Only of a neighbour: learned by a control plane.
    Learned,
    /// Only of a forwarding entry: another device for its packets.
    Via,
    /// Only of a forwarding entry: another UDP port.
    Port,
    /// Only of a forwarding entry: another VNI.
    Vni,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Hop {
    Delete,
    Gateway,
    Device,
    Blackhole,
    /// The protocol of another program.
    Protocol,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Path {
    Delete,
    Gateway,
    Device,
    Nexthop,
    Blackhole,
    Protocol,
    Mtu,
    Source,
    Advmss,
    /// Only of an IPv6 route: an expiry time.
    Expires,
    /// Only of an IPv6 route: the router preference.
    Pref,
    /// Only of an IPv4 route: the scope `site`.
    Scope,
    /// A second path.
    Multipath,
}

impl Damage {
    pub(crate) fn all() -> impl Iterator<Item = Self> {
        use Entry::{Delete, Learned, Mark, Port, State, Value, Via, Vni};
        let neigh = [Delete, Value, State, Mark, Learned].map(Self::Neigh);
        let fdb = [Delete, Value, State, Mark, Via, Port, Vni].map(Self::Fdb);
        let nexthop = [Hop::Delete, Hop::Gateway, Hop::Device, Hop::Blackhole, Hop::Protocol];
        let route = [
            Path::Delete,
            Path::Gateway,
            Path::Device,
            Path::Nexthop,
            Path::Blackhole,
            Path::Protocol,
            Path::Mtu,
            Path::Source,
            Path::Advmss,
            Path::Expires,
            Path::Pref,
            Path::Scope,
            Path::Multipath,
        ];
        neigh.into_iter().chain(fdb).chain(nexthop.map(Self::Nexthop)).chain(route.map(Self::Route))
    }

    /// Whether the peer needs a nexthop object.
    pub(crate) fn needs_nexthop(self) -> bool {
        matches!(self, Self::Nexthop(_) | Self::Route(Path::Nexthop))
    }

    /// The family of the objects, or `None` for either.
    pub(crate) fn needs_family(self) -> Option<Family> {
        match self {
            Self::Route(Path::Expires | Path::Pref) => Some(Family::V6),
            Self::Route(Path::Scope) => Some(Family::V4),
            _ => None,
        }
    }

    /// Whether a second peer is needed.
    pub(crate) fn needs_another(self) -> bool {
        self == Self::Route(Path::Nexthop)
    }

    /// The objects that are damaged, and must be restored.
    pub(crate) fn victims<'a>(self, victim: &Victim<'a>) -> anyhow::Result<Vec<&'a RawObject>> {
        Ok(match self {
            Self::Neigh(_) => vec![victim.neigh],
            Self::Fdb(_) => vec![victim.fdb],
            // The kernel deletes its route with it, or the route uses the gateway meanwhile.
            Self::Nexthop(_) => vec![nexthop(victim.nexthop)?.0, victim.route],
            Self::Route(_) => vec![victim.route],
        })
    }

    /// The messages that restore a nexthop object in the fastest way. Its route, if it still
    /// exists, uses the gateway itself meanwhile, because the kernel walks over all routes to
    /// replace an object that a route uses. `None` for other objects.
    pub(crate) fn undo(self, victim: &Victim<'_>) -> anyhow::Result<Option<Vec<Vec<u8>>>> {
        let Self::Nexthop(what) = self else { return Ok(None) };
        let Victim { peer, family, index, .. } = *victim;
        let id = nexthop(victim.nexthop)?.1.to_ne_bytes();
        let subnet = peer.subnet(family);
        let index = index.to_ne_bytes();
        let base = octets(subnet.base());
        let header = nhmsg(af(family), PROTOCOL, ONLINK);
        let route = |flags, via: &[(u16, &[u8])]| {
            let attributes = [&[(1, &base[..])], via].concat();
            message(NEWROUTE, PUT, &rtmsg(family, subnet.len(), PROTOCOL, flags), &attributes)
        };
        let plain = (what != Hop::Delete).then(|| route(ONLINK, &[(4, &index), (5, &base)]));
        let nexthop = message(NEWNEXTHOP, PUT, &header, &[(1, &id), (5, &index), (6, &base)]);
        Ok(Some(plain.into_iter().chain([nexthop, route(0, &[(30, &id)])]).collect()))
    }

    /// The message that does the damage.
    pub(crate) fn message(self, victim: &Victim<'_>) -> anyhow::Result<Vec<u8>> {
        match self {
            Self::Neigh(what) => Ok(neigh(what, victim)),
            Self::Fdb(what) => Ok(fdb(what, victim)),
            Self::Nexthop(what) => hop(what, victim),
            Self::Route(what) => path(what, victim),
        }
    }
}

impl fmt::Display for Damage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (kind, what) = match self {
            Self::Neigh(Entry::Value) => ("neigh", "lladdr".into()),
            Self::Fdb(Entry::Value) => ("fdb", "dst".into()),
            Self::Neigh(what) => ("neigh", format!("{what:?}")),
            Self::Fdb(what) => ("fdb", format!("{what:?}")),
            Self::Nexthop(what) => ("nexthop", format!("{what:?}")),
            Self::Route(what) => ("route", format!("{what:?}")),
        };
        write!(f, "{kind} {}", what.to_lowercase())
    }
}

/// A MAC address that no peer has.
const STRANGER: MacAddr = MacAddr([2, 0xee, 0xee, 0xee, 0xee, 0xee]);

fn neigh(what: Entry, victim: &Victim<'_>) -> Vec<u8> {
    let Victim { peer, family, index, .. } = *victim;
    let dst = octets(peer.subnet(family).base());
    let put = |state, flags, mac: MacAddr| {
        message(NEWNEIGH, PUT, &ndmsg(af(family), index, state, flags), &[(1, &dst), (2, &mac.0)])
    };
    match what {
        Entry::Delete => message(DELNEIGH, PLAIN, &ndmsg(af(family), index, 0, 0), &[(1, &dst)]),
        Entry::State => put(REACHABLE, 0, peer.mac(family)),
        // NTF_ROUTER, NTF_EXT_LEARNED.
        Entry::Mark => put(PERMANENT, 0x80, peer.mac(family)),
        Entry::Learned => put(PERMANENT, 0x10, peer.mac(family)),
        _ => put(PERMANENT, 0, STRANGER),
    }
}

fn fdb(what: Entry, victim: &Victim<'_>) -> Vec<u8> {
    let Victim { peer, other, family, index, uplink, .. } = *victim;
    let mac = peer.mac(family).0;
    let dst = octets(peer.public(family));
    let stranger = octets(Peer(other.0 ^ 1 << 15).public(family));
    let put_as = |state, flags, dst: &[u8], more: &[(u16, &[u8])]| {
        let attributes = [&[(1, dst), (2, &mac[..])], more].concat();
        message(NEWNEIGH, PUT, &ndmsg(AF_BRIDGE, index, state, SELF | flags), &attributes)
    };
    let put = |state, dst: &[u8], more: &[(u16, &[u8])]| put_as(state, 0, dst, more);
    match what {
        Entry::Delete => {
            message(DELNEIGH, PLAIN, &ndmsg(AF_BRIDGE, index, 0, SELF), &[(1, &dst), (2, &mac)])
        }
        Entry::State => put(REACHABLE, &dst, &[]),
        // NTF_STICKY.
        Entry::Mark => put_as(PERMANENT, 0x40, &dst, &[]),
        // NDA_IFINDEX, NDA_PORT, NDA_VNI.
        Entry::Via => put(PERMANENT, &dst, &[(8, &uplink.to_ne_bytes())]),
        Entry::Port => put(PERMANENT, &dst, &[(6, &4789u16.to_be_bytes())]),
        Entry::Vni => put(PERMANENT, &dst, &[(7, &77u32.to_ne_bytes())]),
        Entry::Value | Entry::Learned => put(PERMANENT, &stranger, &[]),
    }
}

/// A nexthop object and its id.
fn nexthop(object: Option<&RawObject>) -> anyhow::Result<(&RawObject, u32)> {
    let object = object.context("the peer has no nexthop object")?;
    match object.id {
        Id::Nexthop(id) => Ok((object, id)),
        _ => anyhow::bail!("not a nexthop object"),
    }
}

fn hop(what: Hop, victim: &Victim<'_>) -> anyhow::Result<Vec<u8>> {
    let Victim { peer, family, index, uplink, .. } = *victim;
    let id = nexthop(victim.nexthop)?.1.to_ne_bytes();
    let gateway = octets(peer.subnet(family).base());
    let stranger = stranger(victim);
    let put = |protocol, index: u32, gateway: &[u8]| {
        let header = nhmsg(af(family), protocol, ONLINK);
        message(NEWNEXTHOP, PUT, &header, &[(1, &id), (5, &index.to_ne_bytes()), (6, gateway)])
    };
    Ok(match what {
        Hop::Delete => message(DELNEXTHOP, PLAIN, &nhmsg(0, 0, 0), &[(1, &id)]),
        Hop::Gateway => put(PROTOCOL, index, &stranger),
        Hop::Device => put(PROTOCOL, uplink, &stranger),
        Hop::Protocol => put(STATIC, index, &gateway),
        // NHA_BLACKHOLE.
        Hop::Blackhole => {
            message(NEWNEXTHOP, PUT, &nhmsg(af(family), PROTOCOL, 0), &[(1, &id), (4, &[])])
        }
    })
}

fn path(what: Path, victim: &Victim<'_>) -> anyhow::Result<Vec<u8>> {
    let route = VictimRoute::new(victim)?;
    let gateway = stranger(victim);
    let index = victim.index.to_ne_bytes();
    Ok(match what {
        Path::Delete => {
            let header = rtmsg(route.family, route.prefix, 0, 0);
            message(DELROUTE, PLAIN, &header, &[(1, &route.dst)])
        }
        Path::Gateway => route.put(PROTOCOL, ONLINK, &[(4, &index), (5, &gateway)]),
        Path::Device => {
            route.put(PROTOCOL, ONLINK, &[(4, &victim.uplink.to_ne_bytes()), (5, &gateway)])
        }
        Path::Nexthop => {
            let id = nexthop(victim.other_nexthop)?.1.to_ne_bytes();
            route.put(PROTOCOL, 0, &[(30, &id)])
        }
        Path::Blackhole => {
            let mut header = rtmsg(route.family, route.prefix, PROTOCOL, 0);
            header[7] = BLACKHOLE;
            message(NEWROUTE, PUT, &header, &[(1, &route.dst)])
        }
        Path::Protocol => route.put_again(STATIC, &[]),
        // RTA_METRICS with RTAX_MTU or RTAX_ADVMSS; RTA_EXPIRES, RTA_PREF, RTA_PREFSRC.
        Path::Mtu => route.put_again(PROTOCOL, &[(8, &[8, 0, 2, 0, 0xe8, 3, 0, 0])]),
        Path::Advmss => route.put_again(PROTOCOL, &[(8, &[8, 0, 8, 0, 0xe8, 3, 0, 0])]),
        Path::Expires => route.put_again(PROTOCOL, &[(23, &3600u32.to_ne_bytes())]),
        Path::Pref => route.put_again(PROTOCOL, &[(20, &[1])]),
        Path::Source => {
            let source = match route.family {
                Family::V4 => octets([192, 0, 2, 1].into()),
                Family::V6 => octets([0x2001, 0xdb8, 0, 0, 0, 0, 0, 1].into()),
            };
            route.put_again(PROTOCOL, &[(7, &source)])
        }
        Path::Scope => {
            // `rtm_scope` of `struct rtmsg`.
            let mut message = route.put_again(PROTOCOL, &[]);
            message[HEADER + 6] = SITE;
            message
        }
        Path::Multipath => {
            let paths = [&route.dst, &gateway].map(|gateway| one_of_paths(victim.index, gateway));
            route.put(PROTOCOL, 0, &[(9, &paths.concat())])
        }
    })
}

/// The route to a peer, as the network put it.
struct VictimRoute {
    family: Family,
    /// The base of the peer's subnet.
    dst: Vec<u8>,
    /// The prefix length of the peer's subnet.
    prefix: u8,
    /// The tunnel device.
    index: u32,
    nexthop: Option<u32>,
}

impl VictimRoute {
    fn new(victim: &Victim<'_>) -> anyhow::Result<Self> {
        let subnet = victim.peer.subnet(victim.family);
        let nexthop = match victim.nexthop {
            Some(object) => Some(nexthop(Some(object))?.1),
            None => None,
        };
        Ok(Self {
            family: victim.family,
            dst: octets(subnet.base()),
            prefix: subnet.len(),
            index: victim.index,
            nexthop,
        })
    }

    /// Puts the route with these attributes in place of its own.
    fn put(&self, protocol: u8, flags: u8, via: &[(u16, &[u8])]) -> Vec<u8> {
        let attributes = [&[(1, &self.dst[..])], via].concat();
        message(NEWROUTE, PUT, &rtmsg(self.family, self.prefix, protocol, flags), &attributes)
    }

    /// Puts the route with its own attributes and these additional ones.
    fn put_again(&self, protocol: u8, more: &[(u16, &[u8])]) -> Vec<u8> {
        match self.nexthop {
            Some(id) => self.put(protocol, 0, &[&[(30, &id.to_ne_bytes()[..])], more].concat()),
            None => {
                let index = self.index.to_ne_bytes();
                let via = [(4, &index[..]), (5, &self.dst[..])];
                self.put(protocol, ONLINK, &[&via[..], more].concat())
            }
        }
    }
}

/// A path of RTA_MULTIPATH: a `struct rtnexthop`, and RTA_GATEWAY.
fn one_of_paths(index: u32, gateway: &[u8]) -> Vec<u8> {
    let [len, attribute] = [12, 4].map(|head| (head + gateway.len() as u16).to_ne_bytes());
    let head = [&len[..], &[ONLINK, 0], &index.to_ne_bytes(), &attribute, &[5, 0]].concat();
    [&head, gateway].concat()
}

/// A gateway that no peer has.
fn stranger(victim: &Victim<'_>) -> Vec<u8> {
    octets(Peer(1).subnet(victim.family).last())
}
