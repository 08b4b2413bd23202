//! Writes: changes that are due go to the kernel, batch by batch.

use std::ops::Bound::{Excluded, Unbounded};
use std::time::Duration;

use tokio::time::Instant;

use super::desired::is_put_last;
use super::table::{Progress, Row};
use super::{Actual, Cause, Engine};
use crate::gated_kernel::{Closed, GatedKernel};
use flannel_core::Subnet;
use flannel_core::address::Family;
use flannel_core::kernel::{KernelError, KernelEvent, Outcome};
use flannel_core::object::{Change, Key, Nexthop, Object, Route, Via};
use flannel_core::status::Damage;

/// The length of a round, besides its snapshot and its new peers. A repair, a view or a question
/// waits for its end.
const ROUND: Duration = Duration::from_millis(16);

/// The changes of a batch, one call of `Kernel::apply`; [new peers](super::queue::SLICE) have their
/// own size. A stop waits for one batch: mostly a millisecond; 100 ms among thousands of routes
/// without nexthop objects, or when nexthop objects are deleted.
pub(crate) const BATCH: usize = 128;

impl Engine {
    /// Makes the kernel equal to the desired objects, except for changes that the kernel refuses.
    /// Ends after some [`ROUND`] and the time for new peers, even if [more](Self::is_unfinished) is
    /// due. Blocks.
    pub(crate) fn settle(&mut self, kernel: &GatedKernel, may_read: bool) -> Result<(), Closed> {
        self.unfinished = false;
        let may_read = may_read || !self.survey.links_tried.is_empty();
        let known = !self.survey.is_unread() || (may_read && self.read(&*kernel.kernel));
        if !known && self.survey.is_everything_unread() {
            return self.settle_unread(kernel);
        }
        self.put_links(kernel)?;
        if self.survey.is_everything_unread() {
            self.unfinished = true;
            return Ok(());
        }
        self.delete_stale_last(kernel)?;
        // The time of the snapshot does not count, so that each round applies changes.
        let end = Instant::now() + ROUND;
        self.put_due(kernel, end, |_, _| true)?;
        self.put_new_peers(kernel)?;
        // A slice of new peers can change objects of other peers. Some objects wait for all peers.
        self.put_due(kernel, end, |_, _| true)?;
        if !self.live {
            return Ok(());
        }
        if self.is_unfinished() {
            return self.delete_meanwhile(kernel);
        }
        let mut last = None;
        self.apply_while(kernel, end, |this| this.next_deletions(&mut last, |_| true))
    }

    /// Puts the objects that need no snapshot: changes of leases, and invalid objects if the kernel
    /// cannot be read at all.
    fn settle_unread(&mut self, kernel: &GatedKernel) -> Result<(), Closed> {
        // Only the first snapshot shows the ids of nexthop objects, and the objects in use.
        if self.survey.reads.done == 0 {
            return Ok(());
        }
        let blind = self.survey.error.is_some();
        self.put_due(kernel, Instant::now() + ROUND, |key, cause| {
            matches!(cause, Cause::Lease(_)) || (blind && !matches!(key, Key::Link(_)))
        })?;
        self.put_new_peers(kernel)
    }

    /// Puts the links that are due. Replacing a link may delete all objects on it: the next round
    /// takes in the events of this change, then reads the kernel again.
    fn put_links(&mut self, kernel: &GatedKernel) -> Result<(), Closed> {
        let is_link = |(key, _): &(&Key, &Row)| matches!(key, Key::Link(_));
        let due = self.table.puts(..).take_while(is_link);
        let links = due.filter_map(|(key, _)| self.desired.object(key));
        let links: Vec<Change> = links.map(Change::Put).collect();
        if links.is_empty() {
            return Ok(());
        }
        let keys: Vec<Key> = links.iter().map(|change| change.object().key()).collect();
        let mut failing = self.table.failing.clone();
        self.apply(kernel, links)?;
        if !keys.iter().all(|key| self.table.failing.contains_key(key)) {
            // Only a snapshot shows whether the kernel made the accepted changes.
            for (key, failure) in self.table.failing.iter() {
                failing.insert(*key, failure.clone());
            }
            self.table.failing = failing;
            self.survey.missing_links.clear();
            self.survey.invalidate_everything();
        }
        self.survey.links_tried.extend(keys);
        Ok(())
    }

    /// Deletes one batch of objects of departed peers although repairs are not finished, unless an
    /// object of a lease is still to be put.
    fn delete_meanwhile(&mut self, kernel: &GatedKernel) -> Result<(), Closed> {
        let by_lease = |cause: Cause| matches!(cause, Cause::Lease(_));
        let is_due =
            |key: &Key| self.desired.object(key).is_some_and(|object| !self.lacks_link(&object));
        let is_first = |(key, row): (&Key, &Row)| by_lease(row.cause) && is_due(key);
        if self.has_queue() || self.table.puts(..).any(is_first) {
            return Ok(());
        }
        let batch = self.next_deletions(&mut None, by_lease);
        if batch.is_empty() { Ok(()) } else { self.apply(kernel, batch) }
    }

    /// Deletes the objects that are [put last](flannel_core::object::Record::put_last) and are not
    /// desired, without waiting for complete leases. They are those of a run with another address
    /// or port, and may refuse the packets of all peers.
    fn delete_stale_last(&mut self, kernel: &GatedKernel) -> Result<(), Closed> {
        let stale = self.table.deletions(..).filter(|(_, object, _)| is_put_last(object));
        let stale: Vec<_> = stale.map(|(_, object, _)| Change::Delete(object.clone())).collect();
        if stale.is_empty() { Ok(()) } else { self.apply(kernel, stale) }
    }

    /// Whether objects are to be put that need not wait for more leases.
    pub(super) fn has_puts(&self) -> bool {
        let is_last = |(key, _): (&Key, &Row)| self.desired.last.contains(key);
        self.table.has_puts() && (self.live || !self.table.puts(..).all(is_last))
    }

    /// Whether an object has to wait: it would refuse what belongs to peers whose leases or records
    /// are still missing.
    fn must_wait(&self, key: &Key) -> bool {
        let last = &self.desired.last;
        let is_due = |(key, _): (&Key, &Row)| matches!(key, Key::Record(..)) && !last.contains(key);
        last.contains(key) && (!self.live || self.has_queue() || self.table.puts(..).any(is_due))
    }

    /// A route that is not put yet, or was refused, may still use the nexthop object that it had.
    /// The kernel would delete it too.
    fn may_be_used(&self, nexthop: &Nexthop) -> bool {
        let (table, failing) = (&self.table, &self.table.failing);
        match self.desired.route_by(nexthop.id) {
            Some(route) => table.is_put(&route) || failing.contains_key(&route),
            None => {
                let everything = Subnet::everything(Family::of(nexthop.gateway));
                let routes = Key::Route(everything)..=Key::Route(Subnet::host(everything.last()));
                table.puts(routes.clone()).next().is_some()
                    || failing.keys().any(|key| routes.contains(key))
            }
        }
    }

    /// Puts the due objects that are `meant` and whose links exist, until `end`. Changes of leases
    /// come first, because repairs may never end. Routes are repaired last: without nexthop objects
    /// they may take seconds, and without their nexthop objects the kernel refuses them.
    fn put_due(
        &mut self,
        kernel: &GatedKernel,
        end: Instant,
        meant: impl Fn(&Key, Cause) -> bool,
    ) -> Result<(), Closed> {
        let turn = |key: &Key, cause: Cause| match (key, cause) {
            (_, Cause::Lease(_)) => 0,
            (Key::Route(_), Cause::Repair(_)) => 2,
            (_, Cause::Repair(_)) => 1,
        };
        for now in 0..3 {
            let mut last = None;
            let meant = |key: &Key, cause: Cause| turn(key, cause) == now && meant(key, cause);
            self.apply_while(kernel, end, |this| this.next_puts(&mut last, meant))?;
        }
        Ok(())
    }

    /// The next batch of objects to put after `last` that are `meant`. A route takes along its
    /// nexthop object if that is due.
    fn next_puts(
        &self,
        last: &mut Option<Key>,
        meant: impl Fn(&Key, Cause) -> bool,
    ) -> Vec<Change> {
        let mut batch = Vec::new();
        for (key, row) in self.table.puts((last.map_or(Unbounded, Excluded), Unbounded)) {
            if batch.len() >= BATCH {
                break;
            }
            *last = Some(*key);
            let is_meant = meant(key, row.cause) && !self.must_wait(key);
            let wanted = is_meant.then(|| self.desired.object(key)).flatten();
            let Some(object) = wanted.filter(|object| !self.lacks_link(object)) else { continue };
            if let (Cause::Lease(_), Object::Route(Route { via: Via::Nexthop(id), .. })) =
                (row.cause, &object)
                && let Some(nexthop) = self.table.get(&Key::Nexthop(*id)).filter(|row| row.is_put())
                && matches!(nexthop.cause, Cause::Repair(_))
            {
                batch.extend(self.desired.object(&Key::Nexthop(*id)).map(Change::Put));
            }
            match (row.cause, key) {
                (Cause::Repair(Damage::Modification), Key::Nexthop(id)) => {
                    batch.extend(self.around(*id, object).into_iter().flatten().map(Change::Put));
                }
                _ => batch.push(Change::Put(object)),
            }
        }
        batch
    }

    /// The steps that repair a nexthop object in place: its route uses the gateway itself
    /// meanwhile. Linux walks its whole table for each replacement of an object with a route
    /// (`net.ipv4.nexthop_compat_mode`): three milliseconds with 50,000 routes.
    fn around(&self, id: u32, nexthop: Object) -> [Option<Object>; 3] {
        let route = self.desired.route_by(id);
        let plain = route.and_then(|route| self.desired.peers.object(&route));
        let by_nexthop = plain.as_ref().and_then(|plain| self.desired.object(&plain.key()));
        [plain, Some(nexthop), by_nexthop]
    }

    /// The next batch of objects to delete before `last` that are `meant`, in the order opposite to
    /// that of creation.
    fn next_deletions(&self, last: &mut Option<Key>, meant: impl Fn(Cause) -> bool) -> Vec<Change> {
        let is_used =
            |object: &Object| matches!(object, Object::Nexthop(it) if self.may_be_used(it));
        let due = self.table.deletions((Unbounded, last.map_or(Unbounded, Excluded)));
        let due = due.filter(|(_, object, cause)| meant(*cause) && !is_used(object)).take(BATCH);
        let batch: Vec<_> = due.map(|(_, object, _)| Change::Delete(object.clone())).collect();
        *last = batch.last().map(|change| change.object().key());
        batch
    }

    /// Whether the link of an object is missing. Such an object is not tried, so that the status
    /// shows one failure and not ten thousand.
    pub(super) fn lacks_link(&self, object: &Object) -> bool {
        let missing = &self.survey.missing_links;
        !missing.is_empty()
            && self.desired.link_of(object).is_some_and(|link| missing.contains(&link))
    }

    /// Applies the batches that `next` returns, one after the other. After `end` only the first one
    /// begins. Batches of later rounds are not computed, because there may be a thousand.
    fn apply_while(
        &mut self,
        kernel: &GatedKernel,
        end: Instant,
        mut next: impl FnMut(&Self) -> Vec<Change>,
    ) -> Result<(), Closed> {
        let mut first = true;
        while !self.unfinished {
            let batch = next(self);
            if batch.is_empty() {
                break;
            }
            if !std::mem::take(&mut first) && Instant::now() >= end {
                self.unfinished = true;
                break;
            }
            self.apply(kernel, batch)?;
        }
        Ok(())
    }

    fn apply(&mut self, kernel: &GatedKernel, changes: Vec<Change>) -> Result<(), Closed> {
        let changes = self.refuse_unowned(changes, None);
        if changes.is_empty() {
            return Ok(());
        }
        let outcomes = kernel.apply(&self.footprint, &changes)?;
        let now = Instant::now();
        for (change, outcome) in changes.iter().zip(outcomes) {
            // The outcome of an intermediate step is not the outcome of the desired object.
            let is_step =
                |object: &Object| self.desired.object(&object.key()).as_ref() != Some(object);
            if !matches!(change, Change::Put(object) if is_step(object)) {
                self.record(change, outcome, now, None);
            }
        }
        Ok(())
    }

    /// Refuses the puts of objects that the footprint does not own. A snapshot would not show them:
    /// they would be put again after each one, and stay in the kernel when they are not desired any
    /// more. Returns the other changes. `cause` is the cause for objects without a row.
    pub(super) fn refuse_unowned(
        &mut self,
        changes: Vec<Change>,
        cause: Option<Cause>,
    ) -> Vec<Change> {
        let is_unowned =
            |change: &Change| matches!(change, Change::Put(object) if !self.owns(object));
        let (unowned, owned): (Vec<_>, Vec<_>) = changes.into_iter().partition(is_unowned);
        for change in unowned {
            let error = KernelError::NotOwned(change.object().to_string());
            self.record(&change, Outcome::Failed(error), Instant::now(), cause);
        }
        owned
    }

    /// Whether the footprint owns an object that this network desires.
    pub(super) fn owns(&self, object: &Object) -> bool {
        // The device of a nexthop object is rarely needed, and costs a search.
        self.footprint.owns(object, object.link())
            || self.footprint.owns(object, self.desired.link_of(object))
    }

    /// Records the end of a change that was only started; `None` if the event is not such an end.
    pub(super) fn end_started(&mut self, event: &KernelEvent) -> Option<()> {
        if !self.table.has_started() {
            return None;
        }
        let key = event.key();
        let change = match &self.table.get(&key).filter(|row| row.is_started())?.actual {
            Actual::Present(object) => Change::Delete(object.clone()),
            _ => Change::Put(self.desired.object(&key)?),
        };
        let outcome = match (event, &change) {
            (KernelEvent::Failed(_, error), _) => Outcome::Failed(error.clone()),
            (KernelEvent::Present(object), Change::Put(want)) if object == want => Outcome::Done,
            (KernelEvent::Deleted(_), Change::Delete(_)) => Outcome::Done,
            _ => return None,
        };
        self.record(&change, outcome, Instant::now(), None);
        Some(())
    }

    /// Records the outcome of a change. `cause` is the cause for an object without a row, or `None`
    /// if the change went along with another one.
    pub(super) fn record(
        &mut self,
        change: &Change,
        outcome: Outcome,
        now: Instant,
        cause: Option<Cause>,
    ) {
        let object = change.object();
        let key = object.key();
        let (known, changed_by) =
            self.table.remove(&key).map(|row| (row.cause, row.changed_by)).unzip();
        let (cause, changed_by) = (known.or(cause), changed_by.flatten());
        match outcome {
            Outcome::Done => {}
            Outcome::Started => {
                let cause = cause.unwrap_or(Cause::Lease(None));
                return self.table.hold(change, cause, changed_by, Progress::Started);
            }
            Outcome::Failed(error) => {
                self.stats.0.refused += 1;
                let cause = cause.unwrap_or(Cause::Lease(None));
                let peer = self.desired.peer_of(&key);
                return self.table.refuse(change, cause, changed_by, peer, error);
            }
        }
        if let (Change::Delete(_), Key::Nexthop(id), Some(ids)) =
            (change, key, &mut self.desired.ids)
        {
            ids.release(id);
        }
        self.table.failing.remove(&key);
        if matches!(change, Change::Delete(_)) && self.desired.last.contains(&key) {
            // It made room for the desired object.
            let cause = cause.unwrap_or(Cause::Lease(None));
            self.table.insert(key, Row::new(Actual::Unknown, cause));
            return;
        }
        match cause {
            None => {}
            Some(Cause::Lease(arrived)) => {
                self.stats.applied(arrived.map(|arrived| now.saturating_duration_since(arrived)));
            }
            Some(Cause::Repair(damage)) => {
                let peer = self.desired.peer_of(&key);
                self.stats.repaired(object, damage, peer, changed_by.map(|by| *by));
            }
        }
    }
}
