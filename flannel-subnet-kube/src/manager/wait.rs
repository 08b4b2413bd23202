//! Waits for what this node needs before it can have a lease, such as a PodCIDR.
//!
//! An attempt fails at once, so that its caller can report the reason. The next attempt begins when
//! the followed node shows that the reason has passed or changed. Because the watch may be late or
//! broken, it also begins after a growing pause.

use std::time::Duration;

use flannel_core::runtime::lock;
use flannel_core::{Config, Error, Result, SubnetManager};
use tokio::time::sleep;

use super::KubeManager;
use super::shared::Shared;
use crate::api::pause::Pause;
use crate::follow::Own;

/// The upper limit of the first pause.
const FIRST: Duration = Duration::from_secs(1);
/// The longest pause.
const LONGEST: Duration = Duration::from_secs(30);

/// Why the last attempt to get a lease failed.
#[derive(Debug)]
pub(crate) struct Obstacle {
    /// The reason of [`Error::NotReady`], until the next attempt waits.
    reason: Option<String>,
    pause: Pause,
}

impl Default for Obstacle {
    fn default() -> Self {
        Self { reason: None, pause: Pause::within(FIRST, LONGEST) }
    }
}

impl Shared {
    /// Notes the reason if a step towards a lease has failed because of this node.
    pub(crate) fn note_obstacle<T>(&self, step: Result<T>) -> Result<T> {
        if let Err(Error::NotReady { reason, .. }) = &step {
            lock(&self.obstacle).reason = Some(reason.clone());
        }
        step
    }

    /// Waits until the followed node no longer has the obstacle `reason`. If the node cannot be
    /// followed, it never returns.
    async fn obstacle_is_past(&self, config: &Config, reason: &str) {
        if let Ok(mut own) = self.follow_own().await
            && own.wait_for(|own| self.is_past(own, config, reason)).await.is_ok()
        {
            return;
        }
        std::future::pending::<()>().await;
    }

    /// Whether the followed node no longer has the obstacle `reason`.
    fn is_past(&self, own: &Own, config: &Config, reason: &str) -> bool {
        let Own::Here(node) = own else { return false };
        match self.terms(node, config) {
            Err(Error::NotReady { reason: now, .. }) => now != reason,
            _ => true,
        }
    }
}

impl KubeManager {
    /// Waits if the last attempt failed because of this node. The watch, another network config, or
    /// the pause ends the wait.
    pub(super) async fn wait_for_node(&self) {
        let shared = &*self.shared;
        let reason = lock(&shared.obstacle).reason.take();
        let config = lock(&shared.handed_out).clone();
        let (Some(reason), Some(config)) = (reason, config) else { return };
        let pause = lock(&shared.obstacle).pause.next();
        tokio::select! {
            () = shared.obstacle_is_past(&config, &reason) => {
                lock(&shared.obstacle).pause.reset();
            }
            _ = self.config_changed(&config) => {}
            () = sleep(pause) => {}
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "test helpers are test code")]
mod tests {
    use std::path::Path;

    use flannel_core::Lease;
    use flannel_core::lease::LeaseAttrs;
    use serde_json::{Value, json};
    use test_support::eventually_async;
    use tokio::time::{Instant, timeout};

    use crate::testing::ApiServer;
    use crate::{KubeOptions, NodeIdentity};

    use super::*;

    const HOUR: Duration = Duration::from_secs(3600);
    /// The time limit of all waits.
    const PATIENCE: Duration = Duration::from_secs(60);

    /// A server with the node `me`, and a manager whose waits have pauses of this length.
    async fn cluster(pause: Duration, node: Value) -> (ApiServer, tempfile::TempDir, KubeManager) {
        let server = ApiServer::new();
        let dir = tempfile::tempdir().unwrap();
        server.put_node("me", node);
        let mut options = KubeOptions::new(NodeIdentity::Node("me".to_owned()));
        options.api_url = Some(server.url());
        options.net_config = dir.path().join("net-conf.json");
        write_config(dir.path(), "10.1.0.0/16");
        let manager = KubeManager::open(options).await.unwrap();
        lock(&manager.shared.obstacle).pause = Pause::within(pause, pause);
        (server, dir, manager)
    }

    fn write_config(dir: &Path, network: &str) {
        let config = json!({ "Network": network, "Backend": { "Type": "vxlan" } });
        std::fs::write(dir.join("net-conf.json"), config.to_string()).unwrap();
    }

    fn with_cidr(cidr: &str) -> Value {
        json!({ "spec": { "podCIDR": cidr } })
    }

    /// The requests of one start of a daemon.
    async fn attempt(manager: &KubeManager) -> Result<Lease> {
        let requests = async {
            manager.network_config().await?;
            manager.hints().await?;
            manager.watch_leases().await?;
            manager.acquire_lease(&LeaseAttrs::default()).await
        };
        timeout(PATIENCE, requests).await.expect("it takes too long")
    }

    fn reason(attempt: Result<Lease>) -> String {
        match attempt {
            Err(Error::NotReady { reason, .. }) => reason,
            other => panic!("{other:?}"),
        }
    }

    #[tokio::test]
    async fn the_watch_ends_the_wait_and_the_node_is_not_read_meanwhile() {
        let (server, _dir, manager) = cluster(HOUR, json!({})).await;
        assert!(reason(attempt(&manager).await).contains("it has no IPv4 PodCIDR yet"));
        let changes = async {
            let watched = async || server.count("watch=") == 1;
            eventually_async(PATIENCE, watched, || "there is no watch").await;
            server.heartbeat("me");
            server.modify("me", |node| node["metadata"]["labels"] = json!({ "a": "b" }));
            server.put_node("me", with_cidr("10.9.0.0/24"));
        };
        let (second, ()) = tokio::join!(attempt(&manager), changes);
        assert!(reason(second).contains("10.9.0.0/24 lies outside"), "the new reason is returned");
        let changes = async { server.put_node("me", with_cidr("10.1.1.0/24")) };
        let (third, ()) = tokio::join!(attempt(&manager), changes);
        assert_eq!(third.unwrap().subnets.to_string(), "10.1.1.0-24");
        // One by the first config, two by each attempt, and one by the list.
        assert_eq!(server.count("GET /api/v1/nodes/me"), 8, "{:#?}", server.requests());
    }

    #[tokio::test]
    async fn a_pause_ends_the_wait_if_nothing_is_followed() {
        let pause = Duration::from_millis(40);
        let (server, _dir, manager) = cluster(pause, json!({})).await;
        server.forbid("list", "nodes");
        reason(attempt(&manager).await);
        let begin = Instant::now();
        reason(attempt(&manager).await);
        assert!(begin.elapsed() >= pause / 2, "{:?}", begin.elapsed());
        server.put_node("me", with_cidr("10.1.1.0/24"));
        assert_eq!(attempt(&manager).await.unwrap().subnets.to_string(), "10.1.1.0-24");
    }

    #[tokio::test]
    async fn a_corrected_config_ends_the_wait() {
        let (_server, dir, manager) = cluster(HOUR, with_cidr("10.2.1.0/24")).await;
        assert!(reason(attempt(&manager).await).contains("lies outside the pod network"));
        write_config(dir.path(), "10.2.0.0/16");
        assert_eq!(attempt(&manager).await.unwrap().subnets.to_string(), "10.2.1.0-24");
    }
}
