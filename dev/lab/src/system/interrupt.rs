//! Interruption of a lab by another thread. Every wait then ends soon with [`Error::Interrupted`].

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use flannel_core::runtime::lock;

use crate::error::{Error, Result};

/// Interrupts a lab's waits, permanently.
///
/// ```
/// use flannel_lab::{Error, Interrupter};
///
/// let interrupter = Interrupter::default();
/// let signals = interrupter.clone();
/// std::thread::spawn(move || signals.interrupt());
/// assert!(matches!(interrupter.wait(), Error::Interrupted));
/// ```
#[derive(Debug, Clone, Default)]
pub struct Interrupter(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    interrupted: Mutex<bool>,
    changed: Condvar,
}

impl Interrupter {
    /// Ends all waits, present and future.
    pub fn interrupt(&self) {
        *lock(&self.0.interrupted) = true;
        self.0.changed.notify_all();
    }

    /// Waits until interrupted; returns [`Error::Interrupted`].
    pub fn wait(&self) -> Error {
        let interrupted = lock(&self.0.interrupted);
        drop(self.0.changed.wait_while(interrupted, |interrupted| !*interrupted));
        Error::Interrupted
    }

    /// Checks for an interruption.
    ///
    /// # Errors
    /// [`Error::Interrupted`].
    pub fn check(&self) -> Result<()> {
        self.pause(Duration::ZERO)
    }

    /// Sleeps for `pause`, or until interrupted.
    ///
    /// # Errors
    /// [`Error::Interrupted`].
    pub fn pause(&self, pause: Duration) -> Result<()> {
        let interrupted = lock(&self.0.interrupted);
        let waited =
            self.0.changed.wait_timeout_while(interrupted, pause, |interrupted| !*interrupted);
        let (interrupted, _) = waited.unwrap_or_else(PoisonError::into_inner);
        if *interrupted { Err(Error::Interrupted) } else { Ok(()) }
    }
}
