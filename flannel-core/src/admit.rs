//! Which peer leases to believe, and the kernel objects that the believed ones define.
//!
//! The one thing to know: every node must believe the same leases, so of two that clash (overlapping subnets,
//! or two definitions of one kernel object) the one with the smaller [`Lease::precedence`] is believed, on every
//! node alike. Only this node's own lease wins without that. Belief is recomputed for the leases that a
//! change can touch, found through indexes: one change among 50,000 leases costs one lease.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use crate::address::{Dual, Subnet};
use crate::error::holder;
use crate::lease::{Lease, Revision, Subnets};
use crate::listing::Listing;
use crate::name::LinkName;
use crate::network::Disbelief;
use crate::plan::{Answer, Env, Plan, Rejected};
use crate::state::{Key, Object, Route, Via};

/// What leases are judged by.
#[derive(Debug, Clone, Default)]
pub(crate) struct Terms {
    /// The enabled pod networks.
    pub(crate) networks: Dual<Subnet>,
    /// This node's own subnets.
    pub(crate) own: Option<Subnets>,
    /// This node's own public addresses.
    pub(crate) public: Dual<IpAddr>,
    /// Objects that no peer may define.
    pub(crate) reserved: BTreeSet<Key>,
}

/// An object whose definition changed: `None` where there is none.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Delta {
    pub(crate) key: Key,
    pub(crate) before: Option<Object>,
    pub(crate) after: Option<Object>,
}

/// A place in `Peers::slots`.
type Id = u32;

#[derive(Debug)]
struct Peer {
    lease: Arc<Lease>,
    /// What its plan defines; empty if the plan rejected it.
    objects: Box<[Object]>,
    /// The addresses that its plan asked about.
    asked: Box<[IpAddr]>,
    /// Why the plan rejected it.
    rejected: Option<Box<str>>,
    believed: bool,
}

/// All peers, and what they define.
pub(crate) struct Peers {
    terms: Terms,
    plan: Box<Plan>,
    slots: Vec<Option<Peer>>,
    free: Vec<Id>,
    ids: BTreeMap<Subnets, Id>,
    /// Every subnet of every peer: a subnet stands right before those inside it.
    subnets: BTreeSet<(Subnet, Id)>,
    /// How many subnets there are of each length, so that a search for covering ones tries only those.
    lengths: BTreeMap<u8, usize>,
    claims: BTreeMap<Key, Claim>,
    facts: BTreeMap<IpAddr, Fact>,
    /// How many facts say of a link that an address is on it.
    relied: BTreeMap<LinkName, usize>,
    publics: BTreeMap<IpAddr, u32>,
    disbelieved: Listing<Subnets, Disbelief>,
    /// What plans remarked.
    remarked: BTreeMap<Subnets, Vec<String>>,
    remarks: Listing<String>,
}

/// Who defines an object: nearly always one peer.
#[derive(Debug)]
enum Claim {
    One(Id),
    Many(Vec<Id>),
}

impl Claim {
    fn ids(&self) -> &[Id] {
        match self {
            Self::One(id) => std::slice::from_ref(id),
            Self::Many(ids) => ids,
        }
    }
}

#[derive(Debug, Default)]
struct Fact {
    /// What all who asked were told; `None` if not all were told the same.
    told: Option<Option<LinkName>>,
    asked_by: BTreeSet<Id>,
}

impl Fact {
    fn tell(&mut self, told: Option<Option<LinkName>>, relied: &mut BTreeMap<LinkName, usize>) {
        if let Some(link) = self.told.flatten() {
            decrement(relied, &link);
        }
        self.told = told;
        if let Some(link) = told.flatten() {
            *relied.entry(link).or_default() += 1;
        }
    }
}

/// The work of one update.
#[derive(Default)]
struct Update {
    /// Peers whose belief must be recomputed.
    dirty: BTreeSet<Id>,
    /// Objects that may change, with their definition before the update.
    touched: BTreeMap<Key, Option<Object>>,
    /// Slots of peers that went.
    vacated: Vec<Id>,
}

impl Peers {
    pub(crate) fn new(terms: Terms, plan: Box<Plan>) -> Self {
        let publics = terms.public.values().map(|address| (*address, 1)).collect();
        Self {
            terms,
            plan,
            slots: Vec::new(),
            free: Vec::new(),
            ids: BTreeMap::new(),
            subnets: BTreeSet::new(),
            lengths: BTreeMap::new(),
            claims: BTreeMap::new(),
            facts: BTreeMap::new(),
            relied: BTreeMap::new(),
            publics,
            disbelieved: Listing::default(),
            remarked: BTreeMap::new(),
            remarks: Listing::default(),
        }
    }

    /// The definition of an object, if a believed peer defines it.
    pub(crate) fn object(&self, key: &Key) -> Option<&Object> {
        let claim = self.claims.get(key)?;
        let believed =
            claim.ids().iter().filter_map(|id| self.slots[*id as usize].as_ref()).find(|p| p.believed)?;
        believed.objects.iter().find(|object| object.key() == *key)
    }

    /// All objects of believed peers in the order of their keys.
    pub(crate) fn objects(&self) -> impl Iterator<Item = &Object> {
        self.claims.keys().filter_map(|key| self.object(key))
    }

    /// Some plan asked about an address inside `subnet`.
    pub(crate) fn asks_under(&self, subnet: Subnet) -> bool {
        self.facts.range(subnet.base()..=subnet.last()).next().is_some()
    }

    /// Some plan was told that an address is on this link.
    pub(crate) fn relies_on(&self, link: LinkName) -> bool {
        self.relied.contains_key(&link)
    }

    pub(crate) fn believed(&self) -> usize {
        self.ids.len() - self.disbelieved.len()
    }

    pub(crate) fn disbelieved(&self) -> &Listing<Subnets, Disbelief> {
        &self.disbelieved
    }

    /// What is in order but worth knowing: public addresses that several nodes use, this one included (which is in
    /// order only behind some kinds of NAT), and what plans remarked.
    pub(crate) fn remarks(&self) -> &Listing<String> {
        &self.remarks
    }

    /// The believed peer that defines an object.
    pub(crate) fn definer(&self, key: &Key) -> Option<Subnets> {
        let mut peers = self.claims.get(key)?.ids().iter().filter_map(|id| self.slots[*id as usize].as_ref());
        peers.find(|peer| peer.believed).map(|peer| peer.lease.subnets)
    }

    /// The routes by a nexthop object, which the plan that defines it defines too; `None` if none does.
    pub(crate) fn routes_by(&self, nexthop: &Key) -> Option<Vec<Key>> {
        let Key::Nexthop(wanted) = nexthop else { return None };
        let by_it = |object: &&Object| matches!(object, Object::Route(Route { via: Via::Nexthop(id), .. }) if id == wanted);
        let peers = self.claims.get(nexthop)?.ids().iter().filter_map(|id| self.slots[*id as usize].as_ref());
        let believed = peers.filter(|peer| peer.believed);
        Some(believed.flat_map(|peer| peer.objects.iter().filter(by_it)).map(Object::key).collect())
    }

    /// The peer whose subnet holds `address`, whether it is believed, and what its plan defines. A believed one comes
    /// before others, the longest prefix first.
    pub(crate) fn holder_of(&self, address: IpAddr) -> Option<(Arc<Lease>, bool, &[Object])> {
        let host = Subnet::host(address);
        let around = self.lengths.range(..=host.len()).rev().filter_map(|(len, _)| host.supernet(*len));
        let ids = around.flat_map(|subnet| self.subnets.range((subnet, 0)..=(subnet, Id::MAX)));
        let peers: Vec<&Peer> = ids.filter_map(|(_, id)| self.slots[*id as usize].as_ref()).collect();
        let peer = peers.iter().find(|peer| peer.believed).or_else(|| peers.first())?;
        Some((Arc::clone(&peer.lease), peer.believed, &peer.objects))
    }

    /// Takes in changed leases (`None`: gone) and returns what changed in the objects, in the order of keys.
    /// This node's own lease is passed over.
    pub(crate) fn update<'a>(
        &mut self,
        changes: impl Iterator<Item = (Subnets, Option<&'a Arc<Lease>>)>,
        on_link: &Answer<'_>,
    ) -> Vec<Delta> {
        let mut update = Update::default();
        let own = self.terms.own;
        for (subnets, lease) in changes.filter(|(subnets, _)| Some(*subnets) != own) {
            if let Some(id) = self.ids.get(&subnets).copied() {
                self.remove(id, &mut update);
            }
            if let Some(lease) = lease {
                self.insert(Arc::clone(lease), on_link, &mut update);
            }
        }
        self.finish(update)
    }

    /// Asks the facts about addresses inside `under` (`None`: all) again, and plans anew where one changed.
    pub(crate) fn recheck(&mut self, under: Option<Subnet>, on_link: &Answer<'_>) -> Vec<Delta> {
        let mut again = BTreeSet::new();
        let facts: Box<dyn Iterator<Item = (&IpAddr, &mut Fact)>> = match under {
            Some(subnet) => Box::new(self.facts.range_mut(subnet.base()..=subnet.last())),
            None => Box::new(self.facts.iter_mut()),
        };
        for (address, fact) in facts {
            // Where the kernel cannot say, what it said last holds.
            let Some(now) = on_link(*address) else { continue };
            if fact.told != Some(now) {
                fact.tell(Some(now), &mut self.relied);
                again.extend(fact.asked_by.iter().copied());
            }
        }
        let leases: Vec<_> = again
            .into_iter()
            .filter_map(|id| self.slots[id as usize].as_ref())
            .map(|p| Arc::clone(&p.lease))
            .collect();
        self.update(leases.iter().map(|lease| (lease.subnets, Some(lease))), on_link)
    }

    fn insert(&mut self, lease: Arc<Lease>, on_link: &Answer<'_>, update: &mut Update) {
        let id = self.free.pop().unwrap_or_else(|| {
            self.slots.push(None);
            (self.slots.len() - 1) as Id
        });
        let env = Env::new(on_link);
        let mut objects = Vec::new();
        let rejected = self.plan(&lease, &env, &mut objects).err();
        if rejected.is_some() {
            objects.clear();
        }
        let (asked, remarks) = env.into_parts();
        if !remarks.is_empty() {
            for remark in &remarks {
                self.remarks.insert(remark_of(lease.subnets, remark), ());
            }
            self.remarked.insert(lease.subnets, remarks);
        }
        for (address, told) in &asked {
            let fact = self.facts.entry(*address).or_default();
            let first = fact.asked_by.is_empty();
            let agreed = told.filter(|told| first || fact.told == Some(*told));
            fact.tell(agreed, &mut self.relied);
            fact.asked_by.insert(id);
        }
        for object in &objects {
            let key = object.key();
            self.touch(key, update);
            match self.claims.get_mut(&key) {
                None => drop(self.claims.insert(key, Claim::One(id))),
                Some(claim) => *claim = Claim::Many([claim.ids(), &[id]].concat()),
            }
        }
        for subnet in lease.subnets.iter() {
            self.subnets.insert((subnet, id));
            *self.lengths.entry(subnet.len()).or_default() += 1;
        }
        for address in lease.attrs.public.values() {
            self.count_public(*address, true);
        }
        self.ids.insert(lease.subnets, id);
        self.slots[id as usize] = Some(Peer {
            lease,
            objects: objects.into(),
            asked: asked.into_keys().collect(),
            rejected: rejected.map(|r| r.0.into()),
            believed: false,
        });
        update.dirty.insert(id);
    }

    fn remove(&mut self, id: Id, update: &mut Update) {
        update.dirty.extend(self.neighbours(id).into_iter().map(|(other, _)| other));
        self.touch_all(id, update);
        update.dirty.remove(&id);
        let Some(peer) = self.slots[id as usize].take() else { return };
        for object in &peer.objects {
            let key = object.key();
            if let Some(claim) = self.claims.get_mut(&key) {
                let left: Vec<Id> = claim.ids().iter().copied().filter(|other| *other != id).collect();
                match left.as_slice() {
                    [] => drop(self.claims.remove(&key)),
                    [one] => *claim = Claim::One(*one),
                    _ => *claim = Claim::Many(left),
                }
            }
        }
        for subnet in peer.lease.subnets.iter() {
            self.subnets.remove(&(subnet, id));
            decrement(&mut self.lengths, &subnet.len());
        }
        for address in peer.lease.attrs.public.values() {
            self.count_public(*address, false);
        }
        for address in &peer.asked {
            if let Some(fact) = self.facts.get_mut(address) {
                fact.asked_by.remove(&id);
                if fact.asked_by.is_empty() {
                    fact.tell(None, &mut self.relied);
                    self.facts.remove(address);
                }
            }
        }
        self.ids.remove(&peer.lease.subnets);
        self.disbelieved.remove(&peer.lease.subnets);
        for remark in self.remarked.remove(&peer.lease.subnets).into_iter().flatten() {
            self.remarks.remove(&remark_of(peer.lease.subnets, &remark));
        }
        update.vacated.push(id);
    }

    /// Counts one more or one less node with a public address, and remarks on it if it is not alone.
    fn count_public(&mut self, address: IpAddr, more: bool) {
        let own = self.terms.public.values().any(|own| *own == address);
        let own = if own { ", this one among them" } else { "" };
        let remark = |count: u32| format!("{count} nodes share the public address {address}{own}");
        let before = self.publics.get(&address).copied().unwrap_or(0);
        if more {
            self.publics.insert(address, before + 1);
        } else {
            decrement(&mut self.publics, &address);
        }
        if before > 1 {
            self.remarks.remove(&remark(before));
        }
        if let Some(now) = self.publics.get(&address).filter(|now| **now > 1) {
            self.remarks.insert(remark(*now), ());
        }
    }

    /// What the plan makes of the part of a lease that is ours to believe: the enabled families. No plan may claim
    /// a route outside of that.
    fn plan(&self, lease: &Lease, env: &Env<'_>, objects: &mut Vec<Object>) -> Result<(), Rejected> {
        let enabled = lease.subnets.iter().filter(|subnet| self.terms.networks[subnet.family()].is_some());
        let Some(subnets) = Subnets::new(enabled) else { return Ok(()) };
        if subnets == lease.subnets {
            (self.plan)(lease, env, objects)?;
        } else {
            (self.plan)(&Lease { subnets, ..lease.clone() }, env, objects)?;
        }
        let stray = objects.iter().find(|object| match object {
            Object::Route(route) => !subnets.iter().any(|subnet| subnet.covers(&route.dst)),
            _ => false,
        });
        stray.map_or(Ok(()), |route| Err(Rejected(format!("it would need the {route}, outside its subnets"))))
    }

    /// Recomputes belief for the dirty peers and all that they can touch.
    fn finish(&mut self, mut update: Update) -> Vec<Delta> {
        let mut open: Vec<Id> = update.dirty.iter().copied().collect();
        open.iter().for_each(|id| self.touch_all(*id, &mut update));
        let mut contested: Vec<Id> = Vec::new();
        while let Some(id) = open.pop() {
            let neighbours = self.neighbours(id);
            if neighbours.is_empty() {
                self.judge(id, &BTreeSet::new());
                continue;
            }
            contested.push(id);
            for (other, _) in neighbours {
                if update.dirty.insert(other) {
                    self.touch_all(other, &mut update);
                    open.push(other);
                }
            }
        }
        contested.sort_by_cached_key(|id| {
            self.slots[*id as usize].as_ref().map_or((Revision(0), String::new()), |p| p.lease.precedence())
        });
        let mut winners = BTreeSet::new();
        for id in contested {
            if self.judge(id, &winners) {
                winners.insert(id);
            }
        }
        self.free.append(&mut update.vacated);
        let delta = |(key, before)| {
            let after = self.object(&key).cloned();
            (before != after).then_some(Delta { key, before, after })
        };
        update.touched.into_iter().filter_map(delta).collect()
    }

    /// Decides whether to believe a peer, given the believed ones among its neighbours.
    fn judge(&mut self, id: Id, winners: &BTreeSet<Id>) -> bool {
        let Some(peer) = self.slots[id as usize].as_ref() else { return false };
        let subnets = peer.lease.subnets;
        let verdict = self.objection(peer).or_else(|| {
            let (other, key) = self.neighbours(id).into_iter().find(|(other, _)| winners.contains(other))?;
            let other = &self.slots[other as usize].as_ref()?.lease;
            let (earlier, holder) = (other.subnets, holder(&other.attrs));
            Some(match key {
                Some(key) => Disbelief::Contradicts { key, earlier, holder },
                None => Disbelief::Overlaps { earlier, holder },
            })
        });
        let believed = verdict.is_none();
        match verdict {
            Some(why) => drop(self.disbelieved.insert(subnets, why)),
            None => drop(self.disbelieved.remove(&subnets)),
        }
        if let Some(peer) = self.slots[id as usize].as_mut() {
            peer.believed = believed;
        }
        believed
    }

    /// What speaks against a peer whatever other peers say.
    fn objection(&self, peer: &Peer) -> Option<Disbelief> {
        let mut enabled = false;
        for subnet in peer.lease.subnets.iter() {
            let Some(network) = self.terms.networks[subnet.family()] else { continue };
            if !network.covers(&subnet) {
                return Some(Disbelief::Outside { subnet, network });
            }
            enabled = true;
        }
        if !enabled {
            return Some(Disbelief::NoEnabledFamily);
        }
        let unusable = |a: &&IpAddr| a.is_multicast() || a.is_loopback() || **a == IpAddr::from([255; 4]);
        if let Some(public) = peer.lease.attrs.public.values().find(unusable) {
            return Some(Disbelief::Rejected(format!("its public address {public} is no host's address")));
        }
        if let Some(own) = self.terms.own.filter(|own| own.overlaps(&peer.lease.subnets)) {
            return Some(Disbelief::OverlapsOwn { own });
        }
        if let Some(reason) = &peer.rejected {
            return Some(Disbelief::Rejected(reason.to_string()));
        }
        let reserved = peer.objects.iter().map(Object::key).find(|key| self.terms.reserved.contains(key));
        reserved.map(|key| Disbelief::ContradictsOwn { key })
    }

    /// The peers that clash with this one, and over which object (`None`: their subnets overlap).
    fn neighbours(&self, id: Id) -> Vec<(Id, Option<Key>)> {
        let Some(peer) = self.slots[id as usize].as_ref() else { return Vec::new() };
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
        for object in &peer.objects {
            let key = object.key();
            let Some(Claim::Many(ids)) = self.claims.get(&key) else { continue };
            for other in ids.iter().filter(|other| **other != id) {
                let theirs = self.slots[*other as usize].as_ref();
                let theirs = theirs.and_then(|p| p.objects.iter().find(|o| o.key() == key));
                if theirs.is_some_and(|theirs| theirs != object) {
                    found.push((*other, Some(key)));
                }
            }
        }
        found
    }

    /// Remembers the present definition of an object, before anything changes it.
    fn touch(&self, key: Key, update: &mut Update) {
        update.touched.entry(key).or_insert_with(|| self.object(&key).cloned());
    }

    fn touch_all(&self, id: Id, update: &mut Update) {
        let Some(peer) = self.slots[id as usize].as_ref() else { return };
        for object in &peer.objects {
            self.touch(object.key(), update);
        }
    }
}

fn remark_of(subnets: Subnets, remark: &str) -> String {
    format!("the lease {subnets}: {remark}")
}

/// Counts down, and forgets what is no longer there.
fn decrement<K: Ord, N: From<u8> + std::ops::SubAssign + PartialEq>(counts: &mut BTreeMap<K, N>, key: &K) {
    if let Some(count) = counts.get_mut(key) {
        *count -= N::from(1);
        if *count == N::from(0) {
            counts.remove(key);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lease::{LeaseAttrs, LeaseSet};
    use crate::name::MacAddr;
    use crate::plan::Rejected;
    use crate::state::{Fdb, Route, Via};
    use proptest::prelude::*;

    /// A route to every subnet and a forwarding entry for the MAC address that the backend data holds.
    fn plan(lease: &Lease, env: &Env<'_>, out: &mut Vec<Object>) -> Result<(), Rejected> {
        let link = "flannel.1".parse().unwrap();
        for endpoint in lease.endpoints() {
            let gateway = endpoint.subnet.base();
            let public = endpoint.public.ok_or_else(|| Rejected("no public address".into()))?;
            let link = env.on_link(public).unwrap_or(link);
            let via = Via::Gateway { gateway, link, onlink: true };
            out.push(Route { dst: endpoint.subnet, via, mtu: None }.into());
            let mac = endpoint.data.and_then(|d| d.trim_matches('"').parse().ok());
            let mac: MacAddr = mac.ok_or_else(|| Rejected("no MAC address".into()))?;
            out.push(Fdb { link, mac, dst: public }.into());
        }
        Ok(())
    }

    fn lease(key: &str, since: u64, public: u8, mac: u8) -> Arc<Lease> {
        let attrs = LeaseAttrs {
            public: [IpAddr::from([192, 0, 2, public])].into_iter().collect(),
            backend_type: "vxlan".into(),
            backend_data: Dual { v4: Some(format!("\"{}\"", MacAddr::local([mac; 6])).into()), v6: None },
        };
        let subnets = key.parse().unwrap();
        Arc::new(Lease { subnets, attrs, expires: None, since: Revision(since), revision: Revision(since) })
    }

    fn peers(own: Option<&str>) -> Peers {
        let networks = ["10.1.0.0/16".parse::<Subnet>().unwrap()].into_iter().collect();
        let own = own.map(|own| own.parse().unwrap());
        Peers::new(Terms { networks, own, ..Terms::default() }, Box::new(plan))
    }

    fn no_answer(_: IpAddr) -> Option<Option<LinkName>> {
        Some(None)
    }

    fn put(peers: &mut Peers, lease: &Arc<Lease>) -> Vec<Delta> {
        peers.update([(lease.subnets, Some(lease))].into_iter(), &no_answer)
    }

    fn why(peers: &Peers, lease: &Lease) -> String {
        peers.disbelieved().get(&lease.subnets).map(ToString::to_string).unwrap_or_default()
    }

    #[test]
    fn the_earlier_of_two_overlapping_leases_is_believed_whichever_comes_first() {
        let (early, late) = (lease("10.1.2.0-24", 5, 1, 1), lease("10.1.2.128-25", 9, 2, 2));
        for order in [[&early, &late], [&late, &early]] {
            let mut peers = peers(None);
            order.iter().for_each(|lease| drop(put(&mut peers, lease)));
            assert_eq!(why(&peers, &early), "");
            assert_eq!(why(&peers, &late), "it overlaps the earlier lease 10.1.2.0-24 of 192.0.2.1 (vxlan)");
            assert_eq!(peers.objects().count(), 2);
            let gone = peers.update([(early.subnets, None)].into_iter(), &no_answer);
            assert_eq!((gone.len(), why(&peers, &late)), (4, String::new()));
        }
    }

    #[test]
    fn a_lease_kept_out_by_one_that_is_itself_not_believed_is_believed() {
        let mut peers = peers(None);
        let (first, second, third) =
            (lease("10.1.0.0-23", 1, 1, 1), lease("10.1.1.0-24", 2, 2, 1), lease("10.1.1.0-25", 3, 3, 3));
        [&third, &second, &first].iter().for_each(|lease| drop(put(&mut peers, lease)));
        assert!(why(&peers, &second).contains("10.1.0.0-23") && why(&peers, &third).contains("10.1.0.0-23"));
        peers.update([(first.subnets, None)].into_iter(), &no_answer);
        assert!(why(&peers, &second).is_empty() && why(&peers, &third).contains("10.1.1.0-24"));
    }

    #[test]
    fn two_definitions_of_one_object_clash() {
        let mut peers = peers(None);
        let (a, b) = (lease("10.1.1.0-24", 1, 1, 7), lease("10.1.2.0-24", 2, 2, 7));
        put(&mut peers, &b);
        let deltas = put(&mut peers, &a);
        assert_eq!(
            why(&peers, &b),
            "fdb 06:07:07:07:07:07 dev flannel.1 is defined otherwise by the earlier lease 10.1.1.0-24 of 192.0.2.1 (vxlan)"
        );
        assert_eq!(deltas.iter().filter(|d| d.after.is_none()).count(), 1, "the route of the later one goes");
        let same_definition = lease("10.1.3.0-24", 3, 1, 7);
        put(&mut peers, &same_definition);
        assert_eq!(why(&peers, &same_definition), "");
    }

    #[test]
    fn objections() {
        let mut peers = peers(Some("10.1.9.0-24"));
        for (lease, says) in [
            (lease("10.2.1.0-24", 1, 1, 1), "10.2.1.0/24 lies outside the pod network 10.1.0.0/16"),
            (lease("10.0.0.0-8", 1, 1, 1), "outside"),
            (lease("10.1.9.128-25", 1, 1, 1), "this node's own lease 10.1.9.0-24"),
            (lease("0.0.0.0-0&fd00::-64", 1, 1, 1), "no subnet in a family"),
        ] {
            put(&mut peers, &lease);
            assert!(why(&peers, &lease).contains(says), "{}: {}", lease.subnets, why(&peers, &lease));
        }
        put(&mut peers, &lease("10.1.9.0-24", 1, 1, 1));
        assert_eq!(peers.ids.len(), 4, "the own lease is no peer");
        assert_eq!(peers.objects().count(), 0);
        let mut bad = Arc::unwrap_or_clone(lease("10.1.3.0-24", 1, 1, 1));
        bad.attrs.backend_data.v4 = None;
        put(&mut peers, &Arc::new(bad.clone()));
        assert_eq!(why(&peers, &bad), "no MAC address");
    }

    #[test]
    fn a_changed_fact_plans_again() {
        let mut peers = peers(None);
        put(&mut peers, &lease("10.1.1.0-24", 1, 1, 1));
        put(&mut peers, &lease("10.1.2.0-24", 1, 2, 2));
        let eth0: LinkName = "eth0".parse().unwrap();
        let one = |address: IpAddr| Some((address == IpAddr::from([192, 0, 2, 1])).then_some(eth0));
        assert_eq!(peers.recheck(Some("198.51.100.0/24".parse().unwrap()), &|_| panic!("asked")), vec![]);
        let deltas = peers.recheck(Some("192.0.2.0/24".parse().unwrap()), &one);
        assert_eq!(deltas.len(), 3, "one route changed, one fdb moved: {deltas:?}");
        assert_eq!(peers.recheck(None, &one), vec![]);
        assert_eq!(peers.recheck(None, &|_| None), vec![], "no answer is no news");
    }

    #[test]
    fn a_family_that_is_not_enabled_defines_nothing() {
        let mut peers = peers(None);
        let dual = lease("10.1.1.0-24&2000::-3", 1, 1, 1);
        put(&mut peers, &dual);
        assert_eq!(why(&peers, &dual), "");
        assert!(peers.objects().all(|object| !object.to_string().contains("2000::")));
        assert_eq!(peers.objects().count(), 2);
    }

    #[test]
    fn no_plan_may_claim_a_route_outside_its_lease() {
        let plan: Box<Plan> = Box::new(|_, _, objects| {
            let dst = "10.1.0.0/16".parse().unwrap();
            objects.push(Route { dst, via: Via::Blackhole, mtu: None }.into());
            Ok(())
        });
        let networks = ["10.1.0.0/16".parse::<Subnet>().unwrap()].into_iter().collect();
        let mut peers = Peers::new(Terms { networks, ..Terms::default() }, plan);
        let greedy = lease("10.1.1.0-24", 1, 1, 1);
        put(&mut peers, &greedy);
        assert!(why(&peers, &greedy).contains("route blackhole 10.1.0.0/16, outside its subnets"));
    }

    #[test]
    fn shared_public_addresses_are_remarked() {
        let mut peers = peers(None);
        peers.publics.insert([192, 0, 2, 1].into(), 1);
        peers.terms.public.v4 = Some([192, 0, 2, 1].into());
        put(&mut peers, &lease("10.1.1.0-24", 1, 1, 1));
        let own = "2 nodes share the public address 192.0.2.1, this one among them";
        assert_eq!(peers.remarks().keys().collect::<Vec<_>>(), [own]);
        let mut loopback = Arc::unwrap_or_clone(lease("10.1.2.0-24", 1, 2, 2));
        loopback.attrs.public.v4 = Some([127, 0, 0, 1].into());
        put(&mut peers, &Arc::new(loopback.clone()));
        assert_eq!(why(&peers, &loopback), "its public address 127.0.0.1 is no host's address");
    }

    /// The definition of belief, without any index.
    fn model(leases: &LeaseSet, own: Option<Subnets>) -> BTreeSet<Subnets> {
        let network: Subnet = "10.1.0.0/16".parse().unwrap();
        let mut sorted: Vec<_> = leases.iter().cloned().collect();
        sorted.sort_by_key(|lease| lease.precedence());
        let mut believed: Vec<(Arc<Lease>, Vec<Object>)> = Vec::new();
        for lease in sorted {
            let mut objects = Vec::new();
            let planned = plan(&lease, &Env::new(&no_answer), &mut objects);
            let clash = |other: &(Arc<Lease>, Vec<Object>)| {
                let contradicts = |a: &Object| other.1.iter().any(|b| a.key() == b.key() && a != b);
                other.0.subnets.overlaps(&lease.subnets) || objects.iter().any(contradicts)
            };
            let inside = lease.subnets.iter().all(|s| network.covers(&s));
            let ours = own.is_some_and(|own| own.overlaps(&lease.subnets));
            if planned.is_ok() && inside && !ours && !believed.iter().any(clash) {
                believed.push((lease, objects));
            }
        }
        believed.into_iter().map(|(lease, _)| lease.subnets).collect()
    }

    proptest! {
        #[test]
        fn belief_does_not_depend_on_the_order_of_events(
            steps in prop::collection::vec((0..12u8, 23..27u8, 0..4u64, 0..5u8, 0..5u8, any::<bool>()), 1..60),
        ) {
            let own = "10.1.3.0-25";
            let mut peers = peers(Some(own));
            let (mut leases, mut objects) = (LeaseSet::default(), BTreeMap::new());
            for (n, len, since, public, mac, there) in steps {
                let base = Subnet::new(IpAddr::from([10, 1, n / 2, (n % 2) * 128]), len).unwrap();
                let lease = lease(&format!("{}-{len}", base.base()), since, public, mac);
                if Some(lease.subnets) == peers.terms.own { continue; }
                let old = leases.clone();
                if there { leases.insert(lease); } else { leases.remove(&lease.subnets); }
                for delta in peers.update(leases.changes_since(&old), &no_answer) {
                    prop_assert_eq!(objects.get(&delta.key), delta.before.as_ref());
                    match delta.after {
                        Some(object) => drop(objects.insert(delta.key, object)),
                        None => drop(objects.remove(&delta.key)),
                    }
                }
                let believed: BTreeSet<Subnets> =
                    leases.iter().map(|l| l.subnets).filter(|s| !peers.disbelieved().contains_key(s)).collect();
                prop_assert_eq!(believed, model(&leases, peers.terms.own));
                prop_assert!(peers.objects().eq(objects.values()));
            }
        }
    }
}
