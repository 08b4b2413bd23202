//! The cache of a manager: written while the store answers, and used until it has answered once.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use flannel_core::lease::{Origin, View};
use flannel_core::logging::LogRateLimiter;
use flannel_core::runtime::{Task, blocking, lock};
use flannel_core::{Config, Error, Lease, Result, Subnets};
use tokio::sync::{Notify, watch};

use super::configs::Fetched;
use super::holding::{HeldLease, Holding};
use super::lease_list::is_config_of;
use crate::clock::Clock;
use crate::files::cache::{BootTime, Cache, Saved, SavedEnd};
use crate::registry::{ConfigText, HolderId, Metered, Registry, unanswered};

/// The time limit for the store's first answer. The cache is used after it.
const PATIENCE: Duration = Duration::from_millis(25);

/// The pause after each write of the cache.
const PAUSE: Duration = Duration::from_secs(5);

/// The cache of one manager.
#[derive(Debug)]
pub(super) struct Fallback {
    store: Arc<Metered>,
    clock: Arc<dyn Clock>,
    holder: HolderId,
    /// `None` if the manager has no cache.
    cache: Option<Cache>,
    /// The content of the cache at the start.
    loaded: Option<Saved>,
    /// The time for the store's first answer is over.
    is_patience_over: AtomicBool,
    /// The log has a line that the config comes from the cache.
    is_config_logged: AtomicBool,
    /// The config to save.
    config: Mutex<Option<ConfigText>>,
    /// See [`Saved::lost`].
    lost: Mutex<Option<Subnets>>,
    /// The own lease that is being deleted. It is not saved again, although it is still held.
    forgotten: Mutex<Option<Subnets>>,
    config_changed: Notify,
    /// Held while the cache is written.
    saving: Mutex<()>,
    /// Log lines: the cache cannot be written.
    unwritten: Mutex<LogRateLimiter>,
}

impl Fallback {
    /// # Blocking
    /// Reads the file of the cache, if there is one.
    pub(super) fn new(
        store: &Arc<Metered>,
        clock: &Arc<dyn Clock>,
        holder: HolderId,
        cache: Option<Cache>,
    ) -> Self {
        let loaded = cache.as_ref().and_then(|cache| cache.load_from(&store.to_string()));
        Self {
            store: Arc::clone(store),
            clock: Arc::clone(clock),
            holder,
            cache,
            is_patience_over: AtomicBool::new(false),
            is_config_logged: AtomicBool::new(false),
            config: Mutex::new(loaded.as_ref().and_then(|saved| saved.config.clone())),
            lost: Mutex::new(loaded.as_ref().and_then(|saved| saved.lost)),
            loaded,
            forgotten: Mutex::default(),
            config_changed: Notify::new(),
            saving: Mutex::default(),
            unwritten: Mutex::default(),
        }
    }

    /// The first view of the manager.
    pub(super) fn first_view(&self) -> View {
        self.loaded.as_ref().map_or_else(View::unknown, Saved::view)
    }

    /// The content of the cache, until the store has answered.
    fn cached(&self) -> Option<&Saved> {
        self.loaded.as_ref().filter(|_| !self.store.has_answered())
    }

    /// The own lease from the cache and its end, if it has not ended.
    pub(super) fn own_lease_in_force(&self) -> Option<(Lease, SavedEnd)> {
        let saved = self.cached()?;
        Some((saved.own(self.holder)?.clone(), saved.own_end(&*self.clock)?))
    }

    /// The own lease from the cache, even if it has ended.
    pub(super) fn own_lease(&self) -> Option<Lease> {
        self.cached()?.own(self.holder).cloned()
    }

    /// Removes the own lease from the file if it has these subnets, and does not save it again
    /// until [`Self::remember_own`]. A failure is logged.
    pub(super) async fn forget_own(self: &Arc<Self>, subnets: &Subnets) {
        *lock(&self.forgotten) = Some(*subnets);
        let Some(cache) = self.cache.clone() else { return };
        let fallback = Arc::clone(self);
        let subnets = *subnets;
        self.blocking(move || {
            let _saving = lock(&fallback.saving);
            let Ok(saved) = cache.load() else { return };
            if saved.own.as_ref().is_some_and(|(lease, _)| lease.subnets == subnets) {
                fallback.replace(&Saved { own: None, own_end: None, ..saved });
            }
        })
        .await;
    }

    /// The store has confirmed that this node holds a lease.
    pub(super) fn remember_own(&self) {
        *lock(&self.forgotten) = None;
    }

    /// The result of a request to the store. Until the store has answered once, it must answer
    /// quickly, because the cache can be used instead.
    pub(super) async fn promptly<T>(
        &self,
        request: impl Future<Output = Result<T>> + Send,
    ) -> Result<T> {
        let is_over = self.is_patience_over.load(Ordering::Relaxed);
        let patience = if is_over { Duration::ZERO } else { PATIENCE };
        let result = tokio::time::timeout(patience, request).await.unwrap_or_else(|_| {
            let source = "no answer yet, continuing with the cache".into();
            Err(Error::Store { store: self.store.to_string(), source })
        });
        if result.as_ref().is_err_and(unanswered) {
            self.is_patience_over.store(true, Ordering::Relaxed);
        }
        result
    }

    /// The config from the store. Until the store has answered once, it may come from the cache.
    pub(super) async fn config_text(&self) -> Result<Fetched<ConfigText>> {
        let Some(cached) = self.cached().and_then(|saved| saved.config.clone()) else {
            return Ok(Fetched { value: self.store.config().await?, is_cached: false });
        };
        match self.promptly(self.store.config()).await {
            Err(error) if unanswered(&error) => {
                if !self.is_config_logged.swap(true, Ordering::Relaxed) {
                    tracing::warn!(%error, "the network config comes from the cache");
                }
                Ok(Fetched { value: cached, is_cached: true })
            }
            config => Ok(Fetched { value: config?, is_cached: false }),
        }
    }

    /// The config in the cache of an earlier run.
    pub(super) fn earlier_config(&self) -> Option<Config> {
        let saved = self.loaded.as_ref()?.config.as_ref()?;
        Config::parse(&saved.text).ok()
    }

    /// Notes the config, to be saved soon.
    pub(super) fn note_config(&self, config: &ConfigText) {
        *lock(&self.config) = Some(config.clone());
        self.config_changed.notify_one();
    }

    /// Notes the config that a lease was taken from, if the noted config has other pod networks.
    pub(super) fn note_config_of(&self, config: &Config, lease: &Subnets) {
        let noted = lock(&self.config).clone();
        if noted.as_ref().is_some_and(|noted| is_config_of(noted, lease)) {
            return;
        }
        let location = noted.map_or_else(|| self.store.to_string(), |noted| noted.location);
        self.note_config(&ConfigText { location, text: config.to_json() });
    }

    /// See [`Saved::lost`].
    pub(super) fn lost(&self) -> Option<Subnets> {
        *lock(&self.lost)
    }

    /// Notes the lease that another node with our public address took, to be saved with the end of
    /// the lease. Pass `None` when this node has a lease again.
    pub(super) fn note_lost(&self, subnets: Option<Subnets>) {
        *lock(&self.lost) = subnets;
    }

    /// Starts to write the cache whenever leases, the config or the own lease change.
    pub(super) fn start_writer(
        self: &Arc<Self>,
        views: watch::Receiver<View>,
        holding: &Arc<Holding>,
    ) -> Option<Task> {
        self.cache.as_ref()?;
        Some(Task::spawn(Arc::clone(self).write(views, Arc::clone(holding))))
    }

    async fn write(self: Arc<Self>, mut views: watch::Receiver<View>, holding: Arc<Holding>) {
        let mut own_lease = holding.subscribe();
        // It changes when the wall clock is set. The file has ends by wall clock.
        let mut ownership = holding.ownership();
        // A view from the cache need not be written to it.
        if views.wait_for(|view| matches!(view.origin, Origin::Live { .. })).await.is_err() {
            return;
        }
        loop {
            views.mark_unchanged();
            own_lease.mark_unchanged();
            ownership.mark_unchanged();
            let fallback = Arc::clone(&self);
            let latest_views = views.clone();
            let latest_holding = Arc::clone(&holding);
            self.blocking(move || fallback.save(&latest_views, &latest_holding)).await;
            tokio::time::sleep(PAUSE).await;
            tokio::select! {
                changed = views.changed() => if changed.is_err() { return },
                () = self.config_changed.notified() => (),
                // `holding` lives as long as this task.
                _ = own_lease.changed() => (),
                _ = ownership.changed() => (),
            }
        }
    }

    /// Writes the cache on another thread if that can take long.
    async fn blocking(&self, save: impl FnOnce() + Send + 'static) {
        if self.cache.as_ref().is_some_and(Cache::is_file) {
            blocking(save).await;
        } else {
            save();
        }
    }

    /// Writes the cache.
    pub(super) fn save(&self, views: &watch::Receiver<View>, holding: &Holding) {
        if self.cache.is_none() {
            return;
        }
        // Taken before the state is read, so that the last writer has the latest state.
        let _saving = lock(&self.saving);
        let view = views.borrow().clone();
        let now = self.clock.wall();
        let written = match view.origin {
            Origin::Live { .. } => Some(now),
            Origin::Cached { written } => {
                written.or_else(|| self.loaded.as_ref().map(|saved| saved.written))
            }
            // The age of these leases is not known.
            _ => None,
        };
        let Some(written) = written else { return };
        let forgotten = *lock(&self.forgotten);
        let held = holding.get().filter(|held| Some(held.subnets) != forgotten);
        let term = held.as_ref().and_then(|held| held.term);
        let own_end = term
            .filter(|term| term.wall_end.is_none())
            .and_then(|term| Some(BootTime { boot: self.clock.boot()?, time: term.end() }));
        let own = held.map(|HeldLease { subnets, attrs, revision, .. }| {
            let since = view.leases.get(&subnets).map_or(revision, |lease| lease.since);
            let expires = term.and_then(|term| term.expires(&*self.clock));
            (Lease { subnets, attrs, expires, since, revision }, self.holder)
        });
        self.replace(&Saved {
            store: self.store.to_string(),
            written,
            leases: view.leases,
            config: lock(&self.config).clone(),
            own,
            own_end,
            lost: self.lost(),
        });
    }

    /// Replaces the content of the cache. A failure is logged.
    fn replace(&self, saved: &Saved) {
        let Some(cache) = &self.cache else { return };
        if let Err(error) = cache.save(saved) {
            let text = error.to_string();
            if let Some(more) = lock(&self.unwritten).line(self.clock.boottime(), &text) {
                tracing::warn!(%error, more, "the cache cannot be written");
            }
        }
    }
}
