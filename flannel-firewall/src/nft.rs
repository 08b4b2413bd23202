//! Rules in nf_tables, over netlink, without running a program.
//!
//! The tables change in one transaction, so each packet meets either the old rules or the new ones.

mod rule;
mod table;

use std::sync::{Arc, Mutex};

use flannel_core::address::Family;
use flannel_core::kernel::KernelError;
use flannel_core::runtime::{blocking, lock};
use flannel_netlink::netfilter::{
    Batch, NetfilterEvents, NetfilterMessage, NetfilterSocket, Refused,
};
use flannel_netlink::nftables::{self, Expr, GROUP, Table, batch, generation};
use libc::{EAGAIN, EBUSY, EEXIST, ENOENT};

use self::table::{Content, Id, TABLES};
use crate::error::Error;
use crate::guard;
use crate::iptables::script::{self, Scope};
use crate::rules::{Chain, Rules};
use crate::status::{Deviation, Fault, Packets};

/// The number of attempts for a table that changes while it is written.
const TRIES: usize = 16;

/// The kernel's nf_tables, in the network namespace of the thread that opened it.
pub(crate) struct Nft {
    /// `None` when this value was dropped, so that no transaction begins after that.
    socket: Arc<Mutex<Option<NetfilterSocket>>>,
    events: NetfilterEvents,
    /// Whether rules can look for routes; `None` until that is needed.
    finds_routes: Option<bool>,
    /// The counters of the rules at the last check, before its changes.
    pub(crate) counted: Packets<u64>,
}

impl Nft {
    /// Opens the kernel's nf_tables and checks that they can be read.
    pub(crate) fn open() -> Result<Self, Error> {
        let socket = open()?;
        let events = NetfilterEvents::listen(GROUP, socket.port());
        let events = events.map_err(|error| Error::kernel("nftables", error))?;
        let socket = Arc::new(Mutex::new(Some(socket)));
        Ok(Self { socket, events, finds_routes: None, counted: Packets::default() })
    }

    /// Makes the tables equal to `rules`. Returns the differences that it removed.
    pub(crate) async fn reconcile(&mut self, rules: &Rules) -> Result<Vec<Deviation>, Error> {
        let desired = self.possible(rules).await;
        let socket = self.socket.clone();
        let work = move || match &mut *lock(&socket) {
            Some(socket) => {
                let counted = count(socket, &desired)?;
                Ok((reconcile(socket, &desired, true, |_| true)?, counted))
            }
            None => Ok(Default::default()),
        };
        let (deviations, counted) = blocking(work).await?;
        self.counted = counted;
        Ok(deviations)
    }

    /// The rules that this kernel can have.
    async fn possible(&mut self, rules: &Rules) -> Rules {
        let counts = |family: &Family| !rules.of(*family, Chain::Unrouted).is_empty();
        let families: Vec<Family> = Family::BOTH.into_iter().filter(counts).collect();
        if families.is_empty() {
            return rules.clone();
        }
        if self.finds_routes.is_none() {
            let socket = self.socket.clone();
            let probe = move || match &mut *lock(&socket) {
                Some(socket) => families.into_iter().all(|family| finds_routes(socket, family)),
                None => false,
            };
            self.finds_routes = Some(blocking(probe).await);
        }
        if self.finds_routes == Some(true) { rules.clone() } else { rules.without_unrouted() }
    }

    /// Waits until another program changes a table of flannel, or messages are lost.
    pub(crate) async fn disturbed(&mut self) -> Result<(), Error> {
        let concerns = |message: &NetfilterMessage<'_>| {
            TABLES.iter().map(Id::table).any(|table| table.is_changed_by(message))
        };
        self.events
            .changed(concerns)
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

/// Finds flannel's tables, and removes them if `write` is true.
pub(crate) fn clean(write: bool) -> Result<Vec<Deviation>, Error> {
    match open_if_any()? {
        Some(mut socket) => reconcile(&mut socket, &Rules::default(), write, |_| true),
        None => Ok(Vec::new()),
    }
}

/// Finds the tables that Go flannel does not know, and removes them if `write` is true.
pub(crate) fn clean_for_go(write: bool) -> Result<Vec<Deviation>, Error> {
    let Some(mut socket) = open_if_any()? else { return Ok(Vec::new()) };
    let about = |error| Error::kernel("nftables", error);
    let guards = guard::tables(&mut socket).map_err(about)?;
    let mut found = reconcile(&mut socket, &Rules::default(), write, Id::is_about_encryption)?;
    for name in guards {
        let table = guard::table_named(&name);
        let mut batch = batch();
        table.remove(&mut batch);
        if write {
            let removed = socket.commit(batch).map_err(|refused| refused.error);
            removed.map_err(|error| Error::kernel(table.to_string(), error))?;
        }
        found.push(Deviation { object: table.to_string(), fault: Fault::Unwanted });
    }
    Ok(found)
}

/// Opens the kernel's nf_tables and checks that they can be read.
fn open() -> Result<NetfilterSocket, Error> {
    let opened =
        NetfilterSocket::open().and_then(|mut socket| generation(&mut socket).map(|_| socket));
    opened.map_err(|error| Error::kernel("nftables", error))
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

/// Like [`open`], with `None` if the kernel has no nf_tables.
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

/// Reconciles the tables for which `meant` returns true.
fn reconcile(
    socket: &mut NetfilterSocket,
    rules: &Rules,
    write: bool,
    meant: impl Fn(&Id) -> bool,
) -> Result<Vec<Deviation>, Error> {
    for _ in 0..TRIES {
        let found = read_tables(socket)?;
        let tables = found.iter().filter(|(id, _)| meant(id));
        let tables = tables.map(|(id, found)| (*id, found.as_ref(), Content::desired(rules, id)));
        let plan = Plan::new(tables);
        if plan.deviations.is_empty() || !write {
            return Ok(plan.deviations);
        }
        if let Some(deviations) = plan.carry_out(socket)? {
            return Ok(deviations);
        }
    }
    Err(unsteady())
}

/// The transaction that makes the found tables the desired ones.
struct Plan {
    batch: Batch,
    deviations: Vec<Deviation>,
    titles: Vec<String>,
    /// The numbers of the changes that remove or create a whole table.
    whole: Vec<usize>,
}

impl Plan {
    /// For tables as they are, and as they are desired.
    fn new<'a>(tables: impl Iterator<Item = (Id, Option<&'a Content>, Option<Content>)>) -> Self {
        let (deviations, titles, whole) = (Vec::new(), Vec::new(), Vec::new());
        let mut plan = Self { batch: batch(), deviations, titles, whole };
        for (id, found, desired) in tables {
            let differs = Content::deviations(found, desired.as_ref(), &id);
            if differs.is_empty() {
                continue;
            }
            plan.deviations.extend(differs);
            plan.titles.push(id.table().to_string());
            if found.is_some() {
                plan.whole.push(plan.batch.len());
                id.table().remove(&mut plan.batch);
            }
            if let Some(desired) = desired {
                // The table itself comes first.
                plan.whole.push(plan.batch.len());
                desired.make(&mut plan.batch, &id);
            }
        }
        plan
    }

    /// Commits the transaction. Returns the differences; `None` if another program removed or
    /// created a table since the tables were read.
    fn carry_out(self, socket: &mut NetfilterSocket) -> Result<Option<Vec<Deviation>>, Error> {
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
    let mut add = |to: &mut u64, table: Table<'_>| {
        let packets = table.counted(socket);
        *to += packets.map_err(|error| Error::kernel(table.to_string(), error))?;
        Ok(())
    };
    for id in TABLES.into_iter().filter(Id::is_about_encryption) {
        if !rules.of(id.family, Chain::Encryption).is_empty() {
            add(&mut counted.unencrypted, id.table())?;
        }
    }
    Ok(counted)
}

/// Each table as it is, all at one moment; `None` if it does not exist.
fn read_tables(socket: &mut NetfilterSocket) -> Result<Vec<(Id, Option<Content>)>, Error> {
    at_one_moment(socket, |socket| {
        let read = |id: Id| {
            let found = Content::read(socket, &id);
            Ok((id, found.map_err(|error| Error::kernel(id.table().to_string(), error))?))
        };
        TABLES.into_iter().map(read).collect()
    })
}

/// [`flannel_netlink::nftables::at_one_moment`] with the errors of this crate.
fn at_one_moment<T>(
    socket: &mut NetfilterSocket,
    read: impl FnMut(&mut NetfilterSocket) -> Result<T, Error>,
) -> Result<T, Error> {
    nftables::at_one_moment(socket, |error| Error::kernel("nftables", error), read)
}

/// The chains of flannel that `iptables-nft` has in nf_tables. Only `iptables-nft` may change them.
pub(crate) fn chains_of_iptables(family: Family, scope: Scope) -> Result<Vec<String>, Error> {
    let about = |error| Error::kernel("nftables", error);
    let Some(mut socket) = open_if_any()? else { return Ok(Vec::new()) };
    let mut found = Vec::new();
    for (table, chain) in script::chains(scope) {
        let place = Table { family: family.into(), name: table };
        if place.has_chain(&mut socket, chain).map_err(about)? {
            found.push(format!("{family} chain {chain} in table {table}"));
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
    use crate::rules::RuleOptions;
    use crate::rules::tests::rules;

    #[test]
    fn a_plan_for_a_table_that_another_program_removed_has_no_effect() {
        flannel_netlink::testing::in_netns(|| {
            let before = RuleOptions { encrypted: Some(Vec::new()), ..RuleOptions::default() };
            let by = Some(vec!["wg0".parse().unwrap()]);
            let after =
                RuleOptions { masquerade: true, fully_random: false, forward: true, encrypted: by };
            let (before, after) = (rules(before), rules(after));
            let tables = || TABLES.map(|id| (id, Content::desired(&after, &id)));
            let mut socket = NetfilterSocket::open().unwrap();
            for id in TABLES {
                reconcile(&mut socket, &before, true, |_| true).unwrap();
                let found = read_tables(&mut socket).unwrap();
                let found = found.iter().map(|(id, found)| (*id, found.as_ref()));
                let plan =
                    Plan::new(found.map(|(id, found)| (id, found, Content::desired(&after, &id))));
                let mut batch = batch();
                id.table().remove(&mut batch);
                socket.commit(batch).unwrap();
                assert_eq!(plan.carry_out(&mut socket).unwrap(), None, "{id:?}");
                reconcile(&mut socket, &after, true, |_| true).unwrap();
                assert_eq!(read_tables(&mut socket).unwrap(), tables());
            }
        });
    }
}
