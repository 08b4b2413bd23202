//! Path probes: answers probes of other nodes, and sends some along each path to a peer.

use flannel_core::network::NetworkHandle;
use flannel_doctor::path_probe::server::{ServerConfig, serve};
use flannel_doctor::paths::{Paths, ProbeSettings, probe};

use super::Ended;

/// Answers the path probes of other nodes.
pub(crate) struct ProbeServer {
    pub(crate) config: ServerConfig,
}

impl ProbeServer {
    /// Runs until it is dropped.
    pub(crate) async fn run(self) -> Ended {
        match serve(self.config).await {}
    }
}

/// Probes the paths to peers.
pub(crate) struct PathController {
    pub(crate) settings: ProbeSettings,
    pub(crate) handle: NetworkHandle,
    /// Gets the results. `None` if paths are not probed.
    pub(crate) paths: Option<Paths>,
}

impl PathController {
    /// Runs until it is dropped.
    pub(crate) async fn run(self) -> Ended {
        match &self.paths {
            Some(paths) => match probe(&self.settings, self.handle, paths).await {},
            None => std::future::pending().await,
        }
    }
}
