//! What was foreign of the routes and forwarding entries that are there, as far as ours must be put differently because of it.
//!
//! The one thing to know: each precaution costs a fifth of the time that a route takes, and almost no host needs any of them. So
//! they are taken where there is a reason. What is foreign too late is found with the next snapshot, as a route that is not quite as
//! described, and put again.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use flannel_core::Subnet;
use flannel_core::address::{Dual, Family};
use flannel_core::kernel::ROUTE_PROTOCOL;
use flannel_core::object::MacAddr;

use crate::codec::neigh::NeighMessage;
use crate::codec::route::RouteMessage;

/// More destinations than this are not told apart: it takes no memory that others decide about.
const MOST: usize = 1024;
/// Of the doubles of one route no more than this are remembered; the rest is found when these are gone.
const MOST_DOUBLES: usize = 8;

/// Clones are of one.
#[derive(Debug, Clone, Default)]
pub(crate) struct ForeignRoutes(Arc<Mutex<Inner>>);

#[derive(Debug, Default)]
struct Inner {
    metrics: bool,
    /// All routes of these families were read once.
    read: Dual<()>,
    /// Where one of last resort of ours is or was; not all of them if they are more than [`MOST`].
    last_resorts: BTreeSet<Subnet>,
    /// Routes to the same destinations as some of ours that no put of those replaces, when all were read last, and that can be told
    /// from them.
    doubles: BTreeMap<Subnet, Vec<Double>>,
    /// The [odd](NeighMessage::odd) forwarding entries, by the index of their device.
    in_the_way: BTreeMap<(u32, MacAddr), Odd>,
    /// There were more of them than [`MOST`]: any may be one.
    forgotten: bool,
}

/// Why a forwarding entry does not go where a deletion says where it leads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Odd {
    /// It has a port, a VNI or a device of its own.
    Alien,
    /// It leads to nexthop objects, and must go before ours can be put, too.
    Led,
}

/// A route beside one of ours.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Double {
    pub(crate) told: RouteMessage,
    /// It stands behind the other, and goes with that, too. Somebody else's stands before ours, and only gives way.
    pub(crate) is_ours: bool,
}

impl ForeignRoutes {
    /// Takes note of a route in the main table that was read or told of.
    pub(crate) fn see(&self, route: &RouteMessage) {
        if route.has_metrics_by_nexthop() {
            self.lock().metrics = true;
        }
        if route.last_resort && route.protocol == ROUTE_PROTOCOL {
            self.see_last_resort(route.dst);
        }
    }

    /// One of last resort is or was there.
    pub(crate) fn see_last_resort(&self, dst: Subnet) {
        let there = &mut self.lock().last_resorts;
        if there.len() <= MOST {
            there.insert(dst);
        }
    }

    /// A route of ours has a double.
    pub(crate) fn see_double(&self, double: Double) {
        let (dst, doubles) = (double.told.dst, &mut self.lock().doubles);
        if doubles.len() < MOST || doubles.contains_key(&dst) {
            let there = doubles.entry(dst).or_default();
            if there.len() < MOST_DOUBLES {
                there.push(double);
            }
        }
    }

    /// The doubles of a route, which are forgotten with the call.
    pub(crate) fn take_doubles(&self, dst: &Subnet) -> Vec<Double> {
        let doubles = &mut self.lock().doubles;
        if doubles.is_empty() { Vec::new() } else { doubles.remove(dst).unwrap_or_default() }
    }

    /// All routes of this family were foreign; their doubles follow.
    pub(crate) fn see_all(&self, family: Family) {
        let mut inner = self.lock();
        inner.read[family] = Some(());
        inner.doubles.retain(|dst, _| dst.family() != family);
    }

    /// There is or was a route that [has metrics](RouteMessage::has_metrics_by_nexthop) which ours must say that they have not.
    pub(crate) fn has_metrics(&self) -> bool {
        self.lock().metrics
    }

    /// One of last resort may be there.
    pub(crate) fn may_have_last_resort(&self, dst: &Subnet) -> bool {
        let Inner { read, last_resorts, .. } = &*self.lock();
        last_resorts.contains(dst) || last_resorts.len() > MOST || read[dst.family()].is_none()
    }

    /// Takes note of a neighbour or a forwarding entry that was read or told of.
    pub(crate) fn see_entry(&self, entry: &NeighMessage) {
        if let Some((mac, odd)) = entry.odd() {
            let Inner { in_the_way, forgotten, .. } = &mut *self.lock();
            // Whatever is forgotten is found again with the next snapshot, but for what is on devices that are gone.
            if in_the_way.len() == MOST {
                in_the_way.clear();
                *forgotten = true;
            }
            in_the_way.insert((entry.index, mac), odd);
        }
    }

    /// All forwarding entries of this device are read next.
    pub(crate) fn look_anew(&self, index: u32) {
        self.lock().in_the_way.retain(|(device, _), _| *device != index);
    }

    /// Whether a forwarding entry is odd; asked only once.
    pub(crate) fn take_in_the_way(&self, index: u32, mac: MacAddr) -> Option<Odd> {
        let Inner { in_the_way, forgotten, .. } = &mut *self.lock();
        let known = if in_the_way.is_empty() { None } else { in_the_way.remove(&(index, mac)) };
        known.or_else(|| forgotten.then_some(Odd::Alien))
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
        Double { told: route::read(&message).unwrap(), is_ours: true }
    }

    #[test]
    fn doubles_are_remembered_once_and_within_bounds() {
        let (foreign, dst) = (ForeignRoutes::default(), |n| double(n).told.dst);
        for n in 0..2 * MOST as u16 {
            foreign.see_double(double(n));
        }
        (0..2 * MOST_DOUBLES).for_each(|_| foreign.see_double(double(0)));
        assert_eq!(foreign.lock().doubles.len(), MOST, "no more destinations");
        assert_eq!(foreign.take_doubles(&dst(0)).len(), MOST_DOUBLES, "no more of one");
        assert_eq!(foreign.take_doubles(&dst(0)).len(), 0, "they were taken");
        foreign.see_all(Family::V6);
        assert_eq!(
            foreign.take_doubles(&dst(1)).len(),
            1,
            "of the other family nothing is known anew"
        );
        foreign.see_all(Family::V4);
        assert_eq!(foreign.take_doubles(&dst(2)).len(), 0, "all were read since");
    }

    #[test]
    fn what_is_in_the_way_is_remembered_until_it_is_taken_or_looked_for_anew() {
        // struct ndmsg: a permanent forwarding entry; NDA_LLADDR; and NDA_NH_ID, or no such attribute.
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
        foreign.see_entry(&entry(5, 1, false));
        assert_eq!(foreign.take_in_the_way(5, mac(1)), None, "it leads to an address");
        for (index, n) in [(5, 1), (5, 2), (6, 1), (6, 2)] {
            foreign.see_entry(&entry(index, n, true));
        }
        assert_eq!(foreign.take_in_the_way(5, mac(1)), Some(Odd::Led));
        assert_eq!(foreign.take_in_the_way(5, mac(1)), None, "only once");
        foreign.look_anew(5);
        assert_eq!(foreign.take_in_the_way(5, mac(2)), None, "it is not there any more");
        assert_eq!(
            foreign.take_in_the_way(6, mac(1)),
            Some(Odd::Led),
            "that device was not looked at"
        );
        for n in 0..=MOST as u16 {
            foreign.see_entry(&entry(5, n, true));
            assert!(foreign.lock().in_the_way.len() <= MOST);
        }
        assert_eq!(
            foreign.take_in_the_way(5, mac(MOST as u16)),
            Some(Odd::Led),
            "the last one is remembered"
        );
        assert_eq!(
            foreign.take_in_the_way(5, mac(0)),
            Some(Odd::Alien),
            "of others it is not known"
        );
    }

    #[test]
    fn a_last_resort_is_reckoned_with_where_one_was_seen_or_nobody_has_looked() {
        let foreign = ForeignRoutes::default();
        let dst = |n: u32| Subnet::new([10, (n >> 8) as u8, n as u8, 0].into(), 24).unwrap();
        assert!(foreign.may_have_last_resort(&dst(0)), "nobody has looked");
        foreign.see_last_resort(dst(0));
        foreign.see_all(Family::V4);
        assert!(foreign.may_have_last_resort(&dst(0)) && !foreign.may_have_last_resort(&dst(1)));
        assert!(
            foreign.may_have_last_resort(&"fd00::/64".parse().unwrap()),
            "of the other family nobody has"
        );
        for n in 0..=2 * MOST as u32 {
            foreign.see_last_resort(dst(n));
        }
        assert!(foreign.may_have_last_resort(&dst(3 * MOST as u32)), "there are too many");
        assert_eq!(foreign.lock().last_resorts.len(), MOST + 1, "nor are more remembered");
    }
}
