//! A store in memory that behaves like etcd, for tests and for networks of one process.
//!
//! As in etcd, a holder is independent of its keys and has a time to live. The holder stays when a
//! key is deleted. When the holder expires, its keys are deleted.

mod store;

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use async_trait::async_trait;
use flannel_core::lease::{LeaseAttrs, Revision};
use flannel_core::runtime::{lock, or_never};
use flannel_core::{Error, Result, Subnets};
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};

use super::{
    Batch, ConfigText, Entry, HolderId, LeaseGrant, LeaseList, Registry, Watch, config_conflict,
};
use store::MemoryStore;

/// A registry in memory. Clones share the registry. Its time is tokio's, which a test can pause, so
/// it needs a tokio runtime with time enabled.
///
/// With the feature `testing`, a test can write any key, delete keys, forget history, and make the
/// store fail.
#[derive(Debug, Clone, Default)]
pub struct MemoryRegistry(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    store: Mutex<MemoryStore>,
    /// Wakes the waiting calls after each change, in order.
    changes: Notify,
}

impl MemoryRegistry {
    /// An empty registry without a config.
    pub fn new() -> Self {
        Self::default()
    }

    /// An empty registry with a config.
    pub fn with_config(text: &str) -> Self {
        let registry = Self::new();
        registry.set_config(Some(text));
        registry
    }

    /// Writes the network config, or deletes it (`None`).
    pub fn set_config(&self, text: Option<&str>) {
        self.change(|store| store.config = text.map(str::to_owned));
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, MemoryStore> {
        let mut store = lock(&self.0.store);
        store.expire(Instant::now());
        store
    }

    /// The store.
    ///
    /// # Errors
    /// An outage.
    fn reach(&self) -> Result<MutexGuard<'_, MemoryStore>> {
        let store = self.lock();
        if store.outage {
            return Err(Error::Store { store: self.to_string(), source: "out of reach".into() });
        }
        Ok(store)
    }

    /// Changes the store and wakes all waiting calls.
    pub(crate) fn change<T>(&self, change: impl FnOnce(&mut MemoryStore) -> T) -> T {
        let done = change(&mut self.lock());
        self.0.changes.notify_waiters();
        done
    }

    /// Carries out a write.
    async fn write<T>(&self, write: impl FnOnce(&mut MemoryStore) -> Result<T>) -> Result<T> {
        let written = self.reach().and_then(|mut store| write(&mut store));
        self.0.changes.notify_waiters();
        self.reply(written).await
    }

    /// Returns the result of a request, after the delay that a test may have set.
    async fn reply<T>(&self, result: Result<T>) -> Result<T> {
        let delay = self.lock().delay;
        if !delay.is_zero() {
            tokio::time::sleep(delay).await;
        }
        result
    }
}

impl fmt::Display for MemoryRegistry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("memory")
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

    async fn write_config(&self, known: Option<&ConfigText>, text: &str) -> Result<()> {
        self.write(|store| {
            if store.config.as_ref() != known.map(|known| &known.text) {
                return Err(config_conflict(self));
            }
            store.config = Some(text.to_owned());
            Ok(())
        })
        .await
    }

    async fn config_changed(&self, known: Option<ConfigText>) -> Result<()> {
        loop {
            // Taken before the comparison, so that a change in between wakes it.
            let changed = self.0.changes.notified();
            if self.reach()?.config.as_ref() != known.as_ref().map(|known| &known.text) {
                return Ok(());
            }
            changed.await;
        }
    }

    async fn list(&self) -> Result<LeaseList> {
        self.reply(self.reach().map(|store| store.list())).await
    }

    async fn entry(&self, subnets: &Subnets) -> Result<Option<Entry>> {
        self.reply(self.reach().and_then(|store| store.entry(subnets))).await
    }

    async fn create(
        &self,
        subnets: &Subnets,
        attrs: &LeaseAttrs,
        grant: Option<LeaseGrant>,
    ) -> Result<Entry> {
        self.write(|store| store.write(subnets, None, attrs, grant)).await
    }

    async fn update(
        &self,
        subnets: &Subnets,
        at: Revision,
        attrs: &LeaseAttrs,
        grant: Option<LeaseGrant>,
    ) -> Result<Entry> {
        self.write(|store| store.write(subnets, Some(at), attrs, grant)).await
    }

    async fn delete(&self, subnets: &Subnets, at: Revision) -> Result<()> {
        self.write(|store| store.delete(subnets, at)).await
    }

    async fn keep_alive(&self, _: &Subnets, holder: HolderId) -> Result<Option<Duration>> {
        self.reply(self.reach().map(|mut store| store.keep_alive(holder))).await
    }

    async fn remaining(&self, _: &Subnets, holder: HolderId) -> Result<Option<Duration>> {
        self.reply(self.reach().map(|store| store.remaining(holder))).await
    }

    async fn watch(&self, after: Revision) -> Result<Box<dyn Watch>> {
        drop(self.reach()?);
        Ok(Box::new(MemoryWatch { registry: self.clone(), after }))
    }
}

struct MemoryWatch {
    registry: MemoryRegistry,
    after: Revision,
}

#[async_trait]
impl Watch for MemoryWatch {
    async fn next(&mut self) -> Result<Option<Batch>> {
        loop {
            let changed = self.registry.0.changes.notified();
            let end = {
                let store = self.registry.reach()?;
                match store.history.since(self.after, |key| store.read(key)) {
                    Some(batch) if batch.events.is_empty() => store.next_end(),
                    Some(batch) => {
                        self.after = batch.revision;
                        return Ok(Some(batch));
                    }
                    None => return Ok(None),
                }
            };
            tokio::select! {
                biased;
                () = changed => (),
                () = or_never(end.map(sleep_until)) => (),
            }
        }
    }
}
