//! Noticing that the network config is another one.

use std::time::Duration;

use flannel_core::{Config, Error, Result};

use crate::backoff::Backoff;
use crate::manager::LocalManager;
use crate::registry::Registry;

impl LocalManager {
    /// The next valid config that is not `seen`; the cache is told of it.
    pub(crate) async fn another_config(&self, seen: &Config) -> Result<Config> {
        let mut backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(60));
        let mut wrong = None;
        loop {
            let text = match self.store.config().await {
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
                    self.note_config(text);
                    if config != *seen {
                        return Ok(config);
                    }
                }
                Some((text, Err(error))) if wrong.as_ref() != Some(text) => {
                    tracing::warn!("the network config was changed, but is wrong and not used: {error}");
                    wrong = Some(text.clone());
                }
                _ => (),
            }
            match self.store.config_changed(text).await {
                Ok(()) => backoff.reset(),
                Err(_) => tokio::time::sleep(backoff.pause()).await,
            }
        }
    }
}
