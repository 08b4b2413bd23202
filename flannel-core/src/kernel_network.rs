//! The only network that touches routes: leases in, kernel state out. host-gw, vxlan and the like are data to it.

use std::sync::Arc;
use std::time::SystemTime;

use async_trait::async_trait;
use tokio::sync::{mpsc, watch};

use crate::address::{Dual, Subnet};
use crate::admit::{Peers, Terms};
use crate::driver::Driver;
use crate::error::Result;
use crate::kernel::{Kernel, Owned};
use crate::lease::{Lease, View};
use crate::network::{Ended, Network, NetworkHandle, Question};
use crate::plan::{Env, Plan};
use crate::reconcile::Reconciler;
use crate::state::{Object, Route, State, Via};
use crate::status::Status;

/// All that makes one kernel network differ from another.
pub struct Blueprint {
    /// This node's lease.
    pub lease: Lease,
    /// The enabled pod networks: no peer outside them is believed.
    pub networks: Dual<Subnet>,
    /// What pods may send, in bytes.
    pub mtu: u32,
    /// What the network may touch.
    pub owned: Owned,
    /// Objects that are wanted whatever the peers: the device and its addresses.
    pub base: State,
    /// What each peer adds.
    pub plan: Box<Plan>,
}

/// A [`Network`] that keeps a kernel equal to a [`Blueprint`] applied to the leases.
///
/// Everything blocking runs on one thread of the runtime's blocking pool at a time, so there is never more than
/// one writer. When everything is in order it wakes up only for the kernel's and the store's news, and
/// every five minutes to read the kernel once.
///
/// ```
/// use std::sync::Arc;
/// use flannel_core::testing::{FakeKernel, FakeSubnets};
/// use flannel_core::{Blueprint, KernelNetwork, Network, Object, Owned, Route, State, SubnetManager, Via};
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> flannel_core::Result<()> {
/// let (kernel, subnets) = (FakeKernel::with_uplink("eth0").without_nexthops(), FakeSubnets::new("10.1.0.0/16"));
/// subnets.put("10.1.7.0-24", "192.0.2.7");
/// let eth0 = "eth0".parse().unwrap();
/// let network = KernelNetwork::new(
///     Arc::new(kernel.clone()),
///     Blueprint {
///         lease: subnets.acquire_lease(&Default::default()).await?,
///         networks: subnets.network_config().await?.pod_networks().collect(),
///         mtu: 1500,
///         owned: Owned {
///             networks: vec!["10.1.0.0/16".parse().unwrap()],
///             routes_on: [eth0].into(),
///             ..Owned::default()
///         },
///         base: State::default(),
///         plan: Box::new(move |lease, _env, objects: &mut Vec<Object>| {
///             for peer in lease.endpoints() {
///                 let Some(gateway) = peer.public else { continue };
///                 let via = Via::Gateway { gateway, link: eth0, onlink: false };
///                 objects.push(Route { dst: peer.subnet, via, mtu: None }.into());
///             }
///             Ok(())
///         }),
///     },
/// );
/// let mut status = network.handle().status;
/// tokio::select! {
///     ended = Box::new(network).run(subnets.watch_leases().await?) => { ended?; }
///     _ = status.wait_for(|status| status.in_sync) => {}
/// }
/// assert_eq!(kernel.dump(), ["route 10.1.7.0/24 via 192.0.2.7 dev eth0"]);
/// # Ok(()) }
/// ```
pub struct KernelNetwork {
    kernel: Arc<dyn Kernel>,
    reconciler: Box<Reconciler>,
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
    /// A network that will keep `kernel` equal to `blueprint`, once it runs. Touches nothing yet.
    pub fn new(kernel: Arc<dyn Kernel>, blueprint: Blueprint) -> Self {
        let Blueprint { lease, networks, mtu, owned, base, plan } = blueprint;
        // What the plan makes of our own lease is what peers must not define.
        let mut own_objects = Vec::new();
        let not_asked = |_| Some(None);
        // A plan that rejects our own lease defines nothing of ours.
        let _ = plan(&lease, &Env::new(&not_asked), &mut own_objects);
        let reserved = base.iter().chain(&own_objects).map(Object::key).collect();
        let peers = Peers::new(
            Terms { networks, own: Some(lease.subnets), public: lease.attrs.public, reserved },
            plan,
        );
        let (status, receiver) = watch::channel(Arc::new(Status::default()));
        let (asked, questions) = mpsc::channel(1);
        Self {
            kernel,
            reconciler: Box::new(Reconciler::new(owned, base, peers)),
            handle: NetworkHandle::new(lease, mtu, receiver).with_questions(asked),
            status,
            questions,
        }
    }
}

#[async_trait]
impl Network for KernelNetwork {
    fn handle(&self) -> NetworkHandle {
        self.handle.clone()
    }

    fn drop_unused(&mut self) -> Result<()> {
        let lease = &self.handle.lease;
        // The subnets of a lease that has run out are not ours.
        if lease.expires.is_none_or(|end| SystemTime::now() < end) {
            let route = |dst| Object::from(Route { dst, via: Via::LastResort, mtu: None });
            self.reconciler.want_blackholes(lease.subnets.iter().map(route));
        }
        Ok(())
    }

    async fn run(self: Box<Self>, views: watch::Receiver<View>) -> Result<Ended> {
        Driver::new(self.kernel, self.reconciler, self.status, views, self.questions).run().await
    }
}
