//! Leases for a network whose node has none at present: only the way to the peers.
//!
//! The one thing to know: the lease that a backend gets here has run out, and says so. It leads to the MAC address
//! and the device that peers know; nothing of its subnets is put in place, and nothing is asked or written.

use std::sync::Arc;
use std::time::SystemTime;

use async_trait::async_trait;
use flannel_core::{
    Config, Error, Hints, Lease, LeaseAttrs, LeaseEnd, Ownership, Result, StoreStatus,
    SubnetManager, View,
};
use tokio::sync::watch;

/// Another manager, as long as the store behind it cannot be asked for a lease.
#[derive(Debug)]
pub(crate) struct StaleManager {
    manager: Arc<dyn SubnetManager>,
    lease: Lease,
}

impl StaleManager {
    /// With the lease that this node had ([`Hints::lapsed`]).
    pub(crate) fn new(manager: Arc<dyn SubnetManager>, lease: Lease) -> Self {
        // Whatever a clock says that was set back.
        Self { manager, lease: Lease { expires: Some(SystemTime::UNIX_EPOCH), ..lease } }
    }
}

#[async_trait]
impl SubnetManager for StaleManager {
    async fn network_config(&self) -> Result<Config> {
        self.manager.network_config().await
    }

    async fn config_changed(&self, seen: &Config) -> Result<Config> {
        self.manager.config_changed(seen).await
    }

    async fn hints(&self) -> Result<Hints> {
        self.manager.hints().await
    }

    async fn acquire_lease(&self, attrs: &LeaseAttrs) -> Result<Lease> {
        Ok(Lease { attrs: attrs.clone(), ..self.lease.clone() })
    }

    async fn publish(&self, held: &Lease, _: &LeaseAttrs) -> Result<Lease> {
        let source = format!("the lease {} has run out", held.subnets).into();
        Err(Error::Store { store: self.store_status().store, source })
    }

    async fn hold_lease(&self, _: &Lease) -> Result<LeaseEnd> {
        Ok(LeaseEnd::Expired)
    }

    async fn watch_leases(&self) -> Result<watch::Receiver<View>> {
        self.manager.watch_leases().await
    }

    fn ownership(&self) -> watch::Receiver<Ownership> {
        self.manager.ownership()
    }

    fn store_status(&self) -> StoreStatus {
        self.manager.store_status()
    }
}
