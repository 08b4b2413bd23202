//! Problems of a daemon.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::RejectionReport;

/// How much a problem or a finding matters. Severities are ordered as in a report, errors first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// The node is not ready, or packets are lost.
    Error,
    /// The node may be ready, or some packets may be lost.
    Warning,
}

impl fmt::Display for Severity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Error => "error",
            Self::Warning => "warning",
        })
    }
}

/// A problem of the daemon. The node is ready if and only if no problem is an error.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Problem {
    /// `error`: the node is not ready. `warning`: the node may be ready.
    pub severity: Severity,
    /// The problem, for programs.
    #[serde(flatten)]
    pub cause: ProblemCause,
    /// The problem, for people: a sentence without a full stop.
    pub text: String,
    /// A shell command that repairs the problem or shows more. Remarks for people follow `#`.
    pub hint: Option<String>,
}

impl Problem {
    /// A problem without a hint. The cause gives the text.
    pub fn new(severity: Severity, cause: ProblemCause) -> Self {
        let text = cause.to_string();
        Self { severity, cause, text, hint: None }
    }

    /// Sets [`Problem::hint`].
    #[must_use]
    pub fn with_hint(self, hint: impl Into<String>) -> Self {
        Self { hint: Some(hint.into()), ..self }
    }

    /// Whether it makes the node not ready.
    pub fn is_error(&self) -> bool {
        self.severity == Severity::Error
    }
}

/// What is wrong. In JSON the field `problem` has the name of the variant in snake case, and the
/// fields of the variant are beside it. `Display` is a sentence without a full stop.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "problem", rename_all = "snake_case")]
#[non_exhaustive]
pub enum ProblemCause {
    /// No network runs.
    NoNetwork {
        /// Why not.
        reason: String,
    },
    /// The network runs, and the subnet file is not written yet.
    NoSubnetFile {
        /// The rule of `RequireEncryption` must be in place before any route.
        encryption_first: bool,
    },
    /// This node does not hold its lease.
    LeaseNotHeld {
        /// The key of the lease.
        lease: String,
        /// Why not.
        loss: LeaseLoss,
    },
    /// The kernel cannot be read or watched.
    KernelUnreadable {
        /// The kernel's error.
        error: String,
    },
    /// The kernel refuses objects of the network.
    ObjectRefused {
        /// The first change that is refused.
        change: String,
        /// The kernel's error.
        error: String,
        /// The number of further objects that are refused.
        more: u64,
    },
    /// Objects of single peers are refused, because the data of their leases is wrong.
    PeerObjectRefused {
        /// The first change that is refused.
        change: String,
        /// The error.
        error: String,
        /// The number of further objects that are refused.
        more: u64,
    },
    /// Not all objects are in the kernel yet.
    Syncing,
    /// The leases come from a cache, because the store has not listed them yet.
    LeasesFromCache,
    /// The firewall rules are not in place yet.
    FirewallPending,
    /// The firewall rules that are requested cannot be made.
    FirewallFailed {
        /// The error.
        error: String,
    },
    /// The forward rules, which are the default, cannot be made.
    NoForwardRules {
        /// The error.
        error: String,
    },
    /// Another program puts its rules before the rules of `RequireEncryption`.
    FirewallContested,
    /// Another program changes the firewall rules again and again, or puts a rule before them that
    /// no packet passes.
    FirewallChanged {
        /// The last differences.
        found: String,
    },
    /// Packets are dropped because they would leave unencrypted.
    UnencryptedDropped,
    /// Rules of an earlier flannel cannot be removed.
    LeftoverRules {
        /// The error.
        error: String,
    },
    /// The network config requires encryption, and its backend does not encrypt.
    BackendDoesNotEncrypt {
        /// The type of the backend.
        backend: String,
    },
    /// The lease of another node is rejected.
    LeaseRejected {
        /// The key of the lease.
        lease: String,
        /// Why.
        rejection: RejectionReport,
    },
    /// Further leases are rejected. Only the first few rejected leases have a problem of their own
    /// ([`Self::LeaseRejected`]).
    MoreLeasesRejected {
        /// The number of rejected leases without a problem of their own.
        more: u64,
    },
    /// Several nodes have one public address.
    SharedAddress {
        /// The address.
        address: String,
        /// The number of nodes.
        nodes: u32,
        /// Whether this node is one of them.
        own: bool,
    },
    /// A lease is accepted, and something is wrong with it.
    LeaseAdvisory {
        /// The key of the lease.
        lease: String,
        /// What is wrong.
        reason: String,
    },
    /// A pod network is nearly full.
    NearlyFull {
        /// `IPv4` or `IPv6`.
        family: String,
        /// The number of subnets.
        total: u64,
        /// The number of subnets that nodes hold.
        used: u64,
        /// The number of subnets that no node holds.
        free: u64,
    },
    /// The store does not answer.
    StoreUnreachable {
        /// The error.
        error: String,
    },
    /// An entry of the store is not a lease.
    StoreEntryWrong {
        /// The name of the store.
        store: String,
        /// The key of the entry.
        key: String,
        /// What is wrong.
        reason: String,
    },
    /// The network config has other pod networks, which are used after a restart only.
    OtherPodNetworks {
        /// The new pod networks.
        networks: Vec<String>,
    },
    /// The network config in the store is not used.
    ConfigNotUsed {
        /// Why not.
        reason: String,
    },
    /// The network should be rebuilt, and another network cannot be built.
    RebuildBlocked {
        /// Why not.
        reason: String,
    },
    /// The external interface has changed, and cannot be used as it is now.
    InterfaceChanged {
        /// Why not.
        reason: String,
    },
    /// The config sets a larger MTU between nodes than the external interface carries. This node
    /// uses the MTU of the interface.
    MtuReduced {
        /// The interface.
        interface: String,
        /// The MTU in the config, in bytes.
        configured: u32,
        /// The MTU of the interface, in bytes.
        used: u32,
    },
    /// The interface of the default route leads to no other host, so its address may be made up.
    InterfaceIsolated {
        /// The interface.
        interface: String,
        /// Its address.
        address: String,
    },
    /// A problem of a later version of the API.
    #[serde(other)]
    Other,
}

/// Why a node does not hold its lease. In JSON the field `cause` has the name of the variant.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "cause", rename_all = "snake_case")]
#[non_exhaustive]
pub enum LeaseLoss {
    /// The store refuses the lease for now.
    Withdrawn {
        /// Why.
        reason: String,
    },
    /// It expired. The daemon does not request another lease, because it cannot build a network.
    NoNetwork {
        /// Why not.
        reason: String,
    },
    /// It expired before this network was built, and the store does not answer.
    Lapsed,
    /// It expired, and the store did not confirm a renewal.
    Unconfirmed,
    /// The store has not granted it, or another node holds it.
    #[serde(other)]
    NotGranted,
}

impl fmt::Display for LeaseLoss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Withdrawn { reason } => f.write_str(reason),
            Self::NoNetwork { reason } => write!(
                f,
                "it expired, and none is requested, because no network could be built: {reason}"
            ),
            Self::Lapsed => f.write_str("it expired, and the store does not answer"),
            Self::Unconfirmed => f.write_str("it expired, and the store did not confirm a renewal"),
            Self::NotGranted => {
                f.write_str("the store has not granted it, or another node holds it")
            }
        }
    }
}

/// ` (and 3 more)`, or nothing.
fn and_more(more: u64) -> String {
    if more == 0 { String::new() } else { format!(" (and {more} more)") }
}

impl fmt::Display for ProblemCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoNetwork { reason } => write!(f, "no network runs: {reason}"),
            Self::NoSubnetFile { .. }
            | Self::LeaseNotHeld { .. }
            | Self::OtherPodNetworks { .. }
            | Self::ConfigNotUsed { .. }
            | Self::RebuildBlocked { .. }
            | Self::InterfaceChanged { .. }
            | Self::MtuReduced { .. }
            | Self::InterfaceIsolated { .. } => self.describe_network(f),
            Self::KernelUnreadable { .. }
            | Self::ObjectRefused { .. }
            | Self::PeerObjectRefused { .. }
            | Self::Syncing
            | Self::LeasesFromCache => self.describe_kernel(f),
            Self::FirewallPending
            | Self::FirewallFailed { .. }
            | Self::NoForwardRules { .. }
            | Self::FirewallContested
            | Self::FirewallChanged { .. }
            | Self::UnencryptedDropped
            | Self::LeftoverRules { .. }
            | Self::BackendDoesNotEncrypt { .. } => self.describe_firewall(f),
            Self::LeaseRejected { .. }
            | Self::MoreLeasesRejected { .. }
            | Self::SharedAddress { .. }
            | Self::LeaseAdvisory { .. }
            | Self::NearlyFull { .. } => self.describe_leases(f),
            Self::StoreUnreachable { error } => write!(f, "the store does not answer: {error}"),
            Self::StoreEntryWrong { store, key, reason } => {
                write!(f, "{store}: {key} is wrong: {reason}")
            }
            Self::Other => f.write_str("a problem that this version does not know"),
        }
    }
}

impl ProblemCause {
    fn describe_network(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoSubnetFile { encryption_first: true } => f.write_str(
                "the subnet file is not written yet: the firewall rule of RequireEncryption comes \
                 first, and until it is in place, no route to another node is made either",
            ),
            Self::NoSubnetFile { .. } => f.write_str(
                "the subnet file is not written yet: the daemon waits at most 5 s for the \
                     firewall rules and for this node's devices and addresses",
            ),
            Self::LeaseNotHeld { lease, loss } => {
                write!(f, "this node does not hold its lease {lease}: {loss}")
            }
            Self::OtherPodNetworks { networks } => {
                let networks = networks.join(", ");
                write!(f, "the network config has other pod networks now ({networks})")
            }
            Self::ConfigNotUsed { reason } => write!(
                f,
                "the store's network config is not used, the last good one is still used: {reason}"
            ),
            Self::RebuildBlocked { reason } => write!(
                f,
                "the network must be rebuilt, but no new network can be built. The running network \
                 stays: {reason}"
            ),
            Self::InterfaceChanged { reason } => write!(
                f,
                "the external interface has changed, the network stays as it is: {reason}"
            ),
            Self::MtuReduced { interface, configured, used } => write!(
                f,
                "the config sets Backend.MTU {configured}, but {interface} carries only {used} \
                 bytes: this node uses {used}"
            ),
            Self::InterfaceIsolated { interface, address } => write!(
                f,
                "the default route leads to no other host, so peers may not reach {address} of \
                 {interface}"
            ),
            _ => Ok(()),
        }
    }

    fn describe_kernel(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::KernelUnreadable { error } => {
                write!(f, "the kernel cannot be read or watched: {error}")
            }
            Self::ObjectRefused { change, error, more } => {
                write!(f, "the kernel refuses: {change}: {error}{}", and_more(*more))
            }
            Self::PeerObjectRefused { change, error, more } => {
                write!(f, "{change}: {error}{}", and_more(*more))
            }
            Self::Syncing => f.write_str("syncing the kernel with the leases"),
            Self::LeasesFromCache => f.write_str(
                "the leases are those of an earlier run, because the store has not listed them yet",
            ),
            _ => Ok(()),
        }
    }

    fn describe_firewall(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::FirewallPending => f.write_str("the firewall rules are not in place yet"),
            Self::FirewallFailed { error } => {
                write!(f, "the firewall rules are not in place: {error}")
            }
            Self::NoForwardRules { error } => write!(f, "there are no forward rules: {error}"),
            Self::FirewallContested => f.write_str(
                "another program puts its rules before the jump to the chain FLANNEL-ENCRYPTION \
                 again and again: packets of pods may leave unencrypted in between",
            ),
            Self::FirewallChanged { found } => write!(
                f,
                "another program changes the firewall rules again and again, which flannel then \
                 restores: {found}"
            ),
            Self::UnencryptedDropped => f.write_str(
                "packets to pods of other nodes are dropped, because they would leave unencrypted",
            ),
            Self::LeftoverRules { error } => {
                write!(f, "rules that an earlier flannel may have left are not removed: {error}")
            }
            Self::BackendDoesNotEncrypt { backend } => write!(
                f,
                "the network config has RequireEncryption, and its backend {backend} does not \
                 encrypt: packets to pods of other nodes are dropped"
            ),
            _ => Ok(()),
        }
    }

    fn describe_leases(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::LeaseRejected { lease, rejection } => {
                write!(f, "the lease {lease} is rejected: {}", rejection.text)
            }
            Self::MoreLeasesRejected { more } => write!(f, "{more} more leases are rejected"),
            Self::SharedAddress { address, nodes, own } => {
                let own = if *own { ", this one among them" } else { "" };
                write!(f, "{nodes} nodes share the public address {address}{own}")
            }
            Self::LeaseAdvisory { lease, reason } => write!(f, "the lease {lease}: {reason}"),
            Self::NearlyFull { family, total, used, free } => {
                write!(f, "{used} of {total} {family} subnets are taken, {free} are free")
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_problem_has_its_cause_for_programs_and_its_text_for_people() {
        let cause = ProblemCause::LeaseNotHeld { lease: "a".into(), loss: LeaseLoss::Unconfirmed };
        let problem = Problem::new(Severity::Error, cause);
        let json = serde_json::json!({
            "severity": "error",
            "problem": "lease_not_held",
            "lease": "a",
            "loss": {"cause": "unconfirmed"},
            "text": "this node does not hold its lease a: it expired, and the store did not \
                     confirm a renewal",
            "hint": null,
        });
        assert_eq!(serde_json::json!(problem), json);
        assert_eq!(serde_json::from_value::<Problem>(json).unwrap(), problem);
        // A later daemon may report another one.
        let other = serde_json::json!({
            "severity": "warning", "problem": "new", "x": 1, "text": "t", "hint": null,
        });
        let other: Problem = serde_json::from_value(other).unwrap();
        assert_eq!((other.cause, &*other.text), (ProblemCause::Other, "t"));
    }
}
