//! Applies batches on a second thread, so that the caller prepares later batches meanwhile.

use std::cell::Cell;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::{self, ScopedJoinHandle};

use tokio::runtime::Handle;

use super::Cause;
use crate::gated_kernel::Closed;
use flannel_core::kernel::Outcome;
use flannel_core::object::Change;

/// The largest number of batches that are begun: one that the kernel applies, and one that follows
/// without a pause.
pub(super) const BEGUN: usize = 2;

/// Applies the changes of a batch.
type Apply<'a> = dyn Fn(&[Change]) -> Result<Vec<Outcome>, Closed> + Sync + 'a;

/// Changes that are applied together.
pub(super) struct Batch {
    pub(super) changes: Vec<Change>,
    /// The cause of all changes.
    pub(super) cause: Cause,
}

/// A batch after it was applied.
pub(super) struct Applied {
    pub(super) batch: Batch,
    /// One outcome for each change.
    pub(super) outcomes: Result<Vec<Outcome>, Closed>,
}

/// Where batches are applied.
enum Target {
    /// On the second thread, which receives them here.
    Thread(SyncSender<Batch>),
    /// By the caller, because the thread could not be started. The results are sent here.
    Caller(SyncSender<Applied>),
}

/// The second thread. It applies the batches in the order in which they were begun.
pub(super) struct Applier<'a> {
    apply: &'a Apply<'a>,
    target: Target,
    results: Receiver<Applied>,
    /// The number of batches that were begun and not waited for; at most [`BEGUN`].
    pub(super) begun: Cell<usize>,
}

impl<'a> Applier<'a> {
    /// Does `work` with a second thread that calls `apply`. Passes on the panic of that thread.
    pub(super) fn with<T>(apply: &'a Apply<'a>, work: impl FnOnce(&Self) -> T) -> T {
        // A kernel may use the runtime that it is called on.
        let runtime = Handle::try_current();
        thread::scope(|scope| {
            let (batches, to_apply) = sync_channel::<Batch>(BEGUN);
            let (applied, results) = sync_channel(BEGUN);
            let results_of_thread = applied.clone();
            let spawned = thread::Builder::new().spawn_scoped(scope, move || {
                let _context = runtime.as_ref().map(Handle::enter);
                for batch in to_apply {
                    let outcomes = apply(&batch.changes);
                    if results_of_thread.send(Applied { batch, outcomes }).is_err() {
                        break;
                    }
                }
            });
            let target = if spawned.is_ok() {
                // Only the thread has a sender now, so a wait ends if the thread ends.
                drop(applied);
                Target::Thread(batches)
            } else {
                Target::Caller(applied)
            };
            // The channels are dropped with the applier, which ends the thread.
            let done = work(&Self { apply, target, results, begun: Cell::new(0) });
            if let Ok(Err(panic)) = spawned.map(ScopedJoinHandle::join) {
                std::panic::resume_unwind(panic);
            }
            done
        })
    }

    /// Begins to apply a batch, after those that were begun.
    pub(super) fn begin(&self, batch: Batch) {
        self.begun.update(|begun| begun + 1);
        // An error means that the thread panicked.
        match &self.target {
            Target::Thread(batches) => drop(batches.send(batch)),
            Target::Caller(applied) => {
                let outcomes = (self.apply)(&batch.changes);
                drop(applied.send(Applied { batch, outcomes }));
            }
        }
    }

    /// Waits for the oldest batch that was begun.
    pub(super) fn wait(&self) -> Result<Applied, Closed> {
        self.begun.update(|begun| begun - 1);
        self.results.recv().map_err(|_| Closed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_of_the_kernel_reaches_the_caller() {
        let apply = |_: &[Change]| panic!("the kernel says why");
        let work = |applier: &Applier<'_>| {
            applier.begin(Batch { changes: Vec::new(), cause: Cause::Lease(None) });
            applier.wait().is_ok()
        };
        let panicked = std::panic::catch_unwind(|| Applier::with(&apply, work)).unwrap_err();
        assert_eq!(panicked.downcast_ref(), Some(&"the kernel says why"));
    }
}
