//! The end of a process with a data plane. Any thread may ask for it, and the main thread waits
//! for it.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::OnceLock;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::EventFd;

/// How a process with a data plane has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// It was told to end, another process has taken over, or nobody used it any more.
    Done,
    /// Its data plane could not go on, because the device was deleted or a thread panicked. The
    /// reason is on standard error. A new process makes the device again.
    Failed,
}

/// Whether and how the process ends. The first result counts.
#[derive(Debug)]
pub(crate) struct Ending {
    ended: OnceLock<Ended>,
    event: EventFd,
}

impl Ending {
    /// # Errors
    /// The process has no descriptor left.
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self { ended: OnceLock::new(), event: EventFd::new()? })
    }

    /// Asks for the end.
    pub(crate) fn end(&self, how: Ended) {
        if self.ended.set(how).is_ok() {
            let _ = self.event.write(1);
        }
    }

    pub(crate) fn get(&self) -> Option<Ended> {
        self.ended.get().copied()
    }

    /// Waits until the descriptor can be read, or for the end, which is returned.
    ///
    /// # Errors
    /// The kernel refuses to wait.
    pub(crate) fn or_readable(&self, fd: BorrowedFd<'_>) -> io::Result<Option<Ended>> {
        let mut ready = [self.event.as_fd(), fd].map(|fd| PollFd::new(fd, PollFlags::POLLIN));
        match poll(&mut ready, PollTimeout::NONE) {
            Ok(_) | Err(Errno::EINTR) => Ok(self.get()),
            Err(errno) => Err(errno.into()),
        }
    }
}
