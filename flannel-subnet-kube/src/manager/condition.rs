//! The node condition `NetworkUnavailable`, by which Kubernetes schedules no pods to a node without
//! a network.
//!
//! It shows the reported [`Readiness`], and is restored if another program changes it.
//!
//! **Source**: flannel `pkg/subnet/kube/kube.go: CompleteLease, setNodeNetworkUnavailableFalse`. Go
//! flannel writes it once, before peers are reachable, and never again.

use std::sync::Arc;

use flannel_core::subnet::Readiness;
use flannel_core::{Error, Result};
use k8s_openapi::api::core::v1::NodeCondition;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use serde_json::json;
use tokio::sync::watch;

use super::shared::Shared;
use crate::api::pause::Pause;
use crate::follow::Own;
use crate::node::{CONDITION, Node};

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

    /// `None`: the condition is not changed.
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
}

/// Keeps this node's condition equal to the last report. Failures are repeated endlessly, with one
/// log line for each outage.
pub(crate) async fn keep(shared: Arc<Shared>) {
    let mut readiness = shared.readiness.subscribe();
    let mut pause = Pause::new();
    let mut logged = false;
    let mut own = shared.own_at_last().await;
    loop {
        let desired = readiness.borrow_and_update().as_ref().and_then(Desired::of);
        let followed = own.borrow_and_update().clone();
        let mut again = None;
        if let (Some(desired), Own::Here(node)) = (desired, followed)
            && !desired.is_in(&node)
        {
            match shared.write_condition(&desired).await {
                Ok(false) => logged = false,
                Ok(true) => {
                    logged = false;
                    // Two writers of different values must not write at full speed.
                    tokio::time::sleep(pause.next()).await;
                }
                Err(error) => {
                    if !std::mem::replace(&mut logged, true) {
                        tracing::warn!(
                            condition = %CONDITION,
                            %error,
                            "a condition of this node cannot be set, retrying"
                        );
                    }
                    again = Some(pause.next());
                }
            }
        } else {
            pause.reset();
        }
        let retry = async {
            match again {
                Some(pause) => tokio::time::sleep(pause).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = retry => {}
            changed = readiness.changed() => if changed.is_err() {
                // The manager was dropped, and no report will follow.
                std::future::pending::<()>().await;
            },
            // A new follower was started.
            changed = own.changed() => if changed.is_err() {
                tokio::time::sleep(pause.next()).await;
                own = shared.own_at_last().await;
            },
        }
    }
}

impl Shared {
    /// Sets the condition to true if it is false, because this node starts without a network and an
    /// earlier boot may have left it. An absent condition stays absent.
    ///
    /// # Errors
    /// The node cannot be read, or its status cannot be written. A refusal is not an error: it is
    /// reported at the next write of the condition, and the node gets its network.
    pub(crate) async fn withdraw_condition(&self) -> Result<()> {
        let desired = Desired::unavailable("flannel has only just been started");
        let withdraw = async || {
            let (node, _) = self.own_node().await?;
            if node.condition.as_ref().is_some_and(|condition| condition.status == "False") {
                self.write_condition(&desired).await?;
            }
            Ok(())
        };
        match withdraw().await {
            Err(Error::Refused { .. }) => Ok(()),
            withdrawn => withdrawn,
        }
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
        self.patch(json!({ "status": { "conditions": [condition] } })).await?;
        tracing::info!(
            node = %node.name,
            condition = %CONDITION,
            %status,
            %reason,
            text = %message,
            "a condition of this node was set"
        );
        Ok(true)
    }
}
