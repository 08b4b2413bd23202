//! The lease of this node: writes the subnet file and holds the lease. A lapsed lease is not held;
//! the node waits until it can request one.

use std::time::Duration;

use flannel_core::lease::Origin;
use flannel_core::remedy::Trouble;
use flannel_subnet::subnet_file::Known;
use tokio::time::sleep;

use super::Ended;
use crate::error::Error;
use crate::run::network::RunningNetwork;
use crate::store::wait::{STORE_AGAIN, hold};

/// The pause before the daemon checks again whether a network can be built.
const SECOND_THOUGHT: Duration = Duration::from_secs(10);

/// Holds the lease of a network.
pub(crate) struct LeaseController<'a> {
    pub(crate) network: &'a RunningNetwork<'a>,
}

impl LeaseController<'_> {
    /// Runs until this node has another lease, or can request one again.
    pub(crate) async fn run(self) -> Ended {
        let reason = if self.network.lapsed { self.until_live().await } else { self.hold().await };
        reason.into()
    }

    async fn hold(&self) -> Result<String, Error> {
        let network = self.network;
        let lease = &network.handle.lease;
        let subnet_file = network.subnet_file();
        subnet_file.write().await?;
        tracing::info!(
            lease = %lease.subnets,
            backend = network.backends.target.kind(),
            mtu = network.handle.mtu,
            subnet_file = %network.settings.subnet_file.display(),
            "running"
        );
        tokio::select! {
            to = hold(network.subnets, lease) => {
                let to = to?;
                network.starter.own_subnets.note(Known::Subnets(to), network.observer).await;
                Ok(format!("this node was given {to}"))
            }
            error = subnet_file.restore() => Err(error),
        }
    }

    /// Waits until the store answers and a network with a lease can be built. Returns the reason
    /// for which the network must be rebuilt.
    async fn until_live(&self) -> Result<String, Error> {
        let network = self.network;
        tracing::warn!(
            lease = %network.handle.lease.subnets,
            store = %network.subnets.store_status().store,
            "this node's lease has run out: until the store answers, routes to peers stay in \
             place, and its own subnet is not set up"
        );
        let mut views = network.views.clone();
        if views.wait_for(|view| matches!(view.origin, Origin::Live { .. })).await.is_err() {
            // The watch has ended, which the network reports.
            std::future::pending::<()>().await;
        }
        let mut logged = None;
        while let Err(error) = network.validate_stored().await {
            // The store may fail again, which is reported elsewhere.
            let gone = error.is_of_store();
            let why = (!gone).then(|| error.to_string());
            if let Some(why) = why.as_ref().filter(|why| logged.as_ref() != Some(*why)) {
                tracing::warn!(
                    error = %why,
                    "the store answers, but no lease is requested, because no network could be \
                     built"
                );
            }
            let remedy = error.remedy(&network.subnets.store_status().kind);
            let trouble = why.clone().map(|why| Trouble::new(why, remedy));
            network.observer.note(|facts| facts.waits_for = trouble);
            logged = why.or(logged);
            sleep(if gone { STORE_AGAIN } else { SECOND_THOUGHT }).await;
        }
        Ok("the store answers, so a lease can be requested".to_owned())
    }
}
