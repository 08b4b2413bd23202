//! The peers, and how to find them: by lease, by the subnets around and inside another, by the objects that their
//! plans define.
//!
//! The one thing to know: each peer's lease and objects are held once, in its slot. The indexes hold only numbers of
//! slots and look there for what they are numbers of: a peer costs some hundred bytes, not a thousand.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{BuildHasher, Hash, RandomState};
use std::net::IpAddr;
use std::sync::Arc;

use hashbrown::HashTable;

use crate::address::Subnet;
use crate::facts::decrement;
use crate::lease::{Lease, Subnets};
use crate::state::{Key, Object};

/// A peer's slot: its own while it is there, another one's afterwards.
pub(crate) type Id = u32;

#[derive(Debug)]
pub(crate) struct Peer {
    pub(crate) lease: Arc<Lease>,
    /// What its plan defines, one of each key; empty if the plan rejected it.
    pub(crate) objects: Box<[Object]>,
    /// The addresses that its plan asked about.
    pub(crate) asked: Box<[IpAddr]>,
    /// Why the plan rejected it.
    pub(crate) rejected: Option<Box<str>>,
    pub(crate) believed: bool,
    /// Nothing of it was put yet.
    pub(crate) fresh: bool,
}

#[derive(Debug, Default)]
pub(crate) struct Roster {
    slots: Vec<Option<Peer>>,
    free: Vec<Id>,
    hasher: RandomState,
    /// Every peer, by its subnets.
    ids: HashTable<Id>,
    /// Every object of every peer, by its key: whose it is, and which of its objects.
    claims: HashTable<(Id, u32)>,
    /// Every subnet of every peer: a subnet stands right before those inside it.
    subnets: BTreeSet<(Subnet, Id)>,
    /// How many subnets there are of each length, so that a search for covering ones tries only those.
    lengths: BTreeMap<u8, usize>,
}

fn hash(hasher: &RandomState, value: &impl Hash) -> u64 {
    hasher.hash_one(value)
}

impl Roster {
    /// How many peers there are.
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
        self.ids.find(hash(&self.hasher, subnets), is_it).copied()
    }

    /// All peers whose plans define this object, with their definitions.
    pub(crate) fn claimants(&self, key: &Key) -> impl Iterator<Item = (Id, &Peer, &Object)> {
        let key = *key;
        self.claims.iter_hash(hash(&self.hasher, &key)).filter_map(move |(id, nth)| {
            let peer = self.peer(*id)?;
            let object = peer.objects.get(*nth as usize)?;
            (object.key() == key).then_some((*id, peer, object))
        })
    }

    /// A slot for the next peer to be inserted.
    pub(crate) fn next_id(&mut self) -> Id {
        self.free.pop().unwrap_or_else(|| {
            self.slots.push(None);
            (self.slots.len() - 1) as Id
        })
    }

    /// Puts a peer into a slot that [`Roster::next_id`] gave; says whether others define one of its objects.
    pub(crate) fn insert(&mut self, id: Id, peer: Peer) -> bool {
        let subnets = peer.lease.subnets;
        self.slots[id as usize] = Some(peer);
        let Self { slots, hasher, ids, claims, .. } = self;
        let objects_of = |id: Id| slots[id as usize].as_ref().map_or(&[][..], |peer| &peer.objects);
        let hash_of = |(id, nth): &(Id, u32)| {
            objects_of(*id).get(*nth as usize).map_or(0, |object| hash(hasher, &object.key()))
        };
        let mut shared = false;
        for (nth, object) in objects_of(id).iter().enumerate() {
            let key = object.key();
            let number = hash(hasher, &key);
            let same = |(id, nth): &(Id, u32)| {
                objects_of(*id).get(*nth as usize).is_some_and(|object| object.key() == key)
            };
            shared |= claims.find(number, same).is_some();
            claims.insert_unique(number, (id, nth as u32), hash_of);
        }
        let subnets_of = |id: &Id| slots[*id as usize].as_ref().map(|peer| peer.lease.subnets);
        ids.insert_unique(hash(hasher, &subnets), id, |id| {
            subnets_of(id).map_or(0, |subnets| hash(hasher, &subnets))
        });
        for subnet in subnets.iter() {
            self.subnets.insert((subnet, id));
            *self.lengths.entry(subnet.len()).or_default() += 1;
        }
        shared
    }

    /// Takes a peer out. Its slot stays its own until [`Roster::vacate`].
    pub(crate) fn remove(&mut self, id: Id) -> Option<Peer> {
        let peer = self.slots[id as usize].take()?;
        for (nth, object) in peer.objects.iter().enumerate() {
            let claim = (id, nth as u32);
            if let Ok(entry) = self.claims.find_entry(hash(&self.hasher, &object.key()), |c| *c == claim) {
                entry.remove();
            }
        }
        if let Ok(entry) = self.ids.find_entry(hash(&self.hasher, &peer.lease.subnets), |other| *other == id)
        {
            entry.remove();
        }
        for subnet in peer.lease.subnets.iter() {
            self.subnets.remove(&(subnet, id));
            decrement(&mut self.lengths, &subnet.len());
        }
        Some(peer)
    }

    /// Others may have these slots.
    pub(crate) fn vacate(&mut self, mut ids: Vec<Id>) {
        self.free.append(&mut ids);
    }

    /// The peers that clash with this one, and over which object (`None`: their subnets overlap).
    pub(crate) fn neighbours(&self, id: Id) -> Vec<(Id, Option<Key>)> {
        let Some(peer) = self.peer(id) else { return Vec::new() };
        let mut found = self.overlapping(id);
        for object in &peer.objects {
            let key = object.key();
            let others = self.claimants(&key).filter(|(other, _, theirs)| *other != id && *theirs != object);
            found.extend(others.map(|(other, ..)| (other, Some(key))));
        }
        found
    }

    /// The peers whose subnets overlap this one's.
    pub(crate) fn overlapping(&self, id: Id) -> Vec<(Id, Option<Key>)> {
        let Some(peer) = self.peer(id) else { return Vec::new() };
        let mut found = Vec::new();
        for subnet in peer.lease.subnets.iter() {
            let inside = self.subnets.range((subnet, 0)..).take_while(|(other, _)| subnet.covers(other));
            found.extend(inside.filter(|(_, other)| *other != id).map(|(_, other)| (*other, None)));
            for len in self.lengths.range(..subnet.len()).map(|(len, _)| *len) {
                let Some(around) = subnet.supernet(len) else { continue };
                let same = self.subnets.range((around, 0)..=(around, Id::MAX));
                found.extend(same.map(|(_, other)| (*other, None)));
            }
        }
        found
    }

    /// The peers whose subnets hold an address, the longest prefix first.
    pub(crate) fn around(&self, address: IpAddr) -> impl Iterator<Item = &Peer> {
        let host = Subnet::host(address);
        let around = self.lengths.range(..=host.len()).rev().filter_map(move |(len, _)| host.supernet(*len));
        let ids = around.flat_map(|subnet| self.subnets.range((subnet, 0)..=(subnet, Id::MAX)));
        ids.filter_map(|(_, id)| self.peer(*id))
    }
}
