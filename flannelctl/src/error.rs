//! The error of a verb.

use flannel_backends::UnknownBackend;

/// The error of a verb.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// The daemon does not answer.
    #[error(transparent)]
    Api(#[from] flannel_api::Error),
    /// A wrong argument or state. The text names the right one.
    #[error("{0}")]
    Refused(String),
    /// Several such texts, a line each.
    #[error("{}", .0.join("\n"))]
    Lines(Vec<String>),
    /// The store or the state directory cannot be used.
    #[error(transparent)]
    Options(#[from] flannel_options::Error),
    /// The network config names an unknown backend.
    #[error(transparent)]
    UnknownBackend(#[from] UnknownBackend),
    /// The store or a backend reports an error.
    #[error(transparent)]
    Core(#[from] flannel_core::Error),
    /// The kernel cannot be reached.
    #[error("the kernel: {0}")]
    Kernel(#[from] flannel_core::kernel::KernelError),
}

impl Error {
    /// 2 for wrong usage, which the daemon may notice, and 1 for everything else.
    pub(crate) fn exit_code(&self) -> u8 {
        match self {
            Self::Api(flannel_api::Error::Parameter(_)) => 2,
            Self::Options(error) => error.exit_code(),
            _ => 1,
        }
    }
}

pub(crate) type Result<T, E = Error> = std::result::Result<T, E>;
