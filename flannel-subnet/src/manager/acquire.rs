//! Acquires a lease: this node's own lease if the store has it, else free subnets.

use std::sync::Arc;
use std::time::Duration;

use flannel_core::address::Dual;
use flannel_core::backoff::Backoff;
use flannel_core::error::holder;
use flannel_core::lease::{LeaseAttrs, Revision};
use flannel_core::runtime::lock;
use flannel_core::subnet::{StoreFailure, StoreReason};
use flannel_core::{Config, Error, Lease, Result, Subnet, Subnets};

use super::LocalManager;
use super::configs::Fetched;
use super::hold::is_blank;
use super::holding::{HeldLease, LeaseTerm};
use super::lease_list::{earlier, fits, occupied, own_entry, unfit};
use crate::allocate::allocate;
use crate::files::cache::SavedEnd;
use crate::registry::{Entry, LeaseGrant, LeaseList, Registry};

/// The result of one attempt to acquire a lease.
enum Attempt {
    Acquired(Lease),
    /// Another node took the subnets first. These are the leases in the store at that time.
    Taken(LeaseList),
    /// The store has changed and must be listed again.
    Conflict,
    /// The store has a key of these subnets, which its list does not show.
    Hidden(Subnets),
}

impl From<Option<Lease>> for Attempt {
    fn from(lease: Option<Lease>) -> Self {
        lease.map_or(Self::Conflict, Self::Acquired)
    }
}

/// Turns a conflict into `None`, so that the caller lists again.
fn none_on_conflict<T>(outcome: Result<Option<T>>) -> Result<Option<T>> {
    match outcome {
        Err(Error::Conflict { .. }) => Ok(None),
        outcome => outcome,
    }
}

impl LocalManager {
    /// Repeats attempts until one succeeds, or fails for another reason than a conflict.
    pub(super) async fn acquire(&self, attrs: &LeaseAttrs) -> Result<Lease> {
        let Fetched { value: config, is_cached } =
            self.configs.for_lease(self.read_config()).await?;
        let mut backoff = Backoff::new(Duration::from_millis(2), Duration::from_millis(500));
        let mut listing = self.store.list().await?;
        // Subnets count as hidden when they were hidden twice in a row. The first time, the key may
        // just have been deleted.
        let mut hidden_once = None;
        let mut hidden = Vec::new();
        loop {
            listing = match self.try_acquire(&config, attrs, &listing, &hidden).await? {
                Attempt::Acquired(lease) if !self.holding.has_lapsed() => {
                    if !is_cached {
                        self.fallback.note_config_of(&config, &lease.subnets);
                        self.configs.used_for_lease(config);
                    }
                    self.fallback.note_lost(None);
                    tracing::info!(subnets = %lease.subnets, store = %self.store, "lease acquired");
                    return Ok(lease);
                }
                Attempt::Acquired(_) => {
                    tracing::debug!("the store answered after the end of the lease, trying again");
                    self.store.list().await?
                }
                Attempt::Taken(listing) => listing,
                Attempt::Conflict => {
                    tracing::debug!("the store has changed meanwhile, trying again");
                    tokio::time::sleep(backoff.pause()).await;
                    self.store.list().await?
                }
                Attempt::Hidden(subnets) => {
                    tracing::debug!(%subnets, "the store has the key, but does not list it");
                    if hidden_once.replace(subnets) == Some(subnets) {
                        hidden.push(subnets);
                    }
                    tokio::time::sleep(backoff.pause()).await;
                    self.store.list().await?
                }
            };
        }
    }

    /// One attempt, based on a recent list of the store.
    async fn try_acquire(
        &self,
        config: &Config,
        attrs: &LeaseAttrs,
        listing: &LeaseList,
        hidden: &[Subnets],
    ) -> Result<Attempt> {
        if let Some(entry) = own_entry(listing, &self.identity, config, attrs) {
            let subnets = entry.lease.subnets;
            self.leave_to_rival(entry, attrs)?;
            let Some(reason) = unfit(config, listing, entry) else {
                return none_on_conflict(self.take_over(entry, attrs).await).map(Attempt::from);
            };
            if entry.holder.is_some() {
                tracing::warn!(%subnets, %reason, "this node's lease is deleted");
                // Otherwise a restart without the store would find it in the cache.
                self.fallback.forget_own(&subnets).await;
                let deleted = self.store.delete(&subnets, entry.lease.revision).await;
                return none_on_conflict(deleted.map(|()| None)).map(Attempt::from);
            }
            if lock(&self.unused).line(self.clock.boottime(), &reason).is_some() {
                tracing::warn!(%subnets, %reason, "this node's reservation is not used");
            }
        }
        self.take_new(config, listing, attrs, hidden).await
    }

    /// Fails if another host with our public address has taken this lease from us. Otherwise each
    /// of the two hosts would take it from the other at each start.
    fn leave_to_rival(&self, entry: &Entry, attrs: &LeaseAttrs) -> Result<()> {
        let subnets = entry.lease.subnets;
        let is_theirs = match entry.holder {
            Some(holder) => holder != self.identity.holder,
            None => entry.lease.attrs != *attrs && !is_blank(&entry.lease.attrs),
        };
        if !is_theirs || self.fallback.lost() != Some(subnets) || self.had_another_flannel(&subnets)
        {
            return Ok(());
        }
        let text = format!(
            "{} took this lease from this host: two hosts have the same public address, or two \
             flannel daemons run on this host; give this host another public address, or release \
             the lease if no other host has that address any more",
            self.holder(entry)
        );
        let failure = StoreFailure::RivalHost { lease: subnets, reserved: entry.holder.is_none() };
        Err(Error::Refused {
            store: format!("{}: {subnets}", self.store),
            reason: StoreReason::new(text, failure),
        })
    }

    /// Whether another flannel on this host had the lease before.
    pub(super) fn had_another_flannel(&self, subnets: &Subnets) -> bool {
        self.after_another_flannel && self.identity.previous == Some(*subnets)
    }

    async fn take_over(&self, entry: &Entry, attrs: &LeaseAttrs) -> Result<Option<Lease>> {
        let subnets = entry.lease.subnets;
        let reserved = entry.holder.is_none();
        let ours = entry.holder == Some(self.identity.holder);
        let sent = self.clock.boottime();
        if entry.lease.attrs == *attrs && (ours || reserved) {
            // Nothing to publish. A lease is renewed, a reservation needs no renewal.
            let ttl = if reserved {
                Some(self.ttl)
            } else {
                self.store.keep_alive(&subnets, self.identity.holder).await?
            };
            return Ok(ttl.map(|ttl| self.settle(entry.clone(), LeaseTerm::confirmed(sent, ttl))));
        }
        if let Some(id) = entry.holder.filter(|_| !ours) {
            let node = holder(&entry.lease.attrs);
            if self.had_another_flannel(&subnets) {
                tracing::info!(
                    %subnets, holder = %id, %node,
                    "taking over the lease of an earlier flannel on this host"
                );
            } else {
                tracing::warn!(
                    %subnets, holder = %id, %node,
                    "taking over a lease with our public address: this host lost its state, or \
                     ran another flannel before, or two hosts have one address"
                );
            }
        }
        self.rewrite(&subnets, entry.lease.revision, attrs, reserved).await.map(Some)
    }

    /// Takes the previous subnets if they are free, else other free subnets. The `hidden` subnets
    /// are not free.
    async fn take_new(
        &self,
        config: &Config,
        listing: &LeaseList,
        attrs: &LeaseAttrs,
        hidden: &[Subnets],
    ) -> Result<Attempt> {
        let all: Vec<Subnets> = occupied(listing).chain(hidden.iter().copied()).collect();
        let previous = self
            .identity
            .previous
            .filter(|subnets| fits(config, subnets))
            .filter(|subnets| !all.iter().any(|other| other.overlaps(subnets)));
        let subnets = match previous {
            Some(subnets) => subnets,
            None => self.pick(config, &all)?,
        };
        let sent = self.clock.boottime();
        let written = match self.store.create_or_list(&subnets, attrs, self.grant(false)).await? {
            Ok(entry) => self.undisputed(entry).await?,
            Err(now) if occupied(&now).any(|other| other.overlaps(&subnets)) => {
                return Ok(Attempt::Taken(now));
            }
            Err(_) => return Ok(Attempt::Hidden(subnets)),
        };
        let term = LeaseTerm::confirmed(sent, self.ttl);
        Ok(written.map(|entry| self.settle(entry, term)).into())
    }

    fn pick(&self, config: &Config, occupied: &[Subnets]) -> Result<Subnets> {
        let occupied: Vec<Subnet> = occupied.iter().flat_map(Subnets::iter).collect();
        // Recently released subnets, as far as this node knows.
        let freed_keys = lock(&self.following).as_ref().map(|tasks| tasks.reflector.freed());
        let freed: Vec<Subnet> = freed_keys.iter().flatten().flat_map(Subnets::iter).collect();
        let subnets: Dual<Subnet> = config.networks.try_map(|family, network| {
            let subnet = allocate(network, &occupied, &freed, |n| fastrand::u128(..n));
            subnet.ok_or_else(|| Error::OutOfSubnets { family, total: network.subnets() })
        })?;
        let subnets = Subnets::new(subnets.values().copied());
        Ok(subnets.expect("a checked config enables a family, and its subnets fit into a key"))
    }

    /// Checks a key that was just created. The store compares keys, not subnets, so another key may
    /// have one of the two subnets and have been created at the same time. The later of the two
    /// nodes sees the earlier key here, deletes its own, and gets `None`.
    pub(super) async fn undisputed(&self, entry: Entry) -> Result<Option<Entry>> {
        let subnets = entry.lease.subnets;
        if subnets.iter().count() < 2 {
            return Ok(Some(entry));
        }
        let listing = self.store.list().await?;
        let Some(other) = earlier(&listing, &entry) else { return Ok(Some(entry)) };
        tracing::info!(
            %subnets, other = %other.lease.subnets,
            "another node created a lease with one of the two subnets first, deleting ours"
        );
        none_on_conflict(self.store.delete(&subnets, entry.lease.revision).await.map(|()| None))
    }

    /// Deletes the leases of this node other than `held`. A request whose answer was lost may have
    /// created one.
    pub(super) async fn sweep(&self, held: &Subnets) -> Result<()> {
        for entry in self.store.list().await?.entries {
            let subnets = entry.lease.subnets;
            if entry.holder != Some(self.identity.holder) || subnets == *held {
                continue;
            }
            tracing::info!(
                %subnets, %held,
                "this node holds a second lease, which is deleted"
            );
            none_on_conflict(self.store.delete(&subnets, entry.lease.revision).await.map(Some))?;
        }
        Ok(())
    }

    /// Replaces our key at revision `at` with these attributes and notes the lease.
    pub(super) async fn rewrite(
        &self,
        subnets: &Subnets,
        at: Revision,
        attrs: &LeaseAttrs,
        reserved: bool,
    ) -> Result<Lease> {
        let sent = self.clock.boottime();
        let written = self.store.update(subnets, at, attrs, self.grant(reserved)).await?;
        Ok(self.settle(written, LeaseTerm::confirmed(sent, self.ttl)))
    }

    /// The grant for a write, or `None` for a reservation, which stays a reservation.
    pub(super) fn grant(&self, reserved: bool) -> Option<LeaseGrant> {
        (!reserved).then_some(LeaseGrant { holder: self.identity.holder, ttl: self.ttl })
    }

    /// Notes a lease that was written or confirmed. A reservation has no term.
    pub(super) fn settle(&self, entry: Entry, term: LeaseTerm) -> Lease {
        let term = entry.holder.map(|_| term);
        let mut lease = Arc::unwrap_or_clone(entry.lease);
        // If no clock can reach the time, the lease never expires.
        lease.expires = term.and_then(|term| term.expires(&*self.clock));
        self.fallback.remember_own();
        self.holding.set(HeldLease {
            subnets: lease.subnets,
            attrs: lease.attrs.clone(),
            revision: lease.revision,
            term,
            cached: false,
        });
        lease
    }

    /// Notes the lease from the cache. Changed attributes are published when the store answers.
    pub(super) fn settle_cached(
        &self,
        cached: &Lease,
        end: SavedEnd,
        attrs: &LeaseAttrs,
        error: &Error,
    ) -> Lease {
        let subnets = cached.subnets;
        tracing::warn!(
            %subnets, %error,
            "the lease cannot be requested from the store, using the one from the cache"
        );
        // If the attributes have changed, any revision that the store shows must be checked.
        let is_same = cached.attrs == *attrs;
        self.holding.set(HeldLease {
            subnets,
            attrs: attrs.clone(),
            revision: if is_same { cached.revision } else { Revision::default() },
            term: LeaseTerm::cached(end, &*self.clock),
            cached: true,
        });
        Lease { attrs: attrs.clone(), ..cached.clone() }
    }
}
