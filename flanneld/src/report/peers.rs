//! How each peer stands.
//!
//! The one thing to know: a status lists what is wrong, and once it is settled, what is not listed is in place; but what cannot
//! even be tried, since the tunnel's device is missing, fails with it.

use std::collections::BTreeMap;
use std::time::SystemTime;

use flannel_core::{Dual, Key, Lease, LinkName, Status, Subnets};

use super::{PeerReport, seconds, texts};
use crate::backends;
use crate::observe::{NetworkSnapshot, Snapshot};

/// A report lists so many.
const PEERS: usize = 12;

/// All other nodes, by subnet.
pub(crate) fn peers(snapshot: &Snapshot) -> Vec<PeerReport> {
    let Some(network) = &snapshot.network else { return Vec::new() };
    let judge = Judge::new(network, snapshot);
    let own = network.running.handle.lease.subnets;
    network.view.leases.iter().filter(|lease| lease.subnets != own).map(|lease| judge.peer(lease)).collect()
}

/// Those with trouble first, then those that changed last.
pub(super) fn interesting_peers(network: &NetworkSnapshot, snapshot: &Snapshot) -> Vec<PeerReport> {
    let judge = Judge::new(network, snapshot);
    let own = network.running.handle.lease.subnets;
    let mut peers: Vec<_> = network
        .view
        .leases
        .iter()
        .filter(|lease| lease.subnets != own)
        .map(|lease| (!judge.in_trouble(&lease.subnets), snapshot.changed.get(&lease.subnets), lease))
        .collect();
    // The latest change first, then those that never changed; ties by subnet, as they come.
    peers.sort_by(|a, b| a.0.cmp(&b.0).then(b.1.cmp(&a.1)));
    peers.into_iter().take(PEERS).map(|(_, _, lease)| judge.peer(lease)).collect()
}

/// Says how peers stand, at the cost of what fails once.
struct Judge<'a> {
    status: &'a Status,
    failing: BTreeMap<Subnets, String>,
    /// Why each family's tunnel is not what it should be; then nothing goes through it to anybody, and what cannot be put without
    /// it is not even tried.
    tunnels: Dual<String>,
    /// Peers on the same link are reached without a tunnel.
    direct: bool,
    changed: &'a BTreeMap<Subnets, SystemTime>,
}

impl<'a> Judge<'a> {
    fn new(network: &'a NetworkSnapshot, snapshot: &'a Snapshot) -> Self {
        let NetworkSnapshot { running, status, .. } = network;
        let mut failing = BTreeMap::new();
        for failure in status.failing.values() {
            if let Some(peer) = failure.peer {
                failing.entry(peer).or_insert_with(|| format!("{}: {}", failure.change, failure.error));
            }
        }
        let tunnels = backends::devices(&running.config);
        let broken = |family| {
            let name: LinkName = tunnels[family]?;
            let failure = status.failing.get(&Key::Link(name))?;
            Some(format!("no device {name}: {}: {}", failure.change, failure.error))
        };
        let direct = backends::direct_routing(&running.config);
        Self { status, failing, tunnels: Dual::from_fn(broken), direct, changed: &snapshot.changed }
    }

    fn in_trouble(&self, subnets: &Subnets) -> bool {
        self.status.disbelieved.contains_key(subnets)
            || self.failing.contains_key(subnets)
            || self.broken_tunnel(subnets).is_some()
    }

    fn broken_tunnel(&self, subnets: &Subnets) -> Option<&String> {
        subnets.iter().find_map(|subnet| self.tunnels[subnet.family()].as_ref())
    }

    /// The state, and why it is not `in place`.
    fn state(&self, subnets: &Subnets) -> (&'static str, Option<String>) {
        if let Some(why) = self.status.disbelieved.get(subnets) {
            return ("not believed", Some(why.to_string()));
        }
        if let Some(why) = self.failing.get(subnets) {
            return ("failing", Some(why.clone()));
        }
        match (self.broken_tunnel(subnets), &self.status.kernel_error) {
            // Which of them go by it is known to the network alone.
            (Some(why), _) if self.direct => {
                ("pending", Some(format!("{why} (which peers on the same link do not need: flannelctl why)")))
            }
            (Some(why), _) => ("failing", Some(why.clone())),
            (None, Some(error)) => {
                ("pending", Some(format!("the kernel cannot be read or watched: {error}")))
            }
            (None, None) if self.status.settled => ("in place", None),
            (None, None) => {
                let why =
                    "the kernel is being made equal to the leases, and this one may be among those that wait";
                ("pending", Some(why.to_owned()))
            }
        }
    }

    fn peer(&self, lease: &Lease) -> PeerReport {
        let subnets = lease.subnets;
        let (state, reason) = self.state(&subnets);
        PeerReport {
            key: subnets.to_string(),
            subnets: texts(subnets.iter()),
            public: texts(lease.attrs.public.values()),
            backend: lease.attrs.backend_type.to_string(),
            state: state.to_owned(),
            reason,
            changed: self.changed.get(&subnets).map(|at| seconds(*at)),
        }
    }
}
