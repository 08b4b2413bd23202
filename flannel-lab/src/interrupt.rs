//! Ending a lab early from another thread. Every wait of a lab ends within moments with
//! [`Error::Interrupted`]; the cleaning up is then the ordinary one, by drop.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use crate::error::{Error, Result};

/// Ends a lab's waits from another thread, for good.
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
        *self.0.interrupted.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.0.changed.notify_all();
    }

    /// Waits until interrupted; returns [`Error::Interrupted`].
    pub fn wait(&self) -> Error {
        let interrupted = self.0.interrupted.lock().unwrap_or_else(PoisonError::into_inner);
        drop(self.0.changed.wait_while(interrupted, |interrupted| !*interrupted));
        Error::Interrupted
    }

    /// Goes on at once unless interrupted.
    pub(crate) fn check(&self) -> Result<()> {
        self.pause(Duration::ZERO)
    }

    /// Lets `pause` pass between two looks at a condition.
    pub(crate) fn pause(&self, pause: Duration) -> Result<()> {
        let interrupted = self.0.interrupted.lock().unwrap_or_else(PoisonError::into_inner);
        let waited =
            self.0.changed.wait_timeout_while(interrupted, pause, |interrupted| !*interrupted);
        let (interrupted, _) = waited.unwrap_or_else(PoisonError::into_inner);
        if *interrupted { Err(Error::Interrupted) } else { Ok(()) }
    }
}
