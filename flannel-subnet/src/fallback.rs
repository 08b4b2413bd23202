//! Going on without the store: what is kept on disk while it is there, and used while it is not.
//!
//! The cache answers only until the store has answered for the first time. From then on
//! the store's word counts, and what is known of it.

use std::future::Future;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use flannel_core::lease::{LeaseAttrs, Origin, Revision, View};
use flannel_core::subnet::LeaseEnd;
use flannel_core::{Error, Lease, Result};
use tokio::sync::{Notify, watch};

use crate::cache::{Cache, Saved};
use crate::clock::Clock;
use crate::holding::{HeldLease, Holding, LeaseTerm};
use crate::manager::LocalManager;
use crate::registry::{ConfigText, HolderId, Registry};
use crate::task::Task;

/// How long the store has to give its first answer before the cache answers instead.
const PATIENCE: Duration = Duration::from_millis(25);

/// The cache is written at once, but then not again for so long.
const PAUSE: Duration = Duration::from_secs(5);

/// The cache of one manager.
#[derive(Debug)]
pub(crate) struct Fallback {
    cache: Cache,
    store: String,
    holder: HolderId,
    loaded: Option<Saved>,
    /// The store was given its chance to answer at once, and did not.
    absent: AtomicBool,
    /// It was said that the config comes from the cache.
    said: AtomicBool,
    config: Mutex<Option<ConfigText>>,
    saving: Mutex<()>,
    config_changed: Notify,
}

/// Everything that is kept of a running manager.
#[derive(Debug)]
struct CacheWriter {
    fallback: Arc<Fallback>,
    views: watch::Receiver<View>,
    holding: Arc<Holding>,
    clock: Arc<dyn Clock>,
}

impl LocalManager {
    /// Keeps the last good set of leases in this file, and starts from it while the store is out of
    /// reach: the view begins with it, marked [`Origin::Cached`]; config, hints and the own lease
    /// come from it until the store has answered once, the lease only while its end lies ahead by
    /// wall clock; afterwards it is a hint ([`Hints::lapsed`](flannel_core::subnet::Hints::lapsed)).
    ///
    /// The file is written when leases or the own lease have changed, at most every 5 seconds. A
    /// file that is damaged, or of another store, is ignored with a warning that says why.
    ///
    /// # Blocking
    /// Reads the file.
    #[must_use]
    pub fn with_cache(self, path: impl Into<PathBuf>) -> Self {
        let (cache, store) = (Cache::open(path), self.store.to_string());
        let loaded = cache.load_from(&store);
        let config = Mutex::new(loaded.as_ref().and_then(|saved| saved.config.clone()));
        let fallback = Fallback {
            cache,
            store,
            holder: self.identity.holder,
            loaded,
            absent: AtomicBool::new(false),
            said: AtomicBool::new(false),
            config,
            saving: Mutex::default(),
            config_changed: Notify::new(),
        };
        Self { fallback: Some(Arc::new(fallback)), ..self }
    }

    /// What the first view is.
    pub(crate) fn first_view(&self) -> View {
        let loaded = self.fallback.as_ref().and_then(|fallback| fallback.loaded.as_ref());
        loaded.map_or_else(View::unknown, Saved::view)
    }

    /// What the cache holds, as long as the store has not answered yet.
    pub(crate) fn cached(&self) -> Option<&Saved> {
        let loaded = self.fallback.as_ref()?.loaded.as_ref();
        loaded.filter(|_| self.store.status().confirmed.is_none())
    }

    /// The answer, or the failure, of a store that has to answer at once, since the cache can do so
    /// instead.
    pub(crate) async fn promptly<T>(
        &self,
        request: impl Future<Output = Result<T>> + Send,
    ) -> Result<T> {
        let absent = self.fallback.as_ref().map(|fallback| &fallback.absent);
        let patience = match absent.is_some_and(|absent| absent.load(Ordering::Relaxed)) {
            true => Duration::ZERO,
            false => PATIENCE,
        };
        let result = tokio::time::timeout(patience, request).await.unwrap_or_else(|_| {
            let source = "no answer yet, going on from the cache".into();
            Err(Error::Store { store: self.store.to_string(), source })
        });
        if let (Err(error), Some(absent)) = (&result, absent)
            && unanswered(error)
        {
            absent.store(true, Ordering::Relaxed);
        }
        result
    }

    /// The config from the store, and as long as that has never answered, from the cache.
    /// The second part says whether it comes from the cache.
    pub(crate) async fn config_text(&self) -> Result<(ConfigText, bool)> {
        let Some(cached) = self.cached().and_then(|saved| saved.config.clone()) else {
            return Ok((self.store.config().await?, false));
        };
        match self.promptly(self.store.config()).await {
            Err(error) if unanswered(&error) => {
                if self
                    .fallback
                    .as_ref()
                    .is_some_and(|fallback| !fallback.said.swap(true, Ordering::Relaxed))
                {
                    tracing::warn!("the network config comes from the cache: {error}");
                }
                Ok((cached, true))
            }
            answer => answer.map(|config| (config, false)),
        }
    }

    /// Our own lease as the cache has it, if it is still ours.
    pub(crate) fn cached_lease(&self) -> Option<Lease> {
        self.cached()?.own(self.identity.holder, self.clock.wall()).cloned()
    }

    /// Our own lease as the cache has it, be it still ours or not.
    pub(crate) fn remembered_lease(&self) -> Option<Lease> {
        let (lease, holder) = self.cached()?.own.as_ref()?;
        (*holder == self.identity.holder).then(|| lease.clone())
    }

    /// Takes up the lease from the cache. What it was published with is put right when the store is
    /// back.
    pub(crate) fn settle_cached(&self, lease: &Lease, attrs: &LeaseAttrs, error: &Error) -> Lease {
        let (boottime, wall) = (self.clock.boottime(), self.clock.wall());
        let term = lease.expires.map(|end| LeaseTerm {
            sent: boottime,
            ttl: end.duration_since(wall).unwrap_or_default(),
        });
        tracing::warn!(
            subnets = %lease.subnets,
            "going on with the lease from the cache, which is still ours: {error}"
        );
        // With other attributes than before, whatever the store shows then is in doubt.
        let revision = if lease.attrs == *attrs { lease.revision } else { Revision::default() };
        let held_lease = HeldLease { subnets: lease.subnets, attrs: attrs.clone(), revision, term };
        self.holding.set(held_lease);
        Lease { attrs: attrs.clone(), ..lease.clone() }
    }

    /// This is the config now: the cache is to say so soon.
    pub(crate) fn note_config(&self, config: &ConfigText) {
        if let Some(fallback) = &self.fallback {
            *fallback.config.lock().unwrap_or_else(PoisonError::into_inner) = Some(config.clone());
            fallback.config_changed.notify_one();
        }
    }

    /// Our lease has ended, and no restart may find it in the cache.
    pub(crate) fn forget(&self, end: &LeaseEnd) {
        self.holding.end(end.clone());
        if let Some(writer) = self.writer(self.views()) {
            writer.save();
        }
    }

    fn writer(&self, views: watch::Receiver<View>) -> Option<CacheWriter> {
        let fallback = Arc::clone(self.fallback.as_ref()?);
        let (holding, clock) = (Arc::clone(&self.holding), Arc::clone(&self.clock));
        Some(CacheWriter { fallback, views, holding, clock })
    }

    /// Writes the cache whenever there is something new.
    pub(crate) fn keep(&self, views: watch::Receiver<View>) -> Option<Task> {
        let writer = Arc::new(self.writer(views)?);
        Some(Task::spawn(writer.run()))
    }
}

/// The store has not said anything about what it was asked: it is out of reach, or refuses to speak
/// with us.
pub(crate) fn unanswered(error: &Error) -> bool {
    matches!(error, Error::Store { .. } | Error::Refused { .. })
}

impl CacheWriter {
    async fn run(self: Arc<Self>) {
        let (mut views, mut lease) = (self.views.clone(), self.holding.subscribe());
        // A view from the cache need not be written there.
        let live = |view: &View| matches!(view.origin, Origin::Live { .. });
        if views.wait_for(live).await.is_err() {
            return;
        }
        loop {
            let writer = Arc::clone(&self);
            // It fails only if the runtime ends.
            let _ = tokio::task::spawn_blocking(move || writer.save()).await;
            tokio::time::sleep(PAUSE).await;
            tokio::select! {
                changed = views.changed() => if changed.is_err() { return },
                () = self.fallback.config_changed.notified() => (),
                // The holding lives as long as this.
                _ = lease.changed() => (),
            }
        }
    }

    fn save(&self) {
        let Fallback { saving, cache, store, holder, loaded, config, .. } = &*self.fallback;
        // Whoever writes last must know most.
        let _saving = saving.lock().unwrap_or_else(PoisonError::into_inner);
        let view = self.views.borrow().clone();
        let now = self.clock.wall();
        let written = match view.origin {
            Origin::Live { .. } => now,
            Origin::Cached { written } => {
                match written.or_else(|| loaded.as_ref().map(|saved| saved.written)) {
                    Some(written) => written,
                    None => return,
                }
            }
        };
        let own = self.holding.get().map(|held_lease| {
            let since = view
                .leases
                .get(&held_lease.subnets)
                .map_or(held_lease.revision, |lease| lease.since);
            let left = |term: LeaseTerm| term.end().saturating_sub(self.clock.boottime());
            let expires = held_lease.term.map(|term| now + left(term));
            let HeldLease { subnets, attrs, revision, .. } = held_lease;
            (Lease { subnets, attrs, expires, since, revision }, *holder)
        });
        let config = config.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let saved = Saved { store: store.clone(), written, leases: view.leases, config, own };
        if let Err(error) = cache.save(&saved) {
            tracing::warn!("the cache could not be written: {error}");
        }
    }
}
