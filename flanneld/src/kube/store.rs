//! The options of the store of leases that the Kubernetes API is.

use std::path::PathBuf;

use flannel_subnet_kube::{KubeOptions, NodeIdentity, Prefix};

use super::KubeFlags;
use crate::config::StoreConfig;
use crate::error::Error;

impl KubeFlags {
    pub(super) fn prefix(&self) -> Result<Prefix, String> {
        self.kube_annotation_prefix
            .parse()
            .map_err(|error| format!("--kube-annotation-prefix: {error}"))
    }

    /// The same as typed values.
    pub(crate) fn store(&self) -> Result<StoreConfig, Error> {
        let given = |text: &String| Some(text.clone()).filter(|text| !text.is_empty());
        let identity = match given(&self.node_name) {
            Some(name) => NodeIdentity::Node(name),
            None => NodeIdentity::Pod {
                namespace: self.pod_namespace.clone(),
                name: self.pod_name.clone(),
            },
        };
        let options = KubeOptions {
            api_url: given(&self.kube_api_url),
            kubeconfig: given(&self.kubeconfig_file).map(PathBuf::from),
            prefix: self.prefix().map_err(Error::Usage)?,
            net_config: self.net_config_path.clone().into(),
            identity,
            node_condition: self.set_node_network_unavailable,
        };
        Ok(StoreConfig::Kubernetes { options })
    }
}
