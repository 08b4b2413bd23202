//! Descriptors that tokio watches.

use std::io;
use std::os::fd::AsRawFd;

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Registers a descriptor with the current runtime, to wait until it is readable.
///
/// `inner` must own its descriptor, never change it, and close it only when it is dropped.
///
/// # Panics
/// The caller is not in a tokio runtime with I/O enabled.
#[expect(
    deprecated,
    reason = "sound for a type that owns its descriptor; the successor needs unsafe code"
)]
pub(crate) fn readable<T: AsRawFd>(inner: T) -> io::Result<AsyncFd<T>> {
    AsyncFd::with_interest(inner, Interest::READABLE)
}
