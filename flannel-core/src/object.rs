//! Kernel objects as values, and sets of them.
//!
//! To add a kind of object, write a module with its value, and add a row to the table below. The
//! rows are in the order of creation: a route needs its nexthop, which needs its link. Objects are
//! deleted in the reverse order.

mod addr;
mod change;
mod fdb;
mod link;
mod name;
mod neigh;
mod nexthop;
mod object_set;
mod peer;
mod record;
mod route;
mod secret;

use std::cmp::Ordering;
use std::fmt;
use std::net::IpAddr;

pub use self::addr::Addr;
pub use self::change::Change;
pub use self::fdb::Fdb;
pub use self::link::{Fou, Ipip, Link, LinkAttributes, LinkKind, Tun, Vxlan, Wireguard};
pub use self::name::{LinkName, MacAddr};
pub use self::neigh::Neigh;
pub use self::nexthop::Nexthop;
pub use self::object_set::ObjectSet;
pub use self::peer::{Peer, PeerAttributes, PublicKey};
pub use self::record::Record;
pub use self::route::{Route, Via};
pub use self::secret::Secret;
use crate::address::Subnet;

/// Defines the enums over all kinds of objects. A row is a kind and its name, the fields of its
/// value that make its key, the text of a key after the name, and the device for [`Object::link`].
macro_rules! object_kinds {
    ($(
        $(#[$doc:meta])*
        $kind:ident $name:literal,
        $(#[$key_doc:meta])*
        key: ($($field:ident: $type:ty),+) = $text:literal,
        device: |$value:pat_param| $device:expr;
    )+) => {
        /// A kernel object, as it is or as it should be.
        #[derive(Debug, Clone, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum Object {
            $($(#[$doc])* $kind($kind),)+
        }

        /// The kernel's identity of an object. `Ord` is the order of creation.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[non_exhaustive]
        pub enum Key {
            $($(#[$key_doc])* $kind($($type),+),)+
        }

        /// A kind of object. `Ord` is the order of creation.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[non_exhaustive]
        pub enum ObjectKind {
            $(#[doc = concat!("[`Object::", stringify!($kind), "`].")] $kind,)+
        }

        impl ObjectKind {
            /// All kinds, at the indexes `kind as usize`.
            pub const ALL: [Self; [$($name),+].len()] = [$(Self::$kind),+];

            /// The first word of the text of objects and keys of this kind.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$kind => $name,)+
                }
            }
        }

        impl Object {
            /// The kernel's identity of the object.
            pub fn key(&self) -> Key {
                match self {
                    $(Self::$kind(value) => Key::$kind($(value.$field),+),)+
                }
            }

            /// The kind of the object.
            pub fn kind(&self) -> ObjectKind {
                match self {
                    $(Self::$kind(_) => ObjectKind::$kind,)+
                }
            }

            /// The device whose deletion deletes the object. `None` if the object does not depend
            /// on a device, or depends on it through a nexthop object.
            pub fn link(&self) -> Option<LinkName> {
                match self {
                    $(Self::$kind($value) => $device,)+
                }
            }

            /// Compares the keys of two objects without building them.
            fn cmp_key(&self, other: &Self) -> Ordering {
                match (self, other) {
                    $((Self::$kind(a), Self::$kind(b)) => {
                        Ordering::Equal$(.then_with(|| a.$field.cmp(&b.$field)))+
                    })+
                    _ => self.kind().cmp(&other.kind()),
                }
            }
        }

        impl Key {
            /// The kind of the object.
            pub fn kind(&self) -> ObjectKind {
                match self {
                    $(Self::$kind(..) => ObjectKind::$kind,)+
                }
            }
        }

        /// The text follows the syntax of `ip` and `bridge`: `route 10.1.7.0/24 dev eth0 …`.
        impl fmt::Display for Object {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                match self {
                    $(Self::$kind(value) => fmt::Display::fmt(value, f),)+
                }
            }
        }

        impl fmt::Display for Key {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{} ", self.kind())?;
                match self {
                    $(Self::$kind($($field),+) => write!(f, $text),)+
                }
            }
        }

        $(
            impl From<$kind> for Object {
                fn from(value: $kind) -> Self {
                    Self::$kind(value)
                }
            }
        )+
    };
}

object_kinds! {
    /// A network device that a network creates.
    Link "link",
    /// A device, by name.
    key: (name: LinkName) = "{name}",
    device: |_| None;

    /// An address on a device.
    Addr "address",
    /// An address on a device.
    key: (link: LinkName, address: IpAddr) = "{address} dev {link}",
    device: |addr| Some(addr.link);

    /// A permanent neighbour entry.
    Neigh "neigh",
    /// A neighbour on a device, by IP address.
    key: (link: LinkName, address: IpAddr) = "{address} dev {link}",
    device: |neigh| Some(neigh.link);

    /// A forwarding entry of a vxlan device.
    Fdb "fdb",
    /// A forwarding entry, by MAC address.
    key: (link: LinkName, mac: MacAddr) = "{mac} dev {link}",
    device: |fdb| Some(fdb.link);

    /// A peer of a WireGuard device.
    Peer "peer",
    /// A peer of a WireGuard device, by its public key.
    key: (link: LinkName, key: PublicKey) = "{key} dev {link}",
    device: |peer| Some(peer.link);

    /// A nexthop object.
    Nexthop "nexthop",
    /// A nexthop object, by its id, which is unique in the network namespace.
    key: (id: u32) = "id {id}",
    device: |nexthop| Some(nexthop.link);

    /// A route in the main table.
    Route "route",
    /// A route, by destination (main table, default metric, no TOS).
    key: (dst: Subnet) = "{dst}",
    device: |route| route.via.link();

    /// A record of a record keeper. It is created last, when packets can be sent.
    Record "record",
    /// A record, by its keeper and the subnet.
    key: (keeper: &'static str, subnet: Subnet) = "{keeper} {subnet}",
    device: |_| None;
}

// Memory: 50,000 peers have 200,000 objects.
const _: () = assert!(size_of::<Object>() <= 64 && size_of::<Key>() <= 56);

impl fmt::Display for ObjectKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::any_object;
    use proptest::prelude::*;

    fn name(n: u8) -> LinkName {
        format!("flannel.{n}").parse().unwrap()
    }

    fn address(n: u8) -> IpAddr {
        if n < 4 {
            IpAddr::from([10, 0, n, 0])
        } else {
            IpAddr::from([0xfd00, 0, 0, u16::from(n), 0, 0, 0, 0])
        }
    }

    #[test]
    fn an_object_names_the_device_that_it_depends_on() {
        let link = name(1);
        let dst = "10.1.7.0/24".parse().unwrap();
        let gateway = Via::Gateway { gateway: address(1), link, onlink: true };
        let on = |via| Object::from(Route { dst, via, mtu: None }).link();
        assert_eq!([gateway, Via::Link(link)].map(on), [Some(link); 2]);
        assert_eq!([Via::Nexthop(7), Via::Blackhole, Via::LastResort].map(on), [None; 3]);
        let mac = MacAddr::local([1; 6]);
        let others: [Object; 4] = [
            Addr { link, address: address(1), len: 32 }.into(),
            Neigh { link, address: address(1), mac }.into(),
            Fdb { link, mac, dst: address(1) }.into(),
            Nexthop { id: 7, link, gateway: address(1), onlink: true }.into(),
        ];
        assert!(others.iter().all(|object| object.link() == Some(link)));
    }

    #[test]
    fn objects_read_like_ip_route() {
        let route = Route {
            dst: "10.1.2.0/24".parse().unwrap(),
            via: Via::Gateway { gateway: "10.1.2.0".parse().unwrap(), link: name(1), onlink: true },
            mtu: Some(1400),
        };
        assert_eq!(
            Object::from(route).to_string(),
            "route 10.1.2.0/24 via 10.1.2.0 dev flannel.1 onlink mtu 1400"
        );
    }

    #[test]
    fn kinds_are_numbered_in_the_order_of_creation() {
        for (n, kind) in ObjectKind::ALL.into_iter().enumerate() {
            assert_eq!(kind as usize, n);
        }
        assert!(ObjectKind::ALL.is_sorted());
    }

    proptest! {
        #[test]
        fn an_object_agrees_with_its_key(a in any_object(), b in any_object()) {
            prop_assert_eq!(a.kind(), a.key().kind());
            for text in [a.to_string(), a.key().to_string()] {
                prop_assert!(text.starts_with(a.kind().name()), "{}", text);
            }
            prop_assert_eq!(a.cmp_key(&b), a.key().cmp(&b.key()));
            prop_assert!(a.kind() == b.kind() || a.kind().cmp(&b.kind()) == a.key().cmp(&b.key()));
        }
    }
}
