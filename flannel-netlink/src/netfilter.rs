//! A connection to netfilter (`NETLINK_NETFILTER`): all-or-nothing batches, questions, dumps, and
//! changes by others.
//!
//! This is the envelope only. The messages (tables, chains, rules) are the caller's business, and
//! numbers in them are big-endian.
//!
//! **Source**: linux `net/netfilter/nfnetlink.c`.

use flannel_core::kernel::KernelError;
use neli::consts::nl::NlmF;
use neli::consts::socket::NlFamily;
use nix::sys::socket::SockProtocol;

use crate::multicast::Multicast;
use crate::socket::Socket;
use crate::wire::{EBADMSG, messages};

pub use crate::wire::{Attributes, Messages};

/// `NFNL_MSG_BATCH_BEGIN` and `_END`.
const BATCH: [u16; 2] = [16, 17];
/// Bytes of `struct nfgenmsg`.
const HEADER: usize = 4;
/// Bytes for messages not yet read; what is lost is known to be lost.
const RECEIVE_BUFFER: usize = 1 << 20;

/// What a message is about: a kind within a subsystem, and an address family.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Kind {
    /// `NFNL_SUBSYS_…`; 10 is nf_tables.
    pub subsystem: u8,
    /// The subsystem's message number, such as `NFT_MSG_NEWTABLE`.
    pub number: u8,
    /// `NFPROTO_…`: 2 is IPv4, 10 is IPv6, 0 is any.
    pub family: u8,
}

impl Kind {
    fn message(self) -> u16 {
        u16::from_be_bytes([self.subsystem, self.number])
    }

    /// `struct nfgenmsg`: family, version 0, no resource.
    fn header(self) -> [u8; 4] {
        [self.family, 0, 0, 0]
    }
}

/// How a thing is to be made; the kernel refuses nothing for being there already unless asked to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Make {
    /// Nothing is made: a deletion.
    Nothing,
    /// Made, or left as it is if it is there (`NLM_F_CREATE`).
    Create,
    /// Made behind the others of its list (`NLM_F_CREATE`, `NLM_F_APPEND`).
    Append,
}

impl Make {
    fn flags(self) -> NlmF {
        match self {
            Self::Nothing => NlmF::empty(),
            Self::Create => NlmF::CREATE,
            Self::Append => NlmF::CREATE | NlmF::APPEND,
        }
    }
}

/// Changes of one subsystem that happen together or not at all.
#[derive(Debug)]
pub struct Batch {
    subsystem: u8,
    messages: Messages,
    len: usize,
}

impl Batch {
    /// An empty one.
    pub fn new(subsystem: u8) -> Self {
        let mut batch = Self { subsystem, messages: Messages::default(), len: 0 };
        batch.fence(BATCH[0]);
        batch
    }

    /// Adds a change; `fill` adds its attributes. At most some 200 fit, for each of them is
    /// answered.
    pub fn add(
        &mut self,
        number: u8,
        family: u8,
        make: Make,
        fill: impl FnOnce(&mut Messages),
    ) -> &mut Self {
        let kind = Kind { subsystem: self.subsystem, number, family };
        fill(self.messages.begin(kind.message(), make.flags() | NlmF::ACK, &kind.header()));
        self.len += 1;
        self
    }

    /// How many changes there are: the number that the next one has in [`Refused`].
    pub fn len(&self) -> usize {
        self.len
    }

    /// There are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Begin and end name the subsystem in the header's resource, which is big-endian.
    fn fence(&mut self, kind: u16) {
        self.messages.begin(kind, NlmF::empty(), &[0, 0, 0, self.subsystem]);
    }
}

/// A batch that the kernel refused as a whole.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refused {
    /// Which change it did not like, in the order of [`Batch::add`]; `None` if it did not look at
    /// them.
    pub change: Option<usize>,
    /// Why.
    pub error: KernelError,
}

/// A message of the kernel: an answer, or a change.
#[derive(Debug, Clone, Copy)]
pub struct NetfilterMessage<'a> {
    /// What it is about.
    pub kind: Kind,
    /// Its attributes.
    pub attributes: Attributes<'a>,
}

impl<'a> NetfilterMessage<'a> {
    fn read(message: &crate::wire::Message<'a>) -> Option<Self> {
        let [subsystem, number] = message.kind.to_be_bytes();
        let kind = Kind { subsystem, number, family: *message.payload.first()? };
        Some(Self { kind, attributes: Attributes(message.payload.get(HEADER..)?) })
    }
}

/// A connection, in the network namespace of the thread that opened it.
///
/// # Blocking
/// The kernel does its work inside each call: microseconds, longer while another program commits a
/// large ruleset.
pub struct NetfilterSocket(Socket);

impl NetfilterSocket {
    /// Opens one; this needs no privilege, everything else needs `CAP_NET_ADMIN`.
    ///
    /// # Errors
    /// The kernel has no netfilter netlink.
    pub fn open() -> Result<Self, KernelError> {
        Ok(Self(Socket::open_to(NlFamily::Netfilter)?))
    }

    /// The port that notifications of our own changes carry.
    pub fn port(&self) -> u32 {
        self.0.port()
    }

    /// Carries out a batch, all of it or nothing.
    ///
    /// # Errors
    /// The first change that was refused and why; then nothing was changed.
    pub fn commit(&mut self, mut batch: Batch) -> Result<(), Refused> {
        batch.fence(BATCH[1]);
        let whole = |error| Refused { change: None, error };
        let results = self.0.send_as_is(&mut batch.messages).map_err(whole)?;
        let changes = results.len() - 2;
        if let Some((n, Some(Err(error)))) =
            results.iter().enumerate().find(|(_, result)| matches!(result, Some(Err(_))))
        {
            let change = n.checked_sub(1).filter(|change| *change < changes);
            return Err(Refused { change, error: error.clone() });
        }
        match results[1..=changes].iter().position(Option::is_none) {
            None => Ok(()),
            Some(change) => {
                let error = KernelError::explained(EBADMSG, "the kernel did not answer");
                Err(Refused { change: Some(change), error })
            }
        }
    }

    /// Asks for one thing; `fill` adds the attributes that name it.
    ///
    /// # Errors
    /// It is not there ([`KernelError::is_absent`]), may not be foreign, or `read` cannot make
    /// sense of it.
    pub fn ask<T>(
        &mut self,
        kind: Kind,
        fill: impl FnOnce(&mut Messages),
        read: impl Fn(&NetfilterMessage<'_>) -> Option<T>,
    ) -> Result<T, KernelError> {
        self.0.ask(request(kind, fill), |message| read(&NetfilterMessage::read(message)?))
    }

    /// Reads a list: everything for which `read` is not `None`, in the kernel's order.
    ///
    /// # Errors
    /// It may not be foreign, or changes faster than it can be read.
    pub fn dump<T: Send>(
        &mut self,
        kind: Kind,
        fill: impl FnOnce(&mut Messages),
        mut read: impl FnMut(&NetfilterMessage<'_>) -> Option<T> + Send,
    ) -> Result<Vec<T>, KernelError> {
        self.0.dump(request(kind, fill), |message| read(&NetfilterMessage::read(message)?))
    }
}

impl std::fmt::Debug for NetfilterSocket {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NetfilterSocket").field("port", &self.port()).finish()
    }
}

fn request(kind: Kind, fill: impl FnOnce(&mut Messages)) -> Messages {
    let mut messages = Messages::one(kind.message(), NlmF::empty(), &kind.header());
    fill(&mut messages);
    messages
}

/// Listens to changes by others.
pub struct NetfilterEvents {
    socket: Multicast,
    /// Whose changes are our own.
    own_port: u32,
}

impl NetfilterEvents {
    /// Listens to `group` (`NFNLGRP_…`; 7 is nf_tables) in the network namespace of the calling
    /// thread, from now on; changes by the socket with `own_port` are our own.
    ///
    /// # Errors
    /// Listening takes `CAP_NET_ADMIN`.
    pub fn listen(group: u32, own_port: u32) -> Result<Self, KernelError> {
        let socket = Multicast::open(SockProtocol::NetlinkNetFilter, RECEIVE_BUFFER)?;
        socket.join(&[group])?;
        Ok(Self { socket, own_port })
    }

    /// Returns when another program has made a change that `concerns` us, or when that cannot be
    /// excluded because messages were lost. Many changes at once count as one.
    ///
    /// # Errors
    /// The socket broke; another call would fail too.
    ///
    /// # Cancel safety
    /// Nothing is lost: messages are read and judged without waiting.
    pub async fn changed(
        &mut self,
        concerns: impl Fn(&NetfilterMessage<'_>) -> bool,
    ) -> Result<(), KernelError> {
        self.socket.wait_for(|datagram| concerning(datagram, self.own_port, &concerns)).await
    }
}

/// A datagram has a change by another program that concerns us, or cannot be understood.
fn concerning(
    datagram: Option<&[u8]>,
    own_port: u32,
    concerns: impl Fn(&NetfilterMessage<'_>) -> bool,
) -> bool {
    let Some(datagram) = datagram else { return true };
    let by_others = |message: &crate::wire::Message<'_>| {
        message.port != own_port && NetfilterMessage::read(message).as_ref().is_none_or(&concerns)
    };
    messages(datagram).any(|message| message.as_ref().map_or(true, by_others))
}
