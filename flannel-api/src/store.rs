//! The store of leases.

use serde::{Deserialize, Serialize};

use crate::More;

/// The store of leases.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StoreReport {
    /// Its name.
    pub name: String,
    /// Its kind and place.
    #[serde(default)]
    pub kind: StoreKind,
    /// When it answered last, or `null` if it has not answered this daemon yet.
    pub answered: Option<f64>,
    /// The revision of its last answer.
    pub revision: Option<u64>,
    /// The number of requests.
    pub requests: u64,
    /// The number of requests that failed.
    pub failures: u64,
    /// Why it does not answer, or `null` if it answers.
    pub error: Option<String>,
    /// The cause of the error, for programs, or `null` if it answers.
    #[serde(default)]
    pub failure: Option<StoreFailure>,
    /// When it failed last.
    pub error_at: Option<f64>,
    /// Entries in it that are not leases: pairs of key and reason.
    pub skipped: Vec<(String, String)>,
    /// Fields that this version does not know.
    #[serde(flatten)]
    pub more: More,
}

/// The kind of a store, with its place. In JSON the field `type` has the name of the variant.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
#[non_exhaustive]
pub enum StoreKind {
    /// A directory on the host.
    Directory {
        /// Its path.
        path: String,
    },
    /// An etcd cluster.
    Etcd {
        /// The URLs of its endpoints.
        endpoints: Vec<String>,
    },
    /// The Kubernetes API.
    Kubernetes {
        /// The URL of the API server.
        url: String,
    },
    /// Another store.
    #[default]
    #[serde(other)]
    Other,
}

/// Why a store does not answer. In JSON the field `cause` has the name of the variant.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "cause", rename_all = "snake_case")]
#[non_exhaustive]
pub enum StoreFailure {
    /// A certificate has expired or is not valid yet, or a clock is wrong.
    CertificateTime,
    /// The file system of the directory is mounted read-only.
    ReadOnly,
    /// The file system of the directory is full.
    NoSpace,
    /// A process holds the lock of the directory.
    Locked {
        /// The name of its program, or `null` if it is not known.
        program: Option<String>,
        /// The process id, or `null` if it is not known.
        pid: Option<u32>,
    },
    /// The database of etcd has reached its quota.
    QuotaExceeded,
    /// The store does not accept the credentials of the node.
    Unauthorized,
    /// The account of the node lacks a permission.
    Forbidden,
    /// The node does not accept the certificate of the server.
    ServerCertificate,
    /// The file with the node's token cannot be read.
    Token {
        /// Its path.
        path: String,
    },
    /// Another host took the lease of this node, and still has it.
    RivalHost {
        /// The subnets of the lease.
        lease: String,
        /// Whether the lease is a reservation, which has no holder.
        reserved: bool,
    },
    /// Another cause. Usually the store cannot be reached.
    #[default]
    #[serde(other)]
    Other,
}
