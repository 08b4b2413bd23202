//! This node: its name, its object as it is now, and what flannel writes to it.
//!
//! It is read by asking for it alone, which is always the latest, and not from what is followed.

use std::net::IpAddr;
use std::sync::PoisonError;

use flannel_core::address::{Dual, Family};
use flannel_core::lease::{LeaseAttrs, Revision};
use flannel_core::{Config, Error, Lease, Result, Subnets};
use serde::Deserialize;
use serde_json::json;

use crate::annotations::{Values, address, names, read, reworded, says, wanted, wrong_overwrites};
use crate::api::Call;

use crate::node::{Node, Wire};
use crate::options::NodeIdentity;
use crate::shared::Shared;

impl Shared {
    /// This node's name; asks for the pod if that is what names it.
    pub(crate) async fn name(&self) -> Result<&str> {
        let name = self.name.get_or_try_init(async || match &self.options.identity {
            NodeIdentity::Node(name) => Ok(name.clone()),
            NodeIdentity::Pod { namespace, name } => self.node_of(namespace, name).await,
        });
        name.await.map(String::as_str)
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
            .map_err(|error| self.strange(&call, &error))?;
        if pod.spec.node_name.is_empty() {
            let reason = format!(
                "pod {namespace}/{name} is on no node: right would be POD_NAMESPACE and POD_NAME of this very pod"
            );
            return Err(self.not_ready(reason));
        }
        Ok(pod.spec.node_name)
    }

    fn strange(&self, call: &Call, error: &serde_json::Error) -> Error {
        let source =
            format!("{} {}: the answer cannot be read: {error}", call.verb, call.resource).into();
        Error::Store { store: self.api.name().to_owned(), source }
    }

    pub(crate) fn not_ready(&self, reason: String) -> Error {
        Error::NotReady { store: self.api.name().to_owned(), reason }
    }

    /// This node as it is now.
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
                "there is no node {name:?}: right would be NODE_NAME as kubectl get nodes shows it, once the kubelet has registered it"
            ))),
            Err(error) => Err(error),
        }
    }

    fn read_node(&self, call: &Call, bytes: &[u8]) -> Result<(Node, Revision)> {
        let wire: Wire<'_> =
            serde_json::from_slice(bytes).map_err(|error| self.strange(call, &error))?;
        let node = wire.node(&self.options.prefix);
        let node =
            node.map_err(|wrong| self.not_ready(format!("node {}: {wrong}", wire.metadata.name)))?;
        Ok((node, wire.revision()))
    }

    /// Writes to this node's status.
    pub(crate) async fn patch(&self, patch: serde_json::Value) -> Result<(Node, Revision)> {
        let path = format!("/api/v1/nodes/{}/status", self.name().await?);
        let call =
            Call { verb: "patch", resource: "nodes/status", path, patch: Some(patch.to_string()) };
        let answer = self.api.ask(&call).await?;
        self.read_node(&call, &answer)
    }

    /// The subnets that Kubernetes gave this node, which fit the network config.
    pub(crate) fn subnets_of(&self, node: &Node, config: &Config) -> Result<Subnets> {
        self.fitting(node, config)
            .map_err(|wrong| self.not_ready(format!("node {}: {wrong}", node.name)))
    }

    /// [`Self::subnets_of`]; the error does not name the node.
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
                    "it has no {family} PodCIDR yet: right would be kube-controller-manager with --allocate-node-cidrs and a \
                     --cluster-cidr in the pod network, or whatever else gives nodes their PodCIDRs here"
                ));
            }
        }
        let subnets =
            subnets.expect("a config enables a family, and the node has a subnet of each");
        for subnet in subnets.iter() {
            let network = config.networks[subnet.family()].map(|network| network.network);
            if let Some(network) = network.filter(|network| !network.covers(&subnet)) {
                return Err(format!(
                    "its PodCIDR {subnet} lies outside the pod network {network} of {}: right would be one network there and in \
                     kube-controller-manager's --cluster-cidr",
                    self.options.net_config.display()
                ));
            }
        }
        Ok(subnets)
    }

    /// The addresses that this node's annotations prescribe as its public ones.
    pub(crate) fn prescribed(&self, node: &Node) -> Result<Dual<IpAddr>> {
        let given = |family: Family| {
            address(&node.values, names(family).node, family, &self.options.prefix)
                .map_err(|wrong| self.not_ready(format!("node {}: {wrong}", node.name)))
        };
        Ok(Dual { v4: given(Family::V4)?, v6: given(Family::V6)? })
    }

    /// What is to be published instead of this node's own addresses can be. A node of which nothing was published yet waits for that;
    /// one of which something was goes on with the own ones, whoever published it.
    pub(crate) fn check_overwrites(&self, node: &Node, families: &[Family]) -> Result<()> {
        match wrong_overwrites(&node.values, families, &self.options.prefix).next() {
            Some(wrong) if !node.is_managed() => {
                Err(self.not_ready(format!("node {}: {wrong}", node.name)))
            }
            _ => Ok(()),
        }
    }

    /// Makes this node's annotations say how it is reached: the version since when they do, if they did not.
    pub(crate) async fn annotate(
        &self,
        node: &Node,
        attrs: &LeaseAttrs,
    ) -> Result<Option<Revision>> {
        let wanted = wanted(attrs, &node.values);
        let mut missing = missing(node, &wanted);
        let mut since = None;
        if !missing.is_empty() {
            missing.extend(reworded(&wanted, &missing, &node.values));
            let prefix = &self.options.prefix;
            let annotations: serde_json::Map<String, serde_json::Value> = missing
                .iter()
                .map(|(name, value)| (format!("{prefix}{name}"), json!(value)))
                .collect();
            let (_, revision) =
                self.patch(json!({ "metadata": { "annotations": annotations } })).await?;
            since = Some(revision);
        }
        *self.published.lock().unwrap_or_else(PoisonError::into_inner) = wanted;
        Ok(since)
    }

    /// The lease that a node has with these attributes, as peers would read it. Its addresses are the own ones, whatever is published
    /// instead: that may be taken back.
    pub(crate) fn lease_of(
        &self,
        node: &Node,
        subnets: Subnets,
        attrs: &LeaseAttrs,
        revision: Revision,
    ) -> Lease {
        let families: Vec<Family> = subnets.iter().map(|subnet| subnet.family()).collect();
        let (attrs, _) = read(&wanted(attrs, &Values::new()), &families, &self.options.prefix);
        Lease { subnets, attrs, expires: None, since: Revision(node.created), revision }
    }
}

/// What of that a node's annotations do not say.
pub(crate) fn missing(node: &Node, wanted: &Values) -> Values {
    let mut missing = wanted.clone();
    missing.retain(|name, value| !says(&node.values, name, value));
    missing
}
