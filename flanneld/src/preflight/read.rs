//! Reading the facts: `/proc/sys`, addresses, and who drops forwarded packets.

use std::fs;
use std::path::Path;
use std::str::FromStr;
use std::sync::Arc;

use flannel_core::{Config, Dual, Family, Lease, LeaseSet, LinkName, Subnets};
use flannel_firewall::{Programs, forward_drops};
use flannel_netlink::NetlinkKernel;
use flannel_netlink::iface::Selectors;

use super::Facts;
use crate::backends;

/// Which network is looked at.
#[derive(Debug, Clone)]
pub(crate) struct Scene {
    pub(crate) config: Config,
    /// The external interface.
    pub(crate) uplink: LinkName,
    /// This node's lease; `None`: it has none.
    pub(crate) own: Option<Subnets>,
    pub(crate) public: Dual<std::net::IpAddr>,
    /// All leases.
    pub(crate) leases: LeaseSet,
}

/// Reads what can be read.
pub(crate) async fn read(scene: Scene) -> Facts {
    let networks = scene.config.pod_networks().collect();
    let drops = async {
        let drops = forward_drops(&Programs::default(), &networks).await;
        drops.inspect_err(|error| tracing::debug!(%error, "not known who drops forwarded packets")).ok()
    };
    let (drops, facts) = tokio::join!(drops, tokio::task::spawn_blocking(move || read_host(&scene)));
    // A runtime that shuts down knows nothing.
    Facts { drops, ..facts.unwrap_or_default() }
}

fn read_host(scene: &Scene) -> Facts {
    let kind = &scene.config.backend.kind;
    let links =
        backends::find(kind).and_then(|backend| Ok(backend.owned(scene.uplink, &scene.config)?.links));
    let tunnels: Vec<LinkName> =
        links.unwrap_or_default().into_iter().filter(|link| is_there(*link)).collect();
    let own = scene.own.map(|own| own.iter().collect()).unwrap_or_default();
    let other = |lease: &&Arc<Lease>| Some(lease.subnets) != scene.own;
    let flag = |path: &str| sysctl::<u8>(path).map(|value| value != 0);
    let devices = || tunnels.iter().copied().chain([scene.uplink]);
    // With a tunnel, what arrives on the external interface is for this host.
    let filtered = if tunnels.is_empty() { vec![scene.uplink] } else { tunnels.clone() };
    let all = sysctl::<u8>("net/ipv4/conf/all/rp_filter");
    let rp_filter = |device: LinkName| {
        let own = sysctl::<u8>(&format!("net/ipv4/conf/{device}/rp_filter"))?;
        Some((device, own.max(all?)))
    };
    Facts {
        pod_networks: scene.config.pod_networks().collect(),
        own,
        kubernetes: std::env::var_os("KUBERNETES_SERVICE_HOST").is_some()
            || Path::new("/var/lib/kubelet").exists(),
        forwarding: Dual { v4: flag("net/ipv4/ip_forward"), v6: flag("net/ipv6/conf/all/forwarding") },
        device_forwarding: devices()
            .filter_map(|device| Some((device, flag(&format!("net/ipv4/conf/{device}/forwarding"))?)))
            .collect(),
        rp_filter: filtered.into_iter().filter_map(rp_filter).collect(),
        bridge_calls: Dual::from_fn(bridge_calls),
        most_neighbours: Dual {
            v4: sysctl("net/ipv4/neigh/default/gc_thresh3"),
            v6: sysctl("net/ipv6/neigh/default/gc_thresh3"),
        },
        drops: None,
        addresses: addresses(),
        public: scene.public,
        peers: scene.leases.iter().filter(other).map(|lease| (lease.subnets, lease.attrs.public)).collect(),
        tunnels,
    }
}

fn is_there(link: LinkName) -> bool {
    Path::new("/proc/sys/net/ipv4/conf").join(link.as_str()).exists()
}

fn sysctl<T: FromStr>(key: &str) -> Option<T> {
    fs::read_to_string(Path::new("/proc/sys").join(key)).ok()?.trim().parse().ok()
}

fn bridge_calls(family: Family) -> Option<bool> {
    let file = if family == Family::V4 { "bridge-nf-call-iptables" } else { "bridge-nf-call-ip6tables" };
    match sysctl::<u8>(&format!("net/bridge/{file}")) {
        Some(value) => Some(value != 0),
        // Without the module there is no such file; without /proc/sys nothing is known.
        None => Path::new("/proc/sys/net/core").exists().then_some(false),
    }
}

fn addresses() -> Vec<(LinkName, std::net::IpAddr)> {
    let facts = NetlinkKernel::open().and_then(|kernel| kernel.facts(&Selectors::default()));
    let interfaces = facts.map(|facts| facts.interfaces).unwrap_or_default();
    let of = |interface: flannel_netlink::iface::Interface| {
        let name = interface.name;
        interface.addresses.into_iter().map(move |found| (name, found.address))
    };
    interfaces.into_iter().flat_map(of).collect()
}
