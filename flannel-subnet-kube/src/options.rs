//! The options of a manager: its API server and its node.

use std::path::PathBuf;

use flannel_core::Credential;

use crate::node::prefix::Prefix;

/// The options of a [`KubeManager`](crate::KubeManager). `Debug` does not show a credential that is
/// given as a value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KubeOptions {
    /// The URL of the API server, or `None` for the URL of the kubeconfig or of the service
    /// account.
    pub api_url: Option<String>,
    /// The file with the credentials and certificates for the API server. If it is `None`, requests
    /// to an `api_url` have no credentials, and without an `api_url` the service account of this
    /// pod is used.
    pub kubeconfig: Option<PathBuf>,
    /// The CAs of the API server, as PEM certificates, instead of those of the kubeconfig or the
    /// service account. Without any, the system's CAs are trusted.
    pub ca: Option<Credential>,
    /// The bearer token, instead of the one of the kubeconfig or the service account. A file is read
    /// for each request.
    pub token: Option<Credential>,
    /// The prefix of the names of annotations.
    pub prefix: Prefix,
    /// The file with the network config. It is read again every 5 s.
    pub net_config: PathBuf,
    /// This node.
    pub identity: NodeIdentity,
    /// Whether the node's condition `NetworkUnavailable` shows the network's readiness.
    pub node_condition: bool,
}

impl KubeOptions {
    /// The options for a pod, with Go flannel's prefix and file. The node's condition is published.
    pub fn new(identity: NodeIdentity) -> Self {
        Self {
            api_url: None,
            kubeconfig: None,
            ca: None,
            token: None,
            prefix: Prefix::default(),
            net_config: "/etc/kube-flannel/net-conf.json".into(),
            identity,
            node_condition: true,
        }
    }
}

/// How a daemon knows the node on which it runs.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum NodeIdentity {
    /// The name of the node.
    Node(String),
    /// The pod of the daemon. The name of the node is read from it.
    Pod {
        /// The pod's namespace.
        namespace: String,
        /// The pod's name.
        name: String,
    },
}
