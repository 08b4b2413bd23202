//! flannel's nf_tables tables: for each family one with the rules of Go flannel, and one with the
//! rules about encryption, which Go flannel does not know.
//!
//! The tables belong to flannel alone. A table that differs from the desired one is replaced as a
//! whole, in one transaction. So two daemons on a host never share one: if the table with Go
//! flannel's name has the rules of another daemon, this one uses a table with the name of its
//! network, for example `flannel-ipv4-10.2.0.0-16`.
//!
//! **Source**: flannel `pkg/trafficmngr/nftables`.

use std::collections::BTreeMap;

use flannel_core::Subnet;
use flannel_core::address::Family;
use flannel_core::kernel::KernelError;
use flannel_netlink::netfilter::{Batch, NetfilterSocket};
use flannel_netlink::nftables::{self, Base, Table, TableHead, hook, verdict};

use super::rule;
use crate::ownership::Ownership;
use crate::rules::{Chain, Rules};
use crate::status::{Deviation, Fault};

/// A family and a part of the rules, which is in one table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Part {
    pub(crate) family: Family,
    /// The name of the table, unless another daemon has it.
    name: &'static str,
    chains: &'static [Chain],
}

/// A table of flannel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TableId {
    pub(crate) part: Part,
    pub(crate) name: String,
}

const GO: &[Chain] = &[Chain::Postrouting, Chain::Forward];
const ENCRYPTION: &[Chain] = &[Chain::Encryption, Chain::Unrouted];
/// All parts, in the order in which they are written.
pub(crate) const PARTS: [Part; 4] = [
    Part { family: Family::V4, name: "flannel-ipv4", chains: GO },
    Part { family: Family::V6, name: "flannel-ipv6", chains: GO },
    Part { family: Family::V4, name: "flannel-encryption", chains: ENCRYPTION },
    Part { family: Family::V6, name: "flannel-encryption", chains: ENCRYPTION },
];

impl Part {
    /// Its table with the usual name.
    pub(crate) fn usual(self) -> TableId {
        TableId { part: self, name: self.name.to_owned() }
    }

    /// The tables that may have its rules for the networks of `owned`: the usual one first, then
    /// the one of each network.
    ///
    /// # Errors
    /// The tables cannot be listed.
    pub(crate) fn tables(
        self,
        socket: &mut NetfilterSocket,
        owned: &Ownership,
    ) -> Result<Vec<TableId>, KernelError> {
        let names: Vec<String> = match owned {
            Ownership::Everything => {
                let start = format!("{}-", self.name);
                let mut names = Table::names(socket, self.family.into())?;
                names.retain(|name| name.starts_with(&start));
                names
            }
            Ownership::Networks(networks) => {
                let own = networks.iter().filter(|network| network.family() == self.family);
                own.map(|network| self.name_for(*network)).collect()
            }
        };
        let others = names.into_iter().map(|name| TableId { part: self, name });
        Ok(std::iter::once(self.usual()).chain(others).collect())
    }

    /// The name of the table of a network. `nft` takes only letters, digits and `/\_.-`.
    fn name_for(self, network: Subnet) -> String {
        let base = network.base().to_string().replace(':', "_");
        format!("{}-{base}-{}", self.name, network.len())
    }
}

impl TableId {
    /// Whether Go flannel does not know it.
    pub(crate) fn is_unknown_to_go(&self) -> bool {
        self.is_about_encryption() || !self.is_usual()
    }

    /// Whether it has the rules about encryption.
    pub(crate) fn is_about_encryption(&self) -> bool {
        self.part.chains == ENCRYPTION
    }

    /// Whether it has the usual name.
    pub(crate) fn is_usual(&self) -> bool {
        self.name == self.part.name
    }

    pub(crate) fn table(&self) -> Table<'_> {
        Table { family: self.part.family.into(), name: &self.name }
    }
}

/// The values of a table that are compared.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Content {
    /// `NFT_TABLE_F_…`. A dormant table has no effect.
    flags: u32,
    /// The number of chains, sets and other objects in the table (`NFTA_TABLE_USE`).
    uses: u32,
    chains: BTreeMap<Chain, nftables::Chain>,
}

/// A rule for an own network.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct OwnRule {
    pub(crate) chain: &'static str,
    pub(crate) handle: u64,
}

/// The name, type, hook, priority and comment of a chain.
struct Place {
    name: &'static str,
    kind: &'static str,
    hook: u32,
    priority: i32,
    comment: &'static str,
}

fn place(chain: Chain) -> Place {
    match chain {
        Chain::Postrouting => Place {
            name: "postrtg",
            kind: "nat",
            hook: hook::POSTROUTING,
            priority: 100,
            comment: "chain to manage traffic masquerading by flannel",
        },
        Chain::Forward => Place {
            name: "forward",
            kind: "filter",
            hook: hook::FORWARD,
            priority: 0,
            comment: "chain to accept flannel traffic",
        },
        Chain::Encryption => Place {
            name: "postrouting",
            kind: "filter",
            hook: hook::POSTROUTING,
            // `mangle` in the notation of `nft`.
            priority: -150,
            comment: "chain to drop unencrypted packets to other nodes' pods",
        },
        Chain::Unrouted => Place {
            name: "prerouting",
            kind: "filter",
            hook: hook::PREROUTING,
            // After `dstnat`, so that packets to services have their last destination.
            priority: -90,
            comment: "chain to count packets to other nodes' pods without a route",
        },
    }
}

impl Content {
    /// The desired table, or `None` if it has no rules.
    pub(crate) fn desired(rules: &Rules, id: &TableId) -> Option<Self> {
        let mut table = Self::default();
        for chain in id.part.chains {
            let rules = rules.of(id.part.family, *chain);
            if rules.is_empty() {
                continue;
            }
            let Place { kind, hook, priority, .. } = place(*chain);
            let base = Base { kind: kind.to_owned(), hook, priority, policy: verdict::ACCEPT };
            let rules = rules.iter().map(rule::of).collect();
            table.chains.insert(*chain, nftables::Chain { base: Some(base), rules });
            table.uses += 1;
        }
        (table.uses > 0).then_some(table)
    }

    /// The actual table, or `None` if it does not exist.
    ///
    /// It is read in several steps, so the caller needs
    /// [`flannel_netlink::nftables::at_one_moment`].
    pub(crate) fn read(
        socket: &mut NetfilterSocket,
        id: &TableId,
    ) -> Result<Option<Self>, KernelError> {
        let table = id.table();
        let Some(TableHead { flags, uses, .. }) = table.head(socket)? else { return Ok(None) };
        let names: Vec<&str> = id.part.chains.iter().map(|chain| place(*chain).name).collect();
        let mut chains = BTreeMap::new();
        for (chain, content) in
            id.part.chains.iter().zip(nftables::Chain::read(socket, &table, &names)?)
        {
            if let Some(content) = content {
                chains.insert(*chain, content);
            }
        }
        Ok(Some(Self { flags, uses, chains }))
    }

    /// Whether it has rules for a network that is not in `owned`.
    pub(crate) fn is_of_others(&self, family: Family, owned: &Ownership) -> bool {
        let mut rules = self.chains.values().flat_map(|chain| &chain.rules);
        rules.any(|rule| rule::network_of(rule, family).is_some_and(|network| !owned.has(network)))
    }

    /// The rules for networks in `owned`, by chain and handle. It is read in the same moment as the
    /// content.
    pub(crate) fn rules_of(
        &self,
        socket: &mut NetfilterSocket,
        id: &TableId,
        owned: &Ownership,
    ) -> Result<Vec<OwnRule>, KernelError> {
        let is_own = |rule: &Vec<_>| {
            rule::network_of(rule, id.part.family).is_some_and(|network| owned.has(network))
        };
        let mut own = Vec::new();
        for (chain, content) in &self.chains {
            if !content.rules.iter().any(is_own) {
                continue;
            }
            let chain = place(*chain).name;
            let handles = id.table().programs(socket, chain)?;
            let rules = content.rules.iter().zip(handles).filter(|(rule, _)| is_own(rule));
            own.extend(rules.map(|(_, program)| OwnRule { chain, handle: program.handle }));
        }
        Ok(own)
    }

    /// Adds the changes that create the table, which must not exist: another daemon may have made
    /// it since the tables were read. The first change creates the table itself.
    pub(crate) fn make(&self, batch: &mut Batch, id: &TableId) {
        let table = id.table();
        table.make_new(batch, &format!("rules for {}", id.name));
        self.make_chains(batch, &table);
    }

    /// Adds the changes that create the chains, and append the rules to those that exist.
    pub(super) fn make_chains(&self, batch: &mut Batch, table: &Table<'_>) {
        for (chain, content) in &self.chains {
            let Place { name, comment, .. } = place(*chain);
            content.make(batch, table, name, comment);
        }
    }

    /// The differences between the actual and the desired table.
    pub(crate) fn deviations(
        found: Option<&Self>,
        desired: Option<&Self>,
        id: &TableId,
    ) -> Vec<Deviation> {
        let title = id.table().to_string();
        let at = |object: String, fault| vec![Deviation { object, fault }];
        let (found, desired) = match (found, desired) {
            (None, None) => return Vec::new(),
            (None, Some(_)) => return at(title, Fault::Missing),
            (Some(_), None) => return at(title, Fault::Unwanted),
            (Some(found), Some(desired)) => (found, desired),
        };
        let mut deviations = Vec::new();
        for chain in id.part.chains {
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
