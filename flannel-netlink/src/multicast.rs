//! Sockets for multicast messages. The one thing to know: messages wake only whoever waits for
//! them. While the kernel works for us its messages come by the ten thousand, and waking somebody
//! for each would cost more than the work.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use flannel_core::kernel::KernelError;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags};
use nix::sys::socket::{
    AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, bind, getsockname,
    recv, setsockopt, socket, sockopt,
};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

const ENOBUFS: i32 = 105;
/// No multicast message is longer.
const MESSAGE: usize = 32 << 10;
/// How many datagrams are read before the caller is told.
const AT_ONCE: usize = 1024;

/// A socket that hears what the kernel tells to groups.
pub(crate) struct Multicast {
    socket: OwnedFd,
    /// From the first wait on, on the runtime of whoever waits.
    gate: Option<AsyncFd<Gate>>,
}

/// An epoll instance between the socket and the runtime, which lets events through only while
/// somebody waits.
struct Gate(Epoll);

impl AsRawFd for Gate {
    fn as_raw_fd(&self) -> i32 {
        self.0.0.as_raw_fd()
    }
}

impl Multicast {
    /// Opens one in the network namespace of the calling thread, with room for `bytes` of messages
    /// not yet read: beyond what `net.core.rmem_max` gives where that is permitted. It hears
    /// nothing yet.
    pub(crate) fn open(protocol: SockProtocol, bytes: usize) -> io::Result<Self> {
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let socket = socket(AddressFamily::Netlink, SockType::Raw, flags, protocol)?;
        if let Err(error) = setsockopt(&socket, sockopt::RcvBufForce, &bytes) {
            tracing::debug!(%error, "the receive buffer keeps to net.core.rmem_max");
            setsockopt(&socket, sockopt::RcvBuf, &bytes)?;
        }
        bind(socket.as_raw_fd(), &NetlinkAddr::new(0, 0))?;
        Ok(Self { socket, gate: None })
    }

    /// Hears these groups, whose numbers are 1 to 32, and no others. Groups that the kernel does
    /// not know are silent.
    pub(crate) fn hear(&self, groups: &[u32]) -> io::Result<()> {
        let groups = groups.iter().fold(0, |groups, group| groups | 1 << (group - 1));
        let port = getsockname::<NetlinkAddr>(self.socket.as_raw_fd())?.pid();
        Ok(bind(self.socket.as_raw_fd(), &NetlinkAddr::new(port, groups))?)
    }

    /// Reads one datagram, and returns how long it is: longer than `buffer` if it did not fit.
    /// Never blocks.
    pub(crate) fn read(&self, buffer: &mut [u8]) -> io::Result<usize> {
        Ok(recv(self.socket.as_raw_fd(), buffer, MsgFlags::MSG_TRUNC)?)
    }

    /// Returns when there may be something to read.
    ///
    /// # Cancel safety
    /// Nothing is read, so nothing is lost.
    pub(crate) async fn readable(&mut self) -> Result<(), KernelError> {
        let gate = match &mut self.gate {
            Some(gate) => gate,
            none => none.insert(gate()?),
        };
        let _open = Open::new(&gate.get_ref().0, &self.socket)?;
        gate.readable().await?.clear_ready();
        Ok(())
    }
}

impl AsFd for Multicast {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

// The successor is `unsafe` because not every type keeps its descriptor for itself. An epoll
// instance does: it owns the descriptor, never changes it and closes it when dropped. Without
// unsafe code this is the way to say so.
#[expect(
    deprecated,
    reason = "sound for what owns its descriptor; the successor needs unsafe code"
)]
fn gate() -> io::Result<AsyncFd<Gate>> {
    let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
    AsyncFd::with_interest(Gate(epoll), Interest::READABLE)
}

/// Events come through for as long as this lives; what is there to read already is one.
struct Open<'a> {
    epoll: &'a Epoll,
    socket: &'a OwnedFd,
}

impl<'a> Open<'a> {
    fn new(epoll: &'a Epoll, socket: &'a OwnedFd) -> io::Result<Self> {
        epoll.add(socket, EpollEvent::new(EpollFlags::EPOLLIN, 0))?;
        Ok(Self { epoll, socket })
    }
}

impl Drop for Open<'_> {
    fn drop(&mut self) {
        // It is there, so this cannot fail.
        let _ = self.epoll.delete(self.socket);
    }
}

/// A socket on which nothing but that something happened is of interest.
pub(crate) struct Bell {
    socket: Multicast,
    /// Messages were lost, and more will be until all that is there was read.
    lost: bool,
    buffer: Box<[u8]>,
}

impl Bell {
    pub(crate) fn new(socket: Multicast) -> Self {
        Self { socket, lost: false, buffer: vec![0; MESSAGE].into() }
    }

    pub(crate) fn socket(&self) -> &Multicast {
        &self.socket
    }

    /// Returns when a datagram came that `concerns` us, or when that cannot be excluded because
    /// messages were lost. `None` is one that did not fit. Many at once are told once.
    ///
    /// # Cancel safety
    /// Nothing is lost: what was read was judged in the same breath.
    pub(crate) async fn rung(
        &mut self,
        concerns: impl Fn(Option<&[u8]>) -> bool,
    ) -> Result<(), KernelError> {
        let mut told = false;
        while !told {
            self.socket.readable().await?;
            for _ in 0..AT_ONCE {
                match self.socket.read(&mut self.buffer) {
                    Ok(len) => told |= !self.lost && concerns(self.buffer.get(..len)),
                    // From here on the kernel drops what it has to tell until everything was read.
                    Err(error) if error.raw_os_error() == Some(ENOBUFS) => self.lost = true,
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                        told |= std::mem::take(&mut self.lost);
                        break;
                    }
                    Err(error) => return Err(error.into()),
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::time::timeout;

    use super::*;
    use crate::testing::{in_netns_async, ip};

    /// `RTNLGRP_LINK`.
    const LINK: [u32; 1] = [1];

    fn is_waking(multicast: &Multicast) -> bool {
        let gate = multicast.gate.as_ref().expect("somebody waited before");
        gate.get_ref().0.wait(&mut [EpollEvent::empty()], 0_u16).unwrap() > 0
    }

    #[test]
    fn messages_wake_only_whoever_waits() {
        in_netns_async(|| async {
            let mut multicast = Multicast::open(SockProtocol::NetlinkRoute, 1 << 20).unwrap();
            multicast.hear(&LINK).unwrap();
            let a_while = Duration::from_millis(10);
            assert!(timeout(a_while, multicast.readable()).await.is_err(), "nothing happened yet");
            ip("link add near0 type veth peer name far0");
            assert!(!is_waking(&multicast), "nobody waits any more");
            multicast.readable().await.unwrap();
            let mut buffer = vec![0; MESSAGE];
            assert!(multicast.read(&mut buffer).unwrap() > 0, "but what was told is there");
            while multicast.read(&mut buffer).is_ok() {}
            assert!(timeout(a_while, multicast.readable()).await.is_err(), "all was read");
            let (told, ()) =
                tokio::join!(multicast.readable(), async { drop(ip("link set near0 up")) });
            told.unwrap();
            multicast.hear(&[]).unwrap();
            while multicast.read(&mut buffer).is_ok() {}
            ip("link set far0 up");
            let error = multicast.read(&mut buffer).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::WouldBlock, "it was told not to hear");
        });
    }
}
