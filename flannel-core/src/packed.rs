//! The objects of one peer in a few bytes.
//!
//! The one thing to know: hundreds of thousands of objects are remembered, and most of what an [`Object`] takes is room
//! for an IPv6 address and the name of one of very few devices. Here an address takes the bytes that its family has, and
//! a device that is that of the object before takes one. Three objects of a peer take some 60 bytes instead of 220, and
//! reading them costs less than fetching the difference from memory.

use std::fmt;
use std::net::IpAddr;

use crate::address::{Family, Subnet};
use crate::name::{LinkName, MacAddr};
use crate::state::{Addr, Fdb, Link, LinkKind, Neigh, Nexthop, Object, Route, Via, Vxlan};

/// Objects, in the order in which they were given.
pub(crate) struct Packed(Box<[u8]>);

impl Packed {
    pub(crate) fn iter(&self) -> Unpacked<'_> {
        Unpacked { rest: &self.0, link: None }
    }
}

impl fmt::Debug for Packed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

impl<'a> IntoIterator for &'a Packed {
    type Item = Object;
    type IntoIter = Unpacked<'a>;
    fn into_iter(self) -> Unpacked<'a> {
        self.iter()
    }
}

impl From<&[Object]> for Packed {
    fn from(objects: &[Object]) -> Self {
        let mut packer = Packer { bytes: Vec::with_capacity(32 * objects.len()), link: None };
        objects.iter().for_each(|object| packer.object(object));
        Self(packer.bytes.into())
    }
}

/// Writes what [`Unpacked`] reads: the two mirror each other, line by line.
struct Packer {
    bytes: Vec<u8>,
    /// The device that was written last.
    link: Option<LinkName>,
}

impl Packer {
    fn object(&mut self, object: &Object) {
        self.bytes.push(object.kind() as u8);
        match object {
            Object::Link(Link { name, mtu, up, kind: LinkKind::Vxlan(vxlan) }) => {
                self.link(*name);
                self.number(*mtu);
                self.flag(*up);
                self.vxlan(vxlan);
            }
            Object::Addr(Addr { link, address, len }) => {
                self.link(*link);
                self.address(*address);
                self.bytes.push(*len);
            }
            Object::Neigh(Neigh { link, address, mac }) => {
                self.link(*link);
                self.address(*address);
                self.bytes.extend(mac.0);
            }
            Object::Fdb(Fdb { link, mac, dst }) => {
                self.link(*link);
                self.bytes.extend(mac.0);
                self.address(*dst);
            }
            Object::Nexthop(Nexthop { id, link, gateway, onlink }) => {
                self.number(*id);
                self.link(*link);
                self.address(*gateway);
                self.flag(*onlink);
            }
            Object::Route(Route { dst, via, mtu }) => {
                self.address(dst.base());
                self.bytes.push(dst.len());
                self.via(*via);
                self.option(*mtu, Self::number);
            }
        }
    }

    fn vxlan(&mut self, vxlan: &Vxlan) {
        let Vxlan { vni, port, mac, local, lower, learning, gbp } = *vxlan;
        self.number(vni);
        self.number(port.into());
        self.bytes.extend(mac.0);
        self.option(local, Self::address);
        self.option(lower, Self::link);
        self.flag(learning);
        self.flag(gbp);
    }

    fn via(&mut self, via: Via) {
        match via {
            Via::Gateway { gateway, link, onlink } => {
                self.bytes.push(0);
                self.address(gateway);
                self.link(link);
                self.flag(onlink);
            }
            Via::Link(link) => {
                self.bytes.push(1);
                self.link(link);
            }
            Via::Nexthop(id) => {
                self.bytes.push(2);
                self.number(id);
            }
            Via::Blackhole => self.bytes.push(3),
            Via::LastResort => self.bytes.push(4),
        }
    }

    /// Its length and the name; 0: the same as before.
    fn link(&mut self, link: LinkName) {
        if self.link.replace(link) == Some(link) {
            self.bytes.push(0);
        } else {
            self.bytes.push(link.as_str().len() as u8);
            self.bytes.extend(link.as_str().bytes());
        }
    }

    fn address(&mut self, address: IpAddr) {
        self.bytes.push(Family::of(address).bits());
        match address {
            IpAddr::V4(address) => self.bytes.extend(address.octets()),
            IpAddr::V6(address) => self.bytes.extend(address.octets()),
        }
    }

    fn number(&mut self, number: u32) {
        self.bytes.extend(number.to_ne_bytes());
    }

    fn flag(&mut self, flag: bool) {
        self.bytes.push(flag.into());
    }

    fn option<T>(&mut self, value: Option<T>, write: impl FnOnce(&mut Self, T)) {
        self.flag(value.is_some());
        if let Some(value) = value {
            write(self, value);
        }
    }
}

/// The objects, one after the other.
#[derive(Debug, Clone, Default)]
pub(crate) struct Unpacked<'a> {
    rest: &'a [u8],
    /// The device that was read last.
    link: Option<LinkName>,
}

impl Iterator for Unpacked<'_> {
    type Item = Object;
    fn next(&mut self) -> Option<Object> {
        (!self.rest.is_empty()).then(|| self.object())
    }
}

impl Unpacked<'_> {
    fn object(&mut self) -> Object {
        // The order of `ObjectKind`.
        match self.byte() {
            0 => {
                let (name, mtu, up) = (self.link(), self.number(), self.flag());
                Link { name, mtu, up, kind: LinkKind::Vxlan(self.vxlan()) }.into()
            }
            1 => Addr { link: self.link(), address: self.address(), len: self.byte() }.into(),
            2 => Neigh { link: self.link(), address: self.address(), mac: self.mac() }.into(),
            3 => Fdb { link: self.link(), mac: self.mac(), dst: self.address() }.into(),
            4 => {
                let (id, link) = (self.number(), self.link());
                Nexthop { id, link, gateway: self.address(), onlink: self.flag() }.into()
            }
            _ => {
                let dst = Subnet::new(self.address(), self.byte())
                    .expect("it was one when it was packed");
                Route { dst, via: self.via(), mtu: self.option(Self::number) }.into()
            }
        }
    }

    fn vxlan(&mut self) -> Vxlan {
        Vxlan {
            vni: self.number(),
            port: self.number() as u16,
            mac: self.mac(),
            local: self.option(Self::address),
            lower: self.option(Self::link),
            learning: self.flag(),
            gbp: self.flag(),
        }
    }

    fn via(&mut self) -> Via {
        match self.byte() {
            0 => Via::Gateway { gateway: self.address(), link: self.link(), onlink: self.flag() },
            1 => Via::Link(self.link()),
            2 => Via::Nexthop(self.number()),
            3 => Via::Blackhole,
            _ => Via::LastResort,
        }
    }

    fn link(&mut self) -> LinkName {
        let len = self.byte();
        if len > 0 {
            let (name, rest) = self.rest.split_at(len.into());
            self.rest = rest;
            self.link = Some(LinkName::of_bytes(name));
        }
        self.link.expect("the first device has its name")
    }

    fn address(&mut self) -> IpAddr {
        if self.byte() == Family::V4.bits() {
            IpAddr::from(self.take::<4>())
        } else {
            IpAddr::from(self.take::<16>())
        }
    }

    fn mac(&mut self) -> MacAddr {
        MacAddr(self.take())
    }

    fn number(&mut self) -> u32 {
        u32::from_ne_bytes(self.take())
    }

    fn flag(&mut self) -> bool {
        self.byte() != 0
    }

    fn option<T>(&mut self, read: impl FnOnce(&mut Self) -> T) -> Option<T> {
        self.flag().then(|| read(self))
    }

    fn byte(&mut self) -> u8 {
        let [byte] = self.take();
        byte
    }

    fn take<const N: usize>(&mut self) -> [u8; N] {
        let (taken, rest) = self.rest.split_first_chunk().expect("all that was packed is there");
        self.rest = rest;
        *taken
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::tests::any_object;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn what_was_packed_is_unpacked(objects in prop::collection::vec(any_object(), 0..12)) {
            let packed = Packed::from(&objects[..]);
            prop_assert_eq!(packed.iter().collect::<Vec<_>>(), objects);
        }
    }

    #[test]
    fn a_peer_takes_little() {
        let (link, gateway, mac) =
            ("flannel.1".parse().unwrap(), IpAddr::from([10, 1, 7, 0]), MacAddr([2; 6]));
        let via = Via::Gateway { gateway, link, onlink: true };
        let objects: [Object; 3] = [
            Neigh { link, address: gateway, mac }.into(),
            Fdb { link, mac, dst: [192, 0, 2, 7].into() }.into(),
            Route { dst: "10.1.7.0/24".parse().unwrap(), via, mtu: None }.into(),
        ];
        let packed = Packed::from(&objects[..]);
        assert!(packed.0.len() <= 56, "{} bytes", packed.0.len());
        assert_eq!(packed.iter().collect::<Vec<_>>(), objects);
    }
}
