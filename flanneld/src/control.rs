//! Serves health and metrics over TCP, and these and the control API over a Unix socket.

mod answers;
#[cfg(test)]
mod stalled_kernel;

use std::convert::Infallible;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::http::{Listener, listen, open_socket, serve};
use flannel_options::control;

use crate::config::{ControlConfig, ControlSocket};
use crate::error::Error;
use crate::observe::Observer;
use answers::Answers;

/// The servers of the daemon.
#[derive(Debug)]
pub(crate) struct Servers {
    health: Option<Listener>,
    control: Option<(Listener, SocketFile)>,
}

/// A socket's file, removed when the daemon stops.
#[derive(Debug)]
struct SocketFile(PathBuf);

impl Drop for SocketFile {
    fn drop(&mut self) {
        // It may be gone. The next start replaces a file that stays.
        let _ = fs::remove_file(&self.0);
    }
}

impl Servers {
    /// Begins to listen.
    ///
    /// # Errors
    /// The daemon cannot listen on an address or a socket of the options. A failure of the default
    /// control socket is only logged.
    pub(crate) async fn open(config: &ControlConfig, subnet_file: &Path) -> Result<Self, Error> {
        let health = match config.health {
            None => None,
            Some(address) => {
                let ip = address.ip();
                let port = address.port();
                let what = format!("--healthz-ip {ip} --healthz-port {port}");
                let listener = listen(address)
                    .map_err(|error| Error::Listen { what, reason: error.to_string() })?;
                let bound = listener.local_addr().unwrap_or(address);
                tracing::info!(address = %bound, "health and metrics are served");
                Some(Listener::Tcp(listener))
            }
        };
        let path = match &config.socket {
            ControlSocket::BesideSubnetFile => control::socket(None, subnet_file),
            ControlSocket::At(path) => Some(path.clone()),
            ControlSocket::Off => None,
        };
        let control = match path.map(|path| (open_socket(&path, config.group), path)) {
            None => None,
            Some((Ok(listener), path)) => Some((Listener::Unix(listener), SocketFile(path))),
            Some((Err(reason), path)) => {
                let what = format!("--control-socket {}", path.display());
                let error = Error::Listen { what, reason };
                if config.socket != ControlSocket::BesideSubnetFile {
                    return Err(error);
                }
                tracing::warn!(%error, "there is no control socket for flannelctl");
                None
            }
        };
        Ok(Self { health, control })
    }

    /// Serves until it is dropped.
    pub(crate) async fn serve(self, observer: &Observer) -> Infallible {
        let server = async |listener: Option<Listener>, control| match listener {
            Some(listener) => serve(listener, Arc::new(Answers::new(observer, control))).await,
            None => std::future::pending().await,
        };
        // The file is removed when the server stops.
        let (control, _file) = self.control.unzip();
        tokio::select! {
            never = server(self.health, false) => never,
            never = server(control, true) => never,
        }
    }
}
