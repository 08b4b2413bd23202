//! Telling: how things stand.

use std::net::IpAddr;
use std::sync::Arc;

use super::{Reads, Reconciler, Unread, expand};
use crate::state::Object;
use crate::status::{Explanation, Standing, Status};

impl Reconciler {
    /// Something failed that did not fail when this was last asked.
    pub(crate) fn take_newly_failing(&mut self) -> bool {
        self.ledger.take_newly_failing()
    }

    pub(crate) fn reads(&self) -> Reads {
        self.reads
    }

    /// The kernel cannot be read.
    pub(crate) fn is_unreadable(&self) -> bool {
        self.kernel_error.is_some()
    }

    pub(crate) fn is_failing(&self) -> bool {
        !self.ledger.failing().is_empty() || self.kernel_error.is_some() || self.lookup_error.is_some()
    }

    /// Costs nothing that grows with the number of peers.
    pub(crate) fn status(&self) -> Status {
        let mut status = Status {
            in_sync: self.live && !self.is_unsettled() && !self.is_failing(),
            settled: !self.is_unsettled(),
            live: self.live,
            peers: self.peers.believed(),
            objects: self.base.len() + self.peer_objects.total(),
            by_kind: self.peer_objects.by_kind(self.base.iter()),
            disbelieved: self.peers.disbelieved().clone(),
            kernel_error: self.kernel_error.clone().or_else(|| self.lookup_error.clone()),
            remarks: self.peers.remarks().clone(),
            ..Status::default()
        };
        self.ledger.copy_to(&mut status);
        status
    }

    /// The peer whose subnet holds `address`, and how what it wants stands.
    pub(crate) fn explain(&self, address: IpAddr) -> Option<Explanation> {
        let peer = self.peers.holder_of(address)?;
        let standing = |object: &Object| {
            let key = object.key();
            if !peer.believed {
                Standing::Unwanted
            } else if let Some(failure) = self.ledger.failing().get(&key) {
                Standing::Failing(failure.clone())
            } else if peer.fresh || self.put.contains_key(&key) || self.unread == Unread::Everything {
                Standing::Pending
            } else {
                Standing::InPlace
            }
        };
        let mut objects = Vec::new();
        expand(&peer.objects, self.ids.as_ref(), |object| objects.push((standing(&object), object)));
        let objects = objects.into_iter().map(|(how, object)| (object, how)).collect();
        let disbelief = self.peers.disbelieved().get(&peer.lease.subnets).cloned();
        Some(Explanation { lease: Arc::clone(&peer.lease), disbelief, objects })
    }
}
