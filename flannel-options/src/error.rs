//! Errors of options.

use std::path::PathBuf;

/// An error of options.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Not an error: the text of `--help` or `--version`.
    #[error("{0}")]
    Help(String),
    /// The command line or the environment is wrong.
    #[error("{0}")]
    Usage(String),
    /// The registry cannot be used.
    #[error("--registry {url}: {source}")]
    Registry {
        /// As given.
        url: String,
        /// The reason.
        source: Box<flannel_core::Error>,
    },
    /// A file cannot be read or written.
    #[error("{path}: {reason}")]
    File {
        /// The file.
        path: PathBuf,
        /// The reason.
        reason: String,
    },
}

impl Error {
    /// 0 for help, 2 for wrong usage, 1 for everything else.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Help(_) => 0,
            Self::Usage(_) => 2,
            _ => 1,
        }
    }
}
