//! Errors of options.

use std::path::PathBuf;

/// An error of options.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The text of `--help` or `--version`, which is not an error.
    #[error("{0}")]
    Help(String),
    /// The command line or the environment is wrong.
    #[error("{0}")]
    Usage(String),
    /// The registry cannot be used.
    #[error("--registry {url}: {source}")]
    Registry {
        /// The text of the option.
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
    /// The exit code: 0 for help, 2 for wrong usage, 1 for everything else.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Help(_) => 0,
            Self::Usage(_) => 2,
            _ => 1,
        }
    }
}
