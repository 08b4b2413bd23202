//! Sockets of netfilter (`NETLINK_NETFILTER`), which includes nf_tables: atomic batches, queries,
//! dumps, and notifications of changes by other programs.
//!
//! The caller encodes and decodes the attributes of the messages, such as tables, chains and rules.
//! Numbers in them are big-endian, unlike in rtnetlink.
//!
//! **Source**: linux `net/netfilter/nfnetlink.c`.

use flannel_core::kernel::KernelError;
use libc::EMSGSIZE;
use neli::consts::nl::NlmF;
use neli::consts::socket::NlFamily;
use nix::sys::socket::SockProtocol;

use crate::transport::multicast::Multicast;
use crate::transport::socket::Socket;
use crate::transport::wire::Message;

pub use crate::transport::wire::{Attributes, Messages};

/// `NFNL_MSG_BATCH_BEGIN`.
const BATCH_BEGIN: u16 = 16;
/// `NFNL_MSG_BATCH_END`.
const BATCH_END: u16 = 17;
/// The largest number of changes in a batch. The answers to all of them must fit into the receive
/// buffer of the socket, which has room for at least 250 with the default of Linux.
const MOST_CHANGES: usize = 200;
/// Bytes of `struct nfgenmsg`.
const HEADER: usize = 4;
/// The size of the receive buffer for changes, in bytes. An overflow is reported as a change.
const RECEIVE_BUFFER: usize = 1 << 20;

/// The type of a message: its number in a subsystem of netfilter, and an address family.
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

/// Whether a change may create its object. Only for [`Self::New`] it is an error if the object
/// exists already.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Make {
    /// Creates nothing, as for a deletion.
    Nothing,
    /// Creates the object if it does not exist (`NLM_F_CREATE`).
    Create,
    /// Creates the object, which must not exist (`NLM_F_CREATE`, `NLM_F_EXCL`).
    New,
    /// Creates the object at the end of its list (`NLM_F_CREATE`, `NLM_F_APPEND`).
    Append,
}

impl Make {
    fn flags(self) -> NlmF {
        match self {
            Self::Nothing => NlmF::empty(),
            Self::Create => NlmF::CREATE,
            Self::New => NlmF::CREATE | NlmF::EXCL,
            Self::Append => NlmF::CREATE | NlmF::APPEND,
        }
    }
}

/// Changes of one subsystem, which the kernel applies together or not at all.
#[derive(Debug)]
pub struct Batch {
    subsystem: u8,
    messages: Messages,
    len: usize,
}

impl Batch {
    /// An empty batch for a subsystem (`NFNL_SUBSYS_…`).
    pub fn new(subsystem: u8) -> Self {
        let mut batch = Self { subsystem, messages: Messages::default(), len: 0 };
        batch.delimit(BATCH_BEGIN);
        batch
    }

    /// Adds a change of the type `number` ([`Kind::number`]) for the address family `family`
    /// ([`Kind::family`]). `fill` adds its attributes.
    ///
    /// A batch has room for 200 changes. [`NetfilterSocket::commit`] refuses a longer one.
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

    /// The number of changes. [`Refused::change`] counts from 0, so this is the number of the
    /// change that is added next.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the batch has no changes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Adds the message that begins or ends a batch. The subsystem is in its resource field, which
    /// is big-endian.
    fn delimit(&mut self, kind: u16) {
        self.messages.begin(kind, NlmF::empty(), &[0, 0, 0, self.subsystem]);
    }
}

/// The kernel refused a batch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refused {
    /// The number of the refused change, from 0 in the order of [`Batch::add`]. `None` if the
    /// kernel refused the batch as a whole, or the socket failed.
    pub change: Option<usize>,
    /// The kernel's error.
    pub error: KernelError,
}

impl From<Refused> for KernelError {
    fn from(refused: Refused) -> Self {
        refused.error
    }
}

/// A message from the kernel: an answer, or a notification of a change.
#[derive(Debug, Clone, Copy)]
pub struct NetfilterMessage<'a> {
    /// Its type.
    pub kind: Kind,
    /// Its attributes.
    pub attributes: Attributes<'a>,
}

impl<'a> NetfilterMessage<'a> {
    fn read(message: &Message<'a>) -> Option<Self> {
        let [subsystem, number] = message.kind.to_be_bytes();
        let kind = Kind { subsystem, number, family: *message.payload.first()? };
        Some(Self { kind, attributes: Attributes(message.payload.get(HEADER..)?) })
    }
}

/// A socket for requests, in the network namespace of the thread that opened it.
///
/// # Blocking
/// The kernel handles a request inside the call. This takes microseconds, or longer while another
/// program commits a large ruleset.
pub struct NetfilterSocket(Socket);

impl NetfilterSocket {
    /// Opens a socket. This needs no privilege. Requests need `CAP_NET_ADMIN` in the user namespace
    /// that owns the network namespace.
    ///
    /// # Errors
    /// The kernel has no netfilter netlink.
    pub fn open() -> Result<Self, KernelError> {
        Ok(Self(Socket::open_to(NlFamily::Netfilter)?))
    }

    /// The port id of the socket. Notifications of changes that it requested carry this id.
    pub fn port(&self) -> u32 {
        self.0.port()
    }

    /// Applies all changes of a batch, or none.
    ///
    /// # Errors
    /// The kernel refused a change, or the batch is too long. The error has the number of the first
    /// refused change, and the reason. No change was applied.
    pub fn commit(&mut self, mut batch: Batch) -> Result<(), Refused> {
        let whole = |error| Refused { change: None, error };
        if batch.len > MOST_CHANGES {
            let detail = format!("{} changes, expected at most {MOST_CHANGES}", batch.len);
            return Err(whole(KernelError::explained(EMSGSIZE, detail)));
        }
        batch.delimit(BATCH_END);
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
                let error = KernelError::unreadable("the kernel did not answer");
                Err(Refused { change: Some(change), error })
            }
        }
    }

    /// Reads one object. `fill` adds the attributes that identify it, `read` decodes the answer.
    ///
    /// # Errors
    /// The object does not exist ([`KernelError::is_absent`]), the process lacks the privilege, or
    /// `read` returned `None` ([`KernelError::Unreadable`]).
    pub fn ask<T>(
        &mut self,
        kind: Kind,
        fill: impl FnOnce(&mut Messages),
        read: impl Fn(&NetfilterMessage<'_>) -> Option<T>,
    ) -> Result<T, KernelError> {
        self.0.ask(request(kind, fill), |message| read(&NetfilterMessage::read(message)?))
    }

    /// Reads a list. `fill` adds the attributes that limit it. Returns the entries for which `read`
    /// is not `None`, in the kernel's order.
    ///
    /// # Errors
    /// The process lacks the privilege, or the list changed during each of 32 attempts (`EAGAIN`).
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

/// Receives changes by other programs.
pub struct NetfilterEvents {
    socket: Multicast,
    /// The port id of our own changes.
    own_port: u32,
}

impl NetfilterEvents {
    /// Listens to `group` (`NFNLGRP_…`; 7 is nf_tables) in the network namespace of the calling
    /// thread. Changes by the socket with the port id `own_port` are left out.
    ///
    /// # Errors
    /// The process lacks `CAP_NET_ADMIN`.
    pub fn listen(group: u32, own_port: u32) -> Result<Self, KernelError> {
        let socket = Multicast::open(SockProtocol::NetlinkNetFilter, RECEIVE_BUFFER)?;
        socket.join(&[group])?;
        Ok(Self { socket, own_port })
    }

    /// Waits for a change by another program for which `concerns` returns true, or for a loss of
    /// messages. Reads all messages that wait, so several changes may be reported as one. Needs a
    /// tokio runtime with I/O.
    ///
    /// # Errors
    /// The socket failed, and later calls fail too.
    ///
    /// # Cancel safety
    /// No message is lost: messages are read and passed to `concerns` without waiting.
    pub async fn changed(
        &mut self,
        concerns: impl Fn(&NetfilterMessage<'_>) -> bool,
    ) -> Result<(), KernelError> {
        self.socket
            .wait_for(|message| {
                message.port != self.own_port
                    && NetfilterMessage::read(message).as_ref().is_none_or(&concerns)
            })
            .await
    }
}
