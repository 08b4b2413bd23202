//! Chains and their rules.

use flannel_core::address::Family;
use flannel_core::kernel::KernelError;
use flannel_netlink::netfilter::{Batch, Kind, Make, Messages, NetfilterMessage, NetfilterSocket};

use crate::attributes::{comment, find, number, number_in, text_in};
use crate::expr::{self, Expr};
use crate::table::{DELRULE, DELTABLE, NEWTABLE, RULE_CHAIN, TABLE};
use crate::{SUBSYSTEM, Table, present, protocol};

/// `NFT_MSG_…`.
const NEWCHAIN: u8 = 3;
pub(crate) const GETCHAIN: u8 = 4;
pub(crate) const DELCHAIN: u8 = 5;
const NEWRULE: u8 = 6;
const GETRULE: u8 = 7;

/// `NFTA_CHAIN_…` and `NFTA_HOOK_…`.
pub(crate) const CHAIN_NAME: u16 = 3;
const CHAIN_HOOK: u16 = 4;
const CHAIN_POLICY: u16 = 5;
const CHAIN_TYPE: u16 = 7;
const CHAIN_USERDATA: u16 = 12;
const HOOK_NUMBER: u16 = 1;
const HOOK_PRIORITY: u16 = 2;
/// `NFTA_RULE_…`.
const RULE_EXPRESSIONS: u16 = 4;

/// The places of chains in the path of a packet (`NF_INET_…`).
pub mod hook {
    /// Each packet that arrives.
    pub const PREROUTING: u32 = 0;
    /// A packet that arrives for this host. Fragments are assembled before.
    pub const INPUT: u32 = 1;
    /// A packet that this host forwards.
    pub const FORWARD: u32 = 2;
    /// Each packet that leaves.
    pub const POSTROUTING: u32 = 4;
}

/// A chain that packets come to by a hook, with its rules.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct BaseChain {
    /// `nat` or `filter`; empty for a chain without a hook, which only jumps reach.
    pub kind: String,
    /// The [`hook`].
    pub hook: u32,
    /// The place among the chains of the hook, an `i32` in two's complement: lower ones come first.
    pub priority: u32,
    /// The [`verdict`](crate::verdict) at the end of the chain.
    pub policy: u32,
    /// The rules in their order.
    pub rules: Vec<Vec<Expr>>,
}

impl BaseChain {
    /// The chains of a table with these names; `None` for one that does not exist.
    ///
    /// They are read in several steps ([`at_one_moment`](crate::at_one_moment)).
    ///
    /// # Errors
    /// The table does not exist (`ENOENT`), the kernel has no nf_tables, or this process lacks
    /// `CAP_NET_ADMIN`.
    pub fn read(
        socket: &mut NetfilterSocket,
        table: &Table<'_>,
        names: &[&str],
    ) -> Result<Vec<Option<Self>>, KernelError> {
        let chains = names.iter().map(|name| Self::without_rules(socket, table, name));
        let mut chains = chains.collect::<Result<Vec<_>, _>>()?;
        for (of, rule) in rules(socket, table.protocol(), table.name)? {
            // A foreign chain makes the number of objects in the table differ.
            let chain = chains.iter_mut().zip(names).find(|(_, name)| **name == of);
            if let Some((Some(chain), _)) = chain {
                chain.rules.push(rule);
            }
        }
        Ok(chains)
    }

    /// A chain without its rules; `None` if it does not exist.
    fn without_rules(
        socket: &mut NetfilterSocket,
        table: &Table<'_>,
        name: &str,
    ) -> Result<Option<Self>, KernelError> {
        let fill =
            |request: &mut Messages| _ = request.text(TABLE, table.name).text(CHAIN_NAME, name);
        present(socket.ask(table.kind(GETCHAIN), fill, |message| {
            let attributes = message.attributes.0;
            let hook = find(attributes, CHAIN_HOOK).unwrap_or_default();
            Some(Self {
                kind: text_in(attributes, CHAIN_TYPE).unwrap_or_default(),
                hook: number_in(hook, HOOK_NUMBER).unwrap_or_default(),
                priority: number_in(hook, HOOK_PRIORITY).unwrap_or_default(),
                policy: number_in(attributes, CHAIN_POLICY).unwrap_or_default(),
                rules: Vec::new(),
            })
        }))
    }

    /// Adds the changes that create the chain in a table, with a comment, and its rules.
    pub fn make(&self, batch: &mut Batch, table: &Table<'_>, name: &str, text: &str) {
        batch.add(NEWCHAIN, table.protocol(), Make::Create, |request| {
            request.text(TABLE, table.name).text(CHAIN_NAME, name);
            request.nest(CHAIN_HOOK, |hook| {
                number(number(hook, HOOK_NUMBER, self.hook), HOOK_PRIORITY, self.priority);
            });
            number(request, CHAIN_POLICY, self.policy)
                .text(CHAIN_TYPE, &self.kind)
                .attr(CHAIN_USERDATA, &comment(text));
        });
        for rule in &self.rules {
            batch.add(NEWRULE, table.protocol(), Make::Append, |request| {
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
    /// The [`hook`]; `None`: only jumps reach the chain.
    pub hook: Option<u32>,
    /// The [`verdict`](crate::verdict) at its end; `None`: it has no hook.
    pub policy: Option<u32>,
}

/// All chains of a family of tables, `NFPROTO_…`: 1 (`inet`), or [`protocol`].
///
/// # Errors
/// The kernel has no nf_tables, or this process lacks `CAP_NET_ADMIN`.
pub fn chains(socket: &mut NetfilterSocket, protocol: u8) -> Result<Vec<ChainHead>, KernelError> {
    let kind = Kind { subsystem: SUBSYSTEM, number: GETCHAIN, family: protocol };
    socket.dump(
        kind,
        |_| (),
        |message| {
            let attributes = message.attributes.0;
            let hook = find(attributes, CHAIN_HOOK).unwrap_or_default();
            let chain = ChainHead {
                table: text_in(attributes, TABLE)?,
                name: text_in(attributes, CHAIN_NAME)?,
                hook: number_in(hook, HOOK_NUMBER),
                policy: number_in(attributes, CHAIN_POLICY),
            };
            (message.kind.family == protocol).then_some(chain)
        },
    )
}

/// A change of a table, a chain or a rule.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ChainChange {
    /// The family of the table; `None`: it has packets of another one, or of several.
    pub family: Option<Family>,
    /// The name of the table.
    pub table: String,
    /// The name of the chain; `None`: the table itself was made, changed or removed.
    pub chain: Option<String>,
}

impl ChainChange {
    /// The change in a message of [`GROUP`](crate::GROUP); `None`: the message is about a set or
    /// something else.
    pub fn read(message: &NetfilterMessage<'_>) -> Option<Self> {
        let attributes = message.attributes.0;
        let chain = match message.kind.number {
            NEWTABLE | DELTABLE => None,
            NEWCHAIN | DELCHAIN => text_in(attributes, CHAIN_NAME),
            NEWRULE | DELRULE => text_in(attributes, RULE_CHAIN),
            _ => return None,
        };
        let mut families = Family::BOTH.into_iter();
        let family = families.find(|family| protocol(*family) == message.kind.family);
        Some(Self { family, table: text_in(attributes, TABLE)?, chain })
    }
}

/// The rules of a table in order, each with the name of its chain. `protocol` as for [`chains`].
///
/// # Errors
/// The table does not exist (`ENOENT`), the kernel has no nf_tables, or this process lacks
/// `CAP_NET_ADMIN`.
pub fn rules(
    socket: &mut NetfilterSocket,
    protocol: u8,
    table: &str,
) -> Result<Vec<(String, Vec<Expr>)>, KernelError> {
    read_rules(socket, protocol, table, expr::read)
}

/// [`Table::counted`].
pub(crate) fn counted(socket: &mut NetfilterSocket, table: &Table<'_>) -> Result<u64, KernelError> {
    let counts = present(read_rules(socket, table.protocol(), table.name, expr::packets))?;
    let packets = counts.into_iter().flatten().map(|(_, packets)| packets);
    Ok(packets.fold(0, u64::saturating_add))
}

fn read_rules<T: Send>(
    socket: &mut NetfilterSocket,
    protocol: u8,
    table: &str,
    read: fn(&[u8]) -> T,
) -> Result<Vec<(String, T)>, KernelError> {
    let kind = Kind { subsystem: SUBSYSTEM, number: GETRULE, family: protocol };
    let fill = |request: &mut Messages| _ = request.text(TABLE, table);
    socket.dump(kind, fill, |message| {
        let attributes = message.attributes.0;
        // Older kernels do not filter by table.
        let is_in_table =
            message.kind.family == protocol && text_in(attributes, TABLE).as_deref() == Some(table);
        let exprs = read(find(attributes, RULE_EXPRESSIONS).unwrap_or_default());
        is_in_table.then_some((text_in(attributes, RULE_CHAIN)?, exprs))
    })
}
