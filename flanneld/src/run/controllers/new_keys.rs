//! The new keys of this node, which its lease gets once its devices have them.
//!
//! After a start with other keys, the lease keeps the old ones until the kernel has the new ones.
//! Otherwise peers would use keys that this node cannot read.

use std::sync::Arc;

use flannel_core::status::Status;
use tokio::sync::watch;

use super::probation::until_in_place;
use super::{Ended, RULES};
use crate::run::backends::ActiveBackends;
use crate::run::start::Before;

/// Waits until the lease can get the offers that it does not have yet.
pub(crate) struct NewKeyController<'a> {
    /// The lease has the offers of the last run.
    pub(crate) withheld: bool,
    pub(crate) before: Before,
    pub(crate) backends: &'a ActiveBackends,
    pub(crate) status: watch::Receiver<Arc<Status>>,
}

impl NewKeyController<'_> {
    /// Runs until this node's devices have its new keys. Without new keys, it does not end.
    pub(crate) async fn run(self) -> Ended {
        let Self { withheld, before, backends, mut status } = self;
        if !withheld {
            return std::future::pending().await;
        }
        if before == Before::Earlier {
            // If the devices cannot be made, this node goes back, and no peer needs the keys.
            until_in_place(|status| backends.devices(status), status.clone()).await;
        }
        // If another object of this node cannot be put, peers must still learn the new keys.
        let in_place = status.wait_for(|status| status.own_in_place);
        drop(tokio::time::timeout(RULES, in_place).await);
        let reason = "the devices have the new keys of this node, which its lease gets now";
        Ended::Rebuild(reason.to_owned())
    }
}
