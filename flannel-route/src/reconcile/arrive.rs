//! Arriving: what thousands of new peers define goes to the kernel.
//!
//! The one thing to know: it is noted nowhere object by object, but taken from the peers' slots when it is their turn;
//! and while the kernel works on one group of peers, a thread of its own judges and makes out the next and notes what
//! came of the last.

use std::collections::VecDeque;
use std::panic::resume_unwind;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, TryRecvError, channel, sync_channel};
use std::thread::{Builder, yield_now};
use std::time::Duration;

use tokio::time::Instant;

use super::write::{Closed, Gate};
use super::{Cause, Reconciler, expand};
use flannel_core::{Change, Object};
use flannel_core::{Kernel, KernelError, Owned};
use flannel_core::{Lease, View};

/// Longer than it takes to make out a group.
const AWAKE: Duration = Duration::from_millis(1);
/// So few new peers are one group, looked at and put without a second thread.
pub(super) const FEW: usize = 128;
/// Of more, so many are the first group: the kernel is to have something to do soon. Each later one is twice as large …
const FIRST: usize = 16;
/// … up to so many, whose objects are put at once: bounds memory, and how long a stop waits. Linux maps the per-CPU memory that
/// forwarding entries need in pieces, behind who asks for it: with more of them in a row it falls behind (256 of 65,000 peers took a
/// fifth longer). …
pub(super) const GROUP: usize = 64;
/// … And for so long before newer leases and questions get their turn.
pub(super) const ROUND: Duration = Duration::from_millis(100);
/// So many new peers are a flood if half of all are new: reading the kernel after them costs less than hearing of each. Fewer
/// are over before anybody stops listening.
const FLOOD: usize = 512;
/// So many groups wait for their turn: bounds memory, and how long whoever makes them keeps a processor that the writer waits for.
const READY: usize = 8;

/// Leases that one view brought and nobody has looked at yet.
#[derive(Debug, Default)]
pub(super) struct Coming {
    leases: std::vec::IntoIter<Arc<Lease>>,
    arrived: Option<Instant>,
}

impl Coming {
    pub(super) fn new(leases: Vec<Arc<Lease>>, arrived: Instant) -> Self {
        Self { leases: leases.into_iter(), arrived: Some(arrived) }
    }

    pub(super) fn len(&self) -> usize {
        self.leases.len()
    }

    pub(super) fn leases(&self) -> &[Arc<Lease>] {
        self.leases.as_slice()
    }
}

/// What some new peers define, in the order of creation.
struct Group {
    changes: Vec<Change>,
    /// When their leases were there.
    arrived: Option<Instant>,
}

/// What came of a group: a result for each change, none if the gate was closed.
struct Written {
    group: Group,
    results: Vec<Result<(), KernelError>>,
    /// When the last of them was there.
    at: Instant,
}

impl Group {
    /// Blocks as long as the kernel takes.
    fn write(self, kernel: &dyn Kernel, owned: &Owned, gate: &Gate) -> Written {
        let results = gate.pass(|| kernel.apply(owned, &self.changes)).unwrap_or_default();
        Written { group: self, results, at: Instant::now() }
    }
}

/// `None`: nothing more comes. It does not sleep at once: a sleeper is mostly woken on the processor of who wakes it, even if
/// there is an idle one, and two threads that take turns there take as long as one.
fn take_over<T>(from: &Receiver<T>) -> Option<T> {
    let awake = std::time::Instant::now() + AWAKE;
    while std::time::Instant::now() < awake {
        match from.try_recv() {
            Ok(thing) => return Some(thing),
            Err(TryRecvError::Empty) => yield_now(),
            Err(TryRecvError::Disconnected) => return None,
        }
    }
    from.recv().ok()
}

fn is_flood(new: usize, all: usize) -> bool {
    new >= FLOOD && 2 * new >= all
}

impl Reconciler {
    /// So many peers are new that it does not pay to hear what the kernel tells while they are put: that is read afterwards.
    pub(crate) fn is_flooded(&self) -> bool {
        is_flood(self.fresh.len() + self.coming.len(), self.leases.len())
    }

    /// This view brings a flood, as far as can be told before the kernel is read and its leases are looked at.
    pub(crate) fn would_flood(&self, view: &View) -> bool {
        !self.is_unread()
            && is_flood(view.leases.len().saturating_sub(self.leases.len()), view.leases.len())
    }

    /// Puts what new peers define, as much of it as a round may take; nothing of a flood, unless it `may_flood`.
    pub(super) fn put_fresh(
        &mut self,
        kernel: &dyn Kernel,
        gate: &Gate,
        may_flood: bool,
    ) -> Result<(), Closed> {
        if !may_flood && self.is_flooded() {
            return Ok(());
        }
        let owned = self.owned.clone();
        let alone = self.fresh.len() + self.coming.len() <= FEW;
        let mut size = if alone { FEW } else { FIRST };
        let mut next_group = move |this: &mut Self| {
            let group = this.next_group(kernel, size);
            size = (2 * size).min(GROUP);
            group
        };
        let Some(first) = next_group(self) else { return Ok(()) };
        if alone {
            return self.note(first.write(kernel, &owned, gate));
        }
        let (end, over) = (Instant::now() + ROUND, AtomicBool::new(false));
        let (done, mut written) = channel();
        let made = std::thread::scope(|scope| {
            // One group is with the kernel, and some are ready.
            let (groups, to_write) = sync_channel(READY);
            let (this, to_note) = (&mut *self, &mut written);
            // This thread writes: it is awake, and the other one takes a while to be.
            let apart = kernel.beside();
            let maker = Builder::new().spawn_scoped(scope, || {
                // What it is to hand over ends with it.
                let (groups, mut apart) = (groups, apart);
                while !over.load(Ordering::Relaxed) {
                    apart();
                    let Some(group) = next_group(this) else { break };
                    // The writer ends early only if it panicked.
                    if groups.send(group).is_err() {
                        break;
                    }
                    this.note_all(to_note)?;
                }
                Ok(())
            });
            // To begin it may need this processor.
            yield_now();
            let groups = std::iter::once(first).chain(std::iter::from_fn(|| take_over(&to_write)));
            for written in groups.map(|group| group.write(kernel, &owned, gate)) {
                over.store(written.at >= end, Ordering::Relaxed);
                // Who notes it is there for longer than this.
                let _ = done.send(written);
            }
            maker.map(|maker| maker.join().unwrap_or_else(|panic| resume_unwind(panic)))
        });
        // To wake the maker for each of the last ones would cost more than to note them.
        self.note_all(&mut written)?;
        made.unwrap_or_else(|error| {
            tracing::warn!(%error, "new peers come slowly: there is no thread to make them out while the kernel works");
            Ok(())
        })
    }

    /// Notes what was written so far.
    fn note_all(&mut self, written: &mut Receiver<Written>) -> Result<(), Closed> {
        written.try_iter().try_for_each(|written| self.note(written))
    }

    fn note(&mut self, written: Written) -> Result<(), Closed> {
        let Written { group: Group { changes, arrived }, results, at } = written;
        let complete = results.len() == changes.len();
        for (change, result) in changes.iter().zip(results) {
            let key = change.object().key();
            // While it was written a later lease decided otherwise: that is still to be done.
            if self.put.contains_key(&key) || self.gone.contains_key(&key) {
                continue;
            }
            self.record(change, result, at, Some(Cause::Lease(arrived)));
        }
        if complete { Ok(()) } else { Err(Closed) }
    }

    /// Looks at the next leases that are coming, at `most` so many; false if there are none.
    fn take_coming(&mut self, kernel: &dyn Kernel, most: usize) -> bool {
        let next: Vec<_> = self.coming.leases.by_ref().take(most).collect();
        let arrived = self.coming.arrived;
        if self.coming.len() == 0 {
            // Room for thousands is not kept.
            self.coming = Coming::default();
        }
        let Some(arrived) = arrived else { return false };
        self.take_in(next.iter().map(|lease| (lease.subnets, Some(lease))), arrived, kernel);
        true
    }

    /// Looks at all leases that are coming.
    pub(super) fn take_all_coming(&mut self, kernel: &dyn Kernel) {
        while self.take_coming(kernel, GROUP) {}
    }

    /// The next new peers, at `most` so many, which are so no more; `None` if there are none.
    fn next_group(&mut self, kernel: &dyn Kernel, most: usize) -> Option<Group> {
        while self.fresh.is_empty() && self.take_coming(kernel, most) {}
        let (_, arrived) = self.fresh.front().copied()?;
        // By kind: that is the order of creation.
        let mut objects: [Vec<Object>; 6] = Default::default();
        for _ in 0..most {
            if self.fresh.front().is_none_or(|(_, at)| *at != arrived) {
                break;
            }
            let Some((id, _)) = self.fresh.pop_front() else { break };
            let defined = self.peers.take_fresh(id).unwrap_or_default();
            expand(defined, self.ids.as_ref(), |object| {
                objects[object.kind() as usize].push(object)
            });
        }
        if self.fresh.is_empty() {
            // Room for thousands is not kept.
            self.fresh = VecDeque::new();
        }
        let mut changes = Vec::with_capacity(objects.iter().map(Vec::len).sum());
        for object in objects.into_iter().flatten() {
            self.gone.remove(&object.key());
            if self.lacks_link(&object) {
                self.put.insert(object.key(), Cause::Lease(arrived));
            } else {
                changes.push(Change::Put(object));
            }
        }
        Some(Group { changes, arrived })
    }
}
