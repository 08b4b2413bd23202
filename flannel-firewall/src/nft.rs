//! Rules in nf_tables, over netlink, without running a program.
//!
//! The tables of both families change in one transaction, so each packet meets either the old rules
//! or the new ones. The gates of tunnels are in tables of their own.

pub(crate) mod expr;
mod gate;
pub(crate) mod table;

use std::sync::{Arc, Mutex, PoisonError};

use flannel_core::address::{Dual, Family};
use flannel_core::kernel::KernelError;
use flannel_core::runtime::blocking;
use flannel_netlink::netfilter::{
    Batch, NetfilterEvents, NetfilterMessage, NetfilterSocket, Refused,
};

use self::expr::text_in;
use self::table::{SUBSYSTEM, TABLE, Table, generation, name, protocol, remove, title};
use crate::error::Error;
use crate::iptables::script;
use crate::rules::Rules;
use crate::status::Deviation;

/// `NFNLGRP_NFTABLES`.
pub(crate) const GROUP: u32 = 7;
/// `NFT_MSG_NEWGEN`, which says that a transaction ended, but not what it changed.
const NEWGEN: u8 = 15;
/// The number of attempts for a table that changes while it is read or written.
const TRIES: usize = 16;
const ENOENT: i32 = 2;
const EEXIST: i32 = 17;
const EAGAIN: i32 = 11;
const EBUSY: i32 = 16;

/// The kernel's nf_tables, in the network namespace of the thread that opened it.
pub(crate) struct Nft {
    /// `None` when this value was dropped, so that no transaction begins after that.
    socket: Arc<Mutex<Option<NetfilterSocket>>>,
    events: NetfilterEvents,
    /// The rules whose gates are in place; `None` if they must be read.
    placed: Option<Rules>,
}

impl Nft {
    /// Opens the kernel's nf_tables and checks that they can be read.
    pub(crate) fn open() -> Result<Self, Error> {
        let socket = open()?;
        let events = NetfilterEvents::listen(GROUP, socket.port());
        let events = events.map_err(|error| Error::kernel("nftables", error))?;
        Ok(Self { socket: Arc::new(Mutex::new(Some(socket))), events, placed: None })
    }

    /// Makes the tables equal to `rules`. Returns the differences that it removed.
    pub(crate) async fn reconcile(&mut self, rules: &Rules) -> Result<Vec<Deviation>, Error> {
        let (socket, desired, placed) = (self.socket.clone(), rules.clone(), self.placed.take());
        let work = move || match &mut *socket.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(socket) => {
                let placed = placed.filter(|placed| placed.differ_in_peers_only(&desired));
                if placed.is_some_and(|placed| gate::update(socket, &placed, &desired)) {
                    return reconcile_tables(socket, &desired, true);
                }
                reconcile(socket, &desired, true)
            }
            None => Ok(Vec::new()),
        };
        let deviations = blocking(work).await?;
        self.placed = Some(rules.clone());
        Ok(deviations)
    }

    /// The next [`Nft::reconcile`] reads the gates too, which takes long with thousands of peers.
    pub(crate) fn invalidate(&mut self) {
        self.placed = None;
    }

    /// Waits until another program changes a table of flannel, or messages are lost.
    pub(crate) async fn disturbed(&mut self) -> Result<(), Error> {
        let concerns = |message: &NetfilterMessage<'_>| {
            let family =
                Family::BOTH.into_iter().find(|family| protocol(*family) == message.kind.family);
            let table = || text_in(message.attributes.0, TABLE);
            let is_ours =
                |family| [name(family), gate::NAME].map(Some).contains(&table().as_deref());
            message.kind.number != NEWGEN && family.is_some_and(is_ours)
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
        *self.socket.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

/// Finds flannel's tables, and removes them if `write` is true.
pub(crate) fn clean(write: bool) -> Result<Vec<Deviation>, Error> {
    match open_if_any()? {
        Some(mut socket) => reconcile(&mut socket, &Rules::default(), write),
        None => Ok(Vec::new()),
    }
}

/// Finds the gates of tunnels, and removes them if `write` is true.
pub(crate) fn clean_gates(write: bool) -> Result<Vec<Deviation>, Error> {
    match open_if_any()? {
        Some(mut socket) => gate::reconcile(&mut socket, &Rules::default(), write),
        None => Ok(Vec::new()),
    }
}

/// Opens the kernel's nf_tables and checks that they can be read.
fn open() -> Result<NetfilterSocket, Error> {
    let opened =
        NetfilterSocket::open().and_then(|mut socket| generation(&mut socket).map(|_| socket));
    opened.map_err(|error| Error::kernel("nftables", error))
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

/// Neither the rules nor the gates need the other ones.
fn reconcile(
    socket: &mut NetfilterSocket,
    rules: &Rules,
    write: bool,
) -> Result<Vec<Deviation>, Error> {
    let (tables, gates) =
        (reconcile_tables(socket, rules, write), gate::reconcile(socket, rules, write));
    Ok([tables?, gates?].concat())
}

fn reconcile_tables(
    socket: &mut NetfilterSocket,
    rules: &Rules,
    write: bool,
) -> Result<Vec<Deviation>, Error> {
    let desired = Dual::from_fn(|family| Table::desired(rules, family));
    for _ in 0..TRIES {
        let plan = Plan::new(&read_tables(socket)?, &desired);
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
    fn new(found: &Dual<Table>, desired: &Dual<Table>) -> Self {
        let (deviations, titles, whole) = (Vec::new(), Vec::new(), Vec::new());
        let mut plan = Self { batch: Batch::new(SUBSYSTEM), deviations, titles, whole };
        for family in Family::BOTH {
            let (found, desired) = (found[family].as_ref(), desired[family].as_ref());
            let differs = Table::deviations(found, desired, family);
            if differs.is_empty() {
                continue;
            }
            plan.deviations.extend(differs);
            plan.titles.push(title(family, name(family)));
            if found.is_some() {
                plan.whole.push(plan.batch.len());
                remove(&mut plan.batch, family, name(family));
            }
            if let Some(desired) = desired {
                // The table itself comes first.
                plan.whole.push(plan.batch.len());
                desired.make(&mut plan.batch, family);
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
                    && matches!(error.errno, ENOENT | EEXIST | EBUSY) =>
            {
                Ok(None)
            }
            Err(Refused { error, .. }) => Err(Error::kernel(self.titles.join(" and "), error)),
        }
    }
}

fn read_tables(socket: &mut NetfilterSocket) -> Result<Dual<Table>, Error> {
    read(socket, "flannel", Table::read)
}

/// Reads the tables of both families with `one`, as they were at one moment.
fn read<T>(
    socket: &mut NetfilterSocket,
    what: &str,
    one: impl Fn(&mut NetfilterSocket, Family) -> Result<Option<T>, KernelError>,
) -> Result<Dual<T>, Error> {
    let about = |what: String| move |error| Error::kernel(what, error);
    for _ in 0..TRIES {
        let before = generation(socket).map_err(about("nftables".into()))?;
        let mut tables = Dual::default();
        for family in Family::BOTH {
            let title = title(family, what);
            tables[family] = one(socket, family).map_err(about(title))?;
        }
        if generation(socket).map_err(about("nftables".into()))? == before {
            return Ok(tables);
        }
    }
    Err(unsteady())
}

/// The chains of flannel that `iptables-nft` has in nf_tables. Only `iptables-nft` may change them.
pub(crate) fn chains_of_iptables(family: Family) -> Result<Vec<String>, Error> {
    let about = |error| Error::kernel("nftables", error);
    let Some(mut socket) = open_if_any()? else { return Ok(Vec::new()) };
    let mut found = Vec::new();
    for (table, chain) in script::chains() {
        if table::is_there(&mut socket, family, table, chain).map_err(about)? {
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
            let tables =
                |rule_options| Dual::from_fn(|family| Table::desired(&rules(rule_options), family));
            let before = RuleOptions::default();
            let after = RuleOptions { masquerade: true, fully_random: false, forward: true };
            let mut socket = NetfilterSocket::open().unwrap();
            for family in Family::BOTH {
                reconcile(&mut socket, &rules(before), true).unwrap();
                let plan = Plan::new(&read_tables(&mut socket).unwrap(), &tables(after));
                let mut batch = Batch::new(SUBSYSTEM);
                remove(&mut batch, family, name(family));
                socket.commit(batch).unwrap();
                assert_eq!(plan.carry_out(&mut socket).unwrap(), None, "{family}");
                reconcile(&mut socket, &rules(after), true).unwrap();
                assert_eq!(read_tables(&mut socket).unwrap(), tables(after));
            }
        });
    }
}
