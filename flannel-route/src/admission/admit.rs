//! Admission: the peer leases that this node accepts, and the kernel objects that they define.
//!
//! Every node must accept the same leases. Two leases clash if their subnets overlap, or if they
//! define one kernel object differently. Of two leases that clash, every node accepts the one with
//! the smaller [`Lease::precedence`]. There are two exceptions. A node always accepts its own
//! lease. And if one of the leases proves that an object is its own
//! ([`Blueprint::proof`](flannel_core::backend::Blueprint::proof)), the other lease is rejected,
//! whichever was created first.
//!
//! After a change, only the leases that it can affect are decided again. Indexes find them, so that
//! a change of one lease among 50,000 costs as much as one lease.

mod decide;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use crate::admission::advisories::Advisories;
use crate::admission::backend_plan::{BackendPlan, Handshakes, Planned};
use crate::admission::lookup_results::LookupResults;
use crate::admission::path_mtus::{PathMtus, lower};
use crate::admission::peer_index::{
    Definition, Expanded, Extras, PeerEntry, PeerId, PeerIndex, Sharing,
};
use crate::admission::stale_lookups::LookupScope;
use flannel_core::address::Dual;
use flannel_core::backend::{Env, Reach, ReachLookup};
use flannel_core::object::{Key, Object, Route, Via};
use flannel_core::status::{Advisory, Rejection, SortedMap};
use flannel_core::{Lease, Subnet, Subnets};

/// The rules by which leases are accepted.
#[derive(Debug, Clone, Default)]
pub struct AdmissionRules {
    /// The enabled pod networks.
    pub networks: Dual<Subnet>,
    /// This node's own lease, or `None` if every lease is the lease of a peer. No peer may overlap
    /// its subnets or define the objects that plans define for it.
    pub own: Option<Arc<Lease>>,
    /// Other objects that no peer may define.
    pub reserved: BTreeSet<Key>,
}

/// An object whose definition changed.
#[derive(Debug, PartialEq, Eq)]
pub struct Delta {
    /// The key of the object.
    pub key: Key,
    /// The definition before the update, or `None` if no accepted peer defined the object.
    pub before: Option<Object>,
    /// The definition after the update, or `None` if no accepted peer defines the object.
    pub after: Option<Object>,
}

/// The result of an update.
#[derive(Debug, Default)]
pub struct Changed {
    /// The objects whose definition changed, in the order of keys.
    pub deltas: Vec<Delta>,
    /// The new accepted peers whose objects no other peer defines. Their objects are not in
    /// `deltas`.
    pub added: Vec<PeerId>,
}

/// All peers, and the objects that they define.
///
/// Methods that take a [`ReachLookup`] call it for the lookups of plans. They block as it does.
pub struct Admission {
    rules: AdmissionRules,
    plans: Vec<BackendPlan>,
    path_mtus: PathMtus,
    handshakes: Handshakes,
    index: PeerIndex,
    lookup_results: LookupResults,
    rejected: SortedMap<Subnets, Rejection>,
    advisories: Advisories,
    /// The expected number of new peers in the next update; 0 after memory was reserved for them.
    expected: usize,
}

/// The work of one update.
#[derive(Default)]
struct Update {
    added: Vec<NewPeer>,
    /// Other peers that must be decided again.
    dirty: BTreeSet<PeerId>,
    /// Objects that may change, with their definition before the update.
    touched: BTreeMap<Key, Option<Object>>,
    /// The slots of peers that were removed.
    vacated: Vec<PeerId>,
    /// The neighbours of removed peers that are dirty already.
    expanded: Expanded,
}

/// A peer that an update adds.
struct NewPeer {
    id: PeerId,
    /// Whether other peers define one of its objects.
    sharing: Sharing,
}

impl Admission {
    /// An admission without peers. The first of `plans` that accepts an offer of a peer defines the
    /// objects of the peer.
    pub fn new(mut rules: AdmissionRules, plans: Vec<BackendPlan>) -> Self {
        let mut public = Dual::default();
        if let Some(own) = &rules.own {
            public = own.attrs.preferred.public;
            // If all plans reject our own lease, no objects are reserved for it.
            let unknown = |_| Some(Reach::NotDirect);
            let ours = BackendPlan::run(
                &plans,
                &own.subnets,
                &own.attrs,
                &BTreeSet::new(),
                &Env::new(&unknown),
            );
            rules.reserved.extend(ours.unwrap_or_default().objects.iter().map(Object::key));
        }
        let advisories = Advisories::new(&public);
        Self {
            rules,
            plans,
            path_mtus: PathMtus::default(),
            handshakes: Handshakes::default(),
            index: PeerIndex::default(),
            lookup_results: LookupResults::default(),
            rejected: SortedMap::default(),
            advisories,
            expected: 0,
        }
    }

    /// Announces `more` new peers. The next update reserves memory for them. This is optional.
    pub fn make_room(&mut self, more: usize) {
        self.expected = more;
    }

    /// Whether there is a peer with exactly these subnets, accepted or rejected.
    pub fn contains(&self, subnets: &Subnets) -> bool {
        self.index.id(subnets).is_some()
    }

    /// The definition of an object by an accepted peer, or `None` if no accepted peer defines it.
    pub fn object(&self, key: &Key) -> Option<Object> {
        self.definition(key).map(|definition| definition.object.clone())
    }

    fn definition(&self, key: &Key) -> Option<Definition<'_>> {
        self.index
            .definitions(key)
            .find(|definition| definition.peer.accepted && definition.is_chosen)
    }

    /// The objects of all accepted peers, in the order of the peers' slots. An object that several
    /// peers define is returned several times.
    pub fn objects(&self) -> impl Iterator<Item = &Object> {
        self.index.peers().filter(|peer| peer.accepted).flat_map(|peer| peer.chosen())
    }

    /// The objects of one peer. Empty if the peer is not accepted.
    pub fn objects_of(&self, id: PeerId) -> &[Object] {
        self.index.peer(id).filter(|peer| peer.accepted).map_or(&[], |peer| peer.chosen())
    }

    /// The objects that the plan would define for a lease. Does not take in the lease. Empty if the
    /// plan rejects it.
    pub fn foresee(&self, lease: &Lease, on_link: &ReachLookup<'_>) -> Vec<Object> {
        // The rejection is reported when the lease is taken in.
        let mut planned = self.plan(lease, &Env::new(on_link)).unwrap_or_default();
        planned.objects.truncate(planned.chosen);
        planned.objects
    }

    /// Whether a plan has looked up an address inside `subnet`.
    pub fn has_lookup_under(&self, subnet: Subnet) -> bool {
        self.lookup_results.has_any_under(subnet)
    }

    /// The number of accepted peers.
    pub fn accepted(&self) -> usize {
        self.index.len() - self.rejected.len()
    }

    /// The rejected peers, with the reasons.
    pub fn rejected(&self) -> &SortedMap<Subnets, Rejection> {
        &self.rejected
    }

    /// Conditions of leases that an operator should know: public addresses that several nodes use,
    /// and the advisories of plans.
    pub fn advisories(&self) -> &SortedMap<Advisory> {
        self.advisories.sorted()
    }

    /// The accepted peer that defines an object, or `None` if no accepted peer defines it.
    pub fn definer(&self, key: &Key) -> Option<Subnets> {
        self.definition(key).map(|definition| definition.peer.lease.subnets)
    }

    /// The routes that use a nexthop object which a plan defines, or `None` if no plan defines it.
    pub fn routes_by(&self, nexthop: &Key) -> Option<Vec<Key>> {
        let Key::Nexthop(id) = *nexthop else { return None };
        let mut definitions = self.index.definitions(nexthop).peekable();
        definitions.peek()?;
        let routes = definitions
            .filter(|definition| definition.peer.accepted)
            .flat_map(|definition| definition.peer.chosen())
            .filter(|object| uses(object, id));
        Some(routes.map(Object::key).collect())
    }

    /// The peer whose subnet contains `address`, or `None` if no subnet contains it. If several
    /// subnets do, accepted peers come first, then the longest prefix.
    pub fn holder_of(&self, address: IpAddr) -> Option<&PeerEntry> {
        let accepted = self.index.holders_of(address).find(|peer| peer.accepted);
        accepted.or_else(|| self.index.holders_of(address).next())
    }

    /// Takes in changed leases. A change without a lease means that the lease was deleted. This
    /// node's own lease is ignored.
    pub fn update<'a>(
        &mut self,
        changes: impl Iterator<Item = (Subnets, Option<&'a Arc<Lease>>)>,
        on_link: &ReachLookup<'_>,
    ) -> Changed {
        let mut update = Update::default();
        let own = self.rules.own.as_ref().map(|own| own.subnets);
        for (subnets, lease) in changes.filter(|(subnets, _)| Some(*subnets) != own) {
            let id = self.index.id(&subnets);
            let results = id.map(|id| self.remove(id, &mut update)).unwrap_or_default();
            if let Some(lease) = lease {
                // If the lookup fails, its last result holds.
                let on_link = |address| on_link(address).or_else(|| results.get(&address).copied());
                self.insert(Arc::clone(lease), &on_link, &mut update);
            }
        }
        self.finish(update)
    }

    /// Repeats the lookups in `scope`. Returns the leases whose plans got another result: call
    /// [`update`](Self::update) with them, so that their plans run again.
    pub fn recheck(&mut self, scope: LookupScope, on_link: &ReachLookup<'_>) -> Vec<Arc<Lease>> {
        let again = self.lookup_results.recheck(scope, on_link);
        let peers = again.into_iter().filter_map(|id| self.index.peer(id));
        peers.map(|peer| Arc::clone(&peer.lease)).collect()
    }

    /// Takes in the MTUs of paths. Returns the peers whose routes may get another MTU: call
    /// [`update`](Self::update) with their leases, so that their plans run again.
    pub fn set_path_mtus(&mut self, mtus: &PathMtus) -> BTreeSet<Subnets> {
        if Arc::ptr_eq(&self.path_mtus, mtus) {
            return BTreeSet::new();
        }
        let before = std::mem::replace(&mut self.path_mtus, Arc::clone(mtus));
        let all = before.keys().chain(mtus.keys());
        let changed = all.filter(|subnet| before.get(*subnet) != mtus.get(*subnet));
        self.peers_of(changed)
    }

    /// Takes in the completed handshakes. Returns the peers whose handshake has completed, or is
    /// missing again: call [`update`](Self::update) with their leases.
    pub fn set_handshakes(&mut self, handshakes: &Handshakes) -> BTreeSet<Subnets> {
        let before = std::mem::replace(&mut self.handshakes, Arc::clone(handshakes));
        self.peers_of(before.symmetric_difference(handshakes))
    }

    fn peers_of<'a>(&self, subnets: impl Iterator<Item = &'a Subnet>) -> BTreeSet<Subnets> {
        let peers = subnets.flat_map(|subnet| self.index.holders_of(subnet.base()));
        peers.map(|peer| peer.lease.subnets).collect()
    }

    fn insert(&mut self, lease: Arc<Lease>, on_link: &ReachLookup<'_>, update: &mut Update) {
        let id = self.index.next_id();
        let on_link = |address| on_link(address).or_else(|| self.lookup_results.get(&address));
        let env = Env::new(&on_link);
        let planned = self.plan_unless_rejected(&lease, &env);
        let rejected = planned.as_ref().err().cloned();
        let Planned { objects, chosen } = planned.unwrap_or_default();
        if self.expected > 0 {
            self.index.reserve(std::mem::take(&mut self.expected), objects.len());
        }
        let (looked_up, mut advice) = env.into_parts();
        advice.extend(lease.attrs.unused_offers().map(|unused| unused.to_string().as_str().into()));
        // The reason of a rejection says enough.
        if rejected.is_none() {
            self.advisories.joined(&lease, advice);
        }
        for (address, reach) in &looked_up {
            self.lookup_results.note(*address, *reach, id);
        }
        let hosts = if rejected.is_none() { self.hosts(&lease) } else { Box::default() };
        let extras = Extras { looked_up: looked_up.into_keys().collect(), hosts, rejected };
        let peer = PeerEntry {
            lease,
            objects: objects.into_boxed_slice(),
            extras: (extras != Extras::default()).then(|| Box::new(extras)),
            // A plan defines a handful of objects.
            chosen: chosen.try_into().unwrap_or(u16::MAX),
            accepted: false,
        };
        let is_proven =
            |lease: &Lease, object: &Object| BackendPlan::is_proven(&self.plans, lease, object);
        let sharing = self.index.insert(id, peer, is_proven);
        update.added.push(NewPeer { id, sharing });
    }

    /// Removes a peer. Returns the results of the lookups that its plan made.
    fn remove(&mut self, id: PeerId, update: &mut Update) -> BTreeMap<IpAddr, Reach> {
        for other in self.index.neighbours(id, &mut update.expanded) {
            update.dirty.insert(other);
            self.touch_all(other, update);
        }
        self.touch_all(id, update);
        update.dirty.remove(&id);
        let Some(peer) = self.index.remove(id) else { return BTreeMap::new() };
        if peer.rejected().is_none() {
            self.advisories.left(&peer.lease);
        }
        let mut results = BTreeMap::new();
        for address in peer.looked_up() {
            results.extend(self.lookup_results.get(address).map(|reach| (*address, reach)));
            self.lookup_results.forget(address, id);
        }
        self.rejected.remove(&peer.lease.subnets);
        update.vacated.push(id);
        results
    }

    /// Plans a lease, unless a rule rejects it or it defines a reserved object.
    fn plan_unless_rejected(&self, lease: &Lease, env: &Env<'_>) -> Result<Planned, Rejection> {
        if let Some(why) = self.objection(lease) {
            return Err(why);
        }
        let planned = self.plan(lease, env)?;
        let mut keys = planned.objects.iter().map(Object::key);
        match keys.find(|key| self.rules.reserved.contains(key)) {
            Some(key) => Err(Rejection::ContradictsOwn(key)),
            None => Ok(planned),
        }
    }

    /// Plans the part of a lease that can be accepted: its subnets of enabled families. Gives the
    /// routes the MTUs of their paths. Rejects the lease if its plan defines a route outside these
    /// subnets.
    fn plan(&self, lease: &Lease, env: &Env<'_>) -> Result<Planned, Rejection> {
        let enabled =
            lease.subnets.iter().filter(|subnet| self.rules.networks[subnet.family()].is_some());
        let Some(subnets) = Subnets::new(enabled) else { return Ok(Planned::default()) };
        let mut planned =
            BackendPlan::run(&self.plans, &subnets, &lease.attrs, &self.handshakes, env)?;
        lower(&mut planned.objects, &subnets, &self.path_mtus);
        for object in &planned.objects {
            let Object::Route(route) = object else { continue };
            if !subnets.iter().any(|subnet| subnet.covers(&route.dst)) {
                let why = format!("it would need the {object}, outside its subnets");
                return Err(Rejection::Rejected(why));
            }
        }
        Ok(planned)
    }
}

/// Whether an object is a route that uses the nexthop object with this id.
fn uses(object: &Object, id: u32) -> bool {
    matches!(object, Object::Route(Route { via: Via::Nexthop(used), .. }) if *used == id)
}

#[cfg(test)]
mod tests {
    use super::*;
    use flannel_core::backend::Plan;
    use flannel_core::lease::{LeaseAttrs, LeaseSet, Offer, Revision};
    use flannel_core::object::{Fdb, LinkName, MacAddr, Route, Via};
    use proptest::prelude::*;

    /// A route to every subnet and a forwarding entry for the MAC address that the backend data
    /// holds.
    fn plan(
        subnets: &Subnets,
        offer: &Offer,
        env: &Env<'_>,
        out: &mut Vec<Object>,
    ) -> Result<(), Rejection> {
        let link = "flannel.1".parse().unwrap();
        for endpoint in offer.endpoints(subnets) {
            let gateway = endpoint.subnet.base();
            let public =
                endpoint.public.ok_or_else(|| Rejection::Rejected("no public address".into()))?;
            let link = env.on_link(public).unwrap_or(link);
            let via = Via::Gateway { gateway, link, onlink: true };
            out.push(Route { dst: endpoint.subnet, via, mtu: None }.into());
            let mac = endpoint.data.and_then(|d| d.trim_matches('"').parse().ok());
            let mac: MacAddr = mac.ok_or_else(|| Rejection::Rejected("no MAC address".into()))?;
            out.push(Fdb { link, mac, dst: public }.into());
        }
        Ok(())
    }

    fn is_derived(object: &Object) -> bool {
        matches!(object, Object::Fdb(entry) if entry.is_derived())
    }

    /// The data of an offer that proves all forwarding entries, as a signature does.
    const SIGNED: &str = "signed";

    fn is_proven(offer: &Offer, object: &Object) -> bool {
        let is_signed = offer.data.v6.as_deref() == Some(SIGNED);
        is_derived(object) || is_signed && matches!(object, Object::Fdb(_))
    }

    /// The plan, with the proofs of vxlan and wireguard.
    fn with_proof() -> BackendPlan {
        let proof = |_: &Subnets, offer: &Offer, object: &Object| is_proven(offer, object);
        BackendPlan::new(None, Box::new(plan)).with_proof(Some(Box::new(proof)))
    }

    fn lease(key: &str, since: u64, public: u8, mac: u8) -> Arc<Lease> {
        let attrs = LeaseAttrs::from(
            Offer::new([IpAddr::from([192, 0, 2, public])].into_iter().collect())
                .with_kind("vxlan")
                .with_data(Dual {
                    v4: Some(format!("\"{}\"", MacAddr::local([mac; 6])).into()),
                    v6: None,
                }),
        );
        let subnets = key.parse().unwrap();
        Arc::new(Lease {
            subnets,
            attrs,
            expires: None,
            since: Revision(since),
            revision: Revision(since),
        })
    }

    fn peers(own: Option<&str>) -> Admission {
        let networks = ["10.1.0.0/16".parse::<Subnet>().unwrap()].into_iter().collect();
        // The own offer has no public address. The plan rejects it, so no object is reserved.
        let own = own.map(|own| {
            let lease = Arc::unwrap_or_clone(lease(own, 0, 0, 0));
            Arc::new(Lease { attrs: LeaseAttrs::default(), ..lease })
        });
        Admission::new(
            AdmissionRules { networks, own, ..AdmissionRules::default() },
            vec![with_proof()],
        )
    }

    fn own_of(peers: &Admission) -> Option<Subnets> {
        peers.rules.own.as_ref().map(|own| own.subnets)
    }

    fn not_direct(_: IpAddr) -> Option<Reach> {
        Some(Reach::NotDirect)
    }

    fn put(peers: &mut Admission, lease: &Arc<Lease>) -> Vec<Delta> {
        let changed = peers.update([(lease.subnets, Some(lease))].into_iter(), &not_direct);
        all(peers, changed)
    }

    /// All changed objects, as deltas.
    fn all(peers: &Admission, changed: Changed) -> Vec<Delta> {
        let mut deltas = changed.deltas;
        for id in changed.added {
            let objects = peers.objects_of(id);
            let new =
                |object: Object| Delta { key: object.key(), before: None, after: Some(object) };
            deltas.extend(objects.iter().cloned().map(new));
        }
        deltas
    }

    fn why(peers: &Admission, lease: &Lease) -> String {
        peers.rejected().get(&lease.subnets).map(ToString::to_string).unwrap_or_default()
    }

    #[test]
    fn the_earlier_of_two_overlapping_leases_is_accepted_in_either_order() {
        let early = lease("10.1.2.0-24", 5, 1, 1);
        let late = lease("10.1.2.128-25", 9, 2, 2);
        for order in [[&early, &late], [&late, &early]] {
            let mut peers = peers(None);
            order.iter().for_each(|lease| drop(put(&mut peers, lease)));
            assert_eq!(why(&peers, &early), "");
            assert_eq!(
                why(&peers, &late),
                "it overlaps the earlier lease 10.1.2.0-24 of 192.0.2.1 (vxlan)"
            );
            assert_eq!(peers.objects().count(), 2);
            let gone = peers.update([(early.subnets, None)].into_iter(), &not_direct);
            assert_eq!((gone.deltas.len(), why(&peers, &late)), (4, String::new()));
        }
    }

    #[test]
    fn a_lease_is_accepted_if_the_one_that_overlaps_it_is_rejected() {
        let mut peers = peers(None);
        let first = lease("10.1.0.0-23", 1, 1, 1);
        let second = lease("10.1.1.0-24", 2, 2, 1);
        let third = lease("10.1.1.0-25", 3, 3, 3);
        [&third, &second, &first].iter().for_each(|lease| drop(put(&mut peers, lease)));
        assert!(
            why(&peers, &second).contains("10.1.0.0-23")
                && why(&peers, &third).contains("10.1.0.0-23")
        );
        peers.update([(first.subnets, None)].into_iter(), &not_direct);
        assert!(why(&peers, &second).is_empty() && why(&peers, &third).contains("10.1.1.0-24"));
    }

    #[test]
    fn two_definitions_of_one_object_clash() {
        let mut peers = peers(None);
        let a = lease("10.1.1.0-24", 1, 1, 7);
        let b = lease("10.1.2.0-24", 2, 2, 7);
        put(&mut peers, &b);
        let deltas = put(&mut peers, &a);
        assert_eq!(
            why(&peers, &b),
            "fdb 06:07:07:07:07:07 dev flannel.1 is defined otherwise by the earlier lease \
             10.1.1.0-24 of 192.0.2.1 (vxlan)"
        );
        assert_eq!(
            deltas.iter().filter(|d| d.after.is_none()).count(),
            1,
            "the route of the later lease is removed"
        );
        let same_definition = lease("10.1.3.0-24", 3, 1, 7);
        put(&mut peers, &same_definition);
        assert_eq!(why(&peers, &same_definition), "");
    }

    #[test]
    fn a_peer_with_this_nodes_own_mac_is_rejected() {
        let networks = ["10.1.0.0/16".parse::<Subnet>().unwrap()].into_iter().collect();
        // It is the later one.
        let own = Some(lease("10.1.9.0-24", 9, 9, 9));
        let rules = AdmissionRules { networks, own, ..AdmissionRules::default() };
        let mut peers = Admission::new(rules, vec![with_proof()]);
        let thief = lease("10.1.1.0-24", 1, 1, 9);
        put(&mut peers, &thief);
        assert_eq!(why(&peers, &thief), "fdb 0a:09:09:09:09:09 dev flannel.1 is this node's own");
    }

    #[test]
    fn a_moved_peer_is_not_reported_as_added() {
        let mut peers = peers(None);
        let first = lease("10.1.1.0-24", 1, 1, 1);
        let moved = lease("10.1.1.0-24", 1, 2, 1);
        let changed = peers.update([(first.subnets, Some(&first))].into_iter(), &not_direct);
        assert_eq!((changed.deltas, changed.added.len()), (vec![], 1));
        let changed = peers.update([(moved.subnets, Some(&moved))].into_iter(), &not_direct);
        assert_eq!((changed.deltas.len(), changed.added.len()), (1, 0), "the route is the same");
    }

    #[test]
    fn a_rejection_names_its_reason() {
        let mut peers = peers(Some("10.1.9.0-24"));
        for (lease, says) in [
            (lease("10.2.1.0-24", 1, 1, 1), "10.2.1.0/24 lies outside the pod network 10.1.0.0/16"),
            (lease("10.0.0.0-8", 1, 1, 1), "outside"),
            (lease("10.1.9.128-25", 1, 1, 1), "this node's own lease 10.1.9.0-24"),
            (lease("0.0.0.0-0&fd00::-64", 1, 1, 1), "no subnet in a family"),
        ] {
            put(&mut peers, &lease);
            assert!(
                why(&peers, &lease).contains(says),
                "{}: {}",
                lease.subnets,
                why(&peers, &lease)
            );
        }
        put(&mut peers, &lease("10.1.9.0-24", 1, 1, 1));
        assert_eq!(peers.index.len(), 4, "the own lease is not a peer");
        assert_eq!(peers.objects().count(), 0);
        let mut bad = Arc::unwrap_or_clone(lease("10.1.3.0-24", 1, 1, 1));
        bad.attrs.preferred.data.v4 = None;
        put(&mut peers, &Arc::new(bad.clone()));
        assert_eq!(why(&peers, &bad), "no MAC address");
    }

    #[test]
    fn a_changed_lookup_plans_the_peer_again() {
        let mut peers = peers(None);
        put(&mut peers, &lease("10.1.1.0-24", 1, 1, 1));
        put(&mut peers, &lease("10.1.2.0-24", 1, 2, 2));
        let eth0: LinkName = "eth0".parse().unwrap();
        let near = IpAddr::from([192, 0, 2, 1]);
        let one = |address: IpAddr| {
            Some(if address == near { Reach::Direct(eth0) } else { Reach::NotDirect })
        };
        let recheck = |peers: &mut Admission, scope: LookupScope, on_link: &ReachLookup<'_>| {
            let leases = peers.recheck(scope, on_link);
            let again = leases.iter().map(|lease| (lease.subnets, Some(lease)));
            peers.update(again, on_link).deltas
        };
        let under = |subnet: &str| LookupScope::Under(subnet.parse().unwrap());
        let elsewhere = recheck(&mut peers, under("198.51.100.0/24"), &|_| panic!("looked up"));
        assert_eq!(elsewhere, vec![]);
        let deltas = recheck(&mut peers, under("192.0.2.0/24"), &one);
        assert_eq!(deltas.len(), 3, "one route changed, one fdb moved: {deltas:?}");
        assert_eq!(recheck(&mut peers, LookupScope::All, &one), vec![]);
        let failed = recheck(&mut peers, LookupScope::All, &|_| None);
        assert_eq!(failed, vec![], "a failed lookup changes nothing");
    }

    #[test]
    fn a_family_that_is_not_enabled_defines_nothing() {
        let mut peers = peers(None);
        let mut dual = Arc::unwrap_or_clone(lease("10.1.1.0-24&2000::-3", 1, 1, 1));
        dual.attrs.preferred.public.v6 = Some("2001:db8::1".parse().unwrap());
        put(&mut peers, &Arc::new(dual.clone()));
        assert_eq!(why(&peers, &dual), "");
        assert!(peers.objects().all(|object| !object.to_string().contains("2000::")));
        assert_eq!(peers.objects().count(), 2);
    }

    #[test]
    fn no_plan_may_define_a_route_outside_its_lease() {
        let plan: Box<Plan> = Box::new(|_, _, _, objects| {
            let dst = "10.1.0.0/16".parse().unwrap();
            objects.push(Route { dst, via: Via::Blackhole, mtu: None }.into());
            Ok(())
        });
        let networks = ["10.1.0.0/16".parse::<Subnet>().unwrap()].into_iter().collect();
        let mut peers = Admission::new(
            AdmissionRules { networks, ..AdmissionRules::default() },
            vec![BackendPlan::new(None, plan)],
        );
        let greedy = lease("10.1.1.0-24", 1, 1, 1);
        put(&mut peers, &greedy);
        assert!(why(&peers, &greedy).contains("route blackhole 10.1.0.0/16, outside its subnets"));
    }

    #[test]
    fn of_two_definitions_by_one_plan_the_first_is_used() {
        let dst = |n: u8| Subnet::host([10, 1, 1, n].into());
        let plan: Box<Plan> = Box::new(move |_, _, _, objects| {
            let route = |n, mtu| Object::from(Route { dst: dst(n), via: Via::Blackhole, mtu });
            objects.extend([
                route(1, Some(1)),
                route(2, Some(2)),
                route(1, Some(3)),
                route(3, Some(4)),
            ]);
            Ok(())
        });
        let networks = ["10.1.0.0/16".parse::<Subnet>().unwrap()].into_iter().collect();
        let mut peers = Admission::new(
            AdmissionRules { networks, ..AdmissionRules::default() },
            vec![BackendPlan::new(None, plan)],
        );
        put(&mut peers, &lease("10.1.1.0-24", 1, 1, 1));
        let mtus = peers.objects().map(|object| match object {
            Object::Route(route) => (route.dst, route.mtu),
            other => panic!("{other}"),
        });
        assert_eq!(
            mtus.collect::<Vec<_>>(),
            [(dst(1), Some(1)), (dst(2), Some(2)), (dst(3), Some(4))]
        );
    }

    #[test]
    fn a_peer_that_left_leaves_only_its_slot() {
        let mut peers = peers(None);
        let one = lease("10.1.1.0-24", 1, 1, 1);
        let other = lease("10.1.2.0-24", 1, 2, 2);
        put(&mut peers, &one);
        let slot = peers.index.id(&one.subnets);
        let looked_up = Subnet::host([192, 0, 2, 1].into());
        assert!(peers.has_lookup_under(looked_up));
        peers.update([(one.subnets, None)].into_iter(), &not_direct);
        assert!(!peers.has_lookup_under(looked_up), "no plan uses the lookup any more");
        put(&mut peers, &other);
        assert!(slot.is_some() && peers.index.id(&other.subnets) == slot);
    }

    #[test]
    fn shared_public_addresses_are_advisories() {
        let mut peers = peers(None);
        peers.advisories = Advisories::new(&[IpAddr::from([192, 0, 2, 1])].into_iter().collect());
        put(&mut peers, &lease("10.1.1.0-24", 1, 1, 1));
        let own = "2 nodes share the public address 192.0.2.1, this one among them";
        let advisories = peers.advisories().keys().map(ToString::to_string);
        assert_eq!(advisories.collect::<Vec<_>>(), [own]);
        assert_eq!(peers.rejected().len(), 0, "several hosts may be behind one NAT address");
    }

    #[test]
    fn a_public_address_is_that_of_a_host_and_outside_the_leases_own_subnets() {
        let networks = ["10.1.0.0/16", "fd00:1::/48"].map(|net| net.parse::<Subnet>().unwrap());
        let rules = AdmissionRules {
            networks: networks.into_iter().collect(),
            ..AdmissionRules::default()
        };
        let accept = BackendPlan::new(None, Box::new(|_, _, _, _| Ok(())));
        let mut peers = Admission::new(rules, vec![accept]);
        let no_host = "is not a unicast host address";
        let inside = "lies inside its own subnet 10.1.2.0/24, whose addresses are for pods";
        let inside_six = "lies inside its own subnet fd00:1:0:2::/64, whose addresses are for pods";
        for (address, fault) in [
            ("0.0.0.0", no_host),
            ("127.0.0.1", no_host),
            ("224.0.0.1", no_host),
            ("255.255.255.255", no_host),
            ("::", no_host),
            ("::1", no_host),
            ("ff02::1", no_host),
            ("::ffff:192.0.2.2", no_host),
            ("10.1.2.9", inside),
            ("fd00:1:0:2::9", inside_six),
            // Hosts on one link need no other addresses.
            ("169.254.0.2", ""),
            ("fe80::2", ""),
            // Routes lead only to the subnets of leases, not to the whole pod network.
            ("10.1.3.9", ""),
            ("fd00:1:0:3::9", ""),
        ] {
            let public = [address.parse::<IpAddr>().unwrap()].into_iter().collect();
            let offer = Offer::new(public);
            let further = offer.clone().with_kind("further");
            let second = LeaseAttrs { others: [further].into(), ..LeaseAttrs::default() };
            for attrs in [LeaseAttrs::from(offer), second] {
                let usual = lease("10.1.2.0-24&fd00:1:0:2::-64", 1, 1, 1);
                let peer = Arc::new(Lease { attrs, ..Lease::clone(&usual) });
                put(&mut peers, &peer);
                let why = why(&peers, &peer);
                let names = format!("its public address {address} {fault}");
                assert_eq!(why, if fault.is_empty() { String::new() } else { names });
            }
        }
    }

    /// A lease with these public addresses.
    fn lease_at(key: &str, since: u64, public: &[&str]) -> Arc<Lease> {
        let public = public.iter().map(|address| address.parse::<IpAddr>().unwrap()).collect();
        let attrs = LeaseAttrs::from(Offer::new(public));
        Arc::new(Lease { attrs, ..Lease::clone(&lease(key, since, 1, 1)) })
    }

    /// An admission whose plan accepts every lease.
    fn accepting(own: Option<Arc<Lease>>) -> Admission {
        let networks = ["10.0.0.0/8", "fd00:1::/48"].map(|net| net.parse::<Subnet>().unwrap());
        let networks = networks.into_iter().collect();
        let rules = AdmissionRules { networks, own, ..AdmissionRules::default() };
        Admission::new(rules, vec![BackendPlan::new(None, Box::new(|_, _, _, _| Ok(())))])
    }

    #[test]
    fn no_public_address_is_inside_the_pod_network_that_this_node_is_outside_of() {
        let own = lease_at("10.1.9.0-24&fd00:1:0:9::-64", 9, &["192.0.2.9", "2001:db8::9"]);
        let mut peers = accepting(Some(own));
        let v6 = "2001:db8::2";
        for (public, says) in [
            (["192.0.2.2", v6], ""),
            // Several nodes may be behind one address of a NAT. A plan rejects an address that
            // this node has itself.
            (["192.0.2.9", v6], ""),
            (["10.1.9.7", v6], "inside this node's own lease 10.1.9.0-24&fd00:1:0:9::-64, whose"),
            (
                ["10.7.7.7", v6],
                "its public address 10.7.7.7 lies inside the pod network 10.0.0.0/8",
            ),
            (["192.0.2.2", "fd00:1:0:7::7"], "inside the pod network fd00:1::/48"),
        ] {
            let peer = lease_at("10.1.2.0-24&fd00:1:0:2::-64", 1, &public);
            put(&mut peers, &peer);
            let why = why(&peers, &peer);
            assert!(why.contains(says) && why.is_empty() == says.is_empty(), "{public:?}: {why}");
        }
    }

    /// As with Go flannel's example: Network 10.0.0.0/8, SubnetMin 10.10.0.0, hosts in 10.0.0.0/16.
    #[test]
    fn hosts_inside_the_pod_network_and_subnets_around_them_clash() {
        let mut peers = accepting(Some(lease_at("10.11.0.0-20", 5, &["10.0.0.1"])));
        let early = lease_at("10.12.0.0-20", 1, &["10.0.9.2"]);
        let late = lease_at("10.13.0.0-20", 8, &["10.0.7.3"]);
        let hijacker = lease_at("10.0.7.0-24", 6, &["10.0.0.4"]);
        let greedy = lease_at("10.0.9.0-24", 7, &["192.0.2.5"]);
        let ours = lease_at("10.0.0.0-24", 1, &["10.0.0.5"]);
        for lease in [&late, &greedy, &hijacker, &early, &ours] {
            put(&mut peers, lease);
        }
        assert_eq!(why(&peers, &early), "");
        assert_eq!(why(&peers, &hijacker), "", "nobody was there before");
        let inside = "its public address 10.0.7.3 lies inside the earlier lease 10.0.7.0-24 of \
                      10.0.0.4, whose addresses are for pods";
        assert_eq!(why(&peers, &late), inside);
        let contains = "it contains 10.0.9.2, a public address of the earlier lease 10.12.0.0-20 \
                        of 10.0.9.2";
        assert_eq!(why(&peers, &greedy), contains);
        assert_eq!(
            why(&peers, &ours),
            "its public address 10.0.0.5 lies inside its own subnet \
                                        10.0.0.0/24, whose addresses are for pods"
        );
        let around = lease_at("10.0.0.0-24", 1, &["10.0.1.5"]);
        put(&mut peers, &around);
        assert_eq!(why(&peers, &around), "it contains 10.0.0.1, this node's own public address");
        for gone in [&early, &hijacker] {
            peers.update([(gone.subnets, None)].into_iter(), &not_direct);
        }
        assert_eq!((why(&peers, &late), why(&peers, &greedy)), (String::new(), String::new()));
    }

    /// The cost of a lease does not grow with the number of leases that clash with it. If it did,
    /// this test would take hours.
    #[test]
    fn a_hundred_thousand_leases_that_all_clash_are_decided() {
        let mut peers = peers(None);
        let subnets = |n: u32| {
            let base = IpAddr::from((0x0a01_0000 | (n % 0x8000) << 1).to_be_bytes());
            let six = Subnet::new([0xfd00, 0, 0, n as u16, 0, 0, 0, 0].into(), 64);
            let four = Subnet::new(base, 31 - (n / 0x8000) as u8).unwrap();
            Subnets::new([Some(four), six].into_iter().flatten()).unwrap()
        };
        // All have one MAC address. Each has another public address, so each defines it otherwise.
        let of = |n: u32| {
            let mut lease = Arc::unwrap_or_clone(lease("10.1.1.0-24", u64::from(n) + 1, 1, 7));
            let public = IpAddr::from((0xc000_0000 | n).to_be_bytes());
            lease.attrs.preferred.public = [public].into_iter().collect();
            Arc::new(Lease { subnets: subnets(n), ..lease })
        };
        let leases: Vec<Arc<Lease>> = (0..100_000).map(of).collect();
        // The second half in slices, as an engine takes them in. The earliest is the last of the
        // first half.
        let (second, first) = leases.split_at(50_000);
        let put = |lease: &'_ Arc<Lease>| (lease.subnets, Some(Arc::clone(lease)));
        for slice in std::iter::once(first).chain(second.chunks(64)) {
            let slice: Vec<_> = slice.iter().rev().map(put).collect();
            peers.update(slice.iter().map(|(key, lease)| (*key, lease.as_ref())), &not_direct);
        }
        assert_eq!((peers.accepted(), peers.rejected().len()), (1, 99_999));
        assert_eq!(why(&peers, &leases[0]), "");
        let gone = leases.iter().take(99_999).map(|lease| (lease.subnets, None));
        peers.update(gone, &not_direct);
        assert_eq!((peers.accepted(), peers.objects().count()), (1, 2));
    }

    /// As above, with one IPv4 subnet for all, and the earliest lease last.
    #[test]
    fn a_hundred_thousand_leases_with_one_subnet_are_decided() {
        let mut peers = peers(None);
        let of = |n: u32| {
            let mut lease = Arc::unwrap_or_clone(lease("10.1.1.0-24", u64::from(n) + 1, 1, 7));
            let six = [0xfd00, 0, (n >> 16) as u16, n as u16, 0, 0, 0, 0];
            let subnets = lease.subnets.iter().chain(Subnet::new(six.into(), 64));
            lease.subnets = Subnets::new(subnets).unwrap();
            let public = IpAddr::from((0xc000_0000 | n).to_be_bytes());
            lease.attrs.preferred.public = [public].into_iter().collect();
            Arc::new(lease)
        };
        let leases: Vec<Arc<Lease>> = (0..100_000).map(of).collect();
        let (earliest, others) = leases.split_at(1);
        for slice in others.chunks(64).chain([earliest]) {
            let slice = slice.iter().map(|lease| (lease.subnets, Some(lease)));
            peers.update(slice, &not_direct);
        }
        assert_eq!((peers.accepted(), peers.rejected().len()), (1, 99_999));
        assert_eq!(why(&peers, &leases[0]), "");
    }

    #[test]
    fn the_work_of_one_update_grows_with_the_number_of_its_leases() {
        let work = |count: u32, subnet: &dyn Fn(u32) -> Subnet| {
            let of = |n: u32| {
                let mut lease = Arc::unwrap_or_clone(lease("10.1.1.0-24", u64::from(n) + 1, 1, 7));
                let six = Subnet::new([0xfd00, 0, 0, n as u16, 0, 0, 0, 0].into(), 64);
                lease.subnets = Subnets::new([subnet(n)].into_iter().chain(six)).unwrap();
                let public = IpAddr::from((0xc000_0000 | n).to_be_bytes());
                lease.attrs.preferred.public = [public].into_iter().collect();
                Arc::new(lease)
            };
            let mut peers = peers(None);
            let leases: Vec<_> = (0..count).map(of).collect();
            let all = leases.iter().rev().map(|lease| (lease.subnets, Some(lease)));
            peers.update(all, &not_direct);
            assert_eq!((peers.accepted(), why(&peers, &leases[0])), (1, String::new()));
            peers.update(leases.iter().map(|lease| (lease.subnets, None)), &not_direct);
            peers.index.reads.get()
        };
        let one = |_: u32| "10.1.2.0/24".parse().unwrap();
        let half_are_inside = |n: u32| match n % 2 {
            0 => "10.1.0.0/16".parse().unwrap(),
            _ => Subnet::new((0x0a01_0000 | n << 1).to_be_bytes().into(), 31).unwrap(),
        };
        for subnet in [&one as &dyn Fn(u32) -> Subnet, &half_are_inside] {
            let few = work(250, subnet);
            let many = work(2500, subnet);
            assert!(many < 15 * few, "{few} peers looked at for 250 leases, {many} for 2500");
        }
    }

    #[test]
    fn a_rejected_lease_has_no_advisories_of_its_plan() {
        let networks = ["10.1.0.0/16".parse::<Subnet>().unwrap()].into_iter().collect();
        let plan = |_: &Subnets, offer: &Offer, env: &Env<'_>, _: &mut Vec<Object>| {
            env.advise("one family is not usable");
            let usable = offer.public.v4 == Some([192, 0, 2, 1].into());
            usable.then_some(()).ok_or_else(|| Rejection::Rejected("no family is usable".into()))
        };
        let rules = AdmissionRules { networks, ..AdmissionRules::default() };
        let mut peers = Admission::new(rules, vec![BackendPlan::new(None, Box::new(plan))]);
        let good = lease("10.1.1.0-24", 1, 1, 1);
        let bad = lease("10.1.2.0-24", 2, 2, 2);
        [&good, &bad].into_iter().for_each(|lease| drop(put(&mut peers, lease)));
        assert_eq!(why(&peers, &bad), "no family is usable");
        let advisories: Vec<_> = peers.advisories().keys().map(ToString::to_string).collect();
        assert_eq!(advisories, ["the lease 10.1.1.0-24: one family is not usable"]);
    }

    /// A node with two backends, and a node with only the second one.
    #[test]
    fn all_nodes_accept_the_same_leases_whichever_offer_they_choose() {
        let networks: Dual<Subnet> =
            ["10.1.0.0/16".parse::<Subnet>().unwrap()].into_iter().collect();
        let backend_plan = |kind: &'static str, link: &'static str| {
            let plan = move |_: &Subnets, offer: &Offer, _: &Env<'_>, out: &mut Vec<Object>| {
                let mac = offer.data.v4.as_deref().and_then(|mac| mac.parse().ok());
                let mac = mac.ok_or_else(|| Rejection::Rejected("no MAC address".into()))?;
                let dst = [192, 0, 2, 1].into();
                out.push(Fdb { link: link.parse().unwrap(), mac, dst }.into());
                Ok(())
            };
            BackendPlan::new(Some(kind), Box::new(plan))
        };
        let offer = |kind: &'static str, mac: u8, public: u8| {
            Offer::new([IpAddr::from([192, 0, 2, public])].into_iter().collect())
                .with_kind(kind)
                .with_data(Dual { v4: Some(MacAddr::local([mac; 6]).to_string().into()), v6: None })
        };
        let both = |key, since, first: Offer, second: Offer| {
            let attrs = LeaseAttrs { preferred: first, others: [second].into() };
            Arc::new(Lease { attrs, ..Lease::clone(&lease(key, since, 1, 1)) })
        };
        let early = both("10.1.1.0-24", 1, offer("a", 1, 1), offer("b", 9, 1));
        let late = both("10.1.2.0-24", 2, offer("a", 2, 2), offer("b", 3, 2));
        let broken = both("10.1.3.0-24", 3, offer("x", 2, 3), offer("b", 4, 3));
        for (plans, link) in [
            (vec![backend_plan("a", "one"), backend_plan("b", "two")], "one"),
            (vec![backend_plan("b", "two")], "two"),
        ] {
            let rules = AdmissionRules { networks, ..AdmissionRules::default() };
            let mut peers = Admission::new(rules, plans);
            [&late, &early, &broken].iter().for_each(|lease| drop(put(&mut peers, lease)));
            assert_eq!(peers.rejected().len(), 0);
            let links: Vec<_> = peers.objects().map(|object| object.link().unwrap()).collect();
            assert_eq!(links[..2], [link.parse().unwrap(); 2], "the preferred plan");
            assert_eq!(links.len(), 3, "one offer of each peer: {links:?}");
            let fourth = both("10.1.4.0-24", 4, offer("a", 7, 4), offer("b", 9, 4));
            put(&mut peers, &fourth);
            assert_eq!(why(&peers, &fourth), "", "the same definition");
        }
    }

    /// The objects of a lease that no lease of this node contradicts.
    fn planned(lease: &Lease, own: Option<Subnets>) -> Option<Vec<Object>> {
        let network: Subnet = "10.1.0.0/16".parse().unwrap();
        let mut objects = Vec::new();
        let env = Env::new(&not_direct);
        plan(&lease.subnets, &lease.attrs.preferred, &env, &mut objects).ok()?;
        let inside = lease.subnets.iter().all(|s| network.covers(&s));
        let ours = own.is_some_and(|own| own.overlaps(&lease.subnets));
        (inside && !ours).then_some(objects)
    }

    /// The definition of acceptance, without any index.
    fn model(leases: &LeaseSet, own: Option<Subnets>) -> BTreeSet<Subnets> {
        let mut proven = BTreeSet::new();
        for lease in leases.iter() {
            let offer = &lease.attrs.preferred;
            let mut objects = planned(lease, own).unwrap_or_default();
            objects.retain(|object| is_proven(offer, object));
            proven.extend(objects.iter().map(Object::key));
        }
        let is_foreign = |lease: &Lease, object: &Object| {
            !is_proven(&lease.attrs.preferred, object) && proven.contains(&object.key())
        };
        let mut sorted: Vec<_> = leases.iter().cloned().collect();
        sorted.sort_by_key(|lease| lease.precedence());
        let mut accepted: Vec<(Arc<Lease>, Vec<Object>)> = Vec::new();
        for lease in sorted {
            let Some(objects) = planned(&lease, own) else { continue };
            let clash = |other: &(Arc<Lease>, Vec<Object>)| {
                let contradicts = |a: &Object| other.1.iter().any(|b| a.key() == b.key() && a != b);
                other.0.subnets.overlaps(&lease.subnets) || objects.iter().any(contradicts)
            };
            let belongs_to_another = objects.iter().any(|object| is_foreign(&lease, object));
            if !belongs_to_another && !accepted.iter().any(clash) {
                accepted.push((lease, objects));
            }
        }
        accepted.into_iter().map(|(lease, _)| lease.subnets).collect()
    }

    proptest! {
        #[test]
        fn acceptance_does_not_depend_on_the_order_of_events(
            steps in prop::collection::vec(
                (
                    0..12u8, 23..27u8, 0..4u64, 0..5u8, 0..5u8, prop::bool::weighted(0.3),
                    any::<bool>(), any::<bool>(),
                ),
                1..60,
            ),
        ) {
            let own = "10.1.3.0-25";
            let mut peers = peers(Some(own));
            let mut leases = LeaseSet::default();
            let mut objects = BTreeMap::new();
            let mut old = leases.clone();
            for (n, len, since, public, mac, is_signed, there, is_last) in steps {
                let base = Subnet::new(IpAddr::from([10, 1, n / 2, (n % 2) * 128]), len).unwrap();
                let mut lease = lease(&format!("{}-{len}", base.base()), since, public, mac);
                if mac > 2 {
                    // The MAC address of the node with this public address, perhaps another one.
                    let mac = MacAddr::derived_from(IpAddr::from([192, 0, 2, mac]));
                    let data = &mut Arc::make_mut(&mut lease).attrs.preferred.data;
                    data.v4 = Some(format!("\"{mac}\"").into());
                }
                if is_signed {
                    let data = &mut Arc::make_mut(&mut lease).attrs.preferred.data;
                    data.v6 = Some(SIGNED.into());
                }
                if Some(lease.subnets) == own_of(&peers) { continue; }
                if there { leases.insert(lease); } else { leases.remove(&lease.subnets); }
                // One update may have several changes.
                if !is_last { continue; }
                let before = std::mem::replace(&mut old, leases.clone());
                let changed = peers.update(leases.changes_since(&before), &not_direct);
                for delta in all(&peers, changed) {
                    prop_assert_eq!(objects.get(&delta.key), delta.before.as_ref());
                    match delta.after {
                        Some(object) => drop(objects.insert(delta.key, object)),
                        None => drop(objects.remove(&delta.key)),
                    }
                }
                let accepted: BTreeSet<Subnets> =
                    leases
                        .iter()
                        .map(|lease| lease.subnets)
                        .filter(|subnets| !peers.rejected().contains_key(subnets))
                        .collect();
                prop_assert_eq!(accepted, model(&leases, own_of(&peers)));
                let defined: BTreeMap<Key, Object> =
                    peers.objects().map(|object| (object.key(), object.clone())).collect();
                prop_assert_eq!(&defined, &objects);
            }
        }
    }
}
