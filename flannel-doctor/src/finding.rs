//! Findings with their remedies, before a program shows them.

use std::fmt;

use flannel_api::{Deployment, Severity};
use flannel_core::Remedy;
use flannel_core::remedy::Trouble;

use crate::remedy::render;

/// The check that made a finding. The text of each variant is the condition that holds if the check
/// finds nothing.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Check {
    /// This host answers ARP requests for its public address.
    Arp,
    /// Bridged packets pass iptables.
    BridgeNetfilter,
    /// The kernel computes right checksums of packets in a tunnel.
    Checksum,
    /// Pod networks and addresses of hosts do not overlap.
    Clash,
    /// The clocks of nodes agree.
    Clock,
    /// Container runtimes use flannel's CNI config.
    Cni,
    /// The network config in the store is valid.
    Config,
    /// The kernel can track more connections.
    Conntrack,
    /// The daemon runs and reports no problem.
    Daemon,
    /// The backend drops no packets that it moves itself. Only the daemon makes this check.
    DataPlane,
    /// The tunnel devices are there and up.
    Device,
    /// No other node has this node's public address. The network's advisories report it too.
    DuplicateAddress,
    /// The daemon can write its files.
    Files,
    /// No chain drops forwarded packets.
    ForwardDrop,
    /// This host forwards packets.
    Forwarding,
    /// The guard of the tunnel refuses no packets. Only the daemon makes this check.
    Guard,
    /// The handshakes of an encrypted tunnel succeed.
    Handshake,
    /// Routing rules lead to flannel's routes.
    IpRule,
    /// Devices and nodes have MTUs that fit together.
    Mtu,
    /// The table of neighbours is large enough.
    Neighbours,
    /// Packets of full size pass the path to a peer.
    PathMtu,
    /// The peer replies.
    Peer,
    /// Pods have no larger MTU than the network.
    PodMtu,
    /// No other program has the port of the tunnel.
    Port,
    /// No queue delays packets of a tunnel device.
    Qdisc,
    /// No other program changes objects of flannel again and again.
    Repairs,
    /// Packets to peers take flannel's routes.
    Route,
    /// The filter of reverse paths is not strict.
    RpFilter,
    /// TCP segments of full size pass the path to a peer.
    Segments,
    /// The store answers, and soon.
    Store,
    /// IPv6 is on where pods need it, and the host keeps its IPv6 address and default route.
    Sysctl,
    /// No filter of `tc` is attached to a tunnel device.
    TcFilter,
    /// The tunnel to a peer passes packets.
    Tunnel,
    /// The network of this host works.
    Underlay,
    /// No XDP program is attached to a tunnel device.
    Xdp,
    /// A check of another version, which a daemon reports.
    Other(String),
}

impl Check {
    /// Its name in the API and in metrics: one word.
    pub fn name(&self) -> &str {
        match self {
            Self::Arp => "arp",
            Self::BridgeNetfilter => "bridge-netfilter",
            Self::Checksum => "checksum",
            Self::Clash => "clash",
            Self::Clock => "clock",
            Self::Cni => "cni",
            Self::Config => "config",
            Self::Conntrack => "conntrack",
            Self::Daemon => "daemon",
            Self::DataPlane => "data-plane",
            Self::Device => "device",
            Self::DuplicateAddress => "duplicate-address",
            Self::Files => "files",
            Self::ForwardDrop => "forward-drop",
            Self::Forwarding => "forwarding",
            Self::Guard => "guard",
            Self::Handshake => "handshake",
            Self::IpRule => "ip-rule",
            Self::Mtu => "mtu",
            Self::Neighbours => "neighbours",
            Self::PathMtu => "path-mtu",
            Self::Peer => "peer",
            Self::PodMtu => "pod-mtu",
            Self::Port => "port",
            Self::Qdisc => "qdisc",
            Self::Repairs => "repairs",
            Self::Route => "route",
            Self::RpFilter => "rp-filter",
            Self::Segments => "segments",
            Self::Store => "store",
            Self::Sysctl => "sysctl",
            Self::TcFilter => "tc-filter",
            Self::Tunnel => "tunnel",
            Self::Underlay => "underlay",
            Self::Xdp => "xdp",
            Self::Other(name) => name,
        }
    }

    /// The check with this name.
    pub fn from_name(name: &str) -> Self {
        let known = ALL.iter().find(|check| check.name() == name);
        known.cloned().unwrap_or_else(|| Self::Other(name.to_owned()))
    }
}

impl fmt::Display for Check {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Every check of this version, by name.
const ALL: [Check; 35] = [
    Check::Arp,
    Check::BridgeNetfilter,
    Check::Checksum,
    Check::Clash,
    Check::Clock,
    Check::Cni,
    Check::Config,
    Check::Conntrack,
    Check::Daemon,
    Check::DataPlane,
    Check::Device,
    Check::DuplicateAddress,
    Check::Files,
    Check::ForwardDrop,
    Check::Forwarding,
    Check::Guard,
    Check::Handshake,
    Check::IpRule,
    Check::Mtu,
    Check::Neighbours,
    Check::PathMtu,
    Check::Peer,
    Check::PodMtu,
    Check::Port,
    Check::Qdisc,
    Check::Repairs,
    Check::Route,
    Check::RpFilter,
    Check::Segments,
    Check::Store,
    Check::Sysctl,
    Check::TcFilter,
    Check::Tunnel,
    Check::Underlay,
    Check::Xdp,
];

/// A condition of a host or of a path because of which packets of pods are lost.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// The check that found it.
    pub check: Check,
    /// Whether packets are lost, or some packets may be lost.
    pub severity: Severity,
    /// A sentence without a full stop.
    pub text: String,
    /// What repairs it; `None` if no remedy is known.
    pub remedy: Option<Remedy>,
}

impl Finding {
    /// A finding without a remedy.
    pub fn new(check: Check, severity: Severity, text: impl Into<String>) -> Self {
        Self { check, severity, text: text.into(), remedy: None }
    }

    /// An error without a remedy.
    pub fn error(check: Check, text: impl Into<String>) -> Self {
        Self::new(check, Severity::Error, text)
    }

    /// A warning without a remedy.
    pub fn warning(check: Check, text: impl Into<String>) -> Self {
        Self::new(check, Severity::Warning, text)
    }

    /// A warning about something that a backend reports.
    pub fn of_trouble(check: Check, trouble: Trouble) -> Self {
        Self::warning(check, trouble.text).with_remedy(trouble.remedy)
    }

    /// The finding with its remedy.
    pub fn with_remedy(self, remedy: Remedy) -> Self {
        Self { remedy: Some(remedy), ..self }
    }

    /// The finding with a shell command of the host that repairs it.
    pub fn with_command(self, command: impl Into<String>) -> Self {
        self.with_remedy(Remedy::run(command))
    }

    /// Whether packets are lost.
    pub fn is_error(&self) -> bool {
        self.severity == Severity::Error
    }

    /// The report, with the command for a deployment.
    pub fn report(&self, deployment: Deployment) -> flannel_api::Finding {
        flannel_api::Finding {
            check: self.check.name().to_owned(),
            severity: self.severity,
            text: self.text.clone(),
            repair: self.remedy.as_ref().map(|remedy| render(remedy, deployment)),
        }
    }

    /// The command for a systemd unit.
    #[cfg(test)]
    pub(crate) fn repair(&self) -> Option<String> {
        self.report(Deployment::Systemd).repair
    }
}

/// A finding that a daemon reported. Its command is the one for the daemon's deployment.
impl From<flannel_api::Finding> for Finding {
    fn from(finding: flannel_api::Finding) -> Self {
        let flannel_api::Finding { check, severity, text, repair } = finding;
        let check = Check::from_name(&check);
        Self { check, severity, text, remedy: repair.map(Remedy::Run) }
    }
}

/// The reports of findings, with the commands for a deployment.
pub fn reports(findings: &[Finding], deployment: Deployment) -> Vec<flannel_api::Finding> {
    findings.iter().map(|finding| finding.report(deployment)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_names_of_checks_are_unique_words() {
        for (n, check) in ALL.iter().enumerate() {
            let name = check.name();
            assert!(name.chars().all(|c| c.is_ascii_lowercase() || c == '-'), "{name}");
            assert!(ALL[..n].iter().all(|other| other.name() < name), "{name}");
            assert_eq!(Check::from_name(name), *check);
        }
        assert_eq!(Check::from_name("later"), Check::Other("later".to_owned()));
    }
}
