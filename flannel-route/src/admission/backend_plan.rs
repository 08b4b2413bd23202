//! Runs plans on the offers of a lease.

use std::collections::BTreeSet;
use std::sync::Arc;

use flannel_core::backend::{Env, Plan, Proof};
use flannel_core::lease::{LeaseAttrs, Offer};
use flannel_core::object::{Key, Object};
use flannel_core::status::Rejection;
use flannel_core::{Lease, Subnet, Subnets};
use foldhash::HashSet;

/// The subnets of peers with which an encrypted tunnel has completed a handshake, at any time since
/// the peer was added.
pub type Handshakes = Arc<BTreeSet<Subnet>>;

/// The plan of a backend, and the offers that it understands.
pub struct BackendPlan {
    lease_type: Option<&'static str>,
    plan: Box<Plan>,
    proof: Option<Box<Proof>>,
    handshakes: bool,
}

/// The objects of one lease.
#[derive(Debug, Default)]
pub(crate) struct Planned {
    /// First the objects of the chosen offer, then the objects of the other accepted offers.
    pub(crate) objects: Vec<Object>,
    /// The number of objects that the kernel gets. The other objects only decide whether the lease
    /// clashes with others: all nodes must accept the same leases, although they may choose
    /// different offers.
    pub(crate) chosen: usize,
}

impl Planned {
    /// Also chooses the WireGuard peers from the `n`th object on. Without them, this node would not
    /// accept the packets of a peer that chooses another offer than this node.
    fn choose_peers(&mut self, n: usize) {
        let new = self.objects.split_off(n);
        let mut not_chosen = self.objects.split_off(self.chosen);
        for object in new {
            if matches!(object, Object::Peer(_)) {
                self.objects.push(object);
            } else {
                not_chosen.push(object);
            }
        }
        self.chosen = self.objects.len();
        self.objects.append(&mut not_chosen);
    }
}

impl BackendPlan {
    /// A plan for the offers of `lease_type`, or for every offer if it is `None`.
    pub fn new(lease_type: Option<&'static str>, plan: Box<Plan>) -> Self {
        Self { lease_type, plan, proof: None, handshakes: false }
    }

    /// Sets whether packets to a peer pass only after a handshake
    /// ([`Blueprint::handshakes`](flannel_core::backend::Blueprint::handshakes)).
    #[must_use]
    pub fn with_handshakes(self, needed: bool) -> Self {
        Self { handshakes: needed, ..self }
    }

    /// Sets which objects of the plan a lease proves to be its own
    /// ([`Blueprint::proof`](flannel_core::backend::Blueprint::proof)).
    #[must_use]
    pub fn with_proof(self, proof: Option<Box<Proof>>) -> Self {
        Self { proof, ..self }
    }

    /// Whether a lease proves that an object is its own, with one of the offers that the plans
    /// understand.
    pub(crate) fn is_proven(plans: &[Self], lease: &Lease, object: &Object) -> bool {
        plans.iter().any(|plan| {
            let Some(proof) = &plan.proof else { return false };
            let mut offers = lease.attrs.offers().filter(|offer| plan.understands(offer));
            offers.any(|offer| proof(&lease.subnets, offer, object))
        })
    }

    /// Runs every plan on the offers that it understands. The first offer that a plan accepts is
    /// the chosen one. If it needs a handshake that is not in `done`, the next one is chosen too.
    ///
    /// # Errors
    /// No plan accepts an offer.
    pub(crate) fn run(
        plans: &[Self],
        subnets: &Subnets,
        attrs: &LeaseAttrs,
        done: &BTreeSet<Subnet>,
        env: &Env<'_>,
    ) -> Result<Planned, Rejection> {
        let mut planned = Planned::default();
        let mut rejected = None;
        let mut accepted = false;
        let mut chooses = true;
        let mut keys = HashSet::default();
        for plan in plans {
            for offer in attrs.offers().filter(|offer| plan.understands(offer)) {
                let before = planned.objects.len();
                match (plan.plan)(subnets, offer, env, &mut planned.objects) {
                    Ok(()) => {
                        let waits = plan.handshakes && !is_done(&planned.objects[before..], done);
                        keep_first_of_each_key(&mut planned.objects, before, &mut keys);
                        accepted = true;
                        if chooses {
                            planned.chosen = planned.objects.len();
                        } else {
                            planned.choose_peers(before);
                        }
                        chooses &= waits;
                    }
                    Err(error) => {
                        planned.objects.truncate(before);
                        rejected.get_or_insert(error);
                    }
                }
            }
        }
        if accepted {
            return Ok(planned);
        }
        Err(rejected.unwrap_or_else(|| not_understood(plans, attrs)))
    }

    fn understands(&self, offer: &Offer) -> bool {
        self.lease_type.is_none_or(|kind| kind == offer.kind)
    }
}

/// The rejection of a lease whose offers no plan understands.
fn not_understood(plans: &[BackendPlan], attrs: &LeaseAttrs) -> Rejection {
    let ours: Vec<_> = plans.iter().filter_map(|plan| plan.lease_type).map(shown).collect();
    Rejection::Rejected(format!(
        "its backend type is {}, this node's is {}",
        shown(&attrs.preferred.kind),
        ours.join(" or ")
    ))
}

/// A backend type as text. Leases of flannel's `udp` and `alloc` have none.
fn shown(kind: &str) -> String {
    if kind.is_empty() { "empty (udp or alloc)".to_owned() } else { format!("{kind:?}") }
}

/// Whether the handshakes with all WireGuard peers in `objects` are `done`.
fn is_done(objects: &[Object], done: &BTreeSet<Subnet>) -> bool {
    objects.iter().all(|object| match object {
        Object::Peer(peer) => peer.attributes.allowed.values().all(|subnet| done.contains(subnet)),
        _ => true,
    })
}

/// Keeps the first of several objects with one key. `keys` has the keys of the objects before the
/// `n`th, and gets the keys of the others.
fn keep_first_of_each_key(objects: &mut Vec<Object>, n: usize, keys: &mut HashSet<Key>) {
    let mut at = 0;
    objects.retain(|object| {
        at += 1;
        at <= n || keys.insert(object.key())
    });
}

#[cfg(test)]
mod tests {
    use flannel_core::address::Dual;
    use flannel_core::object::{Peer, PeerAttributes, PublicKey, Route, Via};

    use super::*;

    fn subnets() -> Subnets {
        "10.1.7.0-24".parse().unwrap()
    }

    /// An encrypted tunnel, and a backend with a route to each peer.
    fn plans() -> [BackendPlan; 2] {
        let encrypted = |_: &Subnets, _: &Offer, _: &Env<'_>, out: &mut Vec<Object>| {
            let allowed = Dual { v4: "10.1.7.0/24".parse().ok(), v6: None };
            let endpoint = ([192, 0, 2, 7], 51820).into();
            let attributes = PeerAttributes { endpoint, allowed, psk: None, keepalive: 0 };
            let link = "flannel-wg".parse().unwrap();
            let key = PublicKey([7; 32]);
            out.push(Peer { link, key, attributes: Box::new(attributes) }.into());
            Ok(())
        };
        let plain = |subnets: &Subnets, _: &Offer, _: &Env<'_>, out: &mut Vec<Object>| {
            let via = Via::Link("flannel.1".parse().unwrap());
            out.extend(subnets.iter().map(|dst| Object::from(Route { dst, via, mtu: None })));
            Ok(())
        };
        [
            BackendPlan::new(Some("wireguard"), Box::new(encrypted)).with_handshakes(true),
            BackendPlan::new(Some("vxlan"), Box::new(plain)),
        ]
    }

    /// The kinds of the objects that the kernel gets, for a lease with these offers.
    fn chosen(plans: &[BackendPlan], offers: &[&'static str], done: &[&str]) -> Vec<&'static str> {
        let offer = |kind: &&'static str| Offer::default().with_kind(*kind);
        let mut all = offers.iter().map(offer);
        let preferred = all.next().unwrap();
        let attrs = LeaseAttrs { preferred, others: all.collect() };
        let done = done.iter().map(|subnet| subnet.parse().unwrap()).collect();
        let env = Env::new(&|_| None);
        let planned = BackendPlan::run(plans, &subnets(), &attrs, &done, &env).unwrap();
        assert_eq!(planned.objects.len(), offers.len(), "also of the offers that are not chosen");
        planned.objects[..planned.chosen].iter().map(|object| object.kind().name()).collect()
    }

    #[test]
    fn a_peer_is_reached_by_another_backend_until_the_handshake() {
        let first = plans();
        let mut second = plans();
        second.reverse();
        let both = ["vxlan", "wireguard"];
        let own = ["10.1.7.0/24"];
        assert_eq!(chosen(&first, &both, &[]), ["peer", "route"]);
        assert_eq!(chosen(&first, &both, &["10.1.8.0/24"]), ["peer", "route"], "of another peer");
        assert_eq!(chosen(&first, &both, &own), ["peer"]);
        assert_eq!(chosen(&first, &["wireguard"], &[]), ["peer"], "there is no other");
        assert_eq!(chosen(&first, &["vxlan"], &own), ["route"]);
        assert_eq!(chosen(&second, &both, &[]), ["route", "peer"], "it sends by the other one");
    }
}
