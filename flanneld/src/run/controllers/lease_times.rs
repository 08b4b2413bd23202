//! The times at which leases change, which no store reports.

use flannel_core::lease::View;
use tokio::sync::watch;

use super::Ended;
use crate::observe::Observer;

/// Notes when each lease changes.
pub(crate) struct LeaseTimesController<'a> {
    pub(crate) observer: &'a Observer,
    pub(crate) views: watch::Receiver<View>,
}

impl LeaseTimesController<'_> {
    /// Runs until it is dropped.
    pub(crate) async fn run(self) -> Ended {
        match self.observer.follow(self.views).await {}
    }
}
