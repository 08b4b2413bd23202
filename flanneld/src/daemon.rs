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
    /// Commands of a backend that have begun go on, and no other one begins: see
    /// [`Daemon::run_until`].
    pub async fn run(&self) -> Result<Infallible, Error> {
        self.run_until(std::future::pending()).await
    }

    /// Runs the daemon until `stop` is ready, then shuts it down cleanly and returns the value of
    /// `stop`. First the network and the servers stop. Then the daemon calls `RecordKeeper::stop`
    /// of all backends. For example, `extension` then runs its `ShutdownCommand`. That may take ten
    /// seconds. The data path stays in place. This daemon, or another one with the same state
    /// directory, may run again afterwards.
    ///
    /// ```no_run
    /// # async fn embed(daemon: flanneld::Daemon) -> Result<(), Box<dyn std::error::Error>> {
    /// let end = daemon.run_until(tokio::signal::ctrl_c()).await?;
    /// # Ok(end?)
    /// # }
    /// ```
    ///
    /// # Errors
    /// See [`Daemon::run`]. After an error the daemon does not end in order.
    ///
    /// # Cancel safety
    /// See [`Daemon::run`]. An end in order that has begun continues on another thread, and keeps
    /// the lock of the state directory until it is done.
    pub async fn run_until<T>(&self, stop: impl Future<Output = T>) -> Result<T, Error> {
        run::run(&self.config, &self.observer, stop).await
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
