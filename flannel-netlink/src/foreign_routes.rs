//! Routes and forwarding entries of others, as far as ours must be put differently because of them.
//!
//! Each precaution costs a fifth of the time that a route takes, and almost no host needs any of
//! them. So they are taken only where there is a reason. A reason that is noted too late shows in
//! the next snapshot as an inexact route, which is put again.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use flannel_core::Subnet;
use flannel_core::address::{Dual, Family};
use flannel_core::kernel::ROUTE_PROTOCOL;
use flannel_core::object::MacAddr;

use crate::codec::fdb::Special;
use crate::codec::neigh::NeighMessage;
use crate::codec::route::RouteMessage;

/// No more destinations than this are remembered, because others decide about their number.
const MOST: usize = 1024;
/// Of the doubles of one route no more than this are remembered. A snapshot finds the others when
/// these are gone.
const MOST_DOUBLES: usize = 8;

/// What is known of them; clones share it.
#[derive(Debug, Clone, Default)]
pub(crate) struct ForeignRoutes(Arc<Mutex<Inner>>);

#[derive(Debug, Default)]
struct Inner {
    /// There is or was a route by a nexthop object that has metrics.
    metrics: bool,
    /// All routes of these families were read once.
    read: Dual<()>,
    /// Destinations that have or had a route of last resort of ours; not all if they are more than
    /// [`MOST`].
    last_resorts: BTreeSet<Subnet>,
    /// Routes to the destinations of ours that no put of ours replaces, and that are distinct from
    /// ours, as of the last snapshot.
    doubles: BTreeMap<Subnet, Vec<Double>>,
    /// The [special](NeighMessage::special) forwarding entries, by the index of their device.
    special: BTreeMap<(u32, MacAddr), Special>,
    /// There were more of them than [`MOST`]: any may be one.
    forgotten: bool,
}

/// A route beside one of ours.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Double {
    pub(crate) found: RouteMessage,
    /// It is behind the other route, and is deleted with that one as well. A route of others is
    /// before ours, and is deleted only for it to be put.
    pub(crate) is_ours: bool,
}

impl ForeignRoutes {
    /// Notes a route that was read; routes of other tables do not matter.
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

    /// Notes that a route of last resort is or was there.
    pub(crate) fn note_last_resort(&self, dst: Subnet) {
        let there = &mut self.lock().last_resorts;
        if there.len() <= MOST {
            there.insert(dst);
        }
    }

    /// Notes a double of a route of ours.
    pub(crate) fn note_double(&self, double: Double) {
        let (dst, doubles) = (double.found.dst, &mut self.lock().doubles);
        if doubles.len() < MOST || doubles.contains_key(&dst) {
            let there = doubles.entry(dst).or_default();
            if there.len() < MOST_DOUBLES {
                there.push(double);
            }
        }
    }

    /// Forgets the doubles of a route and returns them.
    pub(crate) fn take_doubles(&self, dst: &Subnet) -> Vec<Double> {
        let doubles = &mut self.lock().doubles;
        if doubles.is_empty() { Vec::new() } else { doubles.remove(dst).unwrap_or_default() }
    }

    /// Notes that all routes of this family were read; their doubles follow.
    pub(crate) fn note_dump(&self, family: Family) {
        let mut inner = self.lock();
        inner.read[family] = Some(());
        inner.doubles.retain(|dst, _| dst.family() != family);
    }

    /// There is or was a route that [has metrics](RouteMessage::has_metrics_by_nexthop), so that
    /// requests for ours must have the metrics attribute.
    pub(crate) fn has_metrics(&self) -> bool {
        self.lock().metrics
    }

    /// A route of last resort may be there.
    pub(crate) fn may_have_last_resort(&self, dst: &Subnet) -> bool {
        let Inner { read, last_resorts, .. } = &*self.lock();
        last_resorts.contains(dst) || last_resorts.len() > MOST || read[dst.family()].is_none()
    }

    /// Notes a neighbour or a forwarding entry that was read.
    pub(crate) fn note_entry(&self, entry: &NeighMessage) {
        if let Some((mac, why)) = entry.special() {
            let Inner { special, forgotten, .. } = &mut *self.lock();
            // The next snapshot finds forgotten entries again, but for those of devices that are
            // gone.
            if special.len() == MOST {
                special.clear();
                *forgotten = true;
            }
            special.insert((entry.index, mac), why);
        }
    }

    /// Forgets the forwarding entries of a device, which are read next.
    pub(crate) fn forget_entries(&self, index: u32) {
        self.lock().special.retain(|(device, _), _| *device != index);
    }

    /// Forgets whether a forwarding entry is special, and returns it.
    pub(crate) fn take_special(&self, index: u32, mac: MacAddr) -> Option<Special> {
        let Inner { special, forgotten, .. } = &mut *self.lock();
        let known = if special.is_empty() { None } else { special.remove(&(index, mac)) };
        known.or_else(|| forgotten.then_some(Special::Attributes))
    }

    /// A panic while the lock was held leaves nothing half done.
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use neli::consts::nl::NlmF;

    use super::*;
    use crate::codec::{neigh, route};
    use crate::wire::Message;

    fn double(n: u16) -> Double {
        let [high, low] = n.to_be_bytes();
        // struct rtmsg: a /24 of the main table; and RTA_DST.
        let payload =
            [2, 24, 0, 0, 254, ROUTE_PROTOCOL, 0, 1, 0, 0, 0, 0, 8, 0, 1, 0, 10, high, low, 0];
        let message =
            Message { kind: 24, flags: NlmF::empty(), sequence: 1, port: 0, payload: &payload };
        Double { found: route::read(&message).unwrap(), is_ours: true }
    }

    #[test]
    fn doubles_are_remembered_once_and_within_bounds() {
        let (foreign, dst) = (ForeignRoutes::default(), |n| double(n).found.dst);
        for n in 0..2 * MOST as u16 {
            foreign.note_double(double(n));
        }
        (0..2 * MOST_DOUBLES).for_each(|_| foreign.note_double(double(0)));
        assert_eq!(foreign.lock().doubles.len(), MOST, "no more destinations");
        assert_eq!(foreign.take_doubles(&dst(0)).len(), MOST_DOUBLES, "no more of one");
        assert_eq!(foreign.take_doubles(&dst(0)).len(), 0, "they were taken");
        foreign.note_dump(Family::V6);
        assert_eq!(
            foreign.take_doubles(&dst(1)).len(),
            1,
            "of the other family nothing is known anew"
        );
        foreign.note_dump(Family::V4);
        assert_eq!(foreign.take_doubles(&dst(2)).len(), 0, "all were read since");
    }

    #[test]
    fn odd_entries_are_remembered_until_they_are_taken_or_read_again() {
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
        assert!(foreign.may_have_last_resort(&dst(0)), "nobody has looked");
        foreign.note_last_resort(dst(0));
        foreign.note_dump(Family::V4);
        assert!(foreign.may_have_last_resort(&dst(0)) && !foreign.may_have_last_resort(&dst(1)));
        assert!(
            foreign.may_have_last_resort(&"fd00::/64".parse().unwrap()),
            "of the other family nobody has"
        );
        for n in 0..=2 * MOST as u32 {
            foreign.note_last_resort(dst(n));
        }
        assert!(foreign.may_have_last_resort(&dst(3 * MOST as u32)), "there are too many");
        assert_eq!(foreign.lock().last_resorts.len(), MOST + 1, "nor are more remembered");
    }
}
