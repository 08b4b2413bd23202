//! A stream of changes of facts and of the status.

use std::sync::Arc;

use flannel_core::status::Status;
use tokio::sync::watch;

use super::Observer;

/// Changes of the daemon. Bursts coalesce.
pub(crate) struct Changes {
    observer: Observer,
    phase: watch::Receiver<()>,
    /// The status of the network that runs.
    status: Option<watch::Receiver<Arc<Status>>>,
}

impl Changes {
    /// The changes from now on.
    pub(super) fn of(observer: &Observer) -> Self {
        let phase = observer.0.phase.subscribe();
        Self { phase, status: observer.status(), observer: observer.clone() }
    }

    /// Waits for the next change. The first call may return without one.
    ///
    /// # Cancel safety
    /// Dropping the future loses nothing.
    pub(crate) async fn next(&mut self) {
        let status = async {
            match &mut self.status {
                Some(status) => status.changed().await.is_ok(),
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            // Its sender lives as long as the observer.
            _ = self.phase.changed() => self.status = self.observer.status(),
            alive = status => if !alive {
                self.status = None;
            },
        }
    }
}
