//! What can go wrong in a lab. A pod that does not reach another is a result
//! ([`Unreached`](crate::Unreached)), not an error. An error means that the lab itself failed.

use std::io;
use std::path::PathBuf;

/// Why the lab could not do what was asked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// This machine lacks something that a lab needs.
    #[error("{what}\n  {remedy}")]
    Missing {
        /// What is missing, and how that showed.
        what: String,
        /// What to do about it.
        remedy: String,
    },
    /// A program failed inside a namespace.
    #[error("{place}: `{command}` failed: {output}")]
    Command {
        /// The host, pod or switch.
        place: String,
        /// The program with its arguments; of a batch, the line that failed.
        command: String,
        /// What it said, or its exit status if it said nothing.
        output: String,
    },
    /// A host's daemon ended although nobody stopped it.
    #[error("{host}: flanneld ended with {status}; the end of its log:\n{log}")]
    DaemonEnded {
        /// The host.
        host: String,
        /// Its exit status.
        status: String,
        /// The last lines of its log.
        log: String,
    },
    /// A host's daemon wrote no `subnet.env` in time.
    #[error("{host}: flanneld wrote no {path} within {seconds:.1} s; the end of its log:\n{log}")]
    NoSubnetEnv {
        /// The host.
        host: String,
        /// The file that was waited for.
        path: PathBuf,
        /// How long it was waited for.
        seconds: f64,
        /// The last lines of the daemon's log.
        log: String,
    },
    /// A `subnet.env` is not what a CNI plugin can use.
    #[error("{path}: {reason}")]
    SubnetEnv {
        /// The file.
        path: PathBuf,
        /// Which key, what it holds, and what would be right.
        reason: String,
    },
    /// The lab was asked for something that it cannot be.
    #[error("{0}")]
    Unsuitable(String),
    /// [`Interrupter::interrupt`](crate::Interrupter::interrupt) was called.
    #[error("interrupted")]
    Interrupted,
    /// The operating system refused something.
    #[error("{object}: {source}")]
    Io {
        /// The file, namespace or process.
        object: String,
        /// Why.
        source: io::Error,
    },
}

impl Error {
    /// For `map_err`: names the object of an I/O error.
    pub(crate) fn io<E: Into<io::Error>>(object: impl Into<String>) -> impl FnOnce(E) -> Self {
        let object = object.into();
        move |source| Self::Io { object, source: source.into() }
    }
}

/// A result with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;
