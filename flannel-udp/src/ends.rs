//! The two ends of a data plane: a queue of a tun device, and a UDP socket.

use std::cell::Cell;
use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use nix::cmsg_space;
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::net::if_::if_nametoindex;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{
    AddressFamily, ControlMessage, ControlMessageOwned, MsgFlags, SockFlag, SockType,
    SockaddrStorage, bind, connect, getsockname, getsockopt, recvmsg, sendmsg, setsockopt, socket,
    sockopt,
};
use rustix::net::sockopt::{ip_mtu, ipv6_mtu};
use tun_rs::DeviceBuilder;

use crate::error::Error;
use crate::options::Options;
use crate::socket_group::SocketGroup;

/// The size of the buffers of sockets, in bytes.
const BUFFER: usize = 7 << 20;
/// The size of a receive buffer, as the kernel counts it, which a million small datagrams a second
/// fill in more than 4 ms. Buffers in user namespaces are smaller.
const PATIENT: usize = 4 << 20;
/// The longest time for which a packet waits while the buffer of its socket is full.
const PATIENCE: Duration = Duration::from_millis(500);

/// Packets of pods, each with a vnet header.
pub(crate) trait Device {
    /// Reads a packet. Fails with `EAGAIN` if there is none.
    fn read(&self, buffer: &mut [u8]) -> Result<usize, Errno>;
    fn write(&self, parts: &[IoSlice<'_>]) -> Result<(), Errno>;
}

/// Datagrams of nodes.
pub(crate) trait Wire {
    /// Sends datagrams to a node. Each but the last has `size` bytes. `None` if it is one datagram.
    fn send(&self, to: SocketAddr, parts: &[IoSlice<'_>], size: Option<u16>) -> Result<(), Errno>;
    /// The MTU of the path to a node, in bytes, or `None` if it is not known.
    fn path_mtu(&self, to: SocketAddr) -> Option<u16>;
    /// Receives datagrams of a node. Fails with `EAGAIN` if there are none.
    fn receive(&self, buffer: &mut [u8]) -> Result<Received, Errno>;
    /// Whether a flood of datagrams does not fill the buffer within a few milliseconds.
    fn may_rest(&self) -> bool;
}

/// Datagrams that were received.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Received {
    /// The length of all datagrams together.
    pub(crate) len: usize,
    /// The size of each datagram but the last.
    pub(crate) size: usize,
    pub(crate) from: SocketAddr,
}

/// A queue of a tun device, and the sockets for its packets.
#[derive(Debug)]
pub(crate) struct Lane {
    pub(crate) queue: Queue,
    /// The sockets that receive, and those that send, for IPv4 and IPv6.
    pub(crate) receive: [Option<Socket>; 2],
    pub(crate) send: [Option<Socket>; 2],
}

impl Lane {
    /// Opens the device and the sockets. A device that does not exist is made, and stays when the
    /// process ends. Returns the guards of the port too.
    ///
    /// # Errors
    /// The device or a socket cannot be opened.
    pub(crate) fn open(options: &Options, count: usize) -> Result<(Vec<Self>, Vec<Socket>), Error> {
        let mut lanes: Vec<Self> = Queue::open(&options.device, count)?
            .into_iter()
            .map(|queue| Self { queue, receive: [None, None], send: [None, None] })
            .collect();
        let mut guards = Vec::new();
        let addresses: Vec<SocketAddr> =
            options.local.iter().map(|local| SocketAddr::from((*local, options.port))).collect();
        for (address, group) in addresses.iter().zip(SocketGroup::open(&addresses, count)?) {
            let family = usize::from(address.is_ipv6());
            for (n, lane) in lanes.iter_mut().enumerate() {
                let sender = if options.one_port {
                    // A second socket with the port would get datagrams that nobody reads.
                    let receiver = &group.receivers[n % group.receivers.len()];
                    receiver.duplicate().map_err(|source| Error::socket(*address, source))?
                } else {
                    Socket::bind((address.ip(), 0).into(), Binding::Sender)?
                };
                lane.send[family] = Some(sender);
            }
            for (lane, socket) in lanes.iter_mut().zip(group.receivers) {
                lane.receive[family] = Some(socket);
            }
            guards.extend(group.guards);
        }
        Ok((lanes, guards))
    }

    /// The descriptors of the lane, in the order in which [`Lane::from_fds`] takes them.
    pub(crate) fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let sockets = self.receive.iter().chain(&self.send).flatten();
        [self.queue.as_fd()].into_iter().chain(sockets.map(AsFd::as_fd))
    }

    /// A lane from descriptors that another process has opened with these options. `receives` says
    /// whether it has sockets that receive.
    pub(crate) fn from_fds(
        options: &Options,
        fds: &mut impl Iterator<Item = OwnedFd>,
        receives: bool,
    ) -> Option<Self> {
        let queue = Queue(File::from(fds.next()?));
        let mut socket = |is_v6| {
            let has_family = options.local.iter().any(|local| local.is_ipv6() == is_v6);
            if has_family { fds.next().map(Socket) } else { None }
        };
        let receive = if receives { [socket(false), socket(true)] } else { [None, None] };
        let send = [socket(false), socket(true)];
        Some(Self { queue, receive, send })
    }
}

/// A queue of a tun device.
#[derive(Debug)]
pub(crate) struct Queue(File);

impl Queue {
    /// Opens queues of a device.
    fn open(device: &str, count: usize) -> Result<Vec<Self>, Error> {
        let named = |error: io::Error| Error::device(device, error);
        let builder = DeviceBuilder::new().name(device).offload(true).multi_queue(true);
        let first = builder.inherit_enable_state().build_sync().map_err(named)?;
        first.persist().map_err(named)?;
        let mut queues = Vec::new();
        for _ in 1..count {
            let queue = first.try_clone().and_then(|queue| Self::new(queue.as_fd()));
            queues.push(queue.map_err(named)?);
        }
        queues.push(Self::new(first.as_fd()).map_err(named)?);
        Ok(queues)
    }

    fn new(fd: BorrowedFd<'_>) -> io::Result<Self> {
        let fd = fd.try_clone_to_owned()?;
        fcntl(&fd, FcntlArg::F_SETFL(OFlag::O_RDWR | OFlag::O_NONBLOCK))?;
        Ok(Self(File::from(fd)))
    }
}

impl AsFd for Queue {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

fn errno(error: &io::Error) -> Errno {
    Errno::from_raw(error.raw_os_error().unwrap_or(0))
}

impl Device for Queue {
    fn read(&self, buffer: &mut [u8]) -> Result<usize, Errno> {
        (&self.0).read(buffer).map_err(|error| errno(&error))
    }

    fn write(&self, parts: &[IoSlice<'_>]) -> Result<(), Errno> {
        // The kernel takes a packet as a whole.
        (&self.0).write_vectored(parts).map(drop).map_err(|error| errno(&error))
    }
}

/// Whether the device of a queue is in this namespace and has this name. Returns `true` if `/proc`
/// cannot be read.
pub(crate) fn has_device(queue: &Queue, name: &str) -> bool {
    let path = format!("/proc/self/fdinfo/{}", queue.0.as_raw_fd());
    let Ok(info) = std::fs::read_to_string(path) else { return true };
    // linux `tun_chr_show_fdinfo`. The name is empty if the device is gone.
    let now = info.lines().find_map(|line| line.strip_prefix("iff:"));
    now.is_none_or(|now| now.trim() == name && if_nametoindex(name).is_ok())
}

/// What a socket is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Binding {
    /// It receives, and has its port alone.
    Receiver,
    /// It receives, and belongs to a [`SocketGroup`].
    SharedReceiver,
    /// The first and the last socket of a group, which receive nothing.
    FirstGuard,
    LastGuard,
    /// It only sends.
    Sender,
}

/// A UDP socket.
#[derive(Debug)]
pub(crate) struct Socket(OwnedFd);

impl Socket {
    /// A socket with this address.
    ///
    /// # Errors
    /// The node has no such address, or another socket has the port.
    pub(crate) fn bind(address: SocketAddr, binding: Binding) -> Result<Self, Error> {
        Self::try_bind(address, binding).map_err(|source| Error::socket(address, source))
    }

    /// Does what [`Self::bind`] does, and returns the error of the kernel.
    pub(crate) fn try_bind(address: SocketAddr, binding: Binding) -> io::Result<Self> {
        let family = if address.is_ipv6() { AddressFamily::Inet6 } else { AddressFamily::Inet };
        let fd = socket(family, SockType::Datagram, SockFlag::SOCK_CLOEXEC, None)?;
        if address.is_ipv6() {
            setsockopt(&fd, sockopt::Ipv6V6Only, &true)?;
        }
        // More than `net.core.wmem_max` needs CAP_NET_ADMIN outside user namespaces.
        setsockopt(&fd, sockopt::SndBufForce, &BUFFER)
            .or_else(|_| setsockopt(&fd, sockopt::SndBuf, &BUFFER))?;
        if matches!(binding, Binding::Receiver | Binding::SharedReceiver) {
            setsockopt(&fd, sockopt::RcvBufForce, &BUFFER)
                .or_else(|_| setsockopt(&fd, sockopt::RcvBuf, &BUFFER))?;
        } else {
            // Nobody reads it. The kernel raises this to its least size.
            setsockopt(&fd, sockopt::RcvBuf, &0)?;
        }
        if binding != Binding::Sender {
            // Since Linux 5.0. Without it each datagram is received alone. Guards have it too: the
            // kernel may ask one of a group before it has read the port.
            let _ = setsockopt(&fd, sockopt::UdpGroSegment, &true);
        }
        if matches!(binding, Binding::SharedReceiver | Binding::LastGuard) {
            setsockopt(&fd, sockopt::ReusePort, &true)?;
        }
        let address = SockaddrStorage::from(address);
        bind(fd.as_raw_fd(), &address)?;
        if matches!(binding, Binding::FirstGuard | Binding::LastGuard) {
            connect(fd.as_raw_fd(), &address)?;
        }
        if binding == Binding::FirstGuard {
            setsockopt(&fd, sockopt::ReusePort, &true)?;
        }
        Ok(Self(fd))
    }

    /// Another descriptor of the socket.
    fn duplicate(&self) -> io::Result<Self> {
        self.0.try_clone().map(Self)
    }
}

impl From<OwnedFd> for Socket {
    fn from(fd: OwnedFd) -> Self {
        Self(fd)
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// A UDP socket of a thread that ends when the descriptor `stop` is readable.
#[derive(Debug)]
pub(crate) struct Port<'a> {
    socket: &'a Socket,
    stop: BorrowedFd<'a>,
    /// The last wait for the socket was in vain.
    is_stuck: Cell<bool>,
}

impl<'a> Port<'a> {
    pub(crate) const fn new(socket: &'a Socket, stop: BorrowedFd<'a>) -> Self {
        Self { socket, stop, is_stuck: Cell::new(false) }
    }
}

impl Wire for Port<'_> {
    /// Waits while the buffer of the socket is full, at most [`PATIENCE`]. If that was in vain, it
    /// does not wait again until there was room. Packets to all nodes share this buffer. Queues of
    /// devices are usually smaller, so that packets to a slow node are dropped there and leave room
    /// for others.
    fn send(&self, to: SocketAddr, parts: &[IoSlice<'_>], size: Option<u16>) -> Result<(), Errno> {
        let fd = self.socket.as_fd();
        let to = SockaddrStorage::from(to);
        let size = size.as_ref().map(ControlMessage::UdpGsoSegments);
        let send = || {
            let flags = MsgFlags::MSG_DONTWAIT;
            sendmsg(fd.as_raw_fd(), parts, size.as_slice(), flags, Some(&to)).map(drop)
        };
        let result = match send() {
            Err(Errno::EAGAIN) if !self.is_stuck.get() => {
                let patience = PollTimeout::try_from(PATIENCE).unwrap_or(PollTimeout::ZERO);
                let mut ready = [
                    PollFd::new(self.stop, PollFlags::POLLIN),
                    PollFd::new(fd, PollFlags::POLLOUT),
                ];
                self.is_stuck.set(poll(&mut ready, patience) == Ok(0));
                send()
            }
            result => result,
        };
        if result.is_ok() {
            self.is_stuck.set(false);
        }
        result
    }

    fn path_mtu(&self, to: SocketAddr) -> Option<u16> {
        // Only a connected socket has one. The kernel remembers it for the address.
        let from = getsockname::<SockaddrStorage>(self.socket.0.as_raw_fd()).ok()?;
        let mut from = address_of(&from)?;
        from.set_port(0);
        let probe = UdpSocket::bind(from).ok()?;
        probe.connect(to).ok()?;
        let mtu = if to.is_ipv6() { ipv6_mtu(&probe) } else { ip_mtu(&probe) };
        // Loopback devices have larger ones.
        Some(u16::try_from(mtu.ok()?).unwrap_or(u16::MAX))
    }

    fn may_rest(&self) -> bool {
        getsockopt(self.socket, sockopt::RcvBuf).is_ok_and(|size| size >= PATIENT)
    }

    fn receive(&self, buffer: &mut [u8]) -> Result<Received, Errno> {
        let mut control = cmsg_space!(i32);
        let mut parts = [IoSliceMut::new(buffer)];
        let message = recvmsg::<SockaddrStorage>(
            self.socket.0.as_raw_fd(),
            &mut parts,
            Some(&mut control),
            MsgFlags::MSG_DONTWAIT,
        )?;
        let mut size = message.bytes;
        for control in message.cmsgs()? {
            if let ControlMessageOwned::UdpGroSegments(segment) = control {
                size = usize::try_from(segment).unwrap_or(0);
            }
        }
        let from = message.address.as_ref().and_then(address_of).ok_or(Errno::EAFNOSUPPORT)?;
        Ok(Received { len: message.bytes, size: size.max(1), from })
    }
}

fn address_of(address: &SockaddrStorage) -> Option<SocketAddr> {
    let v4 = address.as_sockaddr_in().map(|v4| SocketAddr::V4((*v4).into()));
    v4.or_else(|| address.as_sockaddr_in6().map(|v6| SocketAddr::V6((*v6).into())))
}
