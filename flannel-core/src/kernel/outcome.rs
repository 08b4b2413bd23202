//! Results of changes.

use super::KernelError;

/// The result of one change of [`Kernel::apply`](super::Kernel::apply) or
/// [`RecordKeeper::apply`](super::RecordKeeper::apply).
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use = "a change may have failed"]
pub enum Outcome {
    /// The change was made, or the object was already as the change wants it.
    Done,
    /// The change was started and has not ended: a record keeper takes long, or another program
    /// makes the device that was put. The end of the change is reported as an event
    /// ([`Changes`](super::Changes)).
    Started,
    /// The change was not made.
    Failed(KernelError),
}

impl Outcome {
    /// Whether the change was made.
    pub const fn is_done(&self) -> bool {
        matches!(self, Self::Done)
    }

    /// The outcome as a result, for a caller that does not wait for the end of a started change.
    ///
    /// # Errors
    /// The change failed, or has not ended ([`KernelError::NotEnded`]).
    pub fn into_result(self) -> Result<(), KernelError> {
        match self {
            Self::Done => Ok(()),
            Self::Started => Err(KernelError::NotEnded),
            Self::Failed(error) => Err(error),
        }
    }
}

impl From<Result<(), KernelError>> for Outcome {
    fn from(result: Result<(), KernelError>) -> Self {
        result.map_or_else(Self::Failed, |()| Self::Done)
    }
}
