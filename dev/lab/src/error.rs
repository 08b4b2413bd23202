//! Errors of a lab. If a pod does not reach another, this is not an error but a result
//! ([`Unreached`](crate::Unreached)).

use std::io;
use std::path::PathBuf;

/// An error of the lab.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// This machine lacks something that a lab needs.
    #[error("{what}\n  {remedy}")]
    Missing {
        /// The missing requirement, with the symptom.
        what: String,
        /// The remedy.
        remedy: String,
    },
    /// A program failed inside a namespace.
    #[error("{place}: `{command}` failed: {output}")]
    Command {
        /// The host, pod or switch.
        place: String,
        /// The program with its arguments; of a batch, the line that failed.
        command: String,
        /// Its standard error, or its exit status if that is empty.
        output: String,
    },
    /// A host's daemon ended by itself.
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
        /// The path of the file.
        path: PathBuf,
        /// The timeout.
        seconds: f64,
        /// The last lines of the daemon's log.
        log: String,
    },
    /// A CNI plugin could not use a `subnet.env`.
    #[error("{path}: {reason}")]
    SubnetEnv {
        /// The file.
        path: PathBuf,
        /// The key, its value, and the expected value.
        reason: String,
    },
    /// A call or an argument that the lab cannot serve.
    #[error("{0}")]
    Unsuitable(String),
    /// [`Interrupter::interrupt`](crate::Interrupter::interrupt) was called.
    #[error("interrupted")]
    Interrupted,
    /// A call to the operating system failed.
    #[error("{object}: {source}")]
    Io {
        /// The file, namespace or process.
        object: String,
        /// The reason.
        source: io::Error,
    },
}

impl Error {
    /// For `map_err`: adds the object of an I/O error.
    pub(crate) fn io<E: Into<io::Error>>(object: impl Into<String>) -> impl FnOnce(E) -> Self {
        let object = object.into();
        move |source| Self::Io { object, source: source.into() }
    }
}

/// A result with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;
