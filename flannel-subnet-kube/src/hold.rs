//! Keeping the lease: what this node published stays published, and other PodCIDRs move it.
//!
//! What looks different from what was published is judged by reading the node itself, since what is
//! followed may come late. A node that is gone may come back, and one whose PodCIDRs make no lease
//! may get others: the network stays until then.

use std::sync::{Arc, PoisonError};
use std::time::{Duration, SystemTime};

use flannel_core::address::Family;
use flannel_core::subnet::{LeaseEnd, Loss, Ownership};
use flannel_core::{Error, Lease, Result};
use tokio::time::{Instant, sleep};

use crate::annotations::{Values, says, wanted};
use crate::follow::Own;
use crate::node::Node;
use crate::own::missing;
use crate::pause::Pause;
use crate::shared::Shared;

/// Whoever touches nothing for so long fights no more.
const PEACE: Duration = Duration::from_secs(60);

/// Two writers that restore contradicting values must not do so at full speed.
struct Fight {
    pause: Pause,
    /// When something was last put back.
    last: Option<Instant>,
}

impl Fight {
    /// Something is to be put back, whether or not that succeeds. Returns whether this is a new
    /// fight.
    fn begins(&mut self) -> bool {
        let new = self.last.is_none_or(|last| last.elapsed() >= PEACE);
        if new {
            self.pause.reset();
        }
        self.last = Some(Instant::now());
        new
    }

    async fn goes_on(&mut self) {
        sleep(self.pause.next()).await;
        self.last = Some(Instant::now());
    }
}

impl Shared {
    /// Watches this node until it has other subnets.
    pub(crate) async fn hold(&self, held: &Lease) -> Result<LeaseEnd> {
        let mut own = self.follow_own().await?;
        let families: Vec<Family> = held.subnets.iter().map(|subnet| subnet.family()).collect();
        let (mut pause, mut said) = (Pause::new(), false);
        let mut fight = Fight { pause: Pause::new(), last: None };
        loop {
            let seen = own.borrow_and_update().clone();
            match self.look(seen, held, &families, &mut fight).await {
                Ok(Some(end)) => return Ok(end),
                Ok(None) => {
                    (said, _) = (false, pause.reset());
                    if own.changed().await.is_err() {
                        // Nodes are followed anew.
                        sleep(pause.next()).await;
                        own = self.own_at_last().await;
                    }
                }
                Err(error) => {
                    if !std::mem::replace(&mut said, true) {
                        tracing::warn!(subnets = %held.subnets, "this node cannot be read, or its annotations not be put back, trying on: {error}");
                    }
                    let pause = pause.next();
                    tokio::select! {
                        () = sleep(pause) => {}
                        changed = own.changed() => if changed.is_err() {
                            sleep(pause).await;
                            own = self.own_at_last().await;
                        },
                    }
                }
            }
        }
    }

    /// Judges this node as it was seen, and puts back what is missing.
    async fn look(
        &self,
        seen: Own,
        held: &Lease,
        families: &[Family],
        fight: &mut Fight,
    ) -> Result<Option<LeaseEnd>> {
        let has = |own: &Own| match own {
            Own::Here(node) => node.subnets(families) == Ok(Some(held.subnets)),
            _ => false,
        };
        let now = match seen {
            Own::Unknown => return Ok(None),
            seen if has(&seen) => seen,
            seen => self.confirm(seen).await?,
        };
        match &now {
            Own::Unknown => {}
            Own::Gone => self.lose("there is no such node any more"),
            Own::Wrong(wrong) => self.lose(wrong),
            Own::Here(node) => match node.subnets(families) {
                Ok(Some(subnets)) if subnets == held.subnets => {
                    self.regain();
                    self.repair(node, held, fight).await?;
                }
                Ok(None) => self.lose("it has no PodCIDR any more"),
                // What no lease can be made of is no reason to give up what peers are reached by.
                _ => match self.fitting(node, &self.settled().await?) {
                    Ok(to) => {
                        self.lose(&format!("its PodCIDRs make it {to}"));
                        return Ok(Some(LeaseEnd::Moved { to }));
                    }
                    Err(wrong) => self.lose(&wrong),
                },
            },
        }
        Ok(None)
    }

    /// This node as it is now, since what is followed may come late.
    async fn confirm(&self, seen: Own) -> Result<Own> {
        match self.own_node().await {
            Ok((node, _)) => Ok(Own::Here(Arc::new(node))),
            Err(Error::NotReady { reason, .. }) => Ok(match seen {
                // The same, in fewer words.
                Own::Gone | Own::Wrong(_) => seen,
                Own::Unknown | Own::Here(_) => Own::Wrong(reason),
            }),
            Err(error) => Err(error),
        }
    }

    /// Puts back what is missing of this node's annotations, and publishes what is to be published
    /// now.
    async fn repair(&self, seen: &Node, held: &Lease, fight: &mut Fight) -> Result<()> {
        let missing = |node: &Node| missing(node, &wanted(&held.attrs, &node.values));
        if missing(seen).is_empty() {
            return Ok(());
        }
        // It may have been seen as it was before it was annotated.
        let (node, _) = self.own_node().await?;
        let published = self.published.lock().unwrap_or_else(PoisonError::into_inner).clone();
        // Where nobody has touched what was published, it is the order that has changed.
        let untouched =
            |name: &str| published.get(name).is_some_and(|text| says(&node.values, name, text));
        let (news, touched): (Values, Values) =
            missing(&node).into_iter().partition(|(name, _)| untouched(name));
        if !touched.is_empty() && fight.begins() {
            let names: Vec<&str> = touched.keys().map(|name| &**name).collect();
            tracing::warn!(
                node = %node.name,
                "somebody removed or changed what this node published ({}); putting it back",
                names.join(", ")
            );
        }
        self.annotate(&node, &held.attrs).await?;
        for (name, value) in &news {
            tracing::info!(node = %node.name, "the {name} to publish is now {value}");
        }
        if !touched.is_empty() {
            fight.goes_on().await;
        }
        Ok(())
    }

    fn lose(&self, reason: &str) {
        let why = Loss::Withdrawn(reason.to_owned());
        self.ownership.send_if_modified(|now| {
            if matches!(now, Ownership::Lost { why: known, .. } if *known == why) {
                return false;
            }
            tracing::warn!(store = self.api.name(), "this node's lease is lost: {reason}");
            *now = Ownership::Lost { since: SystemTime::now(), why };
            true
        });
    }

    fn regain(&self) {
        let mut was_lost = false;
        self.ownership.send_if_modified(|now| {
            was_lost = matches!(now, Ownership::Lost { .. });
            let held = Ownership::Held { until: None };
            std::mem::replace(now, held.clone()) != held
        });
        if was_lost {
            tracing::info!(store = self.api.name(), "this node has its lease again");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_fight_becomes_slow_and_is_a_new_one_after_a_minute_of_peace() {
        let mut fight = Fight { pause: Pause::new(), last: None };
        for expected in [6, 6] {
            let begin = Instant::now();
            assert!(fight.begins());
            assert!(!fight.begins(), "what could not be put back is reported once, too");
            fight.goes_on().await;
            let mut rounds = 1;
            while begin.elapsed() < Duration::from_secs(3) {
                assert!(!fight.begins(), "it is reported once");
                fight.goes_on().await;
                rounds += 1;
            }
            assert!((4..=expected + 1).contains(&rounds), "{rounds}");
            sleep(PEACE).await;
        }
    }
}
