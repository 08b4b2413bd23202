//! This node's lease, on any registry: found again, taken over, or newly allocated.
//!
//! The one thing to know: a node is known by its holder ID, then by its public address. What it finds of itself it
//! keeps; only a lease that no longer fits the network config is given up.

use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use flannel_core::{
    Config, Dual, Error, Hints, Lease, LeaseAttrs, LeaseEnd, Ownership, Result, StoreStatus,
    Subnet, SubnetManager, Subnets, View, holder,
};
use tokio::sync::watch;

use crate::allocate::allocate;
use crate::backoff::Backoff;
use crate::clock::{Clock, SystemClock};
use crate::entries::{earlier, fits, own_entry, taken, unfit};
use crate::fallback::{Fallback, unanswered};
use crate::holding::{HeldLease, Holding, LeaseTerm};
use crate::metered::Metered;
use crate::reconfigure::Configs;
use crate::reflect::Reflector;
use crate::registry::{Entry, HolderId, LeaseGrant, Listing, Registry};
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
/// use flannel_core::{LeaseAttrs, SubnetManager};
/// use flannel_subnet::{Identity, LocalManager, HolderId, MemoryRegistry};
/// use std::sync::Arc;
///
/// # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
/// let registry = MemoryRegistry::with_config(r#"{"Network": "10.1.0.0/16"}"#);
/// let identity = Identity { holder: HolderId::random(), previous: None, local_addresses: Vec::new() };
/// let manager = LocalManager::new(Arc::new(registry), identity);
/// let attrs = LeaseAttrs { public: ["192.0.2.1".parse().unwrap()].into_iter().collect(), ..Default::default() };
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
            let keeper = self.keep(reflector.views());
            (reflector, keeper)
        };
        reflector.get_or_insert_with(begin).0.views()
    }

    /// Subnets that were let go lately, as far as this node saw it.
    fn freed(&self) -> Vec<Subnet> {
        let reflector = self.reflector.lock().unwrap_or_else(PoisonError::into_inner);
        let freed = reflector.as_ref().map(|(reflector, _)| reflector.freed()).unwrap_or_default();
        freed.iter().flat_map(Subnets::iter).collect()
    }

    /// One attempt, from what the store held a moment ago.
    async fn try_acquire(
        &self,
        config: &Config,
        attrs: &LeaseAttrs,
        listing: &Listing,
    ) -> Result<Attempt> {
        if let Some(entry) = own_entry(listing, &self.identity, config, attrs) {
            let Some(unfit) = unfit(config, listing, entry) else {
                return lost_race(self.take_over(entry, attrs).await).map(Attempt::from);
            };
            if entry.holder.is_some() {
                return lost_race(self.give_up(entry, &unfit).await).map(Attempt::from);
            }
            tracing::warn!(subnets = %entry.lease.subnets, "this node's reservation {unfit} and is left alone");
        }
        self.take_new(config, listing, attrs).await
    }

    /// The config, and whether it comes from the cache.
    async fn read_config(&self) -> Result<(Config, bool)> {
        let (text, cached) = self.config_text().await?;
        let config = self.configs.read(&text)?;
        if !cached {
            self.note_config(&text);
        }
        Ok((config, cached))
    }

    async fn acquire(&self, attrs: &LeaseAttrs) -> Result<Lease> {
        let (config, cached) = self.configs.for_lease(self.read_config()).await?;
        let mut backoff = Backoff::new(Duration::from_millis(2), Duration::from_millis(500));
        let mut listing = self.store.list().await?;
        loop {
            listing = match self.try_acquire(&config, attrs, &listing).await? {
                Attempt::Acquired(lease) if !self.holding.has_lapsed() => {
                    if !cached {
                        self.configs.used_for_lease(config);
                    }
                    tracing::info!(subnets = %lease.subnets, store = %self.store, "lease acquired");
                    return Ok(lease);
                }
                Attempt::Acquired(_) => {
                    tracing::debug!("the store's answer came after the lease's end, trying again");
                    self.store.list().await?
                }
                Attempt::Beaten(listing) => listing,
                Attempt::Lost => {
                    tracing::debug!("something has changed meanwhile, trying again");
                    tokio::time::sleep(backoff.pause()).await;
                    self.store.list().await?
                }
            };
        }
    }

    async fn take_over(&self, entry: &Entry, attrs: &LeaseAttrs) -> Result<Option<Lease>> {
        let (subnets, reserved) = (entry.lease.subnets, entry.holder.is_none());
        let ours = entry.holder == Some(self.identity.holder);
        let sent = self.clock.boottime();
        if entry.lease.attrs == *attrs && (ours || reserved) {
            // Nothing new for the others: a renewal is enough.
            if reserved {
                return Ok(Some(self.settle(entry.clone(), None)));
            }
            let ttl = self.store.keep_alive(&subnets, self.identity.holder).await?;
            return Ok(ttl.map(|ttl| self.settle(entry.clone(), Some(LeaseTerm { sent, ttl }))));
        }
        if let Some(id) = entry.holder.filter(|_| !ours) {
            tracing::warn!(
                %subnets, holder = %id,
                "taking over the lease that {} has under our public address: this host lost its state, or ran \
                 another flannel before, or two hosts have one address",
                holder(&entry.lease.attrs)
            );
        }
        let written =
            self.store.update(&subnets, entry.lease.revision, attrs, self.grant(reserved)).await?;
        Ok(Some(self.settle(written, Some(LeaseTerm { sent, ttl: self.ttl }))))
    }

    async fn give_up(&self, entry: &Entry, unfit: &str) -> Result<Option<Lease>> {
        let subnets = entry.lease.subnets;
        tracing::warn!(%subnets, "this node's lease {unfit} and is given up");
        self.store.delete(&subnets, entry.lease.revision).await?;
        Ok(None)
    }

    /// The previous subnets if they are free, else any free ones.
    async fn take_new(
        &self,
        config: &Config,
        listing: &Listing,
        attrs: &LeaseAttrs,
    ) -> Result<Attempt> {
        let all: Vec<Subnets> = taken(listing).collect();
        let free = |subnets: &Subnets| !all.iter().any(|other| other.overlaps(subnets));
        let previous =
            self.identity.previous.filter(|subnets| fits(config, subnets) && free(subnets));
        let subnets = match previous {
            Some(subnets) => subnets,
            None => self.pick(config, &all)?,
        };
        let sent = self.clock.boottime();
        let written = match self.store.create_or_list(&subnets, attrs, self.grant(false)).await? {
            Ok(entry) => self.undisputed(entry).await?,
            // Somebody was faster, and is seen to be.
            Err(now) if taken(&now).any(|other| other.overlaps(&subnets)) => {
                return Ok(Attempt::Beaten(now));
            }
            Err(_) => None,
        };
        Ok(written.map(|entry| self.settle(entry, Some(LeaseTerm { sent, ttl: self.ttl }))).into())
    }

    /// The key was free, but the store knows nothing of subnets: where a key names two, another key may name
    /// one of them and have been created at the same time. Whoever came later sees the earlier one here, and
    /// steps back: `None`, and the key is deleted again.
    pub(crate) async fn undisputed(&self, entry: Entry) -> Result<Option<Entry>> {
        let subnets = entry.lease.subnets;
        if subnets.iter().count() < 2 {
            return Ok(Some(entry));
        }
        let listing = self.store.list().await?;
        let Some(other) = earlier(&listing, &entry) else { return Ok(Some(entry)) };
        tracing::info!(%subnets, other = %other.lease.subnets, "another node was faster with one of the two, stepping back");
        lost_race(self.store.delete(&subnets, entry.lease.revision).await.map(|()| None))
    }

    /// Deletes what we hold besides `held`: a request that we had given up can have been carried out later.
    pub(crate) async fn sweep(&self, held: &Subnets) -> Result<()> {
        let listing = self.store.list().await?;
        let ours = |entry: &&Entry| {
            entry.holder == Some(self.identity.holder) && entry.lease.subnets != *held
        };
        for stray in listing.entries.iter().filter(ours) {
            let subnets = stray.lease.subnets;
            tracing::info!(%subnets, %held, "this node came to hold a second lease, which is given up");
            lost_race(self.store.delete(&subnets, stray.lease.revision).await.map(Some))?;
        }
        Ok(())
    }

    fn pick(&self, config: &Config, taken: &[Subnets]) -> Result<Subnets> {
        let taken: Vec<Subnet> = taken.iter().flat_map(Subnets::iter).collect();
        let freed = self.freed();
        let subnets: Dual<Subnet> = config.networks.try_map(|family, network| {
            let subnet = allocate(network, &taken, &freed, |n| fastrand::u128(..n));
            subnet.ok_or_else(|| Error::OutOfSubnets { family, total: network.subnets() })
        })?;
        let subnets = Subnets::new(subnets.values().copied());
        Ok(subnets.expect("a checked config enables a family, and its subnets fit into a key"))
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
        let local =
            |entry: &&Entry| entry.lease.attrs.public.values().any(|a| local_addresses.contains(a));
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

/// What became of one attempt to get a lease.
enum Attempt {
    Acquired(Lease),
    /// Somebody else took the subnets first, and this is what the store holds since.
    Beaten(Listing),
    /// Something is not as it was; only another list shows what.
    Lost,
}

impl From<Option<Lease>> for Attempt {
    fn from(lease: Option<Lease>) -> Self {
        lease.map_or(Self::Lost, Self::Acquired)
    }
}

/// Another's faster write is no failure, but a reason to look again.
fn lost_race<T>(outcome: Result<Option<T>>) -> Result<Option<T>> {
    match outcome {
        Err(Error::Conflict { .. }) => Ok(None),
        outcome => outcome,
    }
}

/// Attributes as they come back from a store, so that they can be compared.
pub(crate) fn as_stored(attrs: &LeaseAttrs) -> LeaseAttrs {
    LeaseAttrs::from_json(&attrs.to_json()).unwrap_or_else(|_| attrs.clone())
}
