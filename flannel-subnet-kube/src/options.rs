//! The options of a manager: its API server and its node.

use std::path::PathBuf;

use crate::node::prefix::Prefix;

/// The options of a [`KubeManager`](crate::KubeManager).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KubeOptions {
    /// The API server's URL, instead of that in the kubeconfig; `None`: that in the kubeconfig.
    pub api_url: Option<String>,
    /// The credentials and certificates for the API server. `None`: with a URL, none are used;
    /// without one, the service account of this pod.
    pub kubeconfig: Option<PathBuf>,
    /// The beginning of the names of annotations.
    pub prefix: Prefix,
    /// The file with the network config.
    pub net_config: PathBuf,
    /// This node.
    pub identity: NodeIdentity,
    /// Whether the node's condition `NetworkUnavailable` reports the network's readiness.
    pub node_condition: bool,
}

impl KubeOptions {
    /// In a pod, with Go flannel's prefix and file; the node's condition is kept.
    pub fn new(identity: NodeIdentity) -> Self {
        Self {
            api_url: None,
            kubeconfig: None,
            prefix: Prefix::default(),
            net_config: "/etc/kube-flannel/net-conf.json".into(),
            identity,
            node_condition: true,
        }
    }
}

/// How a daemon knows which node it runs on.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum NodeIdentity {
    /// By the node's name.
    Node(String),
    /// By its own pod, which names the node.
    Pod {
        /// The pod's namespace.
        namespace: String,
        /// The pod's name.
        name: String,
    },
}
