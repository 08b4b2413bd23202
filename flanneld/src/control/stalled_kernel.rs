//! A test that the daemon goes on while its kernel does not answer.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use flannel_core::address::Dual;
use flannel_core::backend::ExternalInterface;
use flannel_core::kernel::{
    Changes, Footprint, Invalidation, KernelError, NexthopIds, Outcome, RouteAnswer,
};
use flannel_core::lease::{LeaseAttrs, Offer};
use flannel_core::network::NetworkHandle;
use flannel_core::object::{Change, ObjectSet};
use flannel_core::runtime::lock;
use flannel_core::testing::FakeKernel;
use flannel_core::{Kernel, SubnetManager};
use flannel_route::{Host, JoinOptions};
use flannel_subnet::{HolderId, Identity, LocalManager, MemoryRegistry};
use test_support::eventually_async;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::Servers;
use crate::http::{Listener, listen};
use crate::observe::Observer;

const PATIENCE: Duration = Duration::from_secs(30);
const CONFIG: &str = r#"{"Network":"10.1.0.0/16","Backend":{"Type":"host-gw"}}"#;

/// A kernel whose calls wait while it is stalled.
#[derive(Debug)]
struct StalledKernel {
    kernel: FakeKernel,
    stall: Arc<Stall>,
}

#[derive(Debug, Default)]
struct Stall {
    state: Mutex<StallState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct StallState {
    is_stalled: bool,
    /// The calls that wait.
    waiting: u32,
}

impl Stall {
    fn begin(&self) {
        lock(&self.state).is_stalled = true;
    }

    fn end(&self) {
        lock(&self.state).is_stalled = false;
        self.changed.notify_all();
    }

    fn waiting(&self) -> u32 {
        lock(&self.state).waiting
    }

    /// Waits for the end of the stall.
    fn pass(&self) {
        let mut state = lock(&self.state);
        state.waiting += 1;
        let waited = self.changed.wait_timeout_while(state, 2 * PATIENCE, |it| it.is_stalled);
        waited.unwrap_or_else(PoisonError::into_inner).0.waiting -= 1;
    }
}

impl Kernel for StalledKernel {
    fn snapshot(&self, footprint: &Footprint) -> Result<ObjectSet, KernelError> {
        self.stall.pass();
        self.kernel.snapshot(footprint)
    }

    fn nexthop_ids(&self, footprint: &Footprint) -> Result<NexthopIds, KernelError> {
        self.stall.pass();
        self.kernel.nexthop_ids(footprint)
    }

    fn nexthop_users(&self, there: &ObjectSet) -> Result<BTreeMap<u32, String>, KernelError> {
        self.stall.pass();
        self.kernel.nexthop_users(there)
    }

    fn apply(&self, footprint: &Footprint, changes: &[Change]) -> Vec<Outcome> {
        self.stall.pass();
        self.kernel.apply(footprint, changes)
    }

    fn lookup(&self, dst: IpAddr) -> Result<RouteAnswer, KernelError> {
        self.stall.pass();
        self.kernel.lookup(dst)
    }

    fn changes(&self) -> Result<Box<dyn Changes>, KernelError> {
        let changes = self.kernel.changes()?;
        Ok(Box::new(StalledChanges { changes, stall: Arc::clone(&self.stall) }))
    }
}

/// A stream that asks the kernel before it returns an event, as the stream of Linux does for the
/// name of a device.
struct StalledChanges {
    changes: Box<dyn Changes>,
    stall: Arc<Stall>,
}

#[async_trait::async_trait]
impl Changes for StalledChanges {
    async fn next(&mut self) -> Result<Invalidation, KernelError> {
        let event = self.changes.next().await;
        self.stall.pass();
        event
    }
}

fn manager(registry: &MemoryRegistry) -> LocalManager {
    let identity =
        Identity { holder: HolderId::random(), previous: None, local_addresses: Vec::new() };
    // The lease is renewed every second.
    LocalManager::new(Arc::new(registry.clone()), identity).with_ttl(Duration::from_secs(3))
}

fn attrs(public: [u8; 4]) -> LeaseAttrs {
    LeaseAttrs::from(Offer::new([public.into()].into_iter().collect()).with_kind("host-gw"))
}

fn uplink() -> ExternalInterface {
    let address = Dual { v4: Some([192, 0, 2, 1].into()), v6: None };
    ExternalInterface::new("eth0".parse().unwrap(), 1500, address).with_reason("test")
}

/// The answer to `GET /healthz`.
async fn health(address: SocketAddr) -> String {
    let mut stream = TcpStream::connect(address).await.unwrap();
    let request = "GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n";
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    answer
}

fn renewals(manager: &LocalManager) -> u64 {
    manager.store_status().calls.get("renew").map_or(0, |calls| calls.sent)
}

async fn until_in_sync(handle: &NetworkHandle, peers: usize) {
    let is_in_sync = async || {
        let status = handle.status.borrow();
        status.in_sync && status.peers == peers
    };
    eventually_async(PATIENCE, is_in_sync, || "the network is not in sync").await;
}

/// The kernel does not answer for two renewals of the lease, which take two seconds.
#[tokio::test]
async fn the_lease_is_renewed_and_health_is_answered_while_the_kernel_does_not_answer() {
    let registry = MemoryRegistry::with_config(CONFIG);
    let subnets = Arc::new(manager(&registry));
    let kernel = FakeKernel::with_uplink("eth0");
    let stall = Arc::new(Stall::default());
    let stalled = StalledKernel { kernel: kernel.clone(), stall: Arc::clone(&stall) };
    let host = Host::new(uplink(), Arc::new(stalled), Arc::clone(&subnets) as _);
    let config = subnets.network_config().await.unwrap();
    let backends = flannel_backends::all();
    let backend = backends.find("host-gw").unwrap();
    let joined = host.join(&**backend, &config, JoinOptions::default()).await.unwrap();
    let network = joined.network;
    let handle = network.handle();
    let views = subnets.watch_leases().await.unwrap();

    let listener = listen("127.0.0.1:0".parse().unwrap()).unwrap();
    let address = listener.local_addr().unwrap();
    let servers = Servers { health: Some(Listener::Tcp(listener)), control: None };
    let observer = Observer::default();

    let scenario = async {
        until_in_sync(&handle, 0).await;
        stall.begin();
        // A new peer and a change by another program: a round and the listener wait.
        let peer = manager(&registry);
        peer.acquire_lease(&attrs([192, 0, 2, 7])).await.unwrap();
        // The fake kernel waits for its listeners.
        let others = kernel.clone();
        tokio::task::spawn_blocking(move || others.set_up("eth0", true));
        let waits = async || stall.waiting() >= 2;
        eventually_async(PATIENCE, waits, || "the network does not use the kernel").await;
        // A question waits for the kernel too, and nothing else waits for the question.
        let question = handle.explain([10, 1, 7, 9].into());
        let mut question = std::pin::pin!(question);
        let before = renewals(&subnets);
        let is_renewed = async || {
            assert!(health(address).await.ends_with("flanneld is running"));
            renewals(&subnets) >= before + 2
        };
        tokio::select! {
            explained = &mut question => panic!("the kernel has not answered: {explained:?}"),
            () = eventually_async(PATIENCE, is_renewed, || "the lease is not renewed") => {}
        }
        assert!(stall.waiting() >= 2 && handle.status.borrow().peers == 0);
        stall.end();
        question.await;
        until_in_sync(&handle, 1).await;
    };
    tokio::select! {
        ended = network.run(views) => panic!("{ended:?}"),
        ended = subnets.hold_lease(&handle.lease) => panic!("{ended:?}"),
        never = servers.serve(&observer) => match never {},
        () = scenario => {}
    }
}
