//! Applies each batch on a second thread, so that the caller prepares the next batch meanwhile.

use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;

use tokio::runtime::Handle;

use crate::gated_kernel::{Closed, Results};
use flannel_core::object::Change;

/// The second thread. It applies one batch at a time, in the order of their arrival.
pub(super) struct Applier {
    batches: SyncSender<Vec<Change>>,
    results: Receiver<(Vec<Change>, Result<Results, Closed>)>,
}

impl Applier {
    /// Does `work` with a second thread that calls `apply`. Returns after both have ended.
    pub(super) fn with<T>(
        apply: impl Fn(&[Change]) -> Result<Results, Closed> + Send,
        work: impl FnOnce(&Self) -> T,
    ) -> T {
        // A kernel may use the runtime that it is called on.
        let runtime = Handle::try_current();
        thread::scope(|scope| {
            let (batches, to_apply) = sync_channel::<Vec<Change>>(1);
            let (applied, results) = sync_channel(1);
            scope.spawn(move || {
                let _context = runtime.as_ref().map(Handle::enter);
                for batch in to_apply {
                    let result = apply(&batch);
                    if applied.send((batch, result)).is_err() {
                        break;
                    }
                }
            });
            // Dropped on return, which ends the thread.
            work(&Self { batches, results })
        })
    }

    /// Begins to apply a batch. Every call is to be followed by one of [`Applier::wait`].
    pub(super) fn begin(&self, batch: Vec<Change>) {
        // An error means that the thread panicked. The end of the scope passes the panic on.
        let _ = self.batches.send(batch);
    }

    /// Waits for the batch that was begun.
    pub(super) fn wait(&self) -> Result<(Vec<Change>, Results), Closed> {
        let (batch, results) = self.results.recv().map_err(|_| Closed)?;
        Ok((batch, results?))
    }
}
