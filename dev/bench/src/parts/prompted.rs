//! A kernel handle whose events come from the bench only, and which reports when the engine reads
//! the kernel.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use async_trait::async_trait;
use flannel_core::Kernel;
use flannel_core::kernel::{
    Changes, Footprint, Invalidation, KernelError, NexthopIds, Outcome, RouteAnswer,
};
use flannel_core::object::{Change, ObjectSet};
use tokio::sync::{Notify, mpsc};

/// A kernel handle whose [`Kernel::changes`] the bench sends.
#[derive(Debug)]
pub(crate) struct Prompted {
    kernel: Arc<dyn Kernel>,
    doubt: Arc<Notify>,
    begun: mpsc::UnboundedSender<()>,
}

/// The bench's handle of a [`Prompted`].
#[derive(Debug)]
pub(crate) struct Prompter {
    doubt: Arc<Notify>,
    begun: mpsc::UnboundedReceiver<()>,
}

impl Prompted {
    pub(crate) fn new(kernel: Arc<dyn Kernel>) -> (Self, Prompter) {
        let doubt = Arc::new(Notify::new());
        let (begins, begun) = mpsc::unbounded_channel();
        (Self { kernel, doubt: Arc::clone(&doubt), begun: begins }, Prompter { doubt, begun })
    }
}

impl Prompter {
    /// Reports to the engine that messages were lost.
    pub(crate) fn report_loss(&self) {
        self.doubt.notify_one();
    }

    /// Waits until a read begins. Returns `None` if the engine is gone.
    pub(crate) async fn begun(&mut self) -> Option<()> {
        self.begun.recv().await
    }

    /// The number of reads that began without [`Prompter::begun`]. Forgets them.
    pub(crate) fn others(&mut self) -> usize {
        std::iter::from_fn(|| self.begun.try_recv().ok()).count()
    }
}

impl Kernel for Prompted {
    fn snapshot(&self, footprint: &Footprint) -> Result<ObjectSet, KernelError> {
        // The bench may have dropped its handle.
        let _ = self.begun.send(());
        self.kernel.snapshot(footprint)
    }

    fn nexthop_ids(&self, footprint: &Footprint) -> Result<NexthopIds, KernelError> {
        self.kernel.nexthop_ids(footprint)
    }

    fn nexthop_users(&self, there: &ObjectSet) -> Result<BTreeMap<u32, String>, KernelError> {
        self.kernel.nexthop_users(there)
    }

    fn apply(&self, footprint: &Footprint, changes: &[Change]) -> Vec<Outcome> {
        self.kernel.apply(footprint, changes)
    }

    fn lookup(&self, dst: IpAddr) -> Result<RouteAnswer, KernelError> {
        self.kernel.lookup(dst)
    }

    fn changes(&self) -> Result<Box<dyn Changes>, KernelError> {
        Ok(Box::new(Prompts(Arc::clone(&self.doubt))))
    }
}

#[derive(Debug)]
struct Prompts(Arc<Notify>);

#[async_trait]
impl Changes for Prompts {
    async fn next(&mut self) -> Result<Invalidation, KernelError> {
        self.0.notified().await;
        Ok(Invalidation::Everything)
    }
}
