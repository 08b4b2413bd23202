//! Keeps the lease: publishes its annotations again, and notices other PodCIDRs.
//!
//! The followed view may be late, so on a difference the node itself is read. A deleted node may be
//! created again, and a node with unusable PodCIDRs may get others. The network stays until then.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use flannel_core::address::Family;
use flannel_core::runtime::lock;
use flannel_core::subnet::{LeaseEnd, Loss, Ownership};
use flannel_core::{Error, Lease, Result};
use tokio::time::{Instant, sleep};

use super::own::missing;
use super::shared::Shared;
use crate::api::pause::Pause;
use crate::follow::Own;
use crate::node::Node;
use crate::node::annotations::{Values, desired, has};

/// The time without a foreign write after which the next foreign write is a new conflict.
const QUIET: Duration = Duration::from_secs(60);
/// The number of restorations of a conflict that have a log line each. Later restorations share one
/// line per hour.
const LINES: u32 = 5;
const HOUR: Duration = Duration::from_secs(3600);

/// A conflict with another writer of the annotations. Two writers that restore their values must
/// not do so at full speed.
struct Conflict {
    pause: Pause,
    /// When annotations were last restored.
    last: Option<Instant>,
    /// When a restoration was last logged.
    logged: Option<Instant>,
    /// The number of log lines in this conflict.
    lines: u32,
    /// The number of restorations so far.
    restored: u64,
}

/// Whether `time` has passed since `at`, or `at` is `None`.
fn has_passed(at: Option<Instant>, time: Duration) -> bool {
    at.is_none_or(|at| at.elapsed() >= time)
}

impl Conflict {
    fn new() -> Self {
        Self { pause: Pause::new(), last: None, logged: None, lines: 0, restored: 0 }
    }

    /// Notes that annotations will be restored. Returns whether this is to be logged.
    fn begins(&mut self) -> bool {
        if has_passed(self.last, QUIET) {
            self.pause.reset();
            self.lines = 0;
        }
        self.last = Some(Instant::now());
        let is_logged = self.lines < LINES || has_passed(self.logged, HOUR);
        if is_logged {
            self.logged = self.last;
            self.lines += 1;
        }
        is_logged
    }

    /// Counts a restoration, and waits.
    async fn pause(&mut self) {
        self.restored += 1;
        sleep(self.pause.next()).await;
        self.last = Some(Instant::now());
    }
}

impl Shared {
    /// Watches this node until it has other subnets.
    pub(crate) async fn hold(&self, held: &Lease) -> Result<LeaseEnd> {
        let mut own = self.follow_own().await?;
        let families: Vec<Family> = held.subnets.iter().map(|subnet| subnet.family()).collect();
        let mut pause = Pause::new();
        let mut is_logged = false;
        let mut conflict = Conflict::new();
        loop {
            let followed = own.borrow_and_update().clone();
            match self.evaluate(followed, held, &families, &mut conflict).await {
                Ok(Some(end)) => return Ok(end),
                Ok(None) => {
                    is_logged = false;
                    pause.reset();
                    if own.changed().await.is_err() {
                        // A new follower was started.
                        sleep(pause.next()).await;
                        own = self.own_at_last().await;
                    }
                }
                Err(error) => {
                    if !std::mem::replace(&mut is_logged, true) {
                        tracing::warn!(
                            subnets = %held.subnets, %error,
                            "this node cannot be read, or its annotations cannot be restored, \
                             retrying"
                        );
                    }
                    let pause = pause.failed();
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

    /// Evaluates the followed state of this node, and restores missing annotations.
    async fn evaluate(
        &self,
        followed: Own,
        held: &Lease,
        families: &[Family],
        conflict: &mut Conflict,
    ) -> Result<Option<LeaseEnd>> {
        let now = match followed {
            Own::Unknown => return Ok(None),
            Own::Here(node) if node.subnets(families) == Ok(Some(held.subnets)) => Own::Here(node),
            followed => self.confirm(followed).await?,
        };
        match &now {
            Own::Unknown => {}
            Own::Gone => self.lose("there is no such node any more"),
            Own::Wrong(wrong) => self.lose(wrong),
            Own::Here(node) => match node.subnets(families) {
                Ok(Some(subnets)) if subnets == held.subnets => {
                    self.regain();
                    self.repair(node, held, conflict).await?;
                }
                Ok(None) => self.lose("it has no PodCIDR any more"),
                // Unusable PodCIDRs do not end the lease, because peers still use it.
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

    /// Reads this node, because the followed view may be late.
    async fn confirm(&self, followed: Own) -> Result<Own> {
        match self.own_node().await {
            Ok((node, _)) => Ok(Own::Here(Arc::new(node))),
            Err(Error::NotReady { reason, .. }) => Ok(match followed {
                // It has the same reason in fewer words.
                Own::Gone | Own::Wrong(_) => followed,
                Own::Unknown | Own::Here(_) => Own::Wrong(reason),
            }),
            Err(error) => Err(error),
        }
    }

    /// Restores missing or changed annotations, and publishes new values.
    async fn repair(&self, followed: &Node, held: &Lease, conflict: &mut Conflict) -> Result<()> {
        let missing = |node: &Node| missing(node, &desired(&held.attrs, &node.values));
        if missing(followed).is_empty() {
            return Ok(());
        }
        // The followed view may be older than our own write.
        let (node, _) = self.own_node().await?;
        let published = lock(&self.published).clone();
        // If the value that this node published is unchanged, the desired value is new. Otherwise
        // another writer has changed it.
        let (new, changed): (Values, Values) = missing(&node).into_iter().partition(|(name, _)| {
            published.get(name).is_some_and(|text| has(&node.values, name, text))
        });
        if !changed.is_empty() && conflict.begins() {
            let names: Vec<&str> = changed.keys().map(|name| &**name).collect();
            tracing::warn!(
                node = %node.name,
                annotations = %names.join(", "),
                restored_before = conflict.restored,
                "another writer removed or changed annotations of this node, restoring them"
            );
        }
        self.annotate(&node, &held.attrs).await?;
        for (name, value) in &new {
            tracing::info!(
                node = %node.name,
                annotation = %name,
                %value,
                "an annotation has a new value"
            );
        }
        if !changed.is_empty() {
            conflict.pause().await;
        }
        Ok(())
    }

    fn lose(&self, reason: &str) {
        let why = Loss::Withdrawn(reason.to_owned());
        self.ownership.send_if_modified(|now| {
            if matches!(now, Ownership::Lost { why: known, .. } if *known == why) {
                return false;
            }
            tracing::warn!(%reason, store = self.api.name(), "this node's lease is lost");
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
    async fn a_conflict_slows_down_and_is_a_new_one_after_a_minute_without_writes() {
        let mut conflict = Conflict::new();
        for _ in 0..2 {
            let begin = Instant::now();
            let mut rounds = 0;
            while begin.elapsed() < Duration::from_secs(3) {
                assert_eq!(conflict.begins(), rounds < LINES, "the first ones are logged");
                conflict.pause().await;
                rounds += 1;
            }
            assert!((5..=8).contains(&rounds), "{rounds}");
            sleep(QUIET).await;
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_lasting_conflict_is_logged_once_an_hour_with_the_number_of_restorations() {
        let mut conflict = Conflict::new();
        let begin = Instant::now();
        let mut logged = Vec::new();
        while begin.elapsed() < 3 * HOUR - QUIET {
            if conflict.begins() {
                logged.push((begin.elapsed().as_secs() / 3600, conflict.restored));
            }
            conflict.pause().await;
            sleep(QUIET / 6).await;
        }
        let hours: Vec<u64> = logged.iter().map(|(hour, _)| *hour).collect();
        assert_eq!(hours, [0, 0, 0, 0, 0, 1, 2], "{logged:?}");
        assert!(logged[6].1 > logged[5].1 + 100, "{logged:?}");
    }
}
