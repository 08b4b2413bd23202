//! The subnets of this node, as far as they are known, and the subnet file of an earlier run.
//!
//! A pod keeps its address for life, and peers have no route to an address of another subnet. So a
//! file of other subnets is removed as soon as this node's are known. Without the file, CNI plugins
//! fail, and runtimes try again.

use std::path::PathBuf;

use flannel_core::Subnets;
use flannel_core::subnet::Assignment;
use flannel_subnet::subnet_file::{self, Known};
use tokio::sync::watch;

use super::controllers::leftovers::go_flannel::GoFlannel;
use crate::observe::Observer;

/// Keeps the subnet file to the subnets of this node.
pub(super) struct OwnSubnets {
    subnet_file: PathBuf,
    go_flannel: GoFlannel,
    known: watch::Sender<Assignment>,
}

impl OwnSubnets {
    pub(super) fn new(subnet_file: PathBuf, go_flannel: GoFlannel) -> Self {
        Self { subnet_file, go_flannel, known: watch::Sender::default() }
    }

    /// Notes what is known of this node's subnets. Removes a subnet file that has others.
    pub(super) async fn note(&self, known: Known, observer: &Observer) {
        match known {
            Known::Nothing => _ = self.known.send_replace(Assignment::Nothing),
            Known::Subnets(own) | Known::Both(own, _) => {
                self.known.send_replace(Assignment::Subnets(own));
            }
            Known::Networks(_) => {}
        }
        let path = self.subnet_file.clone();
        let go_flannel = self.go_flannel.clone();
        let remove = move || {
            let removed = subnet_file::remove_others(&path, &known);
            if let Ok(Some(_)) = removed {
                go_flannel.removed_subnet_file();
            }
            removed
        };
        match self.go_flannel.writes.run(remove).await {
            Ok(None) => {}
            Ok(Some(had)) => {
                observer.note(|facts| facts.subnet_file = false);
                tracing::warn!(
                    path = %self.subnet_file.display(), %had,
                    "the subnet file has other subnets or networks than this node, it is removed \
                     until this node's network is in place"
                );
            }
            Err(error) => tracing::warn!(
                %error,
                "the subnet file of other subnets cannot be removed: pods may get wrong addresses"
            ),
        }
    }

    /// Notes the subnets that the store has assigned.
    pub(super) async fn note_assignment(&self, assignment: Assignment, observer: &Observer) {
        match assignment {
            Assignment::Subnets(own) => self.note(Known::Subnets(own), observer).await,
            Assignment::Nothing => self.note(Known::Nothing, observer).await,
            _ => {}
        }
    }

    /// Waits until the subnet file may have these subnets.
    pub(super) async fn may_be(&self, subnets: Subnets) {
        self.wait(|known| !contradicts(known, subnets)).await;
    }

    /// Waits until this node is known to have other subnets than these.
    pub(super) async fn are_not(&self, subnets: Subnets) {
        self.wait(|known| contradicts(known, subnets)).await;
    }

    async fn wait(&self, condition: impl Fn(Assignment) -> bool) {
        let waited = self.known.subscribe().wait_for(|known| condition(*known)).await.map(drop);
        waited.expect("this value has the sender");
    }
}

/// Whether this node is known to have other subnets.
fn contradicts(known: Assignment, subnets: Subnets) -> bool {
    match known {
        Assignment::Subnets(own) => own != subnets,
        Assignment::Nothing => true,
        _ => false,
    }
}
