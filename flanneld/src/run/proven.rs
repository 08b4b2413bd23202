//! The last network config whose devices were in the kernel of this host.
//!
//! If no network can be built from the config of the store, or if its devices cannot be made, this
//! host goes back to this config, also after a restart.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use flannel_core::Config;
use flannel_core::runtime::lock;
use flannel_options::state_dir;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use tokio::time::sleep;

use crate::blocking::BlockingQueue;

/// The pause before a file is written again.
const WRITE_AGAIN: Duration = Duration::from_secs(10);

/// The record of the config, in memory and in a file.
#[derive(Debug)]
pub(super) struct Proven {
    file: PathBuf,
    /// The name of the store that has the config.
    store: String,
    config: Mutex<Option<Config>>,
    /// The config in the file, as far as this process knows.
    in_file: Mutex<Option<Config>>,
    writes: BlockingQueue,
}

/// The content of the file.
#[derive(Serialize, Deserialize)]
struct Record {
    store: String,
    config: Box<RawValue>,
}

impl Proven {
    /// Reads the record of the last run on this store. A file that cannot be used is logged.
    pub(super) fn open(dir: &Path, store: &str) -> Self {
        let file = state_dir::config(dir);
        let config = read(&file, store).unwrap_or_else(|error| {
            tracing::warn!(
                path = %file.display(), %error,
                "a state file cannot be used: if no network can be built from the config of the \
                 store, the last one is not known"
            );
            None
        });
        let in_file = Mutex::new(config.clone());
        Self {
            file,
            store: store.to_owned(),
            config: Mutex::new(config),
            in_file,
            writes: BlockingQueue::default(),
        }
    }

    /// Writes its file in this queue.
    pub(super) fn writing_in(self, writes: BlockingQueue) -> Self {
        Self { writes, ..self }
    }

    /// The config; `None` if no network of this host is known to have worked.
    pub(super) fn get(&self) -> Option<Config> {
        self.config().clone()
    }

    /// Whether this is the config. Exclusions from masquerading are not compared, because they
    /// change while a network runs.
    pub(super) fn is(&self, config: &Config) -> bool {
        let same = |proven: &Config| Config { masquerade_exclude: Vec::new(), ..proven.clone() };
        self.config().as_ref().map(same) == Some(same(config))
    }

    /// Records that the devices of a network with this config are in the kernel. Repeats that until
    /// the file has it. The first failure is logged.
    ///
    /// # Cancel safety
    /// If the future is dropped, the file may have the record before.
    pub(super) async fn note(&self, config: &Config) {
        *self.config() = Some(config.clone());
        if lock(&self.in_file).as_ref() == Some(config) && self.file.exists() {
            return;
        }
        let text = config.to_json();
        let text = RawValue::from_string(text).expect("a config is written as valid JSON");
        let record = Record { store: self.store.clone(), config: text };
        let text = serde_json::to_string(&record).expect("texts and JSON values serialize");
        let mut is_logged = false;
        loop {
            let file = self.file.clone();
            let text = text.clone();
            let written = self.writes.run(move || state_dir::replace(&file, &text)).await;
            let Err(error) = written else {
                *lock(&self.in_file) = Some(config.clone());
                return;
            };
            if !is_logged {
                tracing::warn!(
                    path = %self.file.display(), %error,
                    "a state file cannot be written (see --state-dir): after a restart, this node \
                     does not go back to the config that it uses now"
                );
            }
            is_logged = true;
            sleep(WRITE_AGAIN).await;
        }
    }

    fn config(&self) -> MutexGuard<'_, Option<Config>> {
        lock(&self.config)
    }
}

/// The config in the file, or `None` without a file. See [`parse`].
fn read(file: &Path, store: &str) -> Result<Option<Config>, String> {
    match state_dir::read(file).map_err(|error| error.to_string())? {
        Some(text) => parse(&text, store),
        None => Ok(None),
    }
}

/// The config in the text of a file, or `None` if it is of another store. The error has no value of
/// the file, which may be a secret.
fn parse(text: &str, store: &str) -> Result<Option<Config>, String> {
    let record: Record = serde_json::from_str(text).map_err(|error| {
        format!("line {}, column {}: expected store and config", error.line(), error.column())
    })?;
    if record.store != store {
        tracing::info!(of = %record.store, "the last config of this node is of another store");
        return Ok(None);
    }
    // The store that had this config may assign subnets itself.
    Config::parse(record.config.get())
        .or_else(|_| Config::parse_undivided(record.config.get()))
        .map(Some)
        .map_err(|error| format!("config: wrong {}", error.field))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use test_support::{Logged, eventually_async};

    use super::*;

    #[tokio::test]
    async fn the_config_is_known_after_a_restart() {
        let dir = tempfile::tempdir().unwrap();
        let text = r#"{"Network":"10.1.0.0/16","EnableNFTables":true,
            "Backend":{"Type":"ipip","PSK":"psk-4711"}}"#;
        let config = Config::parse(text).unwrap();
        let open = |store| Proven::open(dir.path(), store);
        let proven = open("dir:/a");
        assert_eq!(proven.get(), None);
        proven.note(&config).await;
        assert_eq!(open("dir:/a").get().as_ref(), Some(&config));
        assert_eq!(open("dir:/b").get(), None, "of another store");
        let other = Config { nftables: false, ..config.clone() };
        assert!(proven.is(&config) && !proven.is(&other));
    }

    /// The network is built again with the same config while the first write waits.
    #[tokio::test(start_paused = true)]
    async fn a_config_whose_write_was_given_up_is_written_by_the_next_network() {
        let dir = tempfile::tempdir().unwrap();
        let [before, config] = ["10.1.0.0/16", "10.2.0.0/16"]
            .map(|network| Config::parse(&format!(r#"{{"Network":"{network}"}}"#)).unwrap());
        let [state, aside] = ["state", "aside"].map(|name| dir.path().join(name));
        fs::create_dir(&state).unwrap();
        let proven = Proven::open(&state, "store");
        proven.note(&before).await;
        fs::rename(&state, &aside).unwrap();
        fs::write(&state, "").unwrap();
        tokio::time::timeout(WRITE_AGAIN / 2, proven.note(&config)).await.unwrap_err();
        fs::remove_file(&state).unwrap();
        fs::rename(&aside, &state).unwrap();
        proven.note(&config).await;
        assert_eq!(Proven::open(&state, "store").get(), Some(config));
    }

    #[tokio::test]
    async fn a_damaged_file_is_reported_without_its_content_and_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let (logged, _guard) = Logged::collect();
        let config = Config::parse(r#"{"Network":"10.1.0.0/16"}"#).unwrap();
        let open = || Proven::open(dir.path(), "store");
        open().note(&config).await;
        let file = dir.path().join("config");
        let whole = fs::read_to_string(&file).unwrap();
        for damaged in ["psk-4711".to_owned(), whole.replace("10.1.0.0/16", "psk-4711")] {
            fs::write(&file, damaged).unwrap();
            assert_eq!(open().get(), None);
        }
        assert_eq!((logged.count("cannot be used"), logged.count("psk")), (2, 0));
        open().note(&config).await;
        assert_eq!(open().get(), Some(config));
    }

    #[tokio::test(start_paused = true)]
    async fn a_record_that_cannot_be_written_is_written_later() {
        let dir = tempfile::tempdir().unwrap();
        let (logged, _guard) = Logged::collect();
        let config = Config::parse(r#"{"Network":"10.1.0.0/16"}"#).unwrap();
        let state = dir.path().join("state");
        // A file is where the directory should be.
        fs::write(&state, "").unwrap();
        let proven = Proven::open(&state, "store");
        let mut note = std::pin::pin!(proven.note(&config));
        let is_logged = async || logged.count("cannot be written") == 1;
        tokio::select! {
            () = &mut note => panic!("there is no directory"),
            () = eventually_async(WRITE_AGAIN, is_logged, || "nothing is logged") => {}
        }
        fs::remove_file(&state).unwrap();
        fs::create_dir(&state).unwrap();
        note.await;
        assert_eq!(Proven::open(&state, "store").get().as_ref(), Some(&config));
        assert_eq!(logged.count("cannot be written"), 1);
    }
}
