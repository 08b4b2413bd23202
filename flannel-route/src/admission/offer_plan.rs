//! Runs plans on the offers of a lease.

use std::collections::BTreeSet;
use std::sync::Arc;

use flannel_core::backend::{Env, Plan};
use flannel_core::lease::{LeaseAttrs, Offer};
use flannel_core::object::{Key, Object};
use flannel_core::status::Rejection;
use flannel_core::{Subnet, Subnets};
use foldhash::HashSet;

/// The subnets of peers with which an encrypted tunnel has completed a handshake, at any time since
/// the peer was added.
pub type Handshakes = Arc<BTreeSet<Subnet>>;

/// The plan for the leases of one backend type.
pub struct OfferPlan {
    lease_type: Option<&'static str>,
    plan: Box<Plan>,
    handshakes: bool,
}

/// The objects of one lease.
#[derive(Debug, Default)]
pub(crate) struct Planned {
    /// First the objects of the chosen offer, then those of the other offers that a plan accepts.
    pub(crate) objects: Vec<Object>,
    /// The number of objects that the kernel gets. The others are claims too: all nodes must accept
    /// the same leases, although they may choose other offers.
    pub(crate) chosen: usize,
}

impl Planned {
    /// Chooses the WireGuard peers from the `n`th object on too: without them, this node would not
    /// accept the packets of a peer that chooses another offer than this node.
    fn choose_peers(&mut self, n: usize) {
        let new = self.objects.split_off(n);
        let claims = self.objects.split_off(self.chosen);
        let is_peer = |object: &Object| matches!(object, Object::Peer(_));
        let (peers, others): (Vec<_>, Vec<_>) = new.into_iter().partition(is_peer);
        self.objects.extend(peers);
        self.chosen = self.objects.len();
        self.objects.extend(claims.into_iter().chain(others));
    }
}

impl OfferPlan {
    /// A plan for offers of `lease_type`; `None`: for every offer.
    pub fn new(lease_type: Option<&'static str>, plan: Box<Plan>) -> Self {
        Self { lease_type, plan, handshakes: false }
    }

    /// The same plan. With `needed`, packets to a peer pass only after a handshake
    /// ([`Blueprint::handshakes`](flannel_core::backend::Blueprint::handshakes)).
    #[must_use]
    pub fn with_handshakes(self, needed: bool) -> Self {
        Self { handshakes: needed, ..self }
    }

    /// Runs every plan on the offers that it understands. The first offer that a plan accepts is
    /// the chosen one. Before the handshake that it needs, the next one is chosen too.
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
        let (mut planned, mut rejected) = (Planned::default(), None);
        let (mut accepted, mut more) = (false, true);
        let mut keys = HashSet::default();
        for plan in plans {
            let understands =
                |offer: &&Offer| plan.lease_type.is_none_or(|kind| kind == offer.kind);
            for offer in attrs.offers().filter(understands) {
                let before = planned.objects.len();
                match (plan.plan)(subnets, offer, env, &mut planned.objects) {
                    Ok(()) => {
                        let waits = plan.handshakes && !is_done(&planned.objects[before..], done);
                        keep_first_of_each_key(&mut planned.objects, before, &mut keys);
                        accepted = true;
                        if more {
                            planned.chosen = planned.objects.len();
                        } else {
                            planned.choose_peers(before);
                        }
                        more &= waits;
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
        Err(rejected.unwrap_or_else(|| {
            let ours = plans.iter().filter_map(|plan| plan.lease_type);
            let ours: Vec<_> = ours.map(shown).collect();
            let theirs = shown(&attrs.preferred.kind);
            Rejection::Rejected(format!(
                "its backend type is {theirs}, this node's is {}",
                ours.join(" or ")
            ))
        }))
    }
}

/// A backend type as text. Leases of flannel's `udp` and `alloc` have none.
fn shown(kind: &str) -> String {
    if kind.is_empty() { "empty (udp or alloc)".to_owned() } else { format!("{kind:?}") }
}

/// Whether the handshake with each peer of a device has completed.
fn is_done(objects: &[Object], done: &BTreeSet<Subnet>) -> bool {
    objects.iter().all(|object| match object {
        Object::Peer(peer) => peer.attributes.allowed.values().all(|subnet| done.contains(subnet)),
        _ => true,
    })
}

/// Keeps the first of several objects with one key. `keys` are those of the objects before the
/// `n`th.
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
    fn plans() -> [OfferPlan; 2] {
        let encrypted = |_: &Subnets, _: &Offer, _: &Env<'_>, out: &mut Vec<Object>| {
            let allowed = Dual { v4: "10.1.7.0/24".parse().ok(), v6: None };
            let endpoint = ([192, 0, 2, 7], 51820).into();
            let attributes = PeerAttributes { endpoint, allowed, psk: None, keepalive: 0 };
            let (link, key) = ("flannel-wg".parse().unwrap(), PublicKey([7; 32]));
            out.push(Peer { link, key, attributes: Box::new(attributes) }.into());
            Ok(())
        };
        let plain = |subnets: &Subnets, _: &Offer, _: &Env<'_>, out: &mut Vec<Object>| {
            let via = Via::Link("flannel.1".parse().unwrap());
            out.extend(subnets.iter().map(|dst| Object::from(Route { dst, via, mtu: None })));
            Ok(())
        };
        [
            OfferPlan::new(Some("wireguard"), Box::new(encrypted)).with_handshakes(true),
            OfferPlan::new(Some("vxlan"), Box::new(plain)),
        ]
    }

    /// The kinds of the objects that the kernel gets, for a lease with these offers.
    fn chosen(plans: &[OfferPlan], offers: &[&'static str], done: &[&str]) -> Vec<&'static str> {
        let offer = |kind: &&'static str| Offer::default().with_kind(*kind);
        let mut all = offers.iter().map(offer);
        let preferred = all.next().unwrap();
        let attrs = LeaseAttrs { preferred, others: all.collect() };
        let done = done.iter().map(|subnet| subnet.parse().unwrap()).collect();
        let env = Env::new(&|_| None);
        let planned = OfferPlan::run(plans, &subnets(), &attrs, &done, &env).unwrap();
        assert_eq!(planned.objects.len(), offers.len(), "all are claims");
        planned.objects[..planned.chosen].iter().map(|object| object.kind().name()).collect()
    }

    #[test]
    fn a_peer_is_reached_by_another_backend_until_the_handshake() {
        let (first, mut second) = (plans(), plans());
        second.reverse();
        let (both, own) = (["vxlan", "wireguard"], ["10.1.7.0/24"]);
        assert_eq!(chosen(&first, &both, &[]), ["peer", "route"]);
        assert_eq!(chosen(&first, &both, &["10.1.8.0/24"]), ["peer", "route"], "of another peer");
        assert_eq!(chosen(&first, &both, &own), ["peer"]);
        assert_eq!(chosen(&first, &["wireguard"], &[]), ["peer"], "there is no other");
        assert_eq!(chosen(&first, &["vxlan"], &own), ["route"]);
        assert_eq!(chosen(&second, &both, &[]), ["route", "peer"], "it sends by the other one");
    }
}
