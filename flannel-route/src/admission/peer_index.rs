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
use foldhash::{HashMap, HashSet};
use hashbrown::HashTable;

use flannel_core::object::{Key, Object};
use flannel_core::status::Rejection;
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
    /// The public addresses inside the pod networks.
    pub(crate) hosts: Box<[IpAddr]>,
    /// Why the lease is rejected, whatever other peers are. No plan ran, or all plans rejected it.
    pub(crate) rejected: Option<Rejection>,
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

    /// Its public addresses inside the pod networks.
    pub(crate) fn hosts(&self) -> &[IpAddr] {
        self.extras.as_ref().map_or(&[], |extras| &extras.hosts)
    }

    /// Why the lease is rejected, whatever other peers are.
    pub(crate) fn rejected(&self) -> Option<&Rejection> {
        self.extras.as_ref()?.rejected.as_ref()
    }
}

#[derive(Debug, Default)]
pub(crate) struct PeerIndex {
    slots: Vec<Option<Peer>>,
    free: Vec<Id>,
    hasher: RandomState,
    /// Every peer, by its subnets.
    ids: HashTable<Id>,
    /// Every object of every peer, by its key, with the first peer that defines it.
    claims: HashTable<Claim>,
    /// The other peers that define an object.
    more: HashMap<Key, BTreeSet<Id>>,
    /// The peers whose definition of an object names its key, for objects that several peers
    /// define.
    named: HashMap<Key, BTreeSet<Id>>,
    /// Every subnet of every peer. A subnet is sorted directly before the subnets inside it.
    subnets: BTreeSet<(Subnet, Id)>,
    /// The public addresses of every peer that are inside the pod networks.
    hosts: BTreeSet<(IpAddr, Id)>,
    /// The number of subnets of each length: a search for covering subnets tries only these
    /// lengths.
    lengths: BTreeMap<u8, usize>,
    /// How often a peer was looked at.
    #[cfg(test)]
    pub(crate) reads: std::cell::Cell<u64>,
}

/// What [`PeerIndex::neighbours`] has looked up already.
#[derive(Debug, Default)]
pub(crate) struct Expanded {
    /// Subnets whose inside was searched.
    insides: HashSet<Subnet>,
    /// Subnets whose peers were found.
    subnets: HashSet<Subnet>,
    keys: HashSet<Key>,
}

/// Whether other peers claim an object of a new peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Sharing {
    /// None does.
    Alone,
    /// Some do.
    Shared,
    /// Some do, and the new peer is the first whose definition names the key. So none of the others
    /// stays accepted, even if it was there before, and even if the new peer is rejected.
    Displaces,
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
        #[cfg(test)]
        self.reads.set(self.reads.get() + 1);
        self.slots.get(id as usize)?.as_ref()
    }

    /// Accepts or rejects a peer. An accepted one is the first of those that define its objects.
    pub(crate) fn set_accepted(&mut self, id: Id, accepted: bool) {
        let Self { slots, hasher, claims, more, .. } = self;
        let Some(Some(peer)) = slots.get_mut(id as usize) else { return };
        peer.accepted = accepted;
        if !accepted || more.is_empty() {
            return;
        }
        let Some(Some(peer)) = slots.get(id as usize) else { return };
        for object in &peer.objects {
            let key = object.key();
            let Some(others) = more.get_mut(&key).filter(|others| others.contains(&id)) else {
                continue;
            };
            let hash = hash_of(hasher, &key);
            let is_of_key = |claim: &Claim| {
                let peer = slots.get(claim.id as usize).and_then(Option::as_ref);
                let mut objects = peer.into_iter().flat_map(|peer| peer.objects.iter());
                claim.hash == hash && objects.any(|object| object.key() == key)
            };
            if let Some(first) = claims.find_mut(Claim::spread(hash), is_of_key) {
                others.remove(&id);
                others.insert(std::mem::replace(&mut first.id, id));
            }
        }
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
        let claimant = move |id| {
            let peer = self.peer(id)?;
            let n = peer.objects.iter().position(|object| object.key() == key)?;
            let is_chosen = n < usize::from(peer.chosen);
            Some(Claimant { id, peer, object: &peer.objects[n], is_chosen })
        };
        let mut alike =
            self.claims.iter_hash(Claim::spread(hash)).filter(move |claim| claim.hash == hash);
        let first = alike.find_map(move |claim| claimant(claim.id));
        let more = self.more.get(&key).into_iter().flatten();
        first.into_iter().chain(more.filter_map(move |id| claimant(*id)))
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

    /// Puts a peer into a slot from [`PeerIndex::next_id`].
    pub(crate) fn insert(&mut self, id: Id, peer: Peer) -> Sharing {
        let (subnets, hosts) = (peer.lease.subnets, peer.hosts().to_vec());
        let mut sharing = Sharing::Alone;
        for object in &peer.objects {
            let key = object.key();
            let claim = Claim { hash: hash_of(&self.hasher, &key), id };
            let first = self.claimants_with(claim.hash, key).next();
            if let Some(first) = first.map(|first| first.object.is_derived().then_some(first.id)) {
                self.more.entry(key).or_default().insert(id);
                sharing = sharing.max(self.share(key, first, object.is_derived().then_some(id)));
                continue;
            }
            self.claims
                .insert_unique(Claim::spread(claim.hash), claim, |claim| Claim::spread(claim.hash));
        }
        self.slots[id as usize] = Some(peer);
        let Self { slots, hasher, ids, .. } = self;
        let subnets_of = |id: &Id| slots[*id as usize].as_ref().map(|peer| peer.lease.subnets);
        ids.insert_unique(hasher.hash_one(subnets), id, |id| {
            subnets_of(id).map_or(0, |subnets| hasher.hash_one(subnets))
        });
        self.hosts.extend(hosts.into_iter().map(|address| (address, id)));
        for subnet in subnets.iter() {
            self.subnets.insert((subnet, id));
            *self.lengths.entry(subnet.len()).or_default() += 1;
        }
        sharing
    }

    /// Notes the peers that name a shared key: the first that defined it, and a new one.
    fn share(&mut self, key: Key, first: Option<Id>, new: Option<Id>) -> Sharing {
        if first.is_none() && new.is_none() {
            return Sharing::Shared;
        }
        let named = self.named.entry(key).or_default();
        named.extend(first);
        let is_first = named.is_empty() && new.is_some();
        named.extend(new);
        if is_first { Sharing::Displaces } else { Sharing::Shared }
    }

    /// The peer whose definition of this object's key names it, if `object` is another definition.
    pub(crate) fn owner(&self, object: &Object) -> Option<&Peer> {
        if self.named.is_empty() || object.is_derived() {
            return None;
        }
        self.peer(*self.named.get(&object.key())?.first()?)
    }

    /// Removes a peer. Its slot stays reserved until [`PeerIndex::vacate`].
    pub(crate) fn remove(&mut self, id: Id) -> Option<Peer> {
        let peer = self.slots[id as usize].take()?;
        for object in peer.objects.iter() {
            let key = object.key();
            let claim = Claim { hash: hash_of(&self.hasher, &key), id };
            let mut more = self.more.remove(&key).unwrap_or_default();
            if !more.remove(&id)
                && let Ok(mut entry) =
                    self.claims.find_entry(Claim::spread(claim.hash), |other| *other == claim)
            {
                match more.pop_first() {
                    Some(next) => entry.get_mut().id = next,
                    None => drop(entry.remove()),
                }
            }
            if !more.is_empty() {
                self.more.insert(key, more);
            }
            if let Some(named) = self.named.get_mut(&key)
                && named.remove(&id)
                && named.is_empty()
            {
                self.named.remove(&key);
            }
        }
        if let Ok(entry) =
            self.ids.find_entry(self.hasher.hash_one(peer.lease.subnets), |other| *other == id)
        {
            entry.remove();
        }
        for address in peer.hosts() {
            self.hosts.remove(&(*address, id));
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

    /// The peers that clash with this one, and some that clash with these. It returns each group
    /// of peers only once for the same `expanded`, so that the cost for many peers that all clash
    /// grows with their number.
    pub(crate) fn neighbours(&self, id: Id, expanded: &mut Expanded) -> Vec<Id> {
        let Some(peer) = self.peer(id) else { return Vec::new() };
        let mut found = Vec::new();
        for subnet in peer.lease.subnets.iter().filter(|subnet| expanded.insides.insert(*subnet)) {
            found.extend(self.inside(subnet));
        }
        for around in self.all_around(peer).filter(|around| expanded.subnets.insert(*around)) {
            found.extend(self.with_subnet(around));
        }
        for object in peer.objects.iter().filter(|object| expanded.keys.insert(object.key())) {
            let key = object.key();
            if self.claimants(&key).any(|claim| claim.object != object) {
                found.extend(self.claimants(&key).map(|claim| claim.id));
            }
        }
        found
    }

    /// Whether another peer has a subnet that overlaps this one's, or one of the two has a public
    /// address inside a subnet of the other.
    pub(crate) fn overlaps(&self, id: Id) -> bool {
        let Some(peer) = self.peer(id) else { return false };
        let is_own = |subnet: &Subnet| peer.lease.subnets.iter().any(|own| own == *subnet);
        let around = self.all_around(peer).filter(|around| !is_own(around));
        let around = around.flat_map(|around| self.with_subnet(around));
        let own = peer.lease.subnets.iter().flat_map(|own| self.from((own, 0), own));
        around.chain(own).any(|other| other != id)
    }

    /// The first of those that define an object of `peer`, if it defines it otherwise. Of many
    /// peers, it is the accepted one if there is one.
    pub(crate) fn first_definers(&self, peer: &Peer) -> impl Iterator<Item = Id> {
        peer.objects.iter().filter_map(|object| {
            let first = self.claimants(&object.key()).next()?;
            (first.object != object).then_some(first.id)
        })
    }

    /// The peers with exactly this subnet.
    pub(crate) fn with_subnet(&self, subnet: Subnet) -> impl Iterator<Item = Id> {
        self.subnets.range((subnet, 0)..=(subnet, Id::MAX)).map(|(_, id)| *id)
    }

    /// The peers with a smaller subnet or a public address inside this subnet.
    pub(crate) fn inside(&self, subnet: Subnet) -> impl Iterator<Item = Id> {
        self.from((subnet, Id::MAX), subnet)
    }

    /// The peers inside `subnet`: those with a subnet from `first` on, or with a public address.
    fn from(&self, first: (Subnet, Id), subnet: Subnet) -> impl Iterator<Item = Id> {
        let subnets = self.subnets.range(first..);
        let subnets = subnets.take_while(move |(other, _)| subnet.covers(other));
        let hosts = self.hosts.range((subnet.base(), 0)..=(subnet.last(), Id::MAX));
        subnets.map(|(_, id)| *id).chain(hosts.map(|(_, id)| *id))
    }

    /// This subnet and all around it that have the length of a peer's subnet, the smallest first.
    fn around(&self, subnet: Subnet) -> impl Iterator<Item = Subnet> {
        let lengths = self.lengths.range(..=subnet.len()).rev();
        lengths.filter_map(move |(len, _)| Subnet::new(subnet.base(), *len))
    }

    /// The subnets of a peer and those around them, and around its public addresses inside the pod
    /// networks.
    pub(crate) fn all_around(&self, peer: &Peer) -> impl Iterator<Item = Subnet> {
        let hosts = peer.hosts().iter().map(|address| Subnet::host(*address));
        peer.lease.subnets.iter().chain(hosts).flat_map(move |subnet| self.around(subnet))
    }

    /// The peers whose subnets contain an address, the longest prefix first.
    pub(crate) fn holders_of(&self, address: IpAddr) -> impl Iterator<Item = &Peer> {
        let around = self.around(Subnet::host(address));
        let ids = around.flat_map(move |subnet| self.with_subnet(subnet));
        ids.filter_map(move |id| self.peer(id))
    }
}
