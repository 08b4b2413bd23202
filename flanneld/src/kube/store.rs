//! Opens the store of leases that the Kubernetes API is.

use std::path::PathBuf;

use flannel_subnet_kube::{KubeManager, KubeOptions, NodeIdentity, Prefix};

use super::KubeFlags;
use crate::error::Error;

impl KubeFlags {
    pub(super) fn prefix(&self) -> Result<Prefix, String> {
        self.kube_annotation_prefix
            .parse()
            .map_err(|error| format!("--kube-annotation-prefix: {error}"))
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
            node_condition: self.set_node_network_unavailable,
        })
    }

    /// Opens the store.
    ///
    /// # Errors
    /// How to reach the API server is not known, or wrong.
    pub(crate) async fn open(&self) -> Result<KubeManager, Error> {
        let manager = KubeManager::open(self.options()?).await;
        manager.map_err(|source| Error::Kube(Box::new(source)))
    }
}
