//! Tables.

use std::fmt;

use flannel_core::address::Family;
use flannel_core::kernel::KernelError;
use flannel_netlink::netfilter::{Batch, Kind, Make, Messages, NetfilterMessage, NetfilterSocket};

use crate::attributes::{comment, number, number_in, text_in};
use crate::chain::{CHAIN_NAME, DELCHAIN, GETCHAIN, counted};
use crate::{SUBSYSTEM, present};

/// `NFT_MSG_…`.
pub(crate) const NEWTABLE: u8 = 0;
const GETTABLE: u8 = 1;
pub(crate) const DELTABLE: u8 = 2;
pub(crate) const DELRULE: u8 = 8;
/// `NFT_MSG_NEWGEN`, which says that a transaction ended, but not what it changed.
const NEWGEN: u8 = 15;

/// `NFTA_TABLE_NAME`, `NFTA_CHAIN_TABLE`, `NFTA_RULE_TABLE`, `NFTA_SET_TABLE`.
pub(crate) const TABLE: u16 = 1;
/// `NFTA_TABLE_…`.
const TABLE_FLAGS: u16 = 2;
const TABLE_USE: u16 = 3;
const TABLE_USERDATA: u16 = 6;
/// `NFTA_RULE_CHAIN`.
pub(crate) const RULE_CHAIN: u16 = 2;

/// The address of a table: `ip` or `ip6` in the notation of `nft`, and a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Table<'a> {
    /// The family of its packets.
    pub family: Family,
    /// The name.
    pub name: &'a str,
}

/// For example `nftables table ip flannel-ipv4`.
impl fmt::Display for Table<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let keyword = if self.family == Family::V4 { "ip" } else { "ip6" };
        write!(f, "nftables table {keyword} {}", self.name)
    }
}

impl Table<'_> {
    /// The family in messages.
    pub(crate) fn protocol(&self) -> u8 {
        protocol(self.family)
    }

    pub(crate) fn kind(&self, number: u8) -> Kind {
        Kind { subsystem: SUBSYSTEM, number, family: self.protocol() }
    }

    /// Adds the change that creates the table with a comment. It is no error if it exists.
    pub fn make(&self, batch: &mut Batch, comment: &str) {
        self.make_with(batch, Make::Create, comment);
    }

    /// Adds the change that creates the table with a comment. The kernel refuses the transaction
    /// with `EEXIST` if it exists.
    pub fn make_new(&self, batch: &mut Batch, comment: &str) {
        self.make_with(batch, Make::New, comment);
    }

    fn make_with(&self, batch: &mut Batch, make: Make, text: &str) {
        batch.add(NEWTABLE, self.protocol(), make, |request| {
            number(request.text(TABLE, self.name), TABLE_FLAGS, 0)
                .attr(TABLE_USERDATA, &comment(text));
        });
    }

    /// Adds the change that removes the table, which must exist.
    pub fn remove(&self, batch: &mut Batch) {
        batch.add(DELTABLE, self.protocol(), Make::Nothing, |request| {
            _ = request.text(TABLE, self.name);
        });
    }

    /// Adds the change that removes all rules of a chain, which must exist.
    pub fn flush_chain(&self, batch: &mut Batch, chain: &str) {
        batch.add(DELRULE, self.protocol(), Make::Nothing, |request| {
            request.text(TABLE, self.name).text(RULE_CHAIN, chain);
        });
    }

    /// Adds the change that removes a chain without rules, which must exist.
    pub fn remove_chain(&self, batch: &mut Batch, chain: &str) {
        batch.add(DELCHAIN, self.protocol(), Make::Nothing, |request| {
            request.text(TABLE, self.name).text(CHAIN_NAME, chain);
        });
    }

    /// The flags of the table (`NFT_TABLE_F_…`; 1: it is dormant, so it has no effect) and the
    /// number of its chains, sets and other objects; `None` if it does not exist.
    ///
    /// # Errors
    /// The kernel has no nf_tables, or this process lacks `CAP_NET_ADMIN`.
    pub fn head(&self, socket: &mut NetfilterSocket) -> Result<Option<(u32, u32)>, KernelError> {
        let fill = |request: &mut Messages| _ = request.text(TABLE, self.name);
        present(socket.ask(self.kind(GETTABLE), fill, |message| {
            let attributes = message.attributes.0;
            Some((number_in(attributes, TABLE_FLAGS)?, number_in(attributes, TABLE_USE)?))
        }))
    }

    /// Whether it has a chain with this name.
    ///
    /// # Errors
    /// The kernel has no nf_tables, or this process lacks `CAP_NET_ADMIN`.
    pub fn has_chain(
        &self,
        socket: &mut NetfilterSocket,
        chain: &str,
    ) -> Result<bool, KernelError> {
        let fill = |request: &mut Messages| {
            _ = request.text(TABLE, self.name).text(CHAIN_NAME, chain);
        };
        Ok(present(socket.ask(self.kind(GETCHAIN), fill, |_| Some(())))?.is_some())
    }

    /// The number of packets that the counters in its rules have counted; 0 if it does not exist.
    /// Takes a single request, because a set of thousands of peers is not read.
    ///
    /// # Errors
    /// The kernel has no nf_tables, or this process lacks `CAP_NET_ADMIN`.
    pub fn counted(&self, socket: &mut NetfilterSocket) -> Result<u64, KernelError> {
        counted(socket, self)
    }

    /// Whether a message of [`GROUP`](crate::GROUP) is about this table or its content.
    pub fn is_in(&self, message: &NetfilterMessage<'_>) -> bool {
        message.kind.number != NEWGEN
            && message.kind.family == self.protocol()
            && text_in(message.attributes.0, TABLE).as_deref() == Some(self.name)
    }
}

/// `NFPROTO_IPV4`, `NFPROTO_IPV6`.
pub fn protocol(family: Family) -> u8 {
    match family {
        Family::V4 => 2,
        Family::V6 => 10,
    }
}
