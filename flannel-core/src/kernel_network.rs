//! The only network that touches routes: leases in, kernel state out. host-gw, vxlan and the like are data to it.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};

use crate::address::{Dual, Subnet};
use crate::admit::{Peers, Terms};
use crate::error::Result;
use crate::kernel::{Changes, Doubts, Kernel, KernelError, Owned};
use crate::lease::{Lease, View};
use crate::network::{Ended, Network, NetworkHandle, Status};
use crate::plan::{Env, Plan};
use crate::reconcile::{Gate, Reconciler};
use crate::state::{Object, State};

/// With everything in order, the kernel is read once in this time, in case a message was never sent.
const RESYNC: Duration = Duration::from_secs(300);
/// After a failure, the kernel is read again: first after this time, then after twice that, and so on.
const RETRY_FIRST: Duration = Duration::from_millis(100);
const RETRY_LONGEST: Duration = Duration::from_secs(30);
/// More reports than this at once become doubt about everything: memory is bounded by peers, not by events.
const MOST_REPORTS: usize = 1 << 16;
/// Answers to plans' questions are asked for again at most this often.
const RECHECK: Duration = Duration::from_secs(1);
/// … unless the link that routes are on changed: then after this.
const HURRY: Duration = Duration::from_millis(100);

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
}

impl std::fmt::Debug for KernelNetwork {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("KernelNetwork").field("lease", &self.handle.lease.subnets).finish_non_exhaustive()
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
        Self {
            kernel,
            reconciler: Box::new(Reconciler::new(owned, base, peers)),
            handle: NetworkHandle { lease, mtu, status: receiver },
            status,
        }
    }
}

#[async_trait]
impl Network for KernelNetwork {
    fn handle(&self) -> NetworkHandle {
        self.handle.clone()
    }

    async fn run(self: Box<Self>, views: watch::Receiver<View>) -> Result<Ended> {
        let gate = CloseOnDrop(Arc::default());
        let mut driver = Driver {
            kernel: self.kernel,
            reconciler: Some(self.reconciler),
            status: self.status,
            views,
            listener: Listener::Unopened,
            doubts: Vec::new(),
            heard: 0,
            overrun: false,
            reads: 0,
            read_next: Instant::now() + RESYNC,
            retry_after: RETRY_FIRST,
            recheck_next: Instant::now(),
            recheck_last: Instant::now() - HURRY,
        };
        driver.views.mark_changed();
        loop {
            driver.work(&gate.0).await;
            if !driver.wait().await {
                return Ok(Ended::ViewsClosed);
            }
        }
    }
}

/// Nothing is written once this is dropped.
struct CloseOnDrop(Arc<Gate>);

impl Drop for CloseOnDrop {
    fn drop(&mut self) {
        self.0.close();
    }
}

/// The ear on the kernel, or why there is none.
enum Listener {
    Unopened,
    Open(Box<dyn Changes>),
    Closed(KernelError),
}

impl Listener {
    /// Waits for news; for ever if there is no ear.
    async fn next(&mut self) -> Doubts {
        let Self::Open(changes) = self else { return std::future::pending().await };
        match changes.next().await {
            Ok(doubts) => doubts,
            Err(error) => {
                *self = Self::Closed(error);
                Doubts::Everything
            }
        }
    }
}

struct Driver {
    kernel: Arc<dyn Kernel>,
    /// Away while a blocking job has it.
    reconciler: Option<Box<Reconciler>>,
    status: watch::Sender<Arc<Status>>,
    views: watch::Receiver<View>,
    listener: Listener,
    doubts: Vec<Doubts>,
    /// How many reports `doubts` hold, and whether they became too many.
    heard: usize,
    overrun: bool,
    reads: u64,
    read_next: Instant,
    retry_after: Duration,
    recheck_next: Instant,
    recheck_last: Instant,
}

impl Driver {
    /// Does all there is to do, listening meanwhile so that the kernel's messages do not pile up.
    async fn work(&mut self, gate: &Arc<Gate>) {
        // A stream that broke is opened again at the pace of all that failed.
        let listen = match self.listener {
            Listener::Unopened => true,
            Listener::Open(_) => false,
            Listener::Closed(_) => Instant::now() >= self.read_next,
        };
        let now = Instant::now();
        if now >= self.read_next {
            self.doubts.push(Doubts::Everything);
        }
        let may_recheck = now >= self.recheck_next;
        let may_hurry = now >= self.recheck_last + HURRY;
        // When nobody will send more, the last view still counts.
        let view = self.views.has_changed().unwrap_or(true).then(|| self.views.borrow_and_update().clone());
        let doubts = std::mem::take(&mut self.doubts);
        (self.heard, self.overrun) = (0, false);
        // The invariant: only this function takes the reconciler, and it puts it back before it returns.
        let Some(mut reconciler) = self.reconciler.take() else { return };
        let (kernel, gate) = (Arc::clone(&self.kernel), Arc::clone(gate));
        let mut job = tokio::task::spawn_blocking(move || {
            // Listen first, then read: what changes in between is heard.
            let listener = listen.then(|| kernel.changes());
            if listen {
                reconciler.doubt(&Doubts::Everything);
            }
            doubts.iter().for_each(|doubts| reconciler.doubt(doubts));
            let urgent = may_hurry && reconciler.has_urgent_facts();
            let recheck = urgent || may_recheck && reconciler.has_stale_facts();
            if recheck {
                reconciler.recheck_facts(&*kernel);
            }
            if let Some(view) = view {
                reconciler.view(&view, &*kernel);
            }
            // Closed: this driver is gone, and nobody asks.
            let _ = reconciler.settle(&*kernel, &gate);
            (reconciler, recheck, listener)
        });
        let (mut reconciler, rechecked, listener) = loop {
            tokio::select! {
                done = &mut job => match done {
                    Ok(done) => break done,
                    Err(panic) => std::panic::resume_unwind(panic.into_panic()),
                },
                doubts = self.listener.next() => self.hear(doubts),
            }
        };
        match listener {
            Some(Ok(changes)) => self.listener = Listener::Open(changes),
            Some(Err(error)) => self.listener = Listener::Closed(error),
            None => {}
        }
        if rechecked {
            self.recheck_last = Instant::now();
            self.recheck_next = self.recheck_last + RECHECK;
        }
        if reconciler.take_newly_failing() {
            self.retry_after = RETRY_FIRST;
        }
        self.publish(&reconciler);
        self.schedule(&reconciler);
        self.reconciler = Some(reconciler);
    }

    /// Notes a doubt; so many that one snapshot is cheaper become one.
    fn hear(&mut self, doubts: Doubts) {
        if let Doubts::Objects(reports) = &doubts {
            if self.overrun {
                return;
            }
            self.heard += reports.len();
            if self.heard > MOST_REPORTS {
                self.overrun = true;
                self.doubts.retain(|doubts| !matches!(doubts, Doubts::Objects(_)));
                return self.doubts.push(Doubts::Everything);
            }
        }
        if self.doubts.last() != Some(&doubts) {
            self.doubts.push(doubts);
        }
    }

    fn publish(&self, reconciler: &Reconciler) {
        let mut status = reconciler.status();
        if let Listener::Closed(error) = &self.listener {
            status.in_sync = false;
            status.kernel_error.get_or_insert_with(|| error.clone());
        }
        self.status.send_if_modified(|old| {
            let changed = **old != status;
            *old = Arc::new(status);
            changed
        });
    }

    /// Decides when to read the kernel next: soon after a failure, else rarely.
    fn schedule(&mut self, reconciler: &Reconciler) {
        let now = Instant::now();
        let read = reconciler.reads() != self.reads;
        self.reads = reconciler.reads();
        if !reconciler.is_failing() && matches!(self.listener, Listener::Open(_)) {
            self.retry_after = RETRY_FIRST;
            if read {
                self.read_next = now + RESYNC;
            }
            return;
        }
        if read || now >= self.read_next {
            self.read_next = now + self.retry_after;
            self.retry_after = (self.retry_after * 2).min(RETRY_LONGEST);
        } else {
            self.read_next = self.read_next.min(now + self.retry_after);
        }
    }

    /// Waits until there is something to do; false if there will be no more views.
    async fn wait(&mut self) -> bool {
        if !self.doubts.is_empty() {
            return true;
        }
        let stale_facts = self.reconciler.as_ref().is_some_and(|r| r.has_stale_facts());
        let urgent = self.reconciler.as_ref().is_some_and(|r| r.has_urgent_facts());
        let deadline = match (urgent, stale_facts) {
            (true, _) => self.read_next.min(self.recheck_last + HURRY),
            (_, true) => self.read_next.min(self.recheck_next),
            _ => self.read_next,
        };
        tokio::select! {
            changed = self.views.changed() => match changed {
                Ok(()) => { self.views.mark_changed(); true }
                Err(_) => false,
            },
            doubts = self.listener.next() => { self.hear(doubts); true }
            () = sleep_until(deadline) => true,
        }
    }
}
