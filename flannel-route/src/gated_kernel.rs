//! A kernel that takes no change after its gate was closed.

use std::sync::{Arc, Mutex, PoisonError};

use flannel_core::Kernel;
use flannel_core::kernel::{Footprint, KernelError};
use flannel_core::object::Change;

/// The result of each change of a batch.
pub(crate) type Results = Vec<Result<(), KernelError>>;

/// The gate was closed: nothing was written, and nothing will be.
#[derive(Debug)]
pub(crate) struct Closed;

#[derive(Debug)]
pub(crate) struct GatedKernel {
    /// For reads, which the gate does not stop.
    pub(crate) kernel: Arc<dyn Kernel>,
    closed: Mutex<bool>,
}

impl GatedKernel {
    pub(crate) fn new(kernel: Arc<dyn Kernel>) -> Self {
        Self { kernel, closed: Mutex::new(false) }
    }

    /// Applies a batch of changes.
    pub(crate) fn apply(&self, footprint: &Footprint, batch: &[Change]) -> Result<Results, Closed> {
        let closed = self.closed.lock().unwrap_or_else(PoisonError::into_inner);
        if *closed { Err(Closed) } else { Ok(self.kernel.apply(footprint, batch)) }
    }

    /// Closes the gate. Waits for the batch that is being applied.
    pub(crate) fn close(&self) {
        *self.closed.lock().unwrap_or_else(PoisonError::into_inner) = true;
    }
}
