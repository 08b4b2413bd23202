//! This node's lease and everybody's, as Kubernetes keeps them: subnets are PodCIDRs, attributes
//! are annotations.
//!
//! Kubernetes gives the subnets, and nothing expires. This node publishes how it is reached, keeps
//! that published, and notices when it is given other subnets.
//!
//! **Source**: flannel `pkg/subnet/kube/kube.go`. Different on purpose: a missing PodCIDR is waited for, another one moves
//! the lease, any changed attribute of either family is a change, and annotations that somebody
//! removed are put back.

use std::sync::{Arc, OnceLock, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use flannel_core::address::Family;
use flannel_core::lease::{LeaseAttrs, View};
use flannel_core::subnet::{Hints, LeaseEnd, Ownership, Readiness, StoreStatus};
use flannel_core::{Config, Error, Lease, Result, SubnetManager};
use tokio::sync::watch;

use crate::condition;
use crate::options::KubeOptions;
use crate::shared::Shared;
use crate::task::Task;

/// So often is the file with the network config looked at.
const CONFIG_PERIOD: Duration = Duration::from_secs(5);

/// Leases as annotations of Kubernetes nodes, shared with Go flannel byte for byte.
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
    /// Keeps the node's condition, from the first report on.
    condition: OnceLock<Task>,
}

impl KubeManager {
    /// A manager that speaks to the API server which the options name. Nothing is asked yet.
    ///
    /// # Errors
    /// [`Error::Refused`]: how to reach the API server is not known, or what is said of it is
    /// wrong.
    ///
    /// # Blocking
    /// Reads a kubeconfig, certificates and tokens.
    pub async fn open(options: KubeOptions) -> Result<Self> {
        Ok(Self { shared: Arc::new(Shared::open(options).await?), condition: OnceLock::new() })
    }
}

#[async_trait]
impl SubnetManager for KubeManager {
    /// Once a lease was acquired, the networks stay what they were: pods do not survive others. The
    /// first one is good for nothing until the API server has answered. Views and leases are of the
    /// config that was last given out, whatever the file has come to say.
    async fn network_config(&self) -> Result<Config> {
        let config = self.shared.config_now().await?;
        *self.shared.given.lock().unwrap_or_else(PoisonError::into_inner) = Some(config.clone());
        Ok(config)
    }

    async fn config_changed(&self, seen: &Config) -> Result<Config> {
        let mut said = None;
        loop {
            match self.shared.read_config() {
                Ok(config) if config != *seen => return Ok(config),
                Ok(_) => said = None,
                Err(error) => {
                    let text = error.to_string();
                    if said.as_ref() != Some(&text) {
                        tracing::warn!(
                            "the network config was changed, but is wrong and not used: {text}"
                        );
                        said = Some(text);
                    }
                }
            }
            tokio::time::sleep(CONFIG_PERIOD).await;
        }
    }

    /// Addresses from the annotations `node-public-ip` and `node-public-ipv6`, and what this node
    /// published last. While no lease can be made of this node, they are those of the one that it
    /// had.
    async fn hints(&self) -> Result<Hints> {
        let held = self.shared.held();
        let (public, lease) = match (self.shared.own_hints().await, &held) {
            (Err(Error::NotReady { .. }), Some(held)) => (held.prescribed, None),
            (hints, _) => hints?,
        };
        let lease = lease.or_else(|| held.map(|held| held.lease));
        Ok(Hints {
            public,
            previous: lease.as_ref().map(|lease| lease.subnets),
            last_published: lease.map(|lease| lease.attrs),
            lapsed: None,
        })
    }

    /// A lease that was acquired stays in force while none can be made of this node: mostly nobody
    /// else gets its subnets soon, and what peers and pods are reached by is not given up. What
    /// ends that, [`SubnetManager::hold_lease`] finds out.
    async fn acquire_lease(&self, attrs: &LeaseAttrs) -> Result<Lease> {
        let config = self.shared.config().await?;
        let held = match (self.shared.take(config, attrs).await, self.shared.held()) {
            (Err(Error::NotReady { reason, .. }), Some(held)) => {
                tracing::warn!(
                    subnets = %held.lease.subnets, store = self.shared.api.name(),
                    "the lease that this node had stays in force, since none can be acquired: {reason}"
                );
                return Ok(Lease { attrs: attrs.clone(), ..held.lease });
            }
            (held, _) => held?,
        };
        let lease = held.lease.clone();
        *self.shared.held.lock().unwrap_or_else(PoisonError::into_inner) = Some(held);
        self.shared.ownership.send_replace(Ownership::Held { until: None });
        let node = self.shared.name().await?;
        tracing::info!(subnets = %lease.subnets, %node, store = self.shared.api.name(), "lease acquired");
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

    /// Known while [`SubnetManager::hold_lease`] runs. The lease is lost when the node is gone, or
    /// has other PodCIDRs, or none, or such as no lease can be made of.
    fn ownership(&self) -> watch::Receiver<Ownership> {
        self.shared.ownership.subscribe()
    }

    fn publishes_readiness(&self) -> bool {
        self.shared.options.node_condition
    }

    /// Published as the node's condition `NetworkUnavailable`. On a start without a datapath in
    /// place, a condition that an earlier boot left as false is made true.
    async fn report(&self, readiness: &Readiness) -> Result<()> {
        if !self.publishes_readiness() {
            return Ok(());
        }
        if let Readiness::Starting { datapath_in_place } = readiness {
            return if *datapath_in_place {
                Ok(())
            } else {
                self.shared.withdraw_condition().await
            };
        }
        self.shared.readiness.send_if_modified(|published| {
            let new = published.as_ref() != Some(readiness);
            *published = Some(readiness.clone());
            new
        });
        self.condition.get_or_init(|| Task::spawn(condition::keep(Arc::clone(&self.shared))));
        Ok(())
    }

    fn store_status(&self) -> StoreStatus {
        let wrong_config =
            self.shared.wrong_config.lock().unwrap_or_else(PoisonError::into_inner).clone();
        StoreStatus { wrong_config, ..self.shared.api.status() }
    }
}
