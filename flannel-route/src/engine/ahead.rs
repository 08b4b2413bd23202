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
type Batch = (Vec<Change>, Cause);
type Applied = (Vec<Change>, Cause, Result<Vec<Outcome>, Closed>);

/// The second thread. It applies the batches in the order in which they were begun.
pub(super) struct Applier<'a> {
    apply: &'a Apply<'a>,
    /// `Err`: the thread could not be started, so the caller applies the batches.
    batches: Result<SyncSender<Batch>, SyncSender<Applied>>,
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
            let answer = applied.clone();
            let spawned = thread::Builder::new().spawn_scoped(scope, move || {
                let _context = runtime.as_ref().map(Handle::enter);
                for (changes, cause) in to_apply {
                    let result = apply(&changes);
                    if answer.send((changes, cause, result)).is_err() {
                        break;
                    }
                }
            });
            let (handle, batches) = match spawned {
                Ok(handle) => {
                    // Only the thread has a sender now, so a wait ends if the thread ends.
                    drop(applied);
                    (Some(handle), Ok(batches))
                }
                Err(_) => (None, Err(applied)),
            };
            // The channels are dropped with it, which ends the thread.
            let done = work(&Self { apply, batches, results, begun: Cell::new(0) });
            if let Some(Err(panic)) = handle.map(ScopedJoinHandle::join) {
                std::panic::resume_unwind(panic);
            }
            done
        })
    }

    /// Begins to apply a batch, after those that were begun.
    pub(super) fn begin(&self, changes: Vec<Change>, cause: Cause) {
        self.begun.update(|begun| begun + 1);
        // An error means that the thread panicked.
        match &self.batches {
            Ok(batches) => drop(batches.send((changes, cause))),
            Err(applied) => {
                let result = (self.apply)(&changes);
                drop(applied.send((changes, cause, result)));
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
            applier.begin(Vec::new(), Cause::Lease(None));
            applier.wait().is_ok()
        };
        let panicked = std::panic::catch_unwind(|| Applier::with(&apply, work)).unwrap_err();
        assert_eq!(panicked.downcast_ref(), Some(&"the kernel says why"));
    }
}
