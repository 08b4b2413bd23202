//! A network that is built, and does not run yet.

use std::sync::Arc;
use std::time::SystemTime;

use flannel_core::lease::View;
use flannel_core::{Config, Kernel, Subnet};
use flannel_doctor::paths::Paths;
use flannel_route::Joined;
use flannel_route::admission::Handshakes;
use tokio::sync::watch;

use super::choice::Before;
use crate::config::DaemonConfig;
use crate::observe::{FirewallRules, Running};
use crate::run::backends::{ActiveBackends, BackendRecord};
use crate::run::config_validator::ConfigValidator;
use crate::run::refusals::Refused;
use crate::run::uplink::Chosen;

/// A network that can run.
pub(in crate::run) struct Ready {
    pub(in crate::run) config: Config,
    /// The config of the store, if no network can be built from it here.
    pub(in crate::run) refused: Option<Refused>,
    pub(in crate::run) before: Before,
    pub(in crate::run) backends: ActiveBackends,
    pub(in crate::run) record: Arc<BackendRecord>,
    pub(in crate::run) joined: Joined,
    /// Tells the network which handshakes have completed.
    pub(in crate::run) handshakes: watch::Sender<Handshakes>,
    /// The results of the probes of paths; `None` if paths are not probed.
    pub(in crate::run) paths: Option<Paths>,
    pub(in crate::run) views: watch::Receiver<View>,
    /// Routes to peers are installed, but this node holds no lease: it ran out, and the store does
    /// not answer.
    pub(in crate::run) lapsed: bool,
    /// The config comes from the cache.
    pub(in crate::run) cached: bool,
    /// It is the first network of this daemon.
    pub(in crate::run) first: bool,
    pub(in crate::run) uplink: Chosen,
    pub(in crate::run) validator: ConfigValidator,
}

impl Ready {
    /// The network as observers see it.
    pub(in crate::run) fn running(
        &self,
        settings: &DaemonConfig,
        firewall_rules: watch::Receiver<FirewallRules>,
        excluded: watch::Receiver<Vec<Subnet>>,
    ) -> Running {
        let datapath = self.backends.datapath(settings);
        let footprint = self.backends.footprint(Some(self.uplink.iface.name)).unwrap_or_default();
        Running {
            paths: self.paths.clone(),
            config: self.config.clone(),
            encrypted: (!datapath.encrypted.is_empty()).then(|| Arc::clone(&self.uplink.kernel)),
            datapath,
            record_keepers: self.backends.target.record_keepers(Some(&settings.state_dir)),
            links: footprint.links.into_iter().collect(),
            iface: self.uplink.iface.clone(),
            kernel: Arc::clone(&self.uplink.kernel) as Arc<dyn Kernel>,
            handle: self.joined.network.handle(),
            views: self.views.clone(),
            firewall_rules,
            masquerade: settings.firewall.clone(),
            excluded,
            lapsed: self.lapsed,
            since: SystemTime::now(),
        }
    }
}
