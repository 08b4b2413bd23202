//! Which API server, and which node this is.

use std::path::PathBuf;

use crate::annotations::Prefix;

/// The options of a [`KubeManager`](crate::KubeManager).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KubeOptions {
    /// The API server's URL, instead of what the kubeconfig says; `None`: as that says.
    pub api_url: Option<String>,
    /// How to speak to the API server; `None`: with the URL alone, nothing else is needed; without
    /// it, what every pod is given.
    pub kubeconfig: Option<PathBuf>,
    /// What the names of annotations begin with.
    pub prefix: Prefix,
    /// The file with the network config.
    pub net_config: PathBuf,
    /// Which node this is.
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
