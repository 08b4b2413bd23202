//! Small additions to tokio and std: tasks that end with their owner, and locks.

use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::task::AbortHandle;

/// A task that ends when its owner drops it.
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

    /// Ends the task, like a panic.
    #[cfg(test)]
    pub(crate) fn abort(&self) {
        self.0.abort();
    }
}

impl Drop for Task {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Locks a mutex whose data stay valid if a thread panics while it holds the lock.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
