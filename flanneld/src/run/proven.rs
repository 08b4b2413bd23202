//! The last network config whose devices were in the kernel of this host.
//!
//! If no network can be built from the config of the store, or if its devices cannot be made, this
//! host goes back to this config, also after a restart.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use flannel_core::Config;
use flannel_options::state_dir;

use crate::blocking::run_blocking_in_order;

/// The record of the config, in memory and in a file.
#[derive(Debug)]
pub(super) struct Proven {
    file: PathBuf,
    config: Mutex<Option<Config>>,
}

impl Proven {
    /// Reads the record of the last run. A file that cannot be used is logged.
    pub(super) fn open(dir: &Path) -> Self {
        let file = state_dir::config(dir);
        let parse = |text: String| Config::parse(&text).map_err(|error| error.field);
        let config = match state_dir::read(&file) {
            Ok(None) => Ok(None),
            // The value of a field may be a secret.
            Ok(Some(text)) => {
                parse(text).map(Some).map_err(|field| format!("{field} has a wrong value"))
            }
            Err(error) => Err(error.to_string()),
        };
        let config = config.unwrap_or_else(|error| {
            tracing::warn!(
                path = %file.display(), %error,
                "a state file cannot be read: if no network can be built from the config of the \
                 store, the last one is not known"
            );
            None
        });
        Self { file, config: Mutex::new(config) }
    }

    /// The config; `None` if no network of this host is known to have worked.
    pub(super) fn get(&self) -> Option<Config> {
        self.config().clone()
    }

    /// Whether this is the config.
    pub(super) fn is(&self, config: &Config) -> bool {
        self.config().as_ref() == Some(config)
    }

    /// Records that the devices of a network with this config are in the kernel. A failure of the
    /// file is logged, and the record holds until the daemon ends.
    pub(super) async fn note(&self, config: &Config) {
        if self.config().replace(config.clone()).as_ref() == Some(config) {
            return;
        }
        let file = self.file.clone();
        let text = config.to_json();
        let written = run_blocking_in_order(move || state_dir::replace(&file, &text)).await;
        if let Err(error) = written {
            tracing::warn!(
                path = %self.file.display(), %error,
                "a state file cannot be written (see --state-dir): after a restart, this node does \
                 not go back to the config that it uses now"
            );
        }
    }

    fn config(&self) -> MutexGuard<'_, Option<Config>> {
        self.config.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use test_support::Logged;

    use super::*;

    #[tokio::test]
    async fn the_config_is_known_after_a_restart() {
        let dir = tempfile::tempdir().unwrap();
        let text = r#"{"Network":"10.1.0.0/16","EnableNFTables":true,
            "Backend":{"Type":"ipip","PSK":"psk-4711"}}"#;
        let config = Config::parse(text).unwrap();
        let proven = Proven::open(dir.path());
        assert_eq!(proven.get(), None);
        proven.note(&config).await;
        assert_eq!(Proven::open(dir.path()).get().as_ref(), Some(&config));
        let other = Config { nftables: false, ..config.clone() };
        assert!(proven.is(&config) && !proven.is(&other));
    }

    #[tokio::test]
    async fn a_damaged_file_is_reported_without_its_content_and_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let (logged, _guard) = Logged::collect();
        let config = Config::parse(r#"{"Network":"10.1.0.0/16"}"#).unwrap();
        Proven::open(dir.path()).note(&config).await;
        let file = dir.path().join("config");
        let whole = fs::read_to_string(&file).unwrap();
        fs::write(&file, whole.replace("10.1.0.0/16", "psk-4711")).unwrap();
        let proven = Proven::open(dir.path());
        assert_eq!(proven.get(), None);
        assert_eq!((logged.count("cannot be read"), logged.count("psk")), (1, 0));
        proven.note(&config).await;
        assert_eq!(Proven::open(dir.path()).get(), Some(config));
    }
}
