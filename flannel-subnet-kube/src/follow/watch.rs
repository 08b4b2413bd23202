//! Watches of all nodes, one after the other, until a list is needed.

use std::time::Duration;

use flannel_core::lease::Revision;
use flannel_core::runtime::or_never;
use serde::Deserialize;
use tokio::time::{Instant, sleep, sleep_until};

use super::list::{Freshness, Page};
use super::outage::OutageLog;
use super::{Following, Own};
use crate::api::pause::Pause;
use crate::api::{Call, Failure, escape, part, read};
use crate::node::Event;

/// The silence after which a watch is started again. After a second silence nodes are listed. API
/// servers send a bookmark every minute, but perhaps no bookmark while nothing changes in the
/// cluster, so silence alone is not a failure.
const SILENCE: Duration = Duration::from_secs(90);
/// The requested duration of a watch in seconds, random so that nodes do not reconnect together.
const WATCH: std::ops::Range<u32> = 300..600;
/// If a server that answers refuses this number of watches in a row, nodes are listed, because the
/// version may not exist.
const ERRORS: u32 = 3;
/// The shortest duration of a watch without an event that is not a failure.
const BRIEF: Duration = Duration::from_secs(1);

/// A list, of which only the metadata is read.
#[derive(Deserialize)]
struct ListMetadata {
    metadata: Page,
}

/// The end of a watch. `useful` says that the watch had an event or a bookmark.
enum WatchEnd {
    /// It can continue from the last version.
    Cut { useful: bool },
    /// Nothing arrived, not even a bookmark. It may continue.
    Silent { useful: bool },
    /// Changes may have been missed.
    Gone,
    /// The server's store was restored from a backup, and has not reached the version.
    Restored,
}

/// The state of consecutive watches.
#[derive(Default)]
struct Watches {
    /// The number of watches in a row that the server refused. A server that does not answer at
    /// all, or answers everything with an error, refuses no watch, because a list would not help
    /// it.
    errors: u32,
    /// Nothing has arrived since a silence.
    is_silent: bool,
    /// The last watch has failed.
    is_lost: bool,
}

impl Following {
    /// Watches until changes may have been missed, and returns the freshness of the next list.
    pub(super) async fn watch_from(
        &mut self,
        mut version: String,
        pause: &mut Pause,
        outage: &mut OutageLog,
    ) -> Freshness {
        let mut watches = Watches::default();
        loop {
            let begin = Instant::now();
            let from = version.clone();
            match self.continue_watch(&mut version, &mut watches, outage).await {
                Ok(WatchEnd::Restored) => {
                    tracing::warn!(
                        store = self.api.name(),
                        "the store was restored from a backup, listing again"
                    );
                    return Freshness::Own;
                }
                Ok(WatchEnd::Gone) => {
                    tracing::debug!(store = self.api.name(), "changes were missed, listing again");
                    sleep(pause.next()).await;
                    return Freshness::Version(version);
                }
                Ok(WatchEnd::Silent { useful }) => {
                    // The connection is probably dead. After a second silence a list shows whether
                    // the server answers.
                    if watches.is_silent && !useful {
                        return Freshness::Version(version);
                    }
                    watches = Watches { is_silent: true, ..Watches::default() };
                    pause.reset();
                    sleep(pause.next()).await;
                }
                Ok(WatchEnd::Cut { useful }) => {
                    let is_silent = watches.is_silent && !useful;
                    watches = Watches { is_silent, ..Watches::default() };
                    if useful || begin.elapsed() > BRIEF {
                        pause.reset();
                    }
                    sleep(pause.next()).await;
                }
                Err(Failure::Gone) => {
                    sleep(pause.next()).await;
                    return Freshness::Version(version);
                }
                Err(failure) => {
                    outage.begins(self, &failure);
                    pause.after(&failure).await;
                    watches.is_lost = true;
                    if version != from {
                        watches.is_silent = false;
                    }
                    if watches.errors >= ERRORS {
                        return Freshness::Version(version);
                    }
                }
            }
        }
    }

    /// Watches from `version` on. After a failure it first checks that the server has the version.
    async fn continue_watch(
        &mut self,
        version: &mut String,
        watches: &mut Watches,
        outage: &mut OutageLog,
    ) -> Result<WatchEnd, Failure> {
        if watches.is_lost && !self.has_version(version).await? {
            return Ok(WatchEnd::Restored);
        }
        let from = version.clone();
        let end = self.watch(version, outage).await;
        if *version != from {
            watches.errors = 0;
        }
        if matches!(end, Err(Failure::Erred(_) | Failure::TooLarge(_))) {
            watches.errors += 1;
        }
        end
    }

    /// Whether the server's store has reached `version`. After a restoration from a backup it may
    /// not. The server then accepts a watch, which shows nothing until the version is reached.
    async fn has_version(&self, version: &str) -> Result<bool, Failure> {
        // With a limit the server reads its store.
        let path = "/api/v1/nodes?limit=1".to_owned();
        let call = Call { verb: "list", resource: "nodes", path, patch: None };
        let body = read(self.api.send(&call).await?, usize::MAX).await?;
        let list: ListMetadata = serde_json::from_slice(&body).map_err(|error| {
            Failure::Failed(format!("list nodes: the answer cannot be read: {error}").into())
        })?;
        let now = list.metadata.resource_version.parse::<u64>().ok();
        let ours = version.parse::<u64>().ok();
        Ok(now.zip(ours).is_none_or(|(now, ours)| now >= ours))
    }

    /// Watches from `version` on, and updates it.
    async fn watch(
        &mut self,
        version: &mut String,
        outage: &mut OutageLog,
    ) -> Result<WatchEnd, Failure> {
        let path = format!(
            "/api/v1/nodes?watch=true&allowWatchBookmarks=true&timeoutSeconds={}\
             &resourceVersion={}",
            fastrand::u32(WATCH),
            escape(version)
        );
        let call = Call { verb: "watch", resource: "nodes", path, patch: None };
        let mut body = self.api.send(&call).await?.into_body();
        self.api.confirm(None);
        outage.ends(self);
        let mut incomplete = Vec::new();
        let mut useful = false;
        loop {
            let received = tokio::select! {
                received = part(&mut body, SILENCE) => received,
                () = or_never(self.nodes.next_end().map(sleep_until)) => {
                    if self.nodes.expire() {
                        self.publish(Revision(version.parse().unwrap_or_default()));
                    }
                    continue;
                }
            };
            let bytes = match received {
                Ok(Some(bytes)) => bytes,
                // An incomplete event is sent again.
                Ok(None) => return Ok(WatchEnd::Cut { useful }),
                Err(failure @ Failure::Silent(_)) => {
                    tracing::debug!(store = self.api.name(), %failure, "the watch has failed");
                    return Ok(WatchEnd::Silent { useful });
                }
                Err(failure) => {
                    tracing::debug!(store = self.api.name(), %failure, "the watch has failed");
                    return Ok(WatchEnd::Cut { useful });
                }
            };
            let events = self.events(&bytes, &mut incomplete, version);
            useful |= events.count > 0;
            let revision = Revision(version.parse().unwrap_or_default());
            self.api.confirm(Some(revision));
            if events.have_changed {
                self.publish(revision);
            } else {
                self.unchanged(revision);
            }
            // Earlier events in the same part were published first.
            if let Some(failure) = events.failure {
                return self.interrupted(failure);
            }
        }
    }

    /// Applies the events in a part of a watch. `incomplete` has the bytes of an event that began
    /// in an earlier part, and gets the bytes of an event that is not complete.
    fn events(&mut self, bytes: &[u8], incomplete: &mut Vec<u8>, version: &mut String) -> Events {
        let mut events = Events::default();
        let mut rest = bytes;
        while let Some(end) = rest.iter().position(|byte| *byte == b'\n') {
            let outcome = if incomplete.is_empty() {
                // Usually a line needs no copy.
                self.event(&rest[..end], version)
            } else {
                incomplete.extend_from_slice(&rest[..end]);
                self.event(incomplete, version)
            };
            rest = &rest[end + 1..];
            incomplete.clear();
            match outcome {
                Ok(has_changed) => events.have_changed |= has_changed,
                Err(failure) => {
                    events.failure = Some(failure);
                    return events;
                }
            }
            events.count += 1;
        }
        incomplete.extend_from_slice(rest);
        events
    }

    /// Ends the watch because of an event.
    fn interrupted(&self, failure: Failure) -> Result<WatchEnd, Failure> {
        match failure {
            Failure::Gone => Ok(WatchEnd::Gone),
            failure => {
                self.api.failed("watch", &failure);
                Err(failure)
            }
        }
    }

    /// Applies one line of a watch. Returns whether a lease may have changed.
    fn event(&mut self, line: &[u8], version: &mut String) -> Result<bool, Failure> {
        if line.trim_ascii().is_empty() {
            return Ok(false);
        }
        // Only a list can skip an unreadable event.
        let Event { kind, object } = serde_json::from_slice(line).map_err(|error| {
            let error = error.to_string();
            // The next watch may begin with the same event.
            if self.unreadable != error {
                tracing::warn!(
                    store = self.api.name(), %error,
                    "an event of the watch cannot be read, listing again"
                );
                self.unreadable = error;
            }
            Failure::Gone
        })?;
        let changed = match &*kind {
            "ADDED" | "MODIFIED" => {
                if object.metadata.name == self.own {
                    self.set_own(self.read_options.own(&object));
                }
                self.nodes.put(&object)
            }
            "DELETED" => {
                if object.metadata.name == self.own {
                    self.set_own(Own::Gone);
                }
                self.nodes.remove(&object.metadata.name)
            }
            "BOOKMARK" => false,
            "ERROR" if object.code == 410 => return Err(Failure::Gone),
            _ => {
                return Err(Failure::Erred(format!(
                    "the watch ended: {kind} {}: {}",
                    object.code, object.message
                )));
            }
        };
        version.clear();
        version.push_str(&object.metadata.resource_version);
        Ok(changed)
    }
}

/// The events in a part of a watch.
#[derive(Default)]
struct Events {
    /// The number of events and bookmarks that were applied.
    count: usize,
    /// A lease may have changed.
    have_changed: bool,
    /// Why the last event could not be applied. The rest of the part is not read.
    failure: Option<Failure>,
}
