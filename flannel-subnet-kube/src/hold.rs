//! Keeping the lease: what this node published stays published, and other PodCIDRs move it.
//!
//! The one thing to know: what looks different from what was published is judged by reading the node itself, since what is followed may
//! come late. A node that is gone may come back, and this node waits for it.

use std::sync::Arc;

use flannel_core::{Family, Lease, LeaseEnd, Result};

use crate::follow::Own;
use crate::manager::KubeManager;
use crate::node::Node;
use crate::pause::Pause;

impl KubeManager {
    /// Watches this node until it has other subnets.
    pub(crate) async fn hold(&self, held: &Lease) -> Result<LeaseEnd> {
        let mut own = self.follow_own().await?;
        let families: Vec<Family> = held.subnets.iter().map(|subnet| subnet.family()).collect();
        let (mut pause, mut said) = (Pause::new(), false);
        loop {
            let now = own.borrow_and_update().clone();
            match &now {
                Own::Unknown => {}
                Own::Gone => self.lose("there is no such node any more"),
                Own::Wrong(wrong) => self.lose(wrong),
                Own::Here(node) => match node.subnets(&families) {
                    Ok(Some(subnets)) if subnets == held.subnets => self.regain(),
                    Ok(Some(to)) => {
                        self.lose(&format!("its PodCIDRs make it {to}"));
                        return Ok(LeaseEnd::Moved { to });
                    }
                    Ok(None) => self.lose("it has no PodCIDR any more"),
                    Err(wrong) => self.lose(&wrong),
                },
            }
            if let Own::Here(node) = now
                && self.lost.borrow().is_none()
            {
                match self.mend(&node, held).await {
                    Ok(false) => said = false,
                    Ok(true) => {
                        (said, _) = (false, pause.reset());
                        // Two who both put back what they want must not do so at full speed.
                        tokio::time::sleep(pause.next()).await;
                    }
                    Err(error) => {
                        if !std::mem::replace(&mut said, true) {
                            tracing::warn!(subnets = %held.subnets, "this node's annotations cannot be put back, trying on: {error}");
                        }
                        tokio::select! {
                            () = tokio::time::sleep(pause.next()) => {}
                            _ = own.changed() => {}
                        }
                        continue;
                    }
                }
            }
            if own.changed().await.is_err() {
                // The follower ends with this manager only.
                std::future::pending::<()>().await;
            }
        }
    }

    /// Puts back what is missing of this node's annotations. Returns whether something was.
    async fn mend(&self, seen: &Arc<Node>, held: &Lease) -> Result<bool> {
        if self.missing(seen, &held.attrs)?.1.is_empty() {
            return Ok(false);
        }
        // It may have been seen as it was before it was annotated.
        let (node, _) = self.own_node().await?;
        let (_, missing) = self.missing(&node, &held.attrs)?;
        if missing.is_empty() {
            return Ok(false);
        }
        let names: Vec<&str> = missing.keys().map(|name| &**name).collect();
        tracing::warn!(
            node = %node.name,
            "somebody removed or changed what this node published ({}); putting it back",
            names.join(", ")
        );
        self.annotate(&node, &held.attrs).await?;
        Ok(true)
    }

    fn lose(&self, why: &str) {
        self.lost.send_if_modified(|lost| {
            if lost.as_deref() == Some(why) {
                return false;
            }
            tracing::warn!(store = self.api.name(), "this node's lease is lost: {why}");
            *lost = Some(why.to_owned());
            true
        });
    }

    fn regain(&self) {
        if self.lost.send_if_modified(|lost| lost.take().is_some()) {
            tracing::info!(store = self.api.name(), "this node has its lease again");
        }
    }
}
