//! The network to examine.

use std::net::IpAddr;

use flannel_api::{Deployment, PeerState};
use flannel_core::Subnet;
use flannel_core::address::{Dual, Family};
use flannel_core::backend::Datapath;
use flannel_core::object::{LinkName, MacAddr};

/// The network to examine, from the daemon, or without a daemon from the store and the kernel.
#[derive(Debug, Clone, Default)]
pub struct Network {
    /// The daemon runs.
    pub daemon: bool,
    /// How the daemon is deployed.
    pub deployment: Deployment,
    /// The devices that the network needs are known.
    pub known: bool,
    /// The backend type in the leases of this node's backend.
    pub backend: String,
    /// The path of pods' packets.
    pub datapath: Datapath,
    /// The external interface.
    pub uplink: Option<LinkName>,
    /// The MTU of pods, in bytes.
    pub mtu: Option<u32>,
    /// The other nodes.
    pub targets: Vec<Target>,
    /// The MAC addresses of the tunnels in this node's lease. A running daemon corrects wrong ones,
    /// so they matter only without one.
    pub published: Dual<MacAddr>,
}

impl Network {
    /// The families of the tunnels, or without tunnels of the peers.
    pub fn families(&self) -> Vec<Family> {
        Family::BOTH
            .into_iter()
            .filter(|family| {
                if self.datapath.devices.is_empty() {
                    self.targets.iter().flat_map(|t| &t.subnets).any(|s| s.family() == *family)
                } else {
                    self.datapath.devices[*family].is_some()
                }
            })
            .collect()
    }
}

/// A peer.
#[derive(Debug, Clone)]
pub struct Target {
    /// The key of its lease.
    pub key: String,
    /// The subnets of its lease.
    pub subnets: Vec<Subnet>,
    /// The addresses that other nodes reach it by.
    pub public: Dual<IpAddr>,
    /// The backend type in its lease.
    pub backend: String,
    /// Its state, as the daemon reports it.
    pub state: PeerState,
    /// The MTUs that the daemon gave the routes to its subnets, in bytes, because larger packets
    /// are lost.
    pub mtus: Dual<u32>,
}
