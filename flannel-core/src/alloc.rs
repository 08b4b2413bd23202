//! The backend that only allocates: a lease and a subnet file, no routes.

use std::sync::Arc;

use async_trait::async_trait;
use tokio::sync::watch;

use crate::config::Config;
use crate::error::Result;
use crate::kernel::Owned;
use crate::lease::{LeaseAttrs, View};
use crate::name::LinkName;
use crate::network::{Backend, Ended, ExternalInterface, Host, Network, NetworkHandle};
use crate::status::Status;

/// The backend `alloc`: gives this node a subnet and leaves connectivity to others.
///
/// **Source**: flannel `pkg/backend/alloc/alloc.go`; its leases carry no backend type.
#[derive(Debug, Clone, Copy, Default)]
pub struct Alloc;

#[async_trait]
impl Backend for Alloc {
    fn name(&self) -> &'static str {
        "alloc"
    }

    fn lease_type(&self) -> &'static str {
        ""
    }

    fn owned(&self, _: LinkName, _: &Config) -> Result<Owned> {
        Ok(Owned::default())
    }

    fn check(&self, _: &Config, _: Option<&ExternalInterface>) -> Result<()> {
        Ok(())
    }

    async fn register(&self, host: &Host, _: &Config) -> Result<Box<dyn Network>> {
        let attrs = LeaseAttrs { public: host.iface.public, ..LeaseAttrs::default() };
        let lease = host.subnets.acquire_lease(&attrs).await?;
        let status = Status { in_sync: true, own_in_place: true, live: true, ..Status::default() };
        let (status, receiver) = watch::channel(Arc::new(status));
        let handle = NetworkHandle::new(lease, host.iface.mtu, receiver);
        Ok(Box::new(AllocNetwork { handle, _status: status }))
    }
}

/// A network that does nothing.
#[derive(Debug)]
struct AllocNetwork {
    handle: NetworkHandle,
    /// Kept so that receivers stay open.
    _status: watch::Sender<Arc<Status>>,
}

#[async_trait]
impl Network for AllocNetwork {
    fn handle(&self) -> NetworkHandle {
        self.handle.clone()
    }

    async fn run(self: Box<Self>, mut views: watch::Receiver<View>) -> Result<Ended> {
        while views.changed().await.is_ok() {}
        Ok(Ended::ViewsClosed)
    }
}
