//! Applies each batch on a second thread, so that the caller prepares the next batch meanwhile.

use std::cell::Cell;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::{self, ScopedJoinHandle};

use tokio::runtime::Handle;

use crate::gated_kernel::{Closed, Results};
use flannel_core::object::Change;

type Applied = (Vec<Change>, Result<Results, Closed>);
type Channels = (SyncSender<Vec<Change>>, Receiver<Applied>);

/// The second thread. It applies one batch at a time, in the order of their arrival.
pub(super) struct Applier<'a> {
    apply: &'a (dyn Fn(&[Change]) -> Result<Results, Closed> + Sync),
    /// `Err`: the thread could not be started. The caller applied the batch; this is its result.
    thread: Result<Channels, Cell<Option<Applied>>>,
}

impl<'a> Applier<'a> {
    /// Does `work` with a second thread that calls `apply`. Passes on the panic of that thread.
    pub(super) fn with<T>(
        apply: &'a (dyn Fn(&[Change]) -> Result<Results, Closed> + Sync),
        work: impl FnOnce(&Self) -> T,
    ) -> T {
        // A kernel may use the runtime that it is called on.
        let runtime = Handle::try_current();
        thread::scope(|scope| {
            let (batches, to_apply) = sync_channel::<Vec<Change>>(1);
            let (applied, results) = sync_channel(1);
            let spawned = thread::Builder::new().spawn_scoped(scope, move || {
                let _context = runtime.as_ref().map(Handle::enter);
                for batch in to_apply {
                    let result = apply(&batch);
                    if applied.send((batch, result)).is_err() {
                        break;
                    }
                }
            });
            let (handle, thread) = match spawned {
                Ok(handle) => (Some(handle), Ok((batches, results))),
                Err(_) => (None, Err(Cell::new(None))),
            };
            // The channels are dropped with it, which ends the thread.
            let done = work(&Self { apply, thread });
            if let Some(Err(panic)) = handle.map(ScopedJoinHandle::join) {
                std::panic::resume_unwind(panic);
            }
            done
        })
    }

    /// Begins to apply a batch. Call [`Applier::wait`] before the next batch.
    pub(super) fn begin(&self, batch: Vec<Change>) {
        match &self.thread {
            // An error means that the thread panicked.
            Ok((batches, _)) => drop(batches.send(batch)),
            Err(applied) => {
                let result = (self.apply)(&batch);
                applied.set(Some((batch, result)));
            }
        }
    }

    /// Waits for the batch that was begun.
    pub(super) fn wait(&self) -> Result<(Vec<Change>, Results), Closed> {
        let applied = match &self.thread {
            Ok((_, results)) => results.recv().ok(),
            Err(applied) => applied.take(),
        };
        let (batch, results) = applied.ok_or(Closed)?;
        Ok((batch, results?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_of_the_kernel_reaches_the_caller() {
        let apply = |_: &[Change]| panic!("the kernel says why");
        let work = |applier: &Applier<'_>| {
            applier.begin(Vec::new());
            applier.wait().is_ok()
        };
        let panicked = std::panic::catch_unwind(|| Applier::with(&apply, work)).unwrap_err();
        assert_eq!(panicked.downcast_ref(), Some(&"the kernel says why"));
    }
}
