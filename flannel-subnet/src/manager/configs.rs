//! The network config of a manager while the config in the store changes.

use std::sync::Mutex;
use std::time::Duration;

use flannel_core::{Config, Error, Result};

use crate::backoff::Backoff;
use crate::registry::{ConfigText, Registry};
use crate::runtime::lock;

/// The network configs that a manager has read and used.
#[derive(Debug, Default)]
pub(super) struct Configs {
    /// The config that was last handed out, unless it came from a cache. A network that is built
    /// from it takes its lease from the same config.
    handed_out: Mutex<Option<Config>>,
    /// The config that the lease was taken from.
    used: Mutex<Option<Config>>,
    /// What is wrong with the config in the store.
    wrong: Mutex<Option<String>>,
}

impl Configs {
    /// Parses a config, and notes whether it is wrong. After a lease was
    /// [taken](Self::used_for_lease), the networks stay as they are for the life of the manager:
    /// pods do not survive a change of them.
    pub(super) fn read(&self, text: &ConfigText) -> Result<Config> {
        let mut config = self.parse(text)?;
        if let Some(used) = &*lock(&self.used) {
            config.networks = used.networks;
        }
        Ok(config)
    }

    /// Notes a config that is handed out; the second part is true if it comes from a cache.
    pub(super) fn hand_out(&self, (config, cached): (Config, bool)) -> Config {
        *lock(&self.handed_out) = (!cached).then(|| config.clone());
        config
    }

    /// The config to take a lease from: the last one that was handed out, else the result of
    /// `read`. A lease depends only on the networks of a config, which stay as they are, so a wrong
    /// config does not prevent that a lease is won back. The second part is true if the config
    /// comes from a cache.
    pub(super) async fn for_lease(
        &self,
        read: impl Future<Output = Result<(Config, bool)>>,
    ) -> Result<(Config, bool)> {
        let handed_out = lock(&self.handed_out).clone();
        if let Some(config) = handed_out {
            return Ok((config, false));
        }
        match (read.await, &*lock(&self.used)) {
            (Err(Error::Config { .. } | Error::NoConfig { .. }), Some(used)) => {
                Ok((used.clone(), false))
            }
            (read, _) => read,
        }
    }

    /// A lease was taken from this config.
    pub(super) fn used_for_lease(&self, config: Config) {
        *lock(&self.used) = Some(config);
    }

    /// What is wrong with the config in the store.
    pub(super) fn wrong(&self) -> Option<String> {
        lock(&self.wrong).clone()
    }

    /// Waits for a valid config in the store that differs from `known`. `note` gets each valid one.
    pub(super) async fn next_valid(
        &self,
        store: &dyn Registry,
        known: &Config,
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
                    if config != *known {
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
        *lock(&self.wrong) = error.map(ToString::to_string);
    }
}
