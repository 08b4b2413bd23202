//! A registry that keeps the stats on another: what was asked, what failed, what was skipped.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use flannel_core::lease::{LeaseAttrs, Revision};
use flannel_core::subnet::StoreStatus;
use flannel_core::{Result, Subnets};

use crate::clock::Clock;
use crate::fallback::unanswered;
use crate::registry::{
    Batch, ConfigText, Entry, HolderId, LeaseGrant, Listing, Now, Registry, Skipped, Watch,
};

/// What ends later is a failure of the same call.
const WATCH: &str = "watch";

#[derive(Debug)]
pub(crate) struct Metered {
    registry: Arc<dyn Registry>,
    stats: Arc<StoreStats>,
}

#[derive(Debug)]
struct StoreStats {
    status: Mutex<StoreStatus>,
    clock: Arc<dyn Clock>,
}

impl Metered {
    pub(crate) fn new(registry: Arc<dyn Registry>, clock: Arc<dyn Clock>) -> Self {
        let status = StoreStatus { store: registry.to_string(), ..StoreStatus::default() };
        Self { registry, stats: Arc::new(StoreStats { status: Mutex::new(status), clock }) }
    }

    pub(crate) fn status(&self) -> StoreStatus {
        let mut status = self.stats.lock().clone();
        if let Some(trouble) = self.registry.trouble() {
            status.last_error = Some((trouble, self.stats.clock.wall()));
        }
        status
    }
}

impl StoreStats {
    fn lock(&self) -> MutexGuard<'_, StoreStatus> {
        self.status.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Enters one request. A conflict is an answer; who refuses to speak with us has confirmed nothing.
    fn request<T>(
        &self,
        call: &'static str,
        result: Result<T>,
        revision: impl Fn(&T) -> Option<Revision>,
    ) -> Result<T> {
        self.lock().calls.entry(call).or_default().sent += 1;
        self.outcome(call, &result, revision);
        result
    }

    fn outcome<T>(
        &self,
        call: &'static str,
        result: &Result<T>,
        revision: impl Fn(&T) -> Option<Revision>,
    ) {
        let now = self.clock.wall();
        let mut status = self.lock();
        let revision = match result {
            Ok(answer) => revision(answer),
            Err(error) if unanswered(error) => {
                status.calls.entry(call).or_default().failed += 1;
                status.last_error = result.as_ref().err().map(|error| (error.to_string(), now));
                return;
            }
            Err(_) => None,
        };
        let known = revision.or_else(|| status.confirmed.map(|(revision, _)| revision));
        status.confirmed = Some((known.unwrap_or_default(), now));
        status.last_error = None;
    }

    /// Replaces what is skipped, and logs what is new in it.
    fn skip_all(&self, skipped: &[Skipped]) {
        let now: Vec<_> = skipped.iter().map(|s| (s.key.clone(), s.reason.clone())).collect();
        let mut status = self.lock();
        for new in now.iter().filter(|new| !status.skipped.contains(new)) {
            warn(&status.store, new);
        }
        status.skipped = now;
    }

    fn skip(&self, batch: &Batch) {
        let mut status = self.lock();
        for event in &batch.events {
            let before = status.skipped.iter().position(|(key, _)| *key == event.key);
            let before = before.map(|place| status.skipped.remove(place));
            if let Now::Unreadable(reason) = &event.now {
                let now = (event.key.clone(), reason.clone());
                if before.as_ref() != Some(&now) {
                    warn(&status.store, &now);
                }
                status.skipped.push(now);
            }
        }
    }
}

fn warn(store: &str, (key, reason): &(String, String)) {
    tracing::warn!(%store, %key, "skipped: {reason}");
}

impl fmt::Display for Metered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.registry.fmt(f)
    }
}

#[async_trait]
impl Registry for Metered {
    async fn config(&self) -> Result<ConfigText> {
        self.stats.request("config", self.registry.config().await, |_| None)
    }

    async fn write_config(&self, seen: Option<&ConfigText>, text: &str) -> Result<()> {
        self.stats.request("write_config", self.registry.write_config(seen, text).await, |()| None)
    }

    async fn config_changed(&self, seen: Option<ConfigText>) -> Result<()> {
        self.stats.request("watch_config", self.registry.config_changed(seen).await, |_| None)
    }

    async fn list(&self) -> Result<Listing> {
        let listing = self
            .stats
            .request("list", self.registry.list().await, |listing| Some(listing.revision))?;
        self.stats.skip_all(&listing.skipped);
        Ok(listing)
    }

    async fn entry(&self, subnets: &Subnets) -> Result<Option<Entry>> {
        self.stats.request("get", self.registry.entry(subnets).await, |_| None)
    }

    async fn create(
        &self,
        subnets: &Subnets,
        attrs: &LeaseAttrs,
        grant: Option<LeaseGrant>,
    ) -> Result<Entry> {
        self.stats.request("create", self.registry.create(subnets, attrs, grant).await, |_| None)
    }

    async fn create_or_list(
        &self,
        subnets: &Subnets,
        attrs: &LeaseAttrs,
        grant: Option<LeaseGrant>,
    ) -> Result<Result<Entry, Listing>> {
        let outcome = self.registry.create_or_list(subnets, attrs, grant).await;
        let listed = |outcome: &Result<Entry, Listing>| {
            outcome.as_ref().err().map(|listing| listing.revision)
        };
        let outcome = self.stats.request("create", outcome, listed)?;
        if let Err(listing) = &outcome {
            self.stats.skip_all(&listing.skipped);
        }
        Ok(outcome)
    }

    async fn update(
        &self,
        subnets: &Subnets,
        at: Revision,
        attrs: &LeaseAttrs,
        grant: Option<LeaseGrant>,
    ) -> Result<Entry> {
        self.stats
            .request("update", self.registry.update(subnets, at, attrs, grant).await, |_| None)
    }

    async fn delete(&self, subnets: &Subnets, at: Revision) -> Result<()> {
        self.stats.request("delete", self.registry.delete(subnets, at).await, |()| None)
    }

    async fn keep_alive(&self, subnets: &Subnets, holder: HolderId) -> Result<Option<Duration>> {
        self.stats.request("renew", self.registry.keep_alive(subnets, holder).await, |_| None)
    }

    async fn watch(&self, after: Revision) -> Result<Box<dyn Watch>> {
        let watch = self.stats.request(WATCH, self.registry.watch(after).await, |_| None)?;
        Ok(Box::new(MeteredWatch { watch, stats: Arc::clone(&self.stats) }))
    }
}

struct MeteredWatch {
    watch: Box<dyn Watch>,
    stats: Arc<StoreStats>,
}

#[async_trait]
impl Watch for MeteredWatch {
    async fn next(&mut self) -> Result<Option<Batch>> {
        let batch = self.watch.next().await;
        self.stats.outcome(WATCH, &batch, |batch| batch.as_ref().map(|batch| batch.revision));
        if let Ok(Some(batch)) = &batch {
            self.stats.skip(batch);
        }
        batch
    }
}
