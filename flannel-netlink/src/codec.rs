//! Kernel objects as rtnetlink messages, one module per kind.
//!
//! A message identifies a link by its interface index, an object by its name. So a reader returns
//! the content of a message (`…Message`). The caller looks up the name of the link and makes the
//! object from both.
//!
//! A message is *unrepresentable* if no object can express it, such as a message about a multipath
//! route. It is *exact* if its object expresses all of its attributes that flannel compares.
//!
//! A new kind of object needs a module here, and an arm in `kernel::apply::steps`,
//! `kernel::changes::event_decoder` and `kernel::snapshot`.

pub(crate) mod addr;
pub(crate) mod attached;
pub(crate) mod fdb;
pub(crate) mod fou;
pub(crate) mod link;
pub(crate) mod neigh;
pub(crate) mod nexthop;
pub(crate) mod route;
pub(crate) mod rule;
pub(crate) mod wireguard;

use std::net::IpAddr;

use flannel_core::address::Family;
use flannel_core::kernel::KernelEvent;
use flannel_core::object::{Key, LinkName, Object};
use neli::consts::nl::NlmF;
use neli::consts::rtnl::RtAddrFamily;

/// The content of a multicast message about an object. The event decoder makes an event from it.
pub(crate) trait EventMessage {
    /// The index of the link whose name [`EventMessage::event`] needs, or 0 if it needs no name.
    /// `is_deletion` is true if the message reports a deletion.
    fn event_index(&self, is_deletion: bool) -> u32;

    /// The event, or `None` if the message cannot affect an object of flannel.
    ///
    /// `link` is the name of the link with the index [`EventMessage::event_index`], or `None` if
    /// the index is 0 or the name is unknown. `flags` are the flags in the message header.
    fn event(&self, link: Option<LinkName>, is_deletion: bool, flags: NlmF) -> Option<KernelEvent>;

    /// The route protocol of the object, or `None` if its kind has no protocol.
    fn protocol(&self) -> Option<u8> {
        None
    }
}

/// The event for the object with this key. `object` is `None` if no [`Object`] can represent the
/// message. `is_exact` is true if `object` represents all attributes of the message.
fn event(key: Key, object: Option<Object>, is_exact: bool, is_deletion: bool) -> KernelEvent {
    match object {
        _ if is_deletion => KernelEvent::Deleted(key),
        Some(object) if is_exact => KernelEvent::Present(object),
        Some(object) => KernelEvent::Inexact(object),
        None => KernelEvent::Unrepresentable(key),
    }
}

/// Flags of a request that creates an object or replaces the existing one.
pub(crate) fn put_flags() -> NlmF {
    NlmF::CREATE | NlmF::REPLACE
}

/// `AF_INET` or `AF_INET6`.
pub(crate) fn af(family: Family) -> RtAddrFamily {
    match family {
        Family::V4 => RtAddrFamily::Inet,
        Family::V6 => RtAddrFamily::Inet6,
    }
}

/// `AF_INET` or `AF_INET6`, the family of the address.
pub(crate) fn af_of(address: IpAddr) -> RtAddrFamily {
    af(Family::of(address))
}

/// The family, or `None` unless `af` is `AF_INET` or `AF_INET6`.
pub(crate) fn family_of(af: RtAddrFamily) -> Option<Family> {
    match af {
        RtAddrFamily::Inet => Some(Family::V4),
        RtAddrFamily::Inet6 => Some(Family::V6),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use std::io::Cursor;
    use std::net::Ipv4Addr;

    use flannel_core::Subnet;
    use flannel_core::object::{
        Addr, Fdb, Fou, Link, LinkKind, LinkName, MacAddr, Neigh, Nexthop, Object, Route, Via,
        Vxlan,
    };
    use neli::rtnl::{Ifaddrmsg, Ifinfomsg, Ndmsg, Rtmsg};
    use neli::{FromBytesWithInput, Header, ToBytes};
    use proptest::prelude::*;

    use super::*;
    use crate::transport::wire::{Message, Messages, messages};

    const INDEX: u32 = 0x1234_5678;
    const LOWER: u32 = 7;

    fn name() -> LinkName {
        "flannel.1".parse().unwrap()
    }

    fn lower() -> LinkName {
        "eth0".parse().unwrap()
    }

    fn any_ip() -> impl Strategy<Value = IpAddr> {
        prop_oneof![
            any::<[u8; 4]>().prop_map(IpAddr::from),
            any::<[u8; 16]>().prop_map(IpAddr::from)
        ]
    }

    fn any_mac() -> impl Strategy<Value = MacAddr> {
        any::<[u8; 6]>().prop_map(MacAddr)
    }

    fn any_lower() -> impl Strategy<Value = Option<LinkName>> {
        any::<bool>().prop_map(|has_lower| has_lower.then(lower))
    }

    fn any_fou() -> impl Strategy<Value = LinkKind> {
        (any::<[u8; 4]>(), any_lower(), any::<u16>(), any::<bool>()).prop_map(
            |(local, lower, port, one_port)| {
                Fou { local: local.into(), lower, port, one_port: one_port && port != 0 }.into()
            },
        )
    }

    fn any_vxlan() -> impl Strategy<Value = LinkKind> {
        (
            1..1u32 << 24,
            any::<u16>(),
            any_mac(),
            prop::option::of(any_ip()),
            any_lower(),
            any::<bool>(),
            any::<bool>(),
        )
            .prop_map(|(vni, port, mac, local, lower, learning, gbp)| {
                let local = local.filter(|address| !address.is_unspecified());
                Vxlan { vni, port, mac, local, lower, learning, gbp }.into()
            })
    }

    fn any_link() -> impl Strategy<Value = Link> {
        let kind = prop_oneof![any_fou(), any_vxlan()];
        (any::<u32>(), any::<bool>(), kind).prop_map(|(mtu, up, kind)| Link {
            name: name(),
            mtu,
            up,
            kind,
        })
    }

    fn any_route() -> impl Strategy<Value = Route> {
        (
            any_ip(),
            0..=128u8,
            any_ip(),
            any::<bool>(),
            0..5u8,
            1..9u32,
            prop::option::of(any::<u16>()),
        )
            .prop_map(|(address, len, gateway, onlink, kind, id, mtu)| {
                let same = Family::of(gateway) == Family::of(address);
                let via = match kind {
                    0 if same => Via::Gateway { gateway, link: name(), onlink },
                    1 => Via::Nexthop(id),
                    2 => Via::Blackhole,
                    3 => Via::LastResort,
                    _ => Via::Link(name()),
                };
                Route {
                    dst: Subnet::new(address, len % (Family::of(address).bits() + 1)).unwrap(),
                    via,
                    mtu,
                }
            })
    }

    fn bytes(mut requests: Messages) -> Vec<u8> {
        let count = requests.len();
        requests.ready(0..count, 0, NlmF::empty()).to_vec()
    }

    /// Reads the only message in `bytes`.
    fn read<T>(bytes: &[u8], read: impl Fn(&Message<'_>) -> Option<T>) -> T {
        let all: Vec<_> = messages(bytes).collect::<Result<_, _>>().unwrap();
        assert_eq!(all.len(), 1);
        read(&all[0]).unwrap()
    }

    /// The fixed header of the only message in `bytes`, as neli reads and writes it.
    fn again<H: Header + FromBytesWithInput<Input = usize> + ToBytes>(bytes: &[u8]) -> Vec<u8> {
        let header = &bytes[16..16 + H::header_size()];
        let read = H::from_bytes_with_input(&mut Cursor::new(header), header.len()).unwrap();
        let mut written = Cursor::new(Vec::new());
        read.to_bytes(&mut written).unwrap();
        written.into_inner()
    }

    fn written(write: impl FnOnce(&mut Messages)) -> Vec<u8> {
        let mut requests = Messages::default();
        write(&mut requests);
        bytes(requests)
    }

    proptest! {
        #[test]
        fn links_round_trip(link in any_link()) {
            let lower = link.kind.attributes().lower();
            let index = lower.map_or(0, |_| LOWER);
            let codec = link::codec(&link.kind).unwrap();
            let got = read(&bytes(link::create(&link, codec, index)), link::read);
            prop_assert_eq!(got.lower(), index);
            // `create` makes a device that is down. Another request sets it up.
            prop_assert_eq!(got.object(lower), Some(Link { up: false, ..link }));
        }

        #[test]
        fn a_link_in_the_desired_state_needs_no_request(link in any_link()) {
            let index = link.kind.attributes().lower().map_or(0, |_| LOWER);
            let codec = link::codec(&link.kind).unwrap();
            let is = read(&bytes(link::create(&link, codec, index)), link::read);
            prop_assert!(is.can_become(&link.kind));
            prop_assert_eq!(link::change_kind(&is, codec, index).len(), 0);
            prop_assert_eq!(link::release(&is).len(), 0);
            prop_assert_eq!(link::change(&is, &Link { up: false, ..link.clone() }).len(), 0);
        }

        #[test]
        fn addresses_round_trip(address in any_ip(), len in 0..=32u8) {
            let addr = Addr { link: name(), address, len };
            let got = read(&written(|r| addr::put(r, &addr, INDEX)), addr::read);
            prop_assert_eq!(got.index, INDEX);
            prop_assert_eq!(got.object(name()), addr);
        }

        #[test]
        fn neighbours_round_trip(address in any_ip(), mac in any_mac()) {
            let neigh = Neigh { link: name(), address, mac };
            let got = read(&written(|r| neigh::put(r, &neigh, INDEX)), neigh::read);
            prop_assert_eq!(got.index, INDEX);
            prop_assert_eq!(got.object(name()), Some(Object::Neigh(neigh)));
        }

        #[test]
        fn forwarding_entries_round_trip(dst in any_ip(), mac in any_mac()) {
            let fdb = Fdb { link: name(), mac, dst };
            let got = read(&written(|r| fdb::put(r, &fdb, INDEX)), neigh::read);
            prop_assert_eq!(got.index, INDEX);
            prop_assert_eq!(got.object(name()), Some(Object::Fdb(fdb)));
        }

        #[test]
        fn nexthops_round_trip(id in 1..u32::MAX, gateway in any_ip(), onlink in any::<bool>()) {
            let nexthop = Nexthop { id, link: name(), gateway, onlink };
            let got = read(&written(|r| nexthop::put(r, &nexthop, INDEX)), nexthop::read);
            prop_assert_eq!(got.index, INDEX);
            prop_assert_eq!(got.protocol, 241);
            prop_assert_eq!(got.object(name()), Some(nexthop));
        }

        #[test]
        fn fixed_headers_are_those_of_neli(
            link in any_link(),
            addr in (any_ip(), 0..=32u8),
            neigh in (any_ip(), any_mac()),
            fdb in (any_ip(), any_mac()),
            route in any_route(),
        ) {
            let codec = link::codec(&link.kind).unwrap();
            let create = bytes(link::create(&link, codec, LOWER));
            let set_up = bytes(link::set_up(INDEX, true));
            for request in [create, set_up] {
                prop_assert_eq!(again::<Ifinfomsg>(&request), &request[16..32]);
            }
            let addr = Addr { link: name(), address: addr.0, len: addr.1 };
            let put_addr = written(|r| addr::put(r, &addr, INDEX));
            prop_assert_eq!(again::<Ifaddrmsg>(&put_addr), &put_addr[16..24]);
            let neigh = Neigh { link: name(), address: neigh.0, mac: neigh.1 };
            let put_neigh = written(|r| neigh::put(r, &neigh, INDEX));
            let fdb = Fdb { link: name(), dst: fdb.0, mac: fdb.1 };
            let put_fdb = written(|r| fdb::put(r, &fdb, INDEX));
            for request in [put_neigh, put_fdb] {
                prop_assert_eq!(again::<Ndmsg>(&request), &request[16..28]);
            }
            let put_route = written(|r| route::put(r, &route, INDEX, true));
            let host = Subnet::host(Ipv4Addr::LOCALHOST.into());
            let delete_route = written(|r| route::delete_any(r, &host, 7));
            for request in [put_route, delete_route] {
                prop_assert_eq!(again::<Rtmsg>(&request), &request[16..28]);
            }
        }

        #[test]
        fn routes_round_trip(route in any_route()) {
            let got = read(&written(|r| route::put(r, &route, INDEX, true)), route::read);
            prop_assert!(got.main && got.is_exact());
            prop_assert_eq!(got.protocol, 241);
            prop_assert_eq!(got.object(|index| (index == INDEX).then(name)), Some(route));
        }

        #[test]
        fn no_bytes_make_a_reader_panic(
            kind in 16..110u16,
            payload in prop::collection::vec(any::<u8>(), 0..120),
        ) {
            let flags = NlmF::empty();
            let message = Message { kind, flags, sequence: 0, port: 0, payload: &payload };
            let _ = link::read(&message).map(|found| found.object(None));
            let _ = addr::read(&message);
            let _ = neigh::read(&message).map(|found| found.object(name()));
            let _ = nexthop::read(&message).map(|found| found.object(name()));
            let _ = route::read(&message).map(|found| found.object(|_| Some(name())));
        }
    }
}
