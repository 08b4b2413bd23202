//! The leases of all nodes, kept up to date by a list and a watch.
//!
//! The view does not change before a list is complete. A watch continues from the last complete
//! version. If changes were missed, nodes are listed again.

mod list;
mod nodes;
mod outage;
mod split;
mod watch;

use std::collections::HashSet;
use std::sync::Arc;

use flannel_core::lease::{Origin, Revision, View};
use flannel_core::runtime::Task;
use flannel_core::subnet::SkippedEntry;
use tokio::sync::watch::{Receiver, Sender, channel};
use tokio::time::sleep;

use crate::api::pause::Pause;
use crate::api::{Api, Failure};
use crate::node::annotations::wrong_overwrites;
use crate::node::{Node, Wire};
use list::{Freshness, LateCache};
use nodes::Nodes;
pub(crate) use nodes::ReadOptions;
use outage::OutageLog;

/// The largest number of new problems that have a line each in the log. The others share a line.
const LINES: usize = 5;

/// This node among the followed nodes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Own {
    /// No list is complete yet.
    Unknown,
    /// The node does not exist.
    Gone,
    /// The node exists.
    Here(Arc<Node>),
    /// The node exists, but cannot be decoded, for this reason.
    Wrong(String),
}

/// Follows all nodes until it is dropped.
#[derive(Debug)]
pub(crate) struct Follower {
    pub(crate) read_options: ReadOptions,
    pub(crate) views: Receiver<View>,
    pub(crate) own: Receiver<Own>,
    /// Only a test uses it. Its drop ends the task.
    #[cfg_attr(not(test), expect(dead_code))]
    pub(crate) task: Task,
}

impl Follower {
    /// Starts on the current runtime. `own` is this node's name.
    pub(crate) fn start(api: Arc<Api>, read_options: ReadOptions, own: String) -> Self {
        let (views, view_receiver) = channel(View::unknown());
        let (own_node, own_receiver) = channel(Own::Unknown);
        let following = Following {
            api,
            nodes: Nodes::new(read_options.clone(), own.clone()),
            late: None,
            unreadable: String::new(),
            read_options: read_options.clone(),
            own,
            views,
            own_node,
        };
        let task = Task::spawn(following.run());
        Self { read_options, views: view_receiver, own: own_receiver, task }
    }

    /// Whether its task still runs.
    pub(crate) fn is_running(&self) -> bool {
        // A closed channel is an error.
        self.own.has_changed().is_ok()
    }
}

/// The task of a [`Follower`].
struct Following {
    api: Arc<Api>,
    read_options: ReadOptions,
    nodes: Nodes,
    /// `None` unless the server's cache was late at the last list.
    late: Option<LateCache>,
    /// The last logged error of an event that could not be read.
    unreadable: String,
    /// The name of this node.
    own: String,
    views: Sender<View>,
    own_node: Sender<Own>,
}

impl Following {
    async fn run(mut self) {
        let mut pause = Pause::new();
        let mut outage = OutageLog::default();
        let mut freshness = Freshness::Own;
        loop {
            match self.list(&freshness).await {
                Ok(version) => {
                    outage.ends(&self);
                    freshness = self.watch_from(version, &mut pause, &mut outage).await;
                }
                // The server answers, but the pages took too long.
                Err(Failure::Gone) => {
                    tracing::debug!(
                        store = self.api.name(),
                        "the list was not complete in time, listing again"
                    );
                    sleep(pause.next()).await;
                }
                Err(failure) => {
                    outage.begins(&self, &failure);
                    pause.after(&failure).await;
                }
            }
        }
    }

    /// Publishes the state of this node. Notifies receivers only if it has changed.
    fn set_own(&self, own: Own) {
        self.own_node.send_if_modified(|now| {
            let has_changed = *now != own;
            *now = own;
            has_changed
        });
    }

    /// Notes that the leases are equal at a later version. Does not notify receivers.
    fn unchanged(&self, revision: Revision) {
        self.views.send_if_modified(|view| {
            view.origin = Origin::Live { revision };
            false
        });
    }

    /// Publishes the leases. Notifies receivers only if leases changed or became live.
    fn publish(&self, revision: Revision) {
        self.views.send_if_modified(|view| {
            let has_changed = self.nodes.leases().changes_since(&view.leases).next().is_some();
            if has_changed {
                view.leases = self.nodes.leases().clone();
            }
            let is_first = matches!(view.origin, Origin::Cached { .. });
            view.origin = Origin::Live { revision };
            is_first || has_changed
        });
        self.publish_problems();
    }

    /// Notes the problems of nodes in the status, and logs the new problems.
    fn publish_problems(&self) {
        let mut problems = self.nodes.problems();
        if let Own::Here(node) = &*self.own_node.borrow() {
            let ReadOptions { prefix, families } = &self.read_options;
            problems.extend(wrong_overwrites(&node.values, families, prefix).map(|why| {
                let key = format!("node {}", node.name);
                SkippedEntry::new(key, format!("{why}; it is not used"))
            }));
        }
        let mut stats = self.api.stats();
        let known: HashSet<_> = std::mem::take(&mut stats.skipped).into_iter().collect();
        let mut new = problems.iter().filter(|problem| !known.contains(*problem));
        for SkippedEntry { key, reason, .. } in new.by_ref().take(LINES) {
            tracing::warn!(store = self.api.name(), %key, %reason, "a node has a problem");
        }
        let more = new.count();
        if more > 0 {
            tracing::warn!(more, store = self.api.name(), "more nodes have a problem");
        }
        stats.skipped = problems;
    }
}

impl ReadOptions {
    fn own(&self, wire: &Wire<'_>) -> Own {
        wire.node(&self.prefix).map_or_else(Own::Wrong, |node| Own::Here(Arc::new(node)))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "test helpers are test code")]
mod tests {
    use std::time::Duration;

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
        let attrs = LeaseAttrs::from(Offer::new(public).with_kind("vxlan"));
        let held = manager.acquire_lease(&attrs).await.unwrap();
        manager.report(&Readiness::Ready).await.unwrap();
        let steps = async {
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
            // The task ends as after a panic.
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
            done = tokio::time::timeout(Duration::from_secs(20), steps) => {
                done.unwrap_or_else(|_| panic!("it takes too long: {:#?}", server.requests()));
            }
        }
    }
}
