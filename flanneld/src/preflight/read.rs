//! Reading the facts: `/proc/sys`, addresses, and who drops forwarded packets.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::str::FromStr;
use std::sync::Arc;

use flannel_core::{Config, Dual, Family, KernelError, Lease, LeaseSet, LinkName, Subnets};
use flannel_firewall::{LegacyMemory, Programs, forward_drops};
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
pub(super) async fn read(scene: Scene, memory: &LegacyMemory) -> Facts {
    let networks = scene.config.pod_networks().collect();
    let programs = Programs::default();
    let drops = forward_drops(&programs, &networks, memory);
    let (drops, facts) = tokio::join!(drops, tokio::task::spawn_blocking(move || read_host(&scene)));
    // A runtime that shuts down knows nothing.
    let mut facts = facts.unwrap_or_else(|_| Facts { unread: vec!["this host".into()], ..Facts::default() });
    match drops {
        Ok(drops) => facts.drops = Some(drops),
        Err(error) => facts.unread.push(format!("who drops forwarded packets ({error})")),
    }
    facts
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
    let (addresses, mut unread) = match addresses() {
        Ok(addresses) => (addresses, Vec::new()),
        Err(error) => (Vec::new(), vec![format!("the addresses of this host ({error})")]),
    };
    let forwarding = Dual { v4: flag("net/ipv4/ip_forward"), v6: flag("net/ipv6/conf/all/forwarding") };
    let switches = scene.config.networks.families().filter(|family| forwarding[*family].is_none());
    unread.extend(switches.map(|family| format!("whether {family} packets are forwarded (/proc/sys/net)")));
    let rp_filter: BTreeMap<LinkName, u8> = filtered.iter().copied().filter_map(rp_filter).collect();
    if scene.config.networks.v4.is_some() {
        let missing = filtered.iter().filter(|device| !rp_filter.contains_key(device));
        unread.extend(missing.map(|device| format!("rp_filter of {device}")));
    }
    Facts {
        pod_networks: scene.config.pod_networks().collect(),
        own,
        unread,
        kubernetes: std::env::var_os("KUBERNETES_SERVICE_HOST").is_some()
            || Path::new("/var/lib/kubelet").exists(),
        forwarding,
        device_forwarding: devices()
            .filter_map(|device| Some((device, flag(&format!("net/ipv4/conf/{device}/forwarding"))?)))
            .collect(),
        rp_filter,
        bridge_calls: Dual::from_fn(bridge_calls),
        most_neighbours: Dual {
            v4: sysctl("net/ipv4/neigh/default/gc_thresh3"),
            v6: sysctl("net/ipv6/neigh/default/gc_thresh3"),
        },
        drops: None,
        addresses,
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

fn addresses() -> Result<Vec<(LinkName, std::net::IpAddr)>, KernelError> {
    let facts = NetlinkKernel::open().and_then(|kernel| kernel.facts(&Selectors::default()));
    let interfaces = facts?.interfaces;
    let of = |interface: flannel_netlink::iface::Interface| {
        let name = interface.name;
        interface.addresses.into_iter().map(move |found| (name, found.address))
    };
    Ok(interfaces.into_iter().flat_map(of).collect())
}
