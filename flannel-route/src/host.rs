//! From a backend to a network that can run: prepare, acquire the lease, build.

use std::sync::Arc;

use flannel_core::backend::{Built, ExternalInterface, Node, NodeLease};
use flannel_core::{Backend, Config, Kernel, Lease, Network, Result, SubnetManager};

use crate::kernel_network::KernelNetwork;

/// This host, ready to take part in networks.
#[derive(Debug, Clone)]
pub struct Host {
    /// The interface that connects it with its peers.
    pub uplink: ExternalInterface,
    /// Its kernel.
    pub kernel: Arc<dyn Kernel>,
    /// The source of its lease, and of its peers' leases.
    pub subnets: Arc<dyn SubnetManager>,
    /// See [`Node::machine_id`].
    pub machine_id: String,
}

/// Choices of [`Host::join`].
#[derive(Debug, Clone, Default)]
pub struct JoinOptions {
    /// The lease that this node had until it expired, while the store does not answer: the network is built for it, and no
    /// lease is acquired. `None`: the node acquires its lease.
    pub lapsed: Option<Lease>,
    /// See [`KernelNetwork::drop_unused_addresses`]. Has no effect on a network that is not made of kernel objects.
    pub drop_unused_addresses: bool,
}

impl Host {
    /// Joins the network that `config` asks for: prepares the backend, acquires the node's lease with the attributes that the
    /// backend offers, and builds the network for it. Writes nothing to the kernel until the network runs.
    ///
    /// # Errors
    /// The backend refuses the config or the host, or there is no lease to be had.
    ///
    /// # Cancel safety
    /// Dropped half-way, a lease may have been acquired; the next call finds it again.
    pub async fn join(
        &self,
        backend: &dyn Backend,
        config: &Config,
        options: JoinOptions,
    ) -> Result<Box<dyn Network>> {
        let node = Node::new(&self.uplink, &self.machine_id, &self.kernel, &*self.subnets);
        let prepared = backend.prepare(&node, config).await?;
        let lease = match options.lapsed {
            Some(lease) => NodeLease::Lapsed(Lease { attrs: prepared.offer, ..lease }),
            None => NodeLease::Held(self.subnets.acquire_lease(&prepared.offer).await?),
        };
        match (prepared.build)(&lease)? {
            Built::Kernel(blueprint) => {
                let networks = config.pod_networks().collect();
                let kernel = Arc::clone(&self.kernel);
                let mut network = KernelNetwork::new(kernel, lease, networks, vec![blueprint]);
                if options.drop_unused_addresses {
                    network = network.drop_unused_addresses();
                }
                Ok(Box::new(network))
            }
            Built::Custom(network) => Ok(network),
        }
    }
}
