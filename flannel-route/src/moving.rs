//! The steps by which the nodes of a running cluster move from one backend to another without an
//! interruption.
//!
//! A node **offers** each backend by which peers can reach it now: the lease lists the offers, the
//! preferred one first. Nodes learn a changed network config at different times. So each node goes
//! through the following steps at its own pace. A step is a pure function of the backends that the
//! node runs, the backend of its config (the **target**), and `Seen`: the leases, whether the
//! devices are in the kernel, and the handshakes that the target needs.
//!
//! | step | the node offers | it goes on when |
//! |---|---|---|
//! | 1 | the old backend, and runs both | the devices of the target are in its kernel |
//! | 2 | the old one, then the target | every live lease offers the target |
//! | 3 | the target, then the old one | every live lease prefers the target |
//! | 4 | the target, and still runs both | no live lease offers the old one; no packet uses it |
//! | 5 | the target, and runs only that | |
//!
//! - From step 2 on, a node reaches a peer by the target if the peer offers it too.
//! - If the config changes meanwhile, even back, the node continues from its present offers. Nodes
//!   with different configs keep at least one common offer.
//! - A node of Go flannel offers only its own type. As long as it offers the old one, the move
//!   stays at step 2, and all nodes reach each other.
//! - A target such as WireGuard needs a handshake with each peer. Step 3 waits for it. Without a
//!   handshake, both nodes keep the old offer, and reach each other by the old backend. A node does
//!   not wait for a peer that offers only the target, or whose lease it rejects: such a peer gets
//!   no packets by the old backend.
//!
//! Invariants, which `model.rs` tests with random clusters: two nodes always have a common offer;
//! every chosen offer leads to a device that exists. If two nodes also have another offer in
//! common, the chosen offer does not lead to a tunnel that cannot complete a handshake; the move
//! ends with one offer.
//!
//! | item | purpose |
//! |---|---|
//! | `NodeBackends` | the backends that a node runs, in the order of its offers; kept as JSON |
//! | `NodeBackends::step` | the next step, or the reason why the node waits |
//!
//! ```rust
//! use flannel_core::config::BackendConfig;
//! use flannel_core::lease::View;
//! use flannel_core::status::SortedMap;
//! use flannel_route::moving::{AwaitedEvent, NodeBackends, Seen};
//!
//! let backend = |kind: &str| BackendConfig::parse(&format!("{{\"Type\": \"{kind}\"}}")).unwrap();
//! let mut backends = NodeBackends::default();
//! backends.aim_at("vxlan", &backend("vxlan"));
//! assert!(!backends.is_moving());
//! // The network config names another backend.
//! backends.aim_at("host-gw", &backend("host-gw"));
//! let view = View::unknown();
//! let own = "10.1.7.0-24".parse().unwrap();
//! let rejected = &SortedMap::default();
//! let seen = Seen { in_place: false, view: &view, own, tunnels: None, rejected };
//! let step = backends.step("host-gw", &seen).unwrap();
//! assert_eq!(step.next, Err(AwaitedEvent::Devices));
//! ```

mod file;
mod step;

#[cfg(test)]
mod model;

use std::sync::Arc;

use flannel_core::config::BackendConfig;
use flannel_core::lease::View;
use flannel_core::{Lease, Subnets};

pub use self::file::Damaged;
pub use self::step::{AwaitedEvent, Blockers, Seen, Step, Tunnels};

/// A backend that this node runs.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct BackendUse {
    /// The type of its offers ([`Offer::kind`](flannel_core::lease::Offer::kind)). It is the name
    /// of the backend if its offers have no type. Such a backend cannot move.
    pub lease_type: String,
    /// Its part of the network config.
    pub backend: BackendConfig,
    /// Whether the node's lease offers it. If not, its devices are not in place yet, or peers may
    /// still send packets to them.
    pub offered: bool,
}

/// The backends that this node runs: one, or several while it moves.
///
/// The offered backends come first, in the order of the offers in the lease. Each backend has
/// another lease type.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NodeBackends(Vec<BackendUse>);

impl NodeBackends {
    /// All backends.
    pub fn iter(&self) -> impl Iterator<Item = &BackendUse> {
        self.0.iter()
    }

    /// Whether the node runs more than one backend.
    pub fn is_moving(&self) -> bool {
        self.0.len() > 1
    }

    /// Takes in the backend of the network config. A backend of the same type gets the new options
    /// at once: peers learn them from its new offer. A new backend is not offered yet, unless no
    /// other backend is offered.
    pub fn aim_at(&mut self, lease_type: &str, backend: &BackendConfig) {
        let backend = backend.clone();
        let offered = !self.0.iter().any(|usage| usage.offered);
        match self.0.iter_mut().find(|usage| usage.lease_type == lease_type) {
            Some(usage) => {
                usage.backend = backend;
                usage.offered |= offered;
            }
            None => {
                let lease_type = lease_type.to_owned();
                self.0.push(BackendUse { lease_type, backend, offered });
            }
        }
        self.sort();
    }

    /// Adds `others` as backends that are not offered. Skips a backend if there is one of its type
    /// already.
    pub fn add<'a>(&mut self, others: impl IntoIterator<Item = &'a BackendUse>) {
        for usage in others {
            if !self.0.iter().any(|known| known.lease_type == usage.lease_type) {
                self.0.push(BackendUse { offered: false, ..usage.clone() });
            }
        }
    }

    /// Splits the backends into those that this node can run now and those that it leaves out. A
    /// backend is left out if `is_broken` returns true for it and it is not the `target`. Returns
    /// both groups, the running ones first. If no running backend is offered, the target becomes
    /// the offered one. The backends that are left out are marked as not offered. Keep them and add
    /// them again with [`Self::add`]: they may work later, or have devices to remove.
    pub fn without(
        &self,
        target: &str,
        is_broken: impl Fn(&BackendUse) -> bool,
    ) -> (Self, Vec<BackendUse>) {
        let mut runs = Self::default();
        let mut aside = Vec::new();
        for usage in self.iter() {
            if usage.lease_type != target && is_broken(usage) {
                aside.push(BackendUse { offered: false, ..usage.clone() });
            } else {
                runs.0.push(usage.clone());
            }
        }
        if runs.offered().next().is_none() {
            runs.0.iter_mut().for_each(|usage| usage.offered = usage.lease_type == target);
            runs.sort();
        }
        (runs, aside)
    }

    /// The lease of a node that this node can only reach by its backend of this `lease_type`:
    /// offered backends of other types do not reach it. `None` if all nodes are reached otherwise.
    pub fn user_of<'a>(
        &self,
        lease_type: &str,
        own: Subnets,
        view: &'a View,
    ) -> Option<&'a Arc<Lease>> {
        let mut leases = view.leases.iter().filter(|lease| lease.subnets != own);
        leases.find(|lease| {
            let mut others = self.offered().filter(|usage| usage.lease_type != lease_type);
            step::offers(lease, lease_type)
                && !others.any(|usage| step::offers(lease, &usage.lease_type))
        })
    }

    /// Keeps the backends for which `kept` returns true.
    pub fn retain(&mut self, kept: impl FnMut(&BackendUse) -> bool) {
        self.0.retain(kept);
    }

    /// The backends whose offers the lease has, the preferred one first.
    pub fn offered(&self) -> impl Iterator<Item = &BackendUse> {
        self.0.iter().filter(|usage| usage.offered)
    }

    /// All backends, in the order in which this node uses them to reach a peer that offers several.
    /// The `target` comes first if this node offers it too, then the offered backends.
    pub fn by_use(&self, target: &str) -> impl Iterator<Item = &BackendUse> {
        let is_target = move |usage: &&BackendUse| usage.offered && usage.lease_type == target;
        let others = self.0.iter().filter(move |usage| !is_target(usage));
        self.0.iter().filter(is_target).chain(others)
    }

    /// Puts the offered backends first. Otherwise keeps the order.
    fn sort(&mut self) {
        self.0.sort_by_key(|usage| !usage.offered);
    }
}
