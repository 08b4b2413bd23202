//! The objects of the leases in the kernel: runs the network itself.

use std::sync::Arc;

use flannel_core::{Kernel, Network};

use super::Ended;
use super::plain_routes::PlainRoutes;
use crate::error::Error;
use crate::run::network::RunningNetwork;

/// Keeps the kernel equal to the leases.
pub(crate) struct RouteController<'a> {
    pub(crate) network: &'a RunningNetwork<'a>,
    pub(crate) routes: Box<dyn Network>,
}

impl RouteController<'_> {
    /// Runs until the network stops.
    pub(crate) async fn run(self) -> Ended {
        let network = self.network;
        if network.config.require_encryption {
            let plain = PlainRoutes {
                kernel: Arc::clone(&network.uplink.kernel) as Arc<dyn Kernel>,
                footprint: network.footprint.clone(),
                encrypted: network.datapath.encrypted.clone(),
                queue: network.starter.writes.clone(),
            };
            plain.remove_until(network.rules_settled.clone()).await;
        }
        match self.routes.run(network.views.clone()).await {
            Ok(ended) => Ended::Failed(Error::Stopped(format!("{ended:?}"))),
            Err(error) => Ended::Failed(error.into()),
        }
    }
}
