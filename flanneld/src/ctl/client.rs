//! Asking the daemon over its Unix socket: one request, one answer, both small.

use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

use serde_json::Value;

use super::{Failure, Result};
use crate::report::VERSION;

/// A daemon that does not answer for so long is stuck.
const PATIENCE: Duration = Duration::from_secs(15);

/// The way to the daemon.
#[derive(Debug, Clone)]
pub(crate) struct Client {
    /// `None`: the daemon has none.
    socket: Option<PathBuf>,
}

impl Client {
    pub(crate) fn new(socket: Option<PathBuf>) -> Self {
        Self { socket }
    }

    /// Makes sure that no daemon listens. That nobody does is known only if the socket's file is not there, or nobody
    /// has it open.
    ///
    /// # Errors
    /// [`Failure::Refused`]: one listens, or it cannot be known.
    ///
    /// # Blocking
    /// Connects to the socket.
    pub(crate) fn nobody_listens(&self) -> Result<()> {
        let Some(socket) = &self.socket else { return Ok(()) };
        match UnixStream::connect(socket) {
            Err(error)
                if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::ConnectionRefused) =>
            {
                Ok(())
            }
            Err(error) => Err(Failure::Refused(format!(
                "{}: {error}: whether flanneld runs is not known, and it must not",
                socket.display()
            ))),
            Ok(_) => Err(Failure::Refused(format!(
                "flanneld is running (it listens at {}) and would put everything back: stop it first, or use --dry-run",
                socket.display()
            ))),
        }
    }

    /// Asks, and returns what a daemon that understands says.
    ///
    /// # Errors
    /// [`Failure::NoDaemon`], or [`Failure::Refused`] with the daemon's own words.
    ///
    /// # Blocking
    /// Until the answer is there.
    pub(crate) fn ask(&self, method: &str, target: &str) -> Result<Value> {
        let gone = |reason: String| Failure::NoDaemon { socket: self.socket.clone(), reason };
        let answer = self.exchange(method, target).map_err(|error| match (error.kind(), &self.socket) {
            (ErrorKind::PermissionDenied, Some(socket)) => Failure::Refused(format!(
                "{}: {error}: whether flanneld runs is not known; root and the group of flanneld's --control-group may ask it",
                socket.display()
            )),
            _ => gone(error.to_string()),
        })?;
        let (head, body) =
            answer.split_once("\r\n\r\n").ok_or_else(|| gone("half an answer".to_owned()))?;
        let value: Value = serde_json::from_str(body)
            .map_err(|_| gone(format!("that is no flanneld: {}", body.trim())))?;
        if head.split(' ').nth(1) != Some("200") {
            let error = value["error"].as_str().unwrap_or("it refuses without a reason");
            return Err(Failure::Refused(error.to_owned()));
        }
        match value["version"].as_u64() {
            Some(version) if version == u64::from(VERSION) => Ok(value),
            version => Err(Failure::Refused(format!(
                "the daemon speaks version {} of the API, this flannelctl version {VERSION}",
                version.map_or_else(|| "none".to_owned(), |version| version.to_string())
            ))),
        }
    }

    fn exchange(&self, method: &str, target: &str) -> std::io::Result<String> {
        let socket = self.socket.as_ref().ok_or_else(|| {
            std::io::Error::other("--control-socket is off, and so there is nobody to ask")
        })?;
        let mut stream = UnixStream::connect(socket)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        write!(
            stream,
            "{method} {target} HTTP/1.1\r\nHost: flanneld\r\nConnection: close\r\n\r\n"
        )?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok(answer)
    }
}
