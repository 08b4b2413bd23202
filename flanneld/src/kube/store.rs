//! Opens the store of leases that the Kubernetes API is.

use std::convert::Infallible;
use std::path::PathBuf;
use std::sync::Arc;

use flannel_core::SubnetManager;
use flannel_subnet_kube::{KubeManager, KubeOptions, NodeIdentity, Prefix};
use tokio::sync::OnceCell;

use super::{KubeFlags, condition};
use crate::config::StoreConfig;
use crate::error::Error;
use crate::observe::Observer;

/// Leases as annotations of nodes, and this node's condition.
#[derive(Debug, Clone)]
pub(crate) struct KubeStore {
    manager: Arc<KubeManager>,
    /// The condition is ours to keep.
    tells: bool,
    /// Nothing that an earlier boot said is left.
    begun: Arc<OnceCell<()>>,
}

impl KubeFlags {
    pub(super) fn prefix(&self) -> Result<Prefix, String> {
        self.kube_annotation_prefix
            .parse()
            .map_err(|error| format!("--kube-annotation-prefix: {error}"))
    }

    /// The same as typed values.
    pub(crate) fn store(&self) -> Result<StoreConfig, Error> {
        let set_condition = self.set_node_network_unavailable;
        Ok(StoreConfig::Kubernetes { options: self.options()?, set_condition })
    }

    fn options(&self) -> Result<KubeOptions, Error> {
        let given = |text: &String| Some(text.clone()).filter(|text| !text.is_empty());
        let identity = match given(&self.node_name) {
            Some(name) => NodeIdentity::Node(name),
            None => NodeIdentity::Pod {
                namespace: self.pod_namespace.clone(),
                name: self.pod_name.clone(),
            },
        };
        Ok(KubeOptions {
            api_url: given(&self.kube_api_url),
            kubeconfig: given(&self.kubeconfig_file).map(PathBuf::from),
            prefix: self.prefix().map_err(Error::Usage)?,
            net_config: self.net_config_path.clone().into(),
            identity,
        })
    }
}

impl KubeStore {
    pub(crate) async fn open(options: KubeOptions, tells: bool) -> Result<Self, Error> {
        let manager = KubeManager::open(options).await;
        let manager = manager.map_err(|source| Error::Kube(Box::new(source)))?;
        Ok(Self { manager: Arc::new(manager), tells, begun: Arc::default() })
    }

    pub(crate) fn subnets(&self) -> Arc<dyn SubnetManager> {
        Arc::clone(&self.manager) as _
    }

    /// Why this node's lease is lost; `None`: it is not.
    pub(crate) fn lost(&self) -> Option<String> {
        self.manager.lost().borrow().clone()
    }

    /// Before the first lease is taken: where nothing of the network `stands`, the node must not go on saying that it works.
    ///
    /// # Errors
    /// The API server does not answer.
    pub(crate) async fn begin(&self, stands: impl Future<Output = bool>) -> Result<(), Error> {
        if !self.tells {
            return Ok(());
        }
        let begin = async || {
            if stands.await {
                return Ok(());
            }
            match self.manager.withdraw_condition("flannel has only just been started").await {
                // That is told when the condition must be set the next time, and no reason to have no network.
                Err(flannel_core::Error::Refused { .. }) => Ok(()),
                withdrawn => withdrawn.map_err(Error::from),
            }
        };
        self.begun.get_or_try_init(begin).await.copied()
    }

    /// Keeps the node's condition, if that is wanted.
    pub(crate) async fn tell(&self, observer: &Observer) -> Infallible {
        match self.tells {
            true => condition::keep(&self.manager, observer).await,
            false => std::future::pending().await,
        }
    }
}
