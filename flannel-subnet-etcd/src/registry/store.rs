//! What the clones of a registry share: the connections, the keys, and the etcd lease in use.

use std::fmt;
use std::sync::atomic::AtomicUsize;
use std::sync::{Mutex, MutexGuard};

use etcd_client::{GetResponse, KvClient};
use flannel_core::runtime::lock;
use flannel_core::{Error, Result};
use flannel_subnet::HolderId;

use crate::client::attempts::Attempts;
use crate::client::connections::{Connection, Connections};
use crate::options::EtcdOptions;
use crate::registry::keys::Keys;
use crate::registry::pages::MOST_KEYS;

/// The limit of an answer in bytes. etcd's own limit of a request is 1.5 MiB. A list is read in
/// pages.
pub(crate) const LARGEST_ANSWER: usize = 8 << 20;

/// What the clones of a registry share. `Display` is the name of the store.
pub(crate) struct Store {
    pub(crate) attempts: Attempts,
    pub(crate) keys: Keys,
    name: String,
    known_holder: Mutex<Option<HolderId>>,
    /// The largest number of keys in a page of a list. It falls after a page that was too large,
    /// and rises with each complete list.
    pub(crate) most_keys: AtomicUsize,
}

impl Store {
    pub(crate) fn new(options: EtcdOptions) -> Result<Self> {
        let keys = Keys::new(&options.prefix);
        let attempts = Attempts::new(Connections::new(options)?);
        let options = attempts.options();
        let mut name = format!("etcd:{}", options.endpoints.join(","));
        // A cache of one prefix must not be used for another prefix.
        if options.prefix != EtcdOptions::default().prefix {
            name += &format!(" (prefix {})", options.prefix);
        }
        let most_keys = AtomicUsize::new(MOST_KEYS);
        Ok(Self { attempts, keys, name, known_holder: Mutex::default(), most_keys })
    }

    /// The holder whose etcd lease exists, so that it is renewed and not granted.
    pub(crate) fn known_holder(&self) -> MutexGuard<'_, Option<HolderId>> {
        lock(&self.known_holder)
    }

    pub(crate) fn error(&self, key: &str, reason: impl Into<String>) -> Error {
        Error::Store { store: format!("{self}: {key}"), source: reason.into().into() }
    }

    /// Reads one key.
    pub(crate) async fn get(&self, key: &str) -> Result<GetResponse> {
        let answer = self.attempts.ask(key, |connection| {
            let key = key.to_owned();
            async move { Ok(kv(&connection).get(key, None).await?) }
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
