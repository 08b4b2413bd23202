//! Keeping the lease, and noticing at once when it is no longer ours.
//!
//! A key that differs from what this node wrote is judged by reading it from the store.

use std::time::Duration;

use flannel_core::error::holder;
use flannel_core::lease::{LeaseSet, Origin, Revision, View};
use flannel_core::subnet::LeaseEnd;
use flannel_core::{Error, Lease, Result, Subnets};

use crate::backoff::Backoff;
use crate::holding::{HeldLease, LeaseTerm};
use crate::manager::{LocalManager, as_stored};
use crate::registry::{Entry, Registry, Skipped};

/// What the view says of our key, if it says something else than we know.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Doubt {
    Gone,
    At(Revision),
}

impl LocalManager {
    /// Renews, watches and judges until the lease ends.
    pub(crate) async fn hold(&self, held: &Lease) -> Result<LeaseEnd> {
        self.resume(held);
        let mut views = self.views();
        let mut backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(60));
        let mut judged = None;
        let mut again = None;
        let (mut lapsed, mut refused) = (false, false);
        let (mut seen, mut stray) = (LeaseSet::default(), false);
        loop {
            let view = views.borrow_and_update().clone();
            let doubt = self.doubt(&view);
            stray |= self.may_stray(&view, &mut seen);
            let renewal = self.renewal();
            let due = again.or(renewal).is_some_and(|time| time <= self.clock.boottime());
            // A failure puts off everything, the judging of a doubt too.
            let outcome = if due {
                let _writing = self.writing.lock().await;
                self.renew_or_check().await
            } else if again.is_none() && doubt.is_some() && doubt != judged {
                let _writing = self.writing.lock().await;
                self.check().await
            } else if again.is_none() && stray {
                let _writing = self.writing.lock().await;
                // Perhaps not `held` any more: another may have been acquired meanwhile.
                let ours = self.holding.get().map_or(held.subnets, |held_lease| held_lease.subnets);
                let swept = self.sweep(&ours).await;
                stray = swept.is_err();
                swept.map(|()| None)
            } else {
                judged = judged.filter(|_| doubt.is_some());
                self.wait(again.or(renewal), &mut views).await;
                continue;
            };
            match outcome {
                Ok(Some(end)) => {
                    self.forget(&end);
                    return Ok(end);
                }
                Ok(None) => {
                    (judged, again) = (doubt, None);
                    backoff.reset();
                    refused = false;
                    if std::mem::take(&mut lapsed) {
                        tracing::info!(subnets = %held.subnets, "the store confirms that the subnet is ours again");
                    }
                }
                Err(error) => {
                    again = Some(self.again(&mut backoff));
                    tracing::debug!(subnets = %held.subnets, "cannot look after the lease yet: {error}");
                    // That the store is out of reach, whoever follows it says too.
                    if matches!(error, Error::Refused { .. })
                        && !std::mem::replace(&mut refused, true)
                    {
                        tracing::warn!(subnets = %held.subnets, "the lease cannot be renewed, trying on: {error}");
                    }
                    if !lapsed && self.holding.has_lapsed() {
                        lapsed = true;
                        tracing::warn!(
                            subnets = %held.subnets,
                            "the lease could not be renewed in time, the subnet is no longer ours: {error}"
                        );
                    }
                }
            }
        }
    }

    /// Takes up a lease that an earlier manager acquired: renewed at once, since nobody knows when it was last.
    fn resume(&self, held: &Lease) {
        if self.holding.get().is_none_or(|lease| lease.subnets != held.subnets) {
            let sent = self.clock.boottime();
            self.holding.set(HeldLease {
                subnets: held.subnets,
                attrs: as_stored(&held.attrs),
                revision: held.revision,
                term: held.expires.map(|_| LeaseTerm { sent, ttl: Duration::ZERO }),
            });
        }
    }

    fn doubt(&self, view: &View) -> Option<Doubt> {
        let Origin::Live { .. } = view.origin else { return None };
        let (subnets, revision) = self.holding.get().map(|t| (t.subnets, t.revision))?;
        match view.leases.get(&subnets) {
            None => Some(Doubt::Gone),
            Some(lease) if lease.revision != revision => Some(Doubt::At(lease.revision)),
            Some(_) => None,
        }
    }

    /// Another lease with our address has appeared.
    fn may_stray(&self, view: &View, seen: &mut LeaseSet) -> bool {
        let Origin::Live { .. } = view.origin else { return false };
        let Some((subnets, public)) =
            self.holding.get().map(|t| (t.subnets, t.attrs.preferred.public))
        else {
            return false;
        };
        let seen = std::mem::replace(seen, view.leases.clone());
        let mut new = view.leases.changes_since(&seen).filter_map(|(_, lease)| lease);
        !public.is_empty()
            && new.any(|lease| lease.subnets != subnets && lease.attrs.preferred.public == public)
    }

    fn renewal(&self) -> Option<Duration> {
        self.holding.term().map(|term| term.renewal(self.margin))
    }

    /// When to try again: after a pause, but also at the very moment when our time runs out.
    fn again(&self, backoff: &mut Backoff) -> Duration {
        let now = self.clock.boottime();
        let again = now + backoff.pause();
        match self.holding.term().map(|term| term.end()) {
            Some(end) if end > now => again.min(end),
            _ => again,
        }
    }

    async fn wait(&self, until: Option<Duration>, views: &mut tokio::sync::watch::Receiver<View>) {
        let timer = async {
            match until {
                Some(until) => self.clock.sleep_until(until).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            () = timer => (),
            // Our reflector lives as long as we do.
            _ = views.changed() => (),
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
        let Some(ttl) = self.store.keep_alive(&held_lease.subnets, self.identity.holder).await?
        else {
            let end = self.check().await?;
            if end.is_none() && self.holding.term().is_some_and(|term| term.sent < sent) {
                let reason = "it has forgotten the lease's holder, but not its key";
                return Err(Error::Store {
                    store: format!("{}: {}", self.store, held_lease.subnets),
                    source: reason.into(),
                });
            }
            return Ok(end);
        };
        // The store knows us; whether our key is still there and ours is another question, and the views, which
        // would say so, may be old.
        if let Some(end) = self.check().await? {
            return Ok(Some(end));
        }
        self.holding.renew(LeaseTerm { sent, ttl });
        tracing::debug!(subnets = %held_lease.subnets, "lease renewed");
        Ok(None)
    }

    /// Reads our key and judges what it says. `None`: still ours.
    async fn check(&self) -> Result<Option<LeaseEnd>> {
        let Some(held_lease) = self.holding.get() else {
            return Ok(Some(LeaseEnd::Expired));
        };
        let entry = match self.store.entry(&held_lease.subnets).await {
            Err(error) => return self.restore(&held_lease, error).await,
            Ok(entry) => entry,
        };
        match entry {
            Some(entry) => self.judge(&held_lease, entry).await,
            None if held_lease.term.is_none() => Ok(Some(LeaseEnd::Deleted)),
            None => {
                let sent = self.clock.boottime();
                let Some(ttl) =
                    self.store.keep_alive(&held_lease.subnets, self.identity.holder).await?
                else {
                    return self.win_back(&held_lease).await;
                };
                match self.store.entry(&held_lease.subnets).await? {
                    // An attempt of ours to win it back was carried out just now.
                    Some(entry) => self.judge(&held_lease, entry).await,
                    // The store knew us when it had no key of ours.
                    None if self.clock.boottime() < (LeaseTerm { sent, ttl }).end() => {
                        Ok(Some(LeaseEnd::Deleted))
                    }
                    None => Err(Error::Store {
                        store: format!("{}: {}", self.store, held_lease.subnets),
                        source: "its answers took too long to show what became of the lease".into(),
                    }),
                }
            }
        }
    }

    /// Our key could not be read. If that is because of what it holds, what it held is put back.
    async fn restore(&self, held_lease: &HeldLease, error: Error) -> Result<Option<LeaseEnd>> {
        let listing = self.store.list().await?;
        let ours = |skipped: &&Skipped| {
            skipped.key.parse().is_ok_and(|key: Subnets| key == held_lease.subnets)
        };
        let Some(unreadable) = listing.skipped.iter().find(ours) else { return Err(error) };
        tracing::warn!(subnets = %held_lease.subnets, reason = unreadable.reason, "somebody made this node's lease unreadable; putting it back");
        let (sent, grant) = (self.clock.boottime(), self.grant(held_lease.term.is_none()));
        match self
            .store
            .update(&held_lease.subnets, unreadable.revision, &held_lease.attrs, grant)
            .await
        {
            Ok(entry) => drop(self.settle(entry, Some(LeaseTerm { sent, ttl: self.ttl }))),
            // Changed once more: to be looked at again.
            Err(Error::Conflict { .. }) => return Err(error),
            Err(error) => return Err(error),
        }
        Ok(None)
    }

    /// Judges the key that is there, by its holder ID and its attributes.
    async fn judge(&self, held_lease: &HeldLease, entry: Entry) -> Result<Option<LeaseEnd>> {
        let (now, wanted) = (&entry.lease.attrs, &held_lease.attrs);
        let same_node = now.preferred.public == wanted.preferred.public;
        let blank = now.preferred.kind.is_empty() && now.preferred.data.is_empty();
        let ours = match entry.holder {
            Some(holder) => holder == self.identity.holder && same_node,
            // Reservations have no holder ID. Two nodes with one public address differ by what they wrote.
            None => now == wanted || (same_node && blank),
        };
        if !ours {
            return Ok(Some(LeaseEnd::Taken { by: self.holder(&entry) }));
        }
        // Perhaps created by an attempt of ours whose answer was lost, and too late.
        if entry.holder.is_some()
            && entry.lease.revision != held_lease.revision
            && self.undisputed(entry.clone()).await?.is_none()
        {
            return Ok(Some(disputed()));
        }
        if now == wanted {
            // A reservation that became a lease is renewed at once, to learn its time to live.
            let sent = self.clock.boottime();
            let term = held_lease.term.or(Some(LeaseTerm { sent, ttl: Duration::ZERO }));
            self.settle(entry, term);
            return Ok(None);
        }
        tracing::warn!(subnets = %held_lease.subnets, "somebody changed this node's lease; putting it back");
        // Two writers that restore contradicting values must not do so at full speed.
        tokio::time::sleep(Duration::from_millis(fastrand::u64(50..200))).await;
        let (sent, grant) = (self.clock.boottime(), self.grant(entry.holder.is_none()));
        match self.store.update(&held_lease.subnets, entry.lease.revision, wanted, grant).await {
            Ok(entry) => drop(self.settle(entry, Some(LeaseTerm { sent, ttl: self.ttl }))),
            // Changed once more: the view will show it, and it will be judged again.
            Err(Error::Conflict { .. }) => (),
            Err(error) => return Err(error),
        }
        Ok(None)
    }

    /// The key and the store's memory of us are gone: nobody has stopped us, we were only forgotten.
    async fn win_back(&self, held_lease: &HeldLease) -> Result<Option<LeaseEnd>> {
        let sent = self.clock.boottime();
        match self.store.create(&held_lease.subnets, &held_lease.attrs, self.grant(false)).await {
            Ok(entry) => {
                let Some(entry) = self.undisputed(entry).await? else {
                    return Ok(Some(disputed()));
                };
                self.settle(entry, Some(LeaseTerm { sent, ttl: self.ttl }));
                tracing::warn!(subnets = %held_lease.subnets, "the lease had expired; the same subnet was won back");
                Ok(None)
            }
            // Perhaps by an earlier attempt of ours, whose answer was lost.
            Err(Error::Conflict { .. }) => match self.store.entry(&held_lease.subnets).await? {
                Some(entry) => self.judge(held_lease, entry).await,
                None => Ok(Some(LeaseEnd::Expired)),
            },
            Err(error) => Err(error),
        }
    }

    /// Names another node for a message, so that two with one public address can be distinguished.
    fn holder(&self, entry: &Entry) -> String {
        let node = holder(&entry.lease.attrs);
        match entry.holder {
            Some(holder) if holder == self.identity.holder => {
                format!(
                    "{node} under our own holder ID {holder} (was this host's state directory copied?)"
                )
            }
            Some(holder) => format!(
                "{node} under the holder ID {holder}, while ours is {}",
                self.identity.holder
            ),
            None => format!("{node}, as a reservation"),
        }
    }
}

fn disputed() -> LeaseEnd {
    LeaseEnd::Taken {
        by: "a node that took one of the two subnets after the lease had expired".to_owned(),
    }
}
