//! Sockets for multicast messages.
//!
//! A message wakes a task only while that waits for one. While the kernel works for us its messages
//! come by the ten thousand, and waking a task for each would cost more than the work.

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
/// How many datagrams are read before the caller goes on.
const AT_ONCE: usize = 1024;

/// A socket that receives the messages of multicast groups.
pub(crate) struct Multicast {
    socket: OwnedFd,
    /// From the first wait on, on the runtime of the task that waits.
    gate: Option<AsyncFd<Gate>>,
    /// Messages were lost, and more will be until all messages that are there were read.
    lost: bool,
    buffer: Box<[u8]>,
}

/// What [`Multicast::receive`] reads.
pub(crate) enum Received<'a> {
    /// A datagram; `None` if it did not fit.
    Datagram(Option<&'a [u8]>),
    /// Messages were lost.
    Lost,
}

/// An epoll instance between the socket and the runtime, which lets events through only while a
/// task waits.
struct Gate(Epoll);

impl AsRawFd for Gate {
    fn as_raw_fd(&self) -> i32 {
        self.0.0.as_raw_fd()
    }
}

impl Multicast {
    /// Opens one in the network namespace of the calling thread, with room for `bytes` of messages
    /// not yet read: beyond what `net.core.rmem_max` gives where that is permitted. It is
    /// in no group yet.
    pub(crate) fn open(protocol: SockProtocol, bytes: usize) -> io::Result<Self> {
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let socket = socket(AddressFamily::Netlink, SockType::Raw, flags, protocol)?;
        if let Err(error) = setsockopt(&socket, sockopt::RcvBufForce, &bytes) {
            tracing::debug!(%error, "the receive buffer keeps to net.core.rmem_max");
            setsockopt(&socket, sockopt::RcvBuf, &bytes)?;
        }
        bind(socket.as_raw_fd(), &NetlinkAddr::new(0, 0))?;
        Ok(Self { socket, gate: None, lost: false, buffer: vec![0; MESSAGE].into() })
    }

    /// Joins these groups, whose numbers are 1 to 32, and leaves all others. Groups that the kernel
    /// does not know are silent.
    pub(crate) fn join(&self, groups: &[u32]) -> io::Result<()> {
        let groups = groups.iter().fold(0, |groups, group| groups | 1 << (group - 1));
        let port = getsockname::<NetlinkAddr>(self.socket.as_raw_fd())?.pid();
        Ok(bind(self.socket.as_raw_fd(), &NetlinkAddr::new(port, groups))?)
    }

    /// Gives the datagrams that are there to `take`, at most [`AT_ONCE`]; true if those were all.
    ///
    /// After an overrun the kernel drops messages, without another error, until everything was
    /// read. So `take` gets [`Received::Lost`] then, and nothing before.
    pub(crate) fn receive(
        &mut self,
        mut take: impl FnMut(Received<'_>) -> Result<(), KernelError>,
    ) -> Result<bool, KernelError> {
        for _ in 0..AT_ONCE {
            match read(&self.socket, &mut self.buffer) {
                Ok(_) if self.lost => {}
                Ok(len) => take(Received::Datagram(self.buffer.get(..len)))?,
                Err(error) if error.raw_os_error() == Some(ENOBUFS) => self.lost = true,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    if std::mem::take(&mut self.lost) {
                        take(Received::Lost)?;
                    }
                    return Ok(true);
                }
                Err(error) => return Err(error.into()),
            }
        }
        Ok(false)
    }

    /// Returns when a datagram arrived that `concerns` the caller, or when that cannot be excluded
    /// because messages were lost. `None` is a datagram that did not fit. Many datagrams at once
    /// count as one.
    ///
    /// # Cancel safety
    /// Nothing is lost: the datagrams are read and judged without waiting.
    pub(crate) async fn wait_for(
        &mut self,
        concerns: impl Fn(Option<&[u8]>) -> bool,
    ) -> Result<(), KernelError> {
        let mut is_concerned = false;
        while !is_concerned {
            self.readable().await?;
            self.receive(|received| {
                is_concerned |= match received {
                    Received::Datagram(datagram) => concerns(datagram),
                    Received::Lost => true,
                };
                Ok(())
            })?;
        }
        Ok(())
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

/// Reads one datagram, and returns how long it is: longer than `buffer` if it did not fit. Never
/// blocks.
fn read(socket: &OwnedFd, buffer: &mut [u8]) -> io::Result<usize> {
    Ok(recv(socket.as_raw_fd(), buffer, MsgFlags::MSG_TRUNC)?)
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

/// Events come through for as long as this lives; a datagram that is there already is one.
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

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::time::timeout;

    use super::*;
    use crate::testing::{in_netns_async, ip};

    /// `RTNLGRP_LINK`.
    const LINK: [u32; 1] = [1];

    fn is_waking(multicast: &Multicast) -> bool {
        let gate = multicast.gate.as_ref().expect("a task waited before");
        gate.get_ref().0.wait(&mut [EpollEvent::empty()], 0_u16).unwrap() > 0
    }

    #[test]
    fn messages_wake_a_task_only_while_it_waits() {
        in_netns_async(|| async {
            let mut multicast = Multicast::open(SockProtocol::NetlinkRoute, 1 << 20).unwrap();
            multicast.join(&LINK).unwrap();
            let a_while = Duration::from_millis(10);
            assert!(timeout(a_while, multicast.readable()).await.is_err(), "nothing happened yet");
            ip("link add near0 type veth peer name far0");
            assert!(!is_waking(&multicast), "no task waits any more");
            multicast.readable().await.unwrap();
            let mut buffer = vec![0; MESSAGE];
            assert!(read(&multicast.socket, &mut buffer).unwrap() > 0, "but the message is there");
            while read(&multicast.socket, &mut buffer).is_ok() {}
            assert!(timeout(a_while, multicast.readable()).await.is_err(), "all was read");
            let (readable, ()) =
                tokio::join!(multicast.readable(), async { drop(ip("link set near0 up")) });
            readable.unwrap();
            multicast.join(&[]).unwrap();
            while read(&multicast.socket, &mut buffer).is_ok() {}
            ip("link set far0 up");
            let error = read(&multicast.socket, &mut buffer).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::WouldBlock, "it left the group");
        });
    }
}
