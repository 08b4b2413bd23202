//! All nodes, always the latest: listed once, watched from there, and listed again when changes
//! were missed.
//!
//! Nothing is applied to the view before a list is complete, and a watch goes on from the last
//! version that came whole, whatever cut it.

use std::sync::Arc;
use std::time::Duration;

use flannel_core::lease::{Origin, Revision, View};
use tokio::sync::watch;
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep};

use crate::annotations::wrong_overwrites;
use crate::api::{Api, Call, Failure, escape, part};
use crate::node::{Event, Node, Wire};
use crate::nodes::{Nodes, ReadOptions};
use crate::pause::Pause;

/// So many nodes are asked for at once.
pub(crate) const PAGE: u32 = 500;
/// A watch that is silent for so long is begun anew, and nodes are listed if that one is silent,
/// too. API servers send a bookmark every minute, but perhaps none while nothing happens in the
/// cluster: silence alone says nothing of their store.
const SILENCE: Duration = Duration::from_secs(90);
/// How long the server is asked to go on, in seconds: at random, so that nodes do not come back
/// together.
const WATCH: std::ops::Range<u32> = 300..600;
/// After so many errors of the server in a row the version is not asked for again: it may be one
/// that there never was.
const ERRORS: u32 = 3;
/// A server's cache that is late for longer is not waited for: the list comes from the server's
/// store. Only what the server itself says, or its silence, counts, and only if nothing else comes
/// between: after an outage all nodes are back at once.
pub(crate) const LATE: Duration = Duration::from_secs(10);
/// A watch that ends sooner and brings nothing was of no use.
const BRIEF: Duration = Duration::from_secs(1);

/// What is known of this node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Own {
    /// Nothing yet.
    Unknown,
    /// There is no such node.
    Gone,
    /// It is there.
    Here(Arc<Node>),
    /// It is there, and cannot be understood.
    Wrong(String),
}

/// Follows for as long as it lives.
#[derive(Debug)]
pub(crate) struct Follower {
    pub(crate) read_options: ReadOptions,
    pub(crate) views: watch::Receiver<View>,
    pub(crate) own: watch::Receiver<Own>,
    task: AbortHandle,
}

impl Drop for Follower {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Follower {
    /// Begins, on the current runtime. `own` is this node's name.
    pub(crate) fn start(api: Arc<Api>, read_options: ReadOptions, own: String) -> Self {
        let (views, seen) = watch::channel(View::unknown());
        let (own_node, own_seen) = watch::channel(Own::Unknown);
        let nodes = Nodes::new(read_options.clone());
        let following = Following {
            api,
            nodes,
            late: None,
            read_options: read_options.clone(),
            own,
            views,
            own_node,
        };
        let task = tokio::spawn(following.run()).abort_handle();
        Self { read_options, views: seen, own: own_seen, task }
    }

    /// Whether anything more will ever come.
    pub(crate) fn lives(&self) -> bool {
        self.own.has_changed().is_ok()
    }
}

/// Follows all nodes.
pub(crate) struct Following {
    pub(crate) api: Arc<Api>,
    pub(crate) read_options: ReadOptions,
    pub(crate) nodes: Nodes,
    /// The first and the last time in a row that the server had no list which its cache may answer.
    pub(crate) late: Option<(Instant, Instant)>,
    pub(crate) own: String,
    pub(crate) views: watch::Sender<View>,
    pub(crate) own_node: watch::Sender<Own>,
}

/// What a list must be like. Each spares the server's store if it can: all nodes may ask at once.
pub(crate) enum Least {
    /// No older than the last write of this node, which is asked for before.
    Own,
    /// No older than this version.
    Version(String),
}

/// How a watch ended.
enum Watched {
    /// From the last version on it can go on.
    Cut { useful: bool },
    /// So can it perhaps: nothing comes, not even a bookmark.
    Silent { useful: bool },
    /// Changes were missed, or may have been.
    Gone,
}

impl Following {
    async fn run(mut self) {
        let (mut pause, mut lost) = (Pause::new(), Lost::default());
        let mut least = Least::Own;
        loop {
            match self.list(&least).await {
                Ok(version) => {
                    lost.found(&self);
                    least = self.watch_from(version, &mut pause, &mut lost).await;
                }
                // The pages were too long in coming, from a server that answers.
                Err(Failure::Gone) => {
                    tracing::debug!(
                        store = self.api.name(),
                        "the list came too late to its end, listing again"
                    );
                    sleep(pause.next()).await;
                }
                Err(failure) => {
                    lost.log(&self, &failure);
                    pause.after(&failure).await;
                }
            }
        }
    }

    /// Watches until changes were missed, or may have been: versions go back when the server's
    /// store is restored from a copy, and only a list shows. Returns what that list must be like.
    async fn watch_from(
        &mut self,
        mut version: String,
        pause: &mut Pause,
        lost: &mut Lost,
    ) -> Least {
        let (mut errors, mut silent) = (0, false);
        loop {
            let (begin, from) = (Instant::now(), version.clone());
            match self.watch(&mut version, lost).await {
                Ok(Watched::Gone) => {
                    tracing::debug!(store = self.api.name(), "changes were missed, listing again");
                    sleep(pause.next()).await;
                    return Least::Version(version);
                }
                Ok(Watched::Silent { useful }) => {
                    // Mostly it is the connection that is dead. A list shows whether the server
                    // lives.
                    if silent && !useful {
                        return Least::Version(version);
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
                    return Least::Version(version);
                }
                Err(failure) => {
                    lost.log(self, &failure);
                    pause.after(&failure).await;
                    if version != from {
                        (silent, errors) = (false, 0);
                    }
                    errors += u32::from(matches!(failure, Failure::Erred(_) | Failure::Late(_)));
                    if errors >= ERRORS {
                        return Least::Version(version);
                    }
                }
            }
        }
    }

    /// Watches from a version on, which it moves.
    async fn watch(&mut self, version: &mut String, lost: &mut Lost) -> Result<Watched, Failure> {
        let path = format!(
            "/api/v1/nodes?watch=true&allowWatchBookmarks=true&timeoutSeconds={}&resourceVersion={}",
            fastrand::u32(WATCH),
            escape(version)
        );
        let call = Call { verb: "watch", resource: "nodes", path, patch: None };
        let mut body = self.api.send(&call).await?.into_body();
        self.api.confirm(None);
        lost.found(self);
        let (mut held, mut useful) = (Vec::new(), false);
        loop {
            let bytes = match part(&mut body, SILENCE).await {
                Ok(Some(bytes)) => bytes,
                // What came only in part comes again.
                Ok(None) => return Ok(Watched::Cut { useful }),
                Err(failure @ Failure::Silent(_)) => {
                    tracing::debug!(store = self.api.name(), "watch nodes: {failure}");
                    return Ok(Watched::Silent { useful });
                }
                Err(failure) => {
                    tracing::debug!(store = self.api.name(), "watch nodes: {failure}");
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
                false => self.nothing_new(revision),
            }
            // What came before it in the same part is shown all the same.
            if let Some(failure) = wrong {
                return self.interrupted(failure);
            }
        }
    }

    /// The server, or what it says, makes it impossible to go on with this watch.
    fn interrupted(&self, failure: Failure) -> Result<Watched, Failure> {
        match failure {
            Failure::Gone => Ok(Watched::Gone),
            failure => {
                self.api.failed("watch", &failure);
                Err(failure)
            }
        }
    }

    /// Takes in one line of a watch. Returns whether something may have changed.
    fn event(&mut self, line: &[u8], version: &mut String) -> Result<bool, Failure> {
        if line.trim_ascii().is_empty() {
            return Ok(false);
        }
        // Only another list leads past an event that cannot be read.
        let Event { kind, object } = serde_json::from_slice(line).map_err(|error| {
            tracing::warn!(
                store = self.api.name(),
                "an event of the watch cannot be read, listing again: {error}"
            );
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

    /// The leases are as they were, at a later version. Wakes nobody.
    fn nothing_new(&self, revision: Revision) {
        self.views.send_if_modified(|view| {
            view.origin = Origin::Live { revision };
            false
        });
    }

    /// Shows the leases to others, and wakes them only if some have changed or have become live.
    pub(crate) fn publish(&self, revision: Revision) {
        self.views.send_if_modified(|view| {
            let changed = self.nodes.leases().changes_since(&view.leases).next().is_some();
            if changed {
                view.leases = self.nodes.leases().clone();
            }
            let first = matches!(view.origin, Origin::Cached { .. });
            view.origin = Origin::Live { revision };
            first || changed
        });
        let mut wrong = self.nodes.wrong();
        if let Own::Here(node) = &*self.own_node.borrow() {
            let overwrites = wrong_overwrites(
                &node.values,
                &self.read_options.families,
                &self.read_options.prefix,
            );
            wrong.extend(
                overwrites
                    .map(|why| (format!("node {}", node.name), format!("{why}; it is not used"))),
            );
        }
        let mut stats = self.api.stats();
        for (key, reason) in wrong.iter().filter(|new| !stats.skipped.contains(new)) {
            tracing::warn!(store = self.api.name(), %key, "wrong: {reason}");
        }
        stats.skipped = wrong;
    }
}

impl ReadOptions {
    pub(crate) fn own(&self, wire: &Wire<'_>) -> Own {
        wire.node(&self.prefix).map_or_else(Own::Wrong, |node| Own::Here(Arc::new(node)))
    }
}

/// What was said of an outage.
#[derive(Default)]
struct Lost {
    said: bool,
    refused: bool,
}

impl Lost {
    fn log(&mut self, following: &Following, failure: &Failure) {
        // That people must help is news even in an outage.
        let refused = matches!(failure, Failure::Refused(_) | Failure::Forbidden(_));
        if !self.said || (refused && !self.refused) {
            let leases = following.views.borrow().leases.len();
            let store = following.api.name();
            tracing::warn!(%store, "store lost, the last {leases} leases stay in force: {failure}");
        }
        (self.said, self.refused) = (true, refused);
    }

    fn found(&mut self, following: &Following) {
        if std::mem::take(self).said {
            let leases = following.views.borrow().leases.len();
            tracing::info!(store = following.api.name(), "the store answers, {leases} leases");
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "helpers of tests are tests")]
mod tests {
    use flannel_core::SubnetManager;
    use flannel_core::lease::{LeaseAttrs, Offer};
    use flannel_core::subnet::Readiness;
    use serde_json::json;

    use crate::testing::ApiServer;
    use crate::{KubeManager, KubeOptions, NodeIdentity};

    use super::*;

    #[tokio::test]
    async fn a_follower_that_died_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let server = ApiServer::new();
        let node = || json!({ "metadata": {}, "spec": { "podCIDR": "10.1.1.0/24" } });
        server.put_node("me", node());
        let mut options = KubeOptions::new(NodeIdentity::Node("me".to_owned()));
        options.api_url = Some(server.url());
        options.net_config = dir.path().join("net-conf.json");
        std::fs::write(
            &options.net_config,
            r#"{"Network":"10.1.0.0/16","Backend":{"Type":"vxlan"}}"#,
        )
        .unwrap();
        let manager = KubeManager::open(options).await.unwrap();
        let public = ["192.0.2.1".parse::<std::net::IpAddr>().unwrap()].into_iter().collect();
        let attrs = LeaseAttrs::from(Offer { public, kind: "vxlan".into(), ..Offer::default() });
        let held = manager.acquire_lease(&attrs).await.unwrap();
        manager.report(&Readiness::Ready).await.unwrap();
        let story = async {
            let until = async |condition: &dyn Fn() -> bool| {
                while !condition() {
                    sleep(Duration::from_millis(2)).await;
                }
            };
            let says = |status| {
                server
                    .condition("me", "NetworkUnavailable")
                    .is_some_and(|now| now["status"] == status)
            };
            until(&|| says("False") && server.count("watch=") == 1).await;
            // Something unforeseen.
            manager.shared.follow(|follower| follower.task.abort()).await.unwrap();
            let asked = server.requests().len();
            until(&|| server.count("NotOlderThan") == 2 && server.count("watch=") == 2).await;
            server.put_node("me", node());
            let annotation = || server.annotation("me", "flannel.alpha.coreos.com/backend-type");
            until(&|| says("False") && annotation().as_deref() == Some("vxlan")).await;
            let reason = "gone".to_owned();
            manager.report(&Readiness::NotReady { reason }).await.unwrap();
            until(&|| says("True")).await;
            assert!(server.requests().len() < asked + 20, "{:#?}", &server.requests()[asked..]);
        };
        tokio::select! {
            end = manager.hold_lease(&held) => panic!("{end:?}"),
            done = tokio::time::timeout(Duration::from_secs(20), story) => {
                done.unwrap_or_else(|_| panic!("it takes too long: {:#?}", server.requests()));
            }
        }
    }
}
