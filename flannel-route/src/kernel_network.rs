//! Networks of kernel objects. They treat backends such as host-gw and vxlan as data.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use flannel_core::address::Dual;
use flannel_core::backend::{Blueprint, NodeLease};
use flannel_core::kernel::{Footprint, ProcessNames};
use flannel_core::lease::View;
use flannel_core::network::{Ended, NetworkHandle, Question};
use flannel_core::object::{Object, ObjectSet, Route, Via};
use flannel_core::status::Status;
use flannel_core::{Kernel, Network, Result, Subnet};
use tokio::sync::{mpsc, watch};

use crate::admission::{Admission, AdmissionRules, BackendPlan, Handshakes, PathMtus};
use crate::driver::Driver;
use crate::engine::Engine;

/// Options of a [`KernelNetwork`].
///
/// ```
/// use std::time::Duration;
/// use flannel_route::EngineOptions;
///
/// let options = EngineOptions::default()
///     .with_drop_unused_addresses(true)
///     .with_resync(Duration::from_secs(60));
/// ```
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct EngineOptions {
    /// Adds a route of last resort ([`Via::LastResort`]) to each subnet of this node. Packets to
    /// addresses that no pod has are then dropped, and do not follow other routes. Has no effect if
    /// the node's lease has lapsed. Without this option, a network with [`Footprint::blackholes`]
    /// removes such routes of an earlier run.
    pub drop_unused_addresses: bool,
    /// The period of complete comparisons with the kernel. `None` means five minutes, and zero
    /// turns them off. They find changes that the kernel did not report. A start, a changed device,
    /// lost events and a failure cause a comparison in any case.
    pub resync: Option<Duration>,
    /// Gives the routes to the subnets of peers the MTUs in this channel, in bytes. A route without
    /// an entry has the MTU that its backend defines, or the MTU of its device.
    pub path_mtus: Option<watch::Receiver<PathMtus>>,
    /// The subnets of the peers whose encrypted tunnel has completed a handshake. A peer may be
    /// missing here and offer another backend of this network too. Packets to it then take that
    /// other backend.
    pub handshakes: Option<watch::Receiver<Handshakes>>,
    /// Finds the names of the processes that change objects of this network, for its status and the
    /// log. If it is `None`, the status has only the port ids of their netlink sockets. It may be
    /// the `flannel_netlink::NetlinkKernel` of this network.
    pub process_names: Option<Arc<dyn ProcessNames>>,
}

impl EngineOptions {
    /// Sets [`EngineOptions::drop_unused_addresses`].
    #[must_use]
    pub fn with_drop_unused_addresses(self, drop_unused_addresses: bool) -> Self {
        Self { drop_unused_addresses, ..self }
    }

    /// Sets [`EngineOptions::resync`].
    #[must_use]
    pub fn with_resync(self, period: impl Into<Option<Duration>>) -> Self {
        Self { resync: period.into(), ..self }
    }

    /// Sets [`EngineOptions::path_mtus`].
    #[must_use]
    pub fn with_path_mtus(self, mtus: impl Into<Option<watch::Receiver<PathMtus>>>) -> Self {
        Self { path_mtus: mtus.into(), ..self }
    }

    /// Sets [`EngineOptions::handshakes`].
    #[must_use]
    pub fn with_handshakes(self, handshakes: watch::Receiver<Handshakes>) -> Self {
        Self { handshakes: Some(handshakes), ..self }
    }

    /// Sets [`EngineOptions::process_names`].
    #[must_use]
    pub fn with_process_names(self, names: Arc<dyn ProcessNames>) -> Self {
        Self { process_names: Some(names), ..self }
    }
}

/// A network that keeps a kernel equal to the objects that [`Blueprint`]s define for the leases. It
/// runs as every [`Network`] does. The [front page](crate) has an example.
///
/// Rounds run on the runtime's blocking pool, one at a time. A network in sync wakes up only for
/// events of the kernel and the store, and for [comparisons](EngineOptions::resync).
///
/// Dropping the future of [`run`](Network::run) stops the network. The objects stay in the kernel.
/// The drop may block for one batch of changes, which takes milliseconds and rarely 100 ms. Nothing
/// is written after it. `run` does not return errors at present: the status has the changes that
/// the kernel refuses.
///
/// # Panics
/// `run` panics if the kernel or a plan panics, or without a tokio runtime with time enabled.
pub struct KernelNetwork {
    pub(crate) kernel: Arc<dyn Kernel>,
    /// Whether the node holds its lease.
    is_held: bool,
    pub(crate) engine: Box<Engine>,
    handle: NetworkHandle,
    pub(crate) status: watch::Sender<Arc<Status>>,
    pub(crate) questions: mpsc::Receiver<Question>,
    pub(crate) options: EngineOptions,
}

impl std::fmt::Debug for KernelNetwork {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("KernelNetwork")
            .field("lease", &self.handle.lease.subnets)
            .finish_non_exhaustive()
    }
}

impl KernelNetwork {
    /// A network that keeps `kernel` equal to `blueprints` while it [runs](Network::run). This call
    /// does not use the kernel. The MTU of the handle is the smallest MTU of the blueprints, or 0
    /// without blueprints.
    ///
    /// A lease outside the pod `networks` is rejected. [`Footprint::networks`] of the blueprints
    /// must be the same networks. The first blueprint whose plan accepts an offer of a peer defines
    /// the objects of the peer. The base objects of all blueprints are put.
    ///
    /// Blueprints with [records](flannel_core::object::Record) need a `kernel` that is wrapped in
    /// [`WithRecordKeepers`](crate::record_keepers::WithRecordKeepers). [`Host::join`] does that.
    ///
    /// [`Host::join`]: crate::Host::join
    pub fn new(
        kernel: Arc<dyn Kernel>,
        lease: NodeLease,
        networks: Dual<Subnet>,
        blueprints: Vec<Blueprint>,
    ) -> Self {
        let mtu = blueprints.iter().map(|blueprint| blueprint.mtu).min().unwrap_or(0);
        let mut footprint = Footprint::default();
        let mut base = ObjectSet::default();
        let mut plans = Vec::new();
        let path = blueprints.first().map_or("", |blueprint| blueprint.path);
        for blueprint in blueprints {
            footprint.merge(blueprint.footprint);
            base.extend(blueprint.base.iter().cloned());
            let plan = BackendPlan::new(blueprint.lease_type, blueprint.plan);
            let plan = plan.with_handshakes(blueprint.handshakes);
            plans.push(plan.with_proof(blueprint.proof));
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
            handle,
            is_held,
            engine: Box::new(Engine::new(footprint, base, Admission::new(rules, plans))),
            status,
            questions,
            options: EngineOptions::default(),
        }
    }

    /// Sets the options of the engine.
    #[must_use]
    pub fn with_options(self, options: EngineOptions) -> Self {
        Self { options, ..self }
    }
}

#[async_trait]
impl Network for KernelNetwork {
    fn handle(&self) -> NetworkHandle {
        self.handle.clone()
    }

    async fn run(mut self: Box<Self>, views: watch::Receiver<View>) -> Result<Ended> {
        if self.options.drop_unused_addresses && self.is_held {
            let subnets = self.handle.lease.subnets;
            self.engine.want_blackholes(
                subnets.iter().map(|dst| Route { dst, via: Via::LastResort, mtu: None }.into()),
            );
        }
        Driver::new(*self, views).run().await
    }
}
