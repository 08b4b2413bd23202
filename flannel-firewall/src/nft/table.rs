//! flannel's nf_tables tables: for each family one with the rules of Go flannel, and one with those
//! about encryption, which Go flannel does not know.
//!
//! The tables belong to flannel alone. A table that differs from the desired one is replaced as a
//! whole, in one transaction.
//!
//! **Source**: flannel `pkg/trafficmngr/nftables`; linux
//! `include/uapi/linux/netfilter/nf_tables.h`.

use std::collections::BTreeMap;

use flannel_core::address::Family;
use flannel_core::kernel::KernelError;
use flannel_netlink::netfilter::{Batch, Kind, Make, Messages, NetfilterSocket};

use super::expr::{self, Expr, find, number, number_in, text_in};
use crate::rules::{Chain, Rules};
use crate::status::{Deviation, Fault};

/// `NFNL_SUBSYS_NFTABLES`.
pub(crate) const SUBSYSTEM: u8 = 10;

/// `NFT_MSG_…`.
pub(crate) const NEWTABLE: u8 = 0;
const GETTABLE: u8 = 1;
pub(crate) const DELTABLE: u8 = 2;
pub(crate) const NEWCHAIN: u8 = 3;
pub(crate) const GETCHAIN: u8 = 4;
pub(crate) const DELCHAIN: u8 = 5;
pub(crate) const NEWRULE: u8 = 6;
const GETRULE: u8 = 7;
pub(crate) const DELRULE: u8 = 8;
const GETGEN: u8 = 16;

/// `NFTA_TABLE_NAME`, `NFTA_CHAIN_TABLE`, `NFTA_RULE_TABLE`.
pub(crate) const TABLE: u16 = 1;
/// `NFTA_TABLE_…`.
pub(super) const TABLE_FLAGS: u16 = 2;
const TABLE_USE: u16 = 3;
pub(super) const TABLE_USERDATA: u16 = 6;
/// `NFTA_CHAIN_…` and `NFTA_HOOK_…`.
pub(crate) const CHAIN_NAME: u16 = 3;
pub(crate) const CHAIN_HOOK: u16 = 4;
pub(crate) const CHAIN_POLICY: u16 = 5;
const CHAIN_TYPE: u16 = 7;
const CHAIN_USERDATA: u16 = 12;
pub(crate) const HOOK_NUMBER: u16 = 1;
const HOOK_PRIORITY: u16 = 2;
/// `NFTA_RULE_…`.
pub(crate) const RULE_CHAIN: u16 = 2;
const RULE_EXPRESSIONS: u16 = 4;

const ENOENT: i32 = 2;
/// `NF_ACCEPT`, the policy of flannel's chains.
pub(super) const ACCEPT: u32 = 1;

/// A table of flannel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Id {
    pub(crate) family: Family,
    pub(crate) name: &'static str,
    chains: &'static [Chain],
}

const GO: &[Chain] = &[Chain::Postrouting, Chain::Forward];
const ENCRYPTION: &[Chain] = &[Chain::Encryption];
/// All tables, in the order in which they are written.
pub(crate) const TABLES: [Id; 4] = [
    Id { family: Family::V4, name: "flannel-ipv4", chains: GO },
    Id { family: Family::V6, name: "flannel-ipv6", chains: GO },
    Id { family: Family::V4, name: "flannel-encryption", chains: ENCRYPTION },
    Id { family: Family::V6, name: "flannel-encryption", chains: ENCRYPTION },
];

impl Id {
    /// Whether it has the rules about encryption.
    pub(crate) fn is_about_encryption(&self) -> bool {
        self.chains == ENCRYPTION
    }

    /// The table in the notation of `nft`.
    pub(crate) fn title(&self) -> String {
        title(self.family, self.name)
    }
}

/// The values of a table that are compared.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Table {
    /// `NFT_TABLE_F_…`. A dormant table has no effect.
    flags: u32,
    /// The number of chains, sets and other objects in the table (`NFTA_TABLE_USE`).
    uses: u32,
    chains: BTreeMap<Chain, Filled>,
}

/// A chain with its rules.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Filled {
    /// `nat` or `filter`; empty for a chain without a hook.
    pub(super) kind: String,
    pub(super) hook: u32,
    pub(super) priority: u32,
    pub(super) policy: u32,
    pub(super) rules: Vec<Vec<Expr>>,
}

/// The name, type, hook (`NF_INET_…`), priority and comment of a chain.
struct Place {
    name: &'static str,
    kind: &'static str,
    hook: u32,
    priority: u32,
    comment: &'static str,
}

fn place(chain: Chain) -> Place {
    match chain {
        Chain::Postrouting => Place {
            name: "postrtg",
            kind: "nat",
            hook: 4,
            priority: 100,
            comment: "chain to manage traffic masquerading by flannel",
        },
        Chain::Forward => Place {
            name: "forward",
            kind: "filter",
            hook: 2,
            priority: 0,
            comment: "chain to accept flannel traffic",
        },
        Chain::Encryption => Place {
            name: "postrouting",
            kind: "filter",
            hook: 4,
            // `mangle` in the notation of `nft`.
            priority: (-150i32).cast_unsigned(),
            comment: "chain to drop unencrypted packets to other nodes' pods",
        },
    }
}

/// `NFPROTO_IPV4`, `NFPROTO_IPV6`.
pub(crate) fn protocol(family: Family) -> u8 {
    match family {
        Family::V4 => 2,
        Family::V6 => 10,
    }
}

/// A table in the notation of `nft`.
pub(crate) fn title(family: Family, table: &str) -> String {
    let keyword = if family == Family::V4 { "ip" } else { "ip6" };
    format!("nftables table {keyword} {table}")
}

pub(super) fn kind(number: u8, family: Family) -> Kind {
    Kind { subsystem: SUBSYSTEM, number, family: protocol(family) }
}

impl Table {
    /// The desired table; `None` if it has no rules.
    pub(crate) fn desired(rules: &Rules, id: &Id) -> Option<Self> {
        let mut table = Self::default();
        for chain in id.chains {
            let rules = rules.of(id.family, *chain);
            if !rules.is_empty() {
                let Place { kind, hook, priority, .. } = place(*chain);
                let rules = rules.iter().map(expr::of).collect();
                let filled =
                    Filled { kind: kind.to_owned(), hook, priority, policy: ACCEPT, rules };
                table.chains.insert(*chain, filled);
                table.uses += 1;
            }
        }
        (table.uses > 0).then_some(table)
    }

    /// The actual table; `None` if it does not exist.
    ///
    /// It is read in several steps. The caller compares the [`generation`] before and after.
    pub(crate) fn read(socket: &mut NetfilterSocket, id: &Id) -> Result<Option<Self>, KernelError> {
        let Id { family, name, chains } = *id;
        let Some((flags, uses)) = head(socket, family, name)? else { return Ok(None) };
        let names: Vec<&str> = chains.iter().map(|chain| place(*chain).name).collect();
        let filled = Filled::read_with_rules(socket, family, name, &names)?;
        let chains = chains.iter().zip(filled);
        let chains = chains.filter_map(|(chain, filled)| Some((*chain, filled?))).collect();
        Ok(Some(Self { flags, uses, chains }))
    }

    /// Adds the changes that create the table.
    pub(crate) fn make(&self, batch: &mut Batch, id: &Id) {
        let (family, table) = (id.family, id.name);
        batch.add(NEWTABLE, protocol(family), Make::Create, |request| {
            number(request.text(TABLE, table), TABLE_FLAGS, self.flags)
                .attr(TABLE_USERDATA, &comment(&format!("rules for {table}")));
        });
        for (chain, filled) in &self.chains {
            let Place { name, comment, .. } = place(*chain);
            filled.make(batch, family, [table, name], comment);
        }
    }

    /// The differences between the actual and the desired table.
    pub(crate) fn deviations(
        found: Option<&Self>,
        desired: Option<&Self>,
        id: &Id,
    ) -> Vec<Deviation> {
        let title = id.title();
        let at = |object: String, fault| vec![Deviation { object, fault }];
        let (found, desired) = match (found, desired) {
            (None, None) => return Vec::new(),
            (None, Some(_)) => return at(title, Fault::Missing),
            (Some(_), None) => return at(title, Fault::Unwanted),
            (Some(found), Some(desired)) => (found, desired),
        };
        let mut deviations = Vec::new();
        for chain in id.chains {
            let fault = match (found.chains.get(chain), desired.chains.get(chain)) {
                (None, Some(_)) => Fault::Missing,
                (Some(_), None) => Fault::Unwanted,
                (found, desired) if found != desired => Fault::Different,
                _ => continue,
            };
            deviations.push(Deviation {
                object: format!("{title}, chain {}", place(*chain).name),
                fault,
            });
        }
        if deviations.is_empty() && found != desired {
            return at(title, Fault::Different);
        }
        deviations
    }
}

impl Filled {
    /// A chain without its rules; `None` if it does not exist.
    fn read(
        socket: &mut NetfilterSocket,
        family: Family,
        table: &str,
        chain: &str,
    ) -> Result<Option<Self>, KernelError> {
        let fill = |request: &mut Messages| _ = request.text(TABLE, table).text(CHAIN_NAME, chain);
        present(socket.ask(kind(GETCHAIN, family), fill, |message| {
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

    /// Chains with their rules; `None` for one that does not exist.
    pub(super) fn read_with_rules(
        socket: &mut NetfilterSocket,
        family: Family,
        table: &str,
        names: &[&str],
    ) -> Result<Vec<Option<Self>>, KernelError> {
        let chains = names.iter().map(|name| Self::read(socket, family, table, name));
        let mut chains = chains.collect::<Result<Vec<_>, _>>()?;
        for (of, rule) in rules(socket, protocol(family), table)? {
            // A foreign chain makes the number of uses of the table differ.
            let chain = chains.iter_mut().zip(names).find(|(_, name)| **name == of);
            if let Some((Some(chain), _)) = chain {
                chain.rules.push(rule);
            }
        }
        Ok(chains)
    }

    /// Adds the changes that create the chain and its rules.
    pub(super) fn make(
        &self,
        batch: &mut Batch,
        family: Family,
        [table, chain]: [&str; 2],
        text: &str,
    ) {
        let protocol = protocol(family);
        batch.add(NEWCHAIN, protocol, Make::Create, |request| {
            request.text(TABLE, table).text(CHAIN_NAME, chain);
            request.nest(CHAIN_HOOK, |hook| {
                number(number(hook, HOOK_NUMBER, self.hook), HOOK_PRIORITY, self.priority);
            });
            number(request, CHAIN_POLICY, self.policy)
                .text(CHAIN_TYPE, &self.kind)
                .attr(CHAIN_USERDATA, &comment(text));
        });
        for rule in &self.rules {
            batch.add(NEWRULE, protocol, Make::Append, |request| {
                request.text(TABLE, table).text(RULE_CHAIN, chain);
                expr::write(request, RULE_EXPRESSIONS, rule);
            });
        }
    }
}

/// The flags of a table and the number of its chains, sets and other objects; `None` if it does not
/// exist.
pub(crate) fn head(
    socket: &mut NetfilterSocket,
    family: Family,
    table: &str,
) -> Result<Option<(u32, u32)>, KernelError> {
    let fill = |request: &mut Messages| _ = request.text(TABLE, table);
    present(socket.ask(kind(GETTABLE, family), fill, |message| {
        let attributes = message.attributes.0;
        Some((number_in(attributes, TABLE_FLAGS)?, number_in(attributes, TABLE_USE)?))
    }))
}

/// The rules of a table in order, each with the name of its chain.
pub(crate) fn rules(
    socket: &mut NetfilterSocket,
    protocol: u8,
    table: &str,
) -> Result<Vec<(String, Vec<Expr>)>, KernelError> {
    read_rules(socket, protocol, table, expr::read)
}

/// The number of packets that the counters in the rules of a table have counted. Takes a single
/// request, because a set of thousands of peers is not read. 0 if the table does not exist.
pub(crate) fn counted(
    socket: &mut NetfilterSocket,
    family: Family,
    table: &str,
) -> Result<u64, KernelError> {
    let counts = present(read_rules(socket, protocol(family), table, expr::packets))?;
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

/// Adds the change that removes a table.
pub(crate) fn remove(batch: &mut Batch, family: Family, table: &str) {
    batch.add(DELTABLE, protocol(family), Make::Nothing, |request| {
        _ = request.text(TABLE, table);
    });
}

/// Whether a chain exists in a table.
pub(crate) fn is_there(
    socket: &mut NetfilterSocket,
    family: Family,
    table: &str,
    chain: &str,
) -> Result<bool, KernelError> {
    let fill = |request: &mut Messages| _ = request.text(TABLE, table).text(CHAIN_NAME, chain);
    Ok(present(socket.ask(kind(GETCHAIN, family), fill, |_| Some(())))?.is_some())
}

/// The generation of the ruleset, a number that changes with each transaction of any program.
pub(crate) fn generation(socket: &mut NetfilterSocket) -> Result<u32, KernelError> {
    let any = Kind { subsystem: SUBSYSTEM, number: GETGEN, family: 0 };
    socket.ask(any, |_| (), |message| number_in(message.attributes.0, 1))
}

/// `None` if the object does not exist.
pub(super) fn present<T>(answer: Result<T, KernelError>) -> Result<Option<T>, KernelError> {
    match answer {
        Err(error) if error.errno == ENOENT => Ok(None),
        answer => answer.map(Some),
    }
}

/// User data in the format of `nft`: type 0 for a comment, length, text, and a zero byte.
pub(super) fn comment(text: &str) -> Vec<u8> {
    let len = u8::try_from(text.len() + 1).expect("the comments are short");
    [&[0, len], text.as_bytes(), &[0]].concat()
}
