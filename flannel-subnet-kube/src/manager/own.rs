//! This node: its name, its latest object, and the writes to it.
//!
//! The node is read with a request for this node alone, which returns the latest version. The
//! followed view may be older.

use flannel_core::address::{Dual, Family};
use flannel_core::lease::{LeaseAttrs, Revision, TooLarge};
use flannel_core::runtime::lock;
use flannel_core::subnet::Hints;
use flannel_core::{Config, Error, Lease, Result, Subnets};
use serde::Deserialize;
use serde_json::json;

use super::shared::Shared;
use crate::api::Call;
use crate::node::annotations::{
    OTHER_OFFERS, Values, address, desired, has, interfaces, names, read, reworded, size,
    wrong_overwrites,
};
use crate::node::{Node, Wire};
use crate::options::NodeIdentity;

impl Shared {
    /// This node's name. If only the pod is known, the name is read from the pod.
    pub(crate) async fn name(&self) -> Result<&str> {
        self.name
            .get_or_try_init(async || match &self.options.identity {
                NodeIdentity::Node(name) => Ok(name.clone()),
                NodeIdentity::Pod { namespace, name } => self.node_of(namespace, name).await,
            })
            .await
            .map(String::as_str)
    }

    async fn node_of(&self, namespace: &str, name: &str) -> Result<String> {
        #[derive(Default, Deserialize)]
        #[serde(default, rename_all = "camelCase")]
        struct Spec {
            node_name: String,
        }
        #[derive(Deserialize)]
        struct Pod {
            #[serde(default)]
            spec: Spec,
        }
        let path = format!("/api/v1/namespaces/{namespace}/pods/{name}");
        let call = Call { verb: "get", resource: "pods", path, patch: None };
        let pod: Pod = serde_json::from_slice(&self.api.ask(&call).await?)
            .map_err(|error| self.unreadable(&call, &error))?;
        if pod.spec.node_name.is_empty() {
            let reason = format!(
                "pod {namespace}/{name} is not on a node: expected POD_NAMESPACE and POD_NAME of \
                 the pod that runs this program"
            );
            return Err(self.not_ready(reason));
        }
        Ok(pod.spec.node_name)
    }

    fn unreadable(&self, call: &Call, error: &serde_json::Error) -> Error {
        let reason = format!("{} {}: the answer cannot be read: {error}", call.verb, call.resource);
        Error::Store { store: self.api.name().to_owned(), source: reason.into() }
    }

    pub(crate) fn not_ready(&self, reason: String) -> Error {
        Error::NotReady { store: self.api.name().to_owned(), reason }
    }

    /// The present state and version of this node.
    pub(crate) async fn own_node(&self) -> Result<(Node, Revision)> {
        let name = self.name().await?;
        let call = Call {
            verb: "get",
            resource: "nodes",
            path: format!("/api/v1/nodes/{name}"),
            patch: None,
        };
        match self.api.ask(&call).await {
            Ok(bytes) => self.read_node(&call, &bytes),
            Err(Error::NotReady { .. }) => Err(self.not_ready(format!(
                "there is no node {name:?}: expected NODE_NAME as kubectl get nodes shows it, \
                 after the kubelet has registered it"
            ))),
            Err(error) => Err(error),
        }
    }

    fn read_node(&self, call: &Call, bytes: &[u8]) -> Result<(Node, Revision)> {
        let wire: Wire<'_> =
            serde_json::from_slice(bytes).map_err(|error| self.unreadable(call, &error))?;
        let node = wire
            .node(&self.options.prefix)
            .map_err(|wrong| self.not_ready(format!("node {}: {wrong}", wire.metadata.name)))?;
        Ok((node, wire.revision()))
    }

    /// Patches this node's status.
    pub(crate) async fn patch(&self, patch: serde_json::Value) -> Result<(Node, Revision)> {
        let path = format!("/api/v1/nodes/{}/status", self.name().await?);
        let call =
            Call { verb: "patch", resource: "nodes/status", path, patch: Some(patch.to_string()) };
        let answer = self.api.ask(&call).await?;
        self.read_node(&call, &answer)
    }

    /// The subnets that Kubernetes assigned to this node, which fit the network config.
    pub(crate) fn subnets_of(&self, node: &Node, config: &Config) -> Result<Subnets> {
        self.fitting(node, config)
            .map_err(|wrong| self.not_ready(format!("node {}: {wrong}", node.name)))
    }

    /// The subnets as [`Self::subnets_of`] returns them. The error does not have the node's name.
    pub(crate) fn fitting(
        &self,
        node: &Node,
        config: &Config,
    ) -> std::result::Result<Subnets, String> {
        let families: Vec<Family> = config.networks.families().collect();
        let subnets = node.subnets(&families)?;
        for family in &families {
            if subnets.and_then(|subnets| subnets.family(*family)).is_none() {
                return Err(format!(
                    "it has no {family} PodCIDR yet: expected kube-controller-manager with \
                     --allocate-node-cidrs and a --cluster-cidr in the pod network, or another \
                     program that assigns PodCIDRs"
                ));
            }
        }
        let subnets =
            subnets.expect("a config enables a family, and the node has a subnet of each");
        for subnet in subnets.iter() {
            if let Some(network) = config.networks[subnet.family()].map(|network| network.network)
                && !network.covers(&subnet)
            {
                return Err(format!(
                    "its PodCIDR {subnet} lies outside the pod network {network} of {}: \
                     expected the same network there and in kube-controller-manager's \
                     --cluster-cidr",
                    self.options.net_config.display()
                ));
            }
        }
        Ok(subnets)
    }

    /// What this node prescribes: its annotations for public addresses and for the interface, and
    /// its addresses.
    pub(crate) fn prescribed(&self, node: &Node) -> Result<Hints> {
        let given = |family: Family| {
            address(&node.values, names(family).node, family, &self.options.prefix)
                .map_err(|wrong| self.not_ready(format!("node {}: {wrong}", node.name)))
        };
        let public = Dual { v4: given(Family::V4)?, v6: given(Family::V6)? };
        Ok(Hints::default()
            .with_public(public)
            .with_interface(interfaces(&node.values))
            .with_node_addresses(node.internal))
    }

    /// Checks the addresses that replace this node's own. If one is wrong, a node that has
    /// published nothing waits, and any other node continues with its own addresses.
    pub(crate) fn check_overwrites(&self, node: &Node, families: &[Family]) -> Result<()> {
        match wrong_overwrites(&node.values, families, &self.options.prefix).next() {
            Some(wrong) if !node.is_managed() => {
                Err(self.not_ready(format!("node {}: {wrong}", node.name)))
            }
            _ => Ok(()),
        }
    }

    /// Writes the attributes to this node's annotations. Returns the new version if a write was
    /// necessary.
    pub(crate) async fn annotate(
        &self,
        node: &Node,
        attrs: &LeaseAttrs,
    ) -> Result<Option<Revision>> {
        let desired = desired(attrs, &node.values);
        TooLarge::check(size(&desired, &Family::BOTH)).map_err(|reason| Error::Refused {
            store: format!("{}: node {}", self.api.name(), node.name),
            reason: reason.to_string().into(),
        })?;
        let mut missing = missing(node, &desired);
        let mut since = None;
        if !missing.is_empty() {
            missing.extend(reworded(&desired, &missing, &node.values));
            let prefix = &self.options.prefix;
            let annotations: serde_json::Map<String, serde_json::Value> = missing
                .iter()
                .map(|(name, value)| {
                    let is_removed = value.is_empty() && **name == *OTHER_OFFERS;
                    // `null` removes an annotation.
                    let value = if is_removed { serde_json::Value::Null } else { json!(value) };
                    (format!("{prefix}{name}"), value)
                })
                .collect();
            let (_, revision) =
                self.patch(json!({ "metadata": { "annotations": annotations } })).await?;
            since = Some(revision);
        }
        *lock(&self.published) = desired;
        Ok(since)
    }

    /// The lease of a node with these attributes as peers read it, but with the node's own
    /// addresses, because an operator may withdraw the addresses that replace them.
    pub(crate) fn lease_of(
        &self,
        node: &Node,
        subnets: Subnets,
        attrs: &LeaseAttrs,
        revision: Revision,
    ) -> Lease {
        let families: Vec<Family> = subnets.iter().map(|subnet| subnet.family()).collect();
        let read = read(&desired(attrs, &Values::new()), &families, &self.options.prefix);
        Lease { subnets, attrs: read.attrs, expires: None, since: Revision(node.created), revision }
    }
}

/// The desired annotations that a node lacks.
pub(super) fn missing(node: &Node, desired: &Values) -> Values {
    let mut missing = desired.clone();
    missing.retain(|name, value| !has(&node.values, name, value));
    missing
}
