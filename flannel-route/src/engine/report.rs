//! Reports: the status, the peers whose objects are missing, and the explanation of one peer.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use super::{Cause, Engine, Row};
use crate::admission::RouteLookups;
use flannel_core::object::{Key, Object};
use flannel_core::status::{Explanation, ObjectState, Status, Wait, Waiting};
use flannel_core::{Kernel, Subnets};

impl Engine {
    pub(crate) fn is_failing(&self) -> bool {
        !self.table.failures().is_empty()
            || self.survey.error.is_some()
            || self.stale_lookups.error().is_some()
    }

    /// The status. Its cost does not grow with the number of peers.
    pub(crate) fn status(&self) -> Status {
        let peers = &self.desired.peers;
        let mut counts = self.desired.counts.clone();
        for object in self.desired.base.iter() {
            *counts.entry(object.kind()).or_default() += 1;
        }
        counts.retain(|_, count| *count > 0);
        let mut status = self.stats.0.clone();
        status.settled = !self.is_unsettled() && !self.table.has_started();
        status.in_sync = self.live && status.settled && !self.is_failing();
        status.own_in_place = self.is_own_in_place();
        status.live = self.live;
        status.leases = self.leases.clone();
        status.peers = peers.accepted();
        status.objects = counts.values().sum();
        status.by_kind = counts;
        status.rejected = peers.rejected().clone();
        status.failing = self.table.failures().clone();
        let error = self.survey.error.as_ref().or_else(|| self.stale_lookups.error());
        status.kernel_error = error.cloned();
        status.advisories = peers.advisories().clone();
        status
    }

    /// Whether the kernel has the node's own objects, except objects that are put last: pods can
    /// use the network before it refuses the packets of others.
    fn is_own_in_place(&self) -> bool {
        let mut keys = self.desired.base.iter().map(Object::key);
        !self.survey.is_everything_unread()
            && keys.all(|key| self.desired.last.contains(&key) || self.table.get(&key).is_none())
    }

    /// The peers whose objects are not all in the kernel yet, with the reason. The cost grows with
    /// the number of rows and of queued leases.
    pub(crate) fn waiting(&self) -> Waiting {
        let queued = self.queue.leases().map(|lease| (lease.subnets, Wait::Turn));
        let mut peers: BTreeMap<Subnets, Wait> = queued.collect();
        for (key, row) in self.table.rows().iter().filter(|(_, row)| row.is_pending()) {
            let Some(peer) = self.desired.peer_of(key) else { continue };
            let object = self.desired.object(key);
            let link = object.and_then(|object| self.desired.link_of(&object));
            let missing = link.filter(|link| self.survey.missing_links.contains(link));
            let wait = match (missing, row.cause) {
                (Some(link), _) => Wait::Link(link),
                (None, Cause::Lease(_)) => Wait::Turn,
                (None, Cause::Repair(_)) => Wait::Repair,
            };
            peers.insert(peer, wait);
        }
        Waiting::new(self.survey.is_everything_unread(), peers)
    }

    /// The peer whose subnet contains `address`, and the states of its objects. `None` if no subnet
    /// contains it. Blocks in [`Kernel::lookup`] if the lease is in the queue.
    pub(crate) fn explain(&self, address: IpAddr, kernel: &dyn Kernel) -> Option<Explanation> {
        let Some(peer) = self.desired.peers.holder_of(address) else {
            return self.explain_queued(address, kernel);
        };
        let mut objects = Vec::new();
        self.desired.expand(peer.chosen(), |object| {
            let state =
                if peer.accepted { self.state_of(&object.key()) } else { ObjectState::Unwanted };
            objects.push((object, state));
        });
        let rejection = self.desired.peers.rejected().get(&peer.lease.subnets).cloned();
        Some(Explanation::new(Arc::clone(&peer.lease), rejection, objects))
    }

    /// The state of a desired object.
    fn state_of(&self, key: &Key) -> ObjectState {
        if let Some(failure) = self.table.failures().get(key) {
            return ObjectState::Failing(failure.clone());
        }
        let is_pending = self.table.get(key).is_some_and(Row::is_pending);
        if is_pending || self.survey.is_everything_unread() {
            ObjectState::Pending
        } else {
            ObjectState::InPlace
        }
    }

    /// The lease in the queue whose subnet contains `address`, and the objects that its plan will
    /// define.
    fn explain_queued(&self, address: IpAddr, kernel: &dyn Kernel) -> Option<Explanation> {
        let mut queued = self.queue.leases();
        let lease =
            queued.find(|lease| lease.subnets.iter().any(|subnet| subnet.contains(address)))?;
        let lookups = RouteLookups::new(kernel);
        let foreseen = self.desired.peers.foresee(lease, &|address| lookups.on_link(address));
        let mut objects = Vec::new();
        self.desired.expand(&foreseen, |object| objects.push((object, ObjectState::Pending)));
        Some(Explanation::new(Arc::clone(lease), None, objects))
    }
}
