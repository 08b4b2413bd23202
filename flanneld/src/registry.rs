//! Which store leases are kept in, as the command line names it.

use std::fmt;
use std::net::IpAddr;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use flannel_core::{SubnetManager, Subnets};
use flannel_subnet::{
    Assign, AssignedManager, DirLocation, DirRegistry, HolderId, Identity, LocalManager, Registry,
};
#[cfg(feature = "etcd")]
use flannel_subnet_etcd::{EtcdOptions, EtcdRegistry};

use crate::cli::Options;
use crate::error::Error;

/// A store of leases, as named on the command line.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum RegistryUrl {
    /// `dir:PATH`, `dir:PATH?assign=static`: a directory.
    Dir(DirLocation),
    /// `etcd`: where [`EtcdFlags`](crate::EtcdFlags) say.
    #[cfg(feature = "etcd")]
    Etcd,
}

impl FromStr for RegistryUrl {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        #[cfg(feature = "etcd")]
        if text == "etcd" {
            return Ok(Self::Etcd);
        }
        if !text.starts_with("dir:") {
            return Err(format!(
                "{text:?} names no kind of registry; this build has {}dir:PATH, for example dir:/etc/flannel/network",
                if cfg!(feature = "etcd") { "etcd and " } else { "" }
            ));
        }
        text.parse()
            .map(Self::Dir)
            .map_err(|error: flannel_subnet::LocationError| error.to_string())
    }
}

impl fmt::Display for RegistryUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Dir(location) => location.fmt(f),
            #[cfg(feature = "etcd")]
            Self::Etcd => f.write_str("etcd"),
        }
    }
}

/// What distinguishes this node from others.
pub(crate) struct Node {
    pub(crate) holder: HolderId,
    pub(crate) previous: Option<Subnets>,
    pub(crate) addresses: Vec<IpAddr>,
    pub(crate) renew_margin: Duration,
    #[cfg(feature = "etcd")]
    pub(crate) etcd: EtcdOptions,
    /// The file that the last good set of leases is kept in.
    pub(crate) cache: PathBuf,
}

/// Opens the store that the options name.
pub(crate) async fn open(options: &Options, node: Node) -> Result<Arc<dyn SubnetManager>, Error> {
    #[cfg(feature = "kube")]
    if options.kube.kube_subnet_mgr {
        return Ok(Arc::new(options.kube.open().await?));
    }
    options.registry.open(node).await
}

impl RegistryUrl {
    /// Opens the registry alone.
    pub(crate) async fn open_registry(
        &self,
        #[cfg(feature = "etcd")] etcd: EtcdOptions,
    ) -> Result<Arc<dyn Registry>, Error> {
        let failed = |source: flannel_core::Error| Error::Registry {
            url: self.to_string(),
            source: source.into(),
        };
        Ok(match self {
            Self::Dir(location) => {
                let opened = DirRegistry::open(location.path.clone(), location.options).await;
                Arc::new(opened.map_err(failed)?)
            }
            #[cfg(feature = "etcd")]
            Self::Etcd => Arc::new(EtcdRegistry::new(etcd).map_err(failed)?),
        })
    }

    /// Opens the store.
    async fn open(&self, node: Node) -> Result<Arc<dyn SubnetManager>, Error> {
        #[cfg(feature = "etcd")]
        let registry = self.open_registry(node.etcd).await?;
        #[cfg(not(feature = "etcd"))]
        let registry = self.open_registry().await?;
        if matches!(self, Self::Dir(location) if location.options.assign == Assign::Static) {
            return Ok(Arc::new(AssignedManager::new(registry, node.addresses)));
        }
        let identity = Identity {
            holder: node.holder,
            previous: node.previous,
            local_addresses: node.addresses,
        };
        let manager = LocalManager::new(registry, identity).with_renew_margin(node.renew_margin);
        Ok(Arc::new(manager.with_cache(node.cache)))
    }
}
