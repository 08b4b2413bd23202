//! A network that this host has joined: of kernel objects, or one that runs itself.

use std::sync::Arc;

use flannel_admission::{Admission, AdmissionRules, OfferPlan};
use flannel_core::address::Dual;
use flannel_core::lease::{LeaseSet, Origin, View};
use flannel_core::network::{AcceptedPeers, Ended, NetworkHandle};
use flannel_core::{Lease, Network, Result, Subnet, Subnets};
use tokio::sync::watch;

use crate::kernel_network::KernelNetwork;

/// A network that this host has joined ([`Host::join`](crate::Host::join)).
#[derive(Debug)]
#[non_exhaustive]
pub enum HostNetwork {
    /// A network of kernel objects.
    Kernel(Box<KernelNetwork>),
    /// A network that runs itself, with the peers that this node accepts.
    Custom(Box<CustomNetwork>),
}

impl HostNetwork {
    /// A handle that outlives [`HostNetwork::run`].
    pub fn handle(&self) -> NetworkHandle {
        match self {
            Self::Kernel(network) => network.handle(),
            Self::Custom(network) => network.network.handle(),
        }
    }

    /// Follows the views until something that the network was built from changes.
    ///
    /// # Errors
    /// The network cannot go on, and running it again as it is will not help.
    ///
    /// # Cancel safety
    /// Dropping the future stops the network. See [`KernelNetwork::run`] and [`Network::run`].
    pub async fn run(self, views: watch::Receiver<View>) -> Result<Ended> {
        match self {
            Self::Kernel(network) => network.run(views).await,
            Self::Custom(network) => network.run(views).await,
        }
    }
}

/// A network that runs itself, and the admission of its peers.
pub struct CustomNetwork {
    network: Box<dyn Network>,
    admission: Admission,
    own: Subnets,
}

impl std::fmt::Debug for CustomNetwork {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CustomNetwork").field("network", &self.network).finish_non_exhaustive()
    }
}

impl CustomNetwork {
    /// A network for the lease `own` inside the pod `networks`. It accepts leases of `lease_type`.
    pub(crate) fn new(
        network: Box<dyn Network>,
        own: &Lease,
        networks: Dual<Subnet>,
        lease_type: &'static str,
    ) -> Self {
        let plan = OfferPlan::new(Some(lease_type), Box::new(|_, _, _, _| Ok(())));
        let rules = AdmissionRules {
            networks,
            own: Some(Arc::new(own.clone())),
            ..AdmissionRules::default()
        };
        let admission = Admission::new(rules, vec![plan]);
        Self { network, admission, own: own.subnets }
    }

    async fn run(self, mut views: watch::Receiver<View>) -> Result<Ended> {
        let Self { network, mut admission, own } = self;
        let mut leases = LeaseSet::default();
        let mut accept = move |view: View| {
            let before = std::mem::replace(&mut leases, view.leases);
            // Its plan asks no question.
            admission.update(leases.changes_since(&before), &|_| Some(None));
            let complete = matches!(view.origin, Origin::Live { .. });
            AcceptedPeers::new(leases.clone(), admission.rejected().clone(), Some(own), complete)
        };
        let first = accept(views.borrow_and_update().clone());
        let (sender, receiver) = watch::channel(first);
        let mut run = network.run(receiver);
        loop {
            tokio::select! {
                ended = &mut run => return ended,
                changed = views.changed() => if changed.is_err() { break },
            }
            let view = views.borrow_and_update().clone();
            sender.send_replace(accept(view));
        }
        drop(sender);
        run.await
    }
}
