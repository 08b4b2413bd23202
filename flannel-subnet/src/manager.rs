//! Finds this node's lease in any registry again, takes it over or allocates it, and holds it.
//!
//! A node is identified by its holder ID, then by its public address. It keeps its lease as long as
//! the lease fits the network config.

mod acquire;
mod assigned;
mod configs;
mod fallback;
mod hold;
mod holding;
mod lease_list;
mod progress;

use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use flannel_core::lease::{LeaseAttrs, View};
use flannel_core::logging::LogRateLimiter;
use flannel_core::runtime::{Task, lock};
use flannel_core::subnet::{Hints, LeaseEnd, Ownership, StoreStatus};
use flannel_core::{Config, Lease, Result, SubnetManager, Subnets};
use tokio::sync::watch;

use crate::clock::{Clock, SystemClock};
use crate::files::cache::Cache;
use crate::reflect::Reflector;
use crate::registry::{ConfigText, HolderId, Metered, Registry, unanswered};
pub use assigned::AssignedManager;
use configs::{Configs, Fetched};
use fallback::Fallback;
use holding::Holding;
use lease_list::{as_stored, is_config_of};

/// The identity of a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    /// Chosen at random once ([`HolderId::random`]), and kept in the node's state directory.
    pub holder: HolderId,
    /// The previous subnets of the node, from its `subnet.env`
    /// ([`SubnetEnv::previous`](flannel_core::SubnetEnv::previous)), or `None` if they are not
    /// known.
    pub previous: Option<Subnets>,
    /// All addresses of the host, and the public address from its options. They let
    /// [`SubnetManager::hints`] find the lease before the external interface is chosen. If the list
    /// is empty, the lease is found by the holder ID only.
    pub local_addresses: Vec<IpAddr>,
}

/// The lease engine: acquires and holds this node's lease on any [`Registry`], and shows all
/// leases.
///
/// The caller runs [`hold_lease`](SubnetManager::hold_lease) as long as it uses the subnets. The
/// methods need a tokio runtime with time and I/O enabled. Their tasks end when the manager is
/// dropped. The lease then stays in the store until it expires.
///
/// ```
/// use flannel_core::SubnetManager;
/// use flannel_core::lease::{LeaseAttrs, Offer};
/// use flannel_subnet::{HolderId, Identity, LocalManager, MemoryRegistry};
/// use std::sync::Arc;
///
/// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
/// let registry = MemoryRegistry::with_config(r#"{"Network": "10.1.0.0/16"}"#);
/// let holder = HolderId::random();
/// let identity = Identity { holder, previous: None, local_addresses: Vec::new() };
/// let manager = LocalManager::new(Arc::new(registry), identity);
/// let public = ["192.0.2.1".parse().unwrap()].into_iter().collect();
/// let attrs = LeaseAttrs::from(Offer::new(public));
/// let lease = manager.acquire_lease(&attrs).await?;
/// assert_eq!(manager.acquire_lease(&attrs).await?.subnets, lease.subnets);
/// # Ok::<(), flannel_core::Error>(())
/// # }).unwrap();
/// ```
#[derive(Debug)]
pub struct LocalManager {
    store: Arc<Metered>,
    clock: Arc<dyn Clock>,
    identity: Identity,
    /// Another flannel wrote the file that the previous subnets come from.
    after_another_flannel: bool,
    ttl: Duration,
    margin: Duration,
    holding: Arc<Holding>,
    /// Held while our key is written or checked, so that our write is not mistaken for a write of
    /// another node.
    writing: tokio::sync::Mutex<()>,
    /// `None` until the leases are watched.
    following: Mutex<Option<Following>>,
    fallback: Arc<Fallback>,
    configs: Configs,
    /// Log lines: another writer changed our lease.
    changed: Mutex<LogRateLimiter>,
    /// Log lines: our lease was made unreadable.
    unreadable: Mutex<LogRateLimiter>,
    /// Log lines: our reservation is not used.
    unused: Mutex<LogRateLimiter>,
}

/// The tasks that follow the leases of all nodes.
#[derive(Debug)]
struct Following {
    reflector: Reflector,
    /// `None` if the manager has no cache.
    _cache_writer: Option<Task>,
}

impl LocalManager {
    /// A manager with the clocks of Linux. Leases live for 24 hours and are renewed 60 minutes
    /// before their end.
    pub fn new(registry: Arc<dyn Registry>, identity: Identity) -> Self {
        Self::with_clock(registry, identity, Arc::new(SystemClock))
    }

    /// A manager that measures time by `clock`. Otherwise it equals one of [`LocalManager::new`].
    pub fn with_clock(
        registry: Arc<dyn Registry>,
        identity: Identity,
        clock: Arc<dyn Clock>,
    ) -> Self {
        let store = Arc::new(Metered::new(registry, Arc::clone(&clock)));
        Self {
            fallback: Arc::new(Fallback::new(&store, &clock, identity.holder, None)),
            store,
            identity,
            after_another_flannel: false,
            ttl: Duration::from_secs(24 * 60 * 60),
            margin: Duration::from_secs(60 * 60),
            holding: Arc::new(Holding::new(Arc::clone(&clock))),
            clock,
            writing: tokio::sync::Mutex::default(),
            following: Mutex::default(),
            configs: Configs::default(),
            changed: Mutex::default(),
            unreadable: Mutex::default(),
            unused: Mutex::default(),
        }
    }

    /// Sets the time to live of a lease: at least 1 s, in whole seconds. The default is 24 hours.
    #[must_use]
    pub fn with_ttl(self, ttl: Duration) -> Self {
        Self { ttl, ..self }
    }

    /// Sets how long before its end a lease is renewed. The default is 60 minutes. A margin of more
    /// than two thirds of the time to live counts as two thirds.
    #[must_use]
    pub fn with_renew_margin(self, margin: Duration) -> Self {
        Self { margin, ..self }
    }

    /// Sets whether another flannel, such as Go flannel, ran on this host last, so that
    /// [`Identity::previous`] comes from its file. The takeover of that lease is then no warning.
    #[must_use]
    pub fn after_another_flannel(self, after_another_flannel: bool) -> Self {
        Self { after_another_flannel, ..self }
    }

    /// Keeps the last complete set of leases in this file, and starts from it while the store does
    /// not answer. The first view comes from the file, with the origin
    /// [`Cached`](flannel_core::lease::Origin::Cached). Until the store has answered once, the
    /// config, the hints and the own lease come from the file too.
    ///
    /// The own lease is valid until its end, and a hint afterwards ([`Hints::lapsed`]). If the
    /// machine was not restarted since the file was written, the end counts by boot time.
    /// Otherwise the lease ends when boot time or wall time passes its end, until the store
    /// confirms the lease.
    ///
    /// The file also notes that another node with this node's public address took the own lease.
    /// [`acquire_lease`](SubnetManager::acquire_lease) then fails with
    /// [`Refused`](flannel_core::Error::Refused) as long as that lease exists, so that the two
    /// nodes do not take it from each other at each start.
    ///
    /// The file is written when leases or the own lease have changed, at most every 5 seconds. A
    /// damaged file, or one of another store, is ignored with a warning.
    ///
    /// # Blocking
    /// Reads the file.
    #[must_use]
    pub fn with_cache(self, path: impl Into<PathBuf>) -> Self {
        self.with_opened_cache(Cache::open(path))
    }

    /// Keeps the leases in an open cache, as [`LocalManager::with_cache`] does with a file.
    ///
    /// # Blocking
    /// Reads the file.
    #[must_use]
    pub fn with_opened_cache(self, cache: Cache) -> Self {
        let holder = self.identity.holder;
        let fallback = Fallback::new(&self.store, &self.clock, holder, Some(cache));
        Self { fallback: Arc::new(fallback), ..self }
    }

    /// The ownership of the subnets at this moment, by the clock. No request is sent.
    pub fn ownership_now(&self) -> Ownership {
        self.holding.ownership_now()
    }

    /// The time until the end of the lease if it is not renewed. `None` if no lease is held, the
    /// lease has no end, or its end has passed.
    pub fn remaining(&self) -> Option<Duration> {
        self.holding.remaining()
    }

    /// Whether the end of the held lease is known by the wall clock only. This is so if the lease
    /// comes from the cache, the machine was restarted since, and the store has not confirmed the
    /// lease yet.
    pub fn relies_on_wall_clock(&self) -> bool {
        self.holding.term().is_some_and(|term| term.wall_end.is_some())
    }

    fn views(&self) -> watch::Receiver<View> {
        lock(&self.following).get_or_insert_with(|| self.follow()).reflector.views()
    }

    fn follow(&self) -> Following {
        let first = self.fallback.first_view();
        let reflector = Reflector::start_from(first, Arc::clone(&self.store) as _);
        let cache_writer = self.fallback.start_writer(reflector.views(), &self.holding);
        Following { reflector, _cache_writer: cache_writer }
    }

    /// Notes a valid config for the cache. A config whose pod networks do not contain the held
    /// lease is not noted: it takes effect only after a restart, and a host that started without
    /// the store would have a lease outside of its pod networks.
    fn note_config(&self, text: &ConfigText) {
        let held = self.holding.get();
        let is_usable = held.is_none_or(|held| is_config_of(text, &held.subnets));
        if is_usable {
            self.fallback.note_config(text);
        }
    }

    async fn read_config(&self) -> Result<Fetched<Config>> {
        let text = self.fallback.config_text().await?;
        match self.configs.read(&text.value) {
            Ok(config) => {
                if !text.is_cached {
                    self.note_config(&text.value);
                }
                Ok(Fetched { value: config, is_cached: text.is_cached })
            }
            // At the start, the last good config of an earlier run is used.
            Err(error) if !self.configs.has_lease() => match self.fallback.earlier_config() {
                Some(config) => {
                    tracing::warn!(%error, "the last good network config is still used");
                    Ok(Fetched { value: config, is_cached: false })
                }
                None => Err(error),
            },
            Err(error) => Err(error),
        }
    }
}

#[async_trait]
impl SubnetManager for LocalManager {
    async fn network_config(&self) -> Result<Config> {
        self.read_config().await.map(|read| self.configs.hand_out(read))
    }

    fn use_config(&self, config: &Config) {
        self.configs.prefer(config);
    }

    async fn config_changed(&self, known: &Config) -> Result<Config> {
        self.configs.next_valid(&*self.store, known, |text| self.note_config(text)).await
    }

    /// Finds the lease by holder ID, else by public address if exactly one lease has an address of
    /// this host. The previous subnets are not enough, because another node may have them by now.
    async fn hints(&self) -> Result<Hints> {
        let listing = match self.fallback.own_lease() {
            None => self.store.list().await?,
            Some(lease) => match self.fallback.promptly(self.store.list()).await {
                Err(error) if unanswered(&error) => {
                    return Ok(Hints::default()
                        .with_last_published(Some(lease.attrs.clone()))
                        .with_previous(Some(lease.subnets))
                        .with_lapsed(
                            self.fallback.own_lease_in_force().is_none().then_some(lease),
                        ));
                }
                listing => listing?,
            },
        };
        let Identity { holder, previous, local_addresses } = &self.identity;
        let by_holder = listing.entries.iter().find(|entry| entry.holder == Some(*holder));
        let mut with_our_address = listing.entries.iter().filter(|entry| {
            let public = &entry.lease.attrs.preferred.public;
            public.values().any(|address| local_addresses.contains(address))
        });
        let by_address = with_our_address.next().filter(|_| with_our_address.next().is_none());
        let own = by_holder.or(by_address).map(|entry| &entry.lease);
        Ok(Hints::default()
            .with_last_published(own.map(|lease| lease.attrs.clone()))
            .with_previous(own.map(|lease| lease.subnets).or(*previous)))
    }

    async fn acquire_lease(&self, attrs: &LeaseAttrs) -> Result<Lease> {
        let _writing = self.writing.lock().await;
        let attrs = as_stored(attrs);
        // If another flannel on this host has written the lease since, it must be taken over first.
        let in_force = self.fallback.own_lease_in_force();
        let Some((cached, end)) =
            in_force.filter(|(cached, _)| !self.had_another_flannel(&cached.subnets))
        else {
            return self.acquire(&attrs).await;
        };
        match self.fallback.promptly(self.acquire(&attrs)).await {
            Err(error) if unanswered(&error) => {
                Ok(self.settle_cached(&cached, end, &attrs, &error))
            }
            acquired => acquired,
        }
    }

    async fn publish(&self, held: &Lease, attrs: &LeaseAttrs) -> Result<Lease> {
        let _writing = self.writing.lock().await;
        let reserved = held.expires.is_none();
        self.rewrite(&held.subnets, held.revision, &as_stored(attrs), reserved).await
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
        self.store.status().with_wrong_config(self.configs.wrong())
    }
}
