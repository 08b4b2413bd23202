//! The backends that could not be set up, and are left out for now.

use flannel_core::backend::Prepared;
use flannel_core::lease::{Origin, View};
use flannel_core::{Lease, Subnets};
use tokio::sync::watch;
use tokio::time::{Duration, Instant, sleep};

use super::Ended;
use super::moves::UNUSED;
use crate::error::Error;
use crate::run::backends::{ActiveBackend, ActiveBackends, BackendRecord, lease_types};

/// The pause before a backend that was left out is tried again.
const AGAIN: Duration = Duration::from_secs(10);

/// Tries to set up the backends that were left out.
pub(crate) struct AbsentBackendController<'a, P> {
    pub(crate) record: &'a BackendRecord,
    pub(crate) backends: &'a ActiveBackends,
    /// This node's subnets.
    pub(crate) own: Subnets,
    pub(crate) views: watch::Receiver<View>,
    /// Prepares a backend.
    pub(crate) prepare: P,
}

impl<P: AsyncFn(&ActiveBackend) -> Result<Prepared, Error>> AbsentBackendController<'_, P> {
    /// Runs until one of them can be set up, or is of no use to any node. If none was left out, it
    /// does not end.
    pub(crate) async fn run(self) -> Ended {
        let absent = &self.backends.absent;
        if absent.is_empty() {
            return std::future::pending().await;
        }
        let mut unused_since = Instant::now();
        loop {
            sleep(AGAIN).await;
            for backend in absent {
                if (self.prepare)(backend).await.is_ok() {
                    let lease_type = &backend.usage.lease_type;
                    return Ended::Rebuild(format!("{lease_type} can be set up again"));
                }
            }
            if self.may_be_used() {
                unused_since = Instant::now();
            }
            if unused_since.elapsed() >= UNUSED {
                let unused = lease_types(absent.iter().map(|backend| &backend.usage));
                let names = unused.join(", ");
                self.record.drop_all(unused);
                let reason = format!("no node needs {names}, which cannot be set up");
                return Ended::Rebuild(reason);
            }
        }
    }

    /// Whether a node may need one of them. Only a live view can say that none does.
    fn may_be_used(&self) -> bool {
        let view = self.views.borrow().clone();
        let is_live = matches!(view.origin, Origin::Live { .. });
        !is_live
            || self.backends.absent.iter().any(|backend| self.user_of(backend, &view).is_some())
    }

    /// The lease of a node that is reached only by this backend.
    fn user_of(&self, backend: &ActiveBackend, view: &View) -> Option<Lease> {
        let lease_type = &backend.usage.lease_type;
        self.backends.order.user_of(lease_type, self.own, view).map(|lease| Lease::clone(lease))
    }
}
