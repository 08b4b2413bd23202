//! The backends that this node runs: one, or several while the cluster moves to another.

mod active;
mod set_up;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard};

use flannel_core::backend::Transport;
use flannel_core::object::LinkName;
use flannel_core::runtime::lock;
use flannel_core::{Backend, Config};
use flannel_options::state_dir;
use flannel_route::moving::{BackendUse, NodeBackends};

use super::trial::Held;
use crate::blocking::BlockingQueue;
use crate::config::DaemonConfig;
pub(crate) use active::{ActiveBackend, ActiveBackends, Devices, PreparedBackends};
pub(crate) use set_up::SetUp;

/// The record of the backends of this node, over all its networks, in memory and in a file.
pub(super) struct BackendRecord {
    file: PathBuf,
    state: Mutex<State>,
    /// Held from a look at the state until its next version is in the file and in memory.
    changes: tokio::sync::Mutex<()>,
    /// The backends whose commands stay in effect, which the log says once.
    pub(super) kept_commands: Mutex<BTreeSet<String>>,
    writes: BlockingQueue,
}

#[derive(Clone)]
struct State {
    /// The content of the file.
    kept: NodeBackends,
    /// The lease types of backends that are no longer run, but whose devices may still be there.
    dropped: Vec<String>,
    /// The lease types of backends that could not be set up for the last network.
    absent: Vec<String>,
}

impl State {
    fn is_dropped(&self, usage: &BackendUse) -> bool {
        self.dropped.contains(&usage.lease_type)
    }

    fn is_not_run(&self, usage: &BackendUse) -> bool {
        self.is_dropped(usage) || self.absent.contains(&usage.lease_type)
    }
}

impl BackendRecord {
    /// Reads the backends that the last run has offered. A file that cannot be used is logged. A
    /// damaged one is moved aside.
    pub(super) fn open(dir: &Path) -> Self {
        let file = state_dir::backends(dir);
        let kept = read(&file, dir).unwrap_or_else(|error| {
            tracing::warn!(
                path = %file.display(), %error,
                "a state file cannot be read: if the network config has changed since, peers that \
                 only know the backend before do not reach this node"
            );
            NodeBackends::default()
        });
        Self {
            file,
            state: Mutex::new(State { kept, dropped: Vec::new(), absent: Vec::new() }),
            changes: tokio::sync::Mutex::default(),
            kept_commands: Mutex::default(),
            writes: BlockingQueue::default(),
        }
    }

    /// Writes its file in this queue.
    pub(super) fn writing_in(self, writes: BlockingQueue) -> Self {
        Self { writes, ..self }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// The file of the record.
    pub(super) fn path(&self) -> &Path {
        &self.file
    }

    /// The configs with the backends of the record, the preferred one first, and the other fields
    /// of `config`.
    pub(super) fn recorded(&self, config: &Config) -> Vec<Config> {
        let state = self.state();
        let used = state.kept.iter().filter(|usage| !state.is_dropped(usage));
        used.map(|it| Config { backend: it.backend.clone(), ..config.clone() }).collect()
    }

    /// What the recorded backends have, with the other fields of `config`.
    pub(super) fn held(&self, settings: &DaemonConfig, config: &Config) -> Held {
        let mut held = Held::default();
        for usage in self.state().kept.iter() {
            let config = Config { backend: usage.backend.clone(), ..config.clone() };
            held.links.extend(devices(settings, &config, usage).unwrap_or_default());
            let transports = settings.backends.datapath(&config).transports;
            held.udp_ports.extend(transports.iter().filter_map(|transport| match transport {
                Transport::Udp(port) => Some(*port),
                _ => None,
            }));
        }
        held
    }

    /// Drops a backend that this node has never offered.
    pub(super) fn drop_unoffered(&self, target: &dyn Backend) {
        let mut state = self.state();
        let lease_type = lease_type_of(target);
        let is_offered = state.kept.offered().any(|usage| usage.lease_type == lease_type);
        if !is_offered && !state.dropped.iter().any(|dropped| dropped == lease_type) {
            state.dropped.push(lease_type.to_owned());
        }
    }

    /// Drops the backends with these lease types.
    pub(super) fn drop_all(&self, lease_types: Vec<String>) {
        self.state().dropped.extend(lease_types);
    }

    /// The backends that were dropped, and are still in the file.
    pub(super) fn dropped(&self) -> Vec<BackendUse> {
        let state = self.state();
        state.kept.iter().filter(|usage| state.is_dropped(usage)).cloned().collect()
    }

    /// Removes dropped backends from the file, after their devices are gone.
    pub(super) async fn forget(&self, gone: &[String]) {
        let _changes = self.changes.lock().await;
        let mut next = self.state().clone();
        next.kept.retain(|usage| !gone.contains(&usage.lease_type));
        // The next start runs the others for a while, if it can, and removes them again.
        if !gone.is_empty() && self.write(&next.kept).await.is_ok() {
            next.dropped.retain(|dropped| !gone.contains(dropped));
            *self.state() = next;
        }
    }

    /// Records the backends of the next network. Those that were dropped stay in the file until
    /// their devices are gone.
    ///
    /// # Errors
    /// The file cannot be written. Then nothing was changed.
    pub(super) async fn take(&self, next: &NodeBackends) -> std::io::Result<()> {
        let _changes = self.changes.lock().await;
        let state = self.state().clone();
        let mut kept = next.clone();
        kept.add(state.kept.iter().filter(|usage| state.is_not_run(usage)));
        self.write(&kept).await?;
        *self.state() = State { kept, ..state };
        Ok(())
    }

    async fn write(&self, kept: &NodeBackends) -> std::io::Result<()> {
        let file = self.file.clone();
        let text = kept.to_json();
        self.writes.run(move || state_dir::replace(&file, &text)).await
    }
}

/// The backends in a file. An absent file has no backends. A damaged file is moved aside in `dir`.
fn read(file: &Path, dir: &Path) -> Result<NodeBackends, String> {
    let text = state_dir::read(file).map_err(|error| error.to_string())?;
    let Some(text) = text else { return Ok(NodeBackends::default()) };
    NodeBackends::parse(&text).map_err(|error| {
        let aside = state_dir::damaged_backends(dir);
        let moved = std::fs::rename(file, &aside);
        let kept = moved.map_or(String::new(), |()| format!(", kept as {aside:?}"));
        format!("{error}{kept}")
    })
}

/// [`BackendUse::lease_type`] of a backend.
pub(super) fn lease_type_of(backend: &dyn Backend) -> &'static str {
    match backend.lease_type() {
        "" => backend.kind(),
        lease_type => lease_type,
    }
}

/// The devices of a backend; `None` if this version does not know the backend or its options.
pub(super) fn devices(
    settings: &DaemonConfig,
    config: &Config,
    usage: &BackendUse,
) -> Option<BTreeSet<LinkName>> {
    let config = Config { backend: usage.backend.clone(), ..config.clone() };
    settings.backends.known_footprint(&config, None).map(|footprint| footprint.links)
}

/// The lease types of backends.
pub(super) fn lease_types<'a>(usages: impl Iterator<Item = &'a BackendUse>) -> Vec<String> {
    usages.map(|usage| usage.lease_type.clone()).collect()
}
