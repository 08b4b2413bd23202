//! Writing: what is in doubt or has changed goes to the kernel, batch by batch.

use std::collections::BTreeMap;
use std::ops::Bound::{Excluded, Unbounded};
use std::sync::Mutex;
use std::time::Duration;

use tokio::time::Instant;

use super::{Cause, Engine, Failed, Unread};
use flannel_core::Kernel;
use flannel_core::Subnet;
use flannel_core::address::Family;
use flannel_core::kernel::KernelError;
use flannel_core::object::{Change, Key, Nexthop, Object, Route, Via};
use flannel_core::status::{Damage, Failure};

/// A repair, a newer view or a question waits for a round at most, beside the batch in hand.
const ROUND: Duration = Duration::from_millis(16);

/// How many changes are handed to the kernel at once, but for those of [new peers](super::bulk::SLICE): a stop waits for them.
/// Mostly it takes a millisecond; among thousands of routes without nexthop objects, or where nexthop objects go, a hundred.
pub(crate) const BATCH: usize = 128;

/// Lets batches through until it is closed; closing waits for the batch in hand.
#[derive(Debug, Default)]
pub(crate) struct Gate {
    closed: Mutex<bool>,
}

impl Gate {
    /// Does `work` unless the gate is closed; `None` if it is.
    pub(super) fn pass<T>(&self, work: impl FnOnce() -> T) -> Option<T> {
        let closed = self.closed.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        (!*closed).then(work)
    }

    pub(crate) fn close(&self) {
        *self.closed.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = true;
    }
}

/// The gate was closed: leave everything as it is.
#[derive(Debug)]
pub(crate) struct Closed;

impl Engine {
    /// Brings the kernel to what is wanted, as far as it lets us; what it refuses is in the status. Of new peers it
    /// puts so many as a round may take, and of everything else: while there [is more](Self::is_unfinished), nothing is deleted but what
    /// leases took away. Unless it `may_read` the kernel, it does what can be done without. Blocks.
    ///
    /// # Errors
    /// [`Closed`]: the gate was closed before everything was done.
    pub(crate) fn settle(
        &mut self,
        kernel: &dyn Kernel,
        gate: &Gate,
        mut may_read: bool,
    ) -> Result<(), Closed> {
        self.unfinished = false;
        let mut links_put = BTreeMap::new();
        // A link that is put may take all that is on it with it, so the kernel is read again after each.
        while self.is_unsettled() {
            let known = !self.is_unread() || (may_read && self.read(kernel, &links_put));
            if !known && self.unread == Unread::Everything {
                // Which ids objects have, and what there is that live peers go by, only a first look tells.
                if self.reads.done == 0 {
                    return Ok(());
                }
                // What leases brought needs no look at the kernel first. What else is in doubt is put without one if there is none.
                let blind = self.kernel_error.is_some();
                self.put_noted(kernel, gate, Instant::now() + ROUND, |key, cause| {
                    matches!(cause, Cause::Lease(_)) || (blind && !matches!(key, Key::Link(_)))
                })?;
                return self.put_new_peers(kernel, gate, Instant::now() + ROUND);
            }
            let links = self.put.keys().take_while(|key| matches!(key, Key::Link(_)));
            let links: Vec<Change> =
                links.filter_map(|key| self.want(key)).map(Change::Put).collect();
            if links.is_empty() {
                break;
            }
            let failing = |key| self.stats.failing().get(&key).cloned();
            let keys = links.iter().map(|change| change.object().key());
            let before: Vec<(Key, Option<Failure>)> = keys.map(|key| (key, failing(key))).collect();
            self.apply(kernel, gate, &links)?;
            let taken =
                before.into_iter().filter(|(key, _)| !self.stats.failing().contains_key(key));
            let taken: Vec<_> = taken.collect();
            for (key, _) in &taken {
                if let Key::Link(name) = key {
                    self.missing_links.remove(name);
                }
            }
            if !taken.is_empty() {
                (self.unread, may_read) = (Unread::Everything, true);
            }
            links_put.extend(taken);
        }
        // However long reading took, something is done in each round.
        let end = Instant::now() + ROUND;
        self.put_noted(kernel, gate, end, |_, _| true)?;
        self.put_new_peers(kernel, gate, end)?;
        // Of those that were looked at meanwhile, not all were fresh.
        self.put_noted(kernel, gate, end, |_, _| true)?;
        if !self.live {
            return Ok(());
        }
        if self.is_unfinished() {
            return self.delete_meanwhile(kernel, gate);
        }
        let mut last = None;
        self.apply_while(kernel, gate, end, |this| this.next_gone(&mut last, |_| true))
    }

    /// Repairs that do not end keep nobody who left: a batch of what leases took away goes, unless something is still to be put instead.
    fn delete_meanwhile(&mut self, kernel: &dyn Kernel, gate: &Gate) -> Result<(), Closed> {
        let by_lease = |cause: &Cause| matches!(cause, Cause::Lease(_));
        let is_due = |key: &Key| self.want(key).is_some_and(|object| !self.lacks_link(&object));
        if self.has_fresh() || self.put.iter().any(|(key, cause)| by_lease(cause) && is_due(key)) {
            return Ok(());
        }
        let gone = self.next_gone(&mut None, by_lease);
        if gone.is_empty() { Ok(()) } else { self.apply(kernel, gate, &gone) }
    }

    /// A route that is not put yet, or could not be, may still go by the nexthop object that it had, and would go with it.
    fn may_still_lead(&self, nexthop: &Nexthop) -> bool {
        let (put, failing) = (&self.put, self.stats.failing());
        match self.ids.as_ref().and_then(|ids| ids.dst(nexthop.id)).map(Key::Route) {
            Some(route) => put.contains_key(&route) || failing.contains_key(&route),
            None => {
                let everything = Subnet::everything(Family::of(nexthop.gateway));
                let routes = Key::Route(everything)..=Key::Route(Subnet::host(everything.last()));
                put.range(routes.clone()).next().is_some()
                    || failing.keys().any(|key| routes.contains(key))
            }
        }
    }

    /// Puts what is noted and `meant`, as far as the links are there that it needs, until `end`. What leases brought does not wait for
    /// what is in doubt, which may be all that there is; and of that the routes come last: they may take seconds if they are many
    /// and have no nexthop objects, and are refused before those that they have are there.
    fn put_noted(
        &mut self,
        kernel: &dyn Kernel,
        gate: &Gate,
        end: Instant,
        meant: impl Fn(&Key, &Cause) -> bool,
    ) -> Result<(), Closed> {
        let turn = |key: &Key, cause: &Cause| match (key, cause) {
            (_, Cause::Lease(_)) => 0,
            (Key::Route(_), Cause::Repair(_)) => 2,
            (_, Cause::Repair(_)) => 1,
        };
        for now in 0..3 {
            let mut last = None;
            let meant = |key: &Key, cause: &Cause| turn(key, cause) == now && meant(key, cause);
            self.apply_while(kernel, gate, end, |this| this.next_noted(&mut last, meant))?;
        }
        Ok(())
    }

    /// The next batch of what is noted and `meant` after `last`; where it is the turn of a route, so it is of its nexthop object.
    fn next_noted(
        &self,
        last: &mut Option<Key>,
        meant: impl Fn(&Key, &Cause) -> bool,
    ) -> Vec<Change> {
        let mut batch = Vec::new();
        for (key, cause) in self.put.range((last.map_or(Unbounded, Excluded), Unbounded)) {
            if batch.len() >= BATCH {
                break;
            }
            *last = Some(*key);
            let wanted = meant(key, cause).then(|| self.want(key)).flatten();
            let Some(object) = wanted.filter(|object| !self.lacks_link(object)) else { continue };
            if let (Cause::Lease(_), Object::Route(Route { via: Via::Nexthop(id), .. })) =
                (cause, &object)
                && let Some(Cause::Repair(_)) = self.put.get(&Key::Nexthop(*id))
            {
                batch.extend(self.want(&Key::Nexthop(*id)).map(Change::Put));
            }
            match (cause, key) {
                (Cause::Repair(Damage::Modification), Key::Nexthop(id)) => {
                    batch.extend(self.around(*id, object).into_iter().flatten().map(Change::Put));
                }
                _ => batch.push(Change::Put(object)),
            }
        }
        batch
    }

    /// What puts a nexthop object right that is there: its route goes by the gateway itself meanwhile. Where it has a route, Linux goes
    /// through its whole table for each replacement (`net.ipv4.nexthop_compat_mode`): three milliseconds where there are 50,000 routes.
    fn around(&self, id: u32, nexthop: Object) -> [Option<Object>; 3] {
        let dst = self.ids.as_ref().and_then(|ids| ids.dst(id));
        let plain = dst.and_then(|dst| self.peers.settled_object(&Key::Route(dst)));
        let by_nexthop = plain.as_ref().and_then(|plain| self.want(&plain.key()));
        [plain, Some(nexthop), by_nexthop]
    }

    /// The next batch of what is to be deleted before `last` and `meant`: in the order opposite to that of creation.
    fn next_gone(&self, last: &mut Option<Key>, meant: impl Fn(&Cause) -> bool) -> Vec<Change> {
        let gone = self.gone.range((Unbounded, last.map_or(Unbounded, Excluded))).rev();
        let leads = |object: &Object| matches!(object, Object::Nexthop(nexthop) if self.may_still_lead(nexthop));
        let gone = gone.filter(|(_, (object, cause))| meant(cause) && !leads(object)).take(BATCH);
        let batch: Vec<_> = gone.map(|(_, (object, _))| Change::Delete(object.clone())).collect();
        *last = batch.last().map(|change| change.object().key());
        batch
    }

    /// Without its link nothing can be put; one failure in the status says more than ten thousand.
    pub(super) fn lacks_link(&self, object: &Object) -> bool {
        !self.missing_links.is_empty()
            && self.link_of(object).is_some_and(|link| self.missing_links.contains(&link))
    }

    /// Applies one batch after the other, as `next` makes them out, none but the first of which begins after `end`: then there is more to
    /// do. What is not applied in this round is not even made out: there may be a thousand batches.
    fn apply_while(
        &mut self,
        kernel: &dyn Kernel,
        gate: &Gate,
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
            self.apply(kernel, gate, &batch)?;
        }
        Ok(())
    }

    fn apply(
        &mut self,
        kernel: &dyn Kernel,
        gate: &Gate,
        changes: &[Change],
    ) -> Result<(), Closed> {
        let results = gate.pass(|| kernel.apply(&self.footprint, changes)).ok_or(Closed)?;
        let now = Instant::now();
        for (change, result) in changes.iter().zip(results) {
            // A step on the way tells nothing of what is wanted; the one that is comes after it.
            let is_step = |object: &Object| self.want(&object.key()).as_ref() != Some(object);
            if !matches!(change, Change::Put(object) if is_step(object)) {
                self.record(change, result, now, None);
            }
        }
        Ok(())
    }

    /// Notes what came of a change. `cause` is that of one that is noted nowhere; `None`: it went along with another one.
    pub(super) fn record(
        &mut self,
        change: &Change,
        result: Result<(), KernelError>,
        now: Instant,
        cause: Option<Cause>,
    ) {
        let object = change.object();
        let key = object.key();
        let put = self.put.remove(&key);
        let gone = self.gone.remove(&key).map(|(_, cause)| cause);
        let failed = self.failed.remove(&key).map(|failed| failed.cause);
        let cause = put.or(gone).or(cause).or(failed);
        if let (Change::Delete(_), Ok(()), Key::Nexthop(id), Some(ids)) =
            (change, &result, key, &mut self.ids)
        {
            ids.release(id);
        }
        match (result, cause) {
            (Err(error), cause) => {
                let cause = cause.unwrap_or(Cause::Lease(None));
                let deletion = matches!(change, Change::Delete(_)).then(|| object.clone());
                let peer = self.peer_of(&key);
                self.failed.insert(key, Failed { cause, deletion });
                self.stats.failed(change, peer, error);
            }
            (Ok(()), cause) => {
                self.stats.clear(&key);
                // Whatever comes after this, it was not they.
                let suspect = self.suspects.remove(&key);
                match cause {
                    None => {}
                    Some(Cause::Lease(arrived)) => {
                        self.stats
                            .applied(arrived.map(|arrived| now.saturating_duration_since(arrived)));
                    }
                    Some(Cause::Repair(damage)) => {
                        self.stats.repaired(object, damage, self.peer_of(&key), suspect);
                    }
                }
            }
        }
    }
}
