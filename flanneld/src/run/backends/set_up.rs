//! Sets up the backends for the next network.

use std::collections::BTreeMap;
use std::sync::Arc;

use flannel_core::backend::{ExternalInterface, Prepared};
use flannel_core::error::holder;
use flannel_core::{Backend, Config, Error as Cause, Lease, SubnetManager};
use flannel_route::moving::{BackendUse, NodeBackends};

use super::{
    ActiveBackend, ActiveBackends, BackendRecord, PreparedBackends, State, devices, lease_type_of,
};
use crate::config::DaemonConfig;
use crate::error::Error;

/// The effect of the end of a backend that was offered.
const REPLACED: &str =
    "it is replaced at once: nodes that use only the old backend do not reach this node";

/// The values that the next network is built from.
#[derive(Clone, Copy)]
pub(crate) struct SetUp<'a> {
    pub(crate) settings: &'a DaemonConfig,
    pub(crate) subnets: &'a dyn SubnetManager,
    pub(crate) config: &'a Config,
    pub(crate) iface: &'a ExternalInterface,
}

/// A backend of the record that cannot run beside the one of the config.
struct Ended {
    usage: BackendUse,
    reason: String,
}

/// The backends of the record that were prepared, and the errors of the others, by lease type.
#[derive(Default)]
struct Preparations {
    prepared: BTreeMap<String, Prepared>,
    broken: BTreeMap<String, String>,
}

impl BackendRecord {
    /// The backends for a network with these values. Each one is prepared before anything is
    /// recorded, and they are recorded before they are offered. A backend of the record that cannot
    /// be prepared is left out, unless a node needs it: `user` returns the lease of a node that a
    /// network with these backends reaches only by this one.
    ///
    /// # Errors
    /// The backend of the config is not known or cannot be prepared, or one that is needed cannot.
    /// Then nothing was changed.
    pub(crate) async fn set_up(
        &self,
        values: SetUp<'_>,
        prepare: impl AsyncFn(&ActiveBackend) -> Result<Prepared, Error>,
        user: impl Fn(&NodeBackends, &BackendUse) -> Option<Arc<Lease>>,
    ) -> Result<PreparedBackends, Error> {
        let target = Arc::clone(values.settings.backends.find(&values.config.backend.kind)?);
        let lease_type = lease_type_of(&*target);
        let _changes = self.changes.lock().await;
        let mut state = self.state().clone();
        state.dropped.retain(|dropped| dropped != lease_type);
        let before = state.kept.clone();
        let ended = values.retain_movable(&mut state.kept, &*target);
        state.kept.aim_at(lease_type, &values.config.backend);
        let mut candidates = state.kept.clone();
        candidates.retain(|usage| !state.is_dropped(usage));
        let preparations = values.prepare_all(&candidates, lease_type, prepare).await?;
        let Preparations { mut prepared, broken } = preparations;
        let (order, absent) =
            candidates.without(lease_type, |usage| broken.contains_key(&usage.lease_type));
        for usage in &absent {
            let reason = &broken[&usage.lease_type];
            if let Some(lease) = user(&order, usage) {
                return Err(needed(usage, reason, &lease));
            }
            log_absence(&state, usage, reason);
        }
        for Ended { usage, reason } in &ended {
            if !state.is_dropped(usage) {
                values.log_end(usage, &*target, reason);
                state.dropped.push(usage.lease_type.clone());
            }
        }
        let rest = std::mem::replace(&mut state.kept, order.clone());
        state.kept.add(&absent);
        // Their devices are removed later.
        state.kept.add(rest.iter().chain(ended.iter().map(|ended| &ended.usage)));
        state.absent = absent.iter().map(|usage| usage.lease_type.clone()).collect();
        self.record(state, &before).await;
        let active = |usage: &BackendUse| values.active(usage);
        let all: Vec<_> = order.by_use(lease_type).map(active).collect::<Result<_, Error>>()?;
        let absent = absent.iter().map(active).collect::<Result<_, Error>>()?;
        let prepared = all.iter().filter_map(|it| prepared.remove(&it.usage.lease_type)).collect();
        Ok(PreparedBackends { backends: ActiveBackends { all, order, absent, target }, prepared })
    }

    /// Sets the state, and writes it if it differs from the content of the file (`before`).
    async fn record(&self, state: State, before: &NodeBackends) {
        if state.kept != *before
            && let Err(error) = self.write(&state.kept).await
        {
            tracing::warn!(
                path = %self.file.display(), %error,
                "a state file cannot be written (see --state-dir): if the network config names \
                 another backend before the next start, the network is replaced at once"
            );
        }
        *self.state() = state;
    }
}

impl SetUp<'_> {
    /// A backend of the record with the other fields of the config.
    ///
    /// # Errors
    /// It is not known, not allowed, or does not fit this node.
    fn active(&self, usage: &BackendUse) -> Result<ActiveBackend, Error> {
        let config = Config { backend: usage.backend.clone(), ..self.config.clone() };
        let backend = self.settings.backends.find(&config.backend.kind)?;
        if backend.runs_commands() && !self.settings.allow_commands {
            return Err(Error::CommandsNotAllowed { kind: backend.kind() });
        }
        backend.validate(&config, Some(self.iface))?;
        Ok(ActiveBackend { backend: Arc::clone(backend), config, usage: usage.clone() })
    }

    /// Keeps the backends that can run beside the target. Returns the others.
    fn retain_movable(&self, kept: &mut NodeBackends, target: &dyn Backend) -> Vec<Ended> {
        let moves = self.can_move(target);
        let mut ended = Vec::new();
        kept.retain(|usage| {
            let reason = match self.active(usage) {
                Ok(other) if moves && self.can_move(&*other.backend) => return true,
                Ok(_) => "it cannot run beside another one".to_owned(),
                Err(error) => error.to_string(),
            };
            let is_left = usage.lease_type != lease_type_of(target);
            if is_left {
                ended.push(Ended { usage: usage.clone(), reason });
            }
            !is_left
        });
        ended
    }

    /// Whether a backend can run beside others. Offers without a type cannot be told apart.
    fn can_move(&self, backend: &dyn Backend) -> bool {
        backend.can_move() && !backend.lease_type().is_empty() && self.subnets.publishes_attrs()
    }

    /// Prepares all backends that can be.
    ///
    /// # Errors
    /// The target cannot be prepared, or the store does not answer.
    async fn prepare_all(
        &self,
        candidates: &NodeBackends,
        target: &str,
        prepare: impl AsyncFn(&ActiveBackend) -> Result<Prepared, Error>,
    ) -> Result<Preparations, Error> {
        let mut preparations = Preparations::default();
        for usage in candidates.iter() {
            let lease_type = usage.lease_type.clone();
            match prepare(&self.active(usage)?).await {
                Ok(done) => {
                    preparations.prepared.insert(lease_type, done);
                }
                Err(error) if lease_type == target || error.is_of_store() => return Err(error),
                Err(error) => {
                    preparations.broken.insert(lease_type, error.to_string());
                }
            }
        }
        Ok(preparations)
    }

    /// Logs that a backend ends because of the one of the config.
    fn log_end(&self, usage: &BackendUse, target: &dyn Backend, reason: &str) {
        let from = &usage.lease_type;
        let to = target.kind();
        let effect = if usage.offered { REPLACED } else { "it is no longer run" };
        let known = devices(self.settings, self.config, usage).is_some();
        let devices = if known { "" } else { "; its devices stay, because it is unknown" };
        tracing::warn!(%from, %to, %reason, "the old backend is no longer used: {effect}{devices}");
    }
}

/// Logs that a backend is left out, unless it was left out before.
fn log_absence(state: &State, usage: &BackendUse, reason: &str) {
    if !state.absent.contains(&usage.lease_type) {
        let backend = &usage.lease_type;
        tracing::warn!(
            %backend, %reason,
            "a backend is left out and tried again: this node does not reach nodes that offer only \
             this backend"
        );
    }
}

/// The error of a backend that cannot be set up, and that a node needs.
fn needed(usage: &BackendUse, reason: &str, lease: &Lease) -> Error {
    let subnets = lease.subnets;
    let holder = holder(&lease.attrs);
    let reason = format!(
        "{reason}; {subnets} of {holder} is reached only by it, so the network stays as it is"
    );
    Cause::Backend { backend: usage.lease_type.clone(), reason }.into()
}
