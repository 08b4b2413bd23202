//! Removes the objects of earlier networks from the kernel, once the running network is complete.

pub(crate) mod go_flannel;
pub(crate) mod old_devices;
pub(crate) mod old_networks;
pub(crate) mod old_records;

use std::sync::Arc;

use flannel_core::Kernel;
use flannel_core::kernel::KernelError;
use flannel_core::object::Change;
use flannel_core::status::Status;
use flannel_route::Cleanup;

use self::old_devices::OldDevices;
use self::old_networks::OldNetworks;
use self::old_records::OldRecords;
use super::Ended;
use crate::run::network::RunningNetwork;

/// Removes what earlier networks left.
pub(crate) struct LeftoverController<'a> {
    pub(crate) network: &'a RunningNetwork<'a>,
    pub(crate) old_networks: OldNetworks,
}

impl LeftoverController<'_> {
    /// Runs until it is dropped.
    pub(crate) async fn run(self) -> Ended {
        let network = self.network;
        let kernel = || Arc::clone(&network.uplink.kernel) as Arc<dyn Kernel>;
        let footprint = || network.footprint.clone();
        let status = || network.handle.status.clone();
        let old_devices = OldDevices {
            settings: network.settings,
            backends: &network.backends,
            record: &network.record,
        };
        let old_records = OldRecords {
            settings: network.settings,
            backends: &network.backends,
            record: &network.record,
        };
        let go_flannel = network.go_flannel;
        let own = network.handle.lease.subnets;
        tokio::select! {
            never = self.old_networks.clear(kernel(), footprint(), status()) => match never {},
            never = old_records.clear(kernel(), status()) => match never {},
            never = old_devices.clear(kernel(), status()) => match never {},
            never = go_flannel.clear(
                network.uplink.kernel.clone(), footprint(), &own, status(),
            ) => match never {},
        }
    }
}

/// Whether all objects of the leases are in the kernel, or refused by it.
fn is_settled(status: &Arc<Status>) -> bool {
    status.live && status.settled && status.kernel_error.is_none()
}

/// Logs a removal of the objects that `origin` left. Returns whether all of them are gone.
pub(crate) fn log_removal(origin: &str, removal: Result<Cleanup, KernelError>) -> bool {
    match removal {
        Ok(report) => {
            for object in report.done.iter().map(Change::object) {
                tracing::info!(%origin, %object, "removed an object that no lease needs");
            }
            for (change, error) in &report.failed {
                let object = change.object();
                tracing::warn!(%origin, %object, %error, "the kernel keeps an unneeded object");
            }
            report.failed.is_empty()
        }
        Err(error) => {
            tracing::warn!(%origin, %error, "unneeded objects stay: the kernel cannot be read");
            false
        }
    }
}
