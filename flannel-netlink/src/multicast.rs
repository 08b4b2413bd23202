//! Sockets for multicast messages on a runtime. The one thing to know: it may be opened where there is no runtime, and
//! is made known to one on its first use.

use std::io;
use std::os::fd::AsFd;

use flannel_core::KernelError;
use neli::consts::socket::Msg;
use neli::socket::NlSocket;
use nix::sys::socket::{setsockopt, sockopt};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

const ENOBUFS: i32 = 105;
/// No multicast message is longer.
const MESSAGE: usize = 32 << 10;
/// How many datagrams are read before the caller is told.
const AT_ONCE: usize = 1024;

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

/// A socket on which nothing but that something happened is of interest.
pub(crate) struct Bell {
    socket: Multicast,
    /// Bytes for messages not yet read; what is lost is known to be lost.
    room: usize,
    /// Messages were lost, and more will be until all that is there was read.
    lost: bool,
    buffer: Box<[u8]>,
}

impl Bell {
    pub(crate) fn new(socket: NlSocket, room: usize) -> io::Result<Self> {
        socket.nonblock()?;
        socket.set_recv_buffer_size(room)?;
        Ok(Self { socket: Multicast::new(socket), room, lost: false, buffer: vec![0; MESSAGE].into() })
    }

    /// The socket, known to the runtime from now on.
    pub(crate) fn socket(&mut self) -> Result<&NlSocket, KernelError> {
        Ok(self.socket.register(|socket| force_receive_buffer(socket, self.room))?.get_ref())
    }

    /// Returns when a datagram came that `concerns` us, or when that cannot be excluded because messages were lost.
    /// `None` is one that did not fit. Many at once are told once.
    ///
    /// # Cancel safety
    /// Nothing is lost: what was read was judged in the same breath.
    pub(crate) async fn rung(&mut self, concerns: impl Fn(Option<&[u8]>) -> bool) -> Result<(), KernelError> {
        let mut told = false;
        while !told {
            let socket = self.socket.register(|socket| force_receive_buffer(socket, self.room))?;
            let mut ready = socket.readable().await?;
            for _ in 0..AT_ONCE {
                match ready.try_io(|socket| socket.get_ref().recv(&mut self.buffer, Msg::TRUNC)) {
                    Ok(Ok((len, _))) => told |= !self.lost && concerns(self.buffer.get(..len)),
                    // From here on the kernel drops what it has to tell until everything was read.
                    Ok(Err(error)) if error.raw_os_error() == Some(ENOBUFS) => self.lost = true,
                    Ok(Err(error)) if error.kind() == io::ErrorKind::Interrupted => {}
                    Ok(Err(error)) => return Err(error.into()),
                    Err(_nothing_left) => {
                        told |= std::mem::take(&mut self.lost);
                        break;
                    }
                }
            }
        }
        Ok(())
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
