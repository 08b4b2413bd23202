//! Chains and their rules.

use flannel_core::kernel::KernelError;

use crate::netfilter::{Attributes, Batch, Kind, Make, NetfilterMessage, NetfilterSocket};
use crate::nftables::attributes::{comment, find, number, number_in, text_in};
use crate::nftables::expr::{self, Expr};
use crate::nftables::table::{DELRULE, DELTABLE, NEWTABLE, RULE_EXPRESSIONS, TABLE};
use crate::nftables::{SUBSYSTEM, Table, TableFamily, present};

/// `NFT_MSG_…`.
const NEWCHAIN: u8 = 3;
pub(crate) const GETCHAIN: u8 = 4;
pub(crate) const DELCHAIN: u8 = 5;
const NEWRULE: u8 = 6;

/// `NFTA_CHAIN_…` and `NFTA_HOOK_…`.
pub(crate) const CHAIN_NAME: u16 = 3;
const CHAIN_HOOK: u16 = 4;
const CHAIN_POLICY: u16 = 5;
const CHAIN_TYPE: u16 = 7;
const CHAIN_USERDATA: u16 = 12;
const HOOK_NUMBER: u16 = 1;
const HOOK_PRIORITY: u16 = 2;
const HOOK_DEVICE: u16 = 3;
const HOOK_DEVICES: u16 = 4;
/// `NFTA_RULE_CHAIN`.
pub(crate) const RULE_CHAIN: u16 = 2;

/// The points in the path of a packet where the kernel runs chains (`NF_INET_…`).
pub mod hook {
    /// Each packet that arrives.
    pub const PREROUTING: u32 = 0;
    /// A packet that arrives for this host. Fragments of IPv4 are assembled before, fragments
    /// of IPv6 only if connection tracking is active.
    pub const INPUT: u32 = 1;
    /// A packet that this host forwards.
    pub const FORWARD: u32 = 2;
    /// A packet that this host sends.
    pub const OUTPUT: u32 = 3;
    /// Each packet that leaves.
    pub const POSTROUTING: u32 = 4;
    /// Each packet that arrives by a device, in tables of the family `inet`.
    pub const INGRESS: u32 = 5;
    /// Each packet that arrives by a device, in tables of the family `netdev`.
    pub const NETDEV_INGRESS: u32 = 0;
    /// Each packet that leaves by a device, in tables of the family `netdev`.
    pub const NETDEV_EGRESS: u32 = 1;
}

/// A chain with its rules.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chain {
    /// Where the kernel runs the chain. `None` for a regular chain, which only jumps reach.
    pub base: Option<Base>,
    /// The rules in their order.
    pub rules: Vec<Vec<Expr>>,
}

/// Where the kernel runs a base chain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Base {
    /// `filter`, `nat` or `route`.
    pub kind: String,
    /// The [`hook`].
    pub hook: u32,
    /// The order among the chains of the hook. Lower priorities run first.
    pub priority: i32,
    /// The [`verdict`](crate::nftables::verdict) at the end of the chain.
    pub policy: u32,
}

impl Base {
    /// Reads the attributes of a chain. `None` for a regular chain.
    fn read(attributes: &[u8]) -> Option<Self> {
        let hook = find(attributes, CHAIN_HOOK)?;
        Some(Self {
            kind: text_in(attributes, CHAIN_TYPE).unwrap_or_default(),
            hook: number_in(hook, HOOK_NUMBER)?,
            priority: number_in(hook, HOOK_PRIORITY)?.cast_signed(),
            policy: number_in(attributes, CHAIN_POLICY)?,
        })
    }
}

impl Chain {
    /// The chains of a table with these names, in this order. `None` for a chain that does not
    /// exist.
    ///
    /// They are read in several steps, so the caller may need
    /// [`at_one_moment`](crate::nftables::at_one_moment).
    ///
    /// # Errors
    /// The kernel has no nf_tables, or this process lacks `CAP_NET_ADMIN`.
    pub fn read(
        socket: &mut NetfilterSocket,
        table: &Table<'_>,
        names: &[&str],
    ) -> Result<Vec<Option<Self>>, KernelError> {
        let mut chains = Vec::new();
        for name in names {
            chains.push(Self::without_rules(socket, table, name)?);
        }
        for (chain_name, rule) in table.rules(socket)? {
            // Other chains are ignored. The number of objects in the table shows that they exist.
            let n = names.iter().position(|name| *name == chain_name);
            if let Some(chain) = n.and_then(|n| chains[n].as_mut()) {
                chain.rules.push(rule);
            }
        }
        Ok(chains)
    }

    /// A chain without its rules, or `None` if it does not exist.
    fn without_rules(
        socket: &mut NetfilterSocket,
        table: &Table<'_>,
        name: &str,
    ) -> Result<Option<Self>, KernelError> {
        let answer = socket.ask(
            table.kind(GETCHAIN),
            |request| _ = request.text(TABLE, table.name).text(CHAIN_NAME, name),
            |message| Some(Self { base: Base::read(message.attributes.0), rules: Vec::new() }),
        );
        present(answer)
    }

    /// Adds the changes that create the chain in a table, with a comment of at most 253 bytes, and
    /// append its rules. If the chain exists, its old rules stay before the new ones. The kernel
    /// refuses the transaction if the existing chain has another base.
    pub fn make(&self, batch: &mut Batch, table: &Table<'_>, name: &str, text: &str) {
        let protocol = table.family.protocol();
        batch.add(NEWCHAIN, protocol, Make::Create, |request| {
            request.text(TABLE, table.name).text(CHAIN_NAME, name);
            if let Some(base) = &self.base {
                request.nest(CHAIN_HOOK, |hook| {
                    let priority = base.priority.cast_unsigned();
                    number(number(hook, HOOK_NUMBER, base.hook), HOOK_PRIORITY, priority);
                });
                number(request, CHAIN_POLICY, base.policy).text(CHAIN_TYPE, &base.kind);
            }
            request.attr(CHAIN_USERDATA, &comment(text));
        });
        for rule in &self.rules {
            batch.add(NEWRULE, protocol, Make::Append, |request| {
                request.text(TABLE, table.name).text(RULE_CHAIN, name);
                expr::write(request, RULE_EXPRESSIONS, rule);
            });
        }
    }
}

/// A chain of any program, without its rules.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ChainHead {
    /// The name of its table.
    pub table: String,
    /// Its name.
    pub name: String,
    /// Where the kernel runs the chain. `None` for a regular chain, which only jumps reach.
    pub base: Option<Base>,
    /// The devices whose packets a chain of devices sees. Empty for other chains.
    pub devices: Vec<String>,
}

impl ChainHead {
    /// All chains in tables of a family. Chains whose names are not UTF-8 are left out.
    ///
    /// # Errors
    /// The kernel has no nf_tables, or this process lacks `CAP_NET_ADMIN`.
    pub fn all(
        socket: &mut NetfilterSocket,
        family: TableFamily,
    ) -> Result<Vec<Self>, KernelError> {
        let protocol = family.protocol();
        let read = |message: &NetfilterMessage<'_>| {
            if message.kind.family != protocol {
                return None;
            }
            let attributes = message.attributes.0;
            Some(Self {
                table: text_in(attributes, TABLE)?,
                name: text_in(attributes, CHAIN_NAME)?,
                base: Base::read(attributes),
                devices: devices(attributes),
            })
        };
        let all = Kind { subsystem: SUBSYSTEM, number: GETCHAIN, family: protocol };
        socket.dump(all, |_| (), read)
    }
}

/// The devices of a chain.
fn devices(attributes: &[u8]) -> Vec<String> {
    let Some(hook) = find(attributes, CHAIN_HOOK) else { return Vec::new() };
    let list = Attributes(find(hook, HOOK_DEVICES).unwrap_or_default());
    let text = |bytes: &[u8]| {
        let text = bytes.split(|byte| *byte == 0).next()?;
        String::from_utf8(text.to_vec()).ok()
    };
    let one = text_in(hook, HOOK_DEVICE);
    one.into_iter().chain(list.filter_map(|(_, name)| text(name))).collect()
}

/// A change of a table, a chain or a rule.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ChainChange {
    /// The family of the table, or `None` if this crate does not know the family.
    pub family: Option<TableFamily>,
    /// The name of the table.
    pub table: String,
    /// The name of the chain. `None` if the table itself was made, changed or removed, or if the
    /// name is not UTF-8.
    pub chain: Option<String>,
}

impl ChainChange {
    /// The change in a message of [`GROUP`](crate::nftables::GROUP), or `None` if the message is
    /// about a set or something else.
    pub fn read(message: &NetfilterMessage<'_>) -> Option<Self> {
        let attributes = message.attributes.0;
        let chain = match message.kind.number {
            NEWTABLE | DELTABLE => None,
            NEWCHAIN | DELCHAIN => text_in(attributes, CHAIN_NAME),
            NEWRULE | DELRULE => text_in(attributes, RULE_CHAIN),
            _ => return None,
        };
        let family = TableFamily::of(message.kind.family);
        Some(Self { family, table: text_in(attributes, TABLE)?, chain })
    }
}
