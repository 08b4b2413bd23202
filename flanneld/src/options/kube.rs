//! Go flannel's flags and environment variables for leases in the Kubernetes API.
//!
//! A build without the feature `kube` parses the flags too, so that the error names the feature.

use std::ffi::OsString;
use std::path::PathBuf;

use flannel_options::go_flags::go_bool;
#[cfg(feature = "kube")]
use flannel_subnet_kube::{KubeOptions, NodeIdentity, Prefix};

/// Leases in the Kubernetes API.
#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "Kubernetes")]
#[non_exhaustive]
pub struct KubeFlags {
    /// Keep leases in the Kubernetes API instead of --registry: subnets are nodes' PodCIDRs
    #[arg(long, value_name = "true|false", num_args = 0..=1, require_equals = true,
        default_missing_value = "true", default_value_t = false, value_parser = go_bool,
        action = clap::ArgAction::Set, hide = HIDE)]
    pub kube_subnet_mgr: bool,

    /// The URL of the Kubernetes API; by default that of the kubeconfig or the service account
    #[arg(long, value_name = "URL", default_value = "", hide_default_value = true, hide = HIDE)]
    pub kube_api_url: String,

    /// The prefix of annotations
    #[arg(long, value_name = "PREFIX", default_value = "flannel.alpha.coreos.com", hide = HIDE)]
    pub kube_annotation_prefix: String,

    /// The kubeconfig; by default the pod's service account is used
    #[arg(long, value_name = "FILE", default_value = "", hide_default_value = true, hide = HIDE)]
    pub kubeconfig_file: String,

    /// The network config
    #[arg(long, value_name = "FILE", default_value = "/etc/kube-flannel/net-conf.json",
        hide = HIDE)]
    pub net_config_path: String,

    /// Update the node's condition NetworkUnavailable
    #[arg(long, value_name = "true|false", num_args = 0..=1, require_equals = true,
        default_missing_value = "true", default_value_t = true, value_parser = go_bool,
        action = clap::ArgAction::Set, hide = HIDE)]
    pub set_node_network_unavailable: bool,

    /// This node's name; from `NODE_NAME`. Empty: read from the pod.
    #[arg(skip)]
    pub node_name: String,

    /// This pod's namespace; from `POD_NAMESPACE`.
    #[arg(skip)]
    pub pod_namespace: String,

    /// This pod's name; from `POD_NAME`.
    #[arg(skip)]
    pub pod_name: String,
}

/// The help does not show flags that this build does not support.
const HIDE: bool = !cfg!(feature = "kube");

impl KubeFlags {
    /// Flags that change nothing, given these.
    pub(super) fn without_effect(&self) -> &'static [&'static str] {
        if self.kube_subnet_mgr {
            &["registry", "subnet_lease_renew_margin"]
        } else {
            &[
                "kube_api_url",
                "kube_annotation_prefix",
                "kubeconfig_file",
                "net_config_path",
                "set_node_network_unavailable",
            ]
        }
    }

    /// Reads the variables that have no flag, and checks all values.
    ///
    /// # Errors
    /// A value is missing or wrong. The text names the right one.
    pub(crate) fn complete(
        &mut self,
        env: impl Fn(&str) -> Option<OsString>,
    ) -> Result<(), String> {
        if !self.kube_subnet_mgr {
            return Ok(());
        }
        if HIDE {
            let etcd = if cfg!(feature = "etcd") { "in etcd and " } else { "" };
            return Err(format!(
                "--kube-subnet-mgr: this build keeps leases {etcd}in directories, but not in the \
                 Kubernetes API; expected a build with the feature kube"
            ));
        }
        let text = |name: &str| {
            env(name).map(|value| value.to_string_lossy().into_owned()).unwrap_or_default()
        };
        self.node_name = text("NODE_NAME");
        self.pod_namespace = text("POD_NAMESPACE");
        self.pod_name = text("POD_NAME");
        if self.node_name.is_empty() && (self.pod_namespace.is_empty() || self.pod_name.is_empty())
        {
            return Err("--kube-subnet-mgr: the name of this node is not known; expected \
                        NODE_NAME in the environment, or POD_NAMESPACE and POD_NAME"
                .to_owned());
        }
        let depth = text("EVENT_QUEUE_DEPTH");
        if !depth.is_empty() && depth.parse::<i64>().is_err() {
            return Err(format!(
                "EVENT_QUEUE_DEPTH in the environment: {depth:?} is not valid, expected a whole \
                 number"
            ));
        }
        #[cfg(feature = "kube")]
        {
            self.prefix()?;
            self.url()?;
        }
        Ok(())
    }

    /// Checks the URL as the connection does.
    #[cfg(feature = "kube")]
    fn url(&self) -> Result<(), String> {
        let text = &self.kube_api_url;
        let is_url = |url: http::Uri| {
            matches!(url.scheme_str(), Some("http" | "https")) && url.host().is_some()
        };
        if text.is_empty() || text.parse().is_ok_and(is_url) {
            Ok(())
        } else {
            Err(format!(
                "--kube-api-url: {text:?} is no URL; expected one such as \
             https://192.0.2.1:6443"
            ))
        }
    }

    /// The files that are read, including those that the kubeconfig names.
    pub(crate) fn files(&self) -> Vec<PathBuf> {
        if !self.kube_subnet_mgr {
            return Vec::new();
        }
        let account = "/var/run/secrets/kubernetes.io/serviceaccount/token";
        let credentials = match (self.kubeconfig_file.as_str(), self.kube_api_url.as_str()) {
            ("", "") => Some(account.into()),
            ("", _) => None,
            (file, _) => Some(file.into()),
        };
        let files = [Some(self.net_config_path.clone().into()), credentials].into_iter().flatten();
        #[cfg(feature = "kube")]
        let files = files.chain(match self.kubeconfig_file.as_str() {
            "" => Vec::new(),
            file => flannel_subnet_kube::credential_files(file.as_ref()),
        });
        files.collect()
    }
}

#[cfg(feature = "kube")]
impl KubeFlags {
    fn prefix(&self) -> Result<Prefix, String> {
        self.kube_annotation_prefix
            .parse()
            .map_err(|error| format!("--kube-annotation-prefix: {error}"))
    }

    /// The options of the store that these flags ask for.
    pub(super) fn options(&self) -> Result<KubeOptions, flannel_options::Error> {
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
            ca: None,
            token: None,
            prefix: self.prefix().map_err(flannel_options::Error::Usage)?,
            net_config: self.net_config_path.clone().into(),
            identity,
            node_condition: self.set_node_network_unavailable,
        })
    }
}
