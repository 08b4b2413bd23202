//! A network that this host has joined: of kernel objects, or one that runs itself.

use crate::admission::ViewFilter;
use flannel_core::lease::View;
use flannel_core::network::{Ended, NetworkHandle};
use flannel_core::{Network, Result};
use tokio::sync::watch;

use crate::kernel_network::KernelNetwork;

/// A network that this host has joined ([`Host::join`](crate::Host::join)).
#[derive(Debug)]
#[non_exhaustive]
pub enum HostNetwork {
    /// A network of kernel objects.
    Kernel(Box<KernelNetwork>),
    /// A network that runs itself, with the peers that this node accepts.
    Custom(Box<CustomNetwork>),
}

impl HostNetwork {
    /// A handle that outlives [`HostNetwork::run`].
    pub fn handle(&self) -> NetworkHandle {
        match self {
            Self::Kernel(network) => network.handle(),
            Self::Custom(network) => network.network.handle(),
        }
    }

    /// Whether the lease has the backend data of the last run, because those of now differ
    /// ([`JoinOptions::published`](crate::JoinOptions::published)). When the objects of this node
    /// are in place, join again without that option, to publish the offers.
    pub fn withholds_offers(&self) -> bool {
        matches!(self, Self::Kernel(network) if network.withholds_offers)
    }

    /// Whether packets to a peer pass by the first backend only after a handshake
    /// ([`Blueprint::handshakes`](flannel_core::backend::Blueprint::handshakes)).
    pub fn needs_handshakes(&self) -> bool {
        matches!(self, Self::Kernel(network) if network.needs_handshakes)
    }

    /// Follows the views ([`SubnetManager::watch_leases`](flannel_core::SubnetManager)) until their
    /// sender is dropped, or until a network that runs itself ends. Does not renew the lease.
    ///
    /// # Errors
    /// The network cannot go on, and another run of the same network cannot help.
    ///
    /// # Cancel safety and panics
    /// Dropping the future stops the network. See [`KernelNetwork::run`] and [`Network::run`].
    pub async fn run(self, views: watch::Receiver<View>) -> Result<Ended> {
        match self {
            Self::Kernel(network) => network.run(views).await,
            Self::Custom(network) => network.run(views).await,
        }
    }
}

/// A network that runs itself, and the filter of its peers. [`HostNetwork::run`] runs it.
pub struct CustomNetwork {
    pub(crate) network: Box<dyn Network>,
    pub(crate) filter: ViewFilter,
}

impl std::fmt::Debug for CustomNetwork {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CustomNetwork").field("network", &self.network).finish_non_exhaustive()
    }
}

impl CustomNetwork {
    async fn run(self, mut views: watch::Receiver<View>) -> Result<Ended> {
        let Self { network, mut filter } = self;
        let first = filter.accept(views.borrow_and_update().clone());
        let (sender, receiver) = watch::channel(first);
        let mut run = network.run(receiver);
        loop {
            tokio::select! {
                ended = &mut run => return ended,
                changed = views.changed() => if changed.is_err() { break },
            }
            let view = views.borrow_and_update().clone();
            sender.send_replace(filter.accept(view));
        }
        drop(sender);
        run.await
    }
}
