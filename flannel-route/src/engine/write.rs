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

/// The time budget of a round, excluding its snapshot and its new peers. A repair, a view or a
/// question waits for the end of the round.
const ROUND: Duration = Duration::from_millis(16);

/// The number of changes in a batch, which is one call of `Kernel::apply`. Batches of
/// [new peers](super::queue::SLICE) have another size. A stop waits for one batch. That mostly
/// takes a millisecond, but up to 100 ms with thousands of routes without nexthop objects, or if
/// nexthop objects are deleted.
pub(crate) const BATCH: usize = 128;

/// The turns of puts in a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Turn {
    Leases,
    /// Repairs of other objects than routes.
    Repairs,
    RepairsOfRoutes,
}

impl Turn {
    fn of(key: &Key, cause: Cause) -> Self {
        match (key, cause) {
            (_, Cause::Lease(_)) => Self::Leases,
            (Key::Route(_), Cause::Repair(_)) => Self::RepairsOfRoutes,
            (_, Cause::Repair(_)) => Self::Repairs,
        }
    }
}

impl Engine {
    /// Makes the kernel equal to the desired objects, except for changes that the kernel refuses.
    /// Ends after about [`ROUND`] and the time for new peers, even if [more](Self::is_unfinished)
    /// is due. Blocks.
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
        let due = self.table.puts(..).map(|(key, _)| key);
        let due = due.take_while(|key| matches!(key, Key::Link(_)));
        let links = due.filter_map(|key| self.desired.object(key));
        let links: Vec<Change> = links.map(Change::Put).collect();
        if links.is_empty() {
            return Ok(());
        }
        let keys: Vec<Key> = links.iter().map(|change| change.object().key()).collect();
        let failures = self.table.failures().clone();
        self.apply(kernel, links)?;
        let accepted = keys.iter().filter(|key| !self.table.is_failing(key));
        let accepted: Vec<Key> = accepted.copied().collect();
        if !accepted.is_empty() {
            // Only a snapshot shows whether the kernel made the accepted changes.
            for key in accepted {
                if let Some(failure) = failures.get(&key) {
                    self.table.keep_failure(key, failure.clone());
                }
            }
            self.survey.missing_links.clear();
            self.survey.invalidate_everything();
        }
        self.survey.links_tried.extend(keys);
        Ok(())
    }

    /// Deletes one batch of objects of departed peers although repairs are not finished, unless an
    /// object of a lease is still to be put.
    fn delete_meanwhile(&mut self, kernel: &GatedKernel) -> Result<(), Closed> {
        if self.has_queue() || self.has_puts_of_leases() {
            return Ok(());
        }
        let batch = self.next_deletions(&mut None, |cause| matches!(cause, Cause::Lease(_)));
        if batch.is_empty() { Ok(()) } else { self.apply(kernel, batch) }
    }

    /// Whether an object that a lease has changed can be put.
    fn has_puts_of_leases(&self) -> bool {
        self.table.puts(..).filter(|(_, row)| matches!(row.cause, Cause::Lease(_))).any(
            |(key, _)| self.desired.object(key).is_some_and(|object| !self.lacks_link(&object)),
        )
    }

    /// Deletes the objects that are [put last](flannel_core::object::Record::put_last) and are not
    /// desired, without waiting for complete leases. An earlier run with another address or port
    /// left them, and they may refuse the packets of all peers.
    fn delete_stale_last(&mut self, kernel: &GatedKernel) -> Result<(), Closed> {
        let objects = self.table.deletions(..).map(|deletion| deletion.object);
        let stale = objects.filter(|object| is_put_last(object));
        let stale: Vec<_> = stale.cloned().map(Change::Delete).collect();
        if stale.is_empty() { Ok(()) } else { self.apply(kernel, stale) }
    }

    /// Whether objects are to be put that need not wait for more leases.
    pub(super) fn has_puts(&self) -> bool {
        self.table.has_puts()
            && (self.live || self.table.puts(..).any(|(key, _)| !self.desired.last.contains(key)))
    }

    /// Whether a put has to wait for other puts, because the object would refuse the packets of
    /// peers whose leases or records are still missing.
    fn must_wait(&self, key: &Key) -> bool {
        let last = &self.desired.last;
        if !last.contains(key) {
            return false;
        }
        let mut puts = self.table.puts(..).map(|(key, _)| key);
        !self.live
            || self.has_queue()
            || puts.any(|key| matches!(key, Key::Record(..)) && !last.contains(key))
    }

    /// Whether a route may still use a nexthop object that is not desired. A route keeps its old
    /// nexthop object until it is put again, and if the kernel refused the put. The kernel would
    /// delete the route together with the nexthop object.
    fn may_be_used(&self, nexthop: &Nexthop) -> bool {
        let table = &self.table;
        match self.desired.route_by(nexthop.id) {
            Some(route) => table.is_put(&route) || table.is_failing(&route),
            None => {
                let everything = Subnet::everything(Family::of(nexthop.gateway));
                let routes = Key::Route(everything)..=Key::Route(Subnet::host(everything.last()));
                table.puts(routes.clone()).next().is_some()
                    || table.failures().keys().any(|key| routes.contains(key))
            }
        }
    }

    /// Puts the due objects for which `meant` returns true and whose links exist, until `end`.
    /// Changes of leases come first, because repairs may never end. Routes are repaired last:
    /// without nexthop objects they may take seconds, and without their nexthop objects the kernel
    /// refuses them.
    fn put_due(
        &mut self,
        kernel: &GatedKernel,
        end: Instant,
        meant: impl Fn(&Key, Cause) -> bool,
    ) -> Result<(), Closed> {
        for turn in [Turn::Leases, Turn::Repairs, Turn::RepairsOfRoutes] {
            let mut last = None;
            let meant = |key: &Key, cause: Cause| Turn::of(key, cause) == turn && meant(key, cause);
            self.apply_while(kernel, end, |this| this.next_puts(&mut last, meant))?;
        }
        Ok(())
    }

    /// The next batch of objects to put after `last` for which `meant` returns true.
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
            if !meant(key, row.cause) || self.must_wait(key) {
                continue;
            }
            let Some(object) = self.desired.object(key) else { continue };
            if !self.lacks_link(&object) {
                self.push_put(&mut batch, key, row.cause, object);
            }
        }
        batch
    }

    /// Adds the put of an object to a batch, with further puts that it needs.
    fn push_put(&self, batch: &mut Vec<Change>, key: &Key, cause: Cause, object: Object) {
        // The kernel refuses a route without its nexthop object, whose repair has a later turn.
        if matches!(cause, Cause::Lease(_))
            && let Object::Route(Route { via: Via::Nexthop(id), .. }) = object
            && let Some(nexthop) = self.table.get(&Key::Nexthop(id))
            && nexthop.is_put()
            && matches!(nexthop.cause, Cause::Repair(_))
        {
            batch.extend(self.desired.object(&Key::Nexthop(id)).map(Change::Put));
        }
        match (cause, key) {
            (Cause::Repair(Damage::Modification), Key::Nexthop(id)) => {
                let steps = self.nexthop_repair(*id, object);
                batch.extend(steps.into_iter().flatten().map(Change::Put));
            }
            _ => batch.push(Change::Put(object)),
        }
    }

    /// The puts that repair a nexthop object in place. Meanwhile its route uses the gateway itself.
    /// Otherwise Linux walks its whole table for each replacement of an object with a route
    /// (`net.ipv4.nexthop_compat_mode`), which takes three milliseconds with 50,000 routes.
    fn nexthop_repair(&self, id: u32, nexthop: Object) -> [Option<Object>; 3] {
        let route = self.desired.route_by(id);
        let by_gateway = route.and_then(|route| self.desired.peers.object(&route));
        let by_nexthop = by_gateway.as_ref().and_then(|route| self.desired.object(&route.key()));
        [by_gateway, Some(nexthop), by_nexthop]
    }

    /// The next batch of objects to delete before `last` for whose cause `meant` returns true. The
    /// order is the reverse of the order of creation.
    fn next_deletions(&self, last: &mut Option<Key>, meant: impl Fn(Cause) -> bool) -> Vec<Change> {
        let due = self.table.deletions((Unbounded, last.map_or(Unbounded, Excluded)));
        let objects = due.filter(|deletion| meant(deletion.cause)).map(|deletion| deletion.object);
        let unused = objects.filter(|object| match object {
            Object::Nexthop(nexthop) => !self.may_be_used(nexthop),
            _ => true,
        });
        let batch: Vec<_> = unused.take(BATCH).cloned().map(Change::Delete).collect();
        *last = batch.last().map(|change| change.object().key());
        batch
    }

    /// Whether the link of an object is missing. Such an object is not put, so that the status
    /// shows one failure and not ten thousand.
    pub(super) fn lacks_link(&self, object: &Object) -> bool {
        let missing = &self.survey.missing_links;
        !missing.is_empty()
            && self.desired.link_of(object).is_some_and(|link| missing.contains(&link))
    }

    /// Applies the batches that `next` returns, one after the other, until one is empty. After
    /// `end`, only the first one is applied. Batches of later rounds are not computed, because
    /// there may be a thousand.
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
            if !self.is_intermediate(change) {
                self.record(change, outcome, now, None);
            }
        }
        Ok(())
    }

    /// Whether a change puts another object than the desired one, as a step of a
    /// [repair](Self::nexthop_repair). Its outcome is not the outcome of the desired object.
    fn is_intermediate(&self, change: &Change) -> bool {
        match change {
            Change::Put(object) => self.desired.object(&object.key()).as_ref() != Some(object),
            Change::Delete(_) => false,
        }
    }

    /// Refuses the puts of objects that the footprint does not own. A snapshot would not show them.
    /// So they would be put again after each snapshot, and would stay in the kernel after they are
    /// not desired any more. Returns the other changes. `cause` is the cause for objects without a
    /// row.
    pub(super) fn refuse_unowned(
        &mut self,
        changes: Vec<Change>,
        cause: Option<Cause>,
    ) -> Vec<Change> {
        let mut owned = changes;
        let unowned = owned.extract_if(.., |change| match change {
            Change::Put(object) => !self.owns(object),
            Change::Delete(_) => false,
        });
        for change in unowned.collect::<Vec<_>>() {
            let error = KernelError::NotOwned(change.object().to_string());
            self.record(&change, Outcome::Failed(error), Instant::now(), cause);
        }
        owned
    }

    /// Whether the footprint owns an object that this network desires.
    pub(super) fn owns(&self, object: &Object) -> bool {
        // The search for the device of a route by a nexthop object is rarely needed.
        self.footprint.owns(object, object.link())
            || self.footprint.owns(object, self.desired.link_of(object))
    }

    /// Records the end of a change that was only started. Returns `None` if the event is not the
    /// end of such a change.
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

    /// Records the outcome of a change. `cause` is the cause for an object without a row. It is
    /// `None` if only another change made this one necessary.
    pub(super) fn record(
        &mut self,
        change: &Change,
        outcome: Outcome,
        now: Instant,
        cause: Option<Cause>,
    ) {
        let object = change.object();
        let key = object.key();
        let row = self.table.remove(&key);
        let cause = row.as_ref().map(|row| row.cause).or(cause);
        let changed_by = row.and_then(|row| row.changed_by);
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
        self.table.forget_failure(&key);
        if matches!(change, Change::Delete(_)) {
            if let Key::Nexthop(id) = key
                && let Some(ids) = &mut self.desired.ids
            {
                ids.release(id);
            }
            if self.desired.last.contains(&key) {
                // The deletion made room for the desired object.
                let cause = cause.unwrap_or(Cause::Lease(None));
                self.table.insert(key, Row::new(Actual::Unknown, cause));
                return;
            }
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
