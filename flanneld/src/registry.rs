//! Opens the store of leases.

use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use flannel_core::{SubnetManager, Subnets};
use flannel_subnet::{Assign, AssignedManager, HolderId, Identity, LocalManager, Registry};

use crate::config::StoreConfig;
use crate::error::Error;

/// The values that distinguish this node from others.
pub(crate) struct Node {
    pub(crate) holder: HolderId,
    pub(crate) previous: Option<Subnets>,
    pub(crate) addresses: Vec<IpAddr>,
    pub(crate) renew_margin: Duration,
    /// The file that the last good set of leases is kept in.
    pub(crate) cache: PathBuf,
}

/// Opens the store that the configuration names.
///
/// # Errors
/// The configuration is wrong, or the store cannot be opened.
pub(crate) async fn open(
    config: &StoreConfig,
    node: Node,
) -> Result<Arc<dyn SubnetManager>, Error> {
    let registry: Arc<dyn Registry> = match config {
        #[cfg(feature = "kube")]
        StoreConfig::Kubernetes { options } => {
            let manager = flannel_subnet_kube::KubeManager::open(options.clone()).await;
            return Ok(Arc::new(manager.map_err(|source| Error::Kube(Box::new(source)))?));
        }
        StoreConfig::Registry(registry) => Arc::clone(registry),
        StoreConfig::Directory(location) => flannel_options::open_directory(location).await?,
        #[cfg(feature = "etcd")]
        StoreConfig::Etcd(options) => flannel_options::open_etcd(options.clone())?,
    };
    if matches!(config, StoreConfig::Directory(dir) if dir.options.assign == Assign::Static) {
        return Ok(Arc::new(AssignedManager::new(registry, node.addresses)));
    }
    let identity =
        Identity { holder: node.holder, previous: node.previous, local_addresses: node.addresses };
    let manager = LocalManager::new(registry, identity).with_renew_margin(node.renew_margin);
    Ok(Arc::new(manager.with_cache(node.cache)))
}
