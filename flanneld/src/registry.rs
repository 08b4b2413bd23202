//! The store of leases, open.

use std::convert::Infallible;
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use flannel_core::{SubnetManager, Subnets};
use flannel_subnet::{Assign, AssignedManager, Identity, LocalManager, Mark, Ownership, Registry};

use crate::config::StoreConfig;
use crate::error::Error;
#[cfg(feature = "kube")]
use crate::kube::KubeStore;
use crate::observe::Observer;

/// How this node is told from others.
pub(crate) struct Node {
    pub(crate) mark: Mark,
    pub(crate) previous: Option<Subnets>,
    pub(crate) addresses: Vec<IpAddr>,
    pub(crate) renew_margin: Duration,
    /// The file that the last good set of leases is kept in.
    pub(crate) cache: PathBuf,
}

/// An open store of leases.
#[derive(Debug, Clone)]
pub(crate) struct Store {
    pub(crate) subnets: Arc<dyn SubnetManager>,
    owner: Owner,
}

/// Who keeps this node's lease.
#[derive(Debug, Clone)]
enum Owner {
    /// The lease engine.
    Local(Arc<LocalManager>),
    /// Whoever writes the leases beforehand.
    Others,
    #[cfg(feature = "kube")]
    Kube(KubeStore),
}

impl Store {
    /// Leases that others write.
    #[cfg(test)]
    pub(crate) fn of_others(subnets: Arc<dyn SubnetManager>) -> Self {
        Self { subnets, owner: Owner::Others }
    }

    /// Opens the store.
    pub(crate) async fn open(config: &StoreConfig, node: Node) -> Result<Self, Error> {
        let registry: Arc<dyn Registry> = match config {
            #[cfg(feature = "kube")]
            StoreConfig::Kubernetes { options, set_condition } => {
                let store = KubeStore::open(options.clone(), *set_condition).await?;
                return Ok(Self { subnets: store.subnets(), owner: Owner::Kube(store) });
            }
            StoreConfig::Registry(registry) => Arc::clone(registry),
            StoreConfig::Directory(location) => flannel_options::open_directory(location).await?,
            #[cfg(feature = "etcd")]
            StoreConfig::Etcd(options) => flannel_options::open_etcd(options.clone())?,
        };
        if matches!(config, StoreConfig::Directory(dir) if dir.options.assign == Assign::Static) {
            let subnets = Arc::new(AssignedManager::new(registry, node.addresses));
            return Ok(Self { subnets, owner: Owner::Others });
        }
        let identity =
            Identity { mark: node.mark, previous: node.previous, local_addresses: node.addresses };
        let manager = LocalManager::new(registry, identity).with_renew_margin(node.renew_margin);
        let local = Arc::new(manager.with_cache(node.cache));
        Ok(Self { subnets: Arc::clone(&local) as _, owner: Owner::Local(local) })
    }

    /// Whether the subnet is this node's. A lease that others wrote is, as long as the network runs.
    pub(crate) fn ownership(&self) -> Ownership {
        match &self.owner {
            Owner::Local(local) => local.ownership(),
            Owner::Others => Ownership::Reserved,
            #[cfg(feature = "kube")]
            Owner::Kube(store) => match store.lost() {
                Some(_) => Ownership::Nothing,
                None => Ownership::Reserved,
            },
        }
    }

    /// Why it is not, where the store tells more than [`Store::ownership`].
    pub(crate) fn lost(&self) -> Option<String> {
        match &self.owner {
            Owner::Local(_) | Owner::Others => None,
            #[cfg(feature = "kube")]
            Owner::Kube(store) => store.lost(),
        }
    }

    /// Before the first lease is taken: tells the store whether anything of this node's network `stands`, if it wants to know.
    ///
    /// # Errors
    /// The store cannot be told.
    pub(crate) async fn begin(&self, stands: impl Future<Output = bool>) -> Result<(), Error> {
        match &self.owner {
            Owner::Local(_) | Owner::Others => {
                drop(stands);
                Ok(())
            }
            #[cfg(feature = "kube")]
            Owner::Kube(store) => store.begin(stands).await,
        }
    }

    /// Tells the store how this node's network is, if it wants to know.
    pub(crate) async fn tell(&self, observer: &Observer) -> Infallible {
        match &self.owner {
            Owner::Local(_) | Owner::Others => {
                let _ = observer;
                std::future::pending().await
            }
            #[cfg(feature = "kube")]
            Owner::Kube(store) => store.tell(observer).await,
        }
    }
}
