//! Why a verb could not do its work.

use flannel_backends::UnknownBackend;

/// Why a verb could not do its work.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// The daemon cannot be asked.
    #[error(transparent)]
    Api(#[from] flannel_api::Error),
    /// Something is wrong; the text says what would be right.
    #[error("{0}")]
    Refused(String),
    /// The store or the state directory cannot be used.
    #[error(transparent)]
    Options(#[from] flannel_options::Error),
    /// The network config names a backend that does not exist.
    #[error(transparent)]
    UnknownBackend(#[from] UnknownBackend),
    /// The store or a backend reports an error.
    #[error(transparent)]
    Core(#[from] flannel_core::Error),
    /// The kernel cannot be reached.
    #[error("the kernel: {0}")]
    Kernel(#[from] flannel_core::kernel::KernelError),
}

pub(crate) type Result<T, E = Error> = std::result::Result<T, E>;
