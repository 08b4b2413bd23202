//! The accepted peers that a new peer may clash with.

use foldhash::HashMap;

use crate::admission::peer_index::{PeerEntry, PeerId, PeerIndex};
use flannel_core::Subnet;

/// The accepted peers that one update has looked up, by subnet. Each lookup is made once, so that
/// the cost of an update with many leases of one subnet grows with their number, and not with its
/// square.
#[derive(Debug, Default)]
pub(crate) struct Incumbents {
    /// The peer with exactly this subnet. There is at most one, because accepted peers do not
    /// overlap.
    at: HashMap<Subnet, Option<PeerId>>,
    /// The earliest peer with a smaller subnet or a public address inside this subnet.
    inside: HashMap<Subnet, Option<PeerId>>,
}

impl Incumbents {
    /// The accepted peers that clash with `peer` by their subnets or public addresses. If there are
    /// several inside one of its subnets, only the earliest is returned.
    pub(crate) fn rivals(&mut self, index: &PeerIndex, peer: &PeerEntry) -> Vec<PeerId> {
        let is_accepted = |id: &PeerId| index.peer(*id).is_some_and(|peer| peer.accepted);
        let mut rivals = Vec::new();
        for subnet in peer.lease.subnets.iter() {
            rivals.extend(*self.inside.entry(subnet).or_insert_with(|| {
                let accepted = index.inside(subnet).filter(is_accepted);
                accepted.min_by_key(|id| index.peer(*id).map(|peer| peer.lease.precedence()))
            }));
        }
        for around in index.all_around(peer) {
            let at = self.at.entry(around);
            rivals.extend(*at.or_insert_with(|| index.with_subnet(around).find(is_accepted)));
        }
        rivals
    }
}
