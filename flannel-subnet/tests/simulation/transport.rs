//! The connection of a node to the store: slow, lossy, and sometimes cut.

use std::fmt;
use std::future::Future;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use flannel_core::lease::{LeaseAttrs, Revision};
use flannel_core::{Error, Result, Subnets};
use flannel_subnet::{Batch, ConfigText, Entry, HolderId, LeaseGrant, LeaseList, Registry, Watch};
use tokio::sync::Notify;
use tokio::time::sleep;

use crate::TTL;
use crate::fault::Fault;
use crate::store::{Run, SharedStore};

/// The time limit of a request.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Why a node cannot reach the store, or does not run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Condition {
    pub(crate) suspended: bool,
    pub(crate) cut: bool,
}

/// The network card of a node, which outlives all runs.
#[derive(Debug)]
pub(crate) struct Link {
    now: Mutex<Condition>,
    changed: Notify,
}

impl Link {
    pub(crate) fn new() -> Self {
        Self { now: Mutex::default(), changed: Notify::new() }
    }

    pub(crate) fn set(&self, change: impl FnOnce(&mut Condition)) {
        change(&mut self.now.lock().unwrap());
        self.changed.notify_waiters();
    }

    pub(crate) fn now(&self) -> Condition {
        *self.now.lock().unwrap()
    }

    pub(crate) async fn until(&self, condition: impl Fn(Condition) -> bool) {
        loop {
            let changed = self.changed.notified();
            if condition(self.now()) {
                return;
            }
            changed.await;
        }
    }

    /// Waits while the machine is suspended.
    pub(crate) async fn running(&self) {
        self.until(|now| !now.suspended).await;
    }
}

/// The connection of one run.
#[derive(Debug, Clone)]
pub(crate) struct Transport {
    pub(crate) store: SharedStore,
    pub(crate) link: Arc<Link>,
    pub(crate) run: Run,
}

#[derive(Debug, Clone, Copy)]
enum Fate {
    Smooth,
    LostRequest,
    LostReply,
    /// The time after its end at which the request is carried out.
    Late(Duration),
    Duplicate,
    Slow,
    /// The reply comes only after this time, without a time limit: the daemon or its disk stands
    /// still.
    LateReply(Duration),
}

fn millis(range: std::ops::Range<u64>) -> Duration {
    Duration::from_millis(fastrand::u64(range))
}

fn out_of_reach() -> Error {
    Error::Store { store: "simulation".into(), source: "out of reach".into() }
}

impl Transport {
    fn fate(&self, latest: Duration) -> Fate {
        let mut stats = self.store.stats();
        if !stats.storm {
            return Fate::Smooth;
        }
        let (fate, fault) = match fastrand::u8(..100) {
            0..3 => (Fate::LostRequest, Fault::LostRequest),
            3..6 => (Fate::LostReply, Fault::LostReply),
            6..9 => (Fate::Late(latest.mul_f64(fastrand::f64())), Fault::LateRequest),
            9..12 => (Fate::Duplicate, Fault::Duplicate),
            12..20 => (Fate::Slow, Fault::SlowReply),
            20 => (Fate::LateReply((2 * TTL).mul_f64(fastrand::f64())), Fault::LateReply),
            _ => return Fate::Smooth,
        };
        stats.counts.count(fault);
        fate
    }

    /// One request. `latest` is the longest time after its end at which it may be carried out.
    async fn call<T, F>(
        &self,
        what: &str,
        latest: Duration,
        request: impl Fn(Self) -> F,
    ) -> Result<T>
    where
        F: Future<Output = Result<T>> + Send + 'static,
        T: fmt::Debug + Send + 'static,
    {
        self.link.running().await;
        let fate = self.fate(latest);
        let reply = match fate {
            _ if self.link.now().cut => None,
            Fate::LostRequest => None,
            Fate::Smooth | Fate::Slow => {
                let longest = if matches!(fate, Fate::Slow) { 4_900 } else { 30 };
                sleep(millis(1..longest)).await;
                let reply = request(self.clone()).await;
                sleep(millis(1..longest)).await;
                Some(reply)
            }
            Fate::LateReply(by) => {
                let reply = request(self.clone()).await;
                sleep(by).await;
                Some(reply)
            }
            Fate::LostReply => {
                sleep(millis(1..100)).await;
                let _ = request(self.clone()).await;
                None
            }
            Fate::Late(by) => {
                let request = request(self.clone());
                drop(tokio::spawn(async move {
                    sleep(TIMEOUT + by).await;
                    let _ = request.await;
                }));
                None
            }
            Fate::Duplicate => {
                let first = request(self.clone()).await;
                sleep(millis(1..2_000)).await;
                let second = request(self.clone()).await;
                Some(if fastrand::bool() { first } else { second })
            }
        };
        if reply.is_none() {
            sleep(if fastrand::bool() { TIMEOUT } else { millis(1..1_000) }).await;
        }
        self.link.running().await;
        let reply = reply.filter(|_| !self.link.now().cut).unwrap_or_else(|| Err(out_of_reach()));
        self.note(what, fate, &reply);
        reply
    }

    /// Records a request and its reply.
    fn note<T: fmt::Debug>(&self, what: &str, fate: Fate, reply: &Result<T>) {
        self.store.stats().note(|| {
            let reply = match reply {
                Ok(reply) => format!("{reply:?}").chars().take(300).collect(),
                Err(error) => error.to_string(),
            };
            format!("  {:?} {what}: {fate:?}: {reply}", self.run)
        });
    }
}

impl fmt::Display for Transport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("simulation")
    }
}

#[async_trait]
impl Registry for Transport {
    async fn config(&self) -> Result<ConfigText> {
        self.call("config", TTL, |way| async move { way.store.registry.config().await }).await
    }

    async fn config_changed(&self, known: Option<ConfigText>) -> Result<()> {
        self.store.registry.config_changed(known).await
    }

    async fn list(&self) -> Result<LeaseList> {
        self.call("list", TTL, |way| async move { way.store.registry.list().await }).await
    }

    async fn entry(&self, subnets: &Subnets) -> Result<Option<Entry>> {
        let subnets = *subnets;
        self.call("entry", TTL, move |way| async move { way.store.registry.entry(&subnets).await })
            .await
    }

    async fn create(
        &self,
        subnets: &Subnets,
        attrs: &LeaseAttrs,
        grant: Option<LeaseGrant>,
    ) -> Result<Entry> {
        let subnets = *subnets;
        self.call("create", TTL / 2, move |way| {
            let attrs = attrs.clone();
            async move { way.store.create(&way.run, &subnets, &attrs, grant).await }
        })
        .await
    }

    async fn update(
        &self,
        subnets: &Subnets,
        at: Revision,
        attrs: &LeaseAttrs,
        grant: Option<LeaseGrant>,
    ) -> Result<Entry> {
        let subnets = *subnets;
        self.call("update", 3 * TTL, move |way| {
            let attrs = attrs.clone();
            async move { way.store.update(&way.run, &subnets, at, &attrs, grant).await }
        })
        .await
    }

    async fn delete(&self, subnets: &Subnets, at: Revision) -> Result<()> {
        let subnets = *subnets;
        self.call("delete", 3 * TTL, move |way| async move { way.store.delete(&subnets, at).await })
            .await
    }

    async fn keep_alive(&self, subnets: &Subnets, holder: HolderId) -> Result<Option<Duration>> {
        let subnets = *subnets;
        self.call("keep_alive", TTL / 2, move |way| async move {
            way.store.keep_alive(&subnets, holder, TTL).await
        })
        .await
    }

    async fn watch(&self, after: Revision) -> Result<Box<dyn Watch>> {
        let watch = self.call("watch", TTL, move |way| async move {
            way.store.registry.watch(after).await.map(Opaque)
        });
        Ok(Box::new(SlowWatch {
            watch: watch.await?.0,
            link: Arc::clone(&self.link),
            store: Arc::clone(&self.store),
        }))
    }
}

struct Opaque(Box<dyn Watch>);

impl fmt::Debug for Opaque {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("watch")
    }
}

/// A watch that delivers late, and breaks some time after its connection was cut.
struct SlowWatch {
    watch: Box<dyn Watch>,
    link: Arc<Link>,
    store: SharedStore,
}

#[async_trait]
impl Watch for SlowWatch {
    async fn next(&mut self) -> Result<Option<Batch>> {
        let batch = tokio::select! {
            biased;
            () = self.link.until(|now| now.cut) => {
                sleep(millis(1..15_000)).await;
                Err(out_of_reach())
            }
            batch = self.watch.next() => {
                let slow = self.store.stats().storm && fastrand::u8(..10) == 0;
                sleep(millis(1..if slow { 8_000 } else { 30 })).await;
                batch
            }
        };
        self.link.running().await;
        batch
    }
}
