//! Small additions to tokio and std: tasks, descriptors, timers, and locks.

use std::io;
use std::os::fd::AsRawFd;
use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
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
}

impl Drop for Task {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Waits for `event`. Without an event it waits forever.
pub(crate) async fn or_never(event: Option<impl Future<Output = ()>>) {
    match event {
        Some(event) => event.await,
        None => std::future::pending().await,
    }
}

/// Locks a mutex whose data stay valid if a thread panics while it holds the lock.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Registers a descriptor with the current runtime, to wait until it is readable.
///
/// `inner` must own its descriptor, never change it, and close it only when it is dropped.
///
/// # Panics
/// There is no tokio runtime with I/O enabled.
#[expect(
    deprecated,
    reason = "sound for a type that owns its descriptor; the successor needs unsafe code"
)]
pub(crate) fn readable<T: AsRawFd>(inner: T) -> io::Result<AsyncFd<T>> {
    AsyncFd::with_interest(inner, Interest::READABLE)
}
