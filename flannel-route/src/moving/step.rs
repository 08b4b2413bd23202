//! The next step of a node.

use std::collections::BTreeSet;
use std::sync::Arc;

use flannel_core::lease::{Origin, View};
use flannel_core::status::{Rejection, SortedMap};
use flannel_core::{Lease, Subnet, Subnets};

use super::{BackendUse, NodeBackends};

/// The observations of this node on which its next step depends.
#[derive(Debug, Clone, Copy)]
pub struct Seen<'a> {
    /// The devices and addresses of the target are in the kernel.
    pub in_place: bool,
    /// The leases of all nodes. It must not be older than one that was seen before.
    pub view: &'a View,
    /// This node's subnets.
    pub own: Subnets,
    /// The tunnels of the target; `None`: packets pass without a handshake.
    pub tunnels: Option<&'a Tunnels>,
    /// The leases that this node rejects. It reaches their nodes by no backend.
    pub rejected: &'a SortedMap<Subnets, Rejection>,
}

/// The tunnels to peers through which packets pass only after a handshake, by the subnets of peers.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Tunnels {
    /// Those with a completed handshake, at any time since the peer was added.
    pub open: BTreeSet<Subnet>,
    /// Those without.
    pub waiting: BTreeSet<Subnet>,
}

impl Tunnels {
    /// Whether all tunnels to the node with this lease are open. It has one or more.
    fn reach(&self, lease: &Lease) -> bool {
        let has_one_in = |tunnels: &BTreeSet<Subnet>| {
            lease.subnets.iter().any(|subnet| tunnels.contains(&subnet))
        };
        has_one_in(&self.open) && !has_one_in(&self.waiting)
    }
}

/// The progress of a move.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Step {
    /// The backends to run and to offer now; or the event that the node waits for.
    pub next: Result<NodeBackends, Wait>,
    /// The number of leases in the view.
    pub leases: usize,
    /// The number of those that offer the target.
    pub offering: usize,
}

/// The event that a node waits for.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Wait {
    /// The devices of the target are in the kernel.
    Devices,
    /// The store answers, and returns this node's lease as it was published.
    Store,
    /// These leases offer the target.
    Offers(Blockers),
    /// These leases prefer the target.
    Preference(Blockers),
    /// The tunnels to the nodes with these leases have completed a handshake.
    Handshakes(Blockers),
    /// These leases no longer offer the backends that this node has withdrawn.
    Withdrawal(Blockers),
    /// No peer has sent a packet to the devices of the withdrawn backends for a while.
    Silence,
}

/// The leases for which a node waits.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Blockers {
    /// Their number.
    pub total: usize,
    /// The first ones, at most [`Blockers::LISTED`].
    pub first: Vec<Arc<Lease>>,
}

impl Blockers {
    /// The number of leases that are listed.
    pub const LISTED: usize = 3;

    fn of<'a>(leases: impl Iterator<Item = &'a Arc<Lease>>) -> Option<Self> {
        let mut blockers = Self::default();
        for lease in leases {
            blockers.total += 1;
            if blockers.first.len() < Self::LISTED {
                blockers.first.push(Arc::clone(lease));
            }
        }
        (blockers.total > 0).then_some(blockers)
    }
}

impl NodeBackends {
    /// The next step towards the backend with the lease type `target`, which must be one of
    /// them. `None` if the node runs only one backend.
    ///
    /// A step needs a live view that has this node's lease as it was published. So of two nodes
    /// that step at the same time, one has seen the lease of the other, and they keep a common
    /// offer. Costs O(leases) during a move, O(1) without one.
    pub fn step(&self, target: &str, seen: &Seen<'_>) -> Option<Step> {
        let leases = || seen.view.leases.iter().filter(|lease| is_reachable(lease));
        self.is_moving().then(|| Step {
            next: self.advance(target, seen),
            leases: leases().count(),
            offering: leases().filter(|lease| offers(lease, target)).count(),
        })
    }

    fn advance(&self, target: &str, seen: &Seen<'_>) -> Result<Self, Wait> {
        let leases = || seen.view.leases.iter().filter(|lease| is_reachable(lease));
        let none_of = |blockers: Option<Blockers>, wait: fn(Blockers) -> Wait| {
            blockers.map_or(Ok(()), |blockers| Err(wait(blockers)))
        };
        let is_target = |usage: &BackendUse| usage.lease_type == target;
        let is_offered = self.offered().any(is_target);
        if !seen.in_place {
            return Err(Wait::Devices);
        }
        if !self.is_published(seen) {
            return Err(Wait::Store);
        }
        if !is_offered {
            return Ok(self.offering(|usage| usage.offered || is_target(usage)));
        }
        // A node that came back late may offer only what this one has withdrawn.
        let is_common = |lease: &Lease| self.offered().any(|it| offers(lease, &it.lease_type));
        let stranded = || leases().filter(|lease| !is_common(lease));
        let is_needed = |usage: &BackendUse| stranded().any(|it| offers(it, &usage.lease_type));
        if self.iter().any(is_needed) {
            return Ok(self.offering(|usage| usage.offered || is_needed(usage)));
        }
        if !self.offered().next().is_some_and(is_target) {
            let lacking = leases().filter(|lease| !offers(lease, target));
            none_of(Blockers::of(lacking), Wait::Offers)?;
            let mut next = self.clone();
            next.0.sort_by_key(|usage| (!usage.offered, !is_target(usage)));
            return Ok(next);
        }
        if self.offered().count() > 1 {
            let others = leases().filter(|lease| lease.attrs.preferred.kind != target);
            none_of(Blockers::of(others), Wait::Preference)?;
            // Without a handshake, packets between both nodes still take an old backend. The offer
            // is of no use to a node that has withdrawn its own.
            let is_old = |lease: &Lease| {
                self.offered().any(|it| !is_target(it) && offers(lease, &it.lease_type))
            };
            let is_closed = |lease: &&Arc<Lease>| {
                let closed = seen.tunnels.is_some_and(|tunnels| !tunnels.reach(lease));
                let is_peer =
                    lease.subnets != seen.own && !seen.rejected.contains_key(&lease.subnets);
                closed && is_peer && is_old(lease)
            };
            none_of(Blockers::of(leases().filter(is_closed)), Wait::Handshakes)?;
            return Ok(self.offering(is_target));
        }
        let withdrawn = |lease: &&Arc<Lease>| {
            self.iter().any(|usage| !usage.offered && offers(lease, &usage.lease_type))
        };
        none_of(Blockers::of(leases().filter(withdrawn)), Wait::Withdrawal)?;
        Err(Wait::Silence)
    }

    /// Whether the view is live, and has this node's lease as it was published.
    fn is_published(&self, seen: &Seen<'_>) -> bool {
        let own = seen.view.leases.get(&seen.own);
        matches!(seen.view.origin, Origin::Live { .. })
            && own.is_some_and(|own| {
                let published = own.attrs.offers().map(|offer| &*offer.kind);
                published.eq(self.offered().map(|usage| usage.lease_type.as_str()))
            })
    }

    /// These backends, of which the given ones are offered.
    fn offering(&self, offered: impl Fn(&BackendUse) -> bool) -> Self {
        let mut next = self.clone();
        next.0.iter_mut().for_each(|usage| usage.offered = offered(usage));
        next.sort();
        next
    }
}

/// Whether peers can send packets to the node. A reservation for a future node has no address.
fn is_reachable(lease: &Lease) -> bool {
    lease.attrs.offers().any(|offer| !offer.public.is_empty())
}

pub(super) fn offers(lease: &Lease, kind: &str) -> bool {
    lease.attrs.offers().any(|offer| offer.kind == kind)
}
