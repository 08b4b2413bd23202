//! The paths to the other nodes.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::More;

/// The answer to `GET /v1/paths`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PathsReport {
    /// [`VERSION`](crate::VERSION).
    pub version: u32,
    /// The numbers of paths. `null` if paths are not probed, if no network runs, or if the lease of
    /// this node has expired.
    pub summary: Option<PathsSummary>,
    /// One report for each other node and family. Failing paths come first, then paths with a
    /// lowered MTU, then all others. Within each group, the longest round trip comes first.
    pub paths: Vec<PathReport>,
    /// Fields that this version does not know.
    #[serde(flatten)]
    pub more: More,
}

/// The numbers of paths.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct PathsSummary {
    /// The time in which each path is probed at least once.
    pub interval: f64,
    /// The number of paths in each state.
    pub states: BTreeMap<PathState, u64>,
    /// The number of paths that fail, as [`PathState::fails`] says.
    pub failing: u64,
    /// Why routes have lower MTUs (`--path-mtu`), as at most five sentences without a full stop. An
    /// older daemon does not send this field.
    #[serde(default)]
    pub lowered: Vec<String>,
    /// The age of the oldest result. It is 0 without paths, and `null` if a path has no result yet.
    pub oldest: Option<f64>,
    /// Why paths cannot be probed, or `null` if they can.
    pub error: Option<String>,
    /// Fields that this version does not know.
    #[serde(flatten)]
    pub more: More,
}

/// The path to a peer in one family.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PathReport {
    /// The key of the peer's lease.
    pub key: String,
    /// `IPv4` or `IPv6`.
    pub family: String,
    /// Its state.
    pub state: PathState,
    /// When it began to fail or to lose packets of full size, or `null` if it does neither.
    pub since: Option<f64>,
    /// When it was probed last, or `null` if it was not probed yet.
    pub probed: Option<f64>,
    /// The last round trip of a small packet.
    pub round_trip: Option<f64>,
    /// The largest packet that passes, in bytes. `null` if larger packets are not lost, or if the
    /// size is not known.
    pub passes: Option<u16>,
    /// The MTU that the daemon gave the route (`--path-mtu`), in bytes, or `null` if it did not
    /// give the route an MTU.
    pub mtu: Option<u16>,
    /// The fault, or why the route has this MTU, as a sentence without a full stop.
    pub text: Option<String>,
    /// A command that repairs the fault or finds its cause.
    pub repair: Option<String>,
    /// Fields that this version does not know.
    #[serde(flatten)]
    pub more: More,
}

/// The state of a path. States are ordered by their names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum PathState {
    /// Small packets pass, and packets of full size are lost.
    #[serde(rename = "full size lost")]
    FullSizeLost,
    /// Packets of full size are lost, and the route has an `mtu` that passes.
    #[serde(rename = "mtu lowered")]
    MtuLowered,
    /// No address of the node replies, and other nodes reply.
    #[serde(rename = "node down")]
    NodeDown,
    /// Packets of pods pass.
    Ok,
    /// Packets arrive at the peer, and nothing comes back.
    #[serde(rename = "one way")]
    OneWay,
    /// The public address of the node replies, and its tunnel address does not.
    #[serde(rename = "tunnel blocked")]
    TunnelBlocked,
    /// No node replies, or packets to the public address of the node cannot be sent.
    #[serde(rename = "underlay down")]
    UnderlayDown,
    /// No address of the peer has answered since the network started, or its lease is rejected.
    #[serde(other)]
    Unknown,
}

impl PathState {
    /// Every state, by name.
    pub const ALL: [Self; 8] = [
        Self::FullSizeLost,
        Self::MtuLowered,
        Self::NodeDown,
        Self::Ok,
        Self::OneWay,
        Self::TunnelBlocked,
        Self::UnderlayDown,
        Self::Unknown,
    ];

    /// Its name in the API and in metrics.
    pub const fn name(self) -> &'static str {
        match self {
            Self::FullSizeLost => "full size lost",
            Self::MtuLowered => "mtu lowered",
            Self::NodeDown => "node down",
            Self::Ok => "ok",
            Self::OneWay => "one way",
            Self::TunnelBlocked => "tunnel blocked",
            Self::UnderlayDown => "underlay down",
            Self::Unknown => "unknown",
        }
    }

    /// Whether packets of pods are lost on the path.
    pub const fn fails(self) -> bool {
        !matches!(self, Self::Ok | Self::Unknown | Self::MtuLowered)
    }
}

impl fmt::Display for PathState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_names_of_states_are_those_of_json_and_sorted() {
        for state in PathState::ALL {
            assert_eq!(serde_json::json!(state), state.name());
        }
        assert!(PathState::ALL.is_sorted());
        assert!(PathState::ALL.is_sorted_by_key(|state| state.name()));
    }
}
