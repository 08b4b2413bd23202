//! A subnet manager in memory.

use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::SystemTime;

use async_trait::async_trait;
use tokio::sync::watch;

use crate::address::{Dual, Subnet};
use crate::config::Config;
use crate::error::{Error, Result};
use crate::lease::{Lease, LeaseAttrs, LeaseSet, Offer, Origin, Revision, Subnets, View};
use crate::runtime::lock;
use crate::subnet::{
    Hints, LeaseEnd, Loss, Ownership, Readiness, StoreKind, StoreStatus, SubnetManager,
};

/// A subnet manager in memory. A test writes the leases of peers. This node always gets the first
/// subnet of the pod network. The manager does not need a runtime. Clones are the same manager.
#[derive(Debug, Clone)]
pub struct FakeSubnets(Arc<Mutex<Inner>>);

#[derive(Debug)]
struct Inner {
    config: String,
    hints: Hints,
    revision: u64,
    views: watch::Sender<View>,
    ends: watch::Sender<Option<LeaseEnd>>,
    ownership: watch::Sender<Ownership>,
    publishes_readiness: bool,
    /// What an operator wrote into this node's lease.
    assigned: Option<LeaseAttrs>,
    reports: Vec<Readiness>,
}

impl FakeSubnets {
    /// A manager with this IPv4 network and the default backend, without leases.
    pub fn new(network: &str) -> Self {
        Self::with_config(&format!(r#"{{"Network":"{network}"}}"#))
    }

    /// A manager with this network config, without leases.
    pub fn with_config(config: &str) -> Self {
        let view =
            View { leases: LeaseSet::default(), origin: Origin::Live { revision: Revision(1) } };
        Self(Arc::new(Mutex::new(Inner {
            config: config.to_owned(),
            hints: Hints::default(),
            revision: 1,
            views: watch::channel(view).0,
            ends: watch::channel(None).0,
            ownership: watch::channel(Ownership::NotAcquired).0,
            publishes_readiness: false,
            assigned: None,
            reports: Vec::new(),
        })))
    }

    /// Puts the lease of a peer with a public address, and without other attributes.
    ///
    /// # Panics
    /// `key` is not a lease key, or `public` is not an IP address.
    pub fn put(&self, key: &str, public: &str) {
        let public: IpAddr = public.parse().expect("an IP address");
        self.put_attrs(key, LeaseAttrs::from(Offer::new([public].into_iter().collect())));
    }

    /// Puts the lease of a peer.
    ///
    /// # Panics
    /// `key` is not a lease key.
    pub fn put_attrs(&self, key: &str, attrs: LeaseAttrs) {
        let subnets = key.parse().expect("a lease key");
        self.lock().write(subnets, attrs);
    }

    /// Deletes a lease.
    ///
    /// # Panics
    /// `key` is not a lease key.
    pub fn delete(&self, key: &str) {
        let subnets: Subnets = key.parse().expect("a lease key");
        self.lock().change(|leases| drop(leases.remove(&subnets)));
    }

    /// Replaces the whole view.
    pub fn set_view(&self, view: View) {
        self.lock().views.send_replace(view);
    }

    /// Sets the answer of [`SubnetManager::hints`].
    pub fn set_hints(&self, hints: Hints) {
        self.lock().hints = hints;
    }

    /// Ends every lease that is held. [`SubnetManager::hold_lease`] then returns `end`.
    pub fn end_leases(&self, end: LeaseEnd) {
        let why = Loss::Ended(end.clone());
        self.set_ownership(Ownership::Lost { since: SystemTime::now(), why });
        self.lock().ends.send_replace(Some(end));
    }

    /// Sets the value of [`SubnetManager::ownership`], until a lease is acquired or ended.
    pub fn set_ownership(&self, ownership: Ownership) {
        self.lock().ownership.send_replace(ownership);
    }

    /// From now on an operator writes the attributes of this node's lease: these
    /// ([`SubnetManager::publishes_attrs`]).
    pub fn assign(&self, attrs: LeaseAttrs) {
        self.lock().assigned = Some(attrs);
    }

    /// Sets the answer of [`SubnetManager::publishes_readiness`].
    pub fn set_publishes_readiness(&self, publishes: bool) {
        self.lock().publishes_readiness = publishes;
    }

    /// All reports so far ([`SubnetManager::report`]), oldest first.
    pub fn reports(&self) -> Vec<Readiness> {
        self.lock().reports.clone()
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        lock(&self.0)
    }
}

impl Inner {
    fn change(&mut self, change: impl FnOnce(&mut LeaseSet)) {
        self.revision += 1;
        let revision = Revision(self.revision);
        self.views.send_modify(|view| {
            change(&mut view.leases);
            view.origin = Origin::Live { revision };
        });
    }

    fn write(&mut self, subnets: Subnets, attrs: LeaseAttrs) -> Lease {
        let revision = Revision(self.revision + 1);
        let since = self.views.borrow().leases.get(&subnets).map_or(revision, |lease| lease.since);
        let lease = Lease { subnets, attrs, expires: None, since, revision };
        self.change(|leases| leases.insert(lease.clone()));
        lease
    }
}

#[async_trait]
impl SubnetManager for FakeSubnets {
    async fn network_config(&self) -> Result<Config> {
        let text = self.lock().config.clone();
        Config::parse(&text).map_err(|source| Error::Config { location: "memory".into(), source })
    }

    async fn hints(&self) -> Result<Hints> {
        Ok(self.lock().hints.clone())
    }

    async fn acquire_lease(&self, attrs: &LeaseAttrs) -> Result<Lease> {
        let networks: Dual<Subnet> = self.network_config().await?.networks.map(|_, n| n.min);
        let subnets = Subnets::new(networks.values().copied())
            .expect("a checked config enables a family, and its subnets fit into a key");
        self.set_ownership(Ownership::Held { until: None });
        let mut inner = self.lock();
        let attrs = inner.assigned.as_ref().unwrap_or(attrs).clone();
        Ok(inner.write(subnets, attrs))
    }

    fn publishes_attrs(&self) -> bool {
        self.lock().assigned.is_none()
    }

    async fn publish(&self, held: &Lease, attrs: &LeaseAttrs) -> Result<Lease> {
        let mut inner = self.lock();
        let current = inner.views.borrow().leases.get(&held.subnets).map(|lease| lease.revision);
        if current != Some(held.revision) {
            return Err(Error::Conflict { subnets: held.subnets });
        }
        Ok(inner.write(held.subnets, attrs.clone()))
    }

    async fn hold_lease(&self, _: &Lease) -> Result<LeaseEnd> {
        let mut ends = self.lock().ends.subscribe();
        let end = ends.wait_for(Option::is_some).await.ok().and_then(|end| end.clone());
        Ok(end.unwrap_or(LeaseEnd::Deleted))
    }

    async fn watch_leases(&self) -> Result<watch::Receiver<View>> {
        Ok(self.lock().views.subscribe())
    }

    fn ownership(&self) -> watch::Receiver<Ownership> {
        self.lock().ownership.subscribe()
    }

    fn publishes_readiness(&self) -> bool {
        self.lock().publishes_readiness
    }

    async fn report(&self, readiness: &Readiness) -> Result<()> {
        self.lock().reports.push(readiness.clone());
        Ok(())
    }

    fn store_status(&self) -> StoreStatus {
        StoreStatus::new("memory", StoreKind::Other)
    }
}
