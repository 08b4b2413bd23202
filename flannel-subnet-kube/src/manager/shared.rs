//! What a manager shares with its tasks: its connection, config, lease, and followed nodes.

use std::io::ErrorKind;
use std::net::IpAddr;
use std::path::Path;
use std::sync::{Arc, Mutex};

use flannel_core::address::{Dual, Family};
use flannel_core::lease::{LeaseAttrs, Revision};
use flannel_core::runtime::lock;
use flannel_core::subnet::{Assignment, Hints, Ownership, Readiness};
use flannel_core::{Config, Error, Lease, Result, Subnets};
use tokio::sync::{OnceCell, watch};

use super::wait::Obstacle;
use crate::api::{Api, Source};
use crate::follow::{Follower, Own, ReadOptions};
use crate::node::annotations::{Values, overwrites};
use crate::node::{Node, NodeLease};
use crate::options::KubeOptions;

/// What a [`KubeManager`](crate::KubeManager) shares with its tasks.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) api: Arc<Api>,
    pub(crate) options: KubeOptions,
    /// This node's name.
    pub(crate) name: OnceCell<String>,
    pub(crate) follower: Mutex<Option<Follower>>,
    /// The config that was returned last. The lease and the views use it.
    pub(crate) handed_out: Mutex<Option<Config>>,
    pub(crate) held: Mutex<Option<Held>>,
    /// This node's subnets, as of the last read before a lease.
    pub(crate) assignment: Mutex<Assignment>,
    /// Why this node cannot have a lease yet.
    pub(crate) obstacle: Mutex<Obstacle>,
    /// The annotations that this node wrote last.
    pub(crate) published: Mutex<Values>,
    /// The error of the network config.
    pub(crate) wrong_config: Mutex<Option<String>>,
    /// Whether this node has its lease.
    pub(crate) ownership: watch::Sender<Ownership>,
    /// The readiness that was reported last. Before the first report the node's condition is not
    /// changed.
    pub(crate) readiness: watch::Sender<Option<Readiness>>,
}

/// The lease that was last acquired.
#[derive(Debug, Clone)]
pub(crate) struct Held {
    pub(crate) lease: Lease,
    /// The config that it was acquired from. Its networks may not change.
    pub(crate) config: Config,
    /// What the node prescribed.
    pub(crate) prescribed: Hints,
    /// The addresses that are published instead of the addresses of the lease.
    pub(crate) advertised: Dual<IpAddr>,
}

/// What a node must have for a lease.
pub(crate) struct Terms {
    /// What the node prescribes.
    prescribed: Hints,
    subnets: Subnets,
}

impl Held {
    /// What the node had when the lease was acquired.
    pub(crate) fn hints(&self) -> Hints {
        self.prescribed
            .clone()
            .with_advertised(self.advertised)
            .with_last_published(Some(self.lease.attrs.clone()))
            .with_previous(Some(self.lease.subnets))
    }
}

impl Shared {
    /// Prepares a new manager. Sends no request.
    ///
    /// # Errors
    /// [`Error::Refused`] if the options do not lead to an API server, or a file is wrong.
    pub(crate) async fn open(options: KubeOptions) -> Result<Self> {
        let source = Source {
            url: options.api_url.clone(),
            kubeconfig: options.kubeconfig.clone(),
            ca: options.ca.clone(),
            token: options.token.clone(),
        };
        Ok(Self {
            api: Arc::new(Api::open(source).await?),
            options,
            name: OnceCell::new(),
            follower: Mutex::default(),
            handed_out: Mutex::default(),
            held: Mutex::default(),
            assignment: Mutex::default(),
            obstacle: Mutex::default(),
            published: Mutex::default(),
            wrong_config: Mutex::default(),
            ownership: watch::channel(Ownership::NotAcquired).0,
            readiness: watch::channel(None).0,
        })
    }

    pub(crate) fn held(&self) -> Option<Held> {
        lock(&self.held).clone()
    }

    /// The config that was returned last, else the present config.
    pub(crate) async fn config(&self) -> Result<Config> {
        let handed_out = lock(&self.handed_out).clone();
        match handed_out {
            Some(config) => Ok(config),
            None => self.config_now().await,
        }
    }

    /// The config of the lease, else the config that was returned last.
    pub(crate) async fn settled(&self) -> Result<Config> {
        match self.held() {
            Some(held) => Ok(held.config),
            None => self.config().await,
        }
    }

    pub(crate) async fn config_now(&self) -> Result<Config> {
        if self.api.status().confirmed.is_none() {
            self.own_node().await?;
        }
        let mut config = self.read_config()?;
        if let Some(held) = self.held() {
            config.networks = held.config.networks;
        }
        Ok(config)
    }

    pub(crate) fn read_config(&self) -> Result<Config> {
        let read = read_config(&self.options.net_config);
        let wrong = read.as_ref().err().map(ToString::to_string);
        *lock(&self.wrong_config) = wrong;
        read
    }

    /// The follower of all nodes. The first call starts it. It is started again if its task has
    /// ended, or if the config enables other families before a lease was acquired.
    pub(crate) async fn follow<T>(&self, look: impl FnOnce(&Follower) -> T) -> Result<T> {
        let name = self.name().await?.to_owned();
        let config = self.settled().await?;
        let read_options = ReadOptions {
            prefix: self.options.prefix.clone(),
            families: config.networks.families().collect(),
        };
        let mut follower = lock(&self.follower);
        let usable = follower
            .as_ref()
            .filter(|follower| follower.read_options == read_options && follower.is_running());
        if let Some(follower) = usable {
            return Ok(look(follower));
        }
        Ok(look(follower.insert(Follower::start(Arc::clone(&self.api), read_options, name))))
    }

    /// The present state of this node as hints.
    pub(crate) async fn own_hints(&self) -> Result<Hints> {
        let (node, _) = self.own_node().await?;
        let config = self.config().await?;
        self.note_assignment(&node, &config);
        let families: Vec<Family> = config.networks.families().collect();
        let prefix = &self.options.prefix;
        let NodeLease { lease, .. } = node.lease(Revision::default(), &families, prefix);
        let prescribed = self.prescribed(&node)?;
        Ok(prescribed
            .with_advertised(overwrites(&node.values, &families, prefix))
            .with_previous(lease.as_ref().map(|lease| lease.subnets))
            .with_last_published(lease.map(|lease| lease.attrs)))
    }

    /// Notes the subnets of this node as they were read.
    fn note_assignment(&self, node: &Node, config: &Config) {
        let assignment = match (self.fitting(node, config), self.held()) {
            (Ok(subnets), _) => Assignment::Subnets(subnets),
            (Err(_), Some(held)) => Assignment::Subnets(held.lease.subnets),
            (Err(_), None) => Assignment::Nothing,
        };
        *lock(&self.assignment) = assignment;
    }

    /// Makes a lease from the present state of this node.
    pub(crate) async fn take(&self, config: Config, attrs: &LeaseAttrs) -> Result<Held> {
        let (node, read) = self.own_node().await?;
        self.note_assignment(&node, &config);
        let Terms { prescribed, subnets } = self.terms(&node, &config)?;
        let families: Vec<Family> = config.networks.families().collect();
        let advertised = overwrites(&node.values, &families, &self.options.prefix);
        let written = self.annotate(&node, attrs).await?;
        let lease = self.lease_of(&node, subnets, attrs, written.unwrap_or(read));
        Ok(Held { lease, config, prescribed, advertised })
    }

    /// What this node has for a lease.
    ///
    /// # Errors
    /// [`Error::NotReady`] if the node lacks something for a lease, or has a wrong value.
    pub(crate) fn terms(&self, node: &Node, config: &Config) -> Result<Terms> {
        let prescribed = self.prescribed(node)?;
        let subnets = self.subnets_of(node, config)?;
        let families: Vec<Family> = config.networks.families().collect();
        self.check_overwrites(node, &families)?;
        Ok(Terms { prescribed, subnets })
    }

    /// This node as followed, always the latest.
    pub(crate) async fn follow_own(&self) -> Result<watch::Receiver<Own>> {
        self.follow(|follower| follower.own.clone()).await
    }
}

fn read_config(path: &Path) -> Result<Config> {
    let location = path.display().to_string();
    match std::fs::read_to_string(path) {
        Ok(text) => {
            Config::parse_undivided(&text).map_err(|source| Error::Config { location, source })
        }
        Err(error) if error.kind() == ErrorKind::NotFound => Err(Error::NoConfig { location }),
        Err(error) => Err(Error::Store { store: location, source: error.into() }),
    }
}
