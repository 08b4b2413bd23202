//! Networks of kernel objects. Backends such as host-gw and vxlan are data to them.

use std::sync::Arc;
use std::time::Duration;

use crate::admission::{Admission, AdmissionRules, Handshakes, OfferPlan, PathMtus};
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

/// A network that keeps a kernel equal to [`Blueprint`]s applied to the leases. The
/// [front page](crate) has an example.
///
/// Rounds run on the runtime's blocking pool, one at a time. A network in sync wakes up only for
/// events of the kernel and the store, and for [comparisons](Self::with_resync).
pub struct KernelNetwork {
    pub(crate) kernel: Arc<dyn Kernel>,
    pub(crate) names: Option<Arc<dyn ProcessNames>>,
    /// Whether the node holds its lease.
    is_held: bool,
    pub(crate) engine: Box<Engine>,
    handle: NetworkHandle,
    pub(crate) status: watch::Sender<Arc<Status>>,
    pub(crate) questions: mpsc::Receiver<Question>,
    pub(crate) resync: Option<Duration>,
    pub(crate) mtus: watch::Receiver<PathMtus>,
    pub(crate) handshakes: watch::Receiver<Handshakes>,
    pub(crate) withholds_offers: bool,
    pub(crate) needs_handshakes: bool,
}

impl std::fmt::Debug for KernelNetwork {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("KernelNetwork")
            .field("lease", &self.handle.lease.subnets)
            .finish_non_exhaustive()
    }
}

impl KernelNetwork {
    /// A network that keeps `kernel` equal to `blueprints` while it [runs](Self::run). This call
    /// does not use the kernel. The MTU of the handle is the smallest one of the blueprints, 0
    /// without blueprints.
    ///
    /// A lease outside the pod `networks` is rejected. [`Footprint::networks`] of the blueprints
    /// must be the same networks. The first blueprint whose plan accepts an offer of a peer defines
    /// its objects. The base objects of all blueprints are put in place.
    /// Blueprints with [records](flannel_core::object::Record) need a `kernel` that is wrapped in
    /// [`WithAnnexes`](crate::annex::WithAnnexes), as by [`Host::join`](crate::Host::join).
    pub fn new(
        kernel: Arc<dyn Kernel>,
        lease: NodeLease,
        networks: Dual<Subnet>,
        blueprints: Vec<Blueprint>,
    ) -> Self {
        let mtu = blueprints.iter().map(|blueprint| blueprint.mtu).min().unwrap_or(0);
        let (mut footprint, mut base, mut plans) =
            (Footprint::default(), State::default(), Vec::new());
        let path = blueprints.first().map_or("", |blueprint| blueprint.path);
        let needs_handshakes = blueprints.first().is_some_and(|blueprint| blueprint.handshakes);
        for blueprint in blueprints {
            footprint.merge(blueprint.footprint);
            base.extend(blueprint.base.iter().cloned());
            let plan = OfferPlan::new(blueprint.lease_type, blueprint.plan);
            plans.push(plan.with_handshakes(blueprint.handshakes));
        }
        let is_held = lease.held().is_some();
        let (NodeLease::Held(own) | NodeLease::Lapsed(own)) = lease;
        let reserved = base.iter().map(Object::key).collect();
        let rules = AdmissionRules { networks, own: Some(Arc::new(own.clone())), reserved };
        let (status, receiver) = watch::channel(Arc::new(Status::default()));
        let (asked, questions) = mpsc::channel(1);
        let mut handle = NetworkHandle::new(own, mtu, receiver).with_questions(asked);
        handle.path = path;
        Self {
            kernel,
            names: None,
            handle,
            is_held,
            engine: Box::new(Engine::new(footprint, base, Admission::new(rules, plans))),
            status,
            questions,
            resync: None,
            mtus: watch::channel(PathMtus::default()).1,
            handshakes: watch::channel(Handshakes::default()).1,
            withholds_offers: false,
            needs_handshakes,
        }
    }

    /// Adds a route of last resort ([`Via::LastResort`]) to each subnet of this node. Packets to
    /// addresses that no pod has are then dropped, and do not follow other routes. Does nothing if
    /// the node's lease has lapsed. Without this option, a network with [`Footprint::blackholes`]
    /// removes such routes of an earlier run.
    #[must_use]
    pub fn drop_unused_addresses(mut self) -> Self {
        if self.is_held {
            let route = |dst| Object::from(Route { dst, via: Via::LastResort, mtu: None });
            self.engine.want_blackholes(self.handle.lease.subnets.iter().map(route));
        }
        self
    }

    /// Names the processes that change objects of this network, in its status and the log. Without
    /// this option, only the port ids of their netlink sockets are known. `names` may be the
    /// `flannel_netlink::NetlinkKernel` of this network.
    #[must_use]
    pub fn with_process_names(self, names: Arc<dyn ProcessNames>) -> Self {
        Self { names: Some(names), ..self }
    }

    /// Sets the period of complete comparisons with the kernel; `None`: five minutes, zero: none.
    /// They find changes that the kernel did not report. A start, a changed device, lost events and
    /// a failure cause a comparison in any case.
    #[must_use]
    pub fn with_resync(self, period: Option<Duration>) -> Self {
        Self { resync: period, ..self }
    }

    /// Gives routes to the subnets of peers the MTUs in this channel. A route without an entry has
    /// the MTU that its backend defines, or its device's.
    #[must_use]
    pub fn with_path_mtus(self, mtus: watch::Receiver<PathMtus>) -> Self {
        Self { mtus, ..self }
    }

    /// Names the peers with which an encrypted tunnel has completed a handshake. Until then, a peer
    /// that offers another backend of this network too is reached by that one.
    #[must_use]
    pub fn with_handshakes(self, handshakes: watch::Receiver<Handshakes>) -> Self {
        Self { handshakes, ..self }
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
    ///
    /// # Panics
    /// The kernel or a plan panics, or there is no tokio runtime with time enabled.
    pub async fn run(self, views: watch::Receiver<View>) -> Result<Ended> {
        Driver::new(self, views).run().await
    }
}
