//! Stores: their kinds, and the causes of their failures.

use std::fmt;
use std::io;
use std::time::SystemTime;

use crate::lease::Subnets;

/// The kind of a store, with its location. Programs decide by this value and not by the name of the
/// store.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum StoreKind {
    /// Any other store, such as a store in memory.
    #[default]
    Other,
    /// A directory on this host.
    Directory {
        /// The path of the directory.
        path: String,
    },
    /// An etcd cluster.
    Etcd {
        /// The URLs of the endpoints.
        endpoints: Vec<String>,
    },
    /// The Kubernetes API.
    Kubernetes {
        /// The URL of the API server.
        url: String,
    },
}

impl StoreKind {
    /// Whether the store is the Kubernetes API, which assigns the subnets of nodes itself.
    pub fn is_kubernetes(&self) -> bool {
        matches!(self, Self::Kubernetes { .. })
    }
}

/// The cause of a failed request to a store. It tells what an operator can do.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum StoreFailure {
    /// Any other cause. Usually the store does not answer.
    #[default]
    Other,
    /// A certificate has expired or is not valid yet, or a clock is wrong.
    CertificateTime,
    /// The file system of the directory is mounted read-only.
    ReadOnly,
    /// The file system of the directory is full.
    NoSpace,
    /// Another process holds the lock of the directory.
    Locked {
        /// The process, or `None` if it is not known.
        by: Option<LockHolder>,
    },
    /// The database of etcd has reached its quota.
    QuotaExceeded,
    /// The store does not accept the credentials of this node.
    Unauthorized,
    /// The account of this node lacks a permission.
    Forbidden,
    /// This node does not accept the certificate of the server.
    ServerCertificate,
    /// The file with the token of this node cannot be read.
    Token {
        /// The path of the file.
        path: String,
    },
    /// Another host with the public address of this node has taken the lease of this node.
    RivalHost {
        /// The lease.
        lease: Subnets,
        /// Whether the lease is a reservation, which has no holder.
        reserved: bool,
    },
}

impl StoreFailure {
    /// The cause of a TLS error. It is found in the text of rustls, because libraries that use
    /// rustls return only the text.
    pub fn of_tls(text: &str) -> Self {
        let text = text.to_lowercase();
        let is_time =
            text.contains("certificate expired") || text.contains("certificate not valid yet");
        if is_time { Self::CertificateTime } else { Self::Other }
    }

    /// Looks for a [`StoreReason`] or an error of a file system in an error and its sources, and
    /// returns the cause. [`StoreFailure::Other`] if neither is found.
    pub fn of(error: &(dyn std::error::Error + 'static)) -> Self {
        let mut next = Some(error);
        while let Some(error) = next {
            if let Some(reason) = error.downcast_ref::<StoreReason>() {
                return reason.failure.clone();
            }
            match error.downcast_ref::<io::Error>().map(io::Error::kind) {
                Some(io::ErrorKind::ReadOnlyFilesystem) => return Self::ReadOnly,
                Some(io::ErrorKind::StorageFull) => return Self::NoSpace,
                _ => next = error.source(),
            }
        }
        Self::Other
    }
}

/// The process that holds a lock. `Display` is `flock (process 4711)`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LockHolder {
    /// The name of the program. The kernel shortens it to 15 bytes.
    pub name: String,
    /// The process id.
    pub pid: u32,
}

impl fmt::Display for LockHolder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (process {})", self.name, self.pid)
    }
}

/// Why a store did not answer a request, or refused it: a text for people, and the cause for
/// programs. `Display` writes the text.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text}")]
pub struct StoreReason {
    /// The reason, as a sentence without a full stop.
    pub text: String,
    /// The cause.
    pub failure: StoreFailure,
}

impl StoreReason {
    /// A reason with a known cause.
    pub fn new(text: impl Into<String>, failure: StoreFailure) -> Self {
        Self { text: text.into(), failure }
    }
}

impl From<String> for StoreReason {
    fn from(text: String) -> Self {
        Self { text, failure: StoreFailure::Other }
    }
}

impl From<&str> for StoreReason {
    fn from(text: &str) -> Self {
        text.to_owned().into()
    }
}

/// The last failure of a store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LastError {
    /// The error, as text.
    pub text: String,
    /// The cause of the error.
    pub failure: StoreFailure,
    /// The time of the failure, by the wall clock.
    pub at: SystemTime,
}

/// An entry of a store that was skipped because it is not a lease.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct SkippedEntry {
    /// The key of the entry, such as `node a`.
    pub key: String,
    /// Why it is not a lease, as a sentence without a full stop.
    pub reason: String,
    /// The Kubernetes node whose annotations were removed. Its last lease stays in use for a while.
    /// `None` if the entry is wrong in another way.
    pub wiped_node: Option<String>,
}

impl SkippedEntry {
    /// An entry that cannot be read as a lease.
    pub fn new(key: impl Into<String>, reason: impl Into<String>) -> Self {
        Self { key: key.into(), reason: reason.into(), wiped_node: None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cause_is_found_in_a_chain_of_errors() {
        #[derive(Debug, thiserror::Error)]
        #[error("outer")]
        struct Outer(#[source] io::Error);

        let outer = |errno| Outer(io::Error::from_raw_os_error(errno));
        // EROFS, ENOSPC, ENOENT.
        assert_eq!(StoreFailure::of(&outer(30)), StoreFailure::ReadOnly);
        assert_eq!(StoreFailure::of(&outer(28)), StoreFailure::NoSpace);
        assert_eq!(StoreFailure::of(&outer(2)), StoreFailure::Other);
        let reason = StoreReason::new("x", StoreFailure::Forbidden);
        assert_eq!(StoreFailure::of(&reason), StoreFailure::Forbidden);
        assert_eq!(reason.to_string(), "x");
        let source = io::Error::from_raw_os_error(30).into();
        let error = crate::Error::Store { store: "dir:/x".into(), source };
        assert_eq!(error.store_failure(), StoreFailure::ReadOnly);
        let error = crate::Error::Refused { store: "kube:x".into(), reason };
        assert_eq!(error.store_failure(), StoreFailure::Forbidden);
    }
}
