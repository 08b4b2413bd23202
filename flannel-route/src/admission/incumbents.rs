//! The accepted peers that a new one may clash with.

use foldhash::HashMap;

use crate::admission::peer_index::{Id, Peer, PeerIndex};
use flannel_core::Subnet;

/// Accepted peers by subnet, as far as they were looked up for one update. Each lookup is made
/// once. So the cost of an update with many leases of one subnet grows with their number.
#[derive(Debug, Default)]
pub(crate) struct Incumbents {
    /// The one with exactly this subnet. There is at most one, because accepted peers do not
    /// overlap.
    at: HashMap<Subnet, Option<Id>>,
    /// The earliest one with a smaller subnet or a public address inside this subnet.
    inside: HashMap<Subnet, Option<Id>>,
}

impl Incumbents {
    /// The accepted peers that clash with `peer` by their subnets and public addresses; of several
    /// inside one of its subnets only the earliest.
    pub(crate) fn rivals(&mut self, index: &PeerIndex, peer: &Peer) -> Vec<Id> {
        let accepted = |id: &Id| index.peer(*id).is_some_and(|peer| peer.accepted);
        let precedence = |id: &Id| index.peer(*id).map(|peer| peer.lease.precedence());
        let mut rivals = Vec::new();
        for subnet in peer.lease.subnets.iter() {
            let earliest = || index.inside(subnet).filter(accepted).min_by_key(precedence);
            rivals.extend(*self.inside.entry(subnet).or_insert_with(earliest));
        }
        for around in index.all_around(peer) {
            let first = || index.with_subnet(around).find(accepted);
            rivals.extend(*self.at.entry(around).or_insert_with(first));
        }
        rivals
    }
}
