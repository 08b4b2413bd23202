//! The network config of a manager, while the config in the store changes.

use std::sync::Mutex;
use std::time::Duration;

use flannel_core::backoff::Backoff;
use flannel_core::runtime::lock;
use flannel_core::{Config, Error, Result};

use crate::registry::{ConfigText, Registry};

/// A value of the store, read from the store or from the cache.
#[derive(Debug, Clone)]
pub(super) struct Fetched<T> {
    pub(super) value: T,
    /// It comes from the cache.
    pub(super) is_cached: bool,
}

/// The network configs that a manager has read and used.
#[derive(Debug, Default)]
pub(super) struct Configs {
    /// The config that was returned last, unless it came from a cache. The lease for a network is
    /// taken from the same config as the network.
    handed_out: Mutex<Option<Config>>,
    /// The config that the lease was taken from.
    used: Mutex<Option<Config>>,
    /// The error of the config in the store.
    wrong: Mutex<Option<String>>,
}

impl Configs {
    /// Parses a config and notes its error. Once a lease was [taken](Self::used_for_lease), the
    /// networks may not change any more, because pods would not survive that.
    pub(super) fn read(&self, text: &ConfigText) -> Result<Config> {
        let mut config = self.parse(text)?;
        if let Some(used) = &*lock(&self.used) {
            config.networks = used.networks;
        }
        Ok(config)
    }

    /// Notes a config that the manager returns to its caller.
    pub(super) fn hand_out(&self, read: Fetched<Config>) -> Config {
        *lock(&self.handed_out) = (!read.is_cached).then(|| read.value.clone());
        read.value
    }

    /// Takes the first lease from this config, as if it were the config returned last.
    pub(super) fn prefer(&self, config: &Config) {
        if !self.has_lease() {
            *lock(&self.handed_out) = Some(config.clone());
        }
    }

    /// The config to take a lease from: the config returned last, else the result of `read`. A
    /// lease depends only on the networks, which cannot change, so a wrong config does not prevent
    /// a lease from being restored.
    pub(super) async fn for_lease(
        &self,
        read: impl Future<Output = Result<Fetched<Config>>>,
    ) -> Result<Fetched<Config>> {
        let handed_out = lock(&self.handed_out).clone();
        if let Some(config) = handed_out {
            return Ok(Fetched { value: config, is_cached: false });
        }
        match (read.await, &*lock(&self.used)) {
            (Err(Error::Config { .. } | Error::NoConfig { .. }), Some(used)) => {
                Ok(Fetched { value: used.clone(), is_cached: false })
            }
            (read, _) => read,
        }
    }

    /// Whether a lease was taken.
    pub(super) fn has_lease(&self) -> bool {
        lock(&self.used).is_some()
    }

    /// A lease was taken from this config.
    pub(super) fn used_for_lease(&self, config: Config) {
        *lock(&self.used) = Some(config);
    }

    /// The error of the config in the store.
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
                        %error,
                        "the network config was changed, but is wrong and not used"
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

#[cfg(test)]
mod tests {
    use super::*;

    fn config(network: &str) -> Config {
        Config::parse(&format!(r#"{{"Network":"{network}"}}"#)).unwrap()
    }

    #[tokio::test]
    async fn a_selected_config_decides_about_the_first_lease_only() {
        let stored = config("10.1.0.0/16");
        let selected = config("10.2.0.0/16");
        let configs = Configs::default();
        let for_lease = async || {
            let read = async { unreachable!("a config was returned") };
            configs.for_lease(read).await.unwrap().value
        };
        configs.hand_out(Fetched { value: stored.clone(), is_cached: false });
        assert_eq!(for_lease().await, stored);
        configs.prefer(&selected);
        assert_eq!(for_lease().await, selected);
        configs.used_for_lease(selected.clone());
        configs.prefer(&stored);
        assert_eq!(for_lease().await, selected);
    }
}
