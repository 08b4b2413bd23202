//! An API server, a network config, and a manager on them.

use std::panic::Location;
use std::path::PathBuf;
use std::time::Duration;
use test_support::eventually_async;

use flannel_core::address::Dual;
use flannel_core::lease::{LeaseAttrs, Offer, View};
use flannel_core::subnet::{Loss, Ownership};
use flannel_core::{Result, SubnetManager};
use flannel_subnet_kube::testing::ApiServer;
use flannel_subnet_kube::{KubeManager, KubeOptions, NodeIdentity};
use serde_json::{Value, json};
use tokio::sync::watch;

pub(crate) const PREFIX: &str = "flannel.alpha.coreos.com/";
pub(crate) const V4: &str = r#"{"Network":"10.1.0.0/16","Backend":{"Type":"vxlan"}}"#;
pub(crate) const DUAL: &str = r#"{"Network":"10.1.0.0/16","EnableIPv6":true,
    "IPv6Network":"fd00::/48","Backend":{"Type":"vxlan"}}"#;
/// The time limit of all waits.
const PATIENCE: Duration = Duration::from_secs(60);

pub(crate) struct Fixture {
    pub(crate) server: ApiServer,
    pub(crate) dir: tempfile::TempDir,
}

impl Fixture {
    pub(crate) fn new(config: &str) -> Self {
        let fixture = Self { server: ApiServer::new(), dir: tempfile::tempdir().unwrap() };
        fixture.write_config(config);
        fixture
    }

    pub(crate) fn net_config(&self) -> PathBuf {
        self.dir.path().join("net-conf.json")
    }

    pub(crate) fn write_config(&self, config: &str) {
        std::fs::write(self.net_config(), config).unwrap();
    }

    pub(crate) fn options(&self, node: &str) -> KubeOptions {
        let mut options = KubeOptions::new(NodeIdentity::Node(node.to_owned()));
        options.api_url = Some(self.server.url());
        options.net_config = self.net_config();
        options
    }

    /// A manager with a kubeconfig, whose cluster and user have these fields in YAML.
    pub(crate) async fn with_kubeconfig(&self, cluster: &str, user: &str) -> Result<KubeManager> {
        let text = format!(
            "current-context: c\n\
             clusters: [{{name: c, cluster: {{{cluster}}}}}]\n\
             contexts: [{{name: c, context: {{cluster: c, user: u}}}}]\n\
             users: [{{name: u, user: {{{user}}}}}]\n"
        );
        let kubeconfig = self.dir.path().join("kubeconfig");
        std::fs::write(&kubeconfig, text).unwrap();
        let mut options = self.options("me");
        options.kubeconfig = Some(kubeconfig);
        options.api_url = None;
        KubeManager::open(options).await
    }

    pub(crate) async fn manager(&self, node: &str) -> KubeManager {
        KubeManager::open(self.options(node)).await.unwrap()
    }

    /// A manager of the node `me`, which has a PodCIDR, with live views.
    pub(crate) async fn following(&self) -> (KubeManager, watch::Receiver<View>) {
        if self.server.node("me").is_none() {
            self.server.put_node("me", blank(&["10.1.1.0/24"]));
        }
        let manager = self.manager("me").await;
        let mut views = manager.watch_leases().await.unwrap();
        wait(
            views.wait_for(|view| matches!(view.origin, flannel_core::lease::Origin::Live { .. })),
        )
        .await
        .unwrap();
        (manager, views)
    }
}

/// Why the lease is lost, or `None` if it is not.
pub(crate) fn withdrawn(ownership: &watch::Receiver<Ownership>) -> Option<String> {
    match &*ownership.borrow() {
        Ownership::Lost { why: Loss::Withdrawn(why), .. } => Some(why.clone()),
        _ => None,
    }
}

/// Waits with a time limit.
pub(crate) async fn wait<T>(what: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, what).await.expect("it takes too long")
}

/// Polls a condition.
#[track_caller]
pub(crate) fn until(mut condition: impl FnMut() -> bool) -> impl Future<Output = ()> {
    let caller = Location::caller();
    eventually_async(PATIENCE, async move || condition(), move || caller)
}

/// A node with these PodCIDRs, as the kubelet registers it.
pub(crate) fn blank(cidrs: &[&str]) -> Value {
    let spec = if cidrs.is_empty() {
        json!({})
    } else {
        json!({ "podCIDR": cidrs[0], "podCIDRs": cidrs })
    };
    json!({ "metadata": { "labels": { "kubernetes.io/os": "linux" } }, "spec": spec,
        "status": { "conditions": [{ "type": "Ready", "status": "True" }] } })
}

/// A node that runs flannel with vxlan.
pub(crate) fn peer(cidr: &str, public: &str, mac: &str) -> Value {
    let mut node = blank(&[cidr]);
    node["metadata"]["annotations"] = json!({
        format!("{PREFIX}kube-subnet-manager"): "true",
        format!("{PREFIX}backend-type"): "vxlan",
        format!("{PREFIX}backend-data"): format!(r#"{{"VNI":1,"VtepMAC":"{mac}"}}"#),
        format!("{PREFIX}public-ip"): public,
        "volumes.kubernetes.io/controller-managed-attach-detach": "true",
    });
    node
}

pub(crate) fn attrs(kind: &'static str, public: &[&str], data: [Option<&str>; 2]) -> LeaseAttrs {
    LeaseAttrs::from(
        Offer::new(
            public.iter().map(|address| address.parse::<std::net::IpAddr>().unwrap()).collect(),
        )
        .with_kind(kind)
        .with_data(Dual { v4: data[0].map(Into::into), v6: data[1].map(Into::into) }),
    )
}

pub(crate) const MAC: &str = r#"{"VNI":1,"VtepMAC":"0a:00:00:00:00:01"}"#;

pub(crate) fn vxlan() -> LeaseAttrs {
    attrs("vxlan", &["192.0.2.1"], [Some(MAC), None])
}

/// All leases of a view, as text.
pub(crate) fn leases(view: &View) -> Vec<String> {
    view.leases
        .iter()
        .map(|lease| {
            let public: Vec<String> =
                lease.attrs.preferred.public.values().map(ToString::to_string).collect();
            format!("{} {} {}", lease.subnets, lease.attrs.preferred.kind, public.join(" "))
        })
        .collect()
}
