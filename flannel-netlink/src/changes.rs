//! What others change in the kernel: a multicast socket of its own.
//!
//! The one thing to know: the kernel names the socket that asked for a change of a route, address, neighbour or
//! nexthop, so our own changes are left out (by a filter in the kernel, where that works). Of links, forwarding
//! entries, and neighbours that go it does not say by whom they were changed; those are reported even if it was us.

use std::io;
use std::os::fd::AsFd;

use async_trait::async_trait;
use flannel_core::{Changes, Doubts, KernelError};
use neli::consts::rtnl::Rtm;
use neli::consts::socket::{Msg, NlFamily};
use neli::socket::NlSocket;
use neli::utils::Groups;
use socket2::{SockFilter, SockRef};

use crate::multicast::{self, Multicast};
use crate::news::News;
use crate::socket::Socket;

/// `RTNLGRP_…`: LINK, NEIGH, IPV4_IFADDR, IPV4_ROUTE, IPV6_IFADDR, IPV6_ROUTE, NEXTHOP.
const GROUPS: [u32; 7] = [1, 3, 5, 7, 9, 11, NEXTHOP_GROUP];
const NEXTHOP_GROUP: u32 = 32;
/// Bytes for messages not yet read: some 10,000 of them. Without privilege the kernel gives less.
const RECEIVE_BUFFER: usize = 8 << 20;
/// No multicast message is longer.
const MESSAGE: usize = 32 << 10;
/// How many datagrams are read before those read are handed out.
const AT_ONCE: usize = 1024;
const ENOBUFS: i32 = 105;

/// Listens for multicast messages and says what is in doubt.
pub(crate) struct Listener {
    socket: Multicast,
    /// Whose changes are our own.
    port: u32,
    intake: Intake,
}

/// What comes out of the socket.
struct Intake {
    news: News,
    /// Messages were lost, and more will be until all that is there was read.
    lost: bool,
    buffer: Box<[u8]>,
}

impl Listener {
    /// Listens in the network namespace of the calling thread; changes by the socket with `port` are our own.
    pub(crate) fn open(port: u32) -> Result<Self, KernelError> {
        let socket = NlSocket::connect(NlFamily::Route, None, Groups::empty())?;
        socket.nonblock()?;
        socket.set_recv_buffer_size(RECEIVE_BUFFER)?;
        for group in GROUPS {
            match socket.add_mcast_membership(Groups::new_groups(&[group])) {
                // Kernels before 5.3 have no nexthop objects.
                Err(error) if group == NEXTHOP_GROUP && error.kind() == io::ErrorKind::InvalidInput => {}
                joined => joined?,
            }
        }
        let news = News::new(Socket::open()?, port)?;
        let intake = Intake { news, lost: false, buffer: vec![0; MESSAGE].into() };
        Ok(Self { socket: Multicast::new(socket), port, intake })
    }

    /// Makes the socket known to the runtime now, if there is one on this thread, else on the first use.
    pub(crate) fn registered_if_possible(mut self) -> Result<Self, KernelError> {
        if tokio::runtime::Handle::try_current().is_ok() {
            self.socket.register(|socket| improve(socket, self.port))?;
        }
        Ok(self)
    }
}

#[async_trait]
impl Changes for Listener {
    async fn next(&mut self) -> Result<Doubts, KernelError> {
        let mut looked = false;
        loop {
            if let Some(doubts) = self.intake.news.pop() {
                return Ok(doubts);
            }
            let socket = self.socket.register(|socket| improve(socket, self.port))?;
            // What is there already the runtime may not have noticed yet.
            let mut ready = if looked { Some(socket.readable().await?) } else { None };
            let all = self.intake.read(socket.get_ref())?;
            if let Some(ready) = ready.as_mut().filter(|_| all) {
                ready.clear_ready();
            }
            looked = true;
        }
    }
}

impl Intake {
    /// Takes in what is there, if it is not very much; true if that was all.
    fn read(&mut self, socket: &NlSocket) -> Result<bool, KernelError> {
        for _ in 0..AT_ONCE {
            match socket.recv(&mut self.buffer, Msg::TRUNC) {
                Ok(_) if self.lost => {}
                Ok((len, _)) => self.news.take_datagram(self.buffer.get(..len)),
                // From here on the kernel drops what it has to tell, and does not say so again, until
                // everything was read. Doubt that was told before then would be told too early.
                Err(error) if error.raw_os_error() == Some(ENOBUFS) => {
                    self.lost = true;
                    self.news.forget();
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    if std::mem::take(&mut self.lost) {
                        self.news.lost()?;
                    }
                    return Ok(true);
                }
                Err(error) => return Err(error.into()),
            }
        }
        Ok(false)
    }
}

/// Makes an overrun less likely: a larger buffer where that is permitted, and without our own messages in it.
fn improve(socket: &impl AsFd, port: u32) {
    multicast::force_receive_buffer(socket, RECEIVE_BUFFER);
    if let Err(error) = SockRef::from(socket).attach_filter(&without_own_messages(port)) {
        tracing::debug!(%error, "our own messages are not filtered in the kernel");
    }
}

/// A filter (classic BPF) that lets messages pass that are about links or not from `port`.
fn without_own_messages(port: u32) -> [SockFilter; 7] {
    const LOAD_HALF: u16 = 0x28;
    const LOAD_WORD: u16 = 0x20;
    const JUMP_IF_EQUAL: u16 = 0x15;
    const RETURN: u16 = 0x06;
    // Loads take what they load for big-endian; the header is in the machine's byte order.
    let kind = |kind: Rtm| u32::from(u16::from_be_bytes(u16::from(kind).to_ne_bytes()));
    let port = u32::from_be_bytes(port.to_ne_bytes());
    [
        SockFilter::new(LOAD_HALF, 0, 0, 4),
        SockFilter::new(JUMP_IF_EQUAL, 4, 0, kind(Rtm::Newlink)),
        SockFilter::new(JUMP_IF_EQUAL, 3, 0, kind(Rtm::Dellink)),
        SockFilter::new(LOAD_WORD, 0, 0, 12),
        SockFilter::new(JUMP_IF_EQUAL, 0, 1, port),
        SockFilter::new(RETURN, 0, 0, 0),
        SockFilter::new(RETURN, 0, 0, u32::MAX),
    ]
}
