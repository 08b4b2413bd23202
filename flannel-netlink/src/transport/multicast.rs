//! Sockets for multicast messages.
//!
//! The tokio runtime watches a socket only while a task waits for a message. Bulk changes cause
//! tens of thousands of messages. A wake-up for each would take more time than the changes.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use flannel_core::kernel::KernelError;
use libc::ENOBUFS;
use nix::sys::socket::{
    AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, bind, getsockname,
    recv, setsockopt, socket, sockopt,
};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use super::wire::{Message, messages};

/// The largest multicast message, in bytes.
const MESSAGE: usize = 32 << 10;
/// The largest number of datagrams that one call of [`Multicast::receive`] reads.
const AT_ONCE: usize = 1024;

/// A socket that receives the messages of multicast groups.
pub(crate) struct Multicast {
    socket: OwnedFd,
    /// Messages were lost, and the caller does not know it yet. The kernel drops further messages
    /// until all waiting ones are read.
    lost: bool,
    buffer: Box<[u8]>,
}

impl Multicast {
    /// Opens a socket in the network namespace of the calling thread. It is in no group yet.
    /// `bytes` is the size of its receive buffer. Without `CAP_NET_ADMIN` in the initial user
    /// namespace, the limit is the sysctl `net.core.rmem_max`.
    pub(crate) fn open(protocol: SockProtocol, bytes: usize) -> io::Result<Self> {
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let socket = socket(AddressFamily::Netlink, SockType::Raw, flags, protocol)?;
        if let Err(error) = setsockopt(&socket, sockopt::RcvBufForce, &bytes) {
            tracing::debug!(%error, "the receive buffer is limited by net.core.rmem_max");
            setsockopt(&socket, sockopt::RcvBuf, &bytes)?;
        }
        bind(socket.as_raw_fd(), &NetlinkAddr::new(0, 0))?;
        Ok(Self { socket, lost: false, buffer: vec![0; MESSAGE].into() })
    }

    /// Joins these groups and leaves all others. Group numbers are 1 to 32. Groups that the kernel
    /// does not know have no messages.
    pub(crate) fn join(&self, groups: &[u32]) -> io::Result<()> {
        let groups = groups.iter().fold(0, |groups, group| groups | 1 << (group - 1));
        let port = getsockname::<NetlinkAddr>(self.socket.as_raw_fd())?.pid();
        Ok(bind(self.socket.as_raw_fd(), &NetlinkAddr::new(port, groups))?)
    }

    /// Passes the waiting datagrams to `take`, at most [`AT_ONCE`]. Returns true if no more wait.
    /// Never blocks.
    ///
    /// `None` instead of a datagram means that messages were lost: the receive buffer overflowed
    /// (`ENOBUFS`), or a datagram was larger than `buffer`. After an overflow the kernel drops
    /// messages, without another error, until all waiting ones are read (`netlink_overrun`). So the
    /// datagrams after a loss are not passed on. `take` gets `None` when no more wait.
    pub(crate) fn receive(
        &mut self,
        mut take: impl FnMut(Option<&[u8]>) -> Result<(), KernelError>,
    ) -> Result<bool, KernelError> {
        for _ in 0..AT_ONCE {
            match read(&self.socket, &mut self.buffer) {
                Ok(len) if self.lost || len > self.buffer.len() => self.lost = true,
                Ok(len) => take(Some(&self.buffer[..len]))?,
                Err(error) if error.raw_os_error() == Some(ENOBUFS) => self.lost = true,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    if std::mem::take(&mut self.lost) {
                        take(None)?;
                    }
                    return Ok(true);
                }
                Err(error) => return Err(error.into()),
            }
        }
        Ok(false)
    }

    /// Waits for a message for which `concerns` returns true, for a malformed message, or for a
    /// loss of messages. Reads all messages that wait, so several may be reported as one.
    ///
    /// # Cancel safety
    /// No message is lost: messages are read and passed to `concerns` without waiting.
    pub(crate) async fn wait_for(
        &mut self,
        concerns: impl Fn(&Message<'_>) -> bool,
    ) -> Result<(), KernelError> {
        let has_relevant = |datagram: &[u8]| {
            messages(datagram).any(|message| message.as_ref().map_or(true, &concerns))
        };
        let mut is_concerned = false;
        while !is_concerned {
            self.readable().await?;
            while !self.receive(|datagram| {
                is_concerned |= datagram.is_none_or(has_relevant);
                Ok(())
            })? {}
        }
        Ok(())
    }

    /// Waits until there may be a datagram to read. Needs a tokio runtime with I/O.
    ///
    /// # Cancel safety
    /// Nothing is read, so nothing is lost.
    // The function that replaces `with_interest` is `unsafe`, because a type may not own its
    // descriptor.
    #[expect(deprecated, reason = "sound: the descriptor is borrowed for the whole wait")]
    pub(crate) async fn readable(&self) -> Result<(), KernelError> {
        let waiting = AsyncFd::with_interest(self.socket.as_fd(), Interest::READABLE)?;
        waiting.readable().await?.retain_ready();
        Ok(())
    }
}

/// Reads one datagram. Returns its full length, which is larger than `buffer` if it did not fit
/// (`MSG_TRUNC`). Never blocks.
fn read(socket: &OwnedFd, buffer: &mut [u8]) -> io::Result<usize> {
    Ok(recv(socket.as_raw_fd(), buffer, MsgFlags::MSG_TRUNC)?)
}

impl AsFd for Multicast {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
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

    /// Whether an epoll instance of this process watches the socket.
    fn is_watched(multicast: &Multicast) -> bool {
        let descriptor = multicast.socket.as_raw_fd().to_string();
        let watches = |text: String| {
            let watched = text.lines().filter_map(|line| line.strip_prefix("tfd:"));
            watched.map(|rest| rest.split_whitespace().next()).any(|fd| fd == Some(&descriptor))
        };
        let all = std::fs::read_dir("/proc/self/fdinfo").unwrap();
        // Another thread may close its descriptor while this one reads the list.
        all.filter_map(|info| std::fs::read_to_string(info.unwrap().path()).ok()).any(watches)
    }

    #[test]
    fn a_datagram_that_does_not_fit_is_reported() {
        in_netns_async(|| async {
            let mut multicast = Multicast::open(SockProtocol::NetlinkRoute, 1 << 20).unwrap();
            multicast.join(&LINK).unwrap();
            multicast.buffer = vec![0; 16].into();
            ip("link set lo mtu 1400");
            let waiting = timeout(Duration::from_secs(20), multicast.wait_for(|_| false)).await;
            waiting.expect("the loss is reported").unwrap();
        });
    }

    #[test]
    fn messages_wake_a_task_only_while_it_waits() {
        in_netns_async(|| async {
            let multicast = Multicast::open(SockProtocol::NetlinkRoute, 1 << 20).unwrap();
            multicast.join(&LINK).unwrap();
            let a_while = Duration::from_millis(10);
            {
                let mut waiting = std::pin::pin!(multicast.readable());
                assert!(timeout(a_while, &mut waiting).await.is_err(), "there is no message");
                assert!(is_watched(&multicast), "a task waits");
            }
            ip("link add near0 type veth peer name far0");
            assert!(!is_watched(&multicast), "no task waits any more");
            multicast.readable().await.unwrap();
            let mut buffer = vec![0; MESSAGE];
            assert!(read(&multicast.socket, &mut buffer).unwrap() > 0, "the message was kept");
            while read(&multicast.socket, &mut buffer).is_ok() {}
            assert!(timeout(a_while, multicast.readable()).await.is_err(), "all were read");
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
