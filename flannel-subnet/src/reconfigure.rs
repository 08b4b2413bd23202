//! The network config as it changes: what is wrong with it, that it is another one, and what stays all the same.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use flannel_core::{Config, Error, Result};

use crate::backoff::Backoff;
use crate::registry::{ConfigText, Registry};

/// What a manager knows of the store's network config.
#[derive(Debug, Default)]
pub(crate) struct Configs {
    /// What was last given out: what is built from it takes its lease from nothing else. `None` before that, and if it came
    /// from a cache: the store knows better as soon as it answers.
    given: Mutex<Option<Config>>,
    /// What the lease was taken from.
    used: Mutex<Option<Config>>,
    /// What is wrong with the store's config.
    wrong: Mutex<Option<String>>,
}

impl Configs {
    /// Parses a config, and notes whether it is wrong. Once a lease was [taken](Self::used_for_lease), the networks stay what
    /// they are for as long as the manager lives: pods do not survive others.
    pub(crate) fn read(&self, text: &ConfigText) -> Result<Config> {
        let mut config = self.parse(text)?;
        if let Some(used) = self.used().as_ref() {
            config.networks = used.networks;
        }
        Ok(config)
    }

    /// Gives out what was read; the second part is true if it comes from a cache.
    pub(crate) fn give(&self, (config, cached): (Config, bool)) -> Config {
        *self.given.lock().unwrap_or_else(PoisonError::into_inner) =
            (!cached).then(|| config.clone());
        config
    }

    /// What a lease is to be taken from: what was last given out, or else what `read` finds. Only the networks of a config
    /// matter to it, and those stay what they are: it does not take a right config to win the lease back. The second part
    /// is true if it comes from a cache.
    pub(crate) async fn for_lease(
        &self,
        read: impl Future<Output = Result<(Config, bool)>>,
    ) -> Result<(Config, bool)> {
        let given = self.given.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some(given) = given {
            return Ok((given, false));
        }
        match (read.await, self.used().as_ref()) {
            (Err(Error::Config { .. } | Error::NoConfig { .. }), Some(used)) => {
                Ok((used.clone(), false))
            }
            (read, _) => read,
        }
    }

    /// A lease was taken from this config.
    pub(crate) fn used_for_lease(&self, config: Config) {
        *self.used() = Some(config);
    }

    /// What is wrong with the store's config now.
    pub(crate) fn wrong(&self) -> Option<String> {
        self.wrong.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The next valid config of the store's that is not `seen`; `note` gets each valid one.
    pub(crate) async fn another(
        &self,
        store: &dyn Registry,
        seen: &Config,
        note: impl Fn(&ConfigText),
    ) -> Result<Config> {
        let mut backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(60));
        let mut wrong = None;
        loop {
            let text = match store.config().await {
                Ok(text) => Some(text),
                Err(error @ Error::NoConfig { .. }) => {
                    self.note_wrong(Some(&error));
                    None
                }
                Err(_) => {
                    tokio::time::sleep(backoff.pause()).await;
                    continue;
                }
            };
            match text.as_ref().map(|text| (text, self.parse(text))) {
                Some((text, Ok(config))) => {
                    note(text);
                    if config != *seen {
                        return Ok(config);
                    }
                }
                Some((text, Err(error))) if wrong.as_ref() != Some(text) => {
                    tracing::warn!(
                        "the network config was changed, but is wrong and not used: {error}"
                    );
                    wrong = Some(text.clone());
                }
                _ => (),
            }
            match store.config_changed(text).await {
                Ok(()) => backoff.reset(),
                Err(_) => tokio::time::sleep(backoff.pause()).await,
            }
        }
    }

    fn parse(&self, text: &ConfigText) -> Result<Config> {
        let parsed = Config::parse(&text.text)
            .map_err(|source| Error::Config { location: text.location.clone(), source });
        self.note_wrong(parsed.as_ref().err());
        parsed
    }

    fn note_wrong(&self, error: Option<&Error>) {
        *self.wrong.lock().unwrap_or_else(PoisonError::into_inner) = error.map(ToString::to_string);
    }

    fn used(&self) -> MutexGuard<'_, Option<Config>> {
        self.used.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
