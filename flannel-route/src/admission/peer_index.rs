//! The index of peers by lease, by subnets around and inside others, and by the objects of plans.
//!
//! The lease and the objects of a peer are stored once, in its slot. The indexes have only the
//! numbers of slots, so that a peer costs some hundred bytes and not a thousand.

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
pub type PeerId = u32;

/// A peer: its lease, and the objects that plans define for it.
#[derive(Debug)]
pub struct PeerEntry {
    /// The newest lease of the peer.
    pub lease: Arc<Lease>,
    /// The objects that plans define, one for each key. The objects of the chosen offer come first.
    /// Empty if no plan accepted an offer.
    pub(crate) objects: Box<[Object]>,
    /// `None` for most peers.
    pub(crate) extras: Option<Box<Extras>>,
    /// The number of objects of the chosen offer.
    pub(crate) chosen: u16,
    /// Whether the peer is accepted, so that the kernel should have its chosen objects.
    pub accepted: bool,
}

/// What few peers have.
#[derive(Debug, PartialEq, Eq, Default)]
pub(crate) struct Extras {
    /// The addresses that the plan looked up.
    pub(crate) looked_up: Box<[IpAddr]>,
    /// The public addresses inside the pod networks.
    pub(crate) hosts: Box<[IpAddr]>,
    /// Why the lease is rejected, even without any other peer: a rule forbids it, or all plans
    /// rejected it.
    pub(crate) rejected: Option<Rejection>,
}

impl PeerEntry {
    /// The objects of the chosen offer, which the kernel gets.
    pub fn chosen(&self) -> &[Object] {
        &self.objects[..usize::from(self.chosen).min(self.objects.len())]
    }

    /// Whether a plan defines the object with this key for the peer.
    fn defines(&self, key: &Key) -> bool {
        self.objects.iter().any(|object| object.key() == *key)
    }

    /// The addresses that the plan of the peer looked up.
    pub(crate) fn looked_up(&self) -> &[IpAddr] {
        self.extras.as_ref().map_or(&[], |extras| &extras.looked_up)
    }

    /// The public addresses of the peer inside the pod networks.
    pub(crate) fn hosts(&self) -> &[IpAddr] {
        self.extras.as_ref().map_or(&[], |extras| &extras.hosts)
    }

    /// Why the lease is rejected, even without any other peer.
    pub(crate) fn rejected(&self) -> Option<&Rejection> {
        self.extras.as_ref()?.rejected.as_ref()
    }
}

/// All peers, accepted and rejected.
#[derive(Debug, Default)]
pub(crate) struct PeerIndex {
    slots: Vec<Option<PeerEntry>>,
    /// The slots without a peer.
    free: Vec<PeerId>,
    hasher: RandomState,
    /// Every peer, by its subnets.
    ids: HashTable<PeerId>,
    /// Every object of every peer, by its key, with the first peer that defines it.
    first_definers: HashTable<FirstDefiner>,
    /// The other peers that define an object.
    further_definers: HashMap<Key, BTreeSet<PeerId>>,
    /// For objects that several peers define: the peers whose leases prove that the object is their
    /// own.
    proven_by: HashMap<Key, BTreeSet<PeerId>>,
    /// Every subnet of every peer. A subnet is sorted directly before the subnets inside it.
    subnets: BTreeSet<(Subnet, PeerId)>,
    /// The public addresses of every peer that are inside the pod networks.
    hosts: BTreeSet<(IpAddr, PeerId)>,
    /// The number of subnets of each prefix length. A search for covering subnets tries only these
    /// lengths.
    lengths: BTreeMap<u8, usize>,
    /// How often a peer was read.
    #[cfg(test)]
    pub(crate) reads: std::cell::Cell<u64>,
}

/// What [`PeerIndex::neighbours`] has searched already.
#[derive(Debug, Default)]
pub(crate) struct Expanded {
    /// Subnets whose inside was searched.
    insides: HashSet<Subnet>,
    /// Subnets whose peers were found.
    subnets: HashSet<Subnet>,
    /// Objects whose definers were found.
    keys: HashSet<Key>,
}

/// Whether other peers define an object of a new peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Sharing {
    /// No other peer defines one.
    Alone,
    /// Other peers define one.
    Shared,
    /// Other peers define one, and the new peer is the first that proves it to be its own. The
    /// other peers are then rejected, even if they were accepted before, and even if the new peer
    /// is rejected.
    Displaces,
}

/// The definition of an object by a peer.
pub(crate) struct Definition<'a> {
    pub(crate) id: PeerId,
    pub(crate) peer: &'a PeerEntry,
    pub(crate) object: &'a Object,
    /// The object belongs to the chosen offer.
    pub(crate) is_chosen: bool,
}

/// The first peer that defines an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct FirstDefiner {
    /// The hash of the object's key. Without it, a search and a growing table would read the slots
    /// of other peers.
    hash: u32,
    /// The peer. A search compares the key with its few objects.
    id: PeerId,
}

impl FirstDefiner {
    /// The hash for the table. The table uses the low bits for the place and the high bits to skip
    /// other entries, so both ends must vary.
    fn table_hash(hash: u32) -> u64 {
        u64::from(hash) << 32 | u64::from(hash)
    }
}

fn hash_of(hasher: &RandomState, key: &Key) -> u32 {
    hasher.hash_one(key) as u32
}

/// The hash of the subnets of the peer in a slot, or 0 without a peer.
fn hash_of_slot(hasher: &RandomState, slots: &[Option<PeerEntry>], id: PeerId) -> u64 {
    slots[id as usize].as_ref().map_or(0, |peer| hasher.hash_one(peer.lease.subnets))
}

impl PeerIndex {
    /// The number of peers.
    pub(crate) fn len(&self) -> usize {
        self.ids.len()
    }

    pub(crate) fn peer(&self, id: PeerId) -> Option<&PeerEntry> {
        #[cfg(test)]
        self.reads.set(self.reads.get() + 1);
        self.slots.get(id as usize)?.as_ref()
    }

    /// Accepts or rejects a peer. An accepted peer becomes the first definer of its objects.
    pub(crate) fn set_accepted(&mut self, id: PeerId, accepted: bool) {
        let Self { slots, hasher, first_definers, further_definers, .. } = self;
        let Some(Some(peer)) = slots.get_mut(id as usize) else { return };
        peer.accepted = accepted;
        if !accepted || further_definers.is_empty() {
            return;
        }
        let Some(Some(peer)) = slots.get(id as usize) else { return };
        for object in &peer.objects {
            let key = object.key();
            let Some(further) = further_definers.get_mut(&key) else { continue };
            if !further.contains(&id) {
                continue;
            }
            let hash = hash_of(hasher, &key);
            let first = first_definers.find_mut(FirstDefiner::table_hash(hash), |first| {
                first.hash == hash
                    && matches!(&slots[first.id as usize], Some(peer) if peer.defines(&key))
            });
            if let Some(first) = first {
                further.remove(&id);
                further.insert(std::mem::replace(&mut first.id, id));
            }
        }
    }

    pub(crate) fn peers(&self) -> impl Iterator<Item = &PeerEntry> {
        self.slots.iter().flatten()
    }

    pub(crate) fn id(&self, subnets: &Subnets) -> Option<PeerId> {
        let is_it = |id: &PeerId| self.peer(*id).is_some_and(|peer| peer.lease.subnets == *subnets);
        self.ids.find(self.hasher.hash_one(subnets), is_it).copied()
    }

    /// The definitions of an object by all peers.
    pub(crate) fn definitions(&self, key: &Key) -> impl Iterator<Item = Definition<'_>> {
        self.definitions_with_hash(hash_of(&self.hasher, key), *key)
    }

    fn definitions_with_hash(&self, hash: u32, key: Key) -> impl Iterator<Item = Definition<'_>> {
        let alike = self.first_definers.iter_hash(FirstDefiner::table_hash(hash));
        let first = alike
            .filter(move |first| first.hash == hash)
            .find_map(move |first| self.definition_by(first.id, &key));
        let further = self.further_definers.get(&key).into_iter().flatten();
        first.into_iter().chain(further.filter_map(move |id| self.definition_by(*id, &key)))
    }

    /// The definition of an object by a peer.
    fn definition_by(&self, id: PeerId, key: &Key) -> Option<Definition<'_>> {
        let peer = self.peer(id)?;
        let n = peer.objects.iter().position(|object| object.key() == *key)?;
        let is_chosen = n < usize::from(peer.chosen);
        Some(Definition { id, peer, object: &peer.objects[n], is_chosen })
    }

    /// Reserves room for `peers` more peers with `objects` objects each.
    pub(crate) fn reserve(&mut self, peers: usize, objects: usize) {
        let Self { slots, hasher, ids, .. } = self;
        slots.reserve(peers.saturating_sub(self.free.len()));
        ids.reserve(peers, |id| hash_of_slot(hasher, slots, *id));
        self.first_definers.reserve(peers * objects, |first| FirstDefiner::table_hash(first.hash));
    }

    /// A slot for the next peer to be inserted.
    pub(crate) fn next_id(&mut self) -> PeerId {
        self.free.pop().unwrap_or_else(|| {
            self.slots.push(None);
            (self.slots.len() - 1) as PeerId
        })
    }

    /// Puts a peer into a slot from [`PeerIndex::next_id`]. `is_proven` says whether a lease proves
    /// that an object is its own.
    pub(crate) fn insert(
        &mut self,
        id: PeerId,
        peer: PeerEntry,
        is_proven: impl Fn(&Lease, &Object) -> bool,
    ) -> Sharing {
        let subnets = peer.lease.subnets;
        let hosts = peer.hosts().to_vec();
        let mut sharing = Sharing::Alone;
        for object in &peer.objects {
            let key = object.key();
            let hash = hash_of(&self.hasher, &key);
            let first = self.definitions_with_hash(hash, key).next();
            if let Some(first) = first {
                // If there are further definers, the first one is known already.
                let is_new = !self.further_definers.contains_key(&key);
                let before =
                    (is_new && is_proven(&first.peer.lease, first.object)).then_some(first.id);
                let now = is_proven(&peer.lease, object).then_some(id);
                self.further_definers.entry(key).or_default().insert(id);
                sharing = sharing.max(self.share(key, before, now));
                continue;
            }
            self.first_definers.insert_unique(
                FirstDefiner::table_hash(hash),
                FirstDefiner { hash, id },
                |first| FirstDefiner::table_hash(first.hash),
            );
        }
        self.slots[id as usize] = Some(peer);
        let Self { slots, hasher, ids, .. } = self;
        ids.insert_unique(hasher.hash_one(subnets), id, |id| hash_of_slot(hasher, slots, *id));
        self.hosts.extend(hosts.into_iter().map(|address| (address, id)));
        for subnet in subnets.iter() {
            self.subnets.insert((subnet, id));
            *self.lengths.entry(subnet.len()).or_default() += 1;
        }
        sharing
    }

    /// Notes the peers that prove a shared object to be their own: the first definer and a new one,
    /// or `None` if they do not.
    fn share(&mut self, key: Key, first: Option<PeerId>, new: Option<PeerId>) -> Sharing {
        if first.is_none() && new.is_none() {
            return Sharing::Shared;
        }
        let proven_by = self.proven_by.entry(key).or_default();
        proven_by.extend(first);
        let is_first = proven_by.is_empty() && new.is_some();
        proven_by.extend(new);
        if is_first { Sharing::Displaces } else { Sharing::Shared }
    }

    /// Another peer that proves the object with this key to be its own. `None` without such a peer,
    /// or if the peer `id` proves it too.
    pub(crate) fn other_owner(&self, id: PeerId, key: &Key) -> Option<&PeerEntry> {
        // Mostly no object has several definers.
        if self.proven_by.is_empty() {
            return None;
        }
        let owners = self.proven_by.get(key).filter(|owners| !owners.contains(&id))?;
        self.peer(*owners.first()?)
    }

    /// Removes a peer. Its slot stays reserved until [`PeerIndex::vacate`].
    pub(crate) fn remove(&mut self, id: PeerId) -> Option<PeerEntry> {
        let peer = self.slots[id as usize].take()?;
        for object in peer.objects.iter() {
            let key = object.key();
            self.remove_definer(&key, id);
            if let Some(proven_by) = self.proven_by.get_mut(&key)
                && proven_by.remove(&id)
                && proven_by.is_empty()
            {
                self.proven_by.remove(&key);
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

    /// Removes a peer from the definers of an object. If it was the first, another one becomes it.
    fn remove_definer(&mut self, key: &Key, id: PeerId) {
        let mut further = self.further_definers.remove(key).unwrap_or_default();
        if !further.remove(&id) {
            let removed = FirstDefiner { hash: hash_of(&self.hasher, key), id };
            let hash = FirstDefiner::table_hash(removed.hash);
            if let Ok(mut entry) = self.first_definers.find_entry(hash, |first| *first == removed) {
                match further.pop_first() {
                    Some(next) => entry.get_mut().id = next,
                    None => drop(entry.remove()),
                }
            }
        }
        if !further.is_empty() {
            self.further_definers.insert(*key, further);
        }
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
    pub(crate) fn vacate(&mut self, mut ids: Vec<PeerId>) {
        self.free.append(&mut ids);
    }

    /// The peers that clash with this one, and some peers that clash with these. It returns each
    /// group of peers only once for the same `expanded`. So the cost for many peers that all clash
    /// grows with their number, and not with its square.
    pub(crate) fn neighbours(&self, id: PeerId, expanded: &mut Expanded) -> Vec<PeerId> {
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
            // An equal definition clashes too, if only one of the two is proven.
            let is_proven = self.proven_by.contains_key(&key);
            if is_proven || self.definitions(&key).any(|definition| definition.object != object) {
                found.extend(self.definitions(&key).map(|definition| definition.id));
            }
        }
        found
    }

    /// Whether another peer has a subnet that overlaps this one's, or one of the two has a public
    /// address inside a subnet of the other.
    pub(crate) fn overlaps(&self, id: PeerId) -> bool {
        let Some(peer) = self.peer(id) else { return false };
        let subnets = peer.lease.subnets;
        let around = self
            .all_around(peer)
            .filter(|around| !subnets.iter().any(|own| own == *around))
            .flat_map(|around| self.with_subnet(around));
        let inside = subnets.iter().flat_map(|own| self.from((own, 0), own));
        around.chain(inside).any(|other| other != id)
    }

    /// For each object of `peer`, its first definer if that one defines it otherwise. If a definer
    /// is accepted, it is the first one.
    pub(crate) fn contradicting_definers(&self, peer: &PeerEntry) -> impl Iterator<Item = PeerId> {
        peer.objects.iter().filter_map(|object| {
            let first = self.definitions(&object.key()).next()?;
            (first.object != object).then_some(first.id)
        })
    }

    /// The peers with exactly this subnet.
    pub(crate) fn with_subnet(&self, subnet: Subnet) -> impl Iterator<Item = PeerId> {
        self.subnets.range((subnet, 0)..=(subnet, PeerId::MAX)).map(|(_, id)| *id)
    }

    /// The peers with a smaller subnet or a public address inside this subnet.
    pub(crate) fn inside(&self, subnet: Subnet) -> impl Iterator<Item = PeerId> {
        self.from((subnet, PeerId::MAX), subnet)
    }

    /// The peers with a subnet inside `subnet`, from `first` on, or with a public address inside
    /// it.
    fn from(&self, first: (Subnet, PeerId), subnet: Subnet) -> impl Iterator<Item = PeerId> {
        let subnets = self.subnets.range(first..);
        let subnets = subnets.take_while(move |(other, _)| subnet.covers(other));
        let hosts = self.hosts.range((subnet.base(), 0)..=(subnet.last(), PeerId::MAX));
        subnets.map(|(_, id)| *id).chain(hosts.map(|(_, id)| *id))
    }

    /// This subnet and the subnets around it, the smallest first. It has only those with the prefix
    /// length of the subnet of a peer.
    fn around(&self, subnet: Subnet) -> impl Iterator<Item = Subnet> {
        let lengths = self.lengths.range(..=subnet.len()).rev();
        lengths.filter_map(move |(len, _)| Subnet::new(subnet.base(), *len))
    }

    /// The subnets of a peer, and the subnets around them and around its public addresses inside
    /// the pod networks.
    pub(crate) fn all_around(&self, peer: &PeerEntry) -> impl Iterator<Item = Subnet> {
        let hosts = peer.hosts().iter().map(|address| Subnet::host(*address));
        peer.lease.subnets.iter().chain(hosts).flat_map(move |subnet| self.around(subnet))
    }

    /// The peers whose subnets contain an address, the longest prefix first.
    pub(crate) fn holders_of(&self, address: IpAddr) -> impl Iterator<Item = &PeerEntry> {
        let around = self.around(Subnet::host(address));
        let ids = around.flat_map(move |subnet| self.with_subnet(subnet));
        ids.filter_map(move |id| self.peer(id))
    }
}
