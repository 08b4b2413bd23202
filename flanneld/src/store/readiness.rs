//! Publishes the node's readiness, if the store has a field for it: in Kubernetes the node's
//! condition `NetworkUnavailable`.
//!
//! A lost lease is published at once. Other reasons are published if they last, because each new
//! peer makes the node not ready for a moment, and Kubernetes schedules no pods on a node with the
//! condition.

use std::convert::Infallible;
use std::time::Duration;

use flannel_core::SubnetManager;
use flannel_core::subnet::{Loss, Ownership, Readiness};
use flannel_subnet::Backoff;
use tokio::time::{Instant, sleep_until};

use crate::error::Error;
use crate::observe::Observer;
use crate::report::problems::first_error;

/// A network that is not in place for less than this counts as in place.
const PATIENCE: Duration = Duration::from_secs(10);
/// The period in which another reason is published, shortened at random by up to half, because many
/// nodes may have the same problem with a changing text.
const AGAIN: Duration = Duration::from_secs(120);
/// The period of evaluation, because not every input reports changes.
const REFRESH: Duration = Duration::from_secs(5);

/// Publishes that the daemon starts. Calls `in_place` only if the store has a field for it.
///
/// # Errors
/// The store does not answer.
pub(crate) async fn announce(
    subnets: &dyn SubnetManager,
    in_place: impl Future<Output = bool>,
) -> Result<(), Error> {
    if subnets.publishes_readiness() {
        let datapath_in_place = in_place.await;
        subnets.report(&Readiness::Starting { datapath_in_place }).await?;
    }
    Ok(())
}

/// Publishes the readiness of the node until it is dropped, if the store has a field for it.
pub(crate) async fn publish(subnets: &dyn SubnetManager, observer: &Observer) -> Infallible {
    if !subnets.publishes_readiness() {
        return std::future::pending().await;
    }
    let mut ownership = subnets.ownership();
    let mut changes = observer.changes();
    let mut verdict = Verdict::new(Instant::now());
    let mut published = None;
    loop {
        let lost = match &*ownership.borrow_and_update() {
            Ownership::Lost { why: Loss::Withdrawn(why), .. } => Some(why.clone()),
            _ => None,
        };
        let again = verdict.pass(Instant::now(), lost, first_error(&observer.snapshot()));
        if let Some(readiness) =
            verdict.readiness.as_ref().filter(|now| published.as_ref() != Some(*now))
        {
            // The store retries failures.
            if let Err(error) = subnets.report(readiness).await {
                tracing::debug!(%error, "the readiness could not be published");
            }
            published = Some(readiness.clone());
        }
        let refresh = Instant::now() + REFRESH;
        tokio::select! {
            () = changes.next() => {}
            // The sender lives as long as the manager.
            _ = ownership.changed() => {}
            () = sleep_until(again.map_or(refresh, |again| again.min(refresh))) => {}
        }
    }
}

/// The readiness that is published.
struct Verdict {
    readiness: Option<Readiness>,
    /// The time since which the node is not ready.
    trouble: Option<Instant>,
    /// The earliest time for another reason, after the node was published as not ready.
    next: Option<Instant>,
}

impl Verdict {
    fn new(now: Instant) -> Self {
        Self { readiness: None, trouble: Some(now), next: None }
    }

    /// Evaluates the current reason. Returns the time of the next evaluation without other events.
    fn pass(
        &mut self,
        now: Instant,
        lost: Option<String>,
        trouble: Option<String>,
    ) -> Option<Instant> {
        let at_once = lost.is_some();
        let Some(why) = lost.or(trouble) else {
            *self = Self { readiness: Some(Readiness::Ready), trouble: None, next: None };
            return None;
        };
        let since = *self.trouble.get_or_insert(now);
        let due = self.next.unwrap_or(since + PATIENCE);
        let readiness = Some(Readiness::NotReady { reason: why });
        if readiness == self.readiness {
            return None;
        }
        if !at_once && now < due {
            return Some(due);
        }
        let again = Backoff::new(AGAIN, AGAIN).pause();
        self.readiness = readiness;
        self.next = Some(now + again);
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use std::sync::Arc;
    use std::time::SystemTime;

    use flannel_core::testing::FakeSubnets;
    use tokio::sync::watch;

    use crate::observe::FirewallRules;
    use crate::observe::tests::network;

    const SECOND: Duration = Duration::from_secs(1);

    fn unavailable(why: &str) -> Option<Readiness> {
        Some(Readiness::NotReady { reason: why.to_owned() })
    }

    #[test]
    fn only_lasting_reasons_are_published() {
        let begin = Instant::now();
        let mut verdict = Verdict::new(begin);
        let trouble = || Some("starting".to_owned());
        assert_eq!(verdict.pass(begin, None, trouble()), Some(begin + PATIENCE));
        assert_eq!(verdict.readiness, None, "the condition of an earlier run stays for a moment");
        assert_eq!(verdict.pass(begin + SECOND, None, None), None);
        assert_eq!(verdict.readiness, Some(Readiness::Ready));
        let again = verdict.pass(begin + 2 * SECOND, None, trouble()).unwrap();
        assert_eq!(
            (again, &verdict.readiness),
            (begin + 2 * SECOND + PATIENCE, &Some(Readiness::Ready))
        );
        assert_eq!(verdict.pass(again, None, trouble()), None);
        assert_eq!(verdict.readiness, unavailable("starting"));
        // Another reason, which is published later.
        let other = || Some("other".to_owned());
        let later = verdict.pass(again + SECOND, None, other()).unwrap();
        let seldom = again + AGAIN / 2..=again + AGAIN;
        assert!(seldom.contains(&later), "{:?}", later - again);
        assert_eq!(verdict.readiness, unavailable("starting"));
        verdict.pass(later, None, other());
        assert_eq!(verdict.readiness, unavailable("other"));
        verdict.pass(later + SECOND, None, None);
        assert_eq!(verdict.readiness, Some(Readiness::Ready));
    }

    #[test]
    fn a_lost_lease_is_published_at_once() {
        let begin = Instant::now();
        let mut verdict = Verdict::new(begin);
        verdict.pass(begin, None, None);
        verdict.pass(begin + SECOND, Some("gone".to_owned()), Some("not ready".to_owned()));
        assert_eq!(verdict.readiness, unavailable("gone"));
    }

    #[tokio::test(start_paused = true)]
    async fn changes_of_firewall_rules_are_published_without_an_event() {
        let observer = Observer::default();
        let mut status = flannel_core::status::Status::default();
        status.in_sync = true;
        status.live = true;
        let (rules, firewall_rules) = watch::channel(FirewallRules::Unwanted);
        let (subnets, mut running) = network(status).await;
        subnets.set_publishes_readiness(true);
        observer.opened(Arc::new(subnets.clone()));
        running.firewall_rules = firewall_rules;
        let _guard = observer.running(running);
        observer.note(|facts| facts.subnet_file = true);
        let scenario = async {
            let is = async |readiness: Option<Readiness>| {
                let published = async {
                    while subnets.reports().last() != readiness.as_ref() {
                        tokio::time::sleep(SECOND / 10).await;
                    }
                };
                let soon = tokio::time::timeout(3 * PATIENCE, published).await;
                soon.unwrap_or_else(|_| panic!("{readiness:?} is not published"));
            };
            is(Some(Readiness::Ready)).await;
            rules.send_replace(FirewallRules::Pending);
            is(unavailable("the firewall rules are not in place yet")).await;
            rules.send_replace(FirewallRules::Unwanted);
            is(Some(Readiness::Ready)).await;
            // The store revokes the lease, which is published at once.
            let why = Loss::Withdrawn("it is gone".to_owned());
            subnets.set_ownership(Ownership::Lost { since: SystemTime::now(), why });
            let begin = Instant::now();
            is(unavailable("it is gone")).await;
            assert!(begin.elapsed() < SECOND, "{:?}", begin.elapsed());
        };
        tokio::select! {
            never = publish(&subnets, &observer) => match never {},
            () = scenario => {}
        }
    }

    #[tokio::test]
    async fn a_start_is_announced_only_if_the_store_has_the_field() {
        let subnets = FakeSubnets::new("10.1.0.0/16");
        announce(&subnets, async { panic!("the store has no such field") }).await.unwrap();
        subnets.set_publishes_readiness(true);
        announce(&subnets, async { false }).await.unwrap();
        assert_eq!(subnets.reports(), [Readiness::Starting { datapath_in_place: false }]);
    }
}
