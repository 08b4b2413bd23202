//! Watches of all nodes, one after the other, until a list is needed.

use std::time::Duration;

use flannel_core::lease::Revision;
use tokio::time::{Instant, sleep, sleep_until};

use super::list::Freshness;
use super::outage::OutageLog;
use super::{Following, Own};
use crate::api::pause::Pause;
use crate::api::{Call, Failure, escape, part};
use crate::node::Event;

/// The silence after which a watch is started again, and after a second one nodes are listed. API
/// servers send a bookmark every minute, but perhaps none while nothing changes in the cluster, so
/// silence alone is not a failure.
const SILENCE: Duration = Duration::from_secs(90);
/// The requested duration of a watch in seconds, random so that nodes do not reconnect together.
const WATCH: std::ops::Range<u32> = 300..600;
/// The number of server errors in a row after which the version is dropped: it may not exist.
const ERRORS: u32 = 3;
/// The shortest duration of a watch without an event that is not a failure.
const BRIEF: Duration = Duration::from_secs(1);

/// The end of a watch.
enum Watched {
    /// It can continue from the last version.
    Cut { useful: bool },
    /// Nothing arrived, not even a bookmark. It may continue.
    Silent { useful: bool },
    /// Changes may have been missed.
    Gone,
}

impl Following {
    /// Watches until changes may have been missed, and returns the freshness of the next list. If
    /// the server's store is restored from a backup, versions go back, which only a list shows.
    pub(super) async fn watch_from(
        &mut self,
        mut version: String,
        pause: &mut Pause,
        outage: &mut OutageLog,
    ) -> Freshness {
        let (mut errors, mut silent) = (0, false);
        loop {
            let (begin, from) = (Instant::now(), version.clone());
            match self.watch(&mut version, outage).await {
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
                    (silent, errors) = (true, 0);
                    pause.reset();
                    sleep(pause.next()).await;
                }
                Ok(Watched::Cut { useful }) => {
                    (silent, errors) = (silent && !useful, 0);
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
                    if version != from {
                        (silent, errors) = (false, 0);
                    }
                    errors += u32::from(matches!(failure, Failure::Erred(_) | Failure::Late(_)));
                    if errors >= ERRORS {
                        return Freshness::Version(version);
                    }
                }
            }
        }
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
                let line = match held.is_empty() {
                    true => line,
                    false => {
                        held.extend_from_slice(line);
                        &held
                    }
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
            match changed {
                true => self.publish(revision),
                false => self.unchanged(revision),
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
