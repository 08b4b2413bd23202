//! The daemon's knowledge at one moment.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::SystemTime;

use flannel_api::{Deployment, MoveReport, RefusedConfig};
use flannel_core::kernel::{Refused, Traffic};
use flannel_core::lease::View;
use flannel_core::object::ObjectKind;
use flannel_core::remedy::Trouble;
use flannel_core::status::{Damage, Histogram, Status, Waiting};
use flannel_core::subnet::{Ownership, StoreKind, StoreStatus};
use flannel_core::{Config, Lease, Subnets};
use flannel_doctor::Finding;
use flannel_doctor::inputs::tunnels::Tunnels;
use flannel_firewall::Packets;

use super::{CountersRead, FirewallRules, Running};

/// Everything as it is at one moment.
pub(crate) struct Snapshot {
    pub(crate) time: SystemTime,
    /// The start of the daemon.
    pub(crate) started: SystemTime,
    /// The daemon is a part of another program.
    pub(crate) is_embedded: bool,
    /// `None` before the registry was opened.
    pub(crate) store: Option<StoreStatus>,
    pub(crate) ownership: Ownership,
    pub(crate) facts: Facts,
    /// The time of the last change of each lease that changed while the network ran.
    pub(crate) changed: BTreeMap<Subnets, SystemTime>,
    pub(crate) network: Option<NetworkSnapshot>,
    pub(crate) counters: Counters,
}

/// The counters of all networks of this daemon. The fields of a [`Status`] count for one network.
#[derive(Debug, Clone, Default)]
pub(crate) struct Counters {
    pub(crate) applied: u64,
    pub(crate) refused: u64,
    pub(crate) repaired: u64,
    pub(crate) repairs: BTreeMap<(ObjectKind, Damage), u64>,
    pub(crate) latency: Histogram,
    pub(crate) firewall_repairs: u64,
    /// Packets that firewall rules dropped.
    pub(crate) dropped: Packets<u64>,
    /// Round trips to peers.
    pub(crate) round_trips: Histogram,
}

impl Counters {
    /// Adds the counters of a network.
    pub(super) fn add(&mut self, running: &Running) {
        let status = running.handle.status.borrow();
        self.applied += status.applied;
        self.refused += status.refused;
        self.repaired += status.repaired;
        for (what, count) in &status.repairs {
            *self.repairs.entry(*what).or_default() += count;
        }
        self.latency.add(&status.latency);
        if let FirewallRules::Kept(firewall) = &*running.firewall_rules.borrow() {
            let firewall = firewall.borrow();
            self.firewall_repairs += firewall.repairs;
            self.dropped.unencrypted += firewall.dropped.unencrypted.packets;
        }
        if let Some(paths) = &running.paths {
            self.round_trips.add(&paths.round_trips());
        }
    }
}

/// Facts that the daemon notes when they change.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Facts {
    /// The reason why the next network cannot be built yet, and the command that helps. While a
    /// network without a lease runs, why no lease is requested.
    pub(crate) waits_for: Option<Trouble>,
    /// Pods may start: the subnet file is written.
    pub(crate) subnet_file: bool,
    /// The number of networks that have run.
    pub(crate) networks: u64,
    /// A config in the store that is used only after a restart.
    pub(crate) waiting_config: Option<Config>,
    /// The config in the store that is valid, but from which no network can be built here.
    pub(crate) refused_config: Option<RefusedConfig>,
    /// The reason why the external interface is not used as it is now.
    pub(crate) unfit_interface: Option<String>,
    /// The move to another backend, or `None` if no move is under way.
    pub(crate) moving: Option<MoveReport>,
    /// The findings about this host, as of the last check.
    pub(crate) findings: Vec<Finding>,
}

/// The network that runs, with its latest status and the latest leases of the store.
pub(crate) struct NetworkSnapshot {
    pub(crate) running: Arc<Running>,
    pub(crate) status: Arc<Status>,
    pub(crate) view: View,
    /// The pending peers, if the network reported them; meaningless if the status is settled.
    pub(crate) waiting: Option<Waiting>,
    /// The encrypted tunnels; empty unless [`Snapshot::with_tunnels`] has read them.
    pub(crate) tunnels: Arc<Tunnels>,
    /// The packets that the backend moves itself; `None` unless [`Snapshot::with_traffic`] has read
    /// them.
    pub(crate) traffic: Option<Traffic>,
    /// The packets that guards refuse; `None` unless [`Snapshot::with_traffic`] has read them.
    pub(crate) refused: Option<Refused>,
    pub(super) read: Arc<CountersRead>,
}

impl Snapshot {
    /// How the daemon is deployed, which decides on the commands that it shows.
    pub(crate) fn deployment(&self) -> Deployment {
        match (self.store_kind().is_kubernetes(), self.is_embedded) {
            (true, _) => Deployment::Kubernetes,
            (false, true) => Deployment::Embedded,
            (false, false) => Deployment::Systemd,
        }
    }

    /// The kind of the store.
    pub(crate) fn store_kind(&self) -> &StoreKind {
        self.store.as_ref().map_or(&StoreKind::Other, |store| &store.kind)
    }

    /// Adds the state of the encrypted tunnels, as it was within the last second.
    pub(crate) async fn with_tunnels(mut self) -> Self {
        if let Some(network) = &mut self.network {
            network.tunnels = network.read.tunnels(&network.running).await;
        }
        self
    }

    /// Adds the packets that the backend moves itself, and the packets that guards refuse, counted
    /// within the last second.
    pub(crate) async fn with_traffic(mut self) -> Self {
        if let Some(network) = &mut self.network {
            network.traffic = network.read.traffic(&network.running).await;
            network.refused = network.read.refused(&network.running).await;
        }
        self
    }
}

impl NetworkSnapshot {
    /// This node's subnets.
    pub(crate) fn own(&self) -> Subnets {
        self.running.handle.lease.subnets
    }

    /// The leases of all other nodes, by subnet.
    pub(crate) fn peers(&self) -> impl Iterator<Item = &Arc<Lease>> {
        let own = self.own();
        self.view.leases.iter().filter(move |lease| lease.subnets != own)
    }
}
