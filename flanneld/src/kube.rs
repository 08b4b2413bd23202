//! Go flannel's flags for leases in the Kubernetes API, which this build cannot keep there.
//!
//! The one thing to know: they are known, so that a command line says what is missing and not that it is wrong.

use crate::go_flags::go_bool;

/// What Go flannel needs to know of Kubernetes.
#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "Kubernetes")]
#[non_exhaustive]
pub struct KubeFlags {
    /// Keep leases in the Kubernetes API: not in this build
    #[arg(long, value_name = "true|false", num_args = 0..=1, require_equals = true, default_missing_value = "true",
        default_value_t = false, value_parser = go_bool, action = clap::ArgAction::Set, hide = true)]
    pub kube_subnet_mgr: bool,

    /// Where the Kubernetes API is; without effect
    #[arg(long, value_name = "URL", default_value = "", hide = true)]
    pub kube_api_url: String,

    /// What the names of annotations begin with; without effect
    #[arg(long, value_name = "PREFIX", default_value = "flannel.alpha.coreos.com", hide = true)]
    pub kube_annotation_prefix: String,

    /// How to speak to the Kubernetes API; without effect
    #[arg(long, value_name = "FILE", default_value = "", hide = true)]
    pub kubeconfig_file: String,

    /// The network config for leases in the Kubernetes API; without effect
    #[arg(long, value_name = "FILE", default_value = "/etc/kube-flannel/net-conf.json", hide = true)]
    pub net_config_path: String,

    /// Tell Kubernetes that the node's network works; without effect
    #[arg(long, value_name = "true|false", num_args = 0..=1, require_equals = true, default_missing_value = "true",
        default_value_t = true, value_parser = go_bool, action = clap::ArgAction::Set, hide = true)]
    pub set_node_network_unavailable: bool,
}

impl KubeFlags {
    /// The flags that are read and change nothing without `--kube-subnet-mgr`.
    pub(crate) const WITHOUT_EFFECT: [&str; 5] = [
        "kube_api_url",
        "kube_annotation_prefix",
        "kubeconfig_file",
        "net_config_path",
        "set_node_network_unavailable",
    ];

    /// # Errors
    /// Leases are to be kept where this build cannot keep them: what to do instead.
    pub(crate) fn check(&self) -> Result<(), String> {
        if !self.kube_subnet_mgr {
            return Ok(());
        }
        let stores = if cfg!(feature = "etcd") { "in etcd and in directories" } else { "in directories" };
        Err(format!(
            "--kube-subnet-mgr: this build keeps leases {stores}, but not yet in the Kubernetes API. Until it can: leave \
             Go flannel on clusters that need it, or keep the leases elsewhere (--registry)"
        ))
    }
}
