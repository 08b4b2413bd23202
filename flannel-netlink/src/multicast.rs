//! A socket for multicast messages on a runtime. The one thing to know: it may be opened where there is no runtime, and
//! is made known to one on its first use.

use std::io;
use std::os::fd::AsFd;

use flannel_core::KernelError;
use neli::socket::NlSocket;
use nix::sys::socket::{setsockopt, sockopt};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

const ENOBUFS: i32 = 105;

/// The socket, before and after it is known to a runtime.
pub(crate) enum Multicast {
    Bare(NlSocket),
    Registered(AsyncFd<NlSocket>),
    /// Registering failed.
    Lost,
}

impl Multicast {
    pub(crate) fn new(socket: NlSocket) -> Self {
        Self::Bare(socket)
    }

    /// The socket, known to the runtime; `improve` sees it when it becomes so.
    pub(crate) fn register(
        &mut self,
        improve: impl FnOnce(&AsyncFd<NlSocket>),
    ) -> Result<&AsyncFd<NlSocket>, KernelError> {
        if matches!(self, Self::Bare(_))
            && let Self::Bare(socket) = std::mem::replace(self, Self::Lost)
        {
            let socket = registered(socket)?;
            improve(&socket);
            *self = Self::Registered(socket);
        }
        match self {
            Self::Registered(socket) => Ok(socket),
            _ => Err(KernelError::explained(ENOBUFS, "the socket could not be registered with the runtime")),
        }
    }
}

// The successor is `unsafe` because not every type keeps its descriptor for itself. An NlSocket does: it owns the
// descriptor, never changes it and closes it when dropped. Without unsafe code this is the way to say so.
#[expect(deprecated, reason = "sound for a socket that owns its descriptor; the successor needs unsafe code")]
fn registered(socket: NlSocket) -> io::Result<AsyncFd<NlSocket>> {
    AsyncFd::with_interest(socket, Interest::READABLE)
}

/// Room for `bytes` of messages not yet read, beyond what `net.core.rmem_max` gives, where that is permitted.
pub(crate) fn force_receive_buffer(socket: &impl AsFd, bytes: usize) {
    if let Err(error) = setsockopt(socket, sockopt::RcvBufForce, &bytes) {
        tracing::debug!(%error, "the receive buffer keeps to net.core.rmem_max");
    }
}
