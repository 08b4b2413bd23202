//! This node's lease, on any registry: found again, taken over, or newly allocated.
//!
//! A node is known by its holder ID, then by its public address. What it finds of itself it
//! keeps; only a lease that no longer fits the network config is given up.

use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use flannel_core::address::Dual;
use flannel_core::lease::{LeaseAttrs, View};
use flannel_core::subnet::{Hints, LeaseEnd, Ownership, StoreStatus};
use flannel_core::{Config, Lease, Result, SubnetManager, Subnets};
use tokio::sync::watch;

use crate::clock::{Clock, SystemClock};
use crate::fallback::{Fallback, unanswered};
use crate::holding::{HeldLease, Holding, LeaseTerm};
use crate::metered::Metered;
use crate::reconfigure::Configs;
use crate::reflect::Reflector;
use crate::registry::{Entry, HolderId, LeaseGrant, Registry};
use crate::task::Task;

/// What distinguishes a node from all others.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    /// Chosen at random once ([`HolderId::random`]) and kept in the node's state directory.
    pub holder: HolderId,
    /// What it had before, as its `subnet.env` says ([`SubnetEnv::previous`](crate::SubnetEnv::previous)).
    pub previous: Option<Subnets>,
    /// All addresses of the host, and the public address that it was told to use, if any: before the external
    /// interface is chosen, they are what [`SubnetManager::hints`] finds its lease by.
    pub local_addresses: Vec<IpAddr>,
}

/// The lease engine: gives this node its lease on any [`Registry`] and shows everybody's.
///
/// ```
/// use flannel_core::SubnetManager;
/// use flannel_core::lease::{LeaseAttrs, Offer};
/// use flannel_subnet::{Identity, LocalManager, HolderId, MemoryRegistry};
/// use std::sync::Arc;
///
/// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
/// let registry = MemoryRegistry::with_config(r#"{"Network": "10.1.0.0/16"}"#);
/// let identity = Identity { holder: HolderId::random(), previous: None, local_addresses: Vec::new() };
/// let manager = LocalManager::new(Arc::new(registry), identity);
/// let attrs = LeaseAttrs::from(Offer { public: ["192.0.2.1".parse().unwrap()].into_iter().collect(), ..Offer::default() });
/// let lease = manager.acquire_lease(&attrs).await?;
/// assert_eq!(manager.acquire_lease(&attrs).await?.subnets, lease.subnets);
/// # Ok::<(), flannel_core::Error>(())
/// # }).unwrap();
/// ```
#[derive(Debug)]
pub struct LocalManager {
    pub(crate) store: Arc<Metered>,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) identity: Identity,
    pub(crate) ttl: Duration,
    pub(crate) margin: Duration,
    pub(crate) holding: Arc<Holding>,
    /// Held while our key is written or judged: what we publish must not look like somebody else's doing.
    pub(crate) writing: tokio::sync::Mutex<()>,
    pub(crate) reflector: Mutex<Option<(Reflector, Option<Task>)>>,
    pub(crate) fallback: Option<Arc<Fallback>>,
    pub(crate) configs: Configs,
}

impl LocalManager {
    /// A manager with a time to live of 24 hours, renewed 60 minutes before its end, by Linux' own clocks.
    pub fn new(registry: Arc<dyn Registry>, identity: Identity) -> Self {
        Self::with_clock(registry, identity, Arc::new(SystemClock))
    }

    /// Like [`LocalManager::new`], by another clock.
    pub fn with_clock(
        registry: Arc<dyn Registry>,
        identity: Identity,
        clock: Arc<dyn Clock>,
    ) -> Self {
        Self {
            store: Arc::new(Metered::new(registry, Arc::clone(&clock))),
            identity,
            ttl: Duration::from_secs(24 * 60 * 60),
            margin: Duration::from_secs(60 * 60),
            holding: Arc::new(Holding::new(Arc::clone(&clock))),
            clock,
            writing: tokio::sync::Mutex::default(),
            reflector: Mutex::default(),
            fallback: None,
            configs: Configs::default(),
        }
    }

    /// How long a lease lives unless renewed; whole seconds, at least 1.
    #[must_use]
    pub fn with_ttl(self, ttl: Duration) -> Self {
        Self { ttl, ..self }
    }

    /// How long before a lease's end it is renewed. More than two thirds of the time to live count as that.
    #[must_use]
    pub fn with_renew_margin(self, margin: Duration) -> Self {
        Self { margin, ..self }
    }

    /// Whether the subnets are this node's right now, by the clock itself and not as published last. Cheap; asks no
    /// store.
    pub fn ownership_now(&self) -> Ownership {
        self.holding.ownership_now()
    }

    /// How long the lease is held from now on unless it is renewed, by boot time; `None` if it is not held or has no
    /// end.
    pub fn remaining(&self) -> Option<Duration> {
        self.holding.remaining()
    }

    /// What a lease is written with; `None` for a reservation, which stays one.
    pub(crate) fn grant(&self, reserved: bool) -> Option<LeaseGrant> {
        (!reserved).then_some(LeaseGrant { holder: self.identity.holder, ttl: self.ttl })
    }

    pub(crate) fn views(&self) -> watch::Receiver<View> {
        let mut reflector = self.reflector.lock().unwrap_or_else(PoisonError::into_inner);
        let begin = || {
            let reflector = Reflector::start_from(self.first_view(), Arc::clone(&self.store) as _);
            let cache_writer = self.keep(reflector.views());
            (reflector, cache_writer)
        };
        reflector.get_or_insert_with(begin).0.views()
    }

    /// The config, and whether it comes from the cache.
    pub(crate) async fn read_config(&self) -> Result<(Config, bool)> {
        let (text, cached) = self.config_text().await?;
        let config = self.configs.read(&text)?;
        if !cached {
            self.note_config(&text);
        }
        Ok((config, cached))
    }

    /// Remembers what was written or confirmed as ours.
    pub(crate) fn settle(&self, entry: Entry, term: Option<LeaseTerm>) -> Lease {
        let term = term.filter(|_| entry.holder.is_some());
        let mut lease = Arc::unwrap_or_clone(entry.lease);
        lease.expires = term.map(|term| {
            let left = term.end().saturating_sub(self.clock.boottime());
            self.clock.wall() + left
        });
        self.holding.set(HeldLease {
            subnets: lease.subnets,
            attrs: lease.attrs.clone(),
            revision: lease.revision,
            term,
        });
        lease
    }
}

#[async_trait]
impl SubnetManager for LocalManager {
    async fn network_config(&self) -> Result<Config> {
        self.read_config().await.map(|read| self.configs.give(read))
    }

    async fn config_changed(&self, seen: &Config) -> Result<Config> {
        self.configs.another(&*self.store, seen, |text| self.note_config(text)).await
    }

    /// Finds the lease by holder ID, else by public address if exactly one lease has one of this host's. Not by the
    /// previous subnets: another node may have them by now, with keys and MAC addresses of its own.
    async fn hints(&self) -> Result<Hints> {
        let listing = match self.remembered_lease() {
            None => self.store.list().await?,
            Some(lease) => match self.promptly(self.store.list()).await {
                Err(error) if unanswered(&error) => {
                    return Ok(Hints {
                        public: Dual::default(),
                        last_published: Some(lease.attrs.clone()),
                        previous: Some(lease.subnets),
                        lapsed: self.cached_lease().is_none().then_some(lease),
                    });
                }
                listing => listing?,
            },
        };
        let Identity { holder, previous, local_addresses } = &self.identity;
        let by_holder = listing.entries.iter().find(|entry| entry.holder == Some(*holder));
        let local = |entry: &&Entry| {
            entry.lease.attrs.preferred.public.values().any(|a| local_addresses.contains(a))
        };
        let mut by_address = listing.entries.iter().filter(local);
        let by_address = by_address.next().filter(|_| by_address.next().is_none());
        let own = by_holder.or(by_address).map(|entry| &entry.lease);
        Ok(Hints {
            public: Dual::default(),
            last_published: own.map(|lease| lease.attrs.clone()),
            previous: own.map(|lease| lease.subnets).or(*previous),
            lapsed: None,
        })
    }

    async fn acquire_lease(&self, attrs: &LeaseAttrs) -> Result<Lease> {
        let _writing = self.writing.lock().await;
        let attrs = as_stored(attrs);
        let Some(cached) = self.cached_lease() else { return self.acquire(&attrs).await };
        match self.promptly(self.acquire(&attrs)).await {
            Err(error) if unanswered(&error) => Ok(self.settle_cached(&cached, &attrs, &error)),
            acquired => acquired,
        }
    }

    async fn publish(&self, held: &Lease, attrs: &LeaseAttrs) -> Result<Lease> {
        let _writing = self.writing.lock().await;
        let sent = self.clock.boottime();
        let grant = self.grant(held.expires.is_none());
        let written =
            self.store.update(&held.subnets, held.revision, &as_stored(attrs), grant).await?;
        Ok(self.settle(written, Some(LeaseTerm { sent, ttl: self.ttl })))
    }

    async fn hold_lease(&self, held: &Lease) -> Result<LeaseEnd> {
        self.hold(held).await
    }

    async fn watch_leases(&self) -> Result<watch::Receiver<View>> {
        Ok(self.views())
    }

    fn ownership(&self) -> watch::Receiver<Ownership> {
        self.holding.ownership()
    }

    fn store_status(&self) -> StoreStatus {
        StoreStatus { wrong_config: self.configs.wrong(), ..self.store.status() }
    }
}

/// Attributes as they come back from a store, so that they can be compared.
pub(crate) fn as_stored(attrs: &LeaseAttrs) -> LeaseAttrs {
    LeaseAttrs::from_json(&attrs.to_json()).unwrap_or_else(|_| attrs.clone())
}
