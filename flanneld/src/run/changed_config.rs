//! Waits for a changed network config that the running network can be rebuilt from.
//!
//! A running network is not stopped for a config from which no network can be built here. Such a
//! config is validated repeatedly, because no event may report that the obstacle is gone. The store
//! is watched as usual meanwhile.

use std::pin::pin;
use std::time::Duration;

use flannel_api::RefusedConfig;
use flannel_core::{Config, SubnetManager};
use tokio::time::sleep;

use super::refusals::Refused;
use crate::error::Error;
use crate::observe::Observer;

/// The first pause before a config that does not fit this node is validated again. Each pause is
/// twice the one before.
const SECOND_THOUGHT: Duration = Duration::from_secs(1);
/// The longest pause, so that a config is followed within seconds once it can be. Validation reads
/// the kernel's routes.
const LONGEST: Duration = Duration::from_secs(10);

/// Waits for a network config with which the running network must be rebuilt. Returns the reason.
/// If the config in use comes from the cache (`cached`), any config may replace it. Otherwise the
/// new config must have the same pod networks, because pods do not survive another pod network.
/// `refused` is the config of the store, if the running network was not built from it.
///
/// # Errors
/// The store refuses.
pub(crate) async fn to_apply(
    subnets: &dyn SubnetManager,
    (used, cached): (&Config, bool),
    before: Option<Refused>,
    validate: impl AsyncFn(&Config) -> Result<(), Error>,
    observer: &Observer,
) -> Result<String, Error> {
    let mut seen = used.clone();
    let mut refused: Option<String> = None;
    let mut reloads = observer.reloads();
    let refuse = |refused: &mut Option<String>, config: &Config, error: String| {
        if refused.as_ref() != Some(&error) {
            tracing::warn!(
                %error,
                "the network config was changed, but cannot be used and is ignored"
            );
            observer.note(|facts| facts.refused_config = Some(note(config, &error)));
            *refused = Some(error);
        }
    };
    if let Some(Refused { config, reason }) = before {
        refuse(&mut refused, &config, reason);
        seen = config;
    }
    // Its devices may have been made, and have failed.
    let mut first_pause = if refused.is_some() { LONGEST } else { SECOND_THOUGHT };
    loop {
        let mut pause = std::mem::replace(&mut first_pause, SECOND_THOUGHT);
        let now = {
            // One watch for all validations, because it remembers the logged reasons and the
            // pauses.
            let mut changed = pin!(subnets.config_changed(&seen));
            loop {
                let thought = async {
                    sleep(pause).await;
                    validate(&seen).await?;
                    Ok::<_, Error>(holds(subnets, &seen, used).await)
                };
                tokio::select! {
                    now = &mut changed => break Some(now?),
                    // A new watch reads the config at once. A refused config is validated again if
                    // it still holds. The sender lives as long as the observer.
                    _ = reloads.changed() => {
                        let again = refused.is_none() || holds(subnets, &seen, used).await;
                        break again.then(|| seen.clone());
                    }
                    fits = thought, if refused.is_some() => match fits {
                        Ok(true) => break Some(seen.clone()),
                        Ok(false) => (),
                        Err(error) => refuse(&mut refused, &seen, error.to_string()),
                    },
                }
                pause = LONGEST.min(2 * pause);
            }
        };
        let Some(now) = now else { continue };
        refused = None;
        if now != *used
            && let Err(error) = validate(&now).await
        {
            refuse(&mut refused, &now, error.to_string());
            observer.note(|facts| facts.waiting_config = None);
        } else {
            observer.note(|facts| facts.refused_config = None);
            let waits = now.networks != used.networks && !cached;
            observer.note(|facts| facts.waiting_config = waits.then(|| now.clone()));
            if waits {
                let networks: Vec<_> = now.pod_networks().collect();
                tracing::warn!(
                    ?networks,
                    "the network config has other networks now, which are used from the next start \
                     on"
                );
            } else if now != *used {
                return Ok("the network config has changed".to_owned());
            }
        }
        seen = now;
    }
}

fn note(config: &Config, reason: &str) -> RefusedConfig {
    RefusedConfig { backend: config.backend.kind.clone(), reason: reason.to_owned() }
}

/// Whether the store still holds the config. It may hold an invalid one, which is not reported.
/// After it acquired a lease, a manager returns the lease's networks instead of the store's, so
/// networks are not compared.
async fn holds(subnets: &dyn SubnetManager, config: &Config, used: &Config) -> bool {
    let stored = subnets.network_config().await;
    let stored = stored.map(|stored| Config { networks: used.networks, ..stored });
    stored.is_ok_and(|stored| stored == Config { networks: used.networks, ..config.clone() })
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
    struct Scene {
        registry: MemoryRegistry,
        manager: LocalManager,
        observer: Observer,
        validations: Cell<u32>,
        obstacle: RefCell<Option<String>>,
    }

    impl Scene {
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
            }
        }

        async fn to_apply(&self) -> Result<String, Error> {
            let validate = async |_: &Config| {
                self.validations.set(self.validations.get() + 1);
                let backend = "vxlan".to_owned();
                match &*self.obstacle.borrow() {
                    Some(reason) => Err(Cause::Backend { backend, reason: reason.clone() }.into()),
                    None => Ok(()),
                }
            };
            let used = Config::parse(USED).unwrap();
            to_apply(&self.manager, (&used, false), None, validate, &self.observer).await
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
        let scene = Scene::new();
        let mut running = pin!(scene.to_apply());
        scene.runs_for_an_hour(&mut running).await;
        assert_eq!(scene.validations.get(), 0);

        scene.registry.set_config(Some(UNFIT));
        tokio::select! {
            ended = &mut running => panic!("{ended:?}"),
            // Before it is validated again.
            () = sleep(SECOND_THOUGHT / 2) => (),
        }
        let (requests, mut news) = (scene.requests(), scene.observer.changes());
        assert_eq!(scene.validations.get(), 1);
        tokio::select! {
            ended = &mut running => panic!("{ended:?}"),
            () = news.next() => panic!("the observer got the same reason again"),
            () = sleep(HOUR) => (),
        }
        assert_eq!(scene.requests(), requests, "no request was sent");
        // After 1, 2, 4 and 8 s, then every 10.
        assert_eq!(scene.validations.get(), 1 + 4 + (3600 - 15) / 10);
        assert_eq!(log.count("cannot be used and is ignored"), 1);
        // Another reason is logged.
        *scene.obstacle.borrow_mut() = Some("no address".to_owned());
        scene.runs_for_an_hour(&mut running).await;
        assert_eq!(log.count("cannot be used and is ignored"), 2);
        assert!(
            scene.observer.snapshot().facts.refused_config.unwrap().reason.contains("no address")
        );

        // A config that would fit now is used only if the store still holds it.
        scene.registry.set_config(Some("{"));
        scene.runs_for_an_hour(&mut running).await;
        *scene.obstacle.borrow_mut() = None;
        scene.runs_for_an_hour(&mut running).await;
        assert_eq!(log.count("is wrong and not used"), 1);
        // A reload gets an answer, and the network goes on.
        scene.observer.look_again();
        scene.runs_for_an_hour(&mut running).await;
        assert_eq!(log.count("is wrong and not used"), 2);
        assert!(scene.observer.snapshot().facts.refused_config.is_some());
        scene.registry.set_config(Some(UNFIT));
        let reason = tokio::time::timeout(2 * LONGEST, running).await.unwrap().unwrap();
        assert_eq!(reason, "the network config has changed");
        assert_eq!(scene.observer.snapshot().facts.refused_config, None);
    }

    #[tokio::test(start_paused = true)]
    async fn a_config_with_other_networks_waits_for_a_restart() {
        let (_text, _log) = LogText::capture();
        let scene = Scene::new();
        let mut running = pin!(scene.to_apply());
        scene.registry.set_config(Some(&UNFIT.replace("10.1", "10.2")));
        scene.runs_for_an_hour(&mut running).await;
        assert_eq!(scene.observer.snapshot().facts.waiting_config, None);
        assert!(scene.observer.snapshot().facts.refused_config.is_some());
        *scene.obstacle.borrow_mut() = None;
        scene.runs_for_an_hour(&mut running).await;
        let snapshot = scene.observer.snapshot();
        assert!(snapshot.facts.waiting_config.is_some() && snapshot.facts.refused_config.is_none());
        let validations = scene.validations.get();
        scene.runs_for_an_hour(&mut running).await;
        assert_eq!(
            scene.validations.get(),
            validations,
            "a config that fits is not validated again"
        );
        scene.registry.set_config(Some(USED));
        scene.runs_for_an_hour(&mut running).await;
        assert_eq!(scene.observer.snapshot().facts.waiting_config, None);
    }
}
