//! Routes and forwarding entries of other programs that require extra requests when flannel's are
//! changed.
//!
//! The extra requests take a fifth of a route's time, and almost no host needs them. So they are
//! sent only where a snapshot or an event showed such an entry. If it is noted too late, the next
//! snapshot reports an inexact route, which is put again.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use flannel_core::Subnet;
use flannel_core::address::{Dual, Family};
use flannel_core::kernel::ROUTE_PROTOCOL;
use flannel_core::object::MacAddr;

use crate::codec::fdb::Special;
use crate::codec::neigh::NeighMessage;
use crate::codec::route::RouteMessage;

/// Destinations that are remembered at most, because other programs decide about their number.
const MOST: usize = 1024;
/// Duplicates of one route that are remembered at most. The next snapshot finds the others.
const MOST_DUPLICATES: usize = 8;

/// The known entries. Clones share them.
#[derive(Debug, Clone, Default)]
pub(crate) struct ForeignRoutes(Arc<Mutex<Inner>>);

#[derive(Debug, Default)]
struct Inner {
    /// There is or was a route by a nexthop object that has metrics.
    metrics: bool,
    /// All routes of these families were read once.
    read: Dual<()>,
    /// Destinations that have or had a last-resort route of ours; incomplete if more than [`MOST`].
    last_resorts: BTreeSet<Subnet>,
    /// Routes to the destinations of our routes, as of the last snapshot, that our requests neither
    /// replace nor delete.
    duplicates: BTreeMap<Subnet, Vec<DuplicateRoute>>,
    /// The [special](NeighMessage::special) forwarding entries, by device index and MAC address.
    special: BTreeMap<(u32, MacAddr), Special>,
    /// More than [`MOST`] were found, so any entry may be special.
    forgotten: bool,
}

/// Another route to the destination of one of ours.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DuplicateRoute {
    pub(crate) found: RouteMessage,
    /// It is ours, is behind the other one, and is deleted together with it. A foreign one is in
    /// front of ours and is deleted only when ours is put.
    pub(crate) is_ours: bool,
}

impl ForeignRoutes {
    /// Notes a route that was read. Routes in other tables are ignored.
    pub(crate) fn note_route(&self, route: &RouteMessage) {
        if !route.main {
            return;
        }
        if route.has_metrics_by_nexthop() {
            self.lock().metrics = true;
        }
        if route.last_resort && route.protocol == ROUTE_PROTOCOL {
            self.note_last_resort(route.dst);
        }
    }

    /// Notes that there is or was a last-resort route.
    pub(crate) fn note_last_resort(&self, dst: Subnet) {
        let there = &mut self.lock().last_resorts;
        if there.len() <= MOST {
            there.insert(dst);
        }
    }

    /// Notes a duplicate of a route of ours.
    pub(crate) fn note_duplicate(&self, duplicate: DuplicateRoute) {
        let (dst, duplicates) = (duplicate.found.dst, &mut self.lock().duplicates);
        if duplicates.len() < MOST || duplicates.contains_key(&dst) {
            let there = duplicates.entry(dst).or_default();
            if there.len() < MOST_DUPLICATES {
                there.push(duplicate);
            }
        }
    }

    /// Removes and returns the duplicates of a route.
    pub(crate) fn take_duplicates(&self, dst: &Subnet) -> Vec<DuplicateRoute> {
        let duplicates = &mut self.lock().duplicates;
        if duplicates.is_empty() { Vec::new() } else { duplicates.remove(dst).unwrap_or_default() }
    }

    /// Notes that all routes of this family were read. Their duplicates are noted next.
    pub(crate) fn note_dump(&self, family: Family) {
        let mut inner = self.lock();
        inner.read[family] = Some(());
        inner.duplicates.retain(|dst, _| dst.family() != family);
    }

    /// A route by a nexthop object [has metrics](RouteMessage::has_metrics_by_nexthop), so requests
    /// for our routes need the metrics attribute.
    pub(crate) fn has_metrics(&self) -> bool {
        self.lock().metrics
    }

    /// There may be a last-resort route.
    pub(crate) fn may_have_last_resort(&self, dst: &Subnet) -> bool {
        let Inner { read, last_resorts, .. } = &*self.lock();
        last_resorts.contains(dst) || last_resorts.len() > MOST || read[dst.family()].is_none()
    }

    /// Notes a neighbour or forwarding entry that was read.
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

    /// Removes the forwarding entries of a device before they are read again.
    pub(crate) fn forget_entries(&self, index: u32) {
        self.lock().special.retain(|(device, _), _| *device != index);
    }

    /// Removes and returns the special attribute of a forwarding entry.
    pub(crate) fn take_special(&self, index: u32, mac: MacAddr) -> Option<Special> {
        let Inner { special, forgotten, .. } = &mut *self.lock();
        let known = if special.is_empty() { None } else { special.remove(&(index, mac)) };
        known.or_else(|| forgotten.then_some(Special::Attributes))
    }

    /// A panic while the lock was held leaves consistent values.
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
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
        // struct rtmsg: a /24 of the main table; and RTA_DST.
        let payload =
            [2, 24, 0, 0, 254, ROUTE_PROTOCOL, 0, 1, 0, 0, 0, 0, 8, 0, 1, 0, 10, high, low, 0];
        let message =
            Message { kind: 24, flags: NlmF::empty(), sequence: 1, port: 0, payload: &payload };
        DuplicateRoute { found: route::read(&message).unwrap(), is_ours: true }
    }

    #[test]
    fn duplicates_are_remembered_once_and_within_bounds() {
        let (foreign, dst) = (ForeignRoutes::default(), |n| duplicate(n).found.dst);
        for n in 0..2 * MOST as u16 {
            foreign.note_duplicate(duplicate(n));
        }
        (0..2 * MOST_DUPLICATES).for_each(|_| foreign.note_duplicate(duplicate(0)));
        assert_eq!(foreign.lock().duplicates.len(), MOST, "no more destinations");
        assert_eq!(foreign.take_duplicates(&dst(0)).len(), MOST_DUPLICATES, "no more of one");
        assert_eq!(foreign.take_duplicates(&dst(0)).len(), 0, "they were taken");
        foreign.note_dump(Family::V6);
        assert_eq!(foreign.take_duplicates(&dst(1)).len(), 1, "the other family was not read");
        foreign.note_dump(Family::V4);
        assert_eq!(foreign.take_duplicates(&dst(2)).len(), 0, "all were read since");
    }

    #[test]
    fn special_entries_are_remembered_until_they_are_taken_or_read_again() {
        // struct ndmsg: a permanent forwarding entry; NDA_LLADDR; and NDA_NH_ID, or no such
        // attribute.
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
        assert_eq!(foreign.take_special(5, mac(1)), None, "it leads to an address");
        for (index, n) in [(5, 1), (5, 2), (6, 1), (6, 2)] {
            foreign.note_entry(&entry(index, n, true));
        }
        assert_eq!(foreign.take_special(5, mac(1)), Some(Special::ByNexthop));
        assert_eq!(foreign.take_special(5, mac(1)), None, "only once");
        foreign.forget_entries(5);
        assert_eq!(foreign.take_special(5, mac(2)), None, "it is not there any more");
        assert_eq!(
            foreign.take_special(6, mac(1)),
            Some(Special::ByNexthop),
            "that device was not looked at"
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
            "of others it is not known"
        );
    }

    #[test]
    fn a_last_resort_is_expected_where_one_was_noted_or_nothing_was_read() {
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
        assert!(foreign.may_have_last_resort(&dst(3 * MOST as u32)), "there are too many");
        assert_eq!(foreign.lock().last_resorts.len(), MOST + 1, "nor are more remembered");
    }
}
