//! The paths to the other nodes.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// The answer to `GET /v1/paths`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PathsReport {
    /// [`VERSION`](crate::VERSION).
    pub version: u32,
    /// The numbers of paths. `null`: paths are not probed, no network runs, or this node's lease
    /// has run out.
    pub summary: Option<PathsSummary>,
    /// One for each other node and family: failing paths first, then the longest round trips.
    pub paths: Vec<PathReport>,
}

/// The numbers of paths.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct PathsSummary {
    /// The time in which each path is probed at least once.
    pub interval: f64,
    /// The number of paths in each state. [`PathReport::state`] has the states.
    pub states: BTreeMap<String, u64>,
    /// The number of paths that fail: those that are not `ok`, `unknown` or `mtu lowered`.
    pub failing: u64,
    /// Why routes have lower MTUs (`--path-mtu`), as sentences without a full stop; at most five of
    /// them. An older daemon does not send it.
    #[serde(default)]
    pub lowered: Vec<String>,
    /// The age of the oldest result, 0 without paths; `null`: a path has none yet.
    pub oldest: Option<f64>,
    /// Why paths cannot be probed; `null`: they can.
    pub error: Option<String>,
}

/// The path to a peer in one family.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PathReport {
    /// The key of the peer's lease.
    pub key: String,
    /// `IPv4` or `IPv6`.
    pub family: String,
    /// `ok`; `unknown`: no address of the peer has answered since the network started, or its lease
    /// is rejected; `mtu lowered`: packets of full size are lost, and the route has an `mtu` that
    /// passes; or a fault: `node down`, `underlay down`, `tunnel blocked`, `one way` (packets
    /// arrive at the peer, and nothing comes back), `full size lost`.
    pub state: String,
    /// When it began to fail, or to lose packets of full size; `null`: it does neither.
    pub since: Option<f64>,
    /// When it was probed last; `null`: not yet.
    pub probed: Option<f64>,
    /// The last round trip of a small packet.
    pub round_trip: Option<f64>,
    /// The largest packet that passes, in bytes; `null`: larger ones are not lost, or the size is
    /// not known.
    pub passes: Option<u16>,
    /// The MTU that the daemon gave the route (`--path-mtu`), in bytes; `null`: none.
    pub mtu: Option<u16>,
    /// The fault, or why the route has this MTU, as a sentence without a full stop.
    pub text: Option<String>,
    /// A command that repairs the fault or finds its cause.
    pub repair: Option<String>,
}
