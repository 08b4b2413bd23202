//! A kernel that records the time of its last acknowledgement.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use flannel_core::Kernel;
use flannel_core::kernel::{Changes, Footprint, KernelError, NexthopIds, Outcome, RouteAnswer};
use flannel_core::object::{Change, ObjectSet};
use flannel_core::runtime::lock;

/// A kernel, and the time of its last acknowledgement. Clones share both.
#[derive(Debug, Clone)]
pub(crate) struct Timed {
    kernel: Arc<dyn Kernel>,
    acknowledged: Arc<Mutex<Option<Instant>>>,
}

impl Timed {
    pub(crate) fn new(kernel: Arc<dyn Kernel>) -> Self {
        Self { kernel, acknowledged: Arc::default() }
    }

    /// The time of the last acknowledgement, or `None` before the first one.
    pub(crate) fn acknowledged(&self) -> Option<Instant> {
        *lock(&self.acknowledged)
    }
}

impl Kernel for Timed {
    fn snapshot(&self, footprint: &Footprint) -> Result<ObjectSet, KernelError> {
        self.kernel.snapshot(footprint)
    }

    fn nexthop_ids(&self, footprint: &Footprint) -> Result<NexthopIds, KernelError> {
        self.kernel.nexthop_ids(footprint)
    }

    fn nexthop_users(&self, there: &ObjectSet) -> Result<BTreeMap<u32, String>, KernelError> {
        self.kernel.nexthop_users(there)
    }

    fn apply(&self, footprint: &Footprint, changes: &[Change]) -> Vec<Outcome> {
        let outcomes = self.kernel.apply(footprint, changes);
        *lock(&self.acknowledged) = Some(Instant::now());
        outcomes
    }

    fn lookup(&self, dst: IpAddr) -> Result<RouteAnswer, KernelError> {
        self.kernel.lookup(dst)
    }

    fn changes(&self) -> Result<Box<dyn Changes>, KernelError> {
        self.kernel.changes()
    }
}
