//! The other nodes.

use serde::{Deserialize, Serialize};

/// The answer to `GET /v1/peers`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PeersReport {
    /// [`VERSION`](crate::VERSION).
    pub version: u32,
    /// All other nodes, by subnet.
    pub peers: Vec<PeerReport>,
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
    /// `in place`, `pending`, `failing` or `rejected`.
    pub state: String,
    /// Why it is not in place, or what is wrong with its lease although it is.
    pub reason: Option<String>,
    /// When its lease changed last; `null`: not while this network has run.
    pub changed: Option<f64>,
    /// The encrypted tunnels to it, one for each device. An older daemon does not send them.
    #[serde(default)]
    pub tunnels: Vec<TunnelReport>,
}

/// The encrypted tunnel to a peer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TunnelReport {
    /// The tunnel device.
    pub device: String,
    /// The age of the last handshake, in seconds; 0 if the clock was set back since then; `null`:
    /// there was none since the peer was added.
    pub handshake: Option<f64>,
    /// The address and port to which packets go; `null`: those of the lease.
    pub endpoint: Option<String>,
    /// Received bytes since the peer was added, with headers and handshakes.
    pub received: u64,
    /// Sent bytes since the peer was added, with headers and handshakes.
    pub sent: u64,
}
