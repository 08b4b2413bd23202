//! Packets of pods, as rules see them, and the hooks that they pass.

use std::collections::BTreeSet;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use flannel_core::Subnet;
use flannel_core::address::Family;
use flannel_core::backend::Transport;
use flannel_core::object::LinkName;
use flannel_netlink::nftables::program::index_of;
use flannel_netlink::nftables::{TableFamily, hook};

/// The ports of the packets. Rules about services do not name them.
pub(super) const FROM_PORT: u16 = 45_678;
const TO_PORT: u16 = 54_321;
/// `IPPROTO_TCP` and `IPPROTO_UDP`.
pub(super) const TCP: u8 = 6;
pub(super) const UDP: u8 = 17;
/// Outside of the pod network: the address of a root name server, which no firewall of a host
/// takes for a wrong one.
const OUTSIDE_V4: Ipv4Addr = Ipv4Addr::new(198, 41, 0, 4);
const OUTSIDE_V6: Ipv6Addr = Ipv6Addr::new(0x2001, 0x503, 0xba3e, 0, 0, 0, 2, 0x30);
/// `ETH_P_IP` and `ETH_P_IPV6`.
const ETHERNET_V4: [u8; 2] = [8, 0];
const ETHERNET_V6: [u8; 2] = [0x86, 0xdd];

/// A byte, or `None` if it is not known.
pub(super) type Byte = Option<u8>;

/// The pods of a family, and the devices that their packets pass.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodPackets {
    /// The pod network.
    pub network: Subnet,
    /// The subnet of this node.
    pub own: Subnet,
    /// The subnet of another node. `None` if there is none yet.
    pub peer: Option<Subnet>,
    /// The bridge of the pods. `None` if it is not known: then no rule about a device of pods is
    /// found.
    pub bridge: Option<LinkName>,
    /// The devices by which packets to pods of other nodes leave, and by which theirs arrive.
    pub to_peers: Vec<LinkName>,
    /// The device by which packets to other destinations leave. `None` if it is not known.
    pub uplink: Option<LinkName>,
    /// The address of this node on `uplink`, from which it sends packets that leave there. `None`
    /// if it is not known: then it counts as the first address of `own`.
    pub node: Option<IpAddr>,
    /// Tunnel packets of another node. `None` without a tunnel, or if no other node is known.
    pub tunnel: Option<TunnelPackets>,
}

/// Packets of the tunnel, which arrive and leave by [`PodPackets::uplink`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TunnelPackets {
    /// The address of another node.
    pub from: IpAddr,
    /// The address of this node.
    pub to: IpAddr,
    /// The kinds of packets.
    pub transports: Vec<Transport>,
}

/// The way of packets of pods.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Flow {
    /// From a pod of this node to a pod of another node.
    FromPod,
    /// From a pod of another node to a pod of this node.
    ToPod,
    /// From a pod of this node to an address outside of the pod network.
    Outside,
    /// From this node itself to a pod of another node.
    FromHost,
    /// From another node to this one: packets of the tunnel.
    Tunnel(Transport),
    /// From this node to another one: packets of the tunnel.
    TunnelOut(Transport),
}

impl Flow {
    /// The ways of packets of pods.
    const OF_PODS: [Self; 4] = [Self::FromPod, Self::ToPod, Self::Outside, Self::FromHost];

    /// Whether this node itself sends the packets.
    pub(super) fn is_sent_here(self) -> bool {
        matches!(self, Self::FromHost | Self::TunnelOut(_))
    }

    /// Whether the packets are for this node itself.
    pub(super) fn ends_here(self) -> bool {
        matches!(self, Self::Tunnel(_))
    }

    /// Whether both ends are pods.
    pub(super) fn is_between_pods(self) -> bool {
        matches!(self, Self::FromPod | Self::ToPod)
    }
}

/// For example `from pods of this node to pods of other nodes`.
impl fmt::Display for Flow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::FromPod => "from pods of this node to pods of other nodes",
            Self::ToPod => "from pods of other nodes to pods of this node",
            Self::Outside => "from pods of this node to addresses outside of the pod network",
            Self::FromHost => "from this node to pods of other nodes",
            Self::Tunnel(transport) => {
                return write!(f, "of the tunnel ({transport}) from other nodes to this node");
            }
            Self::TunnelOut(transport) => {
                return write!(f, "of the tunnel ({transport}) from this node to other nodes");
            }
        })
    }
}

/// What is known about the device at an end of the way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
    /// There is none in this hook.
    None,
    /// It is not known.
    Unknown,
    Device(LinkName),
}

impl From<Option<LinkName>> for End {
    fn from(device: Option<LinkName>) -> Self {
        device.map_or(Self::Unknown, Self::Device)
    }
}

impl End {
    /// The name as the kernel loads it.
    pub(super) fn name(self) -> [Byte; 16] {
        let mut bytes = [Some(0); 16];
        match self {
            Self::None => {}
            Self::Unknown => bytes = [None; 16],
            Self::Device(device) => {
                for (byte, letter) in bytes.iter_mut().zip(device.as_str().bytes()) {
                    *byte = Some(letter);
                }
            }
        }
        bytes
    }

    /// The index in the machine's byte order.
    pub(super) fn index(self) -> [Byte; 4] {
        match self {
            Self::None => [Some(0); 4],
            Self::Device(device) => index_of(device).map_or([None; 4], |index| index.map(Some)),
            Self::Unknown => [None; 4],
        }
    }

    /// Whether the device has this name, where `+` at the end stands for any rest. `None` if that
    /// is not known.
    pub(super) fn is(self, pattern: &str) -> Option<bool> {
        match self {
            Self::None => Some(pattern == "+"),
            Self::Unknown => (pattern == "+").then_some(true),
            Self::Device(device) => Some(match pattern.strip_suffix('+') {
                Some(start) => device.as_str().starts_with(start),
                None => device.as_str() == pattern,
            }),
        }
    }
}

/// A hook that packets pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Stage {
    pub(super) hook: Hook,
    pub(super) from: End,
    pub(super) to: End,
}

/// A hook.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Hook {
    /// A hook of a family of addresses: [`hook`].
    Network(u32),
    /// A hook of bridges, with the same numbers.
    Bridge(u32),
    /// Of the device by which the packet arrives.
    Ingress,
    /// Of the device by which it leaves.
    Egress,
}

impl Hook {
    /// The number of the hook in tables of a family. `None` if they do not have it.
    pub(super) fn number(self, table: TableFamily, family: Family) -> Option<u32> {
        match (self, table) {
            (Self::Network(number), TableFamily::Inet) => Some(number),
            (Self::Network(number), table) if table == TableFamily::from(family) => Some(number),
            (Self::Bridge(number), TableFamily::Bridge) => Some(number),
            (Self::Ingress, TableFamily::Inet) => Some(hook::INGRESS),
            (Self::Ingress, TableFamily::Netdev) => Some(hook::NETDEV_INGRESS),
            (Self::Egress, TableFamily::Netdev) => Some(hook::NETDEV_EGRESS),
            _ => None,
        }
    }

    pub(super) fn is_of_devices(self) -> bool {
        matches!(self, Self::Ingress | Self::Egress)
    }

    /// The built-in chain of iptables.
    pub(super) fn built_in(self) -> Option<&'static str> {
        match self {
            Self::Network(hook::PREROUTING) => Some("PREROUTING"),
            Self::Network(hook::INPUT) => Some("INPUT"),
            Self::Network(hook::FORWARD) => Some("FORWARD"),
            Self::Network(hook::OUTPUT) => Some("OUTPUT"),
            Self::Network(hook::POSTROUTING) => Some("POSTROUTING"),
            _ => None,
        }
    }
}

/// The name of the hook in `nft`.
impl fmt::Display for Hook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let number = match self {
            Self::Ingress => return f.write_str("ingress"),
            Self::Egress => return f.write_str("egress"),
            Self::Network(number) | Self::Bridge(number) => *number,
        };
        f.write_str(match number {
            hook::PREROUTING => "prerouting",
            hook::INPUT => "input",
            hook::FORWARD => "forward",
            hook::OUTPUT => "output",
            _ => "postrouting",
        })
    }
}

/// A packet, the first one of a connection.
#[derive(Debug, Clone)]
pub(super) struct Packet {
    pub(super) family: Family,
    pub(super) flow: Flow,
    pub(super) protocol: u8,
    pub(super) source: IpAddr,
    pub(super) destination: IpAddr,
    /// The device at each end, in the hook that it passes.
    pub(super) from: End,
    pub(super) to: End,
    /// The mark, in the machine's byte order.
    pub(super) mark: [Byte; 4],
    /// Whether connection tracking sees it.
    pub(super) tracked: Option<bool>,
    /// Whether a rule has translated its addresses.
    pub(super) translated: bool,
    /// The destination port.
    pub(super) port: u16,
    /// Other pods that rules name, some with a destination port.
    pub(super) named: BTreeSet<(IpAddr, Option<u16>)>,
    /// The network whose addresses are noted.
    network: Subnet,
}

impl Packet {
    /// The bytes of the header of the network, and of the transport.
    pub(super) fn headers(&self) -> (Vec<Byte>, Vec<Byte>) {
        let transport_len = if self.protocol == TCP { 20 } else { 8 };
        let has_ports = matches!(self.protocol, TCP | UDP);
        let known = |bytes: &[u8]| bytes.iter().map(|byte| Some(*byte)).collect::<Vec<_>>();
        let mut network = match (self.source, self.destination) {
            (IpAddr::V4(source), IpAddr::V4(destination)) => {
                let mut header = known(&[0x45, 0, 0, 0, 0, 0, 0, 0, 63, self.protocol, 0, 0]);
                // The length, the id, the bit that forbids fragments, and the checksum.
                for n in [2, 3, 4, 5, 6, 10, 11] {
                    header[n] = None;
                }
                header.extend(known(&source.octets()));
                header.extend(known(&destination.octets()));
                header
            }
            (source, destination) => {
                let mut header = known(&[0x60, 0, 0, 0, 0, 0, self.protocol, 63]);
                for byte in &mut header[2..6] {
                    *byte = None;
                }
                for address in [source, destination] {
                    let IpAddr::V6(address) = address else { continue };
                    header.extend(known(&address.octets()));
                }
                header
            }
        };
        let mut transport = known(&FROM_PORT.to_be_bytes());
        transport.extend(known(&self.port.to_be_bytes()));
        transport.retain(|_| has_ports);
        transport.resize(transport_len, None);
        if self.protocol == TCP {
            // The length of the header, and the flag SYN.
            transport[12] = Some(0x50);
            transport[13] = Some(2);
        }
        network.extend(transport.iter().copied());
        (network, transport)
    }

    /// The type of the frame.
    pub(super) fn ethernet(&self) -> [u8; 2] {
        if self.family == Family::V4 { ETHERNET_V4 } else { ETHERNET_V6 }
    }

    /// Notes that a rule names a subnet, perhaps with a destination port.
    pub(super) fn note(&mut self, network: Subnet, port: Option<u16>) {
        // A rule about the whole network, or more, concerns every packet.
        if self.network.covers(&network) && network != self.network {
            self.named.insert((any_pod(network), port));
        }
    }
}

/// An address that stands for the pods of a subnet: the last but one, if there are several.
fn any_pod(subnet: Subnet) -> IpAddr {
    let bits = u32::from(subnet.family().bits() - subnet.len()).min(100);
    subnet.nth(2u128.pow(bits).saturating_sub(2)).unwrap_or_else(|| subnet.base())
}

impl PodPackets {
    /// A packet of each way, for each pair of devices, with the hooks that it passes.
    pub(super) fn packets(&self, protocol: u8) -> Vec<(Packet, Vec<Stage>)> {
        let pod = any_pod(self.own);
        let remote = any_pod(self.peer.unwrap_or_else(|| self.other_subnet()));
        let outside = match self.network.family() {
            Family::V4 => IpAddr::from(OUTSIDE_V4),
            Family::V6 => IpAddr::from(OUTSIDE_V6),
        };
        let bridge = End::from(self.bridge);
        let mut to_peers: Vec<End> =
            self.to_peers.iter().map(|device| End::Device(*device)).collect();
        if to_peers.is_empty() {
            to_peers.push(End::Unknown);
        }
        let mut all = Vec::new();
        for flow in Flow::OF_PODS {
            let (source, destination) = match flow {
                Flow::FromPod => (pod, remote),
                Flow::ToPod => (remote, pod),
                Flow::Outside => (pod, outside),
                _ => (self.own.base(), remote),
            };
            let mut packet = self.packet(flow, protocol, source, destination);
            if flow == Flow::Outside {
                all.push((packet, stages(bridge, self.uplink.into(), flow)));
                continue;
            }
            for device in &to_peers {
                // Without a tunnel, this node sends with the address of the external interface.
                if flow == Flow::FromHost
                    && let (End::Device(device), Some(node)) = (device, self.node)
                    && self.uplink == Some(*device)
                {
                    packet.source = node;
                }
                let stages = match flow {
                    Flow::ToPod => stages(*device, bridge, flow),
                    Flow::FromHost => stages(End::None, *device, flow),
                    _ => stages(bridge, *device, flow),
                };
                all.push((packet.clone(), stages));
            }
        }
        // Once, and not for each protocol of pods.
        if protocol == UDP {
            all.extend(self.tunnel.iter().flat_map(|tunnel| self.tunnel_packets(tunnel)));
        }
        all
    }

    fn tunnel_packets(&self, tunnel: &TunnelPackets) -> impl Iterator<Item = (Packet, Vec<Stage>)> {
        let TunnelPackets { from, to, transports } = tunnel;
        let uplink = End::from(self.uplink);
        transports.iter().flat_map(move |transport| {
            [
                (Flow::Tunnel(*transport), [*from, *to], [uplink, End::None]),
                (Flow::TunnelOut(*transport), [*to, *from], [End::None, uplink]),
            ]
            .map(|(flow, [source, destination], [arrival, departure])| {
                let protocol =
                    if let Transport::Protocol(number) = transport { *number } else { UDP };
                let mut packet = self.packet(flow, protocol, source, destination);
                if let Transport::Udp(port) = transport {
                    packet.port = *port;
                }
                (packet, stages(arrival, departure, flow))
            })
        })
    }

    fn packet(&self, flow: Flow, protocol: u8, source: IpAddr, destination: IpAddr) -> Packet {
        Packet {
            family: self.network.family(),
            flow,
            protocol,
            source,
            destination,
            from: End::None,
            to: End::None,
            mark: [Some(0); 4],
            tracked: Some(true),
            translated: false,
            port: TO_PORT,
            named: BTreeSet::new(),
            network: self.network,
        }
    }

    /// The same packet from or to the pod `address`, perhaps to another port. `None` if no end of
    /// it is such a pod.
    pub(super) fn with(
        &self,
        packet: &Packet,
        address: IpAddr,
        port: Option<u16>,
    ) -> Option<Packet> {
        let is_own = self.own.contains(address);
        let mut packet = packet.clone();
        packet.port = port.unwrap_or(TO_PORT);
        match (packet.flow, is_own) {
            (Flow::FromPod | Flow::Outside, true) | (Flow::ToPod, false) => packet.source = address,
            (Flow::ToPod, true) | (Flow::FromPod | Flow::FromHost, false) => {
                packet.destination = address;
            }
            _ => return None,
        }
        Some(packet)
    }

    /// A subnet of the network that is not the own one.
    fn other_subnet(&self) -> Subnet {
        let count = 1u128 << u32::from(self.own.len() - self.network.len()).min(100);
        let size = 1u128 << u32::from(self.own.family().bits() - self.own.len()).min(100);
        let at = |n: u128| Subnet::new(self.network.nth(n.saturating_mul(size))?, self.own.len());
        [count.saturating_sub(2), 0]
            .into_iter()
            .filter_map(at)
            .find(|subnet| *subnet != self.own)
            .unwrap_or(self.own)
    }
}

/// The hooks that a packet passes.
fn stages(from: End, to: End, flow: Flow) -> Vec<Stage> {
    let mut all = Vec::new();
    let mut add = |hook, from, to| all.push(Stage { hook, from, to });
    let is_bridge = |end: End| matches!(end, End::Device(_));
    if flow.is_sent_here() {
        add(Hook::Network(hook::OUTPUT), End::None, to);
    } else {
        add(Hook::Ingress, from, End::None);
        if flow.ends_here() {
            add(Hook::Network(hook::PREROUTING), from, End::None);
            add(Hook::Network(hook::INPUT), from, End::None);
            return all;
        }
        if flow != Flow::ToPod && is_bridge(from) {
            // The port of the pod is not known.
            add(Hook::Bridge(hook::PREROUTING), End::Unknown, End::None);
            add(Hook::Bridge(hook::INPUT), End::Unknown, End::None);
        }
        add(Hook::Network(hook::PREROUTING), from, End::None);
        add(Hook::Network(hook::FORWARD), from, to);
    }
    // Before Linux 5.7 there is no device of arrival.
    let before = if flow.is_sent_here() { End::None } else { End::Unknown };
    add(Hook::Network(hook::POSTROUTING), before, to);
    if flow == Flow::ToPod && is_bridge(to) {
        add(Hook::Bridge(hook::OUTPUT), End::None, End::Unknown);
        add(Hook::Bridge(hook::POSTROUTING), End::None, End::Unknown);
    }
    add(Hook::Egress, End::None, to);
    all
}
