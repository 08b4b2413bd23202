//! Opens the store of leases.

pub(crate) mod readiness;
pub(crate) mod wait;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use flannel_core::SubnetManager;
use flannel_subnet::{Assign, AssignedManager, Cache, Identity, LocalManager, Registry, Saved};

use crate::config::StoreConfig;
use crate::error::Error;

/// Opens the store of the configuration. A lease engine renews leases `renew_margin` before their
/// end and keeps the last complete set of leases in the file `cache`. `after_another_flannel`: see
/// [`LocalManager::after_another_flannel`].
///
/// # Errors
/// The configuration is wrong, or the store cannot be opened.
pub(crate) async fn open(
    config: &StoreConfig,
    identity: Identity,
    (renew_margin, cache, after_another_flannel): (Duration, PathBuf, bool),
) -> Result<Arc<dyn SubnetManager>, Error> {
    let registry: Arc<dyn Registry> = match config {
        #[cfg(feature = "kube")]
        StoreConfig::Kubernetes { options } => {
            let manager = flannel_subnet_kube::KubeManager::open(options.clone()).await;
            return Ok(Arc::new(manager.map_err(|source| Error::Kube(Box::new(source)))?));
        }
        StoreConfig::Manager(manager) => return Ok(Arc::clone(manager)),
        StoreConfig::Registry(registry) => Arc::clone(registry),
        StoreConfig::Directory(location) => {
            let known = |saved: Saved| saved.store == location.to_string();
            let existed = Cache::open(&cache).load().is_ok_and(known);
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
