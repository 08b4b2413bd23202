//! The controllers of a running network: each has one task and a file.
//!
//! There are two groups. The *services* keep the network working until the next one is built. The
//! *triggers* end when the network must be rebuilt. They stop when the first of them ends, and the
//! next network is built while the services go on. [`network`](super::network) runs both.
//!
//! | service | task |
//! |---|---|
//! | [`routes`] | keeps the objects of the leases in the kernel |
//! | [`firewall`] | keeps the firewall rules |
//! | [`handshakes`] | follows encrypted tunnels while the node moves to a backend that has them |
//! | [`paths`] | answers and sends path probes |
//! | [`questions`] | answers whether a network could be built from another config |
//! | [`status_log`] | logs changes of the status |
//! | [`lease_times`] | notes when leases change |
//! | [`host_findings`] | looks for findings on this host |
//!
//! | trigger | ends when |
//! |---|---|
//! | [`lease`] | this node has another lease, or can request one again |
//! | [`config`] | the network config has changed |
//! | [`uplink`] | the external interface has changed |
//! | [`moves`] | the next step of a move to another backend is due |
//! | [`absent_backends`] | a backend that was left out can be set up, or no node needs it |
//! | [`probation`] | the devices of a changed config cannot be made |
//! | [`new_keys`] | the devices have the new keys, which the lease gets then |
//! | [`leftovers`] | never: it removes the objects of earlier networks |

pub(super) mod absent_backends;
pub(super) mod config;
pub(super) mod firewall;
pub(super) mod handshakes;
pub(super) mod host_findings;
pub(super) mod lease;
pub(super) mod lease_times;
pub(super) mod leftovers;
pub(super) mod moves;
pub(super) mod new_keys;
pub(super) mod paths;
mod plain_routes;
pub(super) mod probation;
pub(super) mod questions;
pub(super) mod routes;
pub(super) mod status_log;
pub(super) mod subnet_file;
pub(super) mod uplink;

use std::future::poll_fn;
use std::pin::Pin;
use std::task::Poll;
use std::time::Duration;

use crate::error::Error;

/// The longest wait of the subnet file for firewall rules and the tunnel. Another program may hold
/// the lock of iptables. The rule of `RequireEncryption` is awaited for any time.
const RULES: Duration = Duration::from_secs(5);

/// Why a controller ended.
#[derive(Debug)]
pub(super) enum Ended {
    /// The network must be rebuilt for this reason. It works until the next one is built.
    Rebuild(String),
    /// The daemon cannot go on.
    Failed(Error),
}

impl From<Result<String, Error>> for Ended {
    /// The reason for which the network must be rebuilt, or the error that ends the daemon.
    fn from(result: Result<String, Error>) -> Self {
        match result {
            Ok(reason) => Self::Rebuild(reason),
            Err(error) => Self::Failed(error),
        }
    }
}

/// Controllers that run together, on the task of the daemon.
#[derive(Default)]
pub(super) struct Controllers<'a> {
    running: Vec<Pin<Box<dyn Future<Output = Ended> + 'a>>>,
    /// The controller that is polled first. The next one is the first at the next time, so that a
    /// busy controller takes no time from the same others at each time.
    first: usize,
}

impl<'a> Controllers<'a> {
    /// Adds a controller. Its future is boxed, because all of them together are too large for a
    /// small stack.
    pub(super) fn add(&mut self, controller: impl Future<Output = Ended> + 'a) {
        self.running.push(Box::pin(controller));
    }

    /// Runs the controllers until the first of them ends. Do not call it again after that.
    ///
    /// # Cancel safety
    /// The next call goes on where a dropped future ended.
    pub(super) async fn first_end(&mut self) -> Ended {
        poll_fn(|context| {
            let count = self.running.len();
            self.first = (self.first + 1) % count.max(1);
            for place in 0..count {
                let controller = &mut self.running[(self.first + place) % count];
                if let Poll::Ready(ended) = controller.as_mut().poll(context) {
                    return Poll::Ready(ended);
                }
            }
            Poll::Pending
        })
        .await
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::sync::Mutex;

    use tokio::time::sleep;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn the_first_end_is_returned_and_the_others_can_go_on() {
        let is_dropped = Mutex::new(false);
        struct Guard<'a>(&'a Mutex<bool>);
        impl Drop for Guard<'_> {
            fn drop(&mut self) {
                *self.0.lock().unwrap() = true;
            }
        }
        let mut triggers = Controllers::default();
        triggers.add(async {
            let _guard = Guard(&is_dropped);
            std::future::pending().await
        });
        triggers.add(async {
            sleep(Duration::from_secs(2)).await;
            Ended::Rebuild("later".to_owned())
        });
        let mut services = Controllers::default();
        services.add(async {
            sleep(Duration::from_secs(3)).await;
            Ended::Rebuild("last".to_owned())
        });
        let ended = tokio::select! {
            ended = services.first_end() => ended,
            ended = triggers.first_end() => ended,
        };
        assert!(matches!(ended, Ended::Rebuild(reason) if reason == "later"));
        assert!(!*is_dropped.lock().unwrap());
        drop(triggers);
        assert!(*is_dropped.lock().unwrap());
        let ended = services.first_end().await;
        assert!(matches!(ended, Ended::Rebuild(reason) if reason == "last"));
    }

    /// Each poll begins with another controller.
    #[tokio::test]
    async fn a_busy_controller_does_not_always_come_first() {
        let begun = Mutex::new(Vec::new());
        let polls = Mutex::new(Cell::new(0));
        let mut controllers = Controllers::default();
        for n in 0..3 {
            let begun = &begun;
            let polls = &polls;
            controllers.add(poll_fn(move |context| {
                begun.lock().unwrap().push(n);
                let polls = polls.lock().unwrap();
                polls.set(polls.get() + 1);
                if polls.get() == 9 {
                    return Poll::Ready(Ended::Rebuild(String::new()));
                }
                context.waker().wake_by_ref();
                Poll::Pending
            }));
        }
        controllers.first_end().await;
        assert_eq!(*begun.lock().unwrap(), [1, 2, 0, 2, 0, 1, 0, 1, 2]);
    }
}
