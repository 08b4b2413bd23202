//! The gate of tunnels: one table per family, with the set of peers and a chain that drops packets
//! of the tunnels' protocols from other hosts.
//!
//! Peers come and go, so the set is changed element by element. If anything else in the table
//! differs, the table is replaced as a whole.

use std::collections::BTreeSet;
use std::net::IpAddr;

use flannel_core::address::Family;
use flannel_core::kernel::KernelError;
use flannel_netlink::netfilter::{Attributes, Batch, Make, Messages, NetfilterSocket, Refused};

use super::expr::{drop_others, find, number, number_in, octets};
use super::table::{
    ACCEPT, Filled, NEWTABLE, SUBSYSTEM, TABLE, TABLE_FLAGS, TABLE_USERDATA, comment, head, kind,
    present, protocol, remove, rules, title,
};
use super::{EBUSY, EEXIST, ENOENT, TRIES};
use crate::error::Error;
use crate::rules::{Gate, Rules};
use crate::status::{Deviation, Fault};

/// The name of the tables.
pub(super) const NAME: &str = "flannel-tunnel";
const CHAIN: &str = "input";
const SET: &str = "peers";

/// `NFT_MSG_…`.
const NEWSET: u8 = 9;
const GETSET: u8 = 10;
const NEWSETELEM: u8 = 12;
const GETSETELEM: u8 = 13;
const DELSETELEM: u8 = 14;
/// `NFTA_SET_…` and `NFTA_SET_ELEM_LIST_…`.
const SET_NAME: u16 = 2;
const SET_FLAGS: u16 = 3;
const SET_KEY_TYPE: u16 = 4;
const SET_KEY_LEN: u16 = 5;
const SET_ID: u16 = 10;
const ELEMENTS: u16 = 3;
/// `NFTA_LIST_ELEM`, `NFTA_SET_ELEM_KEY`, `NFTA_DATA_VALUE`.
const ELEMENT: u16 = 1;
const KEY: u16 = 1;
const VALUE: u16 = 1;
/// `NF_INET_LOCAL_IN`.
const INPUT: u32 = 1;
/// The number of elements in a message. An element with an IPv6 address has 28 bytes. The kernel
/// sends a refused message back, into a buffer of 32 KiB.
const MOST: usize = 1000;
/// The number of elements in a transaction. The send buffer of a socket has 200 KiB.
const MOST_IN_BATCH: usize = 4 * MOST;

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
        Self { flags: 0, uses: 2, set: Some((0, key_len(family))), chain: Some(chain) }
    }

    fn make_set(&self, batch: &mut Batch, family: Family) {
        batch.add(NEWTABLE, protocol(family), Make::Create, |request| {
            number(request.text(TABLE, NAME), TABLE_FLAGS, self.flags)
                .attr(TABLE_USERDATA, &comment("tunnel packets from peers only"));
        });
        // `ipv4_addr` or `ipv6_addr` of nft.
        let key_type = if family == Family::V4 { 7 } else { 8 };
        batch.add(NEWSET, protocol(family), Make::Create, |request| {
            number(request.text(TABLE, NAME).text(SET_NAME, SET), SET_FLAGS, 0);
            number(number(request, SET_KEY_TYPE, key_type), SET_KEY_LEN, key_len(family));
            number(request, SET_ID, 1);
        });
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
    let mut chain = Filled::read(socket, family, NAME, CHAIN)?;
    for (of, rule) in rules(socket, protocol(family), NAME)? {
        // A foreign chain makes `uses` differ.
        if let Some(chain) = chain.as_mut().filter(|_| of == CHAIN) {
            chain.rules.push(rule);
        }
    }
    let named = |request: &mut Messages| _ = request.text(TABLE, NAME).text(SET_NAME, SET);
    let set = present(socket.ask(kind(GETSET, family), named, |message| {
        let attributes = message.attributes.0;
        let flags = number_in(attributes, SET_FLAGS).unwrap_or_default();
        Some((flags, number_in(attributes, SET_KEY_LEN)?))
    }))?;
    let peers = match set {
        None => Vec::new(),
        Some(_) => socket.dump(kind(GETSETELEM, family), named, |message| {
            let list = find(message.attributes.0, ELEMENTS).unwrap_or_default();
            Some(Attributes(list).filter_map(|(_, element)| address(element)).collect::<Vec<_>>())
        })?,
    };
    let frame = Frame { flags, uses, set, chain };
    Ok(Some(Found { frame, peers: peers.into_iter().flatten().collect() }))
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
            let mut changes = Changes::new(family);
            let (mut new, mut old) = (Vec::new(), Vec::new());
            for (peer, _, now) in desired.peers.changes_since(&placed.peers) {
                if Family::of(*peer) == family {
                    if now.is_some() { &mut new } else { &mut old }.push(*peer);
                }
            }
            changes.put(&new);
            changes.delete(&old);
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
    let mut changes = Changes::new(family);
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
    let fault = match found {
        Some(found) if found.frame == frame => {
            changes.put(desired.difference(&found.peers));
            changes.delete(found.peers.difference(&desired));
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
    changes.put(&desired);
    // The chain comes last: no packet meets an incomplete set.
    frame.make_chain(changes.batch(0), family);
    result(changes, title, fault)
}

/// Changes in as many transactions as their elements need.
struct Changes {
    batches: Vec<Batch>,
    family: Family,
    /// The number of elements in the last batch.
    elements: usize,
}

impl Changes {
    const fn new(family: Family) -> Self {
        Self { batches: Vec::new(), family, elements: 0 }
    }

    /// The batch for so many more elements.
    fn batch(&mut self, more: usize) -> &mut Batch {
        if self.batches.is_empty() || self.elements + more > MOST_IN_BATCH {
            self.batches.push(Batch::new(SUBSYSTEM));
            self.elements = 0;
        }
        self.elements += more;
        self.batches.last_mut().expect("there is one")
    }

    fn put<'a>(&mut self, peers: impl IntoIterator<Item = &'a IpAddr>) {
        self.elements(NEWSETELEM, Make::Create, peers);
    }

    fn delete<'a>(&mut self, peers: impl IntoIterator<Item = &'a IpAddr>) {
        self.elements(DELSETELEM, Make::Nothing, peers);
    }

    fn elements<'a>(
        &mut self,
        number: u8,
        make: Make,
        peers: impl IntoIterator<Item = &'a IpAddr>,
    ) {
        let (family, peers) = (self.family, Vec::from_iter(peers));
        for peers in peers.chunks(MOST) {
            self.batch(peers.len()).add(number, protocol(family), make, |request| {
                request.text(TABLE, NAME).text(SET_NAME, SET);
                request.nest(ELEMENTS, |list| {
                    for peer in peers {
                        list.nest(ELEMENT, |element| {
                            element.nest(KEY, |key| _ = key.attr(VALUE, &octets(**peer)));
                        });
                    }
                });
            });
        }
    }
}

fn key_len(family: Family) -> u32 {
    u32::from(family.bits() / 8)
}

fn address(element: &[u8]) -> Option<IpAddr> {
    let value = find(find(element, KEY)?, VALUE)?;
    let v4 = || Some(IpAddr::from(<[u8; 4]>::try_from(value).ok()?));
    v4().or_else(|| Some(IpAddr::from(<[u8; 16]>::try_from(value).ok()?)))
}
