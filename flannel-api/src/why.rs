//! The answer to `GET /v1/why`: the route of packets to one address.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::{More, RejectionReport, TunnelReport};

/// The answer to `GET /v1/why?address=…`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct WhyReport {
    /// [`VERSION`](crate::VERSION).
    pub version: u32,
    /// The address in question.
    pub address: String,
    /// Whether packets take the right route, as far as this host knows.
    pub ok: bool,
    /// A sentence without a full stop.
    pub verdict: String,
    /// The command that helps, where one is known.
    pub hint: Option<String>,
    /// The pod network that contains the address.
    pub network: Option<String>,
    /// The key of the lease whose subnet contains the address.
    pub lease: Option<String>,
    /// The node that holds the lease.
    pub node: Option<String>,
    /// Why the lease is rejected.
    pub rejection: Option<RejectionReport>,
    /// The kernel objects that the lease defines. The list is empty if no daemon runs.
    pub objects: Vec<ObjectReport>,
    /// The kernel's route for a packet to the address.
    pub kernel: String,
    /// The encrypted tunnel to the node, or `null` if it does not exist or is not known.
    #[serde(default)]
    pub tunnel: Option<TunnelReport>,
    /// Why the leases may be out of date. `null` unless no daemon runs and the store does not
    /// answer.
    pub stale: Option<String>,
    /// Fields that this version does not know.
    #[serde(flatten)]
    pub more: More,
}

/// An object in the kernel and its state.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ObjectReport {
    /// The object, as text.
    pub object: String,
    /// Its state.
    #[serde(flatten)]
    pub state: ObjectState,
}

/// The state of an object. In JSON the field `state` has it, and `error` is beside it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "state", rename_all = "lowercase")]
#[non_exhaustive]
pub enum ObjectState {
    /// It is in the kernel.
    #[serde(rename = "in place")]
    InPlace,
    /// The kernel refuses it.
    Failing {
        /// The kernel's error.
        error: String,
    },
    /// It is not desired, because the lease is rejected.
    #[serde(rename = "not wanted")]
    Unwanted,
    /// It is not in the kernel yet.
    #[serde(other)]
    Pending,
}

impl fmt::Display for ObjectState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::InPlace => "in place",
            Self::Failing { .. } => "failing",
            Self::Unwanted => "not wanted",
            Self::Pending => "pending",
        })
    }
}
