//! The state of a registry: its endpoints, its keys, and the etcd lease in use.

use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};

use etcd_client::{GetOptions, GetResponse, KvClient};
use flannel_core::{Error, Result};
use flannel_subnet::HolderId;

use crate::attempts::Attempts;
use crate::connections::{Connection, Connections};
use crate::keys::Keys;
use crate::options::EtcdOptions;

/// The limit of an answer in bytes. The client's own limit of 4 MiB allows 13,000 leases.
pub(crate) const LARGEST_ANSWER: usize = 1 << 30;

/// The state that all clones of a registry share. `Display` is the name of the store.
pub(crate) struct Store {
    pub(crate) attempts: Attempts,
    pub(crate) keys: Keys,
    name: String,
    known: Mutex<Option<HolderId>>,
}

impl Store {
    pub(crate) fn new(options: EtcdOptions) -> Result<Self> {
        let keys = Keys::new(&options.prefix);
        let attempts = Attempts::new(Connections::new(options)?);
        let options = attempts.options();
        let mut name = format!("etcd:{}", options.endpoints.join(","));
        // Another prefix is another store: a cache of one must not be used for the other.
        if options.prefix != EtcdOptions::default().prefix {
            name += &format!(" (prefix {})", options.prefix);
        }
        Ok(Self { attempts, keys, name, known: Mutex::default() })
    }

    /// The holder whose etcd lease is known to exist, so that it is renewed and not granted.
    pub(crate) fn known(&self) -> MutexGuard<'_, Option<HolderId>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn error(&self, key: &str, reason: impl Into<String>) -> Error {
        Error::Store { store: format!("{self}: {key}"), source: reason.into().into() }
    }

    /// Reads one key, or with `prefix` all keys that begin with it.
    pub(crate) async fn get(&self, key: &str, prefix: bool) -> Result<GetResponse> {
        let answer = self.attempts.ask(key, |connection| {
            let key = key.to_owned();
            let options = prefix.then(|| GetOptions::new().with_prefix());
            async move { Ok(kv(&connection).get(key, options).await?) }
        });
        Ok(answer.await?.value)
    }
}

/// A client for keys and values.
pub(crate) fn kv(connection: &Connection) -> KvClient {
    connection.client.kv_client().max_decoding_message_size(LARGEST_ANSWER)
}

impl fmt::Display for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}
