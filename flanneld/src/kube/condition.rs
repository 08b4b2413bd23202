//! When the node's condition `NetworkUnavailable` is false: while the network really is in place.
//!
//! The one thing to know: a lost lease is told at once. Anything else that makes the node not ready must last, since each peer that comes makes
//! the kernel unequal to the leases for a moment, and Kubernetes takes the condition as an order to send no pods.

use std::convert::Infallible;
use std::time::Duration;

use flannel_subnet::Backoff;
use flannel_subnet_kube::{KubeManager, Network};
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};

use crate::observe::{Observer, Snapshot};
use crate::problems::problems;

/// A network that is not in place for less is said to be.
const PATIENCE: Duration = Duration::from_secs(10);
/// So seldom is another reason told, or twice as often, at random: many nodes may have one trouble, whose words change all the time.
const AGAIN: Duration = Duration::from_secs(120);
/// After so long it is judged anew, whoever has told of changes: not all that it depends on tells.
const REFRESH: Duration = Duration::from_secs(5);

/// Follows what the daemon knows, for as long as it lives.
pub(super) async fn keep(manager: &KubeManager, observer: &Observer) -> Infallible {
    let (tell, told) = watch::channel(None);
    tokio::select! {
        never = judge(manager.lost(), observer, &tell) => never,
        never = manager.keep_condition(told) => never,
    }
}

async fn judge(
    mut lost: watch::Receiver<Option<String>>,
    observer: &Observer,
    tell: &watch::Sender<Option<Network>>,
) -> Infallible {
    let mut changes = observer.changes();
    let mut verdict = Verdict::new(Instant::now());
    loop {
        let why = lost.borrow_and_update().clone();
        let again = verdict.pass(Instant::now(), why, trouble(&observer.snapshot()));
        tell.send_if_modified(|told| {
            let new = verdict.network != *told;
            told.clone_from(&verdict.network);
            new
        });
        let refresh = Instant::now() + REFRESH;
        tokio::select! {
            () = changes.next() => {}
            // Its sender lives as long as the manager.
            _ = lost.changed() => {}
            () = sleep_until(again.map_or(refresh, |again| again.min(refresh))) => {}
        }
    }
}

/// Why the node is not ready; `None`: it is.
fn trouble(snapshot: &Snapshot) -> Option<String> {
    problems(snapshot).into_iter().find(|problem| problem.is_error()).map(|problem| problem.text)
}

/// What is told, and since when.
struct Verdict {
    network: Option<Network>,
    /// Since when the node is not ready.
    trouble: Option<Instant>,
    /// When another reason may be told, once the network was said to be not available.
    next: Option<Instant>,
}

impl Verdict {
    fn new(now: Instant) -> Self {
        Self { network: None, trouble: Some(now), next: None }
    }

    /// Judges what is the case. Returns when to look again, if nothing else happens.
    fn pass(
        &mut self,
        now: Instant,
        lost: Option<String>,
        trouble: Option<String>,
    ) -> Option<Instant> {
        let at_once = lost.is_some();
        let Some(why) = lost.or(trouble) else {
            *self = Self { network: Some(Network::Available), trouble: None, next: None };
            return None;
        };
        let since = *self.trouble.get_or_insert(now);
        let due = self.next.unwrap_or(since + PATIENCE);
        let network = Some(Network::Unavailable(why));
        if network == self.network {
            return None;
        }
        if !at_once && now < due {
            return Some(due);
        }
        let again = Backoff::new(AGAIN, AGAIN).pause();
        (self.network, self.next) = (network, Some(now + again));
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use std::sync::Arc;

    use crate::firewall::Rulebook;
    use crate::observe::tests::network;
    use crate::registry::Store;

    const SECOND: Duration = Duration::from_secs(1);

    fn unavailable(why: &str) -> Option<Network> {
        Some(Network::Unavailable(why.to_owned()))
    }

    #[test]
    fn what_passes_quickly_is_not_told_and_what_lasts_is() {
        let begin = Instant::now();
        let mut verdict = Verdict::new(begin);
        let trouble = || Some("starting".to_owned());
        assert_eq!(verdict.pass(begin, None, trouble()), Some(begin + PATIENCE));
        assert_eq!(verdict.network, None, "whatever an earlier run said stays for a moment");
        assert_eq!(verdict.pass(begin + SECOND, None, None), None);
        assert_eq!(verdict.network, Some(Network::Available));
        let again = verdict.pass(begin + 2 * SECOND, None, trouble()).unwrap();
        assert_eq!(
            (again, &verdict.network),
            (begin + 2 * SECOND + PATIENCE, &Some(Network::Available))
        );
        assert_eq!(verdict.pass(again, None, trouble()), None);
        assert_eq!(verdict.network, unavailable("starting"));
        // Another reason, which is told later.
        let other = || Some("other".to_owned());
        let later = verdict.pass(again + SECOND, None, other()).unwrap();
        let seldom = again + AGAIN / 2..=again + AGAIN;
        assert!(seldom.contains(&later), "{:?}", later - again);
        assert_eq!(verdict.network, unavailable("starting"));
        verdict.pass(later, None, other());
        assert_eq!(verdict.network, unavailable("other"));
        verdict.pass(later + SECOND, None, None);
        assert_eq!(verdict.network, Some(Network::Available));
    }

    #[test]
    fn a_lost_lease_is_told_at_once() {
        let begin = Instant::now();
        let mut verdict = Verdict::new(begin);
        verdict.pass(begin, None, None);
        verdict.pass(begin + SECOND, Some("gone".to_owned()), Some("not ready".to_owned()));
        assert_eq!(verdict.network, unavailable("gone"));
    }

    #[tokio::test(start_paused = true)]
    async fn firewall_rules_that_go_and_come_back_are_told_though_they_wake_nobody() {
        let observer = Observer::default();
        let mut status = flannel_core::Status::default();
        (status.in_sync, status.live) = (true, true);
        let (rules, rulebook) = watch::channel(Rulebook::Unwanted);
        let (subnets, mut running) = network(status).await;
        observer.opened(Store::of_others(Arc::new(subnets)));
        running.rulebook = rulebook;
        let _guard = observer.running(running);
        observer.subnet_file_written();
        let (tell, mut told) = watch::channel(None);
        let (_lose, lost) = watch::channel(None);
        let story = async {
            let mut is = async |network| {
                let soon =
                    tokio::time::timeout(3 * PATIENCE, told.wait_for(|told| *told == network));
                soon.await.map(drop).unwrap_or_else(|_| panic!("{network:?} is not told"));
            };
            is(Some(Network::Available)).await;
            rules.send_replace(Rulebook::Pending);
            is(unavailable("the firewall rules are not in place yet")).await;
            rules.send_replace(Rulebook::Unwanted);
            is(Some(Network::Available)).await;
        };
        tokio::select! {
            never = judge(lost, &observer, &tell) => match never {},
            () = story => {}
        }
    }
}
