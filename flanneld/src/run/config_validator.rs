//! Checks whether a network can be built here from a config.
//!
//! The daemon makes the checks of building a network before it stops the running one.

use std::sync::Arc;

use flannel_backends::Backends;
use flannel_core::Config;
use flannel_core::address::Dual;
use flannel_core::backend::ExternalInterface;
use flannel_core::error::holder;
use flannel_core::lease::{Origin, View};
use flannel_core::subnet::Hints;
use flannel_netlink::NetlinkKernel;
use flannel_netlink::iface::{Selectors, worse};
use tokio::sync::watch;

use super::uplink::Chosen;
use crate::config::{DaemonConfig, FirewallConfig};
use crate::error::Error;

/// Validates configs for this node.
#[derive(Debug)]
pub(crate) struct ConfigValidator {
    kernel: Arc<NetlinkKernel>,
    selectors: Selectors,
    firewall: FirewallConfig,
    backends: Backends,
    allow_commands: bool,
    views: watch::Receiver<View>,
    /// The interface of the network that runs, or ran last.
    used: Option<ExternalInterface>,
    /// The next step is the first lease of this daemon.
    first: bool,
}

impl ConfigValidator {
    pub(crate) fn new(
        kernel: &Arc<NetlinkKernel>,
        config: &DaemonConfig,
        hints: &Hints,
        views: watch::Receiver<View>,
        used: Option<ExternalInterface>,
    ) -> Self {
        let prescribed = hints.public;
        let last = hints.last_published.as_ref();
        let given = config.interface.public;
        let public = Dual::from_fn(|family| prescribed[family].or(given[family]));
        let selectors = Selectors {
            public,
            prescribed: hints.interface.clone(),
            node_addresses: hints.node_addresses,
            previous: last.map(|last| last.preferred.public).unwrap_or_default(),
            ..config.interface.clone()
        };
        Self {
            kernel: Arc::clone(kernel),
            selectors,
            firewall: config.firewall.clone(),
            backends: config.backends.clone(),
            allow_commands: config.allow_commands,
            views,
            first: used.is_none() && hints.lapsed.is_none(),
            used,
        }
    }

    /// A validator for a running network with this interface and these leases.
    pub(crate) fn using(self, iface: &ExternalInterface, views: watch::Receiver<View>) -> Self {
        Self { used: Some(iface.clone()), first: false, views, ..self }
    }

    /// Chooses the interface for a network that is built from `config`. `used` is the config of the
    /// network that it replaces, if it replaces one.
    ///
    /// # Errors
    /// No network can be built here, or its firewall rules cannot be made.
    pub(crate) async fn validate(
        &self,
        config: &Config,
        used: Option<&Config>,
    ) -> Result<Chosen, Error> {
        let backend = self.backends.find(&config.backend.kind)?;
        if backend.runs_commands() && !self.allow_commands {
            return Err(Error::CommandsNotAllowed { kind: backend.kind() });
        }
        let chosen = Chosen::choose(&self.kernel, self.selectors.clone(), config).await?;
        if let Some(reason) = self.used.as_ref().and_then(|used| worse(used, &chosen.iface)) {
            return Err(Error::UnfitInterface { name: chosen.iface.name, reason });
        }
        backend.validate(config, Some(&chosen.iface))?;
        if !config.backend.explicit {
            refuse_implicit_udp(self.views.clone()).await?;
        }
        let datapath = backend.datapath(config)?;
        self.firewall.validate(config, &datapath, used, self.first).await?;
        Ok(chosen)
    }

    /// Returns `config` and its interface. If `config` does not fit, returns the config of the last
    /// network, with its interface. That config must have the same pod networks, because the lease
    /// comes from them. The running network reports the reason.
    ///
    /// # Errors
    /// Neither can be used.
    pub(crate) async fn usable(
        &self,
        config: Config,
        last: Option<&Config>,
    ) -> Result<(Config, Chosen), Error> {
        match (
            self.validate(&config, last).await,
            last.filter(|last| last.networks == config.networks),
        ) {
            (Err(_), Some(last)) => Ok((last.clone(), self.validate(last, None).await?)),
            (validated, _) => Ok((config, validated?)),
        }
    }
}

/// Checks that no node runs `udp`, for a config that names no backend. Go flannel then runs `udp`,
/// whose leases have no backend type.
async fn refuse_implicit_udp(mut views: watch::Receiver<View>) -> Result<(), Error> {
    // A closed watch says nothing about other nodes.
    let Ok(view) =
        views.wait_for(|view| !matches!(view.origin, Origin::Cached { written: None })).await
    else {
        return Ok(());
    };
    let Some(lease) = view.leases.iter().find(|lease| lease.attrs.preferred.kind.is_empty()) else {
        return Ok(());
    };
    Err(Error::ImplicitUdp { subnets: lease.subnets.into(), holder: holder(&lease.attrs) })
}
