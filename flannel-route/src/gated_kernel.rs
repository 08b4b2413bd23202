//! A kernel that refuses changes after its gate was closed.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

use flannel_core::Kernel;
use flannel_core::kernel::{Footprint, Outcome};
use flannel_core::object::Change;
use flannel_core::runtime::lock;

use crate::outcomes;

/// The error after the gate was closed. The batch was not applied, and no later batch will be.
#[derive(Debug)]
pub(crate) struct Closed;

/// A kernel with a gate. When the gate is closed, the batch in hand ends and no other follows.
#[derive(Debug)]
pub(crate) struct GatedKernel {
    /// The kernel for reads, which the gate does not stop.
    pub(crate) kernel: Arc<dyn Kernel>,
    closed: AtomicBool,
    /// Held while a batch is applied.
    applying: Mutex<()>,
}

impl GatedKernel {
    pub(crate) fn new(kernel: Arc<dyn Kernel>) -> Self {
        Self { kernel, closed: AtomicBool::new(false), applying: Mutex::new(()) }
    }

    /// Applies a batch of changes. Returns exactly one outcome for each.
    pub(crate) fn apply(
        &self,
        footprint: &Footprint,
        batch: &[Change],
    ) -> Result<Vec<Outcome>, Closed> {
        let _applying = lock(&self.applying);
        if self.closed.load(Relaxed) {
            return Err(Closed);
        }
        Ok(outcomes::apply(&*self.kernel, footprint, batch))
    }

    /// Closes the gate. Waits for the batch that is being applied.
    pub(crate) fn close(&self) {
        // Without the flag, the next batch could take the lock before this function does.
        self.closed.store(true, Relaxed);
        drop(lock(&self.applying));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;
    use std::thread;
    use std::time::{Duration, Instant};

    use flannel_core::object::{Route, Via};
    use flannel_core::testing::FakeKernel;

    use super::*;

    #[test]
    fn a_stop_waits_for_one_batch_although_others_follow_without_a_pause() {
        let kernel = FakeKernel::with_uplink("eth0");
        let begun = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&begun);
        kernel.fail(usize::MAX, 0, move |_| {
            counted.fetch_add(1, Relaxed);
            let start = Instant::now();
            while start.elapsed() < Duration::from_micros(500) {}
            false
        });
        let dst = "10.1.7.0/24".parse().unwrap();
        let batch = [Change::Put(Route { dst, via: Via::Blackhole, mtu: None }.into())];
        let mut late = 0;
        for _ in 0..20 {
            let gated = GatedKernel::new(Arc::new(kernel.clone()));
            let before = begun.load(Relaxed);
            thread::scope(|scope| {
                scope.spawn(|| while gated.apply(&Footprint::default(), &batch).is_ok() {});
                while begun.load(Relaxed) == before {
                    thread::yield_now();
                }
                let at = begun.load(Relaxed);
                gated.close();
                late += usize::from(begun.load(Relaxed) - at > 1);
            });
        }
        // The kernel may pause this thread before a stop.
        assert!(late <= 2, "{late} of 20 stops waited for more than one batch");
    }
}
