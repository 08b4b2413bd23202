//! The moves of this node to another backend.
//!
//! [`flannel_route::moving`] decides on the steps. Each step rebuilds the network, which keeps the
//! objects in the kernel.

mod silence;

use std::mem::{Discriminant, discriminant};
use std::sync::Arc;
use std::time::Duration;

use flannel_api::MoveReport;
use flannel_core::Subnets;
use flannel_core::error::holder;
use flannel_core::lease::View;
use flannel_core::status::Status;
use flannel_netlink::NetlinkKernel;
use flannel_route::moving::{AwaitedEvent, Blockers, NodeBackends, Seen, Step, Tunnels};
use tokio::sync::watch;
use tokio::time::sleep;

use self::silence::Silence;
pub(super) use self::silence::UNUSED;
use super::Ended;
use crate::observe::Observer;
use crate::run::backends::{ActiveBackends, BackendRecord, lease_type_of, lease_types};

/// The shortest time between two looks at the leases.
const PACE: Duration = Duration::from_millis(500);
/// The pause before a file is written again.
const WRITE_AGAIN: Duration = Duration::from_secs(10);

/// Takes the steps of a move.
pub(crate) struct MoveController<'a> {
    pub(crate) record: &'a BackendRecord,
    pub(crate) backends: &'a ActiveBackends,
    /// This node's subnets.
    pub(crate) own: Subnets,
    pub(crate) views: watch::Receiver<View>,
    pub(crate) status: watch::Receiver<Arc<Status>>,
    /// The tunnels of the target, if it needs handshakes.
    pub(crate) tunnels: watch::Receiver<Option<Tunnels>>,
    pub(crate) kernel: &'a Arc<NetlinkKernel>,
    pub(crate) observer: &'a Observer,
}

impl MoveController<'_> {
    /// Runs until the next step is due, and prepares it. Without a move, it does not end.
    pub(crate) async fn run(mut self) -> Ended {
        let target = lease_type_of(&*self.backends.target);
        let mut silence = Silence::new(self.kernel, self.backends.withdrawn_devices());
        let mut logged = None;
        loop {
            let Some(step) = self.next_step(target) else { return std::future::pending().await };
            let wait = match &step.next {
                Ok(next) => {
                    silence.interrupt();
                    self.report(target, &step, None);
                    if self.take(next).await {
                        let offers = lease_types(next.offered()).join(", ");
                        let reason = format!("moving to {target}: this node offers {offers} now");
                        return Ended::Rebuild(reason);
                    }
                    continue;
                }
                Err(wait) => wait,
            };
            let mut is_silent = false;
            let text = if *wait == AwaitedEvent::Silence {
                let heard = silence.look().await;
                is_silent = heard.is_over;
                heard.waits_for
            } else {
                silence.interrupt();
                describe(wait, target)
            };
            self.log(target, wait, &text, &mut logged);
            self.report(target, &step, Some(text));
            if is_silent {
                return self.end(target);
            }
            self.wait_for_news(*wait == AwaitedEvent::Silence).await;
        }
    }

    /// The next step; `None` if this node runs one backend.
    fn next_step(&mut self, target: &str) -> Option<Step> {
        let view = self.views.borrow_and_update().clone();
        let status = self.status.borrow_and_update().clone();
        let mut tunnels = self.tunnels.borrow_and_update().clone();
        // Of a peer that is not complete, one of two tunnels may be known.
        if !status.settled {
            tunnels = tunnels.map(|_| Tunnels::default());
        }
        let seen = Seen {
            in_place: self.backends.is_in_place(&status),
            view: &view,
            own: self.own,
            tunnels: tunnels.as_ref(),
            rejected: &status.rejected,
        };
        self.backends.order.step(target, &seen)
    }

    /// Records the backends of the next network. Returns false if that failed, after a pause.
    async fn take(&self, next: &NodeBackends) -> bool {
        let Err(error) = self.record.take(next).await else { return true };
        let path = self.record.path().display();
        tracing::warn!(
            %path, %error,
            "a state file cannot be written (see --state-dir): the move waits"
        );
        sleep(WRITE_AGAIN).await;
        false
    }

    /// Logs another kind of event that this node waits for.
    fn log(
        &self,
        target: &str,
        wait: &AwaitedEvent,
        text: &str,
        logged: &mut Option<Discriminant<AwaitedEvent>>,
    ) {
        let kind = discriminant(wait);
        if logged.replace(kind) != Some(kind) {
            let offers = lease_types(self.backends.order.offered()).join(", ");
            tracing::info!(to = %target, %offers, waits_for = %text, "moving to a backend");
        }
    }

    fn report(&self, target: &str, step: &Step, waits_for: Option<String>) {
        let order = &self.backends.order;
        let report = MoveReport {
            to: target.to_owned(),
            from: lease_types(order.iter().filter(|usage| usage.lease_type != target)),
            offers: lease_types(order.offered()),
            leases: step.leases as u64,
            offering: step.offering as u64,
            waits_for: waits_for.filter(|text| !text.is_empty()),
        };
        self.observer.note(|facts| facts.moving = Some(report));
    }

    /// Drops the withdrawn backends, which nothing uses any more.
    fn end(&self, target: &str) -> Ended {
        let unused = lease_types(self.backends.order.iter().filter(|usage| !usage.offered));
        let names = unused.join(", ");
        self.record.drop_all(unused);
        Ended::Rebuild(format!("moved to {target}: nothing uses {names}"))
    }

    /// Waits for news, or for the next look at the packets of withdrawn backends if `silent`.
    async fn wait_for_news(&mut self, silent: bool) {
        tokio::select! {
            // If their senders are gone, the network reports it.
            _ = self.views.changed() => {}
            _ = self.status.changed() => {}
            _ = self.tunnels.changed() => {}
            () = sleep(PACE), if silent => {}
        }
        sleep(PACE).await;
    }
}

/// The event that a node waits for, as a noun.
fn describe(wait: &AwaitedEvent, target: &str) -> String {
    match wait {
        AwaitedEvent::Devices => format!("the devices of {target} in this node's kernel"),
        AwaitedEvent::Store => "the store to show this node's lease as it was published".to_owned(),
        AwaitedEvent::Offers(blockers) => format!("offers of {target} by {}", names(blockers)),
        AwaitedEvent::Preference(blockers) => {
            format!("the leases of {} to list {target} first", names(blockers))
        }
        AwaitedEvent::Handshakes(blockers) => {
            format!("handshakes of {target} with {}", names(blockers))
        }
        AwaitedEvent::Withdrawal(blockers) => {
            format!("the leases of {} to no longer offer the old backends", names(blockers))
        }
        _ => String::new(),
    }
}

fn names(blockers: &Blockers) -> String {
    let first: Vec<String> = blockers
        .first
        .iter()
        .map(|lease| format!("{} of {}", lease.subnets, holder(&lease.attrs)))
        .collect();
    let more = blockers.total - first.len();
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    format!("{}{more}", first.join(", "))
}
