//! Findings on this host, for a daemon that runs.

use flannel_doctor::Finding;
use flannel_doctor::checks::host::{self, CheckedNetwork, HostReport};
use flannel_doctor::finding::Check;
use flannel_firewall::LegacyMemory;

use crate::observe::{NetworkSnapshot, Snapshot};

/// Checks the host for the network that runs. Omits findings that the network's status reports. A
/// check that starts a process is not repeated while `memory` holds its result.
pub(crate) async fn look(snapshot: &Snapshot, memory: &LegacyMemory) -> HostReport {
    let Some(network) = &snapshot.network else { return HostReport::default() };
    let mut report = host::check_host(checked(network), memory).await;
    report.findings.retain(|finding| finding.check != Check::DuplicateAddress);
    let of_traffic = network.traffic.iter().flat_map(|traffic| traffic.problems.clone());
    let of_guard = network.refused.iter().flat_map(|refused| refused.problems.clone());
    let of_traffic = of_traffic.map(|trouble| Finding::of_trouble(Check::DataPlane, trouble));
    let of_guard = of_guard.map(|trouble| Finding::of_trouble(Check::Guard, trouble));
    report.findings.extend(of_traffic.chain(of_guard));
    report
}

/// The network that runs, for checks.
pub(crate) fn checked(network: &NetworkSnapshot) -> CheckedNetwork {
    let running = &network.running;
    CheckedNetwork {
        config: running.config.clone(),
        links: running.links.clone(),
        uplink: running.iface.name,
        own: (!running.lapsed).then_some(network.own()),
        public: running.iface.public,
        leases: network.view.leases.clone(),
        mtu: Some(running.handle.mtu),
        transports: running.datapath.transports.clone(),
        outer: running.datapath.outer.clone(),
    }
}
