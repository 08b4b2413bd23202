//! How each peer stands.
//!
//! The one thing to know: a status lists what is wrong, and once it is settled, what is not listed is in place; before, the network
//! itself says which peers wait. What cannot even be tried, since the tunnel's device is missing, fails with it.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::time::SystemTime;

use flannel_api::{PeerReport, seconds};
use flannel_core::address::Dual;
use flannel_core::object::{Key, LinkName};
use flannel_core::status::{Status, Wait, Waiting};
use flannel_core::{Lease, Subnets};

use super::texts;
use crate::observe::{NetworkSnapshot, Snapshot};

/// A report lists so many.
const PEERS: usize = 12;

/// All other nodes, by subnet.
pub(crate) fn peers(snapshot: &Snapshot) -> Vec<PeerReport> {
    let Some(network) = &snapshot.network else { return Vec::new() };
    let judge = Judge::new(network, snapshot);
    let own = network.running.handle.lease.subnets;
    network
        .view
        .leases
        .iter()
        .filter(|lease| lease.subnets != own)
        .map(|lease| judge.peer(lease))
        .collect()
}

/// Those with trouble first, then those that wait, then those that changed last; and how many wait.
pub(super) fn interesting_peers(
    network: &NetworkSnapshot,
    snapshot: &Snapshot,
) -> (Vec<PeerReport>, u64) {
    let judge = Judge::new(network, snapshot);
    let own = network.running.handle.lease.subnets;
    let mut peers: Vec<_> = network
        .view
        .leases
        .iter()
        .filter(|lease| lease.subnets != own)
        .map(|lease| (judge.rank(&lease.subnets), snapshot.changed.get(&lease.subnets), lease))
        .collect();
    let pending = peers.iter().filter(|(rank, ..)| *rank == Rank::Pending).count() as u64;
    // The latest change first, then those that never changed; ties by subnet, as they come.
    peers.sort_by(|a, b| a.0.cmp(&b.0).then(b.1.cmp(&a.1)));
    (peers.into_iter().take(PEERS).map(|(_, _, lease)| judge.peer(lease)).collect(), pending)
}

/// How interesting a peer is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Rank {
    Trouble,
    Pending,
    InPlace,
}

/// Says how peers stand, at the cost of what fails once.
struct Judge<'a> {
    status: &'a Status,
    failing: BTreeMap<Subnets, String>,
    /// Why each family's tunnel is not what it should be; then nothing goes through it to anybody, and what cannot be put without
    /// it is not even tried. Empty where some are reached without one: the network says who waits for it.
    tunnels: Dual<String>,
    waiting: Option<&'a Waiting>,
    /// Whose leases changed after the status was told.
    news: BTreeSet<Subnets>,
    changed: &'a BTreeMap<Subnets, SystemTime>,
}

impl<'a> Judge<'a> {
    fn new(network: &'a NetworkSnapshot, snapshot: &'a Snapshot) -> Self {
        let NetworkSnapshot { running, status, view, waiting } = network;
        let mut failing = BTreeMap::new();
        for failure in status.failing.values() {
            if let Some(peer) = failure.peer {
                failing
                    .entry(peer)
                    .or_insert_with(|| format!("{}: {}", failure.change, failure.error));
            }
        }
        let tunnels = running.datapath.devices;
        let direct = running.datapath.direct;
        let broken = |family| {
            let name: LinkName = tunnels[family].filter(|_| !direct)?;
            let failure = status.failing.get(&Key::Link(name))?;
            Some(format!("no device {name}: {}: {}", failure.change, failure.error))
        };
        let news = view.leases.changes_since(&status.leases).map(|(subnets, _)| subnets).collect();
        let (tunnels, waiting) = (Dual::from_fn(broken), waiting.as_ref());
        Self { status, failing, tunnels, waiting, news, changed: &snapshot.changed }
    }

    fn broken_tunnel(&self, subnets: &Subnets) -> Option<&String> {
        subnets.iter().find_map(|subnet| self.tunnels[subnet.family()].as_ref())
    }

    /// The state, and why it is not `in place`.
    fn state(&self, subnets: &Subnets) -> (&'static str, Option<String>) {
        if let Some(why) = self.status.rejected.get(subnets) {
            return ("not believed", Some(why.to_string()));
        }
        if let Some(why) = self.failing.get(subnets).or_else(|| self.broken_tunnel(subnets)) {
            return ("failing", Some(why.clone()));
        }
        match self.waits(subnets) {
            Some(why) => ("pending", Some(why)),
            None => ("in place", None),
        }
    }

    /// The same at the cost of no text.
    fn rank(&self, subnets: &Subnets) -> Rank {
        if self.status.rejected.contains_key(subnets)
            || self.failing.contains_key(subnets)
            || self.broken_tunnel(subnets).is_some()
        {
            return Rank::Trouble;
        }
        let in_place = self.all_wait().is_none() && self.waits_alone(subnets).is_none();
        if in_place { Rank::InPlace } else { Rank::Pending }
    }

    /// Why a peer is not known to be in place, though nothing of it fails.
    fn waits(&self, subnets: &Subnets) -> Option<String> {
        self.all_wait()
            .map(Cow::into_owned)
            .or_else(|| self.waits_alone(subnets).map(|wait| wait.to_string()))
    }

    /// Why of no peer it is known.
    fn all_wait(&self) -> Option<Cow<'static, str>> {
        if let Some(error) = &self.status.kernel_error {
            return Some(format!("the kernel cannot be read or watched: {error}").into());
        }
        match self.waiting {
            _ if self.status.settled => None,
            Some(waiting) if waiting.all => {
                Some("the kernel is about to be read, to see what is there".into())
            }
            Some(_) => None,
            None => Some(
                "the kernel is being made equal to the leases, and this one may be among those that wait"
                    .into(),
            ),
        }
    }

    /// What this one waits for.
    fn waits_alone(&self, subnets: &Subnets) -> Option<Wait> {
        if self.news.contains(subnets) {
            return Some(Wait::Turn);
        }
        self.waiting.filter(|_| !self.status.settled)?.peers.get(subnets).copied()
    }

    fn peer(&self, lease: &Lease) -> PeerReport {
        let subnets = lease.subnets;
        let (state, reason) = self.state(&subnets);
        PeerReport {
            key: subnets.to_string(),
            subnets: texts(subnets.iter()),
            public: texts(lease.attrs.preferred.public.values()),
            backend: lease.attrs.preferred.kind.to_string(),
            state: state.to_owned(),
            reason,
            changed: self.changed.get(&subnets).map(|at| seconds(*at)),
        }
    }
}
