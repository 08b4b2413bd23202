//! The accepted peers of each view, for networks that run themselves.

use std::sync::Arc;

use crate::admission::admit::{Admission, AdmissionRules};
use crate::admission::offer_plan::OfferPlan;
use flannel_core::address::Dual;
use flannel_core::backend::Reach;
use flannel_core::lease::{LeaseSet, Origin, View};
use flannel_core::network::AcceptedPeers;
use flannel_core::{Lease, Subnet, Subnets};

/// Reduces each view to the peers that this node accepts.
pub struct ViewFilter {
    admission: Admission,
    leases: LeaseSet,
    own: Subnets,
}

impl ViewFilter {
    /// A filter for the node with the lease `own` inside the pod `networks`. It accepts leases with
    /// the backend type `lease_type`. Peers define no kernel objects.
    pub fn new(own: Lease, networks: Dual<Subnet>, lease_type: &'static str) -> Self {
        let plan = OfferPlan::new(Some(lease_type), Box::new(|_, _, _, _| Ok(())));
        let (subnets, own) = (own.subnets, Some(Arc::new(own)));
        let rules = AdmissionRules { networks, own, ..AdmissionRules::default() };
        let admission = Admission::new(rules, vec![plan]);
        Self { admission, leases: LeaseSet::default(), own: subnets }
    }

    /// The peers of the next view. The cost depends on the leases that changed since the last view.
    pub fn accept(&mut self, view: View) -> AcceptedPeers {
        let before = std::mem::replace(&mut self.leases, view.leases);
        // The plan makes no lookups.
        self.admission.update(self.leases.changes_since(&before), &|_| Some(Reach::NotDirect));
        let complete = matches!(view.origin, Origin::Live { .. });
        let rejected = self.admission.rejected().clone();
        AcceptedPeers::new(self.leases.clone(), rejected, Some(self.own), complete)
    }
}
