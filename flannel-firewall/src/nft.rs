//! Rules in nf_tables, over netlink, without running a program.
//!
//! The tables change in one transaction, so each packet meets either the old rules or the new ones.

mod rule;
mod table;

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};

use flannel_core::address::Family;
use flannel_core::kernel::KernelError;
use flannel_core::object::LinkName;
use flannel_core::runtime::{blocking, lock};
use flannel_netlink::netfilter::{Batch, NetfilterEvents, NetfilterSocket, Refused};
use flannel_netlink::nftables::{self, Expr, GROUP, Table, batch, generation};
use libc::{EAGAIN, EBUSY, EEXIST, ENOENT};

use self::table::{Content, OwnRule, PARTS, TableId};
use crate::error::Error;
use crate::guard;
use crate::iptables::script::{self, Scope};
use crate::ownership::Ownership;
use crate::rules::{Chain, Rules};
use crate::status::{Deviation, Fault, Packets};

/// The number of attempts for a table that changes while it is written.
const TRIES: usize = 16;

/// The kernel's nf_tables, in the network namespace of the thread that opened it.
pub(crate) struct Nft {
    /// `None` when this value was dropped, so that no transaction begins after that.
    socket: Arc<Mutex<Option<NetfilterSocket>>>,
    events: NetfilterEvents,
    /// Whether rules can look for routes, or `None` until that is needed.
    finds_routes: Option<bool>,
    /// The tables that may concern this value.
    watched: Vec<TableId>,
    /// The counters of the rules at the last check, before its changes.
    pub(crate) counted: Packets<u64>,
}

impl Nft {
    /// Opens the kernel's nf_tables and checks that they can be read.
    pub(crate) fn open() -> Result<Self, Error> {
        let socket = open()?;
        let events = NetfilterEvents::listen(GROUP, socket.port())
            .map_err(|error| Error::kernel("nftables", error))?;
        let socket = Arc::new(Mutex::new(Some(socket)));
        let watched = PARTS.map(|part| part.usual()).to_vec();
        Ok(Self { socket, events, finds_routes: None, watched, counted: Packets::default() })
    }

    /// Makes the tables equal to `rules`. Returns the differences that it removed.
    pub(crate) async fn reconcile(&mut self, rules: &Rules) -> Result<Vec<Deviation>, Error> {
        let desired = self.supported(rules).await;
        let socket = self.socket.clone();
        let checked = blocking(move || match &mut *lock(&socket) {
            Some(socket) => {
                let watched = all_tables(socket, &desired)?;
                let counted = count(socket, &desired)?;
                let deviations = reconcile(socket, &desired, true, |_| true)?;
                Ok(Some((watched, counted, deviations)))
            }
            None => Ok(None),
        });
        let Some((watched, counted, deviations)) = checked.await? else { return Ok(Vec::new()) };
        self.watched = watched;
        self.counted = counted;
        Ok(deviations)
    }

    /// The rules that this kernel supports.
    async fn supported(&mut self, rules: &Rules) -> Rules {
        let mut families = Family::BOTH.to_vec();
        families.retain(|family| !rules.of(*family, Chain::Unrouted).is_empty());
        if families.is_empty() {
            return rules.clone();
        }
        let finds_routes = match self.finds_routes {
            Some(known) => known,
            None => self.probe_routes(families).await,
        };
        self.finds_routes = Some(finds_routes);
        if finds_routes { rules.clone() } else { rules.without_unrouted() }
    }

    /// Whether rules of these families can look for routes.
    async fn probe_routes(&self, families: Vec<Family>) -> bool {
        let socket = self.socket.clone();
        blocking(move || match &mut *lock(&socket) {
            Some(socket) => families.into_iter().all(|family| finds_routes(socket, family)),
            None => false,
        })
        .await
    }

    /// Waits until another program changes a table of flannel, or messages are lost.
    pub(crate) async fn disturbed(&mut self) -> Result<(), Error> {
        let watched = &self.watched;
        self.events
            .changed(|message| watched.iter().any(|id| id.table().is_changed_by(message)))
            .await
            .map_err(|error| Error::kernel("nftables notifications", error))
    }
}

/// Waits for the end of a running transaction, so that a later [`Nft`] is the only writer.
impl Drop for Nft {
    fn drop(&mut self) {
        *lock(&self.socket) = None;
    }
}

/// Finds the tables that `none` owns, and removes them if `write` is true.
pub(crate) fn clean(none: &Rules, write: bool) -> Result<Vec<Deviation>, Error> {
    match open_if_any()? {
        Some(mut socket) => reconcile(&mut socket, none, write, |_| true),
        None => Ok(Vec::new()),
    }
}

/// Finds the tables that `none` owns and Go flannel does not know, and the guards of these devices.
/// Removes them if `write` is true.
pub(crate) fn clean_for_go(
    none: &Rules,
    devices: &BTreeSet<LinkName>,
    write: bool,
) -> Result<Vec<Deviation>, Error> {
    let Some(mut socket) = open_if_any()? else { return Ok(Vec::new()) };
    let guards =
        guard::tables(&mut socket, devices).map_err(|error| Error::kernel("nftables", error))?;
    let mut found = reconcile(&mut socket, none, write, TableId::is_unknown_to_go)?;
    for name in guards {
        let table = guard::table_named(&name);
        if write {
            let mut batch = batch();
            table.remove(&mut batch);
            socket
                .commit(batch)
                .map_err(|refused| Error::kernel(table.to_string(), refused.error))?;
        }
        found.push(Deviation { object: table.to_string(), fault: Fault::Unwanted });
    }
    Ok(found)
}

/// Opens the kernel's nf_tables and checks that they can be read.
fn open() -> Result<NetfilterSocket, Error> {
    let about = |error| Error::kernel("nftables", error);
    let mut socket = NetfilterSocket::open().map_err(about)?;
    generation(&mut socket).map_err(about)?;
    Ok(socket)
}

/// Whether rules of a family can look for routes ([`Expr::OutDevice`]). Tries it in a table that
/// exists only within the transaction.
fn finds_routes(socket: &mut NetfilterSocket, family: Family) -> bool {
    let table = Table { family: family.into(), name: "flannel-probe" };
    let rules = vec![vec![Expr::OutDevice]];
    let mut probe = batch();
    table.make_new(&mut probe, "can rules look for routes?");
    nftables::Chain { base: None, rules }.make(&mut probe, &table, "probe", "a probe");
    table.remove(&mut probe);
    let refused = socket.commit(probe).err();
    if let Some(Refused { error, .. }) = &refused {
        tracing::info!(
            %error, %family,
            "packets that a blackhole route drops are not counted: rules cannot look for routes"
        );
    }
    refused.is_none()
}

/// Opens the kernel's nf_tables, as [`open`] does. `None` if the kernel has no nf_tables.
fn open_if_any() -> Result<Option<NetfilterSocket>, Error> {
    match open() {
        Ok(socket) => Ok(Some(socket)),
        Err(Error::NoNftables { source, .. }) => {
            tracing::debug!(%source, "no nf_tables, and so no tables of flannel");
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

/// Compares the tables for which `is_meant` returns true with the desired ones. Writes the
/// differences if `write` is true.
fn reconcile(
    socket: &mut NetfilterSocket,
    rules: &Rules,
    write: bool,
    is_meant: impl Fn(&TableId) -> bool,
) -> Result<Vec<Deviation>, Error> {
    for _ in 0..TRIES {
        let mut tables = read_tables(socket, rules)?;
        tables.retain(|table| is_meant(&table.id));
        let transaction = Transaction::new(&tables, rules);
        if transaction.deviations.is_empty() || !write {
            return Ok(transaction.deviations);
        }
        if let Some(deviations) = transaction.commit(socket)? {
            return Ok(deviations);
        }
    }
    Err(unsteady())
}

/// A table as it is.
#[derive(Debug, PartialEq)]
struct FoundTable {
    id: TableId,
    /// `None` if it does not exist.
    content: Option<Content>,
    /// The rules for own networks, if another daemon has rules here too. They are removed: the
    /// daemons would replace each other's rules.
    strays: Vec<OwnRule>,
}

impl FoundTable {
    /// Whether another daemon has its rules here.
    fn is_of_others(&self, owned: &Ownership) -> bool {
        let family = self.id.part.family;
        self.content.as_ref().is_some_and(|content| content.is_of_others(family, owned))
    }
}

/// The table for the rules of a part, of the tables that may have them: the usual one, unless
/// another daemon has it, or has had it before, so that the rules are in the table of the network.
fn home<'a>(part: &'a [FoundTable], rules: &Rules) -> Option<&'a FoundTable> {
    let usual = part.iter().find(|found| found.id.is_usual());
    // The networks begin with the one that has rules.
    let own = part.iter().find(|found| !found.id.is_usual());
    let is_taken = usual.is_some_and(|usual| usual.is_of_others(rules.ownership()));
    let is_gone = usual.is_some_and(|usual| usual.content.is_none());
    let moved = own.filter(|own| is_taken || (is_gone && own.content.is_some()));
    moved.or(usual)
}

/// The transaction that replaces the tables that differ from the desired ones.
struct Transaction {
    batch: Batch,
    deviations: Vec<Deviation>,
    /// The names of the tables, for an error.
    titles: Vec<String>,
    /// The numbers of the changes that remove or create a whole table, or remove a single rule.
    whole: Vec<usize>,
}

impl Transaction {
    fn new(tables: &[FoundTable], rules: &Rules) -> Self {
        let mut transaction =
            Self { batch: batch(), deviations: Vec::new(), titles: Vec::new(), whole: Vec::new() };
        let owned = rules.ownership();
        for part in tables.chunk_by(|a, b| a.id.part == b.id.part) {
            let home = home(part, rules);
            for found in part {
                if found.is_of_others(owned) {
                    transaction.remove(&found.id, &found.strays);
                    continue;
                }
                let is_home = home.is_some_and(|home| home.id == found.id);
                let desired = if is_home { Content::desired(rules, &found.id) } else { None };
                transaction.add(&found.id, found.content.as_ref(), desired);
            }
        }
        transaction
    }

    /// Adds the changes that replace the table, if it differs.
    fn add(&mut self, id: &TableId, found: Option<&Content>, desired: Option<Content>) {
        let deviations = Content::deviations(found, desired.as_ref(), id);
        if deviations.is_empty() {
            return;
        }
        self.deviations.extend(deviations);
        self.titles.push(id.table().to_string());
        if found.is_some() {
            self.whole.push(self.batch.len());
            id.table().remove(&mut self.batch);
        }
        if let Some(desired) = desired {
            // The first change of `make` creates the table itself.
            self.whole.push(self.batch.len());
            desired.make(&mut self.batch, id);
        }
    }

    /// Adds the changes that remove rules from the table of another daemon.
    fn remove(&mut self, id: &TableId, strays: &[OwnRule]) {
        if strays.is_empty() {
            return;
        }
        let table = id.table();
        self.deviations.push(Deviation { object: table.to_string(), fault: Fault::Unwanted });
        self.titles.push(table.to_string());
        for OwnRule { chain, handle } in strays {
            self.whole.push(self.batch.len());
            table.remove_rule(&mut self.batch, chain, *handle);
        }
    }

    /// Commits the transaction. Returns the differences, or `None` if another program removed or
    /// created a table since the tables were read.
    fn commit(self, socket: &mut NetfilterSocket) -> Result<Option<Vec<Deviation>>, Error> {
        match socket.commit(self.batch) {
            Ok(()) => Ok(Some(self.deviations)),
            Err(Refused { change: Some(change), error })
                if self.whole.contains(&change)
                    && matches!(error.errno(), Some(ENOENT | EEXIST | EBUSY)) =>
            {
                Ok(None)
            }
            Err(Refused { error, .. }) => Err(Error::kernel(self.titles.join(" and "), error)),
        }
    }
}

/// The counters of the rules. Without rules that count, nothing is read.
fn count(socket: &mut NetfilterSocket, rules: &Rules) -> Result<Packets<u64>, Error> {
    let mut counted = Packets::default();
    if Family::BOTH.iter().all(|family| rules.of(*family, Chain::Encryption).is_empty()) {
        return Ok(counted);
    }
    let tables = read_tables(socket, rules)?;
    for part in tables.chunk_by(|a, b| a.id.part == b.id.part) {
        let home = home(part, rules).filter(|home| home.id.is_about_encryption());
        let Some(FoundTable { id, .. }) = home else { continue };
        if rules.of(id.part.family, Chain::Encryption).is_empty() {
            continue;
        }
        let table = id.table();
        counted.unencrypted +=
            table.counted(socket).map_err(|error| Error::kernel(table.to_string(), error))?;
    }
    Ok(counted)
}

/// The tables that may have rules of the networks of `rules`.
fn all_tables(socket: &mut NetfilterSocket, rules: &Rules) -> Result<Vec<TableId>, Error> {
    let mut all = Vec::new();
    for part in PARTS {
        let tables = part.tables(socket, rules.ownership());
        all.extend(tables.map_err(|error| Error::kernel("nftables", error))?);
    }
    Ok(all)
}

/// Reads the tables that may have rules of the networks of `rules`, as they are at one moment.
fn read_tables(socket: &mut NetfilterSocket, rules: &Rules) -> Result<Vec<FoundTable>, Error> {
    nftables::at_one_moment(
        socket,
        |error| Error::kernel("nftables", error),
        |socket| {
            let mut tables = Vec::new();
            for id in all_tables(socket, rules)? {
                let about = |error| Error::kernel(id.table().to_string(), error);
                let content = Content::read(socket, &id).map_err(about)?;
                let mut found = FoundTable { id: id.clone(), content, strays: Vec::new() };
                if let Some(content) = &found.content
                    && found.is_of_others(rules.ownership())
                {
                    found.strays =
                        content.rules_of(socket, &id, rules.ownership()).map_err(about)?;
                }
                tables.push(found);
            }
            Ok(tables)
        },
    )
}

/// The chains of flannel that `iptables-nft` has in nf_tables. Only `iptables-nft` may change them.
pub(crate) fn chains_of_iptables(family: Family, scope: Scope) -> Result<Vec<String>, Error> {
    let Some(mut socket) = open_if_any()? else { return Ok(Vec::new()) };
    let mut found = Vec::new();
    for (name, chain) in script::chains(scope) {
        let table = Table { family: family.into(), name };
        let exists = table
            .has_chain(&mut socket, chain)
            .map_err(|error| Error::kernel("nftables", error))?;
        if exists {
            found.push(format!("{family} chain {chain} in table {name}"));
        }
    }
    Ok(found)
}

fn unsteady() -> Error {
    let detail = format!("another program changed it during each of {TRIES} attempts");
    let source = KernelError::explained(EAGAIN, detail);
    Error::Kernel { object: "nftables".into(), source }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::masquerade::Masquerade;
    use crate::rules::RuleOptions;
    use crate::rules::tests::rules;
    use flannel_core::address::Dual;

    #[test]
    fn a_transaction_for_a_table_that_another_program_removed_has_no_effect() {
        flannel_netlink::testing::in_netns(|| {
            let before =
                rules(RuleOptions { encrypted: Some(Vec::new()), ..RuleOptions::default() });
            let after = rules(RuleOptions {
                masquerade: Masquerade::both(false),
                forward: true,
                encrypted: Some(vec!["wg0".parse().unwrap()]),
            });
            let mut socket = NetfilterSocket::open().unwrap();
            let all = all_tables(&mut socket, &after).unwrap();
            let desired: Vec<_> = all
                .into_iter()
                .map(|id| {
                    let content = Content::desired(&after, &id).filter(|_| id.is_usual());
                    FoundTable { id, content, strays: Vec::new() }
                })
                .collect();
            for id in PARTS.map(|part| part.usual()) {
                reconcile(&mut socket, &before, true, |_| true).unwrap();
                let found = read_tables(&mut socket, &after).unwrap();
                let transaction = Transaction::new(&found, &after);
                let mut removal = batch();
                id.table().remove(&mut removal);
                socket.commit(removal).unwrap();
                assert_eq!(transaction.commit(&mut socket).unwrap(), None, "{id:?}");
                reconcile(&mut socket, &after, true, |_| true).unwrap();
                assert_eq!(read_tables(&mut socket, &after).unwrap(), desired);
            }
        });
    }

    /// At the start of a host, or after `nft flush ruleset`, two daemons find no table at once.
    #[test]
    fn two_daemons_that_found_no_table_do_not_share_one() {
        flannel_netlink::testing::in_netns(|| {
            let one = rules(RuleOptions { forward: true, ..RuleOptions::default() });
            let network = Dual { v4: "10.2.0.0/16".parse().ok(), v6: "fd00:2::/48".parse().ok() };
            let options = RuleOptions { forward: true, ..RuleOptions::default() };
            let two = Rules::new(&network, &Dual::default(), &options).unwrap();
            let mut socket = NetfilterSocket::open().unwrap();
            let [first, second] = [&one, &two]
                .map(|rules| Transaction::new(&read_tables(&mut socket, rules).unwrap(), rules));
            assert!(first.commit(&mut socket).unwrap().is_some());
            assert_eq!(second.commit(&mut socket).unwrap(), None);
            reconcile(&mut socket, &two, true, |_| true).unwrap();
            for rules in [&one, &two] {
                assert_eq!(reconcile(&mut socket, rules, true, |_| true).unwrap(), []);
            }
            // An earlier version merged the rules into one table.
            let usual = PARTS.map(|part| part.usual());
            for id in &usual[..2] {
                let Some(desired) = Content::desired(&two, id) else { panic!("{id:?}") };
                let mut merge = batch();
                desired.make_chains(&mut merge, &id.table());
                socket.commit(merge).unwrap();
            }
            assert_eq!(reconcile(&mut socket, &two, true, |_| true).unwrap().len(), 2);
            for rules in [&one, &two] {
                assert_eq!(reconcile(&mut socket, rules, true, |_| true).unwrap(), []);
            }
        });
    }
}
