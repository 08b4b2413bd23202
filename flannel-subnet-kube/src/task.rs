//! Tasks that end with their owner.

use tokio::task::AbortHandle;

/// A task that ends with its owner.
#[derive(Debug)]
pub(crate) struct Task(AbortHandle);

impl Task {
    /// Spawns a task on the current runtime.
    ///
    /// # Panics
    /// There is no tokio runtime.
    pub(crate) fn spawn(work: impl Future<Output = ()> + Send + 'static) -> Self {
        Self(tokio::spawn(work).abort_handle())
    }
}

impl Drop for Task {
    fn drop(&mut self) {
        self.0.abort();
    }
}
