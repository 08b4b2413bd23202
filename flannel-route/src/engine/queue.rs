//! The queue of new leases: a view that brings thousands of them is planned in slices.

use std::collections::VecDeque;
use std::sync::Arc;

use tokio::time::Instant;

use flannel_core::Lease;

/// The number of new peers whose objects are put at once. Linux maps the per-CPU memory that
/// forwarding entries need in pieces, behind the caller. With more entries in a row it falls
/// behind: slices of 256 peers took a fifth longer with 65,000 peers.
pub(super) const SLICE: usize = 64;

/// New leases that no plan has seen yet, in the order of their arrival.
#[derive(Debug, Default)]
pub(super) struct Queue(VecDeque<(Arc<Lease>, Instant)>);

impl Queue {
    pub(super) fn extend(&mut self, leases: impl Iterator<Item = Arc<Lease>>, arrived: Instant) {
        self.0.extend(leases.map(|lease| (lease, arrived)));
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn leases(&self) -> impl Iterator<Item = &Arc<Lease>> {
        self.0.iter().map(|(lease, _)| lease)
    }

    /// Takes the next slice: leases that arrived together, and when they arrived.
    pub(super) fn next(&mut self) -> Option<(Vec<Arc<Lease>>, Instant)> {
        let (_, arrived) = *self.0.front()?;
        let together = self.0.iter().take(SLICE).take_while(|(_, at)| *at == arrived).count();
        let slice = self.0.drain(..together).map(|(lease, _)| lease).collect();
        if self.0.is_empty() {
            // Memory for thousands of leases is not kept.
            self.0 = VecDeque::new();
        }
        Some((slice, arrived))
    }
}
