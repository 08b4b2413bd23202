//! Waits for a changed network config that the running network can be rebuilt from.
//!
//! A running network is not stopped for a config from which no network can be built here. Such a
//! config is validated repeatedly, because no event may report that the obstacle is gone. The store
//! is watched as usual meanwhile.

use std::pin::pin;
use std::time::Duration;

use flannel_api::RefusedConfig;
use flannel_core::{Config, Subnet, SubnetManager};
use tokio::sync::watch;
use tokio::time::sleep;

use super::Ended;
use crate::error::Error;
use crate::observe::Observer;
use crate::run::refusals::Refused;

/// The first pause before a config that does not fit this node is validated again. Each pause is
/// twice the one before.
const SECOND_THOUGHT: Duration = Duration::from_secs(1);
/// The longest pause, so that a config is followed within seconds once it can be. Validation reads
/// the kernel's routes.
const LONGEST: Duration = Duration::from_secs(10);

/// Follows the network config of the store.
pub(crate) struct ConfigController<'a, V> {
    pub(crate) subnets: &'a dyn SubnetManager,
    /// The config of the running network.
    pub(crate) used: &'a Config,
    /// That config comes from the cache. Any config may then replace it. Otherwise the new config
    /// must have the same pod networks, because pods do not survive another pod network.
    pub(crate) cached: bool,
    /// The config of the store, if the running network was not built from it.
    pub(crate) refused: Option<Refused>,
    /// Checks whether a network can be built from a config.
    pub(crate) validate: V,
    pub(crate) observer: &'a Observer,
    /// Gets the exclusions from masquerading, which need no other network.
    pub(crate) excluded: watch::Sender<Vec<Subnet>>,
}

impl<V: AsyncFn(&Config) -> Result<(), Error>> ConfigController<'_, V> {
    /// Runs until there is a config with which the running network must be rebuilt.
    pub(crate) async fn run(self) -> Ended {
        self.until_changed().await.into()
    }

    async fn until_changed(mut self) -> Result<String, Error> {
        let mut reloads = self.observer.reloads();
        let mut followed = Followed { seen: self.used.clone(), refusal: None };
        let mut pause = SECOND_THOUGHT;
        if let Some(Refused { config, reason }) = self.refused.take() {
            self.refuse(&mut followed, &config, reason);
            followed.seen = config;
            // Its devices may have been made, and have failed.
            pause = LONGEST;
        }
        loop {
            let now = self.next(&mut followed, pause, &mut reloads).await?;
            pause = SECOND_THOUGHT;
            let Some(now) = now else { continue };
            followed.refusal = None;
            if self.replaces(&mut followed, &now).await {
                return Ok("the network config has changed".to_owned());
            }
            followed.seen = now;
        }
    }

    /// Waits for a config to look at: a changed one, or a refused one that fits now. `None` if the
    /// store must be watched anew.
    async fn next(
        &self,
        followed: &mut Followed,
        mut pause: Duration,
        reloads: &mut watch::Receiver<()>,
    ) -> Result<Option<Config>, Error> {
        let seen = followed.seen.clone();
        // One watch for all validations, because it remembers the logged reasons and the pauses.
        let mut changed = pin!(self.subnets.config_changed(&seen));
        loop {
            tokio::select! {
                now = &mut changed => return Ok(Some(now?)),
                // A new watch reads the config at once. A refused config is validated again if it
                // still holds. The sender lives as long as the observer.
                _ = reloads.changed() => {
                    let again = followed.refusal.is_none() || self.holds(&seen).await;
                    return Ok(again.then(|| seen.clone()));
                }
                fits = self.fits_after(pause, &seen), if followed.refusal.is_some() => match fits {
                    Ok(true) => return Ok(Some(seen.clone())),
                    Ok(false) => (),
                    Err(error) => self.refuse(followed, &seen, error.to_string()),
                },
            }
            pause = LONGEST.min(2 * pause);
        }
    }

    /// Whether a network can be built from a refused config after a pause, and the store still
    /// holds that config.
    async fn fits_after(&self, pause: Duration, config: &Config) -> Result<bool, Error> {
        sleep(pause).await;
        (self.validate)(config).await?;
        Ok(self.holds(config).await)
    }

    /// Whether the network must be rebuilt with this config of the store. Notes why not.
    async fn replaces(&self, followed: &mut Followed, now: &Config) -> bool {
        let excluded = &now.masquerade_exclude;
        let is_other = *now != Config { masquerade_exclude: excluded.clone(), ..self.used.clone() };
        if is_other && let Err(error) = (self.validate)(now).await {
            self.refuse(followed, now, error.to_string());
            self.observer.note(|facts| facts.waiting_config = None);
            return false;
        }
        self.observer.note(|facts| facts.refused_config = None);
        let waits = now.networks != self.used.networks && !self.cached;
        self.observer.note(|facts| facts.waiting_config = waits.then(|| now.clone()));
        if waits {
            let networks: Vec<_> = now.pod_networks().collect();
            tracing::warn!(
                ?networks,
                "the network config has other networks now, which are used from the next start on"
            );
        }
        if !is_other {
            self.exclude(excluded);
        }
        is_other && !waits
    }

    /// Passes on the exclusions from masquerading, if they have changed.
    fn exclude(&self, excluded: &[Subnet]) {
        let is_new = self.excluded.send_if_modified(|used| {
            let is_new = used != excluded;
            excluded.clone_into(used);
            is_new
        });
        if is_new {
            tracing::info!(?excluded, "the network config has other exclusions from masquerading");
        }
    }

    /// Reports that a config cannot be used, unless the log has this reason already.
    fn refuse(&self, followed: &mut Followed, config: &Config, error: String) {
        if followed.refusal.as_ref() == Some(&error) {
            return;
        }
        tracing::warn!(%error, "the network config was changed, but cannot be used and is ignored");
        let backend = config.backend.kind.clone();
        let report = RefusedConfig { backend, reason: error.clone() };
        self.observer.note(|facts| facts.refused_config = Some(report));
        followed.refusal = Some(error);
    }

    /// Whether the store still holds the config. It may hold an invalid one, which is not reported.
    /// After it acquired a lease, a manager returns the lease's networks instead of the store's, so
    /// networks are not compared.
    async fn holds(&self, config: &Config) -> bool {
        let networks = self.used.networks;
        let stored = self.subnets.network_config().await;
        let stored = stored.map(|stored| Config { networks, ..stored });
        stored.is_ok_and(|stored| stored == Config { networks, ..config.clone() })
    }
}

/// The config of the store, as far as it is known.
struct Followed {
    seen: Config,
    /// Why it is not used; `None` if it is used, or waits for a restart.
    refusal: Option<String>,
}

#[cfg(test)]
mod tests {
    use std::cell::{Cell, RefCell};
    use std::io::Write;
    use std::sync::{Arc, Mutex};

    use flannel_core::Error as Cause;
    use flannel_subnet::{HolderId, Identity, LocalManager, MemoryRegistry};

    use super::*;

    const USED: &str = r#"{"Network":"10.1.0.0/16","Backend":{"Type":"vxlan"}}"#;
    const UNFIT: &str = r#"{"Network":"10.1.0.0/16","Backend":{"Type":"vxlan","MTU":9000}}"#;
    const HOUR: Duration = Duration::from_secs(3600);

    /// The captured log.
    #[derive(Debug, Clone, Default)]
    struct LogText(Arc<Mutex<Vec<u8>>>);

    impl LogText {
        /// Captures this test's log. Every test that logs one of these lines must capture it,
        /// because tracing caches whether a line is enabled.
        fn capture() -> (Self, tracing::subscriber::DefaultGuard) {
            let text = Self::default();
            let sink = text.clone();
            let log = tracing_subscriber::fmt().with_writer(move || sink.clone()).finish();
            (text, tracing::subscriber::set_default(log))
        }

        fn count(&self, text: &str) -> usize {
            String::from_utf8_lossy(&self.0.lock().unwrap()).matches(text).count()
        }
    }

    impl Write for LogText {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    /// A store, the number of validations, and the obstacle that a validation finds.
    struct Fixture {
        registry: MemoryRegistry,
        manager: LocalManager,
        observer: Observer,
        validations: Cell<u32>,
        obstacle: RefCell<Option<String>>,
        excluded: watch::Sender<Vec<Subnet>>,
    }

    impl Fixture {
        fn new() -> Self {
            let registry = MemoryRegistry::with_config(USED);
            let identity = Identity {
                holder: HolderId::random(),
                previous: None,
                local_addresses: Vec::new(),
            };
            let manager = LocalManager::new(Arc::new(registry.clone()), identity);
            Self {
                registry,
                manager,
                observer: Observer::default(),
                validations: Cell::new(0),
                obstacle: RefCell::new(Some("too large".to_owned())),
                excluded: watch::Sender::default(),
            }
        }

        async fn until_changed(&self) -> Result<String, Error> {
            let validate = async |_: &Config| {
                self.validations.set(self.validations.get() + 1);
                let backend = "vxlan".to_owned();
                match &*self.obstacle.borrow() {
                    Some(reason) => Err(Cause::Backend { backend, reason: reason.clone() }.into()),
                    None => Ok(()),
                }
            };
            let used = Config::parse(USED).unwrap();
            let controller = ConfigController {
                subnets: &self.manager,
                used: &used,
                cached: false,
                refused: None,
                validate,
                observer: &self.observer,
                excluded: self.excluded.clone(),
            };
            controller.until_changed().await
        }

        /// Requests to the store and watches of it.
        fn requests(&self) -> u64 {
            self.manager.store_status().calls.values().map(|call| call.sent).sum()
        }

        /// Waits for an hour. The network must still run afterwards.
        async fn runs_for_an_hour(
            &self,
            running: &mut (impl Future<Output = Result<String, Error>> + Unpin),
        ) {
            tokio::select! {
                ended = running => panic!("{ended:?}"),
                () = sleep(HOUR) => (),
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_refused_config_is_logged_once_and_causes_no_requests() {
        let (log, _log) = LogText::capture();
        let fixture = Fixture::new();
        let mut running = pin!(fixture.until_changed());
        fixture.runs_for_an_hour(&mut running).await;
        assert_eq!(fixture.validations.get(), 0);

        fixture.registry.set_config(Some(UNFIT));
        tokio::select! {
            ended = &mut running => panic!("{ended:?}"),
            // The config is not validated again yet.
            () = sleep(SECOND_THOUGHT / 2) => (),
        }
        let requests = fixture.requests();
        let mut news = fixture.observer.changes();
        assert_eq!(fixture.validations.get(), 1);
        tokio::select! {
            ended = &mut running => panic!("{ended:?}"),
            () = news.next() => panic!("the observer got the same reason again"),
            () = sleep(HOUR) => (),
        }
        assert_eq!(fixture.requests(), requests, "no request was sent");
        // After 1, 2, 4 and 8 s, then every 10.
        assert_eq!(fixture.validations.get(), 1 + 4 + (3600 - 15) / 10);
        assert_eq!(log.count("cannot be used and is ignored"), 1);
        // Another reason is logged.
        *fixture.obstacle.borrow_mut() = Some("no address".to_owned());
        fixture.runs_for_an_hour(&mut running).await;
        assert_eq!(log.count("cannot be used and is ignored"), 2);
        assert!(
            fixture.observer.snapshot().facts.refused_config.unwrap().reason.contains("no address")
        );

        // A config that would fit now is used only if the store still holds it.
        fixture.registry.set_config(Some("{"));
        fixture.runs_for_an_hour(&mut running).await;
        *fixture.obstacle.borrow_mut() = None;
        fixture.runs_for_an_hour(&mut running).await;
        assert_eq!(log.count("is wrong and not used"), 1);
        // A reload gets an answer, and the network goes on.
        fixture.observer.look_again();
        fixture.runs_for_an_hour(&mut running).await;
        assert_eq!(log.count("is wrong and not used"), 2);
        assert!(fixture.observer.snapshot().facts.refused_config.is_some());
        fixture.registry.set_config(Some(UNFIT));
        let reason = tokio::time::timeout(2 * LONGEST, running).await.unwrap().unwrap();
        assert_eq!(reason, "the network config has changed");
        assert_eq!(fixture.observer.snapshot().facts.refused_config, None);
    }

    #[tokio::test(start_paused = true)]
    async fn other_exclusions_need_no_other_network() {
        let (_text, _log) = LogText::capture();
        let fixture = Fixture::new();
        let mut running = pin!(fixture.until_changed());
        let with = |config: &str, list: &str| {
            Some(config.replace('{', &format!("{{\"IPMasqExclude\":{list},")).replacen(
                &format!("{{\"IPMasqExclude\":{list},\"Type"),
                "{\"Type",
                1,
            ))
        };
        for list in ["[\"192.0.2.0/24\"]", "[\"192.0.2.0/24\",\"fd00::/8\"]", "[]"] {
            fixture.registry.set_config(with(USED, list).as_deref());
            fixture.runs_for_an_hour(&mut running).await;
            let used: Vec<_> =
                fixture.excluded.borrow().iter().map(|subnet| format!("{subnet:?}")).collect();
            assert_eq!(used.len(), list.matches('/').count(), "{list}: {used:?}");
        }
        assert_eq!(fixture.validations.get(), 0, "nothing else has changed");
        // They do not change with a config that is not used.
        fixture.registry.set_config(with(UNFIT, "[\"192.0.2.0/24\"]").as_deref());
        fixture.runs_for_an_hour(&mut running).await;
        assert!(fixture.excluded.borrow().is_empty());
        assert!(fixture.observer.snapshot().facts.refused_config.is_some());
    }

    #[tokio::test(start_paused = true)]
    async fn a_config_with_other_networks_waits_for_a_restart() {
        let (_text, _log) = LogText::capture();
        let fixture = Fixture::new();
        let mut running = pin!(fixture.until_changed());
        fixture.registry.set_config(Some(&UNFIT.replace("10.1", "10.2")));
        fixture.runs_for_an_hour(&mut running).await;
        assert_eq!(fixture.observer.snapshot().facts.waiting_config, None);
        assert!(fixture.observer.snapshot().facts.refused_config.is_some());
        *fixture.obstacle.borrow_mut() = None;
        fixture.runs_for_an_hour(&mut running).await;
        let snapshot = fixture.observer.snapshot();
        assert!(snapshot.facts.waiting_config.is_some() && snapshot.facts.refused_config.is_none());
        let validations = fixture.validations.get();
        fixture.runs_for_an_hour(&mut running).await;
        assert_eq!(
            fixture.validations.get(),
            validations,
            "a config that fits is not validated again"
        );
        fixture.registry.set_config(Some(USED));
        fixture.runs_for_an_hour(&mut running).await;
        assert_eq!(fixture.observer.snapshot().facts.waiting_config, None);
    }
}
