//! What an operator can do about a problem.
//!
//! A library returns a [`Remedy`]. A program renders it as a command, because the command depends
//! on the deployment: a systemd unit, a pod of Kubernetes, or a program that embeds the daemon.

use std::net::IpAddr;

use crate::subnet::{StoreFailure, StoreKind};

/// What an operator can do about a problem: remove its cause, or find the cause.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Remedy {
    /// Run a shell command on the host. The command is the same in every deployment.
    Run(String),
    /// Read the log of the daemon.
    ReadLog,
    /// Look at the status of the daemon.
    ShowStatus,
    /// Follow the status of the daemon, because the problem passes by itself.
    WatchStatus,
    /// Examine this node from the store to the wire.
    ExamineNode,
    /// Explain the route of packets to an address.
    Explain(IpAddr),
    /// List the other nodes, as the daemon knows them.
    ListPeers,
    /// List the leases in the store.
    ListLeases,
    /// Write a network config.
    SetConfig,
    /// Change fields of the network config, by a JSON merge patch (RFC 7396).
    PatchConfig(String),
    /// Check the network config.
    CheckConfig,
    /// Start the daemon.
    StartDaemon,
    /// Restart the daemon.
    RestartDaemon,
    /// Look at the capabilities that the daemon has.
    ShowCapabilities,
    /// Release the lease with this key, if its node is gone.
    ReleaseLease(String),
    /// Release the reservation with this key, if no other host has its public address.
    ReleaseReservation(String),
    /// Release the lease with this key if its node is gone. Otherwise give that node another public
    /// address.
    ReleaseOrReaddress(String),
    /// Release the leases of nodes that are gone, or enlarge the pod network.
    FreeSubnets,
    /// Make the store answer again.
    RestoreStore {
        /// The store.
        store: StoreKind,
        /// The cause of its last failure.
        failure: StoreFailure,
    },
    /// Do these things, one after the other.
    All(Vec<Self>),
    /// A remedy with a remark for people.
    Remarked {
        /// The remedy.
        remedy: Box<Self>,
        /// The remark.
        remark: Remark,
    },
}

/// A remark about a remedy.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Remark {
    /// A sentence without a full stop.
    Text(String),
    /// A sentence that names another remedy.
    Mention {
        /// The words before it.
        before: String,
        /// The other remedy.
        remedy: Box<Remedy>,
        /// The words after it.
        after: String,
    },
}

impl Remedy {
    /// A [shell command](Self::Run) on the host.
    pub fn run(command: impl Into<String>) -> Self {
        Self::Run(command.into())
    }

    /// Adds a remark, which is a sentence without a full stop.
    #[must_use]
    pub fn remark(self, text: impl Into<String>) -> Self {
        Self::Remarked { remedy: Box::new(self), remark: Remark::Text(text.into()) }
    }

    /// Adds a remark that names the remedy `other` between the words `before` and `after`.
    #[must_use]
    pub fn mention(self, before: impl Into<String>, other: Self, after: impl Into<String>) -> Self {
        let remark =
            Remark::Mention { before: before.into(), remedy: Box::new(other), after: after.into() };
        Self::Remarked { remedy: Box::new(self), remark }
    }
}

/// Something that is wrong, and what an operator can do about it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trouble {
    /// What is wrong, as a sentence without a full stop.
    pub text: String,
    /// What to do about it.
    pub remedy: Remedy,
}

impl Trouble {
    /// A trouble with its remedy.
    pub fn new(text: impl Into<String>, remedy: Remedy) -> Self {
        Self { text: text.into(), remedy }
    }
}
