//! Writing: what is in doubt or new goes to the kernel, batch by batch.
//!
//! The one thing to know: what one peer among many needs is noted object by object; what thousands of new peers need
//! is noted nowhere, but taken from their slots when it is their turn.

use std::collections::BTreeSet;
use std::sync::Mutex;

use tokio::time::Instant;

use super::{Cause, Failed, Reconciler, Unread, expand};
use crate::kernel::{Kernel, KernelError};
use crate::state::{Change, Key, Object};

/// How many changes are handed to the kernel at once. More gains nothing (the kernel works at its own pace), and a
/// stop waits for at most one batch.
const BATCH: usize = 128;

/// The objects of so many new peers are put at once: bounds memory. …
const GROUP: usize = 512;
/// … And so many groups are put before anything else gets its turn: bounds how long a repair waits while thousands of
/// peers arrive.
const ROUND: usize = 8;

/// Lets batches through until it is closed; closing waits for the batch in hand.
#[derive(Debug, Default)]
pub(crate) struct Gate {
    closed: Mutex<bool>,
}

impl Gate {
    /// Does `work` unless the gate is closed; `None` if it is.
    fn pass<T>(&self, work: impl FnOnce() -> T) -> Option<T> {
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

impl Reconciler {
    /// Brings the kernel to what is wanted, as far as it lets us; what it refuses is in the status. Of new peers it
    /// puts so many as a round may take: while there [are more](Self::has_fresh), nothing is deleted. Unless it
    /// `may_read` the kernel, it does what can be done without. Blocks.
    ///
    /// # Errors
    /// [`Closed`]: the gate was closed before everything was done.
    pub(crate) fn settle(
        &mut self,
        kernel: &dyn Kernel,
        gate: &Gate,
        mut may_read: bool,
    ) -> Result<(), Closed> {
        let mut links_put = BTreeSet::new();
        // A link that is put may take all that is on it with it, so the kernel is read again after each.
        while self.is_unsettled() {
            let known = !self.is_unread() || (may_read && self.read(kernel, &links_put));
            if !known && self.unread == Unread::Everything {
                // What leases brought needs no look at the kernel first.
                let by_lease = |key: &Key| matches!(self.put.get(key), Some(Cause::Lease(_)));
                let changes: Vec<Change> = self.puts(by_lease).collect();
                self.apply(kernel, gate, &changes, None)?;
                return self.put_fresh(kernel, gate);
            }
            let links = self.put.keys().take_while(|key| matches!(key, Key::Link(_)));
            let links: Vec<Change> = links.filter_map(|key| self.want(key)).map(Change::Put).collect();
            if links.is_empty() {
                break;
            }
            self.apply(kernel, gate, &links, None)?;
            let taken = links.iter().map(|change| change.object().key());
            let taken: Vec<Key> = taken.filter(|key| !self.ledger.failing().contains_key(key)).collect();
            for key in &taken {
                if let Key::Link(name) = key {
                    self.missing_links.remove(name);
                }
            }
            if !taken.is_empty() {
                (self.unread, may_read) = (Unread::Everything, true);
            }
            links_put.extend(taken);
        }
        let changes: Vec<Change> =
            self.puts(|_| true).filter(|change| !self.lacks_link(change.object())).collect();
        self.apply(kernel, gate, &changes, None)?;
        self.put_fresh(kernel, gate)?;
        if !self.live || self.has_fresh() {
            return Ok(());
        }
        // A route that could not be put by a gateway may still go by the nexthop object that it had, and would go with it.
        let keep = self.ledger.failing().keys().any(|key| matches!(key, Key::Route(_)));
        let gone = self.gone.iter().rev().filter(|(key, _)| !(keep && matches!(key, Key::Nexthop(_))));
        let changes: Vec<Change> = gone.map(|(_, (object, _))| Change::Delete(object.clone())).collect();
        self.apply(kernel, gate, &changes, None)
    }

    /// Without its link nothing can be put; one failure in the status says more than ten thousand.
    fn lacks_link(&self, object: &Object) -> bool {
        !self.missing_links.is_empty()
            && self.link_of(object).is_some_and(|link| self.missing_links.contains(&link))
    }

    /// Puts what new peers define, as much of it as a round may take.
    fn put_fresh(&mut self, kernel: &dyn Kernel, gate: &Gate) -> Result<(), Closed> {
        (0..ROUND).try_for_each(|_| self.put_group(kernel, gate))
    }

    fn put_group(&mut self, kernel: &dyn Kernel, gate: &Gate) -> Result<(), Closed> {
        let Some((_, arrived)) = self.fresh.front().copied() else { return Ok(()) };
        let mut changes = Vec::with_capacity(4 * GROUP.min(self.fresh.len()));
        for _ in 0..GROUP {
            if self.fresh.front().is_none_or(|(_, at)| *at != arrived) {
                break;
            }
            let Some((id, _)) = self.fresh.pop_front() else { break };
            let objects = self.peers.take_fresh(id).unwrap_or_default();
            expand(objects, self.ids.as_ref(), |object| changes.push(Change::Put(object)));
        }
        if !self.missing_links.is_empty() {
            changes.retain(|change| {
                let lacks = self.lacks_link(change.object());
                if lacks {
                    self.put.insert(change.object().key(), Cause::Lease(arrived));
                }
                !lacks
            });
        }
        // The order of creation.
        changes.sort_by_key(|change| change.object().kind());
        self.apply(kernel, gate, &changes, Some(Cause::Lease(arrived)))
    }

    /// Applies changes batch by batch. `cause` is that of changes that are noted nowhere.
    fn apply(
        &mut self,
        kernel: &dyn Kernel,
        gate: &Gate,
        changes: &[Change],
        cause: Option<Cause>,
    ) -> Result<(), Closed> {
        for batch in changes.chunks(BATCH) {
            let results = gate.pass(|| kernel.apply(&self.owned, batch)).ok_or(Closed)?;
            let now = Instant::now();
            for (change, result) in batch.iter().zip(results) {
                self.record(change, result, now, cause);
            }
        }
        Ok(())
    }

    fn record(
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
        let cause = put.or(gone).or(cause).unwrap_or(Cause::Lease(None));
        self.failed.remove(&key);
        if let (Change::Delete(_), Ok(()), Key::Nexthop(id), Some(ids)) =
            (change, &result, key, &mut self.ids)
        {
            ids.release(id);
        }
        match (result, cause) {
            (Err(error), cause) => {
                let deletion = matches!(change, Change::Delete(_)).then(|| object.clone());
                let peer = self.peer_of(&key);
                self.failed.insert(key, Failed { cause, deletion });
                self.ledger.failed(change, peer, error);
            }
            (Ok(()), Cause::Lease(arrived)) => {
                self.ledger.clear(&key);
                self.ledger.applied(arrived.map(|arrived| now.saturating_duration_since(arrived)));
            }
            (Ok(()), Cause::Doubt(damage)) => {
                self.ledger.clear(&key);
                let peer = self.peer_of(&key);
                self.ledger.repaired(object, damage, peer, self.suspects.remove(&key));
            }
        }
    }
}
