//! This node's lease and everybody's, as Kubernetes keeps them: subnets are PodCIDRs, attributes are annotations.
//!
//! The one thing to know: Kubernetes gives the subnets, and nothing expires. What this node does is publish how it is reached, see to
//! it that this stays published, and notice when it was given other subnets.
//!
//! **Source**: flannel `pkg/subnet/kube/kube.go`. Different on purpose: a missing PodCIDR is waited for, another one moves the lease,
//! any changed attribute of either family is a change, and annotations that somebody removed are put back.

use std::io::ErrorKind;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use flannel_core::{
    Config, Dual, Error, Family, Hints, Lease, LeaseAttrs, LeaseEnd, Result, Revision, StoreStatus,
    SubnetManager, View,
};
use tokio::sync::{OnceCell, watch};

use crate::annotations::{Prefix, Values};
use crate::api::Api;
use crate::connect::Source;
use crate::follow::{Follower, Own};
use crate::nodes::Terms;

/// So often is the file with the network config looked at.
const CONFIG_PERIOD: Duration = Duration::from_secs(5);

/// What a [`KubeManager`] is told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KubeOptions {
    /// The API server's URL, instead of what the kubeconfig says; `None`: as that says.
    pub api_url: Option<String>,
    /// How to speak to the API server; `None`: with the URL alone, nothing else is needed; without it, what every pod is given.
    pub kubeconfig: Option<PathBuf>,
    /// What the names of annotations begin with.
    pub prefix: Prefix,
    /// The file with the network config.
    pub net_config: PathBuf,
    /// Which node this is.
    pub identity: NodeIdentity,
}

impl KubeOptions {
    /// In a pod, with Go flannel's prefix and file.
    pub fn new(identity: NodeIdentity) -> Self {
        Self {
            api_url: None,
            kubeconfig: None,
            prefix: Prefix::default(),
            net_config: "/etc/kube-flannel/net-conf.json".into(),
            identity,
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
    pub(crate) api: Arc<Api>,
    pub(crate) options: KubeOptions,
    /// This node's name.
    pub(crate) name: OnceCell<String>,
    follower: Mutex<Option<Follower>>,
    /// The config that was last given out: what is built from it is built from nothing else.
    given: Mutex<Option<Config>>,
    held: Mutex<Option<Held>>,
    /// What this node's annotations were last made to say.
    pub(crate) published: Mutex<Values>,
    /// What is wrong with the network config.
    wrong_config: Mutex<Option<String>>,
    /// Why this node has no lease any more; `None`: it has, or has never had one.
    pub(crate) lost: watch::Sender<Option<String>>,
}

/// The lease that was last acquired.
#[derive(Debug, Clone)]
struct Held {
    lease: Lease,
    /// What it was acquired from: its networks stay what they are.
    config: Config,
    /// The addresses that the node prescribed.
    prescribed: Dual<IpAddr>,
}

impl KubeManager {
    /// A manager that speaks to the API server which the options name. Nothing is asked yet.
    ///
    /// # Errors
    /// [`Error::Refused`]: how to reach the API server is not known, or what is said of it is wrong.
    ///
    /// # Blocking
    /// Reads a kubeconfig, certificates and tokens.
    pub async fn open(options: KubeOptions) -> Result<Self> {
        let source =
            Source { url: options.api_url.clone(), kubeconfig: options.kubeconfig.clone() };
        Ok(Self {
            api: Arc::new(Api::open(source).await?),
            options,
            name: OnceCell::new(),
            follower: Mutex::default(),
            given: Mutex::default(),
            held: Mutex::default(),
            published: Mutex::default(),
            wrong_config: Mutex::default(),
            lost: watch::channel(None).0,
        })
    }

    /// Why this node no longer holds the lease that it acquired, as a sentence without a full stop: its node is gone, or has
    /// other PodCIDRs, or none, or such as no lease can be made of. `None`: it holds it, or has acquired none yet. Known while [`SubnetManager::hold_lease`] runs.
    pub fn lost(&self) -> watch::Receiver<Option<String>> {
        self.lost.subscribe()
    }

    fn held(&self) -> Option<Held> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The config that was last given out; without one, what it is now.
    async fn config(&self) -> Result<Config> {
        let given = self.given.lock().unwrap_or_else(PoisonError::into_inner).clone();
        match given {
            Some(given) => Ok(given),
            None => self.config_now().await,
        }
    }

    /// The config whose networks count: that of the lease; before there is one, what was given out.
    pub(crate) async fn settled(&self) -> Result<Config> {
        match self.held() {
            Some(held) => Ok(held.config),
            None => self.config().await,
        }
    }

    async fn config_now(&self) -> Result<Config> {
        if self.api.status().confirmed.is_none() {
            self.own_node().await?;
        }
        let mut config = self.read_config()?;
        if let Some(held) = self.held() {
            config.networks = held.config.networks;
        }
        Ok(config)
    }

    fn read_config(&self) -> Result<Config> {
        let read = read_config(&self.options.net_config);
        let wrong = read.as_ref().err().map(ToString::to_string);
        *self.wrong_config.lock().unwrap_or_else(PoisonError::into_inner) = wrong;
        read
    }

    /// All nodes, followed from the first call on, and anew if the config has come to enable other families before a lease was
    /// acquired, or if they are followed no more.
    pub(crate) async fn follow<T>(&self, look: impl FnOnce(&Follower) -> T) -> Result<T> {
        let name = self.name().await?.to_owned();
        let config = self.settled().await?;
        let mut follower = self.follower.lock().unwrap_or_else(PoisonError::into_inner);
        let terms = Terms {
            prefix: self.options.prefix.clone(),
            families: config.networks.families().collect(),
        };
        if let Some(follower) =
            follower.as_ref().filter(|follower| follower.terms == terms && follower.lives())
        {
            return Ok(look(follower));
        }
        Ok(look(follower.insert(Follower::start(Arc::clone(&self.api), terms, name))))
    }

    /// The addresses that this node prescribes, and its lease, if it has one.
    async fn own_hints(&self) -> Result<(Dual<IpAddr>, Option<Lease>)> {
        let (node, _) = self.own_node().await?;
        let families: Vec<Family> = self.config().await?.networks.families().collect();
        let (lease, _) = node.lease(Revision::default(), &families, &self.options.prefix);
        Ok((self.prescribed(&node)?, lease))
    }

    /// Makes a lease of this node as it is now.
    async fn take(&self, config: Config, attrs: &LeaseAttrs) -> Result<Held> {
        let (node, read) = self.own_node().await?;
        let prescribed = self.prescribed(&node)?;
        let subnets = self.subnets_of(&node, &config)?;
        let families: Vec<Family> = config.networks.families().collect();
        self.check_overwrites(&node, &families)?;
        let written = self.annotate(&node, attrs).await?;
        let lease = self.lease_of(&node, subnets, attrs, written.unwrap_or(read));
        Ok(Held { lease, config, prescribed })
    }

    /// What is known of this node, always the latest.
    pub(crate) async fn follow_own(&self) -> Result<watch::Receiver<Own>> {
        self.follow(|follower| follower.own.clone()).await
    }
}

fn read_config(path: &Path) -> Result<Config> {
    let location = path.display().to_string();
    match std::fs::read_to_string(path) {
        Ok(text) => Config::parse(&text).map_err(|source| Error::Config { location, source }),
        Err(error) if error.kind() == ErrorKind::NotFound => Err(Error::NoConfig { location }),
        Err(error) => Err(Error::Store { store: location, source: error.into() }),
    }
}

#[async_trait]
impl SubnetManager for KubeManager {
    /// Once a lease was acquired, the networks stay what they were: pods do not survive others. The first one is good for nothing
    /// until the API server has answered. Views and leases are of the config that was last given out, whatever the file has come to say.
    async fn network_config(&self) -> Result<Config> {
        let config = self.config_now().await?;
        *self.given.lock().unwrap_or_else(PoisonError::into_inner) = Some(config.clone());
        Ok(config)
    }

    async fn config_changed(&self, seen: &Config) -> Result<Config> {
        let mut said = None;
        loop {
            match self.read_config() {
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

    /// Addresses from the annotations `node-public-ip` and `node-public-ipv6`, and what this node published last. While no lease can be
    /// made of this node, they are those of the one that it had.
    async fn hints(&self) -> Result<Hints> {
        let held = self.held();
        let (public, lease) = match (self.own_hints().await, &held) {
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
    /// else gets its subnets soon, and what peers and pods are reached by is not given up. What ends that, [`SubnetManager::hold_lease`] finds out.
    async fn acquire_lease(&self, attrs: &LeaseAttrs) -> Result<Lease> {
        let config = self.config().await?;
        let held = match (self.take(config, attrs).await, self.held()) {
            (Err(Error::NotReady { reason, .. }), Some(held)) => {
                tracing::warn!(
                    subnets = %held.lease.subnets, store = self.api.name(),
                    "the lease that this node had stays in force, since none can be acquired: {reason}"
                );
                return Ok(Lease { attrs: attrs.clone(), ..held.lease });
            }
            (held, _) => held?,
        };
        let lease = held.lease.clone();
        *self.held.lock().unwrap_or_else(PoisonError::into_inner) = Some(held);
        self.lost.send_if_modified(|lost| lost.take().is_some());
        let node = self.name().await?;
        tracing::info!(subnets = %lease.subnets, %node, store = self.api.name(), "lease acquired");
        Ok(lease)
    }

    async fn publish(&self, held: &Lease, attrs: &LeaseAttrs) -> Result<Lease> {
        let (node, read) = self.own_node().await?;
        let families: Vec<Family> = held.subnets.iter().map(|subnet| subnet.family()).collect();
        let now = node
            .subnets(&families)
            .map_err(|wrong| self.not_ready(format!("node {}: {wrong}", node.name)))?;
        if now != Some(held.subnets) {
            return Err(Error::Conflict { subnets: held.subnets });
        }
        self.check_overwrites(&node, &families)?;
        let written = self.annotate(&node, attrs).await?;
        Ok(self.lease_of(&node, held.subnets, attrs, written.unwrap_or(read)))
    }

    async fn hold_lease(&self, held: &Lease) -> Result<LeaseEnd> {
        self.hold(held).await
    }

    async fn watch_leases(&self) -> Result<watch::Receiver<View>> {
        self.follow(|follower| follower.views.clone()).await
    }

    fn store_status(&self) -> StoreStatus {
        let wrong_config = self.wrong_config.lock().unwrap_or_else(PoisonError::into_inner).clone();
        StoreStatus { wrong_config, ..self.api.status() }
    }
}
