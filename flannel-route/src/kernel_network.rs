//! Networks of kernel objects. Backends such as host-gw and vxlan are data to them.

use std::sync::Arc;

use flannel_admission::{Admission, AdmissionRules, OfferPlan};
use flannel_core::address::Dual;
use flannel_core::backend::{Blueprint, NodeLease};
use flannel_core::kernel::{Footprint, ProcessNames};
use flannel_core::lease::View;
use flannel_core::network::{Ended, NetworkHandle, Question};
use flannel_core::object::{Object, Route, State, Via};
use flannel_core::status::Status;
use flannel_core::{Kernel, Result, Subnet};
use tokio::sync::{mpsc, watch};

use crate::driver::Driver;
use crate::engine::Engine;

/// A network that keeps a kernel equal to [`Blueprint`]s applied to the leases.
///
/// Rounds run on the runtime's blocking pool, one at a time. A network in sync wakes up only for
/// events of the kernel and the store, and reads the kernel once in five minutes.
///
/// ```
/// use std::sync::Arc;
/// use flannel_core::testing::{FakeKernel, FakeSubnets};
/// use flannel_core::SubnetManager;
/// use flannel_core::backend::{Blueprint, NodeLease};
/// use flannel_core::object::{Route, Via};
/// use flannel_route::KernelNetwork;
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> flannel_core::Result<()> {
/// let kernel = FakeKernel::with_uplink("eth0").without_nexthops();
/// let subnets = FakeSubnets::new("10.1.0.0/16");
/// subnets.put("10.1.7.0-24", "192.0.2.7");
/// let eth0 = "eth0".parse().unwrap();
/// let mut blueprint = Blueprint::new(1500, move |subnets, offer, _env, objects| {
///     objects.extend(offer.endpoints(subnets).filter_map(|peer| {
///         let via = Via::Gateway { gateway: peer.public?, link: eth0, onlink: false };
///         Some(Route { dst: peer.subnet, via, mtu: None }.into())
///     }));
///     Ok(())
/// });
/// blueprint.footprint.networks = vec!["10.1.0.0/16".parse().unwrap()];
/// blueprint.footprint.routes_on = [eth0].into();
/// let lease = NodeLease::Held(subnets.acquire_lease(&Default::default()).await?);
/// let networks = subnets.network_config().await?.pod_networks().collect();
/// let network = KernelNetwork::new(Arc::new(kernel.clone()), lease, networks, vec![blueprint]);
/// let mut status = network.handle().status;
/// tokio::select! {
///     ended = network.run(subnets.watch_leases().await?) => { ended?; }
///     _ = status.wait_for(|status| status.in_sync) => {}
/// }
/// assert_eq!(kernel.dump(), ["route 10.1.7.0/24 via 192.0.2.7 dev eth0"]);
/// # Ok(()) }
/// ```
pub struct KernelNetwork {
    kernel: Arc<dyn Kernel>,
    names: Option<Arc<dyn ProcessNames>>,
    /// The node holds its lease.
    is_held: bool,
    engine: Box<Engine>,
    handle: NetworkHandle,
    status: watch::Sender<Arc<Status>>,
    questions: mpsc::Receiver<Question>,
}

impl std::fmt::Debug for KernelNetwork {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("KernelNetwork")
            .field("lease", &self.handle.lease.subnets)
            .finish_non_exhaustive()
    }
}

impl KernelNetwork {
    /// A network that will keep `kernel` equal to `blueprints`, once it runs. Touches nothing yet.
    ///
    /// A lease outside the pod `networks` is rejected. The first blueprint whose plan accepts an
    /// offer of a peer defines its objects. The base objects of all blueprints are put in place.
    /// Blueprints with [records](flannel_core::object::Record) need a `kernel` that is wrapped in
    /// [`WithAnnexes`](flannel_annex::WithAnnexes), as by [`Host::join`](crate::Host::join).
    pub fn new(
        kernel: Arc<dyn Kernel>,
        lease: NodeLease,
        networks: Dual<Subnet>,
        blueprints: Vec<Blueprint>,
    ) -> Self {
        let mtu = blueprints.iter().map(|blueprint| blueprint.mtu).min().unwrap_or(0);
        let (mut footprint, mut base, mut plans) =
            (Footprint::default(), State::default(), Vec::new());
        for blueprint in blueprints {
            footprint.merge(blueprint.footprint);
            base.extend(blueprint.base.iter().cloned());
            plans.push(OfferPlan::new(blueprint.lease_type, blueprint.plan));
        }
        let is_held = lease.held().is_some();
        let (NodeLease::Held(own) | NodeLease::Lapsed(own)) = lease;
        let reserved = base.iter().map(Object::key).collect();
        let rules = AdmissionRules { networks, own: Some(Arc::new(own.clone())), reserved };
        let (status, receiver) = watch::channel(Arc::new(Status::default()));
        let (asked, questions) = mpsc::channel(1);
        Self {
            kernel,
            names: None,
            handle: NetworkHandle::new(own, mtu, receiver).with_questions(asked),
            is_held,
            engine: Box::new(Engine::new(footprint, base, Admission::new(rules, plans))),
            status,
            questions,
        }
    }

    /// Drops packets to those addresses of this node's subnets that no pod has, instead of
    /// following other routes. Does nothing if the node's lease has lapsed. Without this option, a
    /// network with [`Footprint::blackholes`] removes the routes of last resort of an earlier one.
    #[must_use]
    pub fn drop_unused_addresses(mut self) -> Self {
        if self.is_held {
            let route = |dst| Object::from(Route { dst, via: Via::LastResort, mtu: None });
            self.engine.want_blackholes(self.handle.lease.subnets.iter().map(route));
        }
        self
    }

    /// Names the processes that change objects of this network, in its status and the log. Without
    /// this option, the port ids of their sockets name them.
    #[must_use]
    pub fn with_process_names(self, names: Arc<dyn ProcessNames>) -> Self {
        Self { names: Some(names), ..self }
    }

    /// A handle that outlives [`KernelNetwork::run`].
    pub fn handle(&self) -> NetworkHandle {
        self.handle.clone()
    }

    /// Makes the kernel follow the views until their sender is dropped ([`Ended::ViewsClosed`]).
    ///
    /// # Errors
    /// None at present: the status holds the changes that the kernel refuses.
    ///
    /// # Cancel safety
    /// Dropping the future stops the network. The objects stay in the kernel. The drop may block
    /// for one batch of changes (milliseconds, rarely 100). Nothing is written after it.
    pub async fn run(self, views: watch::Receiver<View>) -> Result<Ended> {
        let Self { kernel, names, engine, status, questions, .. } = self;
        Driver::new(kernel, names, engine, status, views, questions).run().await
    }
}
