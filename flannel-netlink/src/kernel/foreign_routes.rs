//! Remembers existing routes and FDB entries, mostly of other programs, that require extra requests
//! when flannel's entries are changed.
//!
//! With the extra requests, the change of a route takes a fifth more time, and almost no host needs
//! them. So they are sent only if a snapshot or an event has shown such an entry. If the entry is
//! noted too late, the next snapshot reports our route as inexact, and the route engine puts it
//! again.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard};

use flannel_core::Subnet;
use flannel_core::address::{Dual, Family};
use flannel_core::kernel::ROUTE_PROTOCOL;
use flannel_core::object::MacAddr;
use flannel_core::runtime::lock;

use crate::codec::fdb::Special;
use crate::codec::neigh::{NeighMessage, ProxyEntry};
use crate::codec::route::RouteMessage;

/// The largest number of entries of one kind that are remembered. Other programs decide how many
/// there are.
const MOST: usize = 1024;
/// The largest number of duplicates of one route that are remembered. The next snapshot finds the
/// others.
const MOST_DUPLICATES: usize = 8;

/// The known entries. Clones share them.
#[derive(Debug, Clone, Default)]
pub(crate) struct ForeignRoutes(Arc<Mutex<Inner>>);

#[derive(Debug, Default)]
struct Inner {
    /// There is or was a route that uses a nexthop object and has metrics.
    metrics: bool,
    /// `Some` for a family whose routes were all read at least once.
    read: Dual<()>,
    /// Destinations that have or had a last-resort route of ours. With more than [`MOST`] entries
    /// the set is incomplete.
    last_resorts: BTreeSet<Subnet>,
    /// Second routes to destinations of our routes, as of the last snapshot. The usual requests for
    /// our routes neither replace nor delete them.
    duplicates: BTreeMap<Subnet, Vec<DuplicateRoute>>,
    /// The [special](NeighMessage::special) FDB entries, by device index and MAC address.
    special: BTreeMap<(u32, MacAddr), Special>,
    /// Proxy entries on our devices, as of the last snapshot.
    proxies: BTreeSet<ProxyEntry>,
    /// Proxy entries that were deleted since the last scan for new ones.
    deleted_proxies: BTreeSet<ProxyEntry>,
    /// `special` once had more than [`MOST`] entries and was cleared, so any entry may be special.
    forgotten: bool,
}

/// Another route to the destination of one of our routes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct DuplicateRoute {
    /// The other route.
    pub(crate) found: RouteMessage,
    /// When it is deleted.
    pub(crate) goes: Goes,
}

/// When another route to the destination of ours is deleted.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Goes {
    /// When our route is put or deleted. This route is ours too. It is behind the first one, or has
    /// a TOS.
    WithOurs,
    /// When another route of ours is put. This route is ours too, and behind foreign IPv4 routes.
    /// The put replaces one of them, and would leave this route in place.
    OursWhenPut,
    /// When a route of ours is put, except for a last-resort route, which is behind all others.
    /// This route is a foreign IPv6 route in front of ours, which the put would leave in place.
    ForeignWhenPut,
}

impl ForeignRoutes {
    /// Notes a route that was read. Routes in other tables are ignored.
    pub(crate) fn note_route(&self, route: &RouteMessage) {
        if !route.main {
            return;
        }
        if route.has_metrics_by_nexthop() {
            self.note_metrics();
        }
        if route.last_resort && route.protocol == ROUTE_PROTOCOL {
            self.note_last_resort(route.dst);
        }
    }

    /// Notes that a route uses a nexthop object and has metrics.
    pub(crate) fn note_metrics(&self) {
        self.lock().metrics = true;
    }

    /// Notes that there is or was a last-resort route of ours to `dst`.
    pub(crate) fn note_last_resort(&self, dst: Subnet) {
        let there = &mut self.lock().last_resorts;
        if there.len() <= MOST {
            there.insert(dst);
        }
    }

    /// Notes a duplicate of a route of ours.
    pub(crate) fn note_duplicate(&self, duplicate: DuplicateRoute) {
        let dst = duplicate.found.dst;
        let all = &mut self.lock().duplicates;
        if all.len() >= MOST && !all.contains_key(&dst) {
            return;
        }
        let to_dst = all.entry(dst).or_default();
        if to_dst.len() < MOST_DUPLICATES && !to_dst.contains(&duplicate) {
            to_dst.push(duplicate);
        }
    }

    /// Removes and returns the noted duplicates of the route to `dst`.
    pub(crate) fn take_duplicates(&self, dst: &Subnet) -> Vec<DuplicateRoute> {
        let duplicates = &mut self.lock().duplicates;
        if duplicates.is_empty() { Vec::new() } else { duplicates.remove(dst).unwrap_or_default() }
    }

    /// Notes that all routes of this family were read, and forgets their old duplicates. The caller
    /// then notes the new ones.
    pub(crate) fn note_dump(&self, family: Family) {
        let mut inner = self.lock();
        inner.read[family] = Some(());
        inner.duplicates.retain(|dst, _| dst.family() != family);
    }

    /// Whether a route [uses a nexthop object and has
    /// metrics](RouteMessage::has_metrics_by_nexthop), so that requests for our routes need a
    /// metrics attribute.
    pub(crate) fn has_metrics(&self) -> bool {
        self.lock().metrics
    }

    /// Whether there may be a last-resort route of ours to `dst`.
    pub(crate) fn may_have_last_resort(&self, dst: &Subnet) -> bool {
        let Inner { read, last_resorts, .. } = &*self.lock();
        last_resorts.contains(dst) || last_resorts.len() > MOST || read[dst.family()].is_none()
    }

    /// Notes an entry that was read, if it is a special FDB entry.
    pub(crate) fn note_entry(&self, entry: &NeighMessage) {
        if let Some((mac, why)) = entry.special() {
            let Inner { special, forgotten, .. } = &mut *self.lock();
            // The next snapshot finds the entries again.
            if special.len() == MOST {
                special.clear();
                *forgotten = true;
            }
            special.insert((entry.index, mac), why);
        }
    }

    /// Forgets the FDB and proxy entries of a device. The caller reads them again.
    pub(crate) fn forget_entries(&self, index: u32) {
        let mut inner = self.lock();
        inner.special.retain(|(device, _), _| *device != index);
        inner.proxies.retain(|proxy| proxy.index != index);
    }

    /// Notes a proxy entry on a device.
    pub(crate) fn note_proxy(&self, proxy: ProxyEntry) {
        let proxies = &mut self.lock().proxies;
        if proxies.len() < MOST {
            proxies.insert(proxy);
        }
    }

    /// Whether there is a proxy entry for the address. The entry is then forgotten, because the
    /// caller deletes it.
    pub(crate) fn take_proxy(&self, index: u32, address: IpAddr) -> bool {
        let proxy = ProxyEntry { index, address };
        let mut inner = self.lock();
        let is_noted = !inner.proxies.is_empty() && inner.proxies.remove(&proxy);
        if is_noted && inner.deleted_proxies.len() < MOST {
            inner.deleted_proxies.insert(proxy);
        }
        is_noted
    }

    /// The proxy entries that were deleted since the last call. If one of them exists again, it is
    /// new.
    pub(crate) fn take_deleted_proxies(&self) -> BTreeSet<ProxyEntry> {
        std::mem::take(&mut self.lock().deleted_proxies)
    }

    /// Why the FDB entry is special, or `None` if it is not. The entry is then forgotten, because
    /// the caller deletes or replaces it.
    pub(crate) fn take_special(&self, index: u32, mac: MacAddr) -> Option<Special> {
        let Inner { special, forgotten, .. } = &mut *self.lock();
        let known = if special.is_empty() { None } else { special.remove(&(index, mac)) };
        known.or_else(|| forgotten.then_some(Special::Attributes))
    }

    /// Locks the values. They are consistent even if another thread panicked with the lock.
    fn lock(&self) -> MutexGuard<'_, Inner> {
        lock(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use neli::consts::nl::NlmF;

    use super::*;
    use crate::codec::{neigh, route};
    use crate::transport::wire::Message;

    fn duplicate(n: u16) -> DuplicateRoute {
        let [high, low] = n.to_be_bytes();
        // `struct rtmsg` of a /24 in the main table, and RTA_DST.
        let payload =
            [2, 24, 0, 0, 254, ROUTE_PROTOCOL, 0, 1, 0, 0, 0, 0, 8, 0, 1, 0, 10, high, low, 0];
        let message =
            Message { kind: 24, flags: NlmF::empty(), sequence: 1, port: 0, payload: &payload };
        DuplicateRoute { found: route::read(&message).unwrap(), goes: Goes::WithOurs }
    }

    #[test]
    fn duplicates_are_remembered_once_and_within_bounds() {
        let dst = |n| duplicate(n).found.dst;
        let foreign = ForeignRoutes::default();
        for n in 0..2 * MOST as u16 {
            foreign.note_duplicate(duplicate(n));
        }
        foreign.note_duplicate(duplicate(0));
        for protocol in 0..2 * MOST_DUPLICATES as u8 {
            let mut other = duplicate(0);
            other.found.protocol = protocol;
            foreign.note_duplicate(other);
        }
        assert_eq!(foreign.lock().duplicates.len(), MOST, "the limit of destinations");
        assert_eq!(foreign.take_duplicates(&dst(0)).len(), MOST_DUPLICATES, "the limit of one");
        assert_eq!(foreign.take_duplicates(&dst(0)).len(), 0, "they were taken");
        foreign.note_dump(Family::V6);
        assert_eq!(foreign.take_duplicates(&dst(1)).len(), 1, "the other family was not read");
        foreign.note_dump(Family::V4);
        assert_eq!(foreign.take_duplicates(&dst(2)).len(), 0, "all were read since");
    }

    #[test]
    fn special_entries_are_remembered_until_they_are_taken_or_read_again() {
        // `struct ndmsg` of a permanent FDB entry, NDA_LLADDR, and NDA_NH_ID or an attribute that
        // is ignored.
        let entry = |index: u8, n: u16, by_nexthop: bool| {
            let [high, low] = n.to_be_bytes();
            let mut payload = vec![
                7, 0, 0, 0, index, 0, 0, 0, 0x80, 0, 2, 0, 10, 0, 2, 0, 2, 0, 0, 0, high, low, 0, 0,
            ];
            payload.extend([8, 0, if by_nexthop { 13 } else { 3 }, 0, 7, 0, 0, 0]);
            let message =
                Message { kind: 28, flags: NlmF::empty(), sequence: 1, port: 0, payload: &payload };
            neigh::read(&message).unwrap()
        };
        let mac = |n: u16| MacAddr([2, 0, 0, 0, n.to_be_bytes()[0], n.to_be_bytes()[1]]);
        let foreign = ForeignRoutes::default();
        foreign.note_entry(&entry(5, 1, false));
        assert_eq!(foreign.take_special(5, mac(1)), None, "it uses no nexthop object");
        for (index, n) in [(5, 1), (5, 2), (6, 1), (6, 2)] {
            foreign.note_entry(&entry(index, n, true));
        }
        assert_eq!(foreign.take_special(5, mac(1)), Some(Special::ByNexthop));
        assert_eq!(foreign.take_special(5, mac(1)), None, "only once");
        foreign.forget_entries(5);
        assert_eq!(foreign.take_special(5, mac(2)), None, "it was forgotten");
        assert_eq!(
            foreign.take_special(6, mac(1)),
            Some(Special::ByNexthop),
            "entries of the other device were not forgotten"
        );
        for n in 0..=MOST as u16 {
            foreign.note_entry(&entry(5, n, true));
            assert!(foreign.lock().special.len() <= MOST);
        }
        assert_eq!(
            foreign.take_special(5, mac(MOST as u16)),
            Some(Special::ByNexthop),
            "the last one is remembered"
        );
        assert_eq!(
            foreign.take_special(5, mac(0)),
            Some(Special::Attributes),
            "any other entry may be special"
        );
    }

    #[test]
    fn a_last_resort_route_is_expected_if_one_was_noted_or_nothing_was_read() {
        let foreign = ForeignRoutes::default();
        let dst = |n: u32| Subnet::new([10, (n >> 8) as u8, n as u8, 0].into(), 24).unwrap();
        assert!(foreign.may_have_last_resort(&dst(0)), "no routes were read");
        foreign.note_last_resort(dst(0));
        foreign.note_dump(Family::V4);
        assert!(foreign.may_have_last_resort(&dst(0)) && !foreign.may_have_last_resort(&dst(1)));
        assert!(
            foreign.may_have_last_resort(&"fd00::/64".parse().unwrap()),
            "the other family was not read"
        );
        for n in 0..=2 * MOST as u32 {
            foreign.note_last_resort(dst(n));
        }
        assert!(foreign.may_have_last_resort(&dst(3 * MOST as u32)), "the set is incomplete");
        assert_eq!(foreign.lock().last_resorts.len(), MOST + 1, "the limit");
    }
}
