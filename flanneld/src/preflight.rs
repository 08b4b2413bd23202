//! What about this host may lose packets of pods, while the daemon runs.

use flannel_api::Finding;
use flannel_doctor::host::{self, DUPLICATE, HostReport, HostScene};
use flannel_firewall::LegacyMemory;

use crate::observe::NetworkSnapshot;

/// Checks the host of the network that runs. Leaves out what its status reports already.
pub(crate) async fn check(network: &NetworkSnapshot, memory: &LegacyMemory) -> HostReport {
    let running = &network.running;
    let scene = HostScene {
        config: running.config.clone(),
        links: running.links.clone(),
        uplink: running.iface.name,
        own: (!running.lapsed).then_some(running.handle.lease.subnets),
        public: running.iface.public,
        leases: network.view.leases.clone(),
    };
    let mut report = host::check_host(scene, memory).await;
    report.findings.retain(|finding| finding.check != DUPLICATE);
    report
}

/// Logs a finding in one line.
pub(crate) fn log(finding: &Finding) {
    let Finding { text, mend, .. } = finding;
    let mend = mend.as_ref().map(|mend| format!("; mend: {mend}")).unwrap_or_default();
    if finding.is_error() {
        tracing::error!("{text}{mend}");
    } else {
        tracing::warn!("{text}{mend}");
    }
}
