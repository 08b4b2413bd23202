//! The whole daemon, for programs that embed it.

use std::convert::Infallible;
use std::time::Duration;

use flannel_api::StatusReport;

use crate::config::DaemonConfig;
use crate::error::Error;
use crate::observe::Observer;
use crate::report::problems::first_error;
use crate::report::status_report;
use crate::run;

/// The period of the checks in [`Daemon::ready`].
const LOOK: Duration = Duration::from_millis(500);

/// A daemon: it leases a subnet for this host and keeps the kernel equal to all leases.
///
/// It runs in the network namespace of the thread that polls [`Daemon::run`]. It touches neither
/// the environment nor signals nor the log of the process.
#[derive(Debug)]
pub struct Daemon {
    config: DaemonConfig,
    observer: Observer,
}

impl Daemon {
    /// A daemon that does not run yet.
    pub fn new(config: DaemonConfig) -> Self {
        Self::observed(config, Observer::default())
    }

    pub(crate) fn observed(config: DaemonConfig, observer: Observer) -> Self {
        Self { config, observer }
    }

    /// Runs the daemon. Returns only with an error.
    ///
    /// # Errors
    /// See [`Error`]. The daemon waits without a limit for a store that does not answer, for a
    /// network config that is missing or wrong, and for a free subnet.
    ///
    /// # Cancel safety
    /// Dropping the future stops the daemon. The data path stays in place; the next run adopts it.
    pub async fn run(&self) -> Result<Infallible, Error> {
        // The state of a network that runs, and of the next one, is too large for a small stack.
        Box::pin(run::run(&self.config, &self.observer)).await
    }

    /// Waits until the node is ready: it holds its lease, the subnet file is written, and all
    /// desired objects and firewall rules are in place.
    ///
    /// # Cancel safety
    /// Dropping the future changes nothing.
    pub async fn ready(&self) {
        let mut changes = self.observer.changes();
        while first_error(&self.observer.snapshot()).is_some() {
            // The firewall and the lease publish no changes.
            let _ = tokio::time::timeout(LOOK, changes.next()).await;
        }
    }

    /// The state of the daemon: the answer to `GET /v1/status`, without findings on the host.
    pub fn status(&self) -> StatusReport {
        status_report(&self.observer.snapshot())
    }

    /// Makes the daemon read its network config and certificates again. Returns the result as a
    /// sentence without a full stop.
    pub async fn reload(&self) -> String {
        self.observer.reload().await
    }
}
