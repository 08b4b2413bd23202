#![doc = include_str!("../README.md")]
//!
//! # Requests
//!
//! | request | answer |
//! |---|---|
//! | `GET /healthz` | 200 while the daemon runs |
//! | `GET /readyz` | 200, or 503 with the reasons |
//! | `GET /metrics` | Prometheus' text format |
//! | `GET /v1/status` | [`StatusReport`]; `?fresh=true` repeats the checks that start a process |
//! | `GET /v1/peers` | [`PeersReport`] |
//! | `GET /v1/paths` | [`PathsReport`]: the results of the probes of paths |
//! | `GET /v1/why?address=A` | [`WhyReport`]: the route of packets for `A`, with the reasons |
//! | `POST /v1/reload` | [`ReloadReport`]; does what SIGHUP does |
//! | `POST /v1/trial?config=C` | [`TrialReport`]: whether a network can be built from a config |
//! | `POST /v1/log?filter=F` | [`LogReport`]; sets `--log` until SIGHUP or a reload |
//!
//! The control socket serves all of them. The health port (TCP) serves the first three only. Each
//! `POST` needs root or the user that the daemon runs as. An answer other than 200 is an
//! [`ErrorReport`].
//!
//! # Versions
//!
//! Within one version of the API fields are added. No field is renamed, removed or given another
//! meaning. Times are seconds since 1970. Durations are seconds. `null` means that the
//! value is absent or not known.

mod client;
#[cfg(feature = "core")]
mod convert;
mod finding;
mod path;
mod peer;
mod problem;
mod rejection;
pub mod request;
mod status;
mod store;
#[cfg(feature = "testing")]
pub mod testing;
mod why;

use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};

pub use client::{Client, Error};
#[cfg(feature = "core")]
pub use convert::{by_family, texts};
pub use finding::Finding;
pub use path::{PathReport, PathState, PathsReport, PathsSummary};
pub use peer::{PeerReport, PeerState, PeersReport, TunnelReport};
pub use problem::{LeaseLoss, Problem, ProblemCause, Severity};
pub use rejection::{RejectionCause, RejectionReport};
pub use status::{
    Counted, DaemonReport, Deployment, FailureReport, GuardReport, InterfaceReport, LatencyReport,
    LeaseReport, MasqueradeReport, MoveReport, NetworkReport, Ownership, ProcessReport,
    RefusedConfig, RepairReport, RepairsReport, StatusReport, SubnetsReport, TrafficReport,
    TransportReport,
};
pub use store::{StoreFailure, StoreKind, StoreReport};
pub use why::{ObjectReport, ObjectState, WhyReport};

/// Fields of an answer that this version of the crate does not know, because the daemon is newer.
pub type More = serde_json::Map<String, serde_json::Value>;

/// The version of the API. Each path begins with it: `/v1/`.
pub const VERSION: u32 = 1;

/// A time in the API: seconds since 1970, rounded to milliseconds.
pub fn seconds(time: SystemTime) -> f64 {
    rounded(time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default())
}

/// A duration in the API: seconds, rounded to milliseconds.
pub fn rounded(duration: Duration) -> f64 {
    (duration.as_secs_f64() * 1000.0).round() / 1000.0
}

/// The answer to `POST /v1/reload`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReloadReport {
    /// [`VERSION`].
    pub version: u32,
    /// The result, as a sentence without a full stop.
    pub found: String,
    /// Fields that this version does not know.
    #[serde(flatten)]
    pub more: More,
}

/// The answer to `POST /v1/trial`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TrialReport {
    /// [`VERSION`].
    pub version: u32,
    /// Whether the config was tried. It is not tried while no network runs.
    pub tried: bool,
    /// The obstacle on this node, as a sentence without a full stop, or `null` if the network can
    /// be built.
    pub obstacle: Option<String>,
    /// What this node would do differently than the config says.
    #[serde(default)]
    pub warnings: Vec<ProblemCause>,
    /// Fields that this version does not know.
    #[serde(flatten)]
    pub more: More,
}

/// The answer to `POST /v1/log`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogReport {
    /// [`VERSION`].
    pub version: u32,
    /// The log filter that is in force now.
    pub filter: String,
    /// Fields that this version does not know.
    #[serde(flatten)]
    pub more: More,
}

/// The body of an answer other than 200.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErrorReport {
    /// [`VERSION`].
    pub version: u32,
    /// The reason, as a sentence without a full stop.
    pub error: String,
}
