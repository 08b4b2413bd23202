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
    /// The tunnels of the target, or `None` if packets pass without a handshake.
    pub tunnels: Option<&'a Tunnels>,
    /// The leases that this node rejects. It reaches their nodes by no backend.
    pub rejected: &'a SortedMap<Subnets, Rejection>,
}

impl<'a> Seen<'a> {
    /// The leases of all nodes that peers can send packets to.
    fn leases(&self) -> impl Iterator<Item = &'a Arc<Lease>> {
        self.view.leases.iter().filter(|lease| is_reachable(lease))
    }

    /// Returns the `wait` for the leases for which `blocks` returns true, if there are any.
    fn wait_for(
        &self,
        wait: fn(Blockers) -> AwaitedEvent,
        blocks: impl Fn(&Lease) -> bool,
    ) -> Result<(), AwaitedEvent> {
        match Blockers::of(self.leases().filter(|lease| blocks(lease))) {
            Some(blockers) => Err(wait(blockers)),
            None => Ok(()),
        }
    }
}

/// The tunnels to peers through which packets pass only after a handshake, by the subnets of peers.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Tunnels {
    /// The tunnels that have completed a handshake at any time since the peer was added.
    pub open: BTreeSet<Subnet>,
    /// The tunnels that have not completed a handshake.
    pub waiting: BTreeSet<Subnet>,
}

impl Tunnels {
    /// Whether there is a tunnel to the node with this lease, and all tunnels to it are open.
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
    /// The backends to run and to offer now, or the event that the node waits for.
    pub next: Result<NodeBackends, AwaitedEvent>,
    /// The number of leases in the view, without reservations for future nodes.
    pub leases: usize,
    /// The number of these leases that offer the target.
    pub offering: usize,
}

/// The event that a node waits for.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum AwaitedEvent {
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
    /// The number of leases.
    pub total: usize,
    /// The first leases, at most [`Blockers::LISTED`].
    pub first: Vec<Arc<Lease>>,
}

impl Blockers {
    /// The largest number of leases that are listed.
    pub const LISTED: usize = 3;

    /// These leases, or `None` if there are none.
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
        self.is_moving().then(|| Step {
            next: self.advance(target, seen),
            leases: seen.leases().count(),
            offering: seen.leases().filter(|lease| offers(lease, target)).count(),
        })
    }

    fn advance(&self, target: &str, seen: &Seen<'_>) -> Result<Self, AwaitedEvent> {
        let is_target = |usage: &BackendUse| usage.lease_type == target;
        if !seen.in_place {
            return Err(AwaitedEvent::Devices);
        }
        if !self.is_published(seen) {
            return Err(AwaitedEvent::Store);
        }
        if !self.offered().any(is_target) {
            return Ok(self.offering(|usage| usage.offered || is_target(usage)));
        }
        if let Some(next) = self.offering_to_stranded(seen) {
            return Ok(next);
        }
        if !self.offered().next().is_some_and(is_target) {
            seen.wait_for(AwaitedEvent::Offers, |lease| !offers(lease, target))?;
            let mut next = self.clone();
            next.0.sort_by_key(|usage| (!usage.offered, !is_target(usage)));
            return Ok(next);
        }
        if self.offered().count() > 1 {
            seen.wait_for(AwaitedEvent::Preference, |lease| lease.attrs.preferred.kind != target)?;
            seen.wait_for(AwaitedEvent::Handshakes, |lease| {
                self.needs_handshake(target, lease, seen)
            })?;
            return Ok(self.offering(is_target));
        }
        seen.wait_for(AwaitedEvent::Withdrawal, |lease| {
            self.iter().any(|usage| !usage.offered && offers(lease, &usage.lease_type))
        })?;
        Err(AwaitedEvent::Silence)
    }

    /// These backends, with offers again that a node without a common offer needs. Returns `None`
    /// if all nodes have a common offer with this one. A node that came back late may offer only
    /// what this node has withdrawn.
    fn offering_to_stranded(&self, seen: &Seen<'_>) -> Option<Self> {
        let mut stranded = Vec::new();
        for lease in seen.leases() {
            if !self.offered().any(|usage| offers(lease, &usage.lease_type)) {
                stranded.push(lease);
            }
        }
        let is_needed =
            |usage: &BackendUse| stranded.iter().any(|lease| offers(lease, &usage.lease_type));
        let needs_more = self.iter().any(is_needed);
        needs_more.then(|| self.offering(|usage| usage.offered || is_needed(usage)))
    }

    /// Whether packets between this node and the node with this lease still take an old backend,
    /// because the target has not completed a handshake. A node that does not offer an old backend
    /// any more does not use the old offers of this node.
    fn needs_handshake(&self, target: &str, lease: &Lease, seen: &Seen<'_>) -> bool {
        let is_closed = seen.tunnels.is_some_and(|tunnels| !tunnels.reach(lease));
        let is_peer = lease.subnets != seen.own && !seen.rejected.contains_key(&lease.subnets);
        let mut old = self.offered().filter(|usage| usage.lease_type != target);
        is_closed && is_peer && old.any(|usage| offers(lease, &usage.lease_type))
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

    /// These backends. A backend is offered if `offered` returns true for it.
    fn offering(&self, offered: impl Fn(&BackendUse) -> bool) -> Self {
        let mut next = self.clone();
        next.0.iter_mut().for_each(|usage| usage.offered = offered(usage));
        next.sort();
        next
    }
}

/// Whether peers can send packets to the node with this lease. A reservation for a future node does
/// not have an address.
fn is_reachable(lease: &Lease) -> bool {
    lease.attrs.offers().any(|offer| !offer.public.is_empty())
}

/// Whether a lease has an offer of this type.
pub(super) fn offers(lease: &Lease, kind: &str) -> bool {
    lease.attrs.offers().any(|offer| offer.kind == kind)
}
