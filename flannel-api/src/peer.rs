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
    /// Why it is not in place.
    pub reason: Option<String>,
    /// When its lease changed last; `null`: not while this network has run.
    pub changed: Option<f64>,
}
