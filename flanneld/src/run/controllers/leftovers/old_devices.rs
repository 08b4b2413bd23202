//! Removes the devices of backends that this node no longer runs.

use std::convert::Infallible;
use std::sync::Arc;

use flannel_core::Kernel;
use flannel_core::kernel::Footprint;
use flannel_core::runtime::blocking;
use flannel_core::status::Status;
use flannel_route::cleanup;
use tokio::sync::watch;

use super::{is_settled, log_removal};
use crate::config::DaemonConfig;
use crate::run::backends::{ActiveBackends, BackendRecord, devices};

/// The devices of dropped backends.
pub(crate) struct OldDevices<'a> {
    pub(crate) settings: &'a DaemonConfig,
    /// The backends of the network.
    pub(crate) backends: &'a ActiveBackends,
    pub(crate) record: &'a BackendRecord,
}

impl OldDevices<'_> {
    /// Waits until the network is settled, removes the devices of dropped backends, then never
    /// returns. Objects on other devices belong to the network that runs.
    pub(crate) async fn clear(
        &self,
        kernel: Arc<dyn Kernel>,
        mut status: watch::Receiver<Arc<Status>>,
    ) -> Infallible {
        let dropped = self.record.dropped();
        if !dropped.is_empty() && status.wait_for(is_settled).await.is_ok() {
            let used = self.backends.footprint(None).unwrap_or_default().links;
            let config = &self.backends.all[0].config;
            let mut gone = Vec::new();
            for usage in dropped {
                let Some(mut links) = devices(self.settings, config, &usage) else { continue };
                links.retain(|link| !used.contains(link));
                let footprint = Footprint { links, ..Footprint::default() };
                let kernel = Arc::clone(&kernel);
                let origin = format!("the earlier backend {}", usage.lease_type);
                let removal = move || log_removal(&origin, cleanup(&*kernel, &footprint, false));
                if blocking(removal).await {
                    gone.push(usage.lease_type);
                }
            }
            self.record.forget(&gone).await;
        }
        std::future::pending().await
    }
}
