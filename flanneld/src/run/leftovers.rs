//! Removes the objects of earlier networks from the kernel, once the running network is complete.

pub(super) mod go_flannel;
pub(super) mod old_networks;
pub(super) mod old_records;

use std::sync::Arc;

use flannel_core::kernel::KernelError;
use flannel_core::object::Change;
use flannel_core::status::Status;
use flannel_route::Cleanup;

/// Whether all objects of the leases are in the kernel, or refused by it.
pub(super) fn is_settled(status: &Arc<Status>) -> bool {
    status.live && status.settled && status.kernel_error.is_none()
}

/// Logs a removal of the objects that `origin` left. Returns whether all of them are gone.
pub(super) fn log_removal(origin: &str, removal: Result<Cleanup, KernelError>) -> bool {
    match removal {
        Ok(report) => {
            for object in report.done.iter().map(Change::object) {
                tracing::info!(%origin, %object, "removed an object that no lease needs");
            }
            for (object, error) in report.failed.iter().map(|(change, why)| (change.object(), why))
            {
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
