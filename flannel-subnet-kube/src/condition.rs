//! The node condition `NetworkUnavailable`, by which Kubernetes keeps pods away from a node without
//! a network.
//!
//! It says what was reported ([`Readiness`]), and is kept so whatever else writes it.
//!
//! **Source**: flannel `pkg/subnet/kube/kube.go: CompleteLease, setNodeNetworkUnavailableFalse`. Different on purpose: Go flannel writes it once, before
//! peers can be reached, and never again.

use std::sync::Arc;

use flannel_core::subnet::Readiness;
use flannel_core::{Error, Result};
use k8s_openapi::api::core::v1::NodeCondition;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use serde_json::json;
use tokio::sync::watch;

use crate::follow::Own;
use crate::node::{CONDITION, Node};
use crate::pause::Pause;
use crate::shared::Shared;

/// What the condition is to say.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Wanted {
    status: &'static str,
    reason: &'static str,
    message: String,
}

impl Wanted {
    fn unavailable(message: &str) -> Self {
        Self { status: "True", reason: "FlannelIsDown", message: message.to_owned() }
    }

    /// `None`: the condition is left as it is.
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

/// Keeps this node's condition as it was reported last. Failures are repeated for ever, with one
/// line in the log for each outage.
pub(crate) async fn keep(shared: Arc<Shared>) {
    let mut readiness = shared.readiness.subscribe();
    let mut pause = Pause::new();
    let mut said = false;
    let mut own = shared.own_at_last().await;
    loop {
        let wanted = readiness.borrow_and_update().as_ref().and_then(Wanted::of);
        let seen = own.borrow_and_update().clone();
        let mut again = None;
        if let (Some(wanted), Own::Here(node)) = (wanted, seen)
            && !wanted.is_in(&node)
        {
            match shared.write_condition(&wanted).await {
                Ok(false) => said = false,
                Ok(true) => {
                    said = false;
                    // Two writers that contradict each other must not do so at full speed.
                    tokio::time::sleep(pause.next()).await;
                }
                Err(error) => {
                    if !std::mem::replace(&mut said, true) {
                        tracing::warn!(
                            "this node's condition {CONDITION} cannot be set, trying on: {error}"
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
                // Nobody will say more.
                std::future::pending::<()>().await;
            },
            // Nodes are followed anew.
            changed = own.changed() => if changed.is_err() {
                tokio::time::sleep(pause.next()).await;
                own = shared.own_at_last().await;
            },
        }
    }
}

impl Shared {
    /// Makes the condition true if it is false, and leaves one alone that is not there: this node
    /// starts without a network, and an earlier boot may have left the condition.
    ///
    /// # Errors
    /// The node cannot be read, or its status not be written. A refusal is none: it is reported
    /// when the condition is written the next time, and is no reason to have no network.
    pub(crate) async fn withdraw_condition(&self) -> Result<()> {
        let wanted = Wanted::unavailable("flannel has only just been started");
        let withdraw = async || {
            let (node, _) = self.own_node().await?;
            if node.condition.as_ref().is_some_and(|condition| condition.status == "False") {
                self.write_condition(&wanted).await?;
            }
            Ok(())
        };
        match withdraw().await {
            Err(Error::Refused { .. }) => Ok(()),
            withdrawn => withdrawn,
        }
    }

    /// What is known of this node, once it can be known.
    pub(crate) async fn own_at_last(&self) -> watch::Receiver<Own> {
        let mut pause = Pause::new();
        loop {
            match self.follow_own().await {
                Ok(own) => return own,
                // Who asks for a lease gets the error.
                Err(_) => tokio::time::sleep(pause.next()).await,
            }
        }
    }

    /// Writes the condition unless the node has it already. Returns whether it had not.
    async fn write_condition(&self, wanted: &Wanted) -> Result<bool> {
        // It may have been seen as it was before it was written.
        let (node, _) = self.own_node().await?;
        if wanted.is_in(&node) {
            return Ok(false);
        }
        let Wanted { status, reason, message } = wanted;
        let old = node.condition.as_ref().filter(|old| old.status == *status);
        let since = old.and_then(|old| old.since.as_ref()?.parse::<Timestamp>().ok()).map(Time);
        let now = Timestamp::from_second(Timestamp::now().as_second()).ok().map(Time);
        let condition = NodeCondition {
            type_: CONDITION.to_owned(),
            status: (*status).to_owned(),
            reason: Some((*reason).to_owned()),
            message: Some(message.clone()),
            last_heartbeat_time: now.clone(),
            // Another reason is no transition.
            last_transition_time: since.or(now),
        };
        self.patch(json!({ "status": { "conditions": [condition] } })).await?;
        tracing::info!(node = %node.name, "condition {CONDITION} is {status}: {message}");
        Ok(true)
    }
}
