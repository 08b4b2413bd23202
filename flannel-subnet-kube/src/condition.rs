//! The node condition `NetworkUnavailable`, by which Kubernetes keeps pods away from a node without a network.
//!
//! The one thing to know: it says what somebody else found out ([`Network`]), and is kept so whoever else writes it.
//!
//! **Source**: flannel `pkg/subnet/kube/kube.go: CompleteLease, setNodeNetworkUnavailableFalse`. Different on purpose: Go flannel writes it once, before
//! peers can be reached, and never again.

use std::convert::Infallible;

use flannel_core::Result;
use k8s_openapi::api::core::v1::NodeCondition;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use serde_json::json;
use tokio::sync::watch;

use crate::follow::Own;
use crate::manager::KubeManager;
use crate::node::{CONDITION, Condition, Node};
use crate::pause::Pause;

/// How this node's network is, for the condition `NetworkUnavailable`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Network {
    /// It is in place.
    Available,
    /// It is not, and why, as a sentence without a full stop.
    Unavailable(String),
}

impl Network {
    /// Status, reason and message.
    fn texts(&self) -> (&str, &str, &str) {
        match self {
            Self::Available => ("False", "FlannelIsUp", "Flannel is running on this node"),
            Self::Unavailable(why) => ("True", "FlannelIsDown", why),
        }
    }

    fn is_told_by(&self, node: &Node) -> bool {
        let (status, reason, message) = self.texts();
        let says = |condition: &Condition| {
            (condition.status.as_str(), condition.reason.as_str(), condition.message.as_str())
                == (status, reason, message)
        };
        node.condition.as_ref().is_some_and(says)
    }
}

impl KubeManager {
    /// Makes this node's condition `NetworkUnavailable` say what `network` says, and keeps it so; `None`: leaves it as it is.
    /// Failures are repeated for ever, with one line in the log for each outage.
    ///
    /// # Cancel safety
    /// Dropping the future leaves the condition as it is.
    pub async fn keep_condition(
        &self,
        mut network: watch::Receiver<Option<Network>>,
    ) -> Infallible {
        let mut pause = Pause::new();
        let mut said = false;
        let mut own = self.own_at_last().await;
        loop {
            let wanted = network.borrow_and_update().clone();
            let seen = own.borrow_and_update().clone();
            let mut again = None;
            if let (Some(wanted), Own::Here(node)) = (wanted, seen)
                && !wanted.is_told_by(&node)
            {
                match self.tell(&wanted).await {
                    Ok(false) => said = false,
                    Ok(true) => {
                        said = false;
                        // Two who both tell what they know must not do so at full speed.
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
                changed = network.changed() => if changed.is_err() {
                    // Nobody will say more.
                    std::future::pending::<()>().await;
                },
                // Nodes are followed anew.
                changed = own.changed() => if changed.is_err() {
                    tokio::time::sleep(pause.next()).await;
                    own = self.own_at_last().await;
                },
            }
        }
    }

    /// Makes this node's condition `NetworkUnavailable` true if it is false, and leaves one alone that is not there: for a daemon that
    /// starts on a node without a network, where an earlier boot may have left it. `why` is a sentence without a full stop.
    ///
    /// # Errors
    /// The node cannot be read, or its status not be written.
    pub async fn withdraw_condition(&self, why: &str) -> Result<()> {
        let (node, _) = self.own_node().await?;
        if node.condition.as_ref().is_some_and(|condition| condition.status == "False") {
            self.tell(&Network::Unavailable(why.to_owned())).await?;
        }
        Ok(())
    }

    /// What is known of this node, once it can be known.
    pub(crate) async fn own_at_last(&self) -> watch::Receiver<Own> {
        let mut pause = Pause::new();
        loop {
            match self.follow_own().await {
                Ok(own) => return own,
                // Whoever wants a lease is told why.
                Err(_) => tokio::time::sleep(pause.next()).await,
            }
        }
    }

    /// Writes the condition unless the node has it already. Returns whether it had not.
    async fn tell(&self, network: &Network) -> Result<bool> {
        // It may have been seen as it was before it was told.
        let (node, _) = self.own_node().await?;
        if network.is_told_by(&node) {
            return Ok(false);
        }
        let (status, reason, message) = network.texts();
        let old = node.condition.as_ref().filter(|old| old.status == status);
        let since = old.and_then(|old| old.since.as_ref()?.parse::<Timestamp>().ok()).map(Time);
        let now = Timestamp::from_second(Timestamp::now().as_second()).ok().map(Time);
        let condition = NodeCondition {
            type_: CONDITION.to_owned(),
            status: status.to_owned(),
            reason: Some(reason.to_owned()),
            message: Some(message.to_owned()),
            last_heartbeat_time: now.clone(),
            // Another reason is no transition.
            last_transition_time: since.or(now),
        };
        self.patch(json!({ "status": { "conditions": [condition] } })).await?;
        tracing::info!(node = %node.name, "condition {CONDITION} is {status}: {message}");
        Ok(true)
    }
}
