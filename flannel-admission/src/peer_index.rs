//! The index of peers: by lease, by subnets around and inside others, and by the objects of plans.
//!
//! The lease and the objects of a peer are stored once, in its slot. The indexes have only the
//! numbers of slots. So a peer costs some hundred bytes, not a thousand.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::hash::BuildHasher;
use std::net::IpAddr;
use std::sync::Arc;

use foldhash::fast::RandomState;
use hashbrown::HashTable;

use flannel_core::object::{Key, Object};
use flannel_core::{Lease, Subnet, Subnets};

/// The number of a peer's slot. After the peer was removed, another peer may get the slot.
pub type Id = u32;

/// A peer: its lease, and the objects that plans define for it.
#[derive(Debug)]
pub struct Peer {
    /// The newest lease of the peer.
    pub lease: Arc<Lease>,
    /// The objects that plans define, one for each key; first those of the chosen offer. Empty if
    /// no plan accepted an offer.
    pub(crate) objects: Box<[Object]>,
    /// Most peers have no extras.
    pub(crate) extras: Option<Box<Extras>>,
    /// The number of objects of the chosen offer.
    pub(crate) chosen: u16,
    /// Whether the peer is accepted, so that the kernel should have its chosen objects.
    pub accepted: bool,
}

#[derive(Debug, PartialEq, Eq, Default)]
pub(crate) struct Extras {
    /// The addresses that the plan looked up.
    pub(crate) asked: Box<[IpAddr]>,
    /// Why the plan rejected the peer.
    pub(crate) rejected: Option<Box<str>>,
}

impl Peer {
    /// The objects of the chosen offer, which the kernel gets.
    pub fn chosen(&self) -> &[Object] {
        &self.objects[..usize::from(self.chosen).min(self.objects.len())]
    }

    /// The addresses that its plan looked up.
    pub(crate) fn asked(&self) -> &[IpAddr] {
        self.extras.as_ref().map_or(&[], |extras| &extras.asked)
    }

    /// Why the plan rejected the peer.
    pub(crate) fn rejected(&self) -> Option<&str> {
        self.extras.as_ref()?.rejected.as_deref()
    }
}

#[derive(Debug, Default)]
pub(crate) struct PeerIndex {
    slots: Vec<Option<Peer>>,
    free: Vec<Id>,
    hasher: RandomState,
    /// Every peer, by its subnets.
    ids: HashTable<Id>,
    /// Every object of every peer, by its key.
    claims: HashTable<Claim>,
    /// Every subnet of every peer. A subnet is sorted directly before the subnets inside it.
    subnets: BTreeSet<(Subnet, Id)>,
    /// The number of subnets of each length: a search for covering subnets tries only these
    /// lengths.
    lengths: BTreeMap<u8, usize>,
}

/// A peer that claims an object.
pub(crate) struct Claimant<'a> {
    pub(crate) id: Id,
    pub(crate) peer: &'a Peer,
    pub(crate) object: &'a Object,
    /// The object is one of the chosen offer.
    pub(crate) is_chosen: bool,
}

/// The entry of a claim in the index.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Claim {
    /// The hash of the object's key, so that a growing table and a search read no other slots.
    hash: u32,
    /// The peer. Its few objects are searched for the key.
    id: Id,
}

impl Claim {
    /// A table uses both ends of a hash: one as the place, the other to skip other entries.
    fn spread(hash: u32) -> u64 {
        u64::from(hash) << 32 | u64::from(hash)
    }
}

fn hash_of(hasher: &RandomState, key: &Key) -> u32 {
    hasher.hash_one(key) as u32
}

impl PeerIndex {
    /// The number of peers.
    pub(crate) fn len(&self) -> usize {
        self.ids.len()
    }

    pub(crate) fn peer(&self, id: Id) -> Option<&Peer> {
        self.slots.get(id as usize)?.as_ref()
    }

    pub(crate) fn peer_mut(&mut self, id: Id) -> Option<&mut Peer> {
        self.slots.get_mut(id as usize)?.as_mut()
    }

    pub(crate) fn peers(&self) -> impl Iterator<Item = &Peer> {
        self.slots.iter().flatten()
    }

    pub(crate) fn id(&self, subnets: &Subnets) -> Option<Id> {
        let is_it = |id: &Id| self.peer(*id).is_some_and(|peer| peer.lease.subnets == *subnets);
        self.ids.find(self.hasher.hash_one(subnets), is_it).copied()
    }

    /// All peers that claim an object, with their definitions.
    pub(crate) fn claimants(&self, key: &Key) -> impl Iterator<Item = Claimant<'_>> {
        self.claimants_with(hash_of(&self.hasher, key), *key)
    }

    fn claimants_with(&self, hash: u32, key: Key) -> impl Iterator<Item = Claimant<'_>> {
        let alike =
            self.claims.iter_hash(Claim::spread(hash)).filter(move |claim| claim.hash == hash);
        alike.filter_map(move |claim| {
            let peer = self.peer(claim.id)?;
            let n = peer.objects.iter().position(|object| object.key() == key)?;
            let is_chosen = n < usize::from(peer.chosen);
            Some(Claimant { id: claim.id, peer, object: &peer.objects[n], is_chosen })
        })
    }

    /// Reserves room for `peers` more peers with `objects` objects each.
    pub(crate) fn reserve(&mut self, peers: usize, objects: usize) {
        let Self { slots, hasher, ids, .. } = self;
        slots.reserve(peers.saturating_sub(self.free.len()));
        ids.reserve(peers, |id| {
            let subnets = slots[*id as usize].as_ref().map(|peer| peer.lease.subnets);
            subnets.map_or(0, |subnets| hasher.hash_one(subnets))
        });
        self.claims.reserve(peers * objects, |claim| Claim::spread(claim.hash));
    }

    /// A slot for the next peer to be inserted.
    pub(crate) fn next_id(&mut self) -> Id {
        self.free.pop().unwrap_or_else(|| {
            self.slots.push(None);
            (self.slots.len() - 1) as Id
        })
    }

    /// Puts a peer into a slot from [`PeerIndex::next_id`]. Returns whether another peer claims one
    /// of its objects.
    pub(crate) fn insert(&mut self, id: Id, peer: Peer) -> bool {
        let subnets = peer.lease.subnets;
        let mut shared = false;
        for object in &peer.objects {
            let key = object.key();
            let claim = Claim { hash: hash_of(&self.hasher, &key), id };
            shared = shared || self.claimants_with(claim.hash, key).next().is_some();
            self.claims
                .insert_unique(Claim::spread(claim.hash), claim, |claim| Claim::spread(claim.hash));
        }
        self.slots[id as usize] = Some(peer);
        let Self { slots, hasher, ids, .. } = self;
        let subnets_of = |id: &Id| slots[*id as usize].as_ref().map(|peer| peer.lease.subnets);
        ids.insert_unique(hasher.hash_one(subnets), id, |id| {
            subnets_of(id).map_or(0, |subnets| hasher.hash_one(subnets))
        });
        for subnet in subnets.iter() {
            self.subnets.insert((subnet, id));
            *self.lengths.entry(subnet.len()).or_default() += 1;
        }
        shared
    }

    /// Removes a peer. Its slot stays reserved until [`PeerIndex::vacate`].
    pub(crate) fn remove(&mut self, id: Id) -> Option<Peer> {
        let peer = self.slots[id as usize].take()?;
        for object in peer.objects.iter() {
            let claim = Claim { hash: hash_of(&self.hasher, &object.key()), id };
            if let Ok(entry) =
                self.claims.find_entry(Claim::spread(claim.hash), |other| *other == claim)
            {
                entry.remove();
            }
        }
        if let Ok(entry) =
            self.ids.find_entry(self.hasher.hash_one(peer.lease.subnets), |other| *other == id)
        {
            entry.remove();
        }
        for subnet in peer.lease.subnets.iter() {
            self.subnets.remove(&(subnet, id));
            self.forget_length(subnet.len());
        }
        Some(peer)
    }

    /// Counts one subnet less of this length.
    fn forget_length(&mut self, len: u8) {
        if let Entry::Occupied(mut count) = self.lengths.entry(len) {
            *count.get_mut() -= 1;
            if *count.get() == 0 {
                count.remove();
            }
        }
    }

    /// Frees these slots for new peers.
    pub(crate) fn vacate(&mut self, mut ids: Vec<Id>) {
        self.free.append(&mut ids);
    }

    /// The peers that clash with this one, with the object in dispute (`None`: their subnets
    /// overlap).
    pub(crate) fn neighbours(&self, id: Id) -> Vec<(Id, Option<Key>)> {
        let Some(peer) = self.peer(id) else { return Vec::new() };
        let mut found = self.overlapping(id);
        for object in peer.objects.iter() {
            let key = object.key();
            let others =
                self.claimants(&key).filter(|claim| claim.id != id && claim.object != object);
            found.extend(others.map(|claim| (claim.id, Some(key))));
        }
        found
    }

    /// The peers whose subnets overlap this one's.
    pub(crate) fn overlapping(&self, id: Id) -> Vec<(Id, Option<Key>)> {
        let Some(peer) = self.peer(id) else { return Vec::new() };
        let mut found = Vec::new();
        for subnet in peer.lease.subnets.iter() {
            let inside =
                self.subnets.range((subnet, 0)..).take_while(|(other, _)| subnet.covers(other));
            found.extend(inside.filter(|(_, other)| *other != id).map(|(_, other)| (*other, None)));
            for len in self.lengths.range(..subnet.len()).map(|(len, _)| *len) {
                let Some(around) = subnet.supernet(len) else { continue };
                let same = self.subnets.range((around, 0)..=(around, Id::MAX));
                found.extend(same.map(|(_, other)| (*other, None)));
            }
        }
        found
    }

    /// The peers whose subnets contain an address, the longest prefix first.
    pub(crate) fn around(&self, address: IpAddr) -> impl Iterator<Item = &Peer> {
        let host = Subnet::host(address);
        let around =
            self.lengths.range(..=host.len()).rev().filter_map(move |(len, _)| host.supernet(*len));
        let ids = around.flat_map(|subnet| self.subnets.range((subnet, 0)..=(subnet, Id::MAX)));
        ids.filter_map(|(_, id)| self.peer(*id))
    }
}
