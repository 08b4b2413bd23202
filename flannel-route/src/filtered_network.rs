//! A network that a backend built itself, and that gets only the accepted leases of peers.

use std::sync::Arc;

use async_trait::async_trait;
use flannel_core::address::Dual;
use flannel_core::backend::Reach;
use flannel_core::lease::{LeaseSet, View};
use flannel_core::network::{Ended, NetworkHandle};
use flannel_core::{Lease, Network, Result, Subnet, Subnets};
use tokio::sync::watch;

use crate::admission::{Admission, AdmissionRules, BackendPlan};

/// A network that a backend built itself. It gets only the leases that admission accepts: leases
/// are untrusted, and a backend that had to check them itself could forget it.
#[derive(Debug)]
pub(crate) struct FilteredNetwork {
    inner: Box<dyn Network>,
    filter: ViewFilter,
}

impl FilteredNetwork {
    /// A network that passes to `inner` the leases of peers that have an offer of `lease_type`, lie
    /// inside the pod `networks`, and do not clash with `own` or with one another.
    pub(crate) fn new(
        inner: Box<dyn Network>,
        own: Lease,
        networks: Dual<Subnet>,
        lease_type: &'static str,
    ) -> Self {
        Self { inner, filter: ViewFilter::new(own, networks, lease_type) }
    }
}

#[async_trait]
impl Network for FilteredNetwork {
    fn handle(&self) -> NetworkHandle {
        self.inner.handle()
    }

    async fn run(self: Box<Self>, mut views: watch::Receiver<View>) -> Result<Ended> {
        let Self { inner, mut filter } = *self;
        let first = filter.accept(views.borrow_and_update().clone());
        let (sender, receiver) = watch::channel(first);
        let mut run = inner.run(receiver);
        loop {
            tokio::select! {
                ended = &mut run => return ended,
                changed = views.changed() => if changed.is_err() { break },
            }
            let view = views.borrow_and_update().clone();
            sender.send_replace(filter.accept(view));
        }
        // The network sees that there will be no more views.
        drop(sender);
        run.await
    }
}

/// Reduces each view to the peers that this node accepts.
struct ViewFilter {
    admission: Admission,
    /// All leases of the last view.
    leases: LeaseSet,
    own: Subnets,
}

impl std::fmt::Debug for ViewFilter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ViewFilter").field("own", &self.own).finish_non_exhaustive()
    }
}

impl ViewFilter {
    fn new(own: Lease, networks: Dual<Subnet>, lease_type: &'static str) -> Self {
        // Peers define no kernel objects here.
        let plan = BackendPlan::new(Some(lease_type), Box::new(|_, _, _, _| Ok(())));
        let subnets = own.subnets;
        let rules =
            AdmissionRules { networks, own: Some(Arc::new(own)), ..AdmissionRules::default() };
        let admission = Admission::new(rules, vec![plan]);
        Self { admission, leases: LeaseSet::default(), own: subnets }
    }

    /// The next view, without this node's lease and the rejected leases. The cost grows with the
    /// number of rejected leases, and of leases that changed since the last view.
    fn accept(&mut self, view: View) -> View {
        let before = std::mem::replace(&mut self.leases, view.leases);
        // The plan makes no lookups.
        self.admission.update(self.leases.changes_since(&before), &|_| Some(Reach::NotDirect));
        let mut leases = self.leases.clone();
        leases.remove(&self.own);
        for (subnets, _) in self.admission.rejected().iter() {
            leases.remove(subnets);
        }
        View { leases, origin: view.origin }
    }
}
