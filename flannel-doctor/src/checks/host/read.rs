//! Reads the facts: `/proc/sys`, addresses, routing rules, and rules that stop packets of pods.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::Path;
use std::str::FromStr;

use flannel_core::address::{Dual, Family};
use flannel_core::backend::Transport;
use flannel_core::kernel::{KernelError, RouteAnswer};
use flannel_core::lease::LeaseSet;
use flannel_core::object::LinkName;
use flannel_core::{Config, Kernel, Subnet, Subnets};
use flannel_firewall::{LegacyMemory, PodPackets, Programs, TunnelPackets, stopped_packets};
use flannel_netlink::NetlinkKernel;
use flannel_netlink::iface::Interface;

use super::HostFacts;
use super::bridges::{devices_with, shared_by};
use super::cni::{CONFIGS, read_superseded};
use super::foreign::MAIN;
use super::ipv6::{read_expiring, read_off};
use super::limits::Tracked;

/// The largest number of peers whose routes are looked up.
const MOST_LOOKUPS: usize = 256;
/// The largest number of peers whose devices are looked up.
const MOST_DEVICES: usize = 8;

/// The network that the checks are for.
#[derive(Debug, Clone)]
pub struct CheckedNetwork {
    /// The network config.
    pub config: Config,
    /// The devices that the network may have.
    pub links: Vec<LinkName>,
    /// The external interface.
    pub uplink: LinkName,
    /// The subnets of this node's lease, or `None` if it has none.
    pub own: Option<Subnets>,
    /// The addresses that other nodes reach this one by.
    pub public: Dual<IpAddr>,
    /// All leases.
    pub leases: LeaseSet,
    /// The MTU that the network has for pods, in bytes, or `None` if it is not known.
    pub mtu: Option<u32>,
    /// The packets that nodes send to each other, besides packets of pods.
    pub transports: Vec<Transport>,
    /// The transports that run only between addresses of one family
    /// ([`outer`](flannel_core::backend::Datapath::outer)).
    pub outer: BTreeMap<Transport, Family>,
}

impl CheckedNetwork {
    /// The transports whose packets travel between addresses of each family.
    fn transports_of(&self) -> Dual<Vec<Transport>> {
        let is_of = |transport: &Transport, family| {
            self.outer.get(transport).is_none_or(|outer| *outer == family)
        };
        Dual::from_fn(|family| {
            let transports = self.transports.iter().copied();
            Some(transports.filter(|transport| is_of(transport, family)).collect())
        })
    }
}

/// Reads all facts. A failure to read one is noted in `unread`.
pub(super) async fn read(network: CheckedNetwork, memory: &LegacyMemory) -> HostFacts {
    let read = tokio::task::spawn_blocking(move || {
        let (facts, kernel) = read_host(&network);
        let transports = network.transports_of();
        let packets = facts.pod_packets(kernel.as_ref(), &transports);
        (facts, packets)
    });
    // The task fails only if the runtime shuts down.
    let (mut facts, packets) = read.await.unwrap_or_else(|_| {
        let unread = vec!["this host".into()];
        (HostFacts { unread, ..HostFacts::default() }, Dual::default())
    });
    let stops = stopped_packets(&Programs::default(), &packets, memory).await;
    facts.stops = stops.found;
    facts.unread.extend(
        stops.unread.iter().map(|error| format!("which rules stop packets of pods ({error})")),
    );
    facts
}

fn read_host(network: &CheckedNetwork) -> (HostFacts, Option<NetlinkKernel>) {
    let flag = |path: &str| sysctl::<u8>(path).map(|value| value != 0);
    let peers = network.leases.iter().filter(|lease| Some(lease.subnets) != network.own);
    let mut facts = HostFacts {
        pod_networks: network.config.pod_networks().collect(),
        own: network.own.map(|own| own.iter().collect()).unwrap_or_default(),
        tunnels: network.links.iter().copied().filter(|link| is_there(*link)).collect(),
        uplink: Some(network.uplink),
        kubernetes: std::env::var_os("KUBERNETES_SERVICE_HOST").is_some()
            || Path::new("/var/lib/kubelet").exists(),
        forwarding: Dual {
            v4: flag("net/ipv4/ip_forward"),
            v6: flag("net/ipv6/conf/all/forwarding"),
        },
        bridge_calls: Dual::from_fn(bridge_calls),
        has_entry_per_peer: network.links.iter().any(|link| has_entry_per_peer(*link)),
        max_neighbours: Dual {
            v4: sysctl("net/ipv4/neigh/default/gc_thresh3"),
            v6: sysctl("net/ipv6/neigh/default/gc_thresh3"),
        },
        tracked: tracked(),
        public: network.public,
        peers: peers.map(|lease| (lease.subnets, lease.attrs.preferred.public)).collect(),
        ..HostFacts::default()
    };
    let kernel = NetlinkKernel::open();
    match &kernel {
        Ok(kernel) => facts.ask(kernel),
        Err(error) => facts.unread.push(format!("the addresses of this host ({error})")),
    }
    facts.mtu = network.mtu;
    facts.superseded = read_superseded(Path::new(CONFIGS));
    facts.read_settings(network.uplink);
    // /proc/net/route is slow to read, so it is read only if a setting or the number of peers makes
    // it matter.
    let entries = facts.peers.len() as u64 * (1 + u64::from(facts.has_entry_per_peer));
    if facts.max_neighbours.values().any(|max| entries >= *max)
        || facts.arp_ignore > Some(0)
        || facts.arp_filter == Some(true)
    {
        facts.on_link = on_link(network.uplink);
    }
    if let Ok(kernel) = &kernel {
        facts.look_elsewhere(kernel, network.uplink);
    }
    (facts, kernel.ok())
}

/// Whether Linux keeps a neighbour entry for each gateway on the device, without a MAC address. On
/// a point-to-point device all gateways share one.
///
/// **Source**: linux `include/net/arp.h: __ipv4_neigh_lookup`, `net/ipv4/arp.c: arp_constructor`.
fn has_entry_per_peer(link: LinkName) -> bool {
    const POINT_TO_POINT: u32 = 0x10;
    const NO_ARP: u32 = 0x80;
    let text = fs::read_to_string(format!("/sys/class/net/{link}/flags")).unwrap_or_default();
    let flags = u32::from_str_radix(text.trim().trim_start_matches("0x"), 16).unwrap_or_default();
    flags & (NO_ARP | POINT_TO_POINT) == NO_ARP
}

impl HostFacts {
    /// A value that was read. If it could not be read, its default, which is noted.
    fn known<T: Default>(&mut self, what: impl Display, read: Result<T, KernelError>) -> T {
        read.unwrap_or_else(|error| {
            self.unread.push(format!("{what} ({error})"));
            T::default()
        })
    }

    /// Reads the values that the kernel reports over netlink.
    fn ask(&mut self, kernel: &NetlinkKernel) {
        let interfaces = self.known("the addresses of this host", kernel.interfaces());
        let of = |interface: Interface| {
            let name = interface.name;
            interface.addresses.into_iter().map(move |found| (name, found.address))
        };
        self.addresses = interfaces.into_iter().flat_map(of).collect();
        let networks = self.pod_networks;
        for family in networks.families() {
            let rules = self.known(format!("the {family} routing rules"), kernel.rules(family));
            self.rules.extend(rules);
        }
        let all: Vec<Subnet> = networks.values().copied().collect();
        self.shadows = self.known("routes of other programs", kernel.shadows(&all));
        for (table, network) in self.foreign_tables() {
            let routes =
                self.known(format!("the routing table {table}"), kernel.table(table, network));
            self.tables.insert((table, network.family()), routes);
        }
        for subnet in self.own.values().copied().collect::<Vec<_>>() {
            let devices = devices_with(self, subnet);
            if devices.len() > 1 {
                let routes =
                    self.known(format!("the routes to {subnet}"), kernel.table(MAIN, subnet));
                self.shared.extend(shared_by(subnet, &devices, &routes));
            }
        }
        for device in self.tunnels.clone() {
            let attached = self.known(format!("the programs on {device}"), kernel.attached(device));
            self.attached.insert(device, attached);
        }
    }

    /// Reads the settings of devices in `/proc/sys`.
    fn read_settings(&mut self, uplink: LinkName) {
        for family in self.pod_networks.families() {
            if self.forwarding[family].is_none() {
                let text = format!("whether {family} packets are forwarded (/proc/sys/net)");
                self.unread.push(text);
            }
        }
        let bridges = self.addresses.iter().map(|(device, _)| *device);
        let bridges = bridges.filter(|device| self.has_pods(device.as_str()));
        let forwards = self.tunnels.iter().copied().chain([uplink]).chain(bridges);
        let forwards = forwards.filter_map(|d| Some((d, setting(d.as_str(), "forwarding")? != 0)));
        self.device_forwarding = forwards.collect();
        // With a tunnel, packets that arrive on the external interface are for this host.
        let filtered = if self.tunnels.is_empty() { vec![uplink] } else { self.tunnels.clone() };
        for device in filtered {
            match larger(device, "rp_filter") {
                Some(mode) => _ = self.rp_filter.insert(device, mode),
                None if self.pod_networks.v4.is_some() => {
                    self.unread.push(format!("rp_filter of {device}"));
                }
                None => {}
            }
        }
        let bridge = self.bridge();
        if self.pod_networks.v6.is_some() {
            self.expiring = read_expiring(uplink);
            self.ipv6_off = read_off(bridge);
        }
        let ports = bridge.map(|bridge| ports(Path::new("/sys/class/net"), bridge));
        self.pods = ports.unwrap_or_default();
        self.arp_ignore = larger(uplink, "arp_ignore");
        self.arp_filter = larger(uplink, "arp_filter").map(|value| value != 0);
    }

    /// The packets of pods whose way through the rules of other programs is followed.
    fn pod_packets(
        &self,
        kernel: Option<&NetlinkKernel>,
        transports: &Dual<Vec<Transport>>,
    ) -> Dual<PodPackets> {
        let of = |family: Family| {
            let of_peer = |(subnets, public): &(Subnets, Dual<IpAddr>)| {
                let subnet = subnets.iter().find(|subnet| subnet.family() == family)?;
                Some((subnet, *public))
            };
            let peers: Vec<(Subnet, Dual<IpAddr>)> =
                self.peers.iter().filter_map(of_peer).take(MOST_DEVICES).collect();
            let to = |(peer, public): &(Subnet, Dual<IpAddr>)| {
                self.device_to(&kernel?.lookup(peer.nth(1)?).ok()?, public)
            };
            let mut to_peers: Vec<LinkName> = peers.iter().filter_map(to).collect();
            to_peers.sort_unstable();
            to_peers.dedup();
            if to_peers.is_empty() {
                to_peers = match &self.tunnels[..] {
                    [] => self.uplink.into_iter().collect(),
                    [only] => vec![*only],
                    _ => Vec::new(),
                };
            }
            let network = self.pod_networks[family]?;
            Some(PodPackets {
                network,
                // Without a lease, the pods of this node may have any address.
                own: self.own[family].unwrap_or(network),
                peer: peers.first().map(|(subnet, _)| *subnet),
                bridge: self.bridge(),
                to_peers,
                uplink: self.uplink,
                node: self.node_address(family),
                tunnel: self.tunnel_packets(family, transports[family].as_deref()),
            })
        };
        Dual { v4: of(Family::V4), v6: of(Family::V6) }
    }

    /// The device by which packets reach the pods of a peer with these addresses. `None` if the
    /// route is not flannel's, for example the default route to a peer without a route.
    fn device_to(&self, route: &RouteAnswer, public: &Dual<IpAddr>) -> Option<LinkName> {
        let link = route.link?;
        let is_peer = |gateway| public.values().any(|address| *address == gateway);
        let is_ours = self.tunnels.contains(&link) || route.gateway.is_some_and(is_peer);
        is_ours.then_some(link)
    }

    /// Tunnel packets between a peer and this node. Their family is that of the nodes' addresses.
    fn tunnel_packets(
        &self,
        family: Family,
        transports: Option<&[Transport]>,
    ) -> Option<TunnelPackets> {
        Some(TunnelPackets {
            from: self.peers.iter().find_map(|(_, public)| public[family])?,
            to: self.node_address(family)?,
            transports: transports.unwrap_or_default().to_vec(),
        })
    }

    /// The address of the external interface that other nodes reach, or behind NAT, its first one.
    fn node_address(&self, family: Family) -> Option<IpAddr> {
        let public = self.public[family]?;
        let of_uplink = |(device, _): &&(LinkName, IpAddr)| Some(*device) == self.uplink;
        let mut own = self.addresses.iter().filter(of_uplink).map(|(_, address)| *address);
        let is_here = own.clone().any(|address| address == public);
        if is_here { Some(public) } else { own.find(|address| Family::of(*address) == family) }
    }

    /// The bridge of pods: a device that is no tunnel, with an address of this node's subnets, else
    /// `cni0`.
    fn bridge(&self) -> Option<LinkName> {
        let of_pods = |(device, address): &&(LinkName, IpAddr)| {
            !self.tunnels.contains(device) && self.own.values().any(|own| own.contains(*address))
        };
        let found = self.addresses.iter().find(of_pods).map(|(device, _)| *device);
        found.or_else(|| "cni0".parse().ok().filter(|usual| is_there(*usual)))
    }

    /// Looks for a peer that this host reaches through another device than the external interface,
    /// if that matters. With a tunnel, `rp_filter` of the external interface matters only then. A
    /// peer on the link comes first, because only such a peer matters to `arp_filter`.
    fn look_elsewhere(&mut self, kernel: &NetlinkKernel, uplink: LinkName) {
        let is_strict = larger(uplink, "rp_filter") == Some(1);
        if !is_strict && self.arp_filter != Some(true) {
            return;
        }
        let elsewhere = |to: IpAddr| {
            let answer = kernel.lookup(to).ok().filter(|answer| !answer.local)?;
            Some((to, answer.link.filter(|link| *link != uplink)?))
        };
        let peers = self.peers.iter().filter_map(|(_, public)| public.v4);
        let found: Vec<(IpAddr, LinkName)> =
            peers.take(MOST_LOOKUPS).filter_map(elsewhere).collect();
        let on_link = |to: IpAddr| self.on_link.iter().any(|network| network.contains(to));
        self.elsewhere =
            found.iter().find(|(to, _)| on_link(*to)).or_else(|| found.first()).copied();
        if is_strict && self.elsewhere.is_some() {
            self.rp_filter.insert(uplink, 1);
        }
    }
}

/// The MTU of each port of a bridge, which the pod behind it has too. `net` is `/sys/class/net`.
pub(super) fn ports(net: &Path, bridge: LinkName) -> Vec<u32> {
    let ports = fs::read_dir(net.join(bridge.as_str()).join("brif")).into_iter().flatten();
    ports
        .flatten()
        .filter_map(|port| fs::read_to_string(net.join(port.file_name()).join("mtu")).ok())
        .filter_map(|text| text.trim().parse().ok())
        .collect()
}

/// The networks that the device reaches without a gateway.
fn on_link(device: LinkName) -> Vec<Subnet> {
    let table = |file: &str| {
        fs::read_to_string(Path::new("/proc/thread-self/net").join(file)).unwrap_or_default()
    };
    let v4 = table("route");
    let v6 = table("ipv6_route");
    v4.lines()
        .filter_map(|line| route_v4(line, device))
        .chain(v6.lines().filter_map(|line| route_v6(line, device)))
        .collect()
}

const RTF_GATEWAY: u32 = 2;

/// A line of `/proc/net/route`: device, destination, gateway, flags, three numbers, mask; addresses
/// in the host's byte order.
fn route_v4(line: &str, device: LinkName) -> Option<Subnet> {
    let fields: Vec<&str> = line.split_whitespace().collect();
    let number = |n: usize| u32::from_str_radix(fields.get(n)?, 16).ok();
    // The gateway's column is 0 for an IPv6 gateway, so the flag decides.
    let direct = *fields.first()? == device.as_str() && number(3)? & RTF_GATEWAY == 0;
    let len = u8::try_from(number(7)?.count_ones()).ok()?;
    Subnet::new(Ipv4Addr::from(number(1)?.to_ne_bytes()).into(), len).filter(|_| direct)
}

/// A line of `/proc/net/ipv6_route`: destination, its length, the same of a source, gateway, four
/// numbers, device.
fn route_v6(line: &str, device: LinkName) -> Option<Subnet> {
    let fields: Vec<&str> = line.split_whitespace().collect();
    let address = |n: usize| u128::from_str_radix(fields.get(n)?, 16).ok();
    let direct = *fields.get(9)? == device.as_str() && address(4)? == 0;
    let len = u8::from_str_radix(fields.get(1)?, 16).ok()?;
    Subnet::new(Ipv6Addr::from(address(0)?).into(), len).filter(|_| direct)
}

fn is_there(link: LinkName) -> bool {
    Path::new("/proc/sys/net/ipv4/conf").join(link.as_str()).exists()
}

pub(super) fn sysctl<T: FromStr>(key: &str) -> Option<T> {
    fs::read_to_string(Path::new("/proc/sys").join(key)).ok()?.trim().parse().ok()
}

/// A setting of an interface for IPv4.
fn setting(device: &str, key: &str) -> Option<u8> {
    sysctl(&format!("net/ipv4/conf/{device}/{key}"))
}

/// The larger one of the values of a setting for a device and for `all`, which the kernel uses.
fn larger(device: LinkName, key: &str) -> Option<u8> {
    Some(setting(device.as_str(), key)?.max(setting("all", key)?))
}

fn bridge_calls(family: Family) -> Option<bool> {
    let file =
        if family == Family::V4 { "bridge-nf-call-iptables" } else { "bridge-nf-call-ip6tables" };
    match sysctl::<u8>(&format!("net/bridge/{file}")) {
        Some(value) => Some(value != 0),
        // Without the module the file is missing. Without /proc/sys nothing is known.
        None => Path::new("/proc/sys/net/core").exists().then_some(false),
    }
}

/// The connections of this network namespace. The limit is for each.
fn tracked() -> Option<Tracked> {
    let setting = |key: &str| sysctl(&format!("net/netfilter/nf_conntrack_{key}"));
    Some(Tracked { now: setting("count")?, most: setting("max")? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mtu_of_pods_is_that_of_the_ports_of_their_bridge() {
        let dir = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = dir.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        for (port, mtu) in [("veth1", "1450\n"), ("veth2", "1430\n"), ("eth0", "1500\n")] {
            write(&format!("{port}/mtu"), mtu);
        }
        // In the kernel these are links.
        for port in ["veth1", "veth2", "gone0"] {
            write(&format!("cni0/brif/{port}"), "");
        }
        let mut found = ports(dir.path(), "cni0".parse().unwrap());
        found.sort_unstable();
        assert_eq!(found, [1430, 1450]);
        assert_eq!(ports(dir.path(), "cni1".parse().unwrap()), [0; 0]);
    }

    #[test]
    fn routes_without_a_gateway_are_on_the_link() {
        let eth0 = "eth0".parse().unwrap();
        let v4 = |line: &str| route_v4(line, eth0).map(|network| network.to_string());
        let hex = |address: [u8; 4]| format!("{:08X}", u32::from_ne_bytes(address));
        let network = hex([192, 0, 2, 0]);
        let gateway = hex([192, 0, 2, 254]);
        let mask = hex([255, 255, 255, 0]);
        let line = |device: &str, gateway: &str, flags: &str| {
            format!("{device}\t{network}\t{gateway}\t{flags}\t0\t0\t0\t{mask}\t0\t0\t0")
        };
        assert_eq!(v4(&line("eth0", "00000000", "0001")).as_deref(), Some("192.0.2.0/24"));
        assert_eq!(v4(&line("eth0", &gateway, "0003")), None);
        assert_eq!(v4(&line("eth0", "00000000", "0003")), None, "by an IPv6 gateway");
        assert_eq!(v4(&line("eth1", "00000000", "0001")), None);
        assert_eq!(
            v4("Iface\tDestination\tGateway \
                 \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT"),
            None
        );
        let v6 = |gateway: &str| {
            let line = format!(
                "20010db8000000000000000000000000 40 {:032x} 00 {gateway} 00000100 00000001 \
                 00000000 00000001     eth0",
                0
            );
            route_v6(&line, eth0).map(|network| network.to_string())
        };
        assert_eq!(v6(&"0".repeat(32)).as_deref(), Some("2001:db8::/64"));
        assert_eq!(v6("20010db8000000000000000000000001"), None);
    }

    #[test]
    fn only_routes_of_flannel_name_the_devices_to_peers() {
        let link = |name: &str| name.parse::<LinkName>().unwrap();
        let facts = HostFacts { tunnels: vec![link("flannel.1")], ..HostFacts::default() };
        let public = Dual { v4: "192.0.2.7".parse().ok(), v6: None };
        for (device, gateway, is_ours) in [
            ("flannel.1", Some("10.1.7.0"), true),
            ("eth0", Some("192.0.2.7"), true),
            ("eth0", Some("192.0.2.254"), false),
            ("docker0", None, false),
        ] {
            let gateway = gateway.map(|gateway| gateway.parse().unwrap());
            let route = RouteAnswer::via(link(device), gateway, None);
            let found = facts.device_to(&route, &public);
            assert_eq!(found, is_ours.then_some(link(device)), "{device} {gateway:?}");
        }
    }

    /// Each tunnel of WireGuard runs between addresses of one family.
    #[test]
    fn a_transport_of_one_family_is_not_looked_for_in_the_other() {
        let [v4, v6, both] = [1, 2, 3].map(Transport::Udp);
        let network = CheckedNetwork {
            config: Config::parse(r#"{"Network":"10.1.0.0/16"}"#).unwrap(),
            links: Vec::new(),
            uplink: "eth0".parse().unwrap(),
            own: None,
            public: Dual::default(),
            leases: LeaseSet::default(),
            mtu: None,
            transports: vec![v4, v6, both],
            outer: [(v4, Family::V4), (v6, Family::V6)].into(),
        };
        let of_family = Dual { v4: Some(vec![v4, both]), v6: Some(vec![v6, both]) };
        assert_eq!(network.transports_of(), of_family);
    }
}
