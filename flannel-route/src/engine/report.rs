//! Reports: the status, the peers that wait, and the explanation of one peer.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use super::{Cause, Engine, Row};
use crate::admission::Answers;
use flannel_core::object::Object;
use flannel_core::status::{Explanation, ObjectState, Status, Wait, Waiting};
use flannel_core::{Kernel, Lease, Subnets};

impl Engine {
    pub(crate) fn is_failing(&self) -> bool {
        !self.table.failing.is_empty()
            || self.survey.error.is_some()
            || self.lookups.error().is_some()
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
        // Pods use the network before it is closed to others.
        let is_in_place = |object: &Object| {
            let key = object.key();
            self.desired.last.contains(&key) || self.table.get(&key).is_none()
        };
        status.own_in_place =
            !self.survey.is_everything_unread() && self.desired.base.iter().all(is_in_place);
        status.live = self.live;
        status.leases = self.leases.clone();
        status.peers = peers.accepted();
        status.objects = counts.values().sum();
        status.by_kind = counts;
        status.rejected = peers.rejected().clone();
        status.failing = self.table.failing.clone();
        status.kernel_error = self.survey.error.as_ref().or_else(|| self.lookups.error()).cloned();
        status.advisories = peers.advisories().clone();
        status
    }

    /// The peers whose objects are not all in the kernel yet, with the reason. O(number of such
    /// peers).
    pub(crate) fn waiting(&self) -> Waiting {
        let queued = self.queue.leases().map(|lease| (lease.subnets, Wait::Turn));
        let mut peers: BTreeMap<Subnets, Wait> = queued.collect();
        for (key, row) in self.table.rows().iter().filter(|(_, row)| row.is_pending()) {
            let Some(peer) = self.desired.peer_of(key) else { continue };
            let link = self.desired.object(key).and_then(|o| self.desired.link_of(&o));
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

    /// The peer whose subnet holds `address`, and the state of its objects.
    pub(crate) fn explain(&self, address: IpAddr, kernel: &dyn Kernel) -> Option<Explanation> {
        let Some(peer) = self.desired.peers.holder_of(address) else {
            return self.explain_queued(address, kernel);
        };
        let state = |object: &Object| {
            let key = object.key();
            if !peer.accepted {
                ObjectState::Unwanted
            } else if let Some(failure) = self.table.failing.get(&key) {
                ObjectState::Failing(failure.clone())
            } else if self.table.get(&key).is_some_and(Row::is_pending)
                || self.survey.is_everything_unread()
            {
                ObjectState::Pending
            } else {
                ObjectState::InPlace
            }
        };
        let mut objects = Vec::new();
        self.desired.expand(peer.chosen(), |object| {
            let state = state(&object);
            objects.push((object, state));
        });
        let rejection = self.desired.peers.rejected().get(&peer.lease.subnets).cloned();
        Some(Explanation::new(Arc::clone(&peer.lease), rejection, objects))
    }

    /// The same for a lease in the queue: the objects that its plan will define.
    fn explain_queued(&self, address: IpAddr, kernel: &dyn Kernel) -> Option<Explanation> {
        let holds =
            |lease: &&Arc<Lease>| lease.subnets.iter().any(|subnet| subnet.contains(address));
        let lease = self.queue.leases().find(holds)?;
        let (answers, mut objects) = (Answers::new(kernel), Vec::new());
        let foreseen = self.desired.peers.foresee(lease, &|a| answers.on_link(a));
        self.desired.expand(&foreseen, |object| objects.push((object, ObjectState::Pending)));
        Some(Explanation::new(Arc::clone(lease), None, objects))
    }
}
