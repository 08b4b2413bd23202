//! The state of each peer.
//!
//! A status lists failing and rejected peers. Once it is settled, all other peers are in place.
//! Before, the network reports the pending peers. If the tunnel's device is missing, peers that
//! need it fail.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt::Display;

use flannel_api::{PeerReport, PeerState, RejectionCause};
use flannel_core::address::Dual;
use flannel_core::backend::Advice;
use flannel_core::object::{Key, LinkName};
use flannel_core::status::{Advisory, Status, Wait, Waiting};
use flannel_core::{Lease, Subnet, Subnets};
use flannel_doctor::inputs::tunnels::TunnelToPeer;

use crate::observe::{NetworkSnapshot, Snapshot};

/// The largest number of peers in a report.
const PEERS: usize = 12;

/// All other nodes, by subnet.
pub(crate) fn peers(snapshot: &Snapshot) -> Vec<PeerReport> {
    let Some(network) = &snapshot.network else { return Vec::new() };
    let states = PeerStates::new(network);
    network.peers().map(|lease| states.peer(lease, snapshot)).collect()
}

/// The failing and rejected peers, then the pending ones, then those that changed last; and the
/// number of pending peers.
pub(super) fn interesting_peers(
    network: &NetworkSnapshot,
    snapshot: &Snapshot,
) -> (Vec<PeerReport>, u64) {
    let states = PeerStates::new(network);
    let mut peers: Vec<_> = network
        .peers()
        .map(|lease| {
            let state = states.state(&lease.subnets).0;
            let changed = &snapshot.changed;
            (state, changed.get(&lease.subnets), lease)
        })
        .collect();
    let pending = peers.iter().filter(|(state, ..)| *state == PeerState::Pending).count() as u64;
    // The latest change first. The sort is stable: ties are by subnet.
    let trouble = |state: PeerState| state.max(PeerState::Failing);
    peers.sort_by(|a, b| trouble(a.0).cmp(&trouble(b.0)).then(b.1.cmp(&a.1)));
    (
        peers.into_iter().take(PEERS).map(|(.., lease)| states.peer(lease, snapshot)).collect(),
        pending,
    )
}

/// What is wrong with the lease of a peer although it is accepted. Takes O(n) for n advisories.
pub(super) fn advice_on(status: &Status, peer: Subnets) -> impl Iterator<Item = &Advice> {
    let all = advice(status);
    all.filter(move |(subnets, _)| *subnets == peer).map(|(_, advice)| advice)
}

/// What is wrong with accepted leases.
fn advice(status: &Status) -> impl Iterator<Item = (Subnets, &Advice)> {
    status.advisories.keys().filter_map(|advisory| match advisory {
        Advisory::OfLease { subnets, advice } => Some((*subnets, advice)),
        _ => None,
    })
}

/// Finds the states of peers. One value serves all peers; making it takes O(n) for n failures.
struct PeerStates<'a> {
    status: &'a Status,
    failing: BTreeMap<Subnets, String>,
    /// The reason that each family's tunnel is missing. Objects that need it are then not tried.
    /// Empty if some peers are reached without a tunnel, because then the network reports the peers
    /// that wait for it.
    tunnels: Dual<String>,
    /// The reason that no state is known.
    all_wait: Option<String>,
    waiting: Option<&'a Waiting>,
    /// What is wrong with accepted leases.
    advice: BTreeMap<Subnets, &'a Advice>,
    /// The peers whose leases changed after the status was published.
    unprocessed: BTreeSet<Subnets>,
    encrypted: HashMap<Subnet, TunnelToPeer<'a>>,
}

impl<'a> PeerStates<'a> {
    fn new(network: &'a NetworkSnapshot) -> Self {
        let NetworkSnapshot { running, status, view, waiting, tunnels, .. } = network;
        let mut failing = BTreeMap::new();
        for failure in status.failing.values() {
            if let Some(peer) = failure.peer {
                failing
                    .entry(peer)
                    .or_insert_with(|| format!("{}: {}", failure.change, failure.error));
            }
        }
        let broken = |family| {
            let direct = running.datapath.direct;
            let name: LinkName = running.datapath.devices[family].filter(|_| !direct)?;
            let failure = status.failing.get(&Key::Link(name))?;
            Some(format!("no device {name}: {}: {}", failure.change, failure.error))
        };
        let waiting = waiting.as_ref().filter(|_| !status.settled);
        let all_wait = match (&status.kernel_error, waiting) {
            (Some(error), _) => Some(format!("the kernel cannot be read or watched: {error}")),
            (None, Some(waiting)) => {
                waiting.all.then(|| "the kernel has to be read first".to_owned())
            }
            (None, None) if status.settled => None,
            (None, None) => Some(
                "syncing the kernel with the leases, and this one may still be waiting".to_owned(),
            ),
        };
        let changed = view.leases.changes_since(&status.leases);
        Self {
            status,
            failing,
            tunnels: Dual::from_fn(broken),
            all_wait,
            waiting,
            advice: advice(status).collect(),
            unprocessed: changed.map(|(subnets, _)| subnets).collect(),
            encrypted: tunnels.by_subnet(),
        }
    }

    /// The state, and the reason if it is not `in place`.
    fn state(&self, subnets: &Subnets) -> (PeerState, Option<&dyn Display>) {
        if let Some(why) = self.status.rejected.get(subnets) {
            return (PeerState::Rejected, Some(why));
        }
        let tunnel = || subnets.iter().find_map(|subnet| self.tunnels[subnet.family()].as_ref());
        if let Some(why) = self.failing.get(subnets).or_else(tunnel) {
            return (PeerState::Failing, Some(why));
        }
        if let Some(why) = &self.all_wait {
            return (PeerState::Pending, Some(why));
        }
        let wait = if self.unprocessed.contains(subnets) {
            Some(&Wait::Turn)
        } else {
            self.waiting.and_then(|waiting| waiting.peers.get(subnets))
        };
        match wait {
            Some(wait) => (PeerState::Pending, Some(wait)),
            None => (PeerState::InPlace, None),
        }
    }

    fn peer(&self, lease: &Lease, snapshot: &Snapshot) -> PeerReport {
        let (state, reason) = self.state(&lease.subnets);
        let changed = snapshot.changed.get(&lease.subnets).copied();
        let to = lease.subnets.iter().filter_map(|subnet| self.encrypted.get(&subnet));
        let mut tunnels: Vec<_> = to.map(|to| to.report(snapshot.time)).collect();
        // One device may serve both families.
        tunnels.dedup_by(|a, b| a.device == b.device);
        let reason = reason
            .map(ToString::to_string)
            .or_else(|| self.advice.get(&lease.subnets).map(ToString::to_string))
            .or_else(|| lease.attrs.unused_offers().map(|unused| unused.to_string()));
        let rejection = self.status.rejected.get(&lease.subnets).map(RejectionCause::from);
        PeerReport { tunnels, rejection, ..PeerReport::new(lease, state, reason, changed) }
    }
}
