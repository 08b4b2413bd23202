//! The faults of a soak, drawn from a seed, and the pairs of hosts that each may break.

use std::collections::VecDeque;
use std::fmt;
use std::time::Duration;

use flannel_core::address::Family;

/// The backend of a cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Backend {
    /// Its hosts are on two links with a router between them. Packets go directly on a link, and
    /// through the tunnel between the links.
    Vxlan,
    /// All hosts are on one link.
    HostGw,
}

/// A cluster, as far as faults concern it. Hosts are numbered from 1.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Layout {
    pub(crate) backend: Backend,
    pub(crate) hosts: usize,
}

impl Layout {
    /// The link of a host: 0 or 1.
    pub(crate) fn link(self, host: usize) -> usize {
        usize::from(self.backend == Backend::Vxlan && host > self.hosts.div_ceil(2))
    }

    /// Whether packets between two hosts go through the tunnel.
    pub(crate) fn is_tunnelled(self, a: usize, b: usize) -> bool {
        self.link(a) != self.link(b)
    }

    /// Whether the daemon of a host is never restarted, so that its memory can be followed.
    pub(crate) fn lives_long(self, host: usize) -> bool {
        host == self.hosts
    }
}

/// A kind of fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Kind {
    DaemonKilled,
    DaemonStopped,
    /// All daemons are killed, except the ones that are never restarted.
    AllDaemonsKilled,
    FirewallWiped,
    SubnetFileRemoved,
    UnderlayMtu,
    ConfigChanged,
    /// Another device on each host has the VNI of the new config.
    ConfigImpossible,
    /// Nodes that do not exist come and go in the store.
    LeasesChurned,
    /// The events that a host misses are compacted away.
    StoreCompacted,
    LeaseDeleted,
    DeviceDeleted,
    DeviceDown,
    RouteDeleted,
    RouteToNowhere,
    RouteElsewhere,
    RoutesFlushed,
    NexthopDeleted,
    NeighbourDeleted,
    NeighbourChanged,
    EntryDeleted,
    EntryChanged,
    LinkDown,
    CarrierLost,
    FramesDropped,
    /// A firewall on the host drops the packets that the peer sends.
    PathBlocked,
    /// Sysctls that the doctor reports. Its commands restore them.
    ForwardingOff,
    TunnelForwardingOff,
    ArpIgnored,
}

impl Kind {
    const ALL: [(Self, &'static str); 29] = [
        (Self::DaemonKilled, "daemon killed"),
        (Self::DaemonStopped, "daemon stopped"),
        (Self::AllDaemonsKilled, "all daemons killed"),
        (Self::FirewallWiped, "firewall wiped"),
        (Self::SubnetFileRemoved, "subnet file removed"),
        (Self::UnderlayMtu, "underlay MTU 1400"),
        (Self::ConfigChanged, "network config with MTU 1400"),
        (Self::ConfigImpossible, "network config that no kernel can hold"),
        (Self::LeasesChurned, "leases churned"),
        (Self::StoreCompacted, "store compacted"),
        (Self::LeaseDeleted, "lease deleted"),
        (Self::DeviceDeleted, "device deleted"),
        (Self::DeviceDown, "device down"),
        (Self::RouteDeleted, "route deleted"),
        (Self::RouteToNowhere, "route to nowhere"),
        (Self::RouteElsewhere, "route elsewhere"),
        (Self::RoutesFlushed, "routes flushed"),
        (Self::NexthopDeleted, "nexthop deleted"),
        (Self::NeighbourDeleted, "neighbour deleted"),
        (Self::NeighbourChanged, "neighbour changed"),
        (Self::EntryDeleted, "fdb entry deleted"),
        (Self::EntryChanged, "fdb entry changed"),
        (Self::LinkDown, "link down"),
        (Self::CarrierLost, "carrier lost"),
        (Self::FramesDropped, "frames dropped"),
        (Self::PathBlocked, "path blocked"),
        (Self::ForwardingOff, "forwarding off"),
        (Self::TunnelForwardingOff, "tunnel forwarding off"),
        (Self::ArpIgnored, "ARP ignored"),
    ];

    pub(crate) fn name(self) -> &'static str {
        Self::ALL.iter().find(|(kind, _)| *kind == self).map_or("", |(_, name)| name)
    }

    fn all() -> impl Iterator<Item = Self> {
        Self::ALL.into_iter().map(|(kind, _)| kind)
    }

    /// Whether it changes objects of the tunnel.
    fn is_of_tunnel(self) -> bool {
        matches!(
            self,
            Self::DeviceDeleted
                | Self::DeviceDown
                | Self::NeighbourDeleted
                | Self::NeighbourChanged
                | Self::EntryDeleted
                | Self::EntryChanged
                | Self::TunnelForwardingOff
        )
    }

    /// Whether a cluster with this backend can have it. Only the vxlan cluster has an etcd.
    fn applies(self, backend: Backend) -> bool {
        backend == Backend::Vxlan || !(self.is_of_tunnel() || self == Self::StoreCompacted)
    }

    /// Whether its host's daemon ends.
    fn ends_daemon(self) -> bool {
        matches!(self, Self::DaemonKilled | Self::DaemonStopped | Self::LeaseDeleted)
    }

    /// Whether the store must answer, because the fault changes it.
    fn needs_store(self) -> bool {
        matches!(
            self,
            Self::LeasesChurned
                | Self::StoreCompacted
                | Self::LeaseDeleted
                | Self::ConfigChanged
                | Self::ConfigImpossible
        )
    }
}

/// A fault of a cluster. `peer` and `family` have no meaning for some kinds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Fault {
    pub(crate) kind: Kind,
    pub(crate) host: usize,
    pub(crate) peer: usize,
    pub(crate) family: Family,
}

impl Fault {
    /// Whether packets from one host to another may be lost, until the fault's repair is over.
    pub(crate) fn breaks(self, layout: Layout, [from, to]: [usize; 2], family: Family) -> bool {
        let of_host = self.host == from || self.host == to;
        let of_path = (self.host, self.peer) == (from, to);
        let of_family = self.family == family;
        let tunnelled = layout.is_tunnelled(from, to);
        match self.kind {
            Kind::DaemonKilled
            | Kind::DaemonStopped
            | Kind::AllDaemonsKilled
            | Kind::FirewallWiped
            | Kind::SubnetFileRemoved
            // The packets of the streams are small.
            | Kind::UnderlayMtu
            | Kind::ConfigChanged
            | Kind::ConfigImpossible
            | Kind::LeasesChurned => false,
            Kind::DeviceDeleted | Kind::DeviceDown => of_host && of_family && tunnelled,
            Kind::RouteDeleted | Kind::RouteToNowhere | Kind::RouteElsewhere => {
                of_path && of_family
            }
            Kind::RoutesFlushed => self.host == from && of_family,
            // Only IPv4 routes go by nexthop objects.
            Kind::NexthopDeleted => of_path && family == Family::V4,
            Kind::NeighbourDeleted
            | Kind::NeighbourChanged
            | Kind::EntryDeleted
            | Kind::EntryChanged => of_path && of_family && tunnelled,
            // The host is cut off while events are compacted. The peers delete the objects of a
            // host whose lease is deleted.
            Kind::LinkDown
            | Kind::CarrierLost
            | Kind::FramesDropped
            | Kind::StoreCompacted
            | Kind::LeaseDeleted => of_host,
            Kind::PathBlocked => (self.peer, self.host) == (from, to),
            Kind::ForwardingOff => of_host && family == Family::V4,
            Kind::TunnelForwardingOff => self.host == to && family == Family::V4 && tunnelled,
            Kind::ArpIgnored => self.host == to && family == Family::V4,
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kind, host, peer, family } = self;
        let name = kind.name();
        match kind {
            Kind::AllDaemonsKilled
            | Kind::ConfigChanged
            | Kind::ConfigImpossible
            | Kind::LeasesChurned => {
                write!(f, "{name}")
            }
            Kind::DeviceDeleted | Kind::DeviceDown | Kind::RoutesFlushed => {
                write!(f, "{name} on host {host} ({family})")
            }
            Kind::RouteDeleted
            | Kind::RouteToNowhere
            | Kind::RouteElsewhere
            | Kind::NeighbourDeleted
            | Kind::NeighbourChanged
            | Kind::EntryDeleted
            | Kind::EntryChanged => {
                write!(f, "{name} on host {host} for host {peer} ({family})")
            }
            Kind::NexthopDeleted => write!(f, "{name} on host {host} for host {peer}"),
            Kind::PathBlocked => write!(f, "{name} on host {host} from host {peer}"),
            _ => write!(f, "{name} on host {host}"),
        }
    }
}

/// How a store is out of reach while a fault is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outage {
    /// etcd is killed and started again; a directory is renamed.
    Gone,
    /// etcd is frozen; a directory is renamed.
    Frozen,
}

/// One step of a soak.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Step {
    /// The index of the cluster.
    pub(crate) cluster: usize,
    pub(crate) fault: Fault,
    pub(crate) outage: Option<Outage>,
    /// The time between the fault and the end of what the daemons do not repair, and from there to
    /// the end of the outage.
    pub(crate) hold: Duration,
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.fault)?;
        match self.outage {
            None => Ok(()),
            Some(Outage::Gone) => f.write_str(", while the store is gone"),
            Some(Outage::Frozen) => f.write_str(", while the store is frozen"),
        }
    }
}

/// SplitMix64. The seed determines the sequence.
#[derive(Debug)]
struct Random(u64);

impl Random {
    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % end as u64) as usize
    }
}

/// An endless sequence of steps. Each kind of fault of each cluster has its turn in each round.
#[derive(Debug)]
pub(crate) struct Schedule {
    layouts: Vec<Layout>,
    random: Random,
    /// The rest of the round.
    round: VecDeque<(usize, Kind)>,
}

impl Schedule {
    pub(crate) fn new(seed: u64, layouts: Vec<Layout>) -> Self {
        Self { layouts, random: Random(seed), round: VecDeque::new() }
    }

    /// All kinds of all clusters, in a random order.
    fn shuffled(&mut self) -> VecDeque<(usize, Kind)> {
        let mut all = Vec::new();
        for (cluster, layout) in self.layouts.iter().enumerate() {
            let kinds = Kind::all().filter(|kind| kind.applies(layout.backend));
            all.extend(kinds.map(|kind| (cluster, kind)));
        }
        for n in (1..all.len()).rev() {
            all.swap(n, self.random.below(n + 1));
        }
        all.into()
    }
}

impl Iterator for Schedule {
    type Item = Step;

    fn next(&mut self) -> Option<Step> {
        if self.round.is_empty() {
            self.round = self.shuffled();
        }
        let (cluster, kind) = self.round.pop_front()?;
        let layout = self.layouts[cluster];
        let random = &mut self.random;
        let hosts: Vec<usize> = (1..=layout.hosts)
            .filter(|host| !(kind.ends_daemon() && layout.lives_long(*host)))
            .collect();
        let host = hosts[random.below(hosts.len())];
        let peers: Vec<usize> = (1..=layout.hosts)
            .filter(|peer| *peer != host)
            .filter(|peer| !kind.is_of_tunnel() || layout.is_tunnelled(host, *peer))
            .collect();
        let peer = peers[random.below(peers.len())];
        let family = Family::BOTH[random.below(2)];
        let outage = match random.below(6) {
            0 => Some(Outage::Gone),
            1 => Some(Outage::Frozen),
            _ => None,
        };
        let outage = outage.filter(|_| !kind.needs_store());
        let hold = Duration::from_millis(500 + random.below(3000) as u64);
        let fault = Fault { kind, host, peer, family };
        Some(Step { cluster, fault, outage, hold })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    const VXLAN: Layout = Layout { backend: Backend::Vxlan, hosts: 4 };
    const HOST_GW: Layout = Layout { backend: Backend::HostGw, hosts: 4 };

    fn steps(seed: u64, count: usize) -> Vec<Step> {
        Schedule::new(seed, vec![VXLAN, HOST_GW]).take(count).collect()
    }

    #[test]
    fn a_seed_determines_the_steps() {
        assert_eq!(steps(1, 200), steps(1, 200));
        assert_ne!(steps(1, 200), steps(2, 200));
    }

    #[test]
    fn each_kind_has_its_turn_in_each_round() {
        let on = |backend| Kind::all().filter(move |kind| kind.applies(backend)).count();
        let round = on(Backend::Vxlan) + on(Backend::HostGw);
        assert_eq!(round, 29 + 21);
        for steps in steps(7, 3 * round).chunks(round) {
            let kinds: BTreeSet<_> = steps.iter().map(|s| (s.cluster, s.fault.kind)).collect();
            assert_eq!(kinds.len(), round);
        }
    }

    #[test]
    fn the_hosts_of_a_fault_fit_its_kind() {
        for step in steps(3, 5000) {
            let Step { fault: Fault { kind, host, peer, .. }, cluster, outage, .. } = step;
            let layout = [VXLAN, HOST_GW][cluster];
            assert!(host != peer && (1..=4).contains(&host) && (1..=4).contains(&peer), "{step}");
            assert!(!kind.is_of_tunnel() || layout.is_tunnelled(host, peer), "{step}");
            assert!(!kind.ends_daemon() || !layout.lives_long(host), "{step}");
            assert!(!kind.needs_store() || outage.is_none(), "{step}");
        }
    }

    /// The pairs of 4 hosts that a fault on host 1 with peer 3 may break, as `12` for 1 to 2.
    fn broken(kind: Kind, layout: Layout, family: Family) -> String {
        let fault = Fault { kind, host: 1, peer: 3, family: Family::V4 };
        let pairs = (1..=4).flat_map(|from| (1..=4).map(move |to| [from, to]));
        let pairs = pairs.filter(|[from, to]| from != to);
        let pairs = pairs.filter(|pair| fault.breaks(layout, *pair, family));
        pairs.map(|[from, to]| format!("{from}{to}")).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn a_fault_breaks_only_the_pairs_that_it_hits() {
        let all = "12 13 14 21 31 41";
        for (kind, layout, v4, v6) in [
            (Kind::DaemonKilled, VXLAN, "", ""),
            (Kind::FirewallWiped, HOST_GW, "", ""),
            // Hosts 1 and 2 are on one link, hosts 3 and 4 on the other.
            (Kind::DeviceDeleted, VXLAN, "13 14 31 41", ""),
            (Kind::RouteDeleted, VXLAN, "13", ""),
            (Kind::EntryChanged, VXLAN, "13", ""),
            (Kind::RoutesFlushed, HOST_GW, "12 13 14", ""),
            (Kind::NexthopDeleted, HOST_GW, "13", ""),
            (Kind::LinkDown, VXLAN, all, all),
            (Kind::LeaseDeleted, HOST_GW, all, all),
            (Kind::PathBlocked, VXLAN, "31", "31"),
            (Kind::ForwardingOff, HOST_GW, all, ""),
            (Kind::TunnelForwardingOff, VXLAN, "31 41", ""),
            (Kind::ArpIgnored, HOST_GW, "21 31 41", ""),
        ] {
            assert_eq!(broken(kind, layout, Family::V4), v4, "{}", kind.name());
            assert_eq!(broken(kind, layout, Family::V6), v6, "{}", kind.name());
        }
    }
}
