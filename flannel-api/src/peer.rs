//! The other nodes.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::{More, RejectionCause};

/// The answer to `GET /v1/peers`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PeersReport {
    /// [`VERSION`](crate::VERSION).
    pub version: u32,
    /// All other nodes, by subnet.
    pub peers: Vec<PeerReport>,
    /// Fields that this version does not know.
    #[serde(flatten)]
    pub more: More,
}

/// Another node.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PeerReport {
    /// The key of its lease in the store.
    pub key: String,
    /// The subnets of its lease.
    pub subnets: Vec<String>,
    /// The addresses by which other nodes reach it.
    pub public: Vec<String>,
    /// The backend type of its lease.
    pub backend: String,
    /// The state of its objects.
    pub state: PeerState,
    /// Why it is not in place, or what is wrong with its lease although it is.
    pub reason: Option<String>,
    /// The cause of the rejection, for programs, or `null` if the lease is not rejected.
    #[serde(default)]
    pub rejection: Option<RejectionCause>,
    /// When its lease changed last, or `null` if it has not changed since this network started.
    pub changed: Option<f64>,
    /// The encrypted tunnels to it, one for each device. An older daemon does not send them.
    #[serde(default)]
    pub tunnels: Vec<TunnelReport>,
    /// Fields that this version does not know.
    #[serde(flatten)]
    pub more: More,
}

/// The state of the objects of a peer. States are ordered as in a report, with errors first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum PeerState {
    /// Its lease is rejected.
    Rejected,
    /// The kernel refuses an object.
    Failing,
    /// Not all objects are in the kernel yet.
    Pending,
    /// All objects are in the kernel.
    #[serde(rename = "in place")]
    InPlace,
    /// No daemon runs that knows it.
    #[serde(rename = "not known", other)]
    Unknown,
}

impl fmt::Display for PeerState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Rejected => "rejected",
            Self::Failing => "failing",
            Self::Pending => "pending",
            Self::InPlace => "in place",
            Self::Unknown => "not known",
        })
    }
}

/// The encrypted tunnel to a peer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TunnelReport {
    /// The tunnel device.
    pub device: String,
    /// The age of the last handshake, in seconds. It is 0 if the clock was set back since then, and
    /// `null` if there was no handshake since the peer was added.
    pub handshake: Option<f64>,
    /// The address and port to which packets go, or `null` if they are the ones in the lease.
    pub endpoint: Option<String>,
    /// Received bytes since the peer was added, with headers and handshakes.
    pub received: u64,
    /// Sent bytes since the peer was added, with headers and handshakes.
    pub sent: u64,
}
