//! The queue of new leases. If a view has many, they are planned slice by slice.

use std::collections::VecDeque;
use std::sync::Arc;

use tokio::time::Instant;

use flannel_core::Lease;

/// The number of new peers in a slice, whose objects are put in one batch. Linux maps per-CPU
/// memory for forwarding entries in the background and falls behind: with slices of 256, 65,000
/// peers took a fifth longer.
pub(super) const SLICE: usize = 64;

/// New leases that no plan has seen yet, in the order of their arrival.
#[derive(Debug, Default)]
pub(super) struct Queue {
    leases: VecDeque<(Arc<Lease>, Instant)>,
    /// A newer view arrived, so the leases may have been changed, deleted or planned: their newest
    /// versions must be looked up.
    pub(super) outdated: bool,
}

impl Queue {
    /// A newer view arrived.
    pub(super) fn outdate(&mut self) {
        self.outdated = !self.is_empty();
    }

    pub(super) fn extend(&mut self, leases: impl Iterator<Item = Arc<Lease>>, arrived: Instant) {
        self.leases.extend(leases.map(|lease| (lease, arrived)));
    }

    pub(super) fn is_empty(&self) -> bool {
        self.leases.is_empty()
    }

    pub(super) fn leases(&self) -> impl Iterator<Item = &Arc<Lease>> {
        self.leases.iter().map(|(lease, _)| lease)
    }

    /// Takes the next slice, and its arrival.
    pub(super) fn next(&mut self) -> Option<(Vec<Arc<Lease>>, Instant)> {
        let (_, arrived) = *self.leases.front()?;
        let together = self.leases.iter().take(SLICE).take_while(|(_, at)| *at == arrived).count();
        let leases = self.leases.drain(..together).map(|(lease, _)| lease).collect();
        if self.is_empty() {
            // Memory for thousands of leases is not kept.
            self.leases = VecDeque::new();
        }
        Some((leases, arrived))
    }
}
