//! A store in memory, which behaves as etcd does: the fake for tests, and a network of one process.
//!
//! As in etcd, a holder is a thing of its own that has a time to live, and keys
//! hang on it. Deleting a key leaves its holder alive; when a holder's time is over, its keys go.

mod state;

use std::collections::BTreeSet;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use flannel_core::lease::{LeaseAttrs, Revision};
use flannel_core::{Error, Result, Subnets};
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::registry::{
    Batch, ConfigText, Entry, Event, HolderId, LeaseGrant, Listing, Now, Registry, Skipped, Watch,
    config_conflict,
};
use state::State;

/// A registry in memory. Clones are the same registry. Time is tokio's, so that tests can pause it.
///
/// What a test can do to it: write what is no lease ([`MemoryRegistry::put_raw`]), delete as an operator
/// would, forget history, be out of reach.
#[derive(Debug, Clone)]
pub struct MemoryRegistry(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    inner: Mutex<State>,
    /// Wakes whoever waits, in the order in which they began to.
    changes: Notify,
}

impl Default for MemoryRegistry {
    fn default() -> Self {
        Self::new()
    }
}

impl MemoryRegistry {
    /// An empty registry without a config.
    pub fn new() -> Self {
        Self(Arc::new(Shared { inner: Mutex::default(), changes: Notify::new() }))
    }

    /// An empty registry with a config.
    pub fn with_config(text: &str) -> Self {
        let registry = Self::new();
        registry.set_config(Some(text));
        registry
    }

    /// Writes, or with `None` deletes, the network config.
    pub fn set_config(&self, text: Option<&str>) {
        self.lock().config = text.map(str::to_owned);
        self.wake();
    }

    /// Writes any key with any value, as an operator or a foreign program would. No `grant`: for ever.
    pub fn put_raw(&self, key: &str, value: &str, grant: Option<LeaseGrant>) {
        self.lock().put(key, value, grant);
        self.wake();
    }

    /// Deletes a key, as an operator would: the order to stop.
    pub fn delete_key(&self, key: &str) {
        self.lock().remove(key);
        self.wake();
    }

    /// Forgets a holder and deletes its keys, as `etcdctl lease revoke` does.
    pub fn revoke(&self, holder: HolderId) {
        self.lock().end_holder(holder);
        self.wake();
    }

    /// Forgets all history: watches that are not up to date, and those to come from older revisions, have a gap.
    pub fn forget_history(&self) {
        let mut inner = self.lock();
        inner.forgotten = inner.revision;
        inner.history.clear();
    }

    /// Is out of reach, or in reach again: every request and watch fails meanwhile. Time goes on.
    pub fn set_outage(&self, outage: bool) {
        self.lock().outage = outage;
        self.wake();
    }

    /// Lets the replies to all requests come this much after they were carried out.
    pub fn set_reply_delay(&self, delay: Duration) {
        self.lock().delay = delay;
    }

    async fn reply<T>(&self, result: Result<T>) -> Result<T> {
        let delay = self.lock().delay;
        if !delay.is_zero() {
            tokio::time::sleep(delay).await;
        }
        result
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        let mut inner = self.0.inner.lock().unwrap_or_else(PoisonError::into_inner);
        inner.expire(Instant::now());
        inner
    }

    /// The state, if it is in reach.
    fn reach(&self) -> Result<MutexGuard<'_, State>> {
        let inner = self.lock();
        if inner.outage {
            return Err(Error::Store { store: self.to_string(), source: "out of reach".into() });
        }
        Ok(inner)
    }

    fn wake(&self) {
        self.0.changes.notify_waiters();
    }
}

impl fmt::Display for MemoryRegistry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("memory")
    }
}

/// What each request does, at once and in one step.
impl MemoryRegistry {
    fn list_now(&self) -> Result<Listing> {
        let inner = self.reach()?;
        let mut listing = Listing { revision: Revision(inner.revision), ..Listing::default() };
        for (key, stored) in &inner.keys {
            match inner.read(key) {
                Now::Held(entry) => listing.entries.push(entry),
                Now::Unreadable(reason) => {
                    let revision = Revision(stored.revision);
                    listing.skipped.push(Skipped { key: key.clone(), reason, revision });
                }
                Now::Gone => (),
            }
        }
        Ok(listing)
    }

    fn entry_now(&self, subnets: &Subnets) -> Result<Option<Entry>> {
        match self.reach()?.read(&subnets.to_string()) {
            Now::Held(entry) => Ok(Some(entry)),
            Now::Gone => Ok(None),
            Now::Unreadable(reason) => {
                Err(Error::Store { store: format!("{self}: {subnets}"), source: reason.into() })
            }
        }
    }

    /// Writes a key that is at this revision; `None`: that does not exist.
    fn write_now(
        &self,
        subnets: &Subnets,
        at: Option<Revision>,
        attrs: &LeaseAttrs,
        grant: Option<LeaseGrant>,
    ) -> Result<Entry> {
        let mut inner = self.reach()?;
        let key = inner.at(subnets, at)?;
        inner.put(&key, &attrs.to_json(), grant);
        let Now::Held(entry) = inner.read(&key) else {
            return Err(Error::Conflict { subnets: *subnets });
        };
        drop(inner);
        self.wake();
        Ok(entry)
    }

    fn delete_now(&self, subnets: &Subnets, at: Revision) -> Result<()> {
        let mut inner = self.reach()?;
        let key = inner.at(subnets, Some(at))?;
        inner.remove(&key);
        drop(inner);
        self.wake();
        Ok(())
    }

    fn keep_alive_now(&self, holder: HolderId) -> Result<Option<Duration>> {
        let mut inner = self.reach()?;
        Ok(inner.holders.get_mut(&holder).map(|holder| {
            holder.end = Instant::now() + holder.ttl;
            holder.ttl
        }))
    }
}

#[async_trait]
impl Registry for MemoryRegistry {
    async fn config(&self) -> Result<ConfigText> {
        let location = "memory: config".to_owned();
        match self.reach()?.config.clone() {
            Some(text) => Ok(ConfigText { location, text }),
            None => Err(Error::NoConfig { location }),
        }
    }

    async fn write_config(&self, seen: Option<&ConfigText>, text: &str) -> Result<()> {
        let written = (|| {
            let mut inner = self.reach()?;
            if inner.config.as_deref() != seen.map(|seen| seen.text.as_str()) {
                return Err(config_conflict(self));
            }
            inner.config = Some(text.to_owned());
            Ok(())
        })();
        self.wake();
        self.reply(written).await
    }

    async fn config_changed(&self, seen: Option<ConfigText>) -> Result<()> {
        loop {
            // Counts what happens from here on, before it is waited for.
            let changed = self.0.changes.notified();
            if self.reach()?.config.as_ref() != seen.as_ref().map(|seen| &seen.text) {
                return Ok(());
            }
            changed.await;
        }
    }

    async fn list(&self) -> Result<Listing> {
        self.reply(self.list_now()).await
    }

    async fn entry(&self, subnets: &Subnets) -> Result<Option<Entry>> {
        self.reply(self.entry_now(subnets)).await
    }

    async fn create(
        &self,
        subnets: &Subnets,
        attrs: &LeaseAttrs,
        grant: Option<LeaseGrant>,
    ) -> Result<Entry> {
        self.reply(self.write_now(subnets, None, attrs, grant)).await
    }

    async fn update(
        &self,
        subnets: &Subnets,
        at: Revision,
        attrs: &LeaseAttrs,
        grant: Option<LeaseGrant>,
    ) -> Result<Entry> {
        self.reply(self.write_now(subnets, Some(at), attrs, grant)).await
    }

    async fn delete(&self, subnets: &Subnets, at: Revision) -> Result<()> {
        self.reply(self.delete_now(subnets, at)).await
    }

    async fn keep_alive(&self, _: &Subnets, holder: HolderId) -> Result<Option<Duration>> {
        self.reply(self.keep_alive_now(holder)).await
    }

    async fn watch(&self, after: Revision) -> Result<Box<dyn Watch>> {
        drop(self.reach()?);
        Ok(Box::new(MemoryWatch { registry: self.clone(), after: after.0 }))
    }
}

struct MemoryWatch {
    registry: MemoryRegistry,
    after: u64,
}

#[async_trait]
impl Watch for MemoryWatch {
    async fn next(&mut self) -> Result<Option<Batch>> {
        loop {
            let changed = self.registry.0.changes.notified();
            let end = {
                let inner = self.registry.reach()?;
                if self.after < inner.forgotten || self.after > inner.revision {
                    return Ok(None);
                }
                if self.after < inner.revision {
                    let keys: BTreeSet<&String> =
                        inner.history.range(self.after + 1..).map(|(_, key)| key).collect();
                    let event = |key: &String| Event { key: key.clone(), now: inner.read(key) };
                    let events = keys.into_iter().map(event).collect();
                    self.after = inner.revision;
                    return Ok(Some(Batch { events, revision: Revision(inner.revision) }));
                }
                inner.holders.values().map(|holder| holder.end).min()
            };
            let expiry = async {
                match end {
                    Some(end) => tokio::time::sleep_until(end).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                biased;
                () = changed => (),
                () = expiry => (),
            }
        }
    }
}
