//! The gate of tunnels: one table per family, with the set of peers and a chain that drops packets
//! of the tunnels' protocols from other hosts.
//!
//! Peers come and go, so the set is changed element by element. If anything else in the table
//! differs, the table is replaced as a whole.

use std::collections::BTreeSet;
use std::net::IpAddr;

use flannel_core::address::{Dual, Family};
use flannel_core::kernel::KernelError;
use flannel_netlink::netfilter::{Batch, NetfilterSocket, Refused};
use flannel_nft::{
    Base, Batches, Chain, Expr, Set, SetHead, Table, TableHead, address_of, hook, meta, octets,
    verdict,
};

use super::{EBUSY, EEXIST, ENOENT, TRIES, at_one_moment};
use crate::error::Error;
use crate::rules::{Gate, Rules};
use crate::status::{Deviation, Fault};

/// The name of the tables.
const NAME: &str = "flannel-tunnel";
const CHAIN: &str = "input";
const SET: &str = "peers";

/// The table without the elements of the set.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Frame {
    flags: u32,
    uses: u32,
    /// The flags of the set, and the length of its elements.
    set: Option<(u32, u32)>,
    chain: Option<Chain>,
}

/// The table of a family as it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Found {
    frame: Frame,
    peers: BTreeSet<IpAddr>,
}

impl Frame {
    fn desired(family: Family, gate: &Gate) -> Self {
        let rule = |protocol: &u8| drop_others(family, *protocol, gate.local[family]);
        let (kind, policy) = ("filter".to_owned(), verdict::ACCEPT);
        let chain = Chain {
            base: Some(Base { kind, hook: hook::INPUT, priority: 0, policy }),
            rules: gate.protocols.iter().map(rule).collect(),
        };
        Self { flags: 0, uses: 2, set: Some((0, set(family).element_len())), chain: Some(chain) }
    }

    fn make_set(batch: &mut Batch, family: Family) {
        table(family).make(batch, "tunnel packets from peers only");
        set(family).make(batch, 1);
    }

    fn make_chain(&self, batch: &mut Batch, family: Family) {
        if let Some(chain) = &self.chain {
            let text = "chain to drop tunnel packets from other hosts";
            chain.make(batch, &table(family), CHAIN, text);
        }
    }
}

/// The table as it is; `None` if it does not exist. It is read in several steps. See
/// [`flannel_nft::at_one_moment`].
pub(super) fn read(
    socket: &mut NetfilterSocket,
    family: Family,
) -> Result<Option<Found>, KernelError> {
    let table = table(family);
    let Some(TableHead { flags, uses, .. }) = table.head(socket)? else { return Ok(None) };
    let chain = Chain::read(socket, &table, &[CHAIN])?.pop().flatten();
    let peers = set(family);
    let head = |SetHead { flags, element_len, .. }| (flags, element_len);
    let set = peers.head(socket)?.map(head);
    let peers = if set.is_some() { peers.elements(socket)? } else { Vec::new() };
    let frame = Frame { flags, uses, set, chain };
    Ok(Some(Found { frame, peers: peers.iter().filter_map(|peer| address(peer)).collect() }))
}

/// Makes the gates equal to those of `rules`. Returns the differences.
pub(super) fn reconcile(
    socket: &mut NetfilterSocket,
    rules: &Rules,
    write: bool,
) -> Result<Vec<Deviation>, Error> {
    'again: for _ in 0..TRIES {
        let (found, mut deviations) = (read_both(socket)?, Vec::new());
        for family in Family::BOTH {
            let (batches, differences) = plan(family, found[family].as_ref(), rules.gate(family));
            deviations.extend(differences);
            for batch in batches.into_iter().filter(|_| write) {
                match socket.commit(batch) {
                    Ok(()) => {}
                    // Another program has changed the table since it was read. Without a table,
                    // the kernel lacks a part.
                    Err(Refused { error, .. })
                        if matches!(error.errno, EEXIST | EBUSY)
                            || (error.errno == ENOENT && found[family].is_some()) =>
                    {
                        continue 'again;
                    }
                    Err(Refused { error, .. }) => {
                        return Err(Error::kernel(table(family).to_string(), error));
                    }
                }
            }
        }
        return Ok(deviations);
    }
    Err(super::unsteady())
}

/// Turns the gates of `placed`, which are in place, into those of `desired`, which differ in peers
/// only. Returns false if the tables must be read.
pub(super) fn update(socket: &mut NetfilterSocket, placed: &Rules, desired: &Rules) -> bool {
    Family::BOTH.into_iter().all(|family| match (placed.gate(family), desired.gate(family)) {
        (Some(placed), Some(desired)) if placed.complete && desired.complete => {
            let mut batches = Batches::default();
            let (mut new, mut old) = (Vec::new(), Vec::new());
            for (peer, _, now) in desired.peers.changes_since(&placed.peers) {
                if Family::of(*peer) == family {
                    if now.is_some() { &mut new } else { &mut old }.push(octets(*peer));
                }
            }
            batches.put(&set(family), &new);
            batches.delete(&set(family), &old);
            batches.into_iter().all(|batch| socket.commit(batch).is_ok())
        }
        (placed, desired) => placed == desired,
    })
}

/// The transactions that turn the table that was found into the desired one, and the differences.
pub(super) fn plan(
    family: Family,
    found: Option<&Found>,
    gate: Option<&Gate>,
) -> (Batches, Vec<Deviation>) {
    let table = table(family);
    let result =
        |batches: Batches, object: String, fault| (batches, vec![Deviation { object, fault }]);
    let mut batches = Batches::default();
    let Some(gate) = gate else {
        if found.is_none() {
            return Default::default();
        }
        table.remove(batches.last());
        return result(batches, table.to_string(), Fault::Unwanted);
    };
    let kept = found.filter(|_| !gate.complete).map(|found| &found.peers);
    let of_family = |peer: &&IpAddr| Family::of(**peer) == family;
    let desired: BTreeSet<IpAddr> =
        gate.peers.keys().filter(of_family).chain(kept.into_iter().flatten()).copied().collect();
    let frame = Frame::desired(family, gate);
    let set = set(family);
    let fault = match found {
        Some(found) if found.frame == frame => {
            batches.put(&set, &elements(desired.difference(&found.peers)));
            batches.delete(&set, &elements(found.peers.difference(&desired)));
            let equal = batches.is_empty();
            return if equal {
                Default::default()
            } else {
                result(batches, format!("{table}, set {SET}"), Fault::Elements)
            };
        }
        // Packets of peers that are not known yet pass.
        None if !gate.complete => return Default::default(),
        None => Fault::Missing,
        Some(_) => {
            table.remove(batches.last());
            Fault::Different
        }
    };
    Frame::make_set(batches.last(), family);
    batches.put(&set, &elements(&desired));
    // The chain comes last: no packet meets an incomplete set.
    frame.make_chain(batches.last(), family);
    result(batches, table.to_string(), fault)
}

/// The tables of both families, as they are at one moment.
fn read_both(socket: &mut NetfilterSocket) -> Result<Dual<Found>, Error> {
    at_one_moment(socket, |socket| {
        let mut tables = Dual::default();
        for family in Family::BOTH {
            let found = read(socket, family);
            tables[family] =
                found.map_err(|error| Error::kernel(table(family).to_string(), error))?;
        }
        Ok(tables)
    })
}

/// Drops packets of an IP protocol to an address (`None`: any) whose source is no peer.
fn drop_others(family: Family, protocol: u8, local: Option<IpAddr>) -> Vec<Expr> {
    let is = |value| Expr::Compare { equal: true, value };
    let mut rule = vec![Expr::Meta(meta::L4PROTO), is(vec![protocol])];
    if let Some(local) = local {
        rule.extend([address_of(family, false), is(octets(local))]);
    }
    let peers = Expr::Lookup { set: SET.to_owned(), is_in: false };
    rule.extend([address_of(family, true), peers]);
    rule.extend([Expr::Counter, Expr::Verdict(verdict::DROP)]);
    rule
}

pub(super) fn table(family: Family) -> Table<'static> {
    Table { family: family.into(), name: NAME }
}

/// The set of peers.
fn set(family: Family) -> Set<'static> {
    Set { table: table(family), family, name: SET, addresses: 1 }
}

fn elements<'a>(peers: impl IntoIterator<Item = &'a IpAddr>) -> Vec<Vec<u8>> {
    peers.into_iter().map(|peer| octets(*peer)).collect()
}

fn address(element: &[u8]) -> Option<IpAddr> {
    let v4 = || Some(IpAddr::from(<[u8; 4]>::try_from(element).ok()?));
    v4().or_else(|| Some(IpAddr::from(<[u8; 16]>::try_from(element).ok()?)))
}
