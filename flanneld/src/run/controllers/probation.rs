//! The first seconds of a network with a changed config: whether its devices get into the kernel.

use std::sync::Arc;
use std::time::Duration;

use flannel_core::status::Status;
use tokio::sync::watch;
use tokio::time::{Instant, timeout};

use super::Ended;
use crate::run::backends::Devices;
use crate::run::network::RunningNetwork;
use crate::run::start::Before;

/// The time for which the devices of a changed config may fail. Then the network goes back to the
/// config before.
const PROBATION: Duration = Duration::from_secs(5);

/// Notes that the config of a network works.
pub(crate) struct ProofController<'a> {
    pub(crate) network: &'a RunningNetwork<'a>,
}

impl ProofController<'_> {
    /// Runs until it is dropped. It notes the config once the devices are in place.
    pub(crate) async fn run(self) -> Ended {
        let network = self.network;
        if until_in_place(|status| network.backends.devices(status), network.handle.status.clone())
            .await
        {
            network.starter.works(&network.config).await;
        }
        std::future::pending().await
    }
}

/// Gives up a config whose devices cannot be made.
pub(crate) struct ProbationController<'a> {
    pub(crate) network: &'a RunningNetwork<'a>,
}

impl ProbationController<'_> {
    /// Runs until the network must go back to the config before. Without one, it does not end.
    pub(crate) async fn run(self) -> Ended {
        let network = self.network;
        if network.before == Before::Nothing {
            return std::future::pending().await;
        }
        let reason =
            failure(|status| network.backends.devices(status), network.handle.status.clone()).await;
        network.record.drop_unoffered(&*network.backends.target);
        let reloads = network.observer.reloads();
        let reason = network.starter.refusals.failed(&network.config, &reason, reloads);
        Ended::Rebuild(format!("back to the config before: {reason}"))
    }
}

/// Waits until the devices are in place. Returns false if the network ends before.
pub(super) async fn until_in_place(
    look: impl Fn(&Status) -> Devices,
    mut status: watch::Receiver<Arc<Status>>,
) -> bool {
    status.wait_for(|status| matches!(look(status), Devices::InPlace)).await.is_ok()
}

/// Waits until the devices cannot be made for a while. Returns the last reason. Once they have been
/// in place, it never returns.
async fn failure(
    look: impl Fn(&Status) -> Devices,
    mut status: watch::Receiver<Arc<Status>>,
) -> String {
    let mut failing_since = None;
    loop {
        let devices = look(&status.borrow_and_update());
        let reason = match devices {
            Devices::InPlace => return std::future::pending().await,
            Devices::Unknown => {
                failing_since = None;
                if status.changed().await.is_err() {
                    // The network reports its end.
                    return std::future::pending().await;
                }
                continue;
            }
            Devices::Failing(reason) => reason,
        };
        let since = *failing_since.get_or_insert_with(Instant::now);
        let left = PROBATION.saturating_sub(since.elapsed());
        if left.is_zero() {
            return reason;
        }
        if let Ok(Err(_)) = timeout(left, status.changed()).await {
            return std::future::pending().await;
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::sleep;

    use super::*;

    fn look(status: &Status) -> Devices {
        match (status.own_in_place, status.settled) {
            (true, _) => Devices::InPlace,
            (false, true) => Devices::Failing(format!("{} objects", status.objects)),
            (false, false) => Devices::Unknown,
        }
    }

    fn status(settled: bool, own_in_place: bool) -> Arc<Status> {
        let mut status = Status::default();
        status.settled = settled;
        status.own_in_place = own_in_place;
        Arc::new(status)
    }

    #[tokio::test(start_paused = true)]
    async fn devices_that_keep_failing_end_the_network() {
        let (network, seen) = watch::channel(status(false, false));
        let begin = Instant::now();
        let changes = async {
            // The time begins again when the devices do not fail any more.
            for settled in [true, false, true] {
                sleep(PROBATION / 2).await;
                network.send_replace(status(settled, false));
            }
            // Changes that leave them failing do not prolong it.
            for objects in 1..40 {
                sleep(PROBATION / 20).await;
                network.send_modify(|status| Arc::make_mut(status).objects = objects);
            }
            std::future::pending().await
        };
        let reason = tokio::select! {
            reason = failure(look, seen) => reason,
            never = changes => never,
        };
        assert_eq!(begin.elapsed(), PROBATION * 3 / 2 + PROBATION);
        assert!(reason.ends_with(" objects") && reason != "0 objects", "{reason}");
    }

    #[tokio::test(start_paused = true)]
    async fn devices_that_were_in_place_do_not_end_the_network() {
        let (network, seen) = watch::channel(status(true, false));
        let mut wait = std::pin::pin!(failure(look, seen));
        timeout(PROBATION / 2, &mut wait).await.unwrap_err();
        network.send_replace(status(true, true));
        timeout(PROBATION, &mut wait).await.unwrap_err();
        network.send_replace(status(true, false));
        timeout(1_000 * PROBATION, &mut wait).await.unwrap_err();
        drop(network);
        timeout(1_000 * PROBATION, &mut wait).await.unwrap_err();
    }

    #[tokio::test]
    async fn a_network_that_ends_proves_nothing() {
        let (network, seen) = watch::channel(status(true, false));
        drop(network);
        assert!(!until_in_place(look, seen.clone()).await);
        let (_network, seen) = watch::channel(status(true, true));
        assert!(until_in_place(look, seen).await);
    }
}
