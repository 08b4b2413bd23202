//! What became of a change.

use super::KernelError;

/// What became of one change of [`Kernel::apply`](super::Kernel::apply) or
/// [`RecordKeeper::apply`](super::RecordKeeper::apply).
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use = "a change may have failed"]
pub enum Outcome {
    /// The change was made, or there was nothing to change.
    Done,
    /// The change was only started: by a record keeper, or the put of a device that another program
    /// makes. Its end is an event.
    Started,
    /// The change was refused.
    Failed(KernelError),
}

impl Outcome {
    /// Whether the change was made.
    pub const fn is_done(&self) -> bool {
        matches!(self, Self::Done)
    }

    /// The outcome for a caller that does not wait for the end of a change.
    ///
    /// # Errors
    /// The change was refused, or was only started.
    pub fn into_result(self) -> Result<(), KernelError> {
        match self {
            Self::Done => Ok(()),
            Self::Started => Err(KernelError::Other("the change was only started".into())),
            Self::Failed(error) => Err(error),
        }
    }
}

impl From<Result<(), KernelError>> for Outcome {
    fn from(result: Result<(), KernelError>) -> Self {
        result.map_or_else(Self::Failed, |()| Self::Done)
    }
}
