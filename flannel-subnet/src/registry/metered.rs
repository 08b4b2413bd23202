//! A registry that counts the requests to another registry, with its failures and skipped keys.

use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use flannel_core::backoff::FailurePauses;
use flannel_core::lease::{LeaseAttrs, Revision};
use flannel_core::runtime::lock;
use flannel_core::subnet::{Confirmed, LastError, StoreKind, StoreReason, StoreStatus};
use flannel_core::{Error, Result, Subnets};

use super::skipped::SkippedKeys;
use super::{Batch, ConfigText, Entry, HolderId, LeaseGrant, LeaseList, Registry, Watch};
use crate::clock::Clock;

/// The call whose failure counter includes failed watches.
const WATCH: &str = "watch";

#[derive(Debug)]
pub(crate) struct Metered {
    registry: Arc<dyn Registry>,
    stats: Arc<StoreStats>,
}

#[derive(Debug)]
struct StoreStats {
    store: String,
    /// The status without its skipped keys.
    status: Mutex<StoreStatus>,
    skipped: Mutex<SkippedKeys>,
    clock: Arc<dyn Clock>,
}

impl Metered {
    pub(crate) fn new(registry: Arc<dyn Registry>, clock: Arc<dyn Clock>) -> Self {
        let store = registry.to_string();
        let stats =
            StoreStats { store, status: Mutex::default(), skipped: Mutex::default(), clock };
        Self { registry, stats: Arc::new(stats) }
    }

    /// The store has answered a request.
    pub(crate) fn has_answered(&self) -> bool {
        lock(&self.stats.status).confirmed.is_some()
    }

    pub(crate) fn status(&self) -> StoreStatus {
        let mut status = lock(&self.stats.status).clone();
        status.store.clone_from(&self.stats.store);
        status.kind = self.registry.kind();
        status.skipped = lock(&self.stats.skipped).all();
        if let Some(StoreReason { text, failure }) = self.registry.trouble() {
            let at = self.stats.clock.wall();
            status.last_error = Some(LastError { text, failure, at });
        }
        status
    }
}

impl StoreStats {
    /// Counts one request and its outcome.
    fn request<T>(&self, call: &'static str, result: Result<T>) -> Result<T> {
        self.request_at(call, result, None)
    }

    /// Counts one request whose answer may have a revision of the store.
    fn request_at<T>(
        &self,
        call: &'static str,
        result: Result<T>,
        revision: Option<Revision>,
    ) -> Result<T> {
        lock(&self.status).calls.entry(call).or_default().sent += 1;
        self.outcome(call, result.as_ref().err(), revision);
        result
    }

    /// Notes a result. A conflict is an answer of the store. A refusal confirms no revision.
    fn outcome(&self, call: &'static str, error: Option<&Error>, revision: Option<Revision>) {
        let now = self.clock.wall();
        let mut status = lock(&self.status);
        if let Some(error) = error.filter(|error| unanswered(error)) {
            status.calls.entry(call).or_default().failed += 1;
            let failure = error.store_failure();
            status.last_error = Some(LastError { text: error.to_string(), failure, at: now });
            return;
        }
        let known = revision.or_else(|| status.confirmed.map(|answer| answer.revision));
        status.confirmed = Some(Confirmed { revision: known.unwrap_or_default(), at: now });
        status.last_error = None;
    }

    fn skip_listed(&self, listing: &LeaseList) {
        lock(&self.skipped).replace(&self.store, listing);
    }

    fn skip_changed(&self, batch: &Batch) {
        lock(&self.skipped).change(&self.store, batch, self.clock.boottime());
    }
}

/// Whether the store did not answer the request: it is unreachable, or refuses this node.
pub(crate) fn unanswered(error: &Error) -> bool {
    matches!(error, Error::Store { .. } | Error::Refused { .. })
}

impl fmt::Display for Metered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.registry.fmt(f)
    }
}

#[async_trait]
impl Registry for Metered {
    async fn config(&self) -> Result<ConfigText> {
        self.stats.request("config", self.registry.config().await)
    }

    async fn write_config(&self, known: Option<&ConfigText>, text: &str) -> Result<()> {
        self.stats.request("write_config", self.registry.write_config(known, text).await)
    }

    async fn config_changed(&self, known: Option<ConfigText>) -> Result<()> {
        self.stats.request("watch_config", self.registry.config_changed(known).await)
    }

    async fn list(&self) -> Result<LeaseList> {
        let listed = self.registry.list().await;
        let revision = listed.as_ref().ok().map(|listing| listing.revision);
        let listing = self.stats.request_at("list", listed, revision)?;
        self.stats.skip_listed(&listing);
        Ok(listing)
    }

    async fn entry(&self, subnets: &Subnets) -> Result<Option<Entry>> {
        self.stats.request("get", self.registry.entry(subnets).await)
    }

    async fn create(
        &self,
        subnets: &Subnets,
        attrs: &LeaseAttrs,
        grant: Option<LeaseGrant>,
    ) -> Result<Entry> {
        self.stats.request("create", self.registry.create(subnets, attrs, grant).await)
    }

    async fn create_or_list(
        &self,
        subnets: &Subnets,
        attrs: &LeaseAttrs,
        grant: Option<LeaseGrant>,
    ) -> Result<Result<Entry, LeaseList>> {
        let outcome = self.registry.create_or_list(subnets, attrs, grant).await;
        let listed = outcome.as_ref().ok().and_then(|outcome| outcome.as_ref().err());
        let revision = listed.map(|listing| listing.revision);
        let outcome = self.stats.request_at("create", outcome, revision)?;
        if let Err(listing) = &outcome {
            self.stats.skip_listed(listing);
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
        let updated = self.registry.update(subnets, at, attrs, grant).await;
        self.stats.request("update", updated)
    }

    async fn delete(&self, subnets: &Subnets, at: Revision) -> Result<()> {
        self.stats.request("delete", self.registry.delete(subnets, at).await)
    }

    async fn keep_alive(&self, subnets: &Subnets, holder: HolderId) -> Result<Option<Duration>> {
        self.stats.request("renew", self.registry.keep_alive(subnets, holder).await)
    }

    async fn remaining(&self, subnets: &Subnets, holder: HolderId) -> Result<Option<Duration>> {
        self.stats.request("get", self.registry.remaining(subnets, holder).await)
    }

    fn kind(&self) -> StoreKind {
        self.registry.kind()
    }

    fn failure_pauses(&self) -> FailurePauses {
        self.registry.failure_pauses()
    }

    async fn watch(&self, after: Revision) -> Result<Box<dyn Watch>> {
        let watch = self.stats.request(WATCH, self.registry.watch(after).await)?;
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
        let changes = batch.as_ref().ok().and_then(Option::as_ref);
        self.stats.outcome(WATCH, batch.as_ref().err(), changes.map(|batch| batch.revision));
        if let Some(batch) = changes {
            self.stats.skip_changed(batch);
        }
        batch
    }
}
