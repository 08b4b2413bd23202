//! Watches of all nodes, one after the other, until a list is needed.

use std::time::Duration;

use flannel_core::lease::Revision;
use serde::Deserialize;
use tokio::time::{Instant, sleep, sleep_until};

use super::list::{Freshness, Page};
use super::outage::OutageLog;
use super::{Following, Own};
use crate::api::pause::Pause;
use crate::api::{Call, Failure, escape, part, read};
use crate::node::Event;

/// The silence after which a watch is started again, and after a second one nodes are listed. API
/// servers send a bookmark every minute, but perhaps none while nothing changes in the cluster, so
/// silence alone is not a failure.
const SILENCE: Duration = Duration::from_secs(90);
/// The requested duration of a watch in seconds, random so that nodes do not reconnect together.
const WATCH: std::ops::Range<u32> = 300..600;
/// The number of watches in a row that a server refuses, though it answers otherwise, after which
/// the version is dropped: it may not exist.
const ERRORS: u32 = 3;
/// The shortest duration of a watch without an event that is not a failure.
const BRIEF: Duration = Duration::from_secs(1);

/// A list, of which only the metadata is read.
#[derive(Deserialize)]
struct Listed {
    metadata: Page,
}

/// The end of a watch.
enum Watched {
    /// It can continue from the last version.
    Cut { useful: bool },
    /// Nothing arrived, not even a bookmark. It may continue.
    Silent { useful: bool },
    /// Changes may have been missed.
    Gone,
    /// The server's store was restored from a backup, and has not reached the version.
    Restored,
}

impl Following {
    /// Watches until changes may have been missed, and returns the freshness of the next list.
    pub(super) async fn watch_from(
        &mut self,
        mut version: String,
        pause: &mut Pause,
        outage: &mut OutageLog,
    ) -> Freshness {
        let (mut errors, mut silent, mut lost) = (0, false, false);
        loop {
            let (begin, from) = (Instant::now(), version.clone());
            match self.continue_watch(&mut version, lost, &mut errors, outage).await {
                Ok(Watched::Restored) => {
                    tracing::warn!(
                        store = self.api.name(),
                        "the store was restored from a backup, listing again"
                    );
                    return Freshness::Own;
                }
                Ok(Watched::Gone) => {
                    tracing::debug!(store = self.api.name(), "changes were missed, listing again");
                    sleep(pause.next()).await;
                    return Freshness::Version(version);
                }
                Ok(Watched::Silent { useful }) => {
                    // The connection is probably dead. After a second silence a list shows whether
                    // the server answers.
                    if silent && !useful {
                        return Freshness::Version(version);
                    }
                    (silent, errors, lost) = (true, 0, false);
                    pause.reset();
                    sleep(pause.next()).await;
                }
                Ok(Watched::Cut { useful }) => {
                    (silent, errors, lost) = (silent && !useful, 0, false);
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
                    lost = true;
                    if version != from {
                        silent = false;
                    }
                    if errors >= ERRORS {
                        return Freshness::Version(version);
                    }
                }
            }
        }
    }

    /// Watches from `version` on. `lost`: the server did not answer since the last watch. `errors`
    /// counts watches in a row that the server refused. A server that does not answer at all, or
    /// answers everything with an error, refuses none, because a list would not help it.
    async fn continue_watch(
        &mut self,
        version: &mut String,
        lost: bool,
        errors: &mut u32,
        outage: &mut OutageLog,
    ) -> Result<Watched, Failure> {
        if lost && !self.has_version(version).await? {
            return Ok(Watched::Restored);
        }
        let from = version.clone();
        let watched = self.watch(version, outage).await;
        if *version != from {
            *errors = 0;
        }
        let is_refused = matches!(watched, Err(Failure::Erred(_) | Failure::TooLarge(_)));
        *errors += u32::from(is_refused);
        watched
    }

    /// Whether the server's store has reached `version`. After a restoration from a backup it may
    /// not. The server then accepts a watch, which shows nothing until the version is reached.
    async fn has_version(&self, version: &str) -> Result<bool, Failure> {
        // With a limit the server reads its store.
        let path = "/api/v1/nodes?limit=1".to_owned();
        let call = Call { verb: "list", resource: "nodes", path, patch: None };
        let body = read(self.api.send(&call).await?, usize::MAX).await?;
        let list: Listed = serde_json::from_slice(&body).map_err(|error| {
            Failure::Failed(format!("list nodes: the answer cannot be read: {error}").into())
        })?;
        let number = |version: &str| version.parse::<u64>().ok();
        let (now, ours) = (number(&list.metadata.resource_version), number(version));
        Ok(now.zip(ours).is_none_or(|(now, ours)| now >= ours))
    }

    /// Watches from `version` on, and updates it.
    async fn watch(
        &mut self,
        version: &mut String,
        outage: &mut OutageLog,
    ) -> Result<Watched, Failure> {
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
        let (mut held, mut useful) = (Vec::new(), false);
        loop {
            let received = tokio::select! {
                received = part(&mut body, SILENCE) => received,
                () = until(self.nodes.next_end()) => {
                    if self.nodes.expire() {
                        self.publish(Revision(version.parse().unwrap_or_default()));
                    }
                    continue;
                }
            };
            let bytes = match received {
                Ok(Some(bytes)) => bytes,
                // An incomplete event is sent again.
                Ok(None) => return Ok(Watched::Cut { useful }),
                Err(failure @ Failure::Silent(_)) => {
                    tracing::debug!(store = self.api.name(), %failure, "the watch has failed");
                    return Ok(Watched::Silent { useful });
                }
                Err(failure) => {
                    tracing::debug!(store = self.api.name(), %failure, "the watch has failed");
                    return Ok(Watched::Cut { useful });
                }
            };
            let (mut changed, mut wrong) = (false, None);
            let mut rest = &bytes[..];
            while let Some(end) = rest.iter().position(|byte| *byte == b'\n') {
                let (line, behind) = (&rest[..end], &rest[end + 1..]);
                rest = behind;
                let line = if held.is_empty() {
                    line
                } else {
                    held.extend_from_slice(line);
                    &held
                };
                match self.event(line, version) {
                    Ok(change) => changed |= change,
                    Err(failure) => {
                        wrong = Some(failure);
                        break;
                    }
                }
                held.clear();
                useful = true;
            }
            held.extend_from_slice(rest);
            let revision = Revision(version.parse().unwrap_or_default());
            self.api.confirm(Some(revision));
            if changed {
                self.publish(revision);
            } else {
                self.unchanged(revision);
            }
            // Earlier events in the same part are published first.
            if let Some(failure) = wrong {
                return self.interrupted(failure);
            }
        }
    }

    /// Ends the watch because of an event.
    fn interrupted(&self, failure: Failure) -> Result<Watched, Failure> {
        match failure {
            Failure::Gone => Ok(Watched::Gone),
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
                    let own = self.read_options.own(&object);
                    self.own_node
                        .send_if_modified(|now| std::mem::replace(now, own.clone()) != own);
                }
                self.nodes.put(&object)
            }
            "DELETED" => {
                if object.metadata.name == self.own {
                    self.own_node
                        .send_if_modified(|now| std::mem::replace(now, Own::Gone) != Own::Gone);
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

/// Waits until this time; for ever without one.
async fn until(time: Option<Instant>) {
    match time {
        Some(time) => sleep_until(time).await,
        None => std::future::pending().await,
    }
}
