//! Netlink by hand: bytes out, bytes in.
//!
//! This shares only neli's socket type with the measured code, so that a mistake there cannot hide
//! itself here.

use std::io;
use std::net::IpAddr;
use std::time::Duration;

use anyhow::{Context, ensure};
use flannel_core::address::Family;
use neli::consts::socket::{Msg, NlFamily};
use neli::socket::NlSocket;
use neli::utils::Groups;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::runtime::{Builder, Runtime};

pub(crate) const GETADDR: u16 = 22;
pub(crate) const NEWROUTE: u16 = 24;
pub(crate) const DELROUTE: u16 = 25;
pub(crate) const GETROUTE: u16 = 26;
pub(crate) const NEWNEIGH: u16 = 28;
pub(crate) const DELNEIGH: u16 = 29;
pub(crate) const GETNEIGH: u16 = 30;
pub(crate) const NEWNEXTHOP: u16 = 104;
pub(crate) const DELNEXTHOP: u16 = 105;
pub(crate) const GETNEXTHOP: u16 = 106;

/// REQUEST.
pub(crate) const PLAIN: u16 = 0x1;
/// REQUEST | CREATE | REPLACE.
pub(crate) const PUT: u16 = 0x1 | 0x400 | 0x100;
/// REQUEST | DUMP.
pub(crate) const DUMP: u16 = 0x1 | 0x300;
const ACK: u16 = 0x4;

pub(crate) const PERMANENT: u16 = 0x80;
pub(crate) const REACHABLE: u16 = 0x02;
/// `NTF_SELF`.
pub(crate) const SELF: u8 = 0x02;
pub(crate) const AF_BRIDGE: u8 = 7;
/// `RTNH_F_ONLINK`.
pub(crate) const ONLINK: u8 = 4;
/// Flannel's route protocol.
pub(crate) const PROTOCOL: u8 = 241;
/// `RTA_CACHEINFO`.
const CACHEINFO: u16 = 12;
/// `RTPROT_STATIC`, the protocol of an administrator.
pub(crate) const STATIC: u8 = 4;
const MAIN: u8 = 254;
const UNICAST: u8 = 1;
pub(crate) const BLACKHOLE: u8 = 6;
/// RT_SCOPE_SITE.
pub(crate) const SITE: u8 = 200;

const ERROR: u16 = 2;
const DONE: u16 = 3;
/// The length of `struct nlmsghdr`.
pub(crate) const HEADER: usize = 16;
/// The kernel fills at most 32 KiB at a time.
const BUFFER: usize = 64 << 10;
/// The timeout for a message.
const PATIENCE: Duration = Duration::from_secs(60);

/// A message of a kind, with flags, a header and attributes.
pub(crate) fn message(
    kind: u16,
    flags: u16,
    header: &[u8],
    attributes: &[(u16, &[u8])],
) -> Vec<u8> {
    let mut bytes = vec![0; HEADER];
    bytes.extend_from_slice(header);
    for (kind, value) in attributes {
        let len = 4 + value.len() as u16;
        bytes.extend_from_slice(&len.to_ne_bytes());
        bytes.extend_from_slice(&kind.to_ne_bytes());
        bytes.extend_from_slice(value);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
    }
    let len = bytes.len() as u32;
    bytes[..4].copy_from_slice(&len.to_ne_bytes());
    bytes[4..6].copy_from_slice(&kind.to_ne_bytes());
    bytes[6..8].copy_from_slice(&flags.to_ne_bytes());
    bytes
}

/// `struct ndmsg`.
pub(crate) fn ndmsg(family: u8, index: u32, state: u16, flags: u8) -> [u8; 12] {
    let [a, b, c, d] = index.to_ne_bytes();
    let [e, f] = state.to_ne_bytes();
    [family, 0, 0, 0, a, b, c, d, e, f, flags, 0]
}

/// `struct rtmsg`: main table, unicast.
pub(crate) fn rtmsg(family: Family, len: u8, protocol: u8, flags: u8) -> [u8; 12] {
    [af(family), len, 0, 0, MAIN, protocol, 0, UNICAST, flags, 0, 0, 0]
}

/// `struct nhmsg`.
pub(crate) fn nhmsg(family: u8, protocol: u8, flags: u8) -> [u8; 8] {
    [family, 0, protocol, 0, flags, 0, 0, 0]
}

pub(crate) fn octets(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(a) => a.octets().to_vec(),
        IpAddr::V6(a) => a.octets().to_vec(),
    }
}

pub(crate) const fn af(family: Family) -> u8 {
    match family {
        Family::V4 => 2,
        Family::V6 => 10,
    }
}

/// A connection to the kernel, in the network namespace of the thread that opened it. The kernel
/// answers before a send returns, so a receive never blocks.
pub(crate) struct Raw {
    socket: NlSocket,
    buffer: Vec<u8>,
}

impl Raw {
    pub(crate) fn open() -> anyhow::Result<Self> {
        Self::open_to(NlFamily::Route)
    }

    /// A connection to another family than rtnetlink.
    pub(crate) fn open_to(family: NlFamily) -> anyhow::Result<Self> {
        let socket = NlSocket::connect(family, None, Groups::empty())?;
        socket.enable_strict_checking(true)?;
        Ok(Self { socket, buffer: vec![0; BUFFER] })
    }

    /// Sends messages, of which only the last asks for an answer (see [`last_acknowledged`]), and
    /// waits for it.
    pub(crate) fn exchange(&mut self, messages: &[u8]) -> anyhow::Result<()> {
        self.socket.send(messages, Msg::empty())?;
        let (len, _) = self.socket.recv(&mut self.buffer, Msg::DONTWAIT)?;
        ensure!(len >= HEADER + 4, "the kernel's answer has {len} bytes");
        let errno = i32::from_ne_bytes(self.buffer[HEADER..HEADER + 4].try_into()?);
        ensure!(
            errno == 0,
            "the kernel refused a message: {}",
            io::Error::from_raw_os_error(-errno)
        );
        Ok(())
    }

    /// Sends one message, and returns the first datagram of the answer.
    pub(crate) fn ask(&mut self, message: &[u8]) -> anyhow::Result<Vec<u8>> {
        self.socket.send(message, Msg::empty())?;
        let (len, _) = self.socket.recv(&mut self.buffer, Msg::DONTWAIT)?;
        Ok(self.buffer[..len].to_vec())
    }

    /// Carries out one message.
    pub(crate) fn carry_out(&mut self, message: &[u8]) -> anyhow::Result<()> {
        self.exchange(&last_acknowledged(&[message.to_vec()]))
    }

    /// Reads a table, passes each datagram to `take`, and returns the number of bytes.
    pub(crate) fn dump(
        &mut self,
        request: &[u8],
        mut take: impl FnMut(&[u8]),
    ) -> anyhow::Result<usize> {
        self.socket.send(request, Msg::empty())?;
        let mut bytes = 0;
        loop {
            let (len, _) = self.socket.recv(&mut self.buffer, Msg::DONTWAIT)?;
            let datagram = &self.buffer[..len];
            bytes += len;
            take(datagram);
            // The dump ends with a message of 20 bytes. An error has a datagram of its own.
            let last = len.checked_sub(HEADER + 4).context("a short answer")?;
            let first = u16_at(datagram, 4);
            ensure!(first != ERROR, "the kernel refused a dump");
            if first == DONE || (u32_at(datagram, last) == 20 && u16_at(datagram, last + 4) == DONE)
            {
                return Ok(bytes);
            }
        }
    }
}

/// Joins messages. The last one requests an acknowledgement. The kernel always reports errors.
pub(crate) fn last_acknowledged(messages: &[Vec<u8>]) -> Vec<u8> {
    let mut bytes = messages.concat();
    let last = bytes.len() - messages.last().map_or(0, Vec::len);
    let flags = u16_at(&bytes, last + 6) | ACK;
    bytes[last + 6..last + 8].copy_from_slice(&flags.to_ne_bytes());
    bytes
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_ne_bytes([bytes[at], bytes[at + 1]])
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

/// An object in the kernel, without attributes that change by themselves (ages, counters).
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RawObject {
    pub(crate) id: Id,
    header: Vec<u8>,
    attributes: Vec<(u16, Vec<u8>)>,
}

/// The identity of an object.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) enum Id {
    /// On a link, by address.
    Neigh(u32, Vec<u8>),
    /// On a link, by MAC address.
    Fdb(u32, Vec<u8>),
    Nexthop(u32),
    /// By destination.
    Route(Vec<u8>),
}

impl RawObject {
    /// The value of an attribute.
    pub(crate) fn attribute(&self, kind: u16) -> Option<&[u8]> {
        self.attributes.iter().find(|(k, _)| *k == kind).map(|(_, value)| value.as_slice())
    }
}

/// The objects that a datagram reports as present. Deleted ones are ignored.
pub(crate) fn objects_in(mut datagram: &[u8]) -> Vec<RawObject> {
    let mut all = Vec::new();
    while datagram.len() >= HEADER {
        let len = (u32_at(datagram, 0) as usize).clamp(HEADER, datagram.len());
        all.extend(read(u16_at(datagram, 4), &datagram[HEADER..len]));
        datagram = &datagram[len.next_multiple_of(4).min(datagram.len())..];
    }
    all
}

fn read(kind: u16, payload: &[u8]) -> Option<RawObject> {
    let is_route = kind == NEWROUTE;
    let (header, volatile): (_, &[u16]) = match kind {
        // Cache info, probes.
        NEWNEIGH => (12, &[3, 4]),
        NEWROUTE => (12, &[]),
        NEWNEXTHOP => (8, &[]),
        _ => return None,
    };
    let (header, mut rest) = payload.split_at_checked(header)?;
    let mut attributes = Vec::new();
    while rest.len() >= 4 {
        let len = (u16_at(rest, 0) as usize).clamp(4, rest.len());
        let kind = u16_at(rest, 2);
        match (kind, &rest[4..len]) {
            _ if volatile.contains(&kind) => {}
            // `struct rta_cacheinfo`: only whether a route expires is kept.
            (CACHEINFO, info) if is_route => {
                let expires = info.get(8..12).is_some_and(|time| time != [0; 4]);
                attributes.push((kind, vec![u8::from(expires)]));
            }
            (_, value) => attributes.push((kind, value.to_vec())),
        }
        rest = &rest[len.next_multiple_of(4).min(rest.len())..];
    }
    let value = |kind| attributes.iter().find(|(k, _)| *k == kind).map(|(_, value)| value.clone());
    let id = match kind {
        NEWNEIGH if header[0] == AF_BRIDGE => Id::Fdb(u32_at(header, 4), value(2)?),
        NEWNEIGH => Id::Neigh(u32_at(header, 4), value(1)?),
        NEWNEXTHOP => Id::Nexthop(u32_at(&value(1)?, 0)),
        _ if header[4] == MAIN => Id::Route(value(1)?),
        _ => return None,
    };
    Some(RawObject { id, header: header.to_vec(), attributes })
}

/// A socket for the kernel's events.
pub(crate) struct EventSocket {
    socket: AsyncFd<NlSocket>,
    runtime: Runtime,
    buffer: Vec<u8>,
}

impl EventSocket {
    /// Listens to neighbours, forwarding entries, nexthops and routes, in the network namespace of
    /// this thread.
    pub(crate) fn open() -> anyhow::Result<Self> {
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let socket = NlSocket::connect(NlFamily::Route, None, Groups::empty())?;
        socket.nonblock()?;
        socket.set_recv_buffer_size(8 << 20)?;
        // NEIGH, IPV4_ROUTE, IPV6_ROUTE, NEXTHOP.
        for group in [3, 7, 11, 32] {
            socket.add_mcast_membership(Groups::new_groups(&[group]))?;
        }
        let inside = runtime.enter();
        let socket = registered(socket)?;
        drop(inside);
        Ok(Self { socket, runtime, buffer: vec![0; BUFFER] })
    }

    /// Discards the events so far.
    pub(crate) fn forget(&mut self) -> anyhow::Result<()> {
        loop {
            match self.socket.get_ref().recv(&mut self.buffer, Msg::DONTWAIT) {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Reads events until `is_done` returns true for an object.
    pub(crate) fn listen(
        &mut self,
        mut is_done: impl FnMut(RawObject) -> bool,
    ) -> anyhow::Result<()> {
        let socket = &self.socket;
        let buffer = &mut self.buffer;
        let all = async {
            loop {
                let mut ready = socket.readable().await?;
                while let Ok(received) =
                    ready.try_io(|socket| socket.get_ref().recv(&mut *buffer, Msg::empty()))
                {
                    let (len, _) = received?;
                    if objects_in(&buffer[..len]).into_iter().any(&mut is_done) {
                        return anyhow::Ok(());
                    }
                }
            }
        };
        let patient = async { tokio::time::timeout(PATIENCE, all).await };
        self.runtime.block_on(patient).context("an expected event did not arrive")?
    }
}

#[expect(
    deprecated,
    reason = "sound for a socket that owns its descriptor; the successor needs unsafe code"
)]
fn registered(socket: NlSocket) -> io::Result<AsyncFd<NlSocket>> {
    AsyncFd::with_interest(socket, Interest::READABLE)
}
