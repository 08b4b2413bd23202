//! Telling: how things stand.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use super::{Answers, Cause, Engine, Reads, Unread, expand};
use flannel_core::Kernel;
use flannel_core::object::Object;
use flannel_core::status::{Explanation, ObjectState, Status, Wait, Waiting};
use flannel_core::{Lease, Subnets};

impl Engine {
    /// Something failed that did not fail when this was last asked.
    pub(crate) fn take_newly_failing(&mut self) -> bool {
        self.stats.take_newly_failing()
    }

    pub(crate) fn reads(&self) -> Reads {
        self.reads
    }

    /// The kernel cannot be read.
    pub(crate) fn is_unreadable(&self) -> bool {
        self.kernel_error.is_some()
    }

    pub(crate) fn is_failing(&self) -> bool {
        !self.stats.failing().is_empty()
            || self.kernel_error.is_some()
            || self.lookup_error.is_some()
    }

    /// Before the first look at the kernel everything is unread.
    fn is_own_in_place(&self) -> bool {
        let lacks = |key| self.put.contains_key(&key) || self.failed.contains_key(&key);
        self.unread < Unread::Everything && !self.base.iter().any(|object| lacks(object.key()))
    }

    /// Costs nothing that grows with the number of peers.
    pub(crate) fn status(&self) -> Status {
        let mut status = Status::default();
        status.in_sync = self.live && !self.is_unsettled() && !self.is_failing();
        status.settled = !self.is_unsettled();
        status.own_in_place = self.is_own_in_place();
        status.live = self.live;
        status.leases = self.leases.clone();
        status.peers = self.peers.accepted();
        status.objects = self.base.len() + self.peer_objects.total();
        status.by_kind = self.peer_objects.by_kind(self.base.iter());
        status.disbelieved = self.peers.disbelieved().clone();
        status.kernel_error = self.kernel_error.clone().or_else(|| self.lookup_error.clone());
        status.remarks = self.peers.remarks().clone();
        self.stats.copy_to(&mut status);
        status
    }

    /// Which peers wait, and what for. Costs what waits.
    pub(crate) fn waiting(&self) -> Waiting {
        let unprocessed = self.unprocessed.leases().iter().map(|lease| lease.subnets);
        let fresh = self.fresh.iter().filter_map(|(id, _)| self.peers.fresh_lease(*id));
        let mut peers: BTreeMap<Subnets, Wait> = unprocessed
            .chain(fresh.map(|lease| lease.subnets))
            .map(|subnets| (subnets, Wait::Turn))
            .collect();
        for (key, cause) in &self.put {
            let Some(peer) = self.peer_of(key) else { continue };
            let link = self.want(key).and_then(|object| self.link_of(&object));
            let wait = match (link.filter(|link| self.missing_links.contains(link)), cause) {
                (Some(link), _) => Wait::Link(link),
                (None, Cause::Lease(_)) => Wait::Turn,
                (None, Cause::Repair(_)) => Wait::Repair,
            };
            peers.insert(peer, wait);
        }
        Waiting::new(self.unread == Unread::Everything, peers)
    }

    /// The peer whose subnet holds `address`, and how what it wants stands.
    pub(crate) fn explain(&self, address: IpAddr, kernel: &dyn Kernel) -> Option<Explanation> {
        let Some(peer) = self.peers.holder_of(address) else {
            return self.explain_unprocessed(address, kernel);
        };
        let standing = |object: &Object| {
            let key = object.key();
            if !peer.accepted {
                ObjectState::Unwanted
            } else if let Some(failure) = self.stats.failing().get(&key) {
                ObjectState::Failing(failure.clone())
            } else if peer.fresh || self.put.contains_key(&key) || self.unread == Unread::Everything
            {
                ObjectState::Pending
            } else {
                ObjectState::InPlace
            }
        };
        let mut objects = Vec::new();
        expand(&peer.objects, self.ids.as_ref(), |object| {
            objects.push((standing(&object), object));
        });
        let objects = objects.into_iter().map(|(how, object)| (object, how)).collect();
        let rejection = self.peers.disbelieved().get(&peer.lease.subnets).cloned();
        Some(Explanation::new(Arc::clone(&peer.lease), rejection, objects))
    }
    /// The same of a lease that nobody looked at yet: what its plan will make of it.
    fn explain_unprocessed(&self, address: IpAddr, kernel: &dyn Kernel) -> Option<Explanation> {
        let holds =
            |lease: &&Arc<Lease>| lease.subnets.iter().any(|subnet| subnet.contains(address));
        let lease = self.unprocessed.leases().iter().find(holds)?;
        let (answers, mut objects) = (Answers::new(kernel), Vec::new());
        let foreseen = self.peers.foresee(lease, &|a| answers.on_link(a));
        expand(&foreseen, self.ids.as_ref(), |object| objects.push((object, ObjectState::Pending)));
        Some(Explanation::new(Arc::clone(lease), None, objects))
    }
}
