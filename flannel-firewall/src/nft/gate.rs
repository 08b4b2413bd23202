//! The gate of tunnels: one table per family, with the set of peers and a chain that drops packets
//! of the tunnels' protocols from other hosts.
//!
//! Peers come and go, so the set is changed element by element. If anything else in the table
//! differs, the table is replaced as a whole.

use std::collections::BTreeSet;
use std::net::IpAddr;

use flannel_core::address::Family;
use flannel_core::kernel::KernelError;
use flannel_netlink::netfilter::{Batch, Make, NetfilterSocket, Refused};

use super::expr::{drop_others, number, octets};
use super::set::{Changes, Set};
use super::table::{
    ACCEPT, Filled, NEWTABLE, TABLE, TABLE_FLAGS, TABLE_USERDATA, comment, head, protocol, remove,
    title,
};
use super::{EBUSY, EEXIST, ENOENT, TRIES};
use crate::error::Error;
use crate::rules::{Gate, Rules};
use crate::status::{Deviation, Fault};

/// The name of the tables.
pub(super) const NAME: &str = "flannel-tunnel";
const CHAIN: &str = "input";
const SET: &str = "peers";

/// `NF_INET_LOCAL_IN`.
const INPUT: u32 = 1;

/// The table without the elements of the set.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Frame {
    flags: u32,
    uses: u32,
    /// The flags and the length of a key of the set.
    set: Option<(u32, u32)>,
    chain: Option<Filled>,
}

/// The table of a family as it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Found {
    frame: Frame,
    peers: BTreeSet<IpAddr>,
}

impl Frame {
    fn desired(family: Family, gate: &Gate) -> Self {
        let rule = |protocol: &u8| drop_others(family, *protocol, gate.local[family], SET);
        let chain = Filled {
            kind: "filter".to_owned(),
            hook: INPUT,
            priority: 0,
            policy: ACCEPT,
            rules: gate.protocols.iter().map(rule).collect(),
        };
        Self { flags: 0, uses: 2, set: Some((0, set(family).len())), chain: Some(chain) }
    }

    fn make_set(&self, batch: &mut Batch, family: Family) {
        batch.add(NEWTABLE, protocol(family), Make::Create, |request| {
            number(request.text(TABLE, NAME), TABLE_FLAGS, self.flags)
                .attr(TABLE_USERDATA, &comment("tunnel packets from peers only"));
        });
        set(family).make(batch, 1);
    }

    fn make_chain(&self, batch: &mut Batch, family: Family) {
        if let Some(chain) = &self.chain {
            chain.make(
                batch,
                family,
                [NAME, CHAIN],
                "chain to drop tunnel packets from other hosts",
            );
        }
    }
}

/// The table as it is; `None` if it does not exist. It is read in several steps. The caller
/// compares the generation before and after.
pub(super) fn read(
    socket: &mut NetfilterSocket,
    family: Family,
) -> Result<Option<Found>, KernelError> {
    let Some((flags, uses)) = head(socket, family, NAME)? else { return Ok(None) };
    let chain = Filled::read_with_rules(socket, family, NAME, &[CHAIN])?.pop().flatten();
    let peers = set(family);
    let set = peers.head(socket)?;
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
        let (found, mut deviations) = (super::read(socket, NAME, read)?, Vec::new());
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
                        return Err(Error::kernel(title(family, NAME), error));
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
            let mut changes = Changes::default();
            let (mut new, mut old) = (Vec::new(), Vec::new());
            for (peer, _, now) in desired.peers.changes_since(&placed.peers) {
                if Family::of(*peer) == family {
                    if now.is_some() { &mut new } else { &mut old }.push(octets(*peer));
                }
            }
            changes.put(&set(family), &new);
            changes.delete(&set(family), &old);
            changes.batches.into_iter().all(|batch| socket.commit(batch).is_ok())
        }
        (placed, desired) => placed == desired,
    })
}

/// The transactions that turn the table that was found into the desired one, and the differences.
pub(super) fn plan(
    family: Family,
    found: Option<&Found>,
    gate: Option<&Gate>,
) -> (Vec<Batch>, Vec<Deviation>) {
    let title = title(family, NAME);
    let result = |changes: Changes, object: String, fault| {
        (changes.batches, vec![Deviation { object, fault }])
    };
    let mut changes = Changes::default();
    let Some(gate) = gate else {
        if found.is_none() {
            return Default::default();
        }
        remove(changes.batch(0), family, NAME);
        return result(changes, title, Fault::Unwanted);
    };
    let kept = found.filter(|_| !gate.complete).map(|found| &found.peers);
    let of_family = |peer: &&IpAddr| Family::of(**peer) == family;
    let desired: BTreeSet<IpAddr> =
        gate.peers.keys().filter(of_family).chain(kept.into_iter().flatten()).copied().collect();
    let frame = Frame::desired(family, gate);
    let set = set(family);
    let fault = match found {
        Some(found) if found.frame == frame => {
            changes.put(&set, &elements(desired.difference(&found.peers)));
            changes.delete(&set, &elements(found.peers.difference(&desired)));
            let equal = changes.batches.is_empty();
            return if equal {
                Default::default()
            } else {
                result(changes, format!("{title}, set {SET}"), Fault::Elements)
            };
        }
        // Packets of peers that are not known yet pass.
        None if !gate.complete => return Default::default(),
        None => Fault::Missing,
        Some(_) => {
            remove(changes.batch(0), family, NAME);
            Fault::Different
        }
    };
    frame.make_set(changes.batch(0), family);
    changes.put(&set, &elements(&desired));
    // The chain comes last: no packet meets an incomplete set.
    frame.make_chain(changes.batch(0), family);
    result(changes, title, fault)
}

/// The set of peers.
fn set(family: Family) -> Set<'static> {
    Set { family, table: NAME, name: SET, addresses: 1 }
}

fn elements<'a>(peers: impl IntoIterator<Item = &'a IpAddr>) -> Vec<Vec<u8>> {
    peers.into_iter().map(|peer| octets(*peer)).collect()
}

fn address(element: &[u8]) -> Option<IpAddr> {
    let v4 = || Some(IpAddr::from(<[u8; 4]>::try_from(element).ok()?));
    v4().or_else(|| Some(IpAddr::from(<[u8; 16]>::try_from(element).ok()?)))
}
