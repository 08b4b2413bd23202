//! The choice between the config of the store and those that this node has used.

use std::sync::Arc;

use flannel_core::Config;
use flannel_core::backend::ExternalInterface;
use flannel_core::lease::View;
use flannel_core::runtime::lock;
use flannel_route::moving::{BackendUse, NodeBackends};
use tokio::sync::watch;

use super::{Starter, prepare, secrets};
use crate::error::Error;
use crate::run::backends::{ActiveBackend, PreparedBackends, SetUp};
use crate::run::config_validator::ConfigValidator;
use crate::run::refusals::Refused;
use crate::run::trial::{Candidate, KnownStore, UnsavedSecrets};
use crate::run::uplink::Chosen;

/// Why a config is tried.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::run) enum Purpose {
    /// Its network is built next. A secret that it needs is made and stays.
    Use,
    /// A user asks. No command is run, and nothing stays.
    Question,
}

/// The values of the next network.
pub(super) struct Choice {
    pub(super) config: Config,
    pub(super) uplink: Chosen,
    pub(super) prepared: PreparedBackends,
    /// The config of the store, if it is another one.
    pub(super) refused: Option<Refused>,
    pub(super) before: Before,
}

/// Whether there is a config to go back to if the devices of a network cannot be made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::run) enum Before {
    /// An earlier one.
    Earlier,
    /// The devices are tried for any time.
    Nothing,
}

/// Where a config comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Origin {
    /// The store.
    Store,
    /// This node has used it before.
    Node,
}

/// What a network with a config is built from.
struct Parts {
    uplink: Chosen,
    prepared: PreparedBackends,
}

impl Starter<'_> {
    /// Chooses between the config of the store and, if no network can be built from it, the earlier
    /// ones.
    ///
    /// # Errors
    /// The store does not answer, or no network can be built from the config of the store and from
    /// any other one. The error is about the config of the store.
    pub(super) async fn choose(
        &self,
        validator: &ConfigValidator,
        stored: Config,
        views: &watch::Receiver<View>,
    ) -> Result<Choice, Error> {
        let earlier = self.earlier(&stored);
        let has_other = !self.proven.is(&stored) && !earlier.is_empty();
        let before = if has_other { Before::Earlier } else { Before::Nothing };
        let refused = self.refusals.get().filter(|refused| refused.config == stored);
        let waits = self.refusals.waits(&stored);
        let known = refused.map(|refused| refused.reason).or(waits);
        let mut error = None;
        let reason = match known.filter(|_| !earlier.is_empty()) {
            Some(reason) => reason,
            None => match self.parts(validator, &stored, views, Origin::Store).await {
                Ok(parts) => return Ok(parts.choice(stored, None, before)),
                Err(failed) if failed.is_of_store() => return Err(failed),
                Err(failed) => error.insert(failed).to_string(),
            },
        };
        let refused = Refused { config: stored.clone(), reason };
        if let Some(choice) = self.choose_earlier(validator, earlier, views, refused).await? {
            return Ok(choice);
        }
        match error {
            Some(error) => Err(error),
            None => {
                let parts = self.parts(validator, &stored, views, Origin::Store).await?;
                Ok(parts.choice(stored, None, before))
            }
        }
    }

    /// Chooses the first of the `earlier` configs from which a network can be built; `None` if
    /// there is none.
    ///
    /// # Errors
    /// The store does not answer.
    async fn choose_earlier(
        &self,
        validator: &ConfigValidator,
        earlier: Vec<Config>,
        views: &watch::Receiver<View>,
        refused: Refused,
    ) -> Result<Option<Choice>, Error> {
        for config in earlier {
            match self.parts(validator, &config, views, Origin::Node).await {
                Ok(parts) => {
                    if config.networks != refused.config.networks {
                        self.subnets.use_config(&config);
                    }
                    return Ok(Some(parts.choice(config, Some(refused), Before::Nothing)));
                }
                Err(error) if error.is_of_store() => return Err(error),
                Err(error) => {
                    let backend = config.backend.kind;
                    tracing::warn!(%backend, %error, "an earlier config cannot be used either");
                }
            }
        }
        Ok(None)
    }

    /// The configs that this node has used, the preferred one first, without `stored`. After the
    /// first network they get the pod networks of `stored`, because the lease comes from these.
    fn earlier(&self, stored: &Config) -> Vec<Config> {
        let last = self.last_config().cloned();
        let networks = last.as_ref().map(|_| stored.networks);
        let proven = self.proven.get();
        let mut all: Vec<Config> = Vec::new();
        for config in proven.into_iter().chain(last).chain(self.record.recorded(stored)) {
            let networks = networks.unwrap_or(config.networks);
            let config = Config { networks, ..config };
            if config != *stored && !all.contains(&config) {
                all.push(config);
            }
        }
        all
    }

    /// The interface and the backends for a network with this config. A config of the store that
    /// differs from what this node has offered is tried by the kernel.
    ///
    /// # Errors
    /// No network can be built here.
    async fn parts(
        &self,
        validator: &ConfigValidator,
        config: &Config,
        views: &watch::Receiver<View>,
        origin: Origin,
    ) -> Result<Parts, Error> {
        let is_stored = origin == Origin::Store;
        let used = self.last_config().filter(|_| is_stored);
        let uplink = validator.validate(config, used).await?;
        let is_new = !self.proven.is(config) && !self.earlier(config).is_empty();
        if is_stored && is_new {
            self.try_devices(config, &uplink.iface, Purpose::Use).await?;
        }
        let host = self.host(&uplink.iface);
        let prepare = async |backend: &ActiveBackend| prepare(&host, backend).await;
        let user = |order: &NodeBackends, usage: &BackendUse| {
            // Before the first network nothing can stay as it is.
            let own = self.last.as_ref()?.own;
            let view = views.borrow().clone();
            order.user_of(&usage.lease_type, own, &view).cloned()
        };
        let values = SetUp {
            settings: self.settings,
            subnets: &*self.subnets,
            config,
            iface: &uplink.iface,
        };
        let prepared = Box::pin(self.record.set_up(values, prepare, user)).await?;
        Ok(Parts { uplink, prepared })
    }

    /// Asks the kernel whether it can hold the devices of this config.
    async fn try_devices(
        &self,
        config: &Config,
        iface: &ExternalInterface,
        purpose: Purpose,
    ) -> Result<(), Error> {
        let backend = self.settings.backends.find(&config.backend.kind)?;
        if purpose == Purpose::Question && backend.runs_commands() {
            return Ok(());
        }
        let hints = lock(&self.hints).clone();
        let subnets = Arc::new(KnownStore { subnets: Arc::clone(&self.subnets), hints });
        let mut host = self.host(iface);
        host.subnets = subnets;
        if purpose == Purpose::Question {
            host.secrets = Arc::new(UnsavedSecrets(secrets(self.settings)));
        }
        let prepared = host.prepare(&**backend, config).await?;
        let held = self.record.held(self.settings, config);
        let transports = backend.datapath(config)?.transports;
        self.trials.check(held, Candidate { config, prepared, transports }).await
    }

    /// Checks whether a network can be built from `config` in place of the one that runs, which
    /// `validator` knows.
    ///
    /// # Errors
    /// The store does not answer, or no network can be built.
    pub(in crate::run) async fn try_out(
        &self,
        validator: &ConfigValidator,
        config: &Config,
        purpose: Purpose,
    ) -> Result<ExternalInterface, Error> {
        if let Some(reason) = self.refusals.waits(config) {
            return Err(Error::DevicesFailed(reason));
        }
        let uplink = validator.validate(config, self.last_config()).await?;
        self.try_devices(config, &uplink.iface, purpose).await?;
        Ok(uplink.iface)
    }
}

impl Parts {
    fn choice(self, config: Config, refused: Option<Refused>, before: Before) -> Choice {
        Choice { config, uplink: self.uplink, prepared: self.prepared, refused, before }
    }
}
