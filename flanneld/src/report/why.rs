//! The daemon's answer to `GET /v1/why`.

use std::net::IpAddr;
use std::sync::Arc;

use flannel_api::WhyReport;
use flannel_core::address::Family;
use flannel_core::kernel::KernelError;
use flannel_doctor::checks::host::stop_on_the_way;
use flannel_doctor::diagnosis::why::{Explained, RouteInputs, diagnose, lookup};
use flannel_firewall::LegacyMemory;

use super::host::checked;
use super::peers::advice_on;
use crate::observe::{NetworkSnapshot, Snapshot};

/// Joins the explanation of the network that runs with the kernel's route.
pub(crate) async fn why(snapshot: &Snapshot, memory: &LegacyMemory, address: IpAddr) -> WhyReport {
    let Some(network) = &snapshot.network else {
        let answer = Err(KernelError::explained(11, "no network runs, so no route was looked up"));
        let deployment = snapshot.deployment();
        return diagnose(address, &RouteInputs { answer, deployment, ..RouteInputs::default() });
    };
    let NetworkSnapshot { running, status, view, tunnels, .. } = network;
    let own = &running.handle.lease;
    let explanation = running.handle.explain(address).await.map(|explanation| Explained {
        advice: advice_on(status, explanation.lease.subnets).cloned().collect(),
        lease: explanation.lease,
        rejection: explanation.rejection,
        objects: explanation.objects,
    });
    let kernel = Arc::clone(&running.kernel);
    let answer = lookup(kernel, address).await;
    let stop = stop_on_the_way(checked(network), memory, address).await;
    let lease = view
        .leases
        .iter()
        .find(|lease| lease.subnets.iter().any(|subnet| subnet.contains(address)))
        .map(|lease| &**lease);
    let tunnels = tunnels.by_subnet();
    let tunnel = tunnels.iter().find(|(subnet, _)| subnet.contains(address));
    let tunnel = tunnel.map(|(_, to)| to.report(snapshot.time));
    let datapath = &running.datapath;
    let device = datapath.devices[Family::of(address)].filter(|_| !datapath.direct);
    let inputs = RouteInputs {
        daemon: true,
        deployment: snapshot.deployment(),
        config: Some(&running.config),
        own: Some(own),
        lease,
        explanation,
        device,
        answer,
        stop,
    };
    WhyReport { tunnel, ..diagnose(address, &inputs) }
}
