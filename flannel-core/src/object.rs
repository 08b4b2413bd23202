//! Kernel objects as values, and the pure diff between two sets of them.
//!
//! The one thing to know: an [`Object`]'s [`Key`] is what the kernel takes for its identity, and the order of
//! keys is the order of creation (a route needs its nexthop, which needs its link). Deletion runs backwards.

mod name;

use std::cmp::Ordering;
use std::collections::BTreeSet;
use std::fmt;
use std::net::IpAddr;

pub use self::name::{LinkName, MacAddr};
use crate::address::Subnet;

/// One kernel object as we want it, or as it is.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Object {
    /// A network device of ours.
    Link(Link),
    /// An address on a device.
    Addr(Addr),
    /// A permanent neighbour entry.
    Neigh(Neigh),
    /// A forwarding entry of a vxlan device.
    Fdb(Fdb),
    /// A nexthop object.
    Nexthop(Nexthop),
    /// A route in the main table.
    Route(Route),
}

/// What the kernel takes for an object's identity; `Ord` is the order of creation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Key {
    /// A device, by name.
    Link(LinkName),
    /// An address on a device.
    Addr(LinkName, IpAddr),
    /// A neighbour on a device, by IP address.
    Neigh(LinkName, IpAddr),
    /// A forwarding entry, by MAC address. Where it leads is a value, not a part of the key.
    Fdb(LinkName, MacAddr),
    /// A nexthop object, by its id, which is unique in the network namespace.
    Nexthop(u32),
    /// A route, by destination (main table, default metric, no TOS).
    Route(Subnet),
}

/// What an object is, without which one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum ObjectKind {
    /// [`Object::Link`].
    Link,
    /// [`Object::Addr`].
    Addr,
    /// [`Object::Neigh`].
    Neigh,
    /// [`Object::Fdb`].
    Fdb,
    /// [`Object::Nexthop`].
    Nexthop,
    /// [`Object::Route`].
    Route,
}

impl ObjectKind {
    /// All kinds, in the order of creation.
    pub const ALL: [Self; 6] =
        [Self::Link, Self::Addr, Self::Neigh, Self::Fdb, Self::Nexthop, Self::Route];
}

/// Its name as a key's text begins with it.
impl fmt::Display for ObjectKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Link => "link",
            Self::Addr => "address",
            Self::Neigh => "neigh",
            Self::Fdb => "fdb",
            Self::Nexthop => "nexthop",
            Self::Route => "route",
        })
    }
}

/// A network device.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Link {
    /// Its name.
    pub name: LinkName,
    /// In bytes.
    pub mtu: u32,
    /// Administratively up.
    pub up: bool,
    /// What it is.
    pub kind: LinkKind,
}

/// What a device is.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum LinkKind {
    /// A vxlan device without multicast group.
    Vxlan(Vxlan),
}

/// The attributes of a vxlan device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Vxlan {
    /// VXLAN network identifier, 1 to 16777215. Another one needs a new device.
    pub vni: u32,
    /// UDP port; flannel's default is 8472. Another one needs a new device.
    pub port: u16,
    /// The MAC address.
    pub mac: MacAddr,
    /// Source address of the outer packets; `None`: the kernel chooses.
    pub local: Option<IpAddr>,
    /// The device that outer packets leave by; `None`: the routing table decides. `None` as well when it
    /// has been deleted.
    pub lower: Option<LinkName>,
    /// Learn forwarding entries from traffic.
    pub learning: bool,
    /// Group Based Policy extension. Another value needs a new device.
    pub gbp: bool,
}

/// An address on a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Addr {
    /// The device.
    pub link: LinkName,
    /// The address.
    pub address: IpAddr,
    /// Prefix length in bits; flannel's own are /32 and /128.
    pub len: u8,
}

/// A permanent neighbour entry: `address` is at `mac`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Neigh {
    /// The device.
    pub link: LinkName,
    /// The neighbour.
    pub address: IpAddr,
    /// Its MAC address.
    pub mac: MacAddr,
}

/// A permanent forwarding entry: frames for `mac` go to the VTEP at `dst`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Fdb {
    /// The vxlan device.
    pub link: LinkName,
    /// The inner destination.
    pub mac: MacAddr,
    /// The outer destination.
    pub dst: IpAddr,
}

/// A nexthop object (kernel 5.3 and later).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Nexthop {
    /// Not 0.
    pub id: u32,
    /// The device.
    pub link: LinkName,
    /// The gateway.
    pub gateway: IpAddr,
    /// The gateway is taken to be on the link without a look at the routing table.
    pub onlink: bool,
}

/// A route in the main table with the default metric.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Route {
    /// The destination.
    pub dst: Subnet,
    /// What happens to packets.
    pub via: Via,
    /// The route's own MTU in bytes; `None`: the device's.
    pub mtu: Option<u32>,
}

/// What a route does with packets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Via {
    /// Sends them to a gateway.
    Gateway {
        /// The gateway.
        gateway: IpAddr,
        /// The device.
        link: LinkName,
        /// The gateway is taken to be on the link without a look at the routing table.
        onlink: bool,
    },
    /// Sends them to a device, the destination itself being the neighbour (scope link).
    Link(LinkName),
    /// Sends them where a nexthop object says.
    Nexthop(u32),
    /// Drops them silently.
    Blackhole,
    /// Drops silently what no other route to the same destination takes: a blackhole with the largest metric, which
    /// stands beside a route that somebody else has there, such as a bridge's. Ours are one or the other, never
    /// both.
    LastResort,
}

// A daemon with 50,000 peers holds 200,000 objects.
const _: () = assert!(size_of::<Object>() <= 80 && size_of::<Key>() <= 40);

impl Object {
    /// Its identity.
    pub fn key(&self) -> Key {
        match self {
            Self::Link(o) => Key::Link(o.name),
            Self::Addr(o) => Key::Addr(o.link, o.address),
            Self::Neigh(o) => Key::Neigh(o.link, o.address),
            Self::Fdb(o) => Key::Fdb(o.link, o.mac),
            Self::Nexthop(o) => Key::Nexthop(o.id),
            Self::Route(o) => Key::Route(o.dst),
        }
    }

    /// What kind of object it is.
    pub fn kind(&self) -> ObjectKind {
        match self {
            Self::Link(_) => ObjectKind::Link,
            Self::Addr(_) => ObjectKind::Addr,
            Self::Neigh(_) => ObjectKind::Neigh,
            Self::Fdb(_) => ObjectKind::Fdb,
            Self::Nexthop(_) => ObjectKind::Nexthop,
            Self::Route(_) => ObjectKind::Route,
        }
    }

    /// The device it vanishes with; `None` if it needs none, or if only its nexthop knows.
    pub fn link(&self) -> Option<LinkName> {
        match self {
            Self::Link(_) => None,
            Self::Addr(o) => Some(o.link),
            Self::Neigh(o) => Some(o.link),
            Self::Fdb(o) => Some(o.link),
            Self::Nexthop(o) => Some(o.link),
            Self::Route(o) => match o.via {
                Via::Gateway { link, .. } | Via::Link(link) => Some(link),
                Via::Nexthop(_) | Via::Blackhole | Via::LastResort => None,
            },
        }
    }
}

impl Key {
    /// What kind of object it is of.
    pub fn kind(&self) -> ObjectKind {
        match self {
            Self::Link(_) => ObjectKind::Link,
            Self::Addr(..) => ObjectKind::Addr,
            Self::Neigh(..) => ObjectKind::Neigh,
            Self::Fdb(..) => ObjectKind::Fdb,
            Self::Nexthop(_) => ObjectKind::Nexthop,
            Self::Route(_) => ObjectKind::Route,
        }
    }
}

impl From<Link> for Object {
    fn from(o: Link) -> Self {
        Self::Link(o)
    }
}
impl From<Addr> for Object {
    fn from(o: Addr) -> Self {
        Self::Addr(o)
    }
}
impl From<Neigh> for Object {
    fn from(o: Neigh) -> Self {
        Self::Neigh(o)
    }
}
impl From<Fdb> for Object {
    fn from(o: Fdb) -> Self {
        Self::Fdb(o)
    }
}
impl From<Nexthop> for Object {
    fn from(o: Nexthop) -> Self {
        Self::Nexthop(o)
    }
}
impl From<Route> for Object {
    fn from(o: Route) -> Self {
        Self::Route(o)
    }
}

/// Written the way `ip` and `bridge` write it, so that a message can be pasted into a shell.
impl fmt::Display for Object {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let onlink = |onlink: bool| if onlink { " onlink" } else { "" };
        match self {
            Self::Link(Link { name, mtu, up, kind: LinkKind::Vxlan(v) }) => {
                write!(
                    f,
                    "link {name} mtu {mtu} {} address {}",
                    if *up { "up" } else { "down" },
                    v.mac
                )?;
                write!(f, " type vxlan id {} dstport {}", v.vni, v.port)?;
                v.local.map_or(Ok(()), |local| write!(f, " local {local}"))?;
                v.lower.map_or(Ok(()), |lower| write!(f, " dev {lower}"))?;
                f.write_str(if v.learning { " learning" } else { " nolearning" })?;
                f.write_str(if v.gbp { " gbp" } else { "" })
            }
            Self::Addr(o) => write!(f, "address {}/{} dev {}", o.address, o.len, o.link),
            Self::Neigh(o) => write!(f, "neigh {} lladdr {} dev {}", o.address, o.mac, o.link),
            Self::Fdb(o) => write!(f, "fdb {} dst {} dev {}", o.mac, o.dst, o.link),
            Self::Nexthop(o) => {
                write!(
                    f,
                    "nexthop id {} via {} dev {}{}",
                    o.id,
                    o.gateway,
                    o.link,
                    onlink(o.onlink)
                )
            }
            Self::Route(o) => {
                match o.via {
                    Via::Gateway { gateway, link, onlink: flag } => {
                        write!(f, "route {} via {gateway} dev {link}{}", o.dst, onlink(flag))?;
                    }
                    Via::Link(link) => write!(f, "route {} dev {link} scope link", o.dst)?,
                    Via::Nexthop(id) => write!(f, "route {} nhid {id}", o.dst)?,
                    Via::Blackhole => write!(f, "route blackhole {}", o.dst)?,
                    Via::LastResort => write!(f, "route blackhole {} metric {}", o.dst, u32::MAX)?,
                }
                o.mtu.map_or(Ok(()), |mtu| write!(f, " mtu {mtu}"))
            }
        }
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Link(name) => write!(f, "link {name}"),
            Self::Addr(link, address) => write!(f, "address {address} dev {link}"),
            Self::Neigh(link, address) => write!(f, "neigh {address} dev {link}"),
            Self::Fdb(link, mac) => write!(f, "fdb {mac} dev {link}"),
            Self::Nexthop(id) => write!(f, "nexthop id {id}"),
            Self::Route(dst) => write!(f, "route {dst}"),
        }
    }
}

/// One step towards the wanted state. Both are idempotent: what is so already stays so.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// Create the object or change it in place, whatever is there.
    Put(Object),
    /// Delete the object. That it is not there is as good.
    Delete(Object),
}

impl Change {
    /// The object concerned.
    pub fn object(&self) -> &Object {
        match self {
            Self::Put(object) | Self::Delete(object) => object,
        }
    }
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Put(object) => write!(f, "put {object}"),
            Self::Delete(object) => write!(f, "delete {object}"),
        }
    }
}

/// A set of kernel objects, one per key, in the order of creation. Lookups cost the logarithm of their number; it is
/// made for being collected at once, and putting one object into many costs their number.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct State {
    objects: Vec<Object>,
    /// Keys of what is not quite as described.
    inexact: BTreeSet<Key>,
}

impl State {
    /// Puts `object` in; returns the one with the same key that it replaces.
    pub fn insert(&mut self, object: impl Into<Object>) -> Option<Object> {
        let object = object.into();
        self.inexact.remove(&object.key());
        match self.find(&object.key()) {
            Ok(there) => Some(std::mem::replace(&mut self.objects[there], object)),
            Err(place) => {
                self.objects.insert(place, object);
                None
            }
        }
    }

    /// Notes that the object with this key that is in here is not quite as described, so that whoever wants it puts it all
    /// the same: it has what no [`Object`] expresses (a route by another protocol than ours, with a preferred source, metrics
    /// other than an MTU, or one that expires; an address whose lifetime ends; a device with a TTL, or without ARP; …).
    pub fn note_inexact(&mut self, key: Key) {
        self.inexact.insert(key);
    }

    /// The object with this key is not quite as described ([`State::note_inexact`]).
    pub fn is_inexact(&self, key: &Key) -> bool {
        self.inexact.contains(key)
    }

    /// What is there with this object's key is, if it is equal, just as described.
    pub fn is_exact(&self, like: &Object) -> bool {
        self.inexact.is_empty() || !self.is_inexact(&like.key())
    }

    /// The routes: they are created last.
    pub fn routes(&self) -> impl Iterator<Item = &Route> {
        let first = self.objects.partition_point(|object| !matches!(object, Object::Route(_)));
        self.objects[first..].iter().filter_map(|object| {
            let Object::Route(route) = object else { return None };
            Some(route)
        })
    }

    /// Takes an object out.
    pub fn remove(&mut self, key: &Key) -> Option<Object> {
        self.inexact.remove(key);
        self.find(key).ok().map(|there| self.objects.remove(there))
    }

    /// The object with this key.
    pub fn get(&self, key: &Key) -> Option<&Object> {
        self.find(key).ok().map(|there| &self.objects[there])
    }

    fn find(&self, key: &Key) -> Result<usize, usize> {
        self.objects.binary_search_by(|object| object.key().cmp(key))
    }

    /// Finds many objects in about the order of their keys.
    pub fn finder(&self) -> Finder<'_> {
        Finder { state: self, next: [0; 6] }
    }

    /// The objects in the order of creation.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = &Object> {
        self.objects.iter()
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.objects.len()
    }

    /// There are none.
    pub fn is_empty(&self) -> bool {
        self.objects.is_empty()
    }

    /// Keeps the objects for which `keep` is true.
    pub fn retain(&mut self, keep: impl FnMut(&Object) -> bool) {
        self.objects.retain(keep);
        let mut inexact = std::mem::take(&mut self.inexact);
        inexact.retain(|key| self.get(key).is_some());
        self.inexact = inexact;
    }

    /// The changes that turn `actual` into `self`: puts in the order of creation, then deletions in the
    /// reverse order, so that a replacement is in place before what it replaces goes.
    ///
    /// Applying them to `actual` yields `self`; the diff of equal states is empty.
    pub fn diff(&self, actual: &Self) -> Vec<Change> {
        let mut changes = Vec::new();
        let mut stale = Vec::new();
        let mut there = actual.iter().peekable();
        for object in self.iter() {
            let key = object.key();
            while let Some(old) = there.next_if(|there| there.key() < key) {
                stale.push(Change::Delete(old.clone()));
            }
            match there.next_if(|there| there.key() == key) {
                Some(old) if old == object && !actual.is_inexact(&key) => {}
                _ => changes.push(Change::Put(object.clone())),
            }
        }
        stale.extend(there.map(|old| Change::Delete(old.clone())));
        changes.extend(stale.into_iter().rev());
        changes
    }
}

/// Finds objects of a state for whoever asks for those of a kind in nearly the order that they have there: then it looks at
/// one, else at the logarithm of their number.
pub struct Finder<'a> {
    state: &'a State,
    /// For each kind, the place behind the one that was found last.
    next: [usize; 6],
}

impl<'a> Finder<'a> {
    /// The place of what has the key of this object, and what it is if it differs.
    pub fn find(&mut self, like: &Object) -> Option<(usize, Option<&'a Object>)> {
        let (objects, next) = (&self.state.objects, &mut self.next[like.kind() as usize]);
        if objects.get(*next) == Some(like) {
            *next += 1;
            return Some((*next - 1, None));
        }
        let place = self.state.find(&like.key()).ok()?;
        *next = place + 1;
        Some((place, Some(&objects[place]).filter(|is| *is != like)))
    }
}

/// By key, without making one of those of which there are most, in no order.
fn in_order_of_creation(a: &Object, b: &Object) -> Ordering {
    match (a, b) {
        (Object::Neigh(a), Object::Neigh(b)) => {
            a.link.cmp(&b.link).then_with(|| a.address.cmp(&b.address))
        }
        (Object::Fdb(a), Object::Fdb(b)) => a.link.cmp(&b.link).then_with(|| a.mac.cmp(&b.mac)),
        _ => a.key().cmp(&b.key()),
    }
}

/// Sorts, and keeps the last one of each key.
fn sort(objects: &mut Vec<Object>) {
    objects.sort_by(in_order_of_creation);
    objects.dedup_by(|later, earlier| {
        let same = in_order_of_creation(later, earlier).is_eq();
        if same {
            std::mem::swap(later, earlier);
        }
        same
    });
}

/// Of two objects with one key the later one counts.
impl<O: Into<Object>> FromIterator<O> for State {
    fn from_iter<I: IntoIterator<Item = O>>(objects: I) -> Self {
        let mut state = Self::default();
        state.extend(objects);
        state
    }
}

/// Of two objects with one key the later one counts.
impl<O: Into<Object>> Extend<O> for State {
    fn extend<I: IntoIterator<Item = O>>(&mut self, objects: I) {
        let mut new: Vec<Object> = objects.into_iter().map(Into::into).collect();
        if !self.inexact.is_empty() {
            for object in &new {
                self.inexact.remove(&object.key());
            }
        }
        sort(&mut new);
        // Whoever reads a kernel adds what comes behind all that is there.
        let behind = match (self.objects.last(), new.first()) {
            (Some(last), Some(first)) => in_order_of_creation(last, first).is_lt(),
            _ => true,
        };
        if self.objects.is_empty() {
            self.objects = new;
        } else {
            self.objects.append(&mut new);
        }
        if !behind {
            sort(&mut self.objects);
        }
    }
}

impl Route {
    /// The same route by the nexthop object with this id.
    pub fn by_nexthop(&self, id: u32) -> Self {
        Self { via: Via::Nexthop(id), ..*self }
    }

    /// The same route by the gateway of `nexthop`.
    pub fn by_gateway_of(&self, nexthop: &Nexthop) -> Self {
        let Nexthop { link, gateway, onlink, .. } = *nexthop;
        Self { via: Via::Gateway { gateway, link, onlink }, ..*self }
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

    fn any_state() -> impl Strategy<Value = State> {
        prop::collection::vec(any_object(), 0..40).prop_map(State::from_iter)
    }

    fn apply(state: &State, changes: &[Change]) -> State {
        let mut state = state.clone();
        for change in changes {
            match change {
                Change::Put(object) => drop(state.insert(object.clone())),
                Change::Delete(object) => drop(state.remove(&object.key())),
            }
        }
        state
    }

    #[test]
    fn a_state_holds_one_object_per_key() {
        let mut state = State::default();
        assert!(state.is_empty());
        let addr = |len| Addr { link: name(1), address: address(1), len };
        let neigh = Neigh { link: name(1), address: address(1), mac: MacAddr::local([1; 6]) };
        state.extend([Object::from(addr(31)), neigh.into()]);
        assert_eq!(state.insert(addr(32)), Some(addr(31).into()));
        assert!(!state.is_empty() && state.len() == 2);
        state.retain(|object| matches!(object, Object::Addr(_)));
        assert_eq!(state, State::from_iter([addr(32)]));
        assert_eq!(state.remove(&Object::from(addr(32)).key()), Some(addr(32).into()));
        assert!(state.is_empty());
    }

    #[test]
    fn what_takes_the_place_of_an_inexact_route_is_exact() {
        let route =
            |n| Route { dst: Subnet::new(address(n), 24).unwrap(), via: Via::Blackhole, mtu: None };
        let (want, key) = (State::from_iter([route(1), route(2)]), Key::Route(route(1).dst));
        let replacements: [fn(&mut State, Route); 4] = [
            |state, route| {
                state.insert(route);
            },
            |state, route| state.extend([route]),
            |state, route| {
                state.remove(&Key::Route(route.dst));
                state.insert(route);
            },
            |state, route| {
                state.retain(|object| object.key() != Key::Route(route.dst));
                state.extend([route]);
            },
        ];
        for replace in replacements {
            let mut state = want.clone();
            state.note_inexact(key);
            state.extend([route(2)]);
            state.retain(|_| true);
            assert!(state.is_inexact(&key) && !state.is_inexact(&Key::Route(route(2).dst)));
            assert_eq!(want.diff(&state), [Change::Put(route(1).into())]);
            replace(&mut state, route(1));
            assert!(!state.is_inexact(&key));
            assert_eq!(want.diff(&state), []);
        }
    }

    #[test]
    fn an_object_knows_the_device_it_vanishes_with() {
        let (link, dst) = (name(1), "10.1.7.0/24".parse().unwrap());
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

    proptest! {
        #[test]
        fn of_objects_with_one_key_the_last_one_stays_whatever_came_together(
            parts in prop::collection::vec(prop::collection::vec(any_object(), 0..20), 0..6),
        ) {
            let mut state = State::default();
            let mut model = std::collections::BTreeMap::new();
            for part in parts {
                model.extend(part.iter().map(|object| (object.key(), object.clone())));
                state.extend(part);
                prop_assert!(state.iter().eq(model.values()));
            }
        }

        #[test]
        fn whatever_the_order_of_asking_a_finder_finds_what_is_there(
            state in any_state(),
            asked in prop::collection::vec(any_object(), 0..40),
        ) {
            let mut finder = state.finder();
            // What is there in its order, too, so that one comes behind the other.
            for like in asked.iter().chain(state.iter()).chain(&asked) {
                let place = state.iter().position(|there| there.key() == like.key());
                let differs = state.get(&like.key()).filter(|there| *there != like);
                prop_assert_eq!(finder.find(like), place.map(|place| (place, differs)));
            }
        }

        #[test]
        fn diff_converges(want in any_state(), actual in any_state()) {
            prop_assert_eq!(apply(&actual, &want.diff(&actual)), want);
        }

        #[test]
        fn diff_is_idempotent(want in any_state(), actual in any_state()) {
            prop_assert_eq!(want.diff(&want), vec![]);
            let changes = want.diff(&actual);
            prop_assert_eq!(apply(&apply(&actual, &changes), &changes), want);
        }

        #[test]
        fn diff_is_ordered_and_minimal(want in any_state(), actual in any_state()) {
            let changes = want.diff(&actual);
            let split = changes.iter().position(|c| matches!(c, Change::Delete(_))).unwrap_or(changes.len());
            let keys = |part: &[Change]| part.iter().map(|c| c.object().key()).collect::<Vec<_>>();
            let (puts, deletes) = (keys(&changes[..split]), keys(&changes[split..]));
            prop_assert!(changes[split..].iter().all(|c| matches!(c, Change::Delete(_))));
            prop_assert!(puts.is_sorted() && deletes.iter().rev().is_sorted());
            for change in &changes {
                let (want, actual) = (want.get(&change.object().key()), actual.get(&change.object().key()));
                prop_assert!(want != actual);
            }
        }
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
}
