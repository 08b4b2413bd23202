//! Steps for peers of WireGuard devices.

use flannel_core::kernel::KernelError;
use flannel_core::object::{Change, LinkName, Peer};

use super::{Steps, Writer};
use crate::codec::wireguard::MOST_PEERS;

/// Changes of peers of one device that wait to be sent.
#[derive(Default)]
pub(super) struct PeerBatch {
    device: Option<(LinkName, u32)>,
    /// Their numbers in the call.
    changes: Vec<usize>,
}

impl Steps for Peer {
    fn put(&self, writer: &mut Writer<'_>, n: usize, index: u32) -> Result<(), KernelError> {
        writer.add_peer(n, (self.link, index));
        Ok(())
    }

    fn delete(&self, writer: &mut Writer<'_>, n: usize, index: u32) -> Result<(), KernelError> {
        writer.add_peer(n, (self.link, index));
        Ok(())
    }
}

impl Writer<'_> {
    fn add_peer(&mut self, n: usize, device: (LinkName, u32)) {
        if self.peers.device != Some(device) || self.peers.changes.len() == MOST_PEERS {
            self.flush_peers();
        }
        self.peers.device = Some(device);
        self.peers.changes.push(n);
    }

    /// Sends the waiting changes of peers, and records their outcomes.
    pub(super) fn flush_peers(&mut self) {
        let PeerBatch { device, changes } = std::mem::take(&mut self.peers);
        let Some(device) = device else { return };
        let batch: Vec<&Change> = changes.iter().map(|n| &self.changes[*n]).collect();
        let results = self.wireguard.change_peers(self.namespace, device, &batch);
        for (n, result) in changes.into_iter().zip(results) {
            self.outcomes[n] = result.into();
        }
    }
}
