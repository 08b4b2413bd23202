//! The subnet manager on Kubernetes. Subnets are PodCIDRs, attributes are annotations of nodes.
//!
//! Kubernetes assigns the subnets, and leases do not expire. This node publishes its attributes,
//! keeps them published, and notices when it gets other subnets.
//!
//! **Source**: flannel `pkg/subnet/kube/kube.go`. Unlike Go flannel, this manager waits for a
//! missing PodCIDR, moves the lease to another PodCIDR, treats any changed attribute of either
//! family as a change, and restores removed annotations.

mod condition;
mod hold;
mod own;
mod shared;
mod wait;

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use async_trait::async_trait;
use flannel_core::address::Family;
use flannel_core::lease::{LeaseAttrs, View};
use flannel_core::runtime::{Task, lock};
use flannel_core::subnet::{Assignment, Hints, LeaseEnd, Ownership, Readiness, StoreStatus};
use flannel_core::{Config, Error, Lease, Result, SubnetManager};
use tokio::sync::watch;

use crate::options::KubeOptions;
use shared::Shared;

/// The time between two reads of the file with the network config.
const CONFIG_PERIOD: Duration = Duration::from_secs(5);

/// Leases as annotations of Kubernetes nodes, shared with Go flannel byte for byte.
///
/// A lease has no end and needs no renewal. [`hold_lease`](SubnetManager::hold_lease) restores
/// changed annotations, and returns when the node gets other subnets. The methods need a tokio
/// runtime with time and I/O enabled.
///
/// ```no_run
/// use flannel_core::SubnetManager;
/// use flannel_subnet_kube::{KubeManager, KubeOptions, NodeIdentity};
///
/// # async fn leases() -> flannel_core::Result<()> {
/// let manager = KubeManager::open(KubeOptions::new(NodeIdentity::Node("node-1".into()))).await?;
/// let mut views = manager.watch_leases().await?;
/// while views.changed().await.is_ok() {
///     println!("{} nodes", views.borrow().leases.len());
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct KubeManager {
    pub(crate) shared: Arc<Shared>,
    /// The task for the node's condition, after the first report.
    condition: OnceLock<Task>,
}

impl KubeManager {
    /// A manager on the API server of the options. Sends no request.
    ///
    /// # Errors
    /// [`Error::Refused`] if the options do not lead to an API server, or a file is wrong.
    ///
    /// # Blocking
    /// Reads a kubeconfig, certificates and tokens.
    pub async fn open(options: KubeOptions) -> Result<Self> {
        Ok(Self { shared: Arc::new(Shared::open(options).await?), condition: OnceLock::new() })
    }
}

#[async_trait]
impl SubnetManager for KubeManager {
    /// The first config is returned after the API server has answered. After a lease was acquired,
    /// the networks may not change any more, because pods would not survive that. Views and leases
    /// use the config that was returned last, not a later file.
    ///
    /// After [`Error::NotReady`], for example because the PodCIDR is missing, the next call waits.
    /// The wait ends when the watch shows that the reason has passed or changed, when the config
    /// changes, or after a pause. The pauses grow from 1 s to 30 s.
    async fn network_config(&self) -> Result<Config> {
        self.wait_for_node().await;
        let config = self.shared.config_now().await?;
        *lock(&self.shared.handed_out) = Some(config.clone());
        Ok(config)
    }

    fn use_config(&self, config: &Config) {
        if self.shared.held().is_none() {
            *lock(&self.shared.handed_out) = Some(config.clone());
        }
    }

    async fn config_changed(&self, known: &Config) -> Result<Config> {
        let mut logged = None;
        loop {
            match self.shared.read_config() {
                Ok(config) if config != *known => return Ok(config),
                Ok(_) => logged = None,
                Err(error) => {
                    let text = error.to_string();
                    if logged.as_ref() != Some(&text) {
                        tracing::warn!(
                            error = %text,
                            "the network config was changed, but is wrong and not used"
                        );
                        logged = Some(text);
                    }
                }
            }
            tokio::time::sleep(CONFIG_PERIOD).await;
        }
    }

    /// The addresses from the annotations `node-public-ip` and `node-public-ipv6`, and the
    /// attributes that this node published last. If the node has no complete lease, they are the
    /// addresses and attributes of its last lease.
    async fn hints(&self) -> Result<Hints> {
        let held = self.shared.held();
        let hints = match (self.shared.own_hints().await, &held) {
            (Err(Error::NotReady { .. }), Some(held)) => return Ok(held.hints()),
            (hints, _) => self.shared.note_obstacle(hints)?,
        };
        match held {
            Some(held) if hints.previous.is_none() => {
                let Hints { last_published, previous, .. } = held.hints();
                Ok(hints.with_last_published(last_published).with_previous(previous))
            }
            _ => Ok(hints),
        }
    }

    /// If the node has no complete lease, an earlier lease is still used. Usually no other node
    /// gets its subnets soon, and peers and pods stay reachable. [`SubnetManager::hold_lease`]
    /// notices its end.
    async fn acquire_lease(&self, attrs: &LeaseAttrs) -> Result<Lease> {
        let config = self.shared.config().await?;
        let held = match (self.shared.take(config, attrs).await, self.shared.held()) {
            (Err(Error::NotReady { reason, .. }), Some(held)) => {
                tracing::warn!(
                    subnets = %held.lease.subnets, store = self.shared.api.name(), %reason,
                    "no lease can be acquired, the earlier lease of this node is still used"
                );
                return Ok(Lease { attrs: attrs.clone(), ..held.lease });
            }
            (held, _) => self.shared.note_obstacle(held)?,
        };
        let lease = held.lease.clone();
        *lock(&self.shared.held) = Some(held);
        self.shared.ownership.send_replace(Ownership::Held { until: None });
        let node = self.shared.name().await?;
        tracing::info!(
            subnets = %lease.subnets, %node, store = self.shared.api.name(),
            "lease acquired"
        );
        Ok(lease)
    }

    async fn publish(&self, held: &Lease, attrs: &LeaseAttrs) -> Result<Lease> {
        let (node, read) = self.shared.own_node().await?;
        let families: Vec<Family> = held.subnets.iter().map(|subnet| subnet.family()).collect();
        let now = node
            .subnets(&families)
            .map_err(|wrong| self.shared.not_ready(format!("node {}: {wrong}", node.name)))?;
        if now != Some(held.subnets) {
            return Err(Error::Conflict { subnets: held.subnets });
        }
        self.shared.check_overwrites(&node, &families)?;
        let written = self.shared.annotate(&node, attrs).await?;
        Ok(self.shared.lease_of(&node, held.subnets, attrs, written.unwrap_or(read)))
    }

    async fn hold_lease(&self, held: &Lease) -> Result<LeaseEnd> {
        self.shared.hold(held).await
    }

    async fn watch_leases(&self) -> Result<watch::Receiver<View>> {
        self.shared.follow(|follower| follower.views.clone()).await
    }

    /// Updated while [`SubnetManager::hold_lease`] runs. The lease is lost if the node is deleted,
    /// or if its PodCIDRs are missing, unusable or others.
    fn ownership(&self) -> watch::Receiver<Ownership> {
        self.shared.ownership.subscribe()
    }

    fn publishes_readiness(&self) -> bool {
        self.shared.options.node_condition
    }

    /// The readiness is published as the node's condition `NetworkUnavailable`. The report
    /// [`Readiness::Starting`] without a datapath in place sets the condition to `True` if it is
    /// `False`. Such a value is left from before the host was restarted.
    async fn report(&self, readiness: &Readiness) -> Result<()> {
        if !self.publishes_readiness() {
            return Ok(());
        }
        match readiness {
            Readiness::Starting { datapath_in_place: true } => return Ok(()),
            Readiness::Starting { datapath_in_place: false } => {
                return self.shared.withdraw_condition().await;
            }
            _ => {}
        }
        self.shared.readiness.send_if_modified(|published| {
            let is_new = published.as_ref() != Some(readiness);
            *published = Some(readiness.clone());
            is_new
        });
        self.condition.get_or_init(|| Task::spawn(condition::keep(Arc::clone(&self.shared))));
        Ok(())
    }

    /// From the PodCIDRs of the node. A node whose PodCIDRs do not fit keeps its earlier lease.
    fn assignment(&self) -> Assignment {
        *lock(&self.shared.assignment)
    }

    fn store_status(&self) -> StoreStatus {
        let wrong_config = lock(&self.shared.wrong_config).clone();
        self.shared.api.status().with_wrong_config(wrong_config)
    }
}
