//! The node condition `NetworkUnavailable`, by which Kubernetes schedules no pods to a node without
//! a network.
//!
//! It shows the reported [`Readiness`], and is restored if another program changes it.
//!
//! **Source**: flannel `pkg/subnet/kube/kube.go: CompleteLease, setNodeNetworkUnavailableFalse`. Go
//! flannel writes it once, before peers are reachable, and never again.

use std::sync::Arc;
use std::time::Duration;

use flannel_core::logging::LogRateLimiter;
use flannel_core::runtime::or_never;
use flannel_core::subnet::Readiness;
use flannel_core::{Error, Result};
use k8s_openapi::api::core::v1::NodeCondition;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use serde_json::json;
use tokio::sync::watch;
use tokio::time::Instant;

use super::shared::Shared;
use crate::api::pause::Pause;
use crate::follow::Own;
use crate::node::{CONDITION, Node};

/// How long a network must not be ready before the condition says so. After an outage of the API
/// server the first report of a daemon that was restarted may be old.
const SETTLE: Duration = Duration::from_secs(2);

/// The desired condition.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Desired {
    status: &'static str,
    reason: &'static str,
    message: String,
}

impl Desired {
    fn unavailable(message: &str) -> Self {
        Self { status: "True", reason: "FlannelIsDown", message: message.to_owned() }
    }

    /// The condition that shows this readiness, or `None` if the condition is not to be changed.
    fn of(readiness: &Readiness) -> Option<Self> {
        match readiness {
            Readiness::Ready => Some(Self {
                status: "False",
                reason: "FlannelIsUp",
                message: "Flannel is running on this node".to_owned(),
            }),
            Readiness::NotReady { reason } => Some(Self::unavailable(reason)),
            _ => None,
        }
    }

    fn is_in(&self, node: &Node) -> bool {
        node.condition.as_ref().is_some_and(|condition| {
            condition.status == self.status
                && condition.reason == self.reason
                && condition.message == self.message
        })
    }

    fn log_as_set(&self, node: &str) {
        let Self { status, reason, message } = self;
        tracing::info!(
            node,
            condition = %CONDITION,
            %status,
            %reason,
            text = %message,
            "a condition of this node was set"
        );
    }
}

/// Keeps this node's condition equal to the last report. Failures are repeated endlessly.
pub(crate) async fn keep(shared: Arc<Shared>) {
    let mut readiness = shared.readiness.subscribe();
    let mut own = shared.own_at_last().await;
    let mut keeper = Keeper::new(Arc::clone(&shared));
    loop {
        let desired = readiness.borrow_and_update().as_ref().and_then(Desired::of);
        let followed = own.borrow_and_update().clone();
        let node = if let Own::Here(node) = &followed { Some(&**node) } else { None };
        let pause = keeper.look(desired, node).await;
        tokio::select! {
            () = or_never(pause.map(tokio::time::sleep)) => {}
            changed = readiness.changed() => if changed.is_err() {
                // The manager was dropped, and no report will follow.
                std::future::pending::<()>().await;
            },
            // A new follower was started.
            changed = own.changed() => if changed.is_err() {
                tokio::time::sleep(keeper.pause.next()).await;
                own = shared.own_at_last().await;
            },
        }
    }
}

/// Since when the condition of the followed node is false, although the network is not ready.
#[derive(Debug, Default)]
struct Settling(Option<Instant>);

impl Settling {
    /// The time to wait before the condition may be written, or `None`. `becomes_true` says that
    /// the condition is false, and the network is not ready.
    fn left(&mut self, becomes_true: bool, now: Instant) -> Option<Duration> {
        if !becomes_true {
            self.0 = None;
            return None;
        }
        let since = *self.0.get_or_insert(now);
        SETTLE.checked_sub(now.duration_since(since)).filter(|left| !left.is_zero())
    }
}

/// Writes the condition of a node, and the log.
struct Keeper {
    shared: Arc<Shared>,
    pause: Pause,
    settling: Settling,
    /// The condition that the node had last.
    placed: Option<Desired>,
    begin: Instant,
    /// Log lines: another writer changed the condition.
    changes: LogRateLimiter,
    /// The log has a line about the present outage.
    is_outage_logged: bool,
}

impl Keeper {
    fn new(shared: Arc<Shared>) -> Self {
        Self {
            shared,
            pause: Pause::new(),
            settling: Settling::default(),
            placed: None,
            begin: Instant::now(),
            changes: LogRateLimiter::default(),
            is_outage_logged: false,
        }
    }

    /// Writes the condition if the followed node has another one. Returns the pause after which to
    /// look again, or `None` if only a change can require a write.
    async fn look(&mut self, desired: Option<Desired>, node: Option<&Node>) -> Option<Duration> {
        let condition = node.and_then(|node| node.condition.as_ref());
        let becomes_true = desired.as_ref().is_some_and(|desired| desired.status == "True")
            && condition.is_some_and(|condition| condition.status == "False");
        if let Some(wait) = self.settling.left(becomes_true, Instant::now()) {
            return Some(wait);
        }
        let desired = desired?;
        let node = node?;
        if desired.is_in(node) {
            self.pause.reset();
            self.placed = Some(desired);
            return None;
        }
        match self.shared.write_condition(&desired).await {
            Ok(written) => {
                self.is_outage_logged = false;
                if written {
                    self.log(&desired, &node.name);
                    // Two writers of different values must not write at full speed.
                    tokio::time::sleep(self.pause.next()).await;
                }
                self.placed = Some(desired);
                None
            }
            Err(error) => {
                if !std::mem::replace(&mut self.is_outage_logged, true) {
                    tracing::warn!(
                        condition = %CONDITION,
                        %error,
                        "a condition of this node cannot be set, retrying"
                    );
                }
                Some(self.pause.failed())
            }
        }
    }

    fn log(&mut self, desired: &Desired, node: &str) {
        if self.placed.as_ref() != Some(desired) {
            desired.log_as_set(node);
        } else if let Some(more) = self.changes.line(self.begin.elapsed(), desired.reason) {
            tracing::warn!(
                node, condition = %CONDITION, more,
                "another writer changed a condition of this node, restoring it"
            );
        }
    }
}

impl Shared {
    /// Sets the condition to true if it is false, because this node starts without a network and an
    /// earlier boot may have left it. An absent condition stays absent.
    ///
    /// # Errors
    /// The node cannot be read, or its status cannot be written. A refusal is not an error, so that
    /// the node gets its network. The next write of the condition reports it.
    pub(crate) async fn withdraw_condition(&self) -> Result<()> {
        match self.set_false_condition_to_true().await {
            Err(Error::Refused { .. }) => Ok(()),
            outcome => outcome,
        }
    }

    async fn set_false_condition_to_true(&self) -> Result<()> {
        let (node, _) = self.own_node().await?;
        if node.condition.as_ref().is_some_and(|condition| condition.status == "False") {
            let desired = Desired::unavailable("flannel has only just been started");
            self.set_condition(&node, &desired).await?;
            desired.log_as_set(&node.name);
        }
        Ok(())
    }

    /// Waits until this node is followed, and returns its followed state.
    pub(crate) async fn own_at_last(&self) -> watch::Receiver<Own> {
        let mut pause = Pause::new();
        loop {
            match self.follow_own().await {
                Ok(own) => return own,
                // The request for a lease reports the error.
                Err(_) => tokio::time::sleep(pause.next()).await,
            }
        }
    }

    /// Writes the condition unless the node has it. Returns whether it was written.
    async fn write_condition(&self, desired: &Desired) -> Result<bool> {
        // The followed view may be older than the last write.
        let (node, _) = self.own_node().await?;
        if desired.is_in(&node) {
            return Ok(false);
        }
        self.set_condition(&node, desired).await?;
        Ok(true)
    }

    async fn set_condition(&self, node: &Node, desired: &Desired) -> Result<()> {
        let Desired { status, reason, message } = desired;
        let old = node.condition.as_ref().filter(|old| old.status == *status);
        let since = old.and_then(|old| old.since.as_ref()?.parse::<Timestamp>().ok()).map(Time);
        let now = Timestamp::from_second(Timestamp::now().as_second()).ok().map(Time);
        let condition = NodeCondition {
            type_: CONDITION.to_owned(),
            status: (*status).to_owned(),
            reason: Some((*reason).to_owned()),
            message: Some(message.clone()),
            last_heartbeat_time: now.clone(),
            // Another reason alone is not a transition.
            last_transition_time: since.or(now),
        };
        self.patch(json!({ "status": { "conditions": [condition] } })).await.map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_condition_becomes_true_after_two_seconds_without_a_pause() {
        let mut settling = Settling::default();
        let begin = Instant::now();
        let mut left = |becomes_true, at| {
            let left = settling.left(becomes_true, begin + Duration::from_secs(at));
            left.map(|left| left.as_secs())
        };
        assert_eq!(left(true, 9), Some(2));
        assert_eq!(left(true, 10), Some(1));
        assert_eq!(left(false, 10), None);
        assert_eq!(left(true, 11), Some(2));
        assert_eq!(left(true, 13), None);
        assert_eq!(left(true, 14), None);
    }
}
