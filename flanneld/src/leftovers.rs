//! What earlier networks left in the kernel, removed once the network that runs is complete.

pub(crate) mod go_flannel;
pub(crate) mod old_networks;

use std::sync::Arc;

use flannel_core::status::Status;

/// All objects that the leases of the store ask for are in the kernel, as far as it took them.
fn is_settled(status: &Arc<Status>) -> bool {
    status.live && status.settled && status.kernel_error.is_none()
}
