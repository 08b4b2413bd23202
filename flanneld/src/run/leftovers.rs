//! Removes the objects of earlier networks from the kernel, once the running network is complete.

pub(super) mod go_flannel;
pub(super) mod old_networks;

use std::sync::Arc;

use flannel_core::kernel::KernelError;
use flannel_core::status::Status;
use flannel_route::Cleanup;

/// Whether all objects of the leases are in the kernel, or refused by it.
fn is_settled(status: &Arc<Status>) -> bool {
    status.live && status.settled && status.kernel_error.is_none()
}

/// Logs a removal of the objects of `origin`. Returns whether all of them are gone.
fn log_removal(origin: &str, removal: Result<Cleanup, KernelError>) -> bool {
    match removal {
        Ok(report) => {
            for change in &report.done {
                tracing::info!("{origin} and wanted by no lease, removed: {}", change.object());
            }
            for (change, error) in &report.failed {
                tracing::warn!("{origin}, but the kernel keeps it: {}: {error}", change.object());
            }
            report.failed.is_empty()
        }
        Err(error) => {
            tracing::warn!("objects {origin} are not removed: the kernel cannot be read: {error}");
            false
        }
    }
}
