//! Keeps the lease, and notices when it is lost.
//!
//! If the view shows our key with content that this node did not write, the key is read from the
//! store and evaluated.

use std::time::Duration;

use flannel_core::backoff::Backoff;
use flannel_core::error::holder;
use flannel_core::lease::{LeaseAttrs, LeaseSet, Origin, View};
use flannel_core::runtime::{lock, or_never};
use flannel_core::subnet::LeaseEnd;
use flannel_core::{Error, Lease, Result, Subnets};
use tokio::sync::watch;

use super::LocalManager;
use super::holding::{HeldLease, LeaseTerm, OwnLease};
use super::lease_list::as_stored;
use super::progress::{Difference, Progress, Work};
use crate::registry::{Entry, Registry};

impl LocalManager {
    /// Renews and watches the lease, and evaluates differences, until the lease ends.
    pub(super) async fn hold(&self, held: &Lease) -> Result<LeaseEnd> {
        self.resume(held);
        let mut views = self.views();
        // The wall clock can end a lease from the cache before its renewal is due.
        let mut own_lease = self.holding.subscribe();
        let mut progress = Progress::new(self.holding.get().is_some_and(|lease| lease.cached));
        loop {
            let view = views.borrow_and_update().clone();
            own_lease.mark_unchanged();
            if progress.is_cached && matches!(view.origin, Origin::Live { .. }) {
                // The store is back. The lease is renewed at once, because some stores distinguish
                // a deleted lease from an expired one only if this process has renewed it.
                progress.is_cached = false;
                progress.next_attempt = Some(self.clock.boottime());
            }
            let difference = self.difference(&view);
            progress.may_have_stray |= self.has_new_stray(&view, &mut progress.searched);
            let renewal = self.holding.term().map(|term| term.renewal(self.margin));
            let Some(work) = progress.work(difference, renewal, self.clock.boottime()) else {
                progress.evaluated = progress.evaluated.filter(|_| difference.is_some());
                let next = progress.next_attempt.or(renewal);
                self.wait(next, &mut views, &mut own_lease).await;
                continue;
            };
            match self.perform(work, held, &mut progress).await {
                Ok(Some(end)) => {
                    // Removed from the cache too, so that no restart finds the lease there.
                    self.holding.end(end.clone());
                    self.fallback.save(&views, &self.holding);
                    return Ok(end);
                }
                Ok(None) => progress.note_success(held.subnets, difference),
                Err(error) => {
                    progress.next_attempt = Some(self.next_attempt(&mut progress.backoff));
                    progress.log_failure(held.subnets, &error, self.holding.has_lapsed());
                }
            }
        }
    }

    /// Does the work. Returns the end of the lease if it has ended.
    async fn perform(
        &self,
        work: Work,
        held: &Lease,
        progress: &mut Progress,
    ) -> Result<Option<LeaseEnd>> {
        let _writing = self.writing.lock().await;
        match work {
            Work::Renew => self.renew_or_check().await,
            Work::Check => self.check().await,
            Work::Sweep => {
                // Another lease than `held` may have been acquired meanwhile.
                let ours = self.holding.get().map_or(held.subnets, |lease| lease.subnets);
                let swept = self.sweep(&ours).await;
                progress.may_have_stray = swept.is_err();
                swept.map(|()| None)
            }
        }
    }

    /// Takes over a lease that an earlier manager acquired. It is renewed at once, because the time
    /// of its last renewal is unknown.
    fn resume(&self, held: &Lease) {
        if self.holding.get().is_none_or(|lease| lease.subnets != held.subnets) {
            let sent = self.clock.boottime();
            self.holding.set(HeldLease {
                subnets: held.subnets,
                attrs: as_stored(&held.attrs),
                revision: held.revision,
                term: held.expires.map(|_| LeaseTerm::confirmed(sent, Duration::ZERO)),
                cached: false,
            });
        }
    }

    fn difference(&self, view: &View) -> Option<Difference> {
        let Origin::Live { revision: now } = view.origin else { return None };
        let held = self.holding.get()?;
        match view.leases.get(&held.subnets).map(|lease| lease.revision) {
            None => Some(Difference::Gone(now)),
            Some(revision) => (revision != held.revision).then_some(Difference::At(revision)),
        }
    }

    /// Whether another lease with our address has appeared since the leases `searched`, which
    /// become the leases of the view.
    fn has_new_stray(&self, view: &View, searched: &mut LeaseSet) -> bool {
        let Origin::Live { .. } = view.origin else { return false };
        let Some(HeldLease { subnets, attrs, .. }) = self.holding.get() else { return false };
        let before = std::mem::replace(searched, view.leases.clone());
        let mut new = view.leases.changes_since(&before).filter_map(|(_, lease)| lease);
        !attrs.preferred.public.is_empty()
            && new.any(|lease| {
                lease.subnets != subnets && lease.attrs.preferred.public == attrs.preferred.public
            })
    }

    /// The time of the next attempt: after a pause, but not after the end of the lease.
    fn next_attempt(&self, backoff: &mut Backoff) -> Duration {
        let now = self.clock.boottime();
        let attempt = now + backoff.pause();
        match self.holding.term().map(|term| term.end()) {
            Some(end) if end > now => attempt.min(end),
            _ => attempt,
        }
    }

    async fn wait(
        &self,
        until: Option<Duration>,
        views: &mut watch::Receiver<View>,
        own_lease: &mut watch::Receiver<OwnLease>,
    ) {
        tokio::select! {
            biased;
            () = or_never(until.map(|until| self.clock.sleep_until(until))) => (),
            // The senders live as long as this manager.
            _ = views.changed() => (),
            _ = own_lease.changed() => (),
        }
    }

    async fn renew_or_check(&self) -> Result<Option<LeaseEnd>> {
        let Some(held_lease) = self.holding.get() else {
            return Ok(Some(LeaseEnd::Expired));
        };
        if held_lease.term.is_none() {
            return self.check().await;
        }
        let sent = self.clock.boottime();
        let kept = self.store.keep_alive(&held_lease.subnets, self.identity.holder).await?;
        // The store knows the holder. The key may still be deleted or another node's, and the view
        // may be old.
        let end = self.check().await?;
        let Some(ttl) = kept else {
            if end.is_none() && self.holding.term().is_some_and(|term| term.sent < sent) {
                let reason = "it does not know the holder any more, but has the key of the lease";
                return Err(self.unclear(&held_lease, reason));
            }
            return Ok(end);
        };
        if end.is_none() {
            self.holding.renew(LeaseTerm::confirmed(sent, ttl));
            tracing::debug!(subnets = %held_lease.subnets, "lease renewed");
        }
        Ok(end)
    }

    fn unclear(&self, held_lease: &HeldLease, reason: &str) -> Error {
        let store = format!("{}: {}", self.store, held_lease.subnets);
        Error::Store { store, source: reason.into() }
    }

    /// Reads our key and evaluates it. Returns `None` if this node still holds the lease.
    async fn check(&self) -> Result<Option<LeaseEnd>> {
        let Some(held_lease) = self.holding.get() else {
            return Ok(Some(LeaseEnd::Expired));
        };
        match self.store.entry(&held_lease.subnets).await {
            Err(error) => return self.restore(&held_lease, error).await,
            Ok(Some(entry)) => return self.evaluate(&held_lease, entry).await,
            Ok(None) if held_lease.term.is_none() => return Ok(Some(LeaseEnd::Deleted)),
            Ok(None) => {}
        }
        let sent = self.clock.boottime();
        let kept = self.store.keep_alive(&held_lease.subnets, self.identity.holder).await?;
        let Some(ttl) = kept else { return self.reacquire(&held_lease).await };
        match self.store.entry(&held_lease.subnets).await? {
            // An earlier attempt to restore it succeeded just now.
            Some(entry) => self.evaluate(&held_lease, entry).await,
            // The store knew the holder at a time when the key was gone.
            None if self.clock.boottime() < LeaseTerm::confirmed(sent, ttl).end() => {
                Ok(Some(LeaseEnd::Deleted))
            }
            None => {
                let reason = "its answers came too late to show the state of the lease";
                Err(self.unclear(&held_lease, reason))
            }
        }
    }

    /// Our key could not be read. If its value is the reason, the value is restored.
    async fn restore(&self, held_lease: &HeldLease, error: Error) -> Result<Option<LeaseEnd>> {
        let HeldLease { subnets, attrs, term, .. } = held_lease;
        let listing = self.store.list().await?;
        let Some(unreadable) = listing
            .skipped
            .iter()
            .find(|skipped| skipped.key.parse::<Subnets>().is_ok_and(|key| key == *subnets))
        else {
            return Err(error);
        };
        let reason = &unreadable.reason.to_string();
        if let Some(more) = lock(&self.unreadable).line(self.clock.boottime(), reason) {
            tracing::warn!(
                %subnets, reason, more,
                "this node's lease was made unreadable, restoring it"
            );
        }
        match self.rewrite(subnets, unreadable.revision, attrs, term.is_none()).await {
            Ok(_) => Ok(None),
            // The key has changed again, and is checked again later.
            Err(Error::Conflict { .. }) => Err(error),
            Err(error) => Err(error),
        }
    }

    /// Evaluates the content of our key by its holder ID and its attributes.
    async fn evaluate(&self, held_lease: &HeldLease, entry: Entry) -> Result<Option<LeaseEnd>> {
        let HeldLease { subnets, attrs: desired, revision, term, .. } = held_lease;
        let now = &entry.lease.attrs;
        let same_node = now.preferred.public == desired.preferred.public;
        let is_ours = match entry.holder {
            Some(holder) => holder == self.identity.holder && same_node,
            // A reservation has no holder ID, so its attributes are compared.
            None => now == desired || (same_node && is_blank(now)),
        };
        if !is_ours {
            let theirs: Vec<_> = now.preferred.public.values().collect();
            // A reservation has no holder ID, but the attributes of another host.
            let by_other_host = entry.holder != Some(self.identity.holder);
            let shares_address =
                desired.preferred.public.values().any(|ours| theirs.contains(&ours));
            if by_other_host && shares_address {
                self.fallback.note_lost(Some(*subnets));
            }
            return Ok(Some(LeaseEnd::Taken { by: self.holder(&entry) }));
        }
        // An earlier attempt whose answer was lost may have created it.
        if entry.holder.is_some()
            && entry.lease.revision != *revision
            && self.undisputed(entry.clone()).await?.is_none()
        {
            return Ok(Some(lost_dispute()));
        }
        if now == desired {
            // A reservation that became a lease is renewed at once, to learn its time to live.
            let sent = self.clock.boottime();
            self.settle(entry, term.unwrap_or(LeaseTerm::confirmed(sent, Duration::ZERO)));
            return Ok(None);
        }
        if let Some(more) = lock(&self.changed).line(self.clock.boottime(), "changed") {
            tracing::warn!(
                %subnets, more,
                "another writer changed this node's lease, restoring it"
            );
        }
        // Two writers that restore different values must not do so at full speed.
        tokio::time::sleep(Duration::from_millis(fastrand::u64(50..200))).await;
        let reserved = entry.holder.is_none();
        match self.rewrite(subnets, entry.lease.revision, desired, reserved).await {
            // After a conflict the view shows the next change, which is evaluated again.
            Ok(_) | Err(Error::Conflict { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The store has neither the key nor its holder, so the key expired.
    async fn reacquire(&self, held_lease: &HeldLease) -> Result<Option<LeaseEnd>> {
        let HeldLease { subnets, attrs, .. } = held_lease;
        // The store has denied the lease, perhaps before its end: somebody may have revoked it.
        // After a crash from here on, the cache must not give it back.
        self.fallback.forget_own(subnets).await;
        let sent = self.clock.boottime();
        match self.store.create(subnets, attrs, self.grant(false)).await {
            Ok(entry) => {
                let Some(entry) = self.undisputed(entry).await? else {
                    return Ok(Some(lost_dispute()));
                };
                self.settle(entry, LeaseTerm::confirmed(sent, self.ttl));
                tracing::warn!(%subnets, "the lease had expired, its subnets were acquired again");
                Ok(None)
            }
            // An earlier attempt whose answer was lost may have created it.
            Err(Error::Conflict { .. }) => match self.store.entry(subnets).await? {
                Some(entry) => self.evaluate(held_lease, entry).await,
                None => Ok(Some(LeaseEnd::Expired)),
            },
            Err(error) => Err(error),
        }
    }

    /// A description of another node that distinguishes nodes with one public address.
    pub(super) fn holder(&self, entry: &Entry) -> String {
        let node = holder(&entry.lease.attrs);
        let our_id = self.identity.holder;
        match entry.holder {
            Some(id) if id == our_id => format!(
                "{node} under our own holder ID {id} (was this host's state directory copied?)"
            ),
            Some(id) => format!("{node} under the holder ID {id}, while ours is {our_id}"),
            None => format!("{node}, as a reservation"),
        }
    }
}

/// Whether no node has filled in the reservation with these attributes. An operator gives it at
/// most a backend type.
pub(super) fn is_blank(attrs: &LeaseAttrs) -> bool {
    attrs.offers().all(|offer| offer.data.is_empty())
}

fn lost_dispute() -> LeaseEnd {
    LeaseEnd::Taken {
        by: "a node that took one of the two subnets after the lease had expired".to_owned(),
    }
}
