//! The answer to `GET /v1/status`.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::{Finding, More, PathsSummary, PeerReport, Problem, StoreReport};

/// The answer to `GET /v1/status`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StatusReport {
    /// [`VERSION`](crate::VERSION).
    pub version: u32,
    /// The time of the answer.
    pub time: f64,
    /// The process.
    pub daemon: DaemonReport,
    /// Whether no problem is an error.
    pub ready: bool,
    /// The problems, errors first.
    pub problems: Vec<Problem>,
    /// Conditions of this host that may lose packets of pods, errors first. Readiness does not
    /// depend on them.
    #[serde(default)]
    pub findings: Vec<Finding>,
    /// Inputs of findings that could not be read.
    #[serde(default)]
    pub unread: Vec<String>,
    /// `null` while no network runs.
    pub network: Option<NetworkReport>,
    /// `null` before the store was opened.
    pub store: Option<StoreReport>,
    /// Fields that this version does not know.
    #[serde(flatten)]
    pub more: More,
}

/// The process.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DaemonReport {
    /// The program's version.
    pub version: String,
    /// The process id.
    pub pid: u32,
    /// When it started.
    pub started: f64,
    /// How it is deployed, which decides on the commands of hints and repairs.
    #[serde(default)]
    pub deployment: Deployment,
    /// Fields that this version does not know.
    #[serde(flatten)]
    pub more: More,
}

/// How a daemon is deployed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Deployment {
    /// A unit of systemd.
    #[default]
    Systemd,
    /// A pod of Kubernetes, whose API is the store.
    Kubernetes,
    /// A part of another program.
    Embedded,
}

/// The network that runs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct NetworkReport {
    /// When it was built.
    pub since: f64,
    /// The type of its backend.
    pub backend: String,
    /// The backend type in the leases of its backend.
    #[serde(default)]
    pub lease_type: String,
    /// The code that moves the packets. It is empty if the backend always uses the same code.
    #[serde(default)]
    pub path: String,
    /// The move to the backend of the network config, or `null` if the node is not moving.
    #[serde(default)]
    pub moving: Option<MoveReport>,
    /// The network config in the store if this node does not use it, or `null` if it does.
    #[serde(default)]
    pub refused_config: Option<RefusedConfig>,
    /// The largest packet that pods may send, in bytes.
    pub mtu: u32,
    /// The pod networks.
    pub networks: Vec<String>,
    /// This node's lease.
    pub lease: LeaseReport,
    /// The external interface.
    pub interface: InterfaceReport,
    /// The tunnel device of each family, such as `flannel.1` of `IPv4`. Empty without tunnels.
    #[serde(default)]
    pub devices: BTreeMap<String, String>,
    /// The bytes that the tunnel adds to a packet of each family. Empty without tunnels.
    #[serde(default)]
    pub overhead: BTreeMap<String, u32>,
    /// The kinds of packets, such as tunnel packets, that other nodes send to this one in addition
    /// to packets of pods.
    #[serde(default)]
    pub transports: Vec<TransportReport>,
    /// Whether packets of pods go between some nodes without a tunnel.
    #[serde(default)]
    pub bare_routes: bool,
    /// Whether all desired objects are in the kernel, from a complete and live set of leases.
    pub in_sync: bool,
    /// Whether the leases come from the store, not from a cache.
    pub live: bool,
    /// The number of desired objects, in the kernel or not.
    pub objects: u64,
    /// The objects that the kernel refuses.
    pub failing: Counted<FailureReport>,
    /// All other nodes. `listed` begins with rejected, failing and pending nodes. Then come the
    /// nodes whose leases changed last.
    pub peers: Counted<PeerReport>,
    /// The number of peers whose leases are accepted.
    pub accepted: u64,
    /// The number of peers whose leases are rejected.
    #[serde(default)]
    pub rejected: u64,
    /// The number of peers whose objects are not all in the kernel yet. Failing peers do not count.
    #[serde(default)]
    pub pending: u64,
    /// The numbers of paths to peers, or `null` if paths are not probed.
    #[serde(default)]
    pub paths: Option<PathsSummary>,
    /// The use of each pod network.
    pub subnets: Vec<SubnetsReport>,
    /// Repairs of objects that other programs changed.
    pub repairs: RepairsReport,
    /// The time from a lease's arrival to the kernel's acknowledgement.
    pub latency: LatencyReport,
    /// The packets that the backend moves or drops itself. `null` if it does not handle packets, or
    /// if their numbers cannot be read now.
    #[serde(default)]
    pub traffic: Option<TrafficReport>,
    /// The packets that the guard of the tunnel refused. `null` if packets are not checked, or if
    /// their numbers cannot be read now.
    #[serde(default)]
    pub guard: Option<GuardReport>,
    /// How packets from pods to addresses outside the pod network are masqueraded. `null` if they
    /// are not.
    #[serde(default)]
    pub masquerade: Option<MasqueradeReport>,
    /// Fields that this version does not know.
    #[serde(flatten)]
    pub more: More,
}

/// How packets from pods to addresses outside the pod network are masqueraded. An empty list is no
/// restriction.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MasqueradeReport {
    /// The families whose packets are masqueraded: `IPv4`, `IPv6`. At least one.
    pub families: Vec<String>,
    /// The networks to which packets are not masqueraded, by options and by the network config.
    pub exclude: Vec<String>,
    /// The sources that packets get. A family without one gets the address of the device by which
    /// a packet leaves.
    pub sources: Vec<String>,
    /// The source ports of TCP, UDP and SCTP, as `1024-65535`, or `null` for all.
    pub ports: Option<String>,
    /// The devices by which masqueraded packets leave.
    pub interfaces: Vec<String>,
}

/// The packets that the guard of a tunnel refused since it was put in place.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuardReport {
    /// Whether they are dropped (`"SourceCheck": true`). If not, they are only counted.
    pub drops: bool,
    /// The packets by reason: `stranger`, `foreign_source`, `pod`.
    pub packets: BTreeMap<String, u64>,
}

/// A network config in the store that a node does not use, because it cannot build a network from
/// it. Its last network runs on, and the node tries again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RefusedConfig {
    /// The type of the backend in that config. It is empty if the config is not valid.
    pub backend: String,
    /// The obstacle, as a sentence without a full stop.
    pub reason: String,
}

/// The packets that a backend moves or drops itself, since its data plane began.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TrafficReport {
    /// Packets that were sent to other nodes, or `null` if the kernel moves them.
    pub sent_packets: Option<u64>,
    /// Their bytes.
    pub sent_bytes: Option<u64>,
    /// Packets that were received from other nodes, or `null` if the kernel moves them.
    pub received_packets: Option<u64>,
    /// Their bytes.
    pub received_bytes: Option<u64>,
    /// Packets that were dropped, by reason, such as `no_peer`.
    pub dropped: BTreeMap<String, u64>,
}

/// The move of this node from one backend to another. Backends are named by their types in leases.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MoveReport {
    /// The backend of the network config.
    pub to: String,
    /// The other backends that this node runs.
    pub from: Vec<String>,
    /// The backends in this node's lease, the preferred one first.
    pub offers: Vec<String>,
    /// The number of leases, this node's included.
    pub leases: u64,
    /// The number of leases that offer `to`.
    pub offering: u64,
    /// The event before the next step, as a noun, or `null` if the step is being done.
    pub waits_for: Option<String>,
}

/// A kind of packet that nodes send to each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum TransportReport {
    /// UDP datagrams to this port.
    Udp(u16),
    /// IP packets of this protocol number.
    Protocol(u8),
}

/// The number of values, and a list of the most important ones.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Counted<T> {
    /// The number of values.
    pub total: u64,
    /// The most important values.
    pub listed: Vec<T>,
}

/// This node's lease.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LeaseReport {
    /// Its key in the store.
    pub key: String,
    /// Its subnets.
    pub subnets: Vec<String>,
    /// Whether the node owns the subnets.
    #[serde(flatten)]
    pub ownership: Ownership,
}

/// Whether a node owns the subnets of its lease. In JSON the field `ownership` has the name of the
/// variant, and `remaining` is beside it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "ownership", rename_all = "lowercase")]
#[non_exhaustive]
pub enum Ownership {
    /// It owns them until the lease ends.
    Held {
        /// The time until then unless the lease is renewed, in seconds.
        remaining: f64,
    },
    /// It owns them, and the lease has no end.
    Reserved,
    /// The time of the lease ran out, and the store has not confirmed a renewal.
    Lapsed,
    /// It has no lease, or lost it.
    #[serde(other)]
    None,
}

/// The external interface.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct InterfaceReport {
    /// Its name.
    pub name: String,
    /// The largest packet that it takes, in bytes.
    pub mtu: u32,
    /// Its addresses.
    pub addresses: Vec<String>,
    /// The addresses that peers use.
    pub public: Vec<String>,
    /// Why it was chosen.
    pub reason: String,
}

/// An object that the kernel refuses.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct FailureReport {
    /// The object.
    pub object: String,
    /// The change that the kernel refuses.
    pub change: String,
    /// The key of the lease that defines the object, or `null` for an object of this node.
    pub peer: Option<String>,
    /// The kernel's error number.
    pub errno: i32,
    /// The kernel's error.
    pub error: String,
    /// When it was refused first.
    pub since: f64,
    /// The number of attempts.
    pub tries: u32,
}

/// The use of a pod network.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SubnetsReport {
    /// `IPv4` or `IPv6`.
    pub family: String,
    /// Subnets from `SubnetMin` to `SubnetMax`. In Kubernetes, subnets of the size of this node's
    /// subnet.
    pub total: u64,
    /// Subnets that nodes hold.
    pub used: u64,
    /// Subnets that no node holds.
    pub free: u64,
}

/// Repairs of objects that other programs changed, deleted or added.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RepairsReport {
    /// The number of repairs since the daemon's start.
    pub total: u64,
    /// The latest repairs, newest first: the last 16, then at most 16 earlier ones. Each of the
    /// earlier ones was made at least a second after the one before it, so that a burst of repairs
    /// does not hide all others.
    pub last: Vec<RepairReport>,
}

/// One repair.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RepairReport {
    /// When it was made.
    pub at: f64,
    /// The repaired object, and the author of the change, as text.
    pub text: String,
    /// The process that made the change, such as `ip (process 4711)`, or `probably ip (process
    /// 4711)` if it may be another process. `null` if it is not known.
    #[serde(default)]
    pub process: Option<String>,
    /// That process, for programs, or `null` if it is not known.
    #[serde(default)]
    pub author: Option<ProcessReport>,
}

/// A process that changed an object. `Display` is `ip (process 4711)`, or `probably ip (process
/// 4711)`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessReport {
    /// The name of its program. The kernel shortens it to 15 bytes.
    pub name: String,
    /// Its id.
    pub pid: u32,
    /// Whether it certainly made the change. If not, another process may have made it.
    pub certain: bool,
}

impl fmt::Display for ProcessReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, pid, certain } = self;
        f.write_str(if *certain { "" } else { "probably " })?;
        write!(f, "{name} (process {pid})")
    }
}

/// Latencies of the changes because of leases.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LatencyReport {
    /// The number of changes.
    pub count: u64,
    /// The median. `null` without changes, or if it is beyond the range that is measured.
    pub p50: Option<f64>,
    /// The 99th percentile.
    pub p99: Option<f64>,
}
