//! Getting a lease: this node's own one if the store has it, else a free one.

use std::sync::PoisonError;
use std::time::Duration;

use flannel_core::address::Dual;
use flannel_core::error::holder;
use flannel_core::lease::LeaseAttrs;
use flannel_core::{Config, Error, Lease, Result, Subnet, Subnets};

use crate::allocate::allocate;
use crate::backoff::Backoff;
use crate::entries::{earlier, fits, own_entry, taken, unfit};
use crate::holding::LeaseTerm;
use crate::manager::LocalManager;
use crate::registry::{Entry, Listing, Registry};

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

impl LocalManager {
    /// Attempts until one succeeds or fails for another reason than a lost race.
    pub(crate) async fn acquire(&self, attrs: &LeaseAttrs) -> Result<Lease> {
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

    /// The key was free, but the store knows nothing of subnets: where a key names two, another key
    /// may name one of them and have been created at the same time. Whoever came later sees the
    /// earlier one here, and steps back: `None`, and the key is deleted again.
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

    /// Deletes what we hold besides `held`: a request that we had given up can have been carried
    /// out later.
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
}
