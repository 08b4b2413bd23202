//! Tables.

use std::fmt;

use flannel_core::address::Family;
use flannel_core::kernel::KernelError;

use crate::netfilter::{Batch, Kind, Make, Messages, NetfilterMessage, NetfilterSocket};
use crate::nftables::attributes::{comment, find, number, number_in, text_in};
use crate::nftables::chain::{CHAIN_NAME, DELCHAIN, GETCHAIN, RULE_CHAIN};
use crate::nftables::expr::{self, Expr};
use crate::nftables::{SUBSYSTEM, present};

/// `NFT_MSG_…`.
pub(crate) const NEWTABLE: u8 = 0;
const GETTABLE: u8 = 1;
pub(crate) const DELTABLE: u8 = 2;
pub(crate) const GETRULE: u8 = 7;
pub(crate) const DELRULE: u8 = 8;
/// `NFT_MSG_NEWGEN`, which says that a transaction ended, but not what it changed.
const NEWGEN: u8 = 15;

/// `NFTA_TABLE_NAME`, `NFTA_CHAIN_TABLE`, `NFTA_RULE_TABLE`, `NFTA_SET_TABLE`.
pub(crate) const TABLE: u16 = 1;
/// `NFTA_TABLE_…`.
const TABLE_FLAGS: u16 = 2;
const TABLE_USE: u16 = 3;
const TABLE_USERDATA: u16 = 6;
/// `NFTA_RULE_HANDLE`.
pub(crate) const RULE_HANDLE: u16 = 3;
/// `NFTA_RULE_EXPRESSIONS`.
pub(crate) const RULE_EXPRESSIONS: u16 = 4;

/// The packets that a table sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum TableFamily {
    /// `inet`: IPv4 and IPv6 packets.
    Inet,
    /// `ip`: IPv4 packets.
    Ip,
    /// `ip6`: IPv6 packets.
    Ip6,
    /// `bridge`: frames on bridges.
    Bridge,
    /// `netdev`: packets of a device, before and after all other tables.
    Netdev,
}

impl TableFamily {
    /// The families with tables that this crate knows.
    pub const ALL: [Self; 5] = [Self::Inet, Self::Ip, Self::Ip6, Self::Bridge, Self::Netdev];

    /// `NFPROTO_…`, also the value of [`meta::NFPROTO`](crate::nftables::meta::NFPROTO).
    pub fn protocol(self) -> u8 {
        match self {
            Self::Inet => 1,
            Self::Ip => 2,
            Self::Ip6 => 10,
            Self::Bridge => 7,
            Self::Netdev => 5,
        }
    }

    pub(crate) fn of(protocol: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|family| family.protocol() == protocol)
    }
}

impl From<Family> for TableFamily {
    fn from(family: Family) -> Self {
        match family {
            Family::V4 => Self::Ip,
            Family::V6 => Self::Ip6,
        }
    }
}

/// The name of the family in `nft`, such as `ip6`.
impl fmt::Display for TableFamily {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Inet => "inet",
            Self::Ip => "ip",
            Self::Ip6 => "ip6",
            Self::Bridge => "bridge",
            Self::Netdev => "netdev",
        })
    }
}

/// The address of a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Table<'a> {
    /// The packets that it sees.
    pub family: TableFamily,
    /// The name.
    pub name: &'a str,
}

/// A table without its content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct TableHead {
    /// `NFT_TABLE_F_…`. With the flag 1 the table is dormant, so it has no effect.
    pub flags: u32,
    /// The number of its chains, sets and other objects.
    pub uses: u32,
}

/// For example `nftables table ip flannel-ipv4`.
impl fmt::Display for Table<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "nftables table {} {}", self.family, self.name)
    }
}

impl Table<'_> {
    pub(crate) fn kind(&self, number: u8) -> Kind {
        Kind { subsystem: SUBSYSTEM, number, family: self.family.protocol() }
    }

    /// Adds the change that creates the table with a comment of at most 253 bytes. If the table
    /// exists, it stays.
    pub fn make(&self, batch: &mut Batch, comment: &str) {
        self.make_with(batch, Make::Create, comment);
    }

    /// Adds the change that creates the table with a comment of at most 253 bytes. The kernel
    /// refuses the transaction with `EEXIST` if the table exists.
    pub fn make_new(&self, batch: &mut Batch, comment: &str) {
        self.make_with(batch, Make::New, comment);
    }

    fn make_with(&self, batch: &mut Batch, make: Make, text: &str) {
        batch.add(NEWTABLE, self.family.protocol(), make, |request| {
            number(request.text(TABLE, self.name), TABLE_FLAGS, 0)
                .attr(TABLE_USERDATA, &comment(text));
        });
    }

    /// Adds the change that removes the table, which must exist.
    pub fn remove(&self, batch: &mut Batch) {
        batch.add(DELTABLE, self.family.protocol(), Make::Nothing, |request| self.named(request));
    }

    /// Adds the change that removes all rules of a chain, which must exist.
    pub fn flush_chain(&self, batch: &mut Batch, chain: &str) {
        batch.add(DELRULE, self.family.protocol(), Make::Nothing, |request| {
            request.text(TABLE, self.name).text(RULE_CHAIN, chain);
        });
    }

    /// Adds the change that removes the rule of a chain with this handle, which must exist.
    pub fn remove_rule(&self, batch: &mut Batch, chain: &str, handle: u64) {
        batch.add(DELRULE, self.family.protocol(), Make::Nothing, |request| {
            request
                .text(TABLE, self.name)
                .text(RULE_CHAIN, chain)
                .attr(RULE_HANDLE, &handle.to_be_bytes());
        });
    }

    /// Adds the change that removes a chain without rules, which must exist.
    pub fn remove_chain(&self, batch: &mut Batch, chain: &str) {
        batch.add(DELCHAIN, self.family.protocol(), Make::Nothing, |request| {
            request.text(TABLE, self.name).text(CHAIN_NAME, chain);
        });
    }

    /// The names of all tables of a family. Names that are not UTF-8 are left out.
    ///
    /// # Errors
    /// The kernel has no nf_tables, or this process lacks `CAP_NET_ADMIN`.
    pub fn names(
        socket: &mut NetfilterSocket,
        family: TableFamily,
    ) -> Result<Vec<String>, KernelError> {
        let protocol = family.protocol();
        let read = |message: &NetfilterMessage<'_>| {
            if message.kind.family != protocol {
                return None;
            }
            text_in(message.attributes.0, TABLE)
        };
        let all = Kind { subsystem: SUBSYSTEM, number: GETTABLE, family: protocol };
        socket.dump(all, |_| (), read)
    }

    /// The table without its content, or `None` if it does not exist.
    ///
    /// # Errors
    /// The kernel has no nf_tables, or this process lacks `CAP_NET_ADMIN`.
    pub fn head(&self, socket: &mut NetfilterSocket) -> Result<Option<TableHead>, KernelError> {
        let read = |message: &NetfilterMessage<'_>| {
            let attributes = message.attributes.0;
            let flags = number_in(attributes, TABLE_FLAGS)?;
            Some(TableHead { flags, uses: number_in(attributes, TABLE_USE)? })
        };
        present(socket.ask(self.kind(GETTABLE), |request| self.named(request), read))
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
        let answer = socket.ask(
            self.kind(GETCHAIN),
            |request| _ = request.text(TABLE, self.name).text(CHAIN_NAME, chain),
            |_| Some(()),
        );
        Ok(present(answer)?.is_some())
    }

    /// The rules in order, each with the name of its chain. A table that does not exist has none.
    ///
    /// # Errors
    /// The kernel has no nf_tables, or this process lacks `CAP_NET_ADMIN`.
    pub fn rules(
        &self,
        socket: &mut NetfilterSocket,
    ) -> Result<Vec<(String, Vec<Expr>)>, KernelError> {
        self.read_rules(socket, expr::read)
    }

    /// The sum of all counters in its rules, in packets. It is 0 if the table does not exist. This
    /// takes one request, because sets are not read.
    ///
    /// # Errors
    /// The kernel has no nf_tables, or this process lacks `CAP_NET_ADMIN`.
    pub fn counted(&self, socket: &mut NetfilterSocket) -> Result<u64, KernelError> {
        let counts = present(self.read_rules(socket, expr::packets))?.unwrap_or_default();
        Ok(counts.into_iter().map(|(_, packets)| packets).fold(0, u64::saturating_add))
    }

    /// The counter of each rule in packets, in order, with the name of the rule's chain. It is 0
    /// for a rule without a counter. A table that does not exist has no rules.
    ///
    /// # Errors
    /// The kernel has no nf_tables, or this process lacks `CAP_NET_ADMIN`.
    pub fn counters(
        &self,
        socket: &mut NetfilterSocket,
    ) -> Result<Vec<(String, u64)>, KernelError> {
        self.read_rules(socket, expr::packets)
    }

    fn read_rules<T: Send>(
        &self,
        socket: &mut NetfilterSocket,
        read: fn(&[u8]) -> T,
    ) -> Result<Vec<(String, T)>, KernelError> {
        let read_rule = |message: &NetfilterMessage<'_>| {
            // Older kernels do not filter by table.
            if !self.is_subject_of(message) {
                return None;
            }
            let attributes = message.attributes.0;
            let exprs = find(attributes, RULE_EXPRESSIONS).unwrap_or_default();
            Some((text_in(attributes, RULE_CHAIN)?, read(exprs)))
        };
        socket.dump(self.kind(GETRULE), |request| self.named(request), read_rule)
    }

    /// Whether a message of [`GROUP`](crate::nftables::GROUP) is about this table or its content.
    pub fn is_changed_by(&self, message: &NetfilterMessage<'_>) -> bool {
        message.kind.number != NEWGEN && self.is_subject_of(message)
    }

    fn is_subject_of(&self, message: &NetfilterMessage<'_>) -> bool {
        message.kind.family == self.family.protocol()
            && text_in(message.attributes.0, TABLE).as_deref() == Some(self.name)
    }

    /// Adds the name of the table to a request.
    fn named(&self, request: &mut Messages) {
        request.text(TABLE, self.name);
    }
}
