//! The changes of keys that etcd sends.

use async_trait::async_trait;
use etcd_client::{EventType, WatchOptions, WatchResponse, WatchStream};
use flannel_core::lease::{LARGEST_VALUE, Revision};
use flannel_core::{Error, Result};
use flannel_subnet::{Batch, Event, MOST_SKIPPED, Now, Watch};

use crate::client::attempts::Attempts;
use crate::client::failure::Failure;
use crate::registry::keys::{name, now, revision};
use crate::registry::pages::LARGEST_LIST;
use crate::registry::store::LARGEST_ANSWER;

/// A watch on one connection. It ends with the connection, and its user lists again.
pub(crate) struct EtcdWatch {
    stream: WatchStream,
    /// The prefix of all keys.
    prefix: String,
    endpoint: String,
    /// The revision up to which the changes were returned.
    after: Revision,
    /// etcd does not know all changes after `after`.
    has_missed_changes: bool,
    /// The values since the list.
    volume: Volume,
}

/// How much a watch has received. Only a list bounds the memory for all leases and all skipped
/// keys, so a watch ends when it has received as much as a list may have.
#[derive(Debug, Default)]
struct Volume {
    /// The sum of the values that may be leases, in bytes.
    bytes: usize,
    /// The number of values that are skipped.
    skipped: usize,
}

impl Volume {
    /// Adds the values of an answer.
    fn add(&mut self, response: &WatchResponse) {
        let values = response.events().iter().filter_map(|event| Some(event.kv()?.value().len()));
        self.bytes += values.filter(|size| *size <= LARGEST_VALUE).sum::<usize>();
    }

    /// Adds the skipped keys of a batch.
    fn add_skipped(&mut self, batch: &Batch) {
        self.skipped +=
            batch.events.iter().filter(|event| matches!(event.now, Now::Unreadable(_))).count();
    }

    fn is_full(&self) -> bool {
        self.bytes > LARGEST_LIST || self.skipped > MOST_SKIPPED
    }
}

impl EtcdWatch {
    /// Watches `key` with `options` for changes after `after`.
    pub(crate) async fn open(
        attempts: &Attempts,
        key: &str,
        options: WatchOptions,
        after: Revision,
    ) -> Result<Self> {
        let options = options
            .with_start_revision(after.0.cast_signed().saturating_add(1))
            // etcd splits an answer above its limit of a request. Each part is read as a batch. If
            // the watch ends between two parts, its user lists again.
            .with_fragment()
            .with_progress_notify();
        let answer = attempts.ask(key, |connection| {
            let key = key.to_owned();
            let options = options.clone();
            async move {
                let mut client =
                    connection.client.watch_client().max_decoding_message_size(LARGEST_ANSWER);
                let mut stream = client.watch(key, Some(options)).await?;
                let created = stream
                    .message()
                    .await?
                    .ok_or_else(|| Failure::later("it ended the watch at once"))?;
                if created.canceled() && created.compact_revision() == 0 {
                    return Err(Failure::canceled_watch(created.cancel_reason()));
                }
                Ok((stream, created))
            }
        });
        let (stream, created) = answer.await?.value;
        let known = revision(created.header().map_or(0, etcd_client::ResponseHeader::revision));
        Ok(Self {
            stream,
            prefix: key.to_owned(),
            endpoint: attempts.endpoint(),
            after,
            // The changes are compacted, or etcd was restored from a backup that is older than
            // `after`.
            has_missed_changes: created.canceled() || known < after,
            volume: Volume::default(),
        })
    }

    fn error(&self, reason: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Error {
        Error::Store {
            store: format!("etcd {}: {}", self.endpoint, self.prefix),
            source: reason.into(),
        }
    }

    /// The changes in an answer, or `None` if changes were missed.
    fn batch(&self, response: &WatchResponse) -> Option<Batch> {
        let known = revision(response.header().map_or(0, etcd_client::ResponseHeader::revision));
        if response.canceled() || known < self.after {
            return None;
        }
        // While etcd catches up, the header may be ahead of the events. So the revision in the
        // header counts only if the answer has no events.
        let last = response
            .events()
            .iter()
            .filter_map(|event| event.kv())
            .map(|kv| kv.mod_revision())
            .max();
        let events = response
            .events()
            .iter()
            .filter_map(|event| {
                let kv = event.kv()?;
                let key = name(&self.prefix, kv.key());
                let kept = (event.event_type() == EventType::Put).then_some(kv);
                Some(Event { now: now(&key, kept), key })
            })
            .collect();
        Some(Batch { events, revision: last.map_or(known, revision) })
    }
}

#[async_trait]
impl Watch for EtcdWatch {
    async fn next(&mut self) -> Result<Option<Batch>> {
        if self.has_missed_changes {
            return Ok(None);
        }
        let response = match self.stream.message().await {
            Ok(Some(response)) => response,
            Ok(None) => return Err(self.error("it ended the watch")),
            Err(error) => return Err(self.error(Failure::from(error).text)),
        };
        self.volume.add(&response);
        let batch = self.batch(&response);
        if let Some(batch) = &batch {
            self.volume.add_skipped(batch);
            self.after = self.after.max(batch.revision);
        }
        self.has_missed_changes = batch.is_none() || self.volume.is_full();
        Ok(batch.filter(|_| !self.has_missed_changes))
    }
}
