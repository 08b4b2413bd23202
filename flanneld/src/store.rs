//! Opens the store of leases.

pub(crate) mod readiness;
pub(crate) mod wait;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use flannel_core::SubnetManager;
use flannel_subnet::{Assign, AssignedManager, Cache, Identity, LocalManager, Registry};

use crate::config::StoreConfig;
use crate::error::Error;

/// The options of a lease engine.
pub(crate) struct LeaseOptions {
    /// The time before its end at which a lease is renewed.
    pub(crate) renew_margin: Duration,
    /// The file with the last complete set of leases.
    pub(crate) cache: PathBuf,
    /// See [`LocalManager::after_another_flannel`].
    pub(crate) after_another_flannel: bool,
}

/// Opens the store of the configuration.
///
/// # Errors
/// The configuration is wrong, or the store cannot be opened.
pub(crate) async fn open(
    config: &StoreConfig,
    identity: Identity,
    options: LeaseOptions,
) -> Result<Arc<dyn SubnetManager>, Error> {
    let LeaseOptions { renew_margin, cache, after_another_flannel } = options;
    let registry: Arc<dyn Registry> = match config {
        #[cfg(feature = "kube")]
        StoreConfig::Kubernetes { options } => {
            let manager = flannel_subnet_kube::KubeManager::open(options.clone()).await;
            return Ok(Arc::new(manager.map_err(|source| Error::Kube(Box::new(source)))?));
        }
        StoreConfig::Manager(manager) => return Ok(Arc::clone(manager)),
        StoreConfig::Registry(registry) => Arc::clone(registry),
        StoreConfig::Directory(location) => {
            let existed =
                Cache::open(&cache).load().is_ok_and(|saved| saved.store == location.to_string());
            flannel_options::open_directory(location, existed).await?
        }
        #[cfg(feature = "etcd")]
        StoreConfig::Etcd(options) => flannel_options::open_etcd(options.clone())?,
    };
    if matches!(config, StoreConfig::Directory(dir) if dir.options.assign == Assign::Static) {
        return Ok(Arc::new(AssignedManager::new(registry, identity.local_addresses)));
    }
    let manager = LocalManager::new(registry, identity).with_renew_margin(renew_margin);
    Ok(Arc::new(manager.after_another_flannel(after_another_flannel).with_cache(cache)))
}
