//! The queue of new leases. If a view has many, they are planned slice by slice.

use std::collections::VecDeque;
use std::sync::Arc;

use tokio::time::Instant;

use flannel_core::Lease;

/// The number of new peers in a slice, whose objects are put in one batch. Linux maps per-CPU
/// memory for forwarding entries in the background and falls behind: with slices of 256, 65,000
/// peers took a fifth longer.
pub(super) const SLICE: usize = 64;

/// New leases that are not planned yet, in the order of their arrival.
#[derive(Debug, Default)]
pub(super) struct Queue {
    leases: VecDeque<QueuedLease>,
    /// A newer view arrived after the leases, which may have changed, deleted or planned some of
    /// them. Their newest versions must be looked up.
    pub(super) outdated: bool,
}

#[derive(Debug)]
struct QueuedLease {
    lease: Arc<Lease>,
    arrived: Instant,
}

/// New leases that arrived together.
pub(super) struct Slice {
    pub(super) leases: Vec<Arc<Lease>>,
    pub(super) arrived: Instant,
}

impl Queue {
    /// Notes that a newer view arrived.
    pub(super) fn outdate(&mut self) {
        self.outdated = !self.is_empty();
    }

    pub(super) fn extend(&mut self, leases: impl Iterator<Item = Arc<Lease>>, arrived: Instant) {
        self.leases.extend(leases.map(|lease| QueuedLease { lease, arrived }));
    }

    pub(super) fn is_empty(&self) -> bool {
        self.leases.is_empty()
    }

    pub(super) fn leases(&self) -> impl Iterator<Item = &Arc<Lease>> {
        self.leases.iter().map(|queued| &queued.lease)
    }

    /// Takes the next slice, or `None` if the queue is empty.
    pub(super) fn next(&mut self) -> Option<Slice> {
        let arrived = self.leases.front()?.arrived;
        let first = self.leases.iter().take(SLICE);
        let together = first.take_while(|queued| queued.arrived == arrived).count();
        let leases = self.leases.drain(..together).map(|queued| queued.lease).collect();
        if self.is_empty() {
            // Memory for thousands of leases is not kept.
            self.leases = VecDeque::new();
        }
        Some(Slice { leases, arrived })
    }
}
