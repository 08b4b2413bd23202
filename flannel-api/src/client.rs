//! A client of the daemon's control socket.

use std::io::{ErrorKind, Read, Write};
use std::net::IpAddr;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Deserialize;
use serde::de::DeserializeOwned;

use crate::{
    LogReport, PathsReport, PeersReport, ReloadReport, StatusReport, TrialReport, VERSION,
    WhyReport, request,
};

/// The timeout of each read and write. A daemon that takes longer counts as not answering.
const TIMEOUT: Duration = Duration::from_secs(15);

/// Why a request failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// No daemon answers at the socket.
    #[error(
        "the daemon does not answer{}: {reason}",
        socket.as_ref().map(|path| format!(" at {}", path.display())).unwrap_or_default()
    )]
    NoDaemon {
        /// The socket, or `None` if the daemon has none.
        socket: Option<PathBuf>,
        /// The reason.
        reason: String,
    },
    /// The caller may not open the socket, so it is not known whether a daemon runs.
    #[error(
        "{}: {source}: whether the daemon runs is not known; only root and the group of the \
         socket (--control-group) may open it", socket.display()
    )]
    Denied {
        /// The socket.
        socket: PathBuf,
        /// The error of the connection.
        source: std::io::Error,
    },
    /// The daemon refuses the request.
    #[error("{0}")]
    Refused(String),
    /// A parameter of the request is wrong, such as a log filter.
    #[error("{0}")]
    Parameter(String),
    /// The daemon speaks another version of the API.
    #[error(
        "the daemon speaks version {} of the API, this program version {VERSION}",
        daemon.map_or_else(|| "none".to_owned(), |version| version.to_string())
    )]
    Version {
        /// The daemon's version, or `None` if the answer names none.
        daemon: Option<u64>,
    },
    /// The answer is not of the expected form.
    #[error(
        "the daemon's answer cannot be parsed (the daemon may be older than this program): {0}"
    )]
    Answer(#[source] serde_json::Error),
}

/// The fields of any answer.
#[derive(Deserialize)]
struct Envelope {
    #[serde(default)]
    version: Option<u64>,
    /// The reason, if the daemon refuses the request.
    #[serde(default)]
    error: Option<String>,
}

/// A client of a daemon's control socket. It keeps no connection. Each request opens the socket
/// anew.
#[derive(Debug, Clone)]
pub struct Client {
    socket: Option<PathBuf>,
}

impl Client {
    /// A client of the daemon at this socket.
    pub fn new(socket: impl Into<PathBuf>) -> Self {
        Self { socket: Some(socket.into()) }
    }

    /// A client of the daemon at this socket. With `None`, because the socket is off, each request
    /// fails with [`Error::NoDaemon`].
    pub fn at(socket: Option<PathBuf>) -> Self {
        Self { socket }
    }

    /// The socket.
    pub fn socket(&self) -> Option<&Path> {
        self.socket.as_deref()
    }

    /// Reads the status of the daemon.
    ///
    /// # Errors
    /// [`Error`].
    ///
    /// # Blocking
    /// Until the answer is there, for 15 s at most.
    pub fn status(&self) -> Result<StatusReport, Error> {
        self.read("GET", request::STATUS)
    }

    /// Reads the status of the daemon, for which it repeats the checks of the host that start a
    /// process.
    ///
    /// # Errors
    /// [`Error`].
    ///
    /// # Blocking
    /// As [`Client::status`].
    pub fn fresh_status(&self) -> Result<StatusReport, Error> {
        self.read("GET", request::FRESH_STATUS)
    }

    /// Reads the list of all other nodes.
    ///
    /// # Errors
    /// [`Error`].
    ///
    /// # Blocking
    /// As [`Client::status`].
    pub fn peers(&self) -> Result<PeersReport, Error> {
        self.read("GET", request::PEERS)
    }

    /// Reads the results of the probes of paths.
    ///
    /// # Errors
    /// [`Error`].
    ///
    /// # Blocking
    /// As [`Client::status`].
    pub fn paths(&self) -> Result<PathsReport, Error> {
        self.read("GET", request::PATHS)
    }

    /// Asks whether the node of the daemon can build a network from a config. The daemon makes the
    /// devices of that network and deletes them again, so it needs the right to make changes.
    ///
    /// # Errors
    /// [`Error`]. A config of more than some 4 KiB is refused.
    ///
    /// # Blocking
    /// As [`Client::status`].
    pub fn trial(&self, config: &str) -> Result<TrialReport, Error> {
        self.read("POST", &request::trial(config))
    }

    /// Explains the route of packets to an address.
    ///
    /// # Errors
    /// [`Error`].
    ///
    /// # Blocking
    /// As [`Client::status`].
    pub fn why(&self, address: IpAddr) -> Result<WhyReport, Error> {
        self.read("GET", &request::why(address))
    }

    /// Makes the daemon read its config and certificates again, as SIGHUP does.
    ///
    /// # Errors
    /// [`Error`].
    ///
    /// # Blocking
    /// As [`Client::status`].
    pub fn reload(&self) -> Result<ReloadReport, Error> {
        self.read("POST", request::RELOAD)
    }

    /// Sets the log filter until SIGHUP or a reload.
    ///
    /// # Errors
    /// [`Error`].
    ///
    /// # Blocking
    /// As [`Client::status`].
    pub fn set_log(&self, filter: &str) -> Result<LogReport, Error> {
        self.read("POST", &request::log(filter))
    }

    /// Whether a daemon listens. The answer is certain: a socket that may not be opened is an
    /// error.
    ///
    /// # Errors
    /// The socket cannot be opened, for a reason other than a missing listener.
    ///
    /// # Blocking
    /// Connects to the socket.
    pub fn is_listening(&self) -> std::io::Result<bool> {
        let Some(socket) = &self.socket else { return Ok(false) };
        match UnixStream::connect(socket) {
            Ok(_) => Ok(true),
            Err(error) => match error.kind() {
                ErrorKind::NotFound | ErrorKind::ConnectionRefused => Ok(false),
                _ => Err(error),
            },
        }
    }

    fn read<T: DeserializeOwned>(&self, method: &str, target: &str) -> Result<T, Error> {
        let gone = |reason: String| Error::NoDaemon { socket: self.socket.clone(), reason };
        let answer =
            self.exchange(method, target).map_err(|error| match (error.kind(), &self.socket) {
                (ErrorKind::PermissionDenied, Some(socket)) => {
                    Error::Denied { socket: socket.clone(), source: error }
                }
                _ => gone(error.to_string()),
            })?;
        let (head, body) = answer
            .split_once("\r\n\r\n")
            .ok_or_else(|| gone("the answer is incomplete".to_owned()))?;
        // Not every answer has these fields.
        let envelope: Envelope = serde_json::from_str(body).map_err(|_| {
            gone(format!("the answer does not come from the daemon: {}", body.trim()))
        })?;
        let status = head.split(' ').nth(1);
        if status != Some("200") {
            let reason = envelope.error.unwrap_or_else(|| "the daemon gave no reason".to_owned());
            return Err(match status {
                Some("400") => Error::Parameter(reason),
                _ => Error::Refused(reason),
            });
        }
        if envelope.version != Some(u64::from(VERSION)) {
            return Err(Error::Version { daemon: envelope.version });
        }
        serde_json::from_str(body).map_err(Error::Answer)
    }

    fn exchange(&self, method: &str, target: &str) -> std::io::Result<String> {
        let socket = self
            .socket
            .as_ref()
            .ok_or_else(|| std::io::Error::other("the control socket is off"))?;
        let mut stream = UnixStream::connect(socket)?;
        stream.set_read_timeout(Some(TIMEOUT))?;
        stream.set_write_timeout(Some(TIMEOUT))?;
        write!(
            stream,
            "{method} {target} HTTP/1.1\r\nHost: flanneld\r\nConnection: close\r\n\r\n"
        )?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok(answer)
    }
}
