//! The engine as a daemon runs it, on a thread of its own: a backend, KernelNetwork and
//! NetlinkKernel.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::Context;
use flannel_backend_vxlan::VxlanBackend;
use flannel_core::lease::{LeaseSet, Origin, Revision, View};
use flannel_core::network::NetworkHandle;
use flannel_core::status::Status;
use flannel_core::testing::FakeSubnets;
use flannel_core::{Backend, Kernel, SubnetManager};
use tokio::runtime::{Builder, Runtime};
use tokio::sync::oneshot;

use crate::parts::cluster::Families;
use crate::parts::fixture::{BenchHost, Fixture};

/// The timeout for peers.
const PATIENCE: Duration = Duration::from_secs(600);
/// An engine is idle if it does nothing for this time. After its start it reads the kernel once
/// more.
pub(crate) const REST: Duration = Duration::from_millis(300);

/// An engine that runs. Dropping it ends the engine, and its objects stay.
pub(crate) struct Engine {
    subnets: FakeSubnets,
    handle: NetworkHandle,
    /// The runtime for waiting. The engine has another one.
    runtime: Runtime,
    _stop: oneshot::Sender<()>,
    thread: Option<JoinHandle<anyhow::Result<()>>>,
}

impl Engine {
    /// Starts it without peers, and waits until it is in sync and idle.
    pub(crate) fn start(fixture: &Fixture, families: Families) -> anyhow::Result<Self> {
        Self::start_on(fixture, families, |kernel| kernel)
    }

    /// Starts an engine on a wrapped kernel.
    pub(crate) fn start_on(
        fixture: &Fixture,
        families: Families,
        on: impl FnOnce(Arc<dyn Kernel>) -> Arc<dyn Kernel>,
    ) -> anyhow::Result<Self> {
        let subnets = FakeSubnets::with_config(&families.config());
        let mut host = fixture.host(Arc::new(subnets.clone()))?;
        host.host.kernel = on(host.host.kernel);
        let mut engine = Self::start_with(&host, subnets, &VxlanBackend)?;
        engine.rest()?;
        Ok(engine)
    }

    /// Starts the engine of a backend, on a host whose leases are in `subnets`. Does not wait.
    pub(crate) fn start_with(
        BenchHost { host, options }: &BenchHost,
        subnets: FakeSubnets,
        backend: &dyn Backend,
    ) -> anyhow::Result<Self> {
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let network = runtime.block_on(async {
            let config = subnets.network_config().await?;
            anyhow::Ok(host.join(backend, &config, options.clone()).await?.network)
        })?;
        let handle = network.handle();
        let (stop, stopped) = oneshot::channel::<()>();
        let leases = subnets.clone();
        let thread = std::thread::spawn(move || {
            Builder::new_current_thread().enable_all().build()?.block_on(async {
                let views = leases.watch_leases().await?;
                tokio::select! {
                    ended = network.run(views) => anyhow::bail!("the network ended: {ended:?}"),
                    _ = stopped => Ok(()),
                }
            })
        });
        Ok(Self { subnets, handle, runtime, _stop: stop, thread: Some(thread) })
    }

    /// The handle of its network.
    pub(crate) fn handle(&self) -> NetworkHandle {
        self.handle.clone()
    }

    /// Waits until it is idle.
    pub(crate) fn rest(&mut self) -> anyhow::Result<()> {
        loop {
            self.wait(0)?;
            let status = &mut self.handle.status;
            let quiet = async { tokio::time::timeout(REST, status.changed()).await.is_err() };
            if self.runtime.block_on(quiet) {
                return Ok(());
            }
        }
    }

    /// Sends a view with these peers' leases.
    pub(crate) fn send(&self, mut leases: LeaseSet) {
        leases.insert(self.handle.lease.clone());
        self.subnets
            .set_view(View { leases, origin: Origin::Live { revision: Revision(u64::MAX) } });
    }

    /// Waits until the kernel has acknowledged all objects of so many peers, and a snapshot shows
    /// them.
    pub(crate) fn wait(&mut self, peers: usize) -> anyhow::Result<()> {
        self.wait_for(peers, |status| status.in_sync)
    }

    /// Waits until the kernel has acknowledged all objects of so many peers.
    pub(crate) fn wait_acknowledged(&mut self, peers: usize) -> anyhow::Result<()> {
        self.wait_for(peers, |status| status.live && status.settled && status.failing.is_empty())
    }

    /// Waits until damage was repaired and all objects of so many peers are in place.
    pub(crate) fn wait_repaired(&mut self, peers: usize) -> anyhow::Result<()> {
        self.wait_for(peers, |status| status.repaired > 0 && status.in_sync)
    }

    /// The number of objects that were restored.
    pub(crate) fn repaired(&self) -> u64 {
        self.handle.status.borrow().repaired
    }

    fn wait_for(&mut self, peers: usize, is_so: impl Fn(&Status) -> bool) -> anyhow::Result<()> {
        let status = &mut self.handle.status;
        let arrived = self.runtime.block_on(async {
            let arrived = status.wait_for(|status| status.peers == peers && is_so(status));
            tokio::time::timeout(PATIENCE, arrived).await.map(|arrived| arrived.map(drop))
        });
        match arrived {
            Ok(arrived) => arrived.context("the network ended"),
            Err(_) => {
                let status = self.handle.status.borrow();
                anyhow::bail!("not in sync after {PATIENCE:?}: {} peers of {peers}", status.peers)
            }
        }
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        let (stop, _) = oneshot::channel();
        drop(std::mem::replace(&mut self._stop, stop));
        if let Some(Ok(Err(error))) = self.thread.take().map(JoinHandle::join) {
            eprintln!("the engine: {error:#}");
        }
    }
}
