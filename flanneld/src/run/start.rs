//! Builds a network from the values in the store.

use std::sync::Arc;
use std::time::SystemTime;

use flannel_admission::Handshakes;
use flannel_core::backend::ExternalInterface;
use flannel_core::kernel::Footprint;
use flannel_core::lease::View;
use flannel_core::runtime::blocking;
use flannel_core::{Config, Kernel, SubnetManager};
use flannel_netlink::NetlinkKernel;
use flannel_options::FileSecrets;
use flannel_paths::Paths;
use flannel_route::{Host, HostNetwork, JoinOptions};
use tokio::sync::{OnceCell, watch};

use super::config_validator::ConfigValidator;
use super::moving::{Moving, Runs, Team};
use super::uplink::{Chosen, addresses_of};
use crate::config::DaemonConfig;
use crate::error::Error;
use crate::observe::{Rulebook, Running};
use crate::store::readiness;
use flannel_backends::{WIREGUARD_KEY, is_wireguard_key};

/// Builds networks, one after the other.
pub(super) struct Starter<'a> {
    settings: &'a DaemonConfig,
    kernel: Arc<NetlinkKernel>,
    subnets: Arc<dyn SubnetManager>,
    machine_id: String,
    /// The start is published before the first lease is requested.
    announced: OnceCell<()>,
    moving: Arc<Moving>,
    /// The values that the last network was built from; `None` before the first one.
    last: Option<(Config, ExternalInterface)>,
}

/// A network that can run.
pub(super) struct Ready {
    pub(super) config: Config,
    /// The backends of the network.
    pub(super) team: Team,
    pub(super) moving: Arc<Moving>,
    pub(super) network: HostNetwork,
    /// Tells the network which handshakes have completed.
    pub(super) handshakes: watch::Sender<Handshakes>,
    /// The results of the probes of paths; `None`: paths are not probed.
    pub(super) paths: Option<Paths>,
    pub(super) views: watch::Receiver<View>,
    /// Routes to peers are installed, but this node holds no lease: it ran out, and the store does
    /// not answer.
    pub(super) lapsed: bool,
    /// The config comes from the cache.
    pub(super) cached: bool,
    /// It is the first network of this daemon.
    pub(super) first: bool,
    pub(super) chosen: Chosen,
    pub(super) validator: ConfigValidator,
}

impl Ready {
    /// The network as observers see it.
    pub(super) fn running(
        &self,
        settings: &DaemonConfig,
        rulebook: watch::Receiver<Rulebook>,
    ) -> Running {
        let datapath = self.team.datapath(settings);
        let footprint = self.team.footprint(Some(self.chosen.iface.name)).unwrap_or_default();
        Running {
            paths: self.paths.clone(),
            config: self.config.clone(),
            unguarded: settings.firewall.unguarded(&self.config, &datapath),
            encrypted: (!datapath.encrypted.is_empty()).then(|| Arc::clone(&self.chosen.kernel)),
            datapath,
            annexes: self.team.target.annexes(Some(&settings.state_dir)),
            links: footprint.links.into_iter().collect(),
            iface: self.chosen.iface.clone(),
            kernel: Arc::clone(&self.chosen.kernel) as Arc<dyn Kernel>,
            handle: self.network.handle(),
            views: self.views.clone(),
            rulebook,
            lapsed: self.lapsed,
            since: SystemTime::now(),
        }
    }
}

impl<'a> Starter<'a> {
    pub(super) fn new(
        settings: &'a DaemonConfig,
        kernel: Arc<NetlinkKernel>,
        subnets: Arc<dyn SubnetManager>,
        machine_id: String,
    ) -> Self {
        let (announced, last) = (OnceCell::new(), None);
        let moving = Arc::new(Moving::open(&settings.state_dir));
        Self { settings, kernel, subnets, machine_id, announced, moving, last }
    }

    /// Whether a network of this daemon has run.
    pub(super) fn has_run(&self) -> bool {
        self.last.is_some()
    }

    /// Notes that the network runs.
    pub(super) fn started(&mut self, ready: &Ready) {
        self.last = Some((ready.config.clone(), ready.chosen.iface.clone()));
    }

    /// Reads everything that a network is built from, and builds it.
    ///
    /// # Errors
    /// The store does not answer, or no network can be built from its values.
    pub(super) async fn start(&self) -> Result<Ready, Error> {
        let (settings, subnets) = (self.settings, &*self.subnets);
        let kernel = || Arc::clone(&self.kernel) as Arc<dyn Kernel>;
        let last = self.last.as_ref().map(|(config, _)| config);
        let stored = stored(subnets, last).await?;
        let cached = subnets.store_status().confirmed.is_none();
        let hints = subnets.hints().await?;
        let views = subnets.watch_leases().await?;
        // Before the next steps, because each of them may fail, in this start and in later ones.
        self.announced
            .get_or_try_init(|| {
                let footprint = settings.backends.footprint(&stored);
                readiness::announce(subnets, in_place(kernel(), footprint))
            })
            .await?;
        let used = self.last.as_ref().map(|(_, iface)| iface.clone());
        let validator = ConfigValidator::new(&self.kernel, settings, &hints, views.clone(), used);
        let (config, chosen) = validator.usable(stored, last).await?;
        let team = self.moving.team((settings, subnets), &config, &chosen.iface).await?;
        let backend = team.target;
        let (drop_unused_addresses, path_mtu) = (settings.ip_blackhole_route, settings.path_mtu);
        let routes = backend.footprint(&config, None)?.blackholes;
        let given = [("--ip-blackhole-route", drop_unused_addresses), ("--path-mtu", path_mtu)];
        for (option, _) in given.into_iter().filter(|(_, given)| *given && !routes) {
            let text = "an option has no effect: the backend leaves routes to others";
            tracing::warn!(backend = backend.kind(), option, "{text}");
        }
        let lapsed = hints.lapsed.is_some();
        let host = Host::new(chosen.iface.clone(), kernel(), Arc::clone(&self.subnets))
            .with_machine_id(self.machine_id.clone())
            .with_secrets(Arc::new(secrets(settings)))
            .with_state_dir(&settings.state_dir)
            .with_process_names(self.kernel.clone());
        let (resync, interval) = (Some(settings.kernel_resync), settings.control.path_interval);
        let paths = (!interval.is_zero() && !lapsed).then(|| Paths::new(interval));
        let path_mtus = paths.as_ref().filter(|_| path_mtu && routes).map(Paths::mtus);
        let (handshakes, done) = watch::channel(Handshakes::default());
        // After a start, another key must be in the kernel before peers use it.
        let published = hints.last_published.filter(|_| last.is_none() && !lapsed);
        let join = JoinOptions {
            published: published.filter(|_| team.encrypts(settings)),
            lapsed: hints.lapsed,
            drop_unused_addresses,
            resync,
            path_mtus,
            handshakes: Some(done),
        };
        let members: Vec<_> = team.all.iter().map(Runs::member).collect();
        let network = host.join_all(&members, &team.offers(), join).await?;
        let networks: Vec<_> = config.pod_networks().collect();
        tracing::info!(?networks, backend = backend.kind(), "network config");
        let ExternalInterface { name, mtu, reason, .. } = &chosen.iface;
        let addresses = addresses_of(&chosen.iface);
        tracing::info!(link = %name, %addresses, mtu, %reason, "external interface");
        let (first, validator) = (last.is_none(), validator.using(&chosen.iface));
        let moving = Arc::clone(&self.moving);
        Ok(Ready {
            config,
            team,
            moving,
            network,
            handshakes,
            paths,
            views,
            lapsed,
            cached,
            first,
            chosen,
            validator,
        })
    }
}

/// The secrets of this node. A key that Go flannel left is kept, so that peers keep it too.
fn secrets(settings: &DaemonConfig) -> FileSecrets {
    let secrets = FileSecrets::new(&settings.state_dir);
    match &settings.wireguard_key_file {
        Some(file) => secrets.with_file(WIREGUARD_KEY, file.clone()),
        None => {
            let of_go = settings.subnet_file.with_file_name("wgkey");
            secrets.adopting(WIREGUARD_KEY, of_go, is_wireguard_key)
        }
    }
}

/// The network config of the store. If the store has no valid one, the `last` one is still used,
/// and the store reports the reason.
pub(super) async fn stored(
    subnets: &dyn SubnetManager,
    last: Option<&Config>,
) -> Result<Config, Error> {
    use flannel_core::Error as Cause;

    match (subnets.network_config().await, last) {
        (Err(Cause::NoConfig { .. } | Cause::Config { .. }), Some(last)) => Ok(last.clone()),
        (stored, _) => Ok(stored?),
    }
}

/// Whether the kernel has objects of an earlier run's network. After a boot it has none.
async fn in_place(kernel: Arc<dyn Kernel>, footprint: Footprint) -> bool {
    // A network without objects is complete. A kernel that cannot be read counts as having some.
    let look = move || {
        footprint == Footprint::default()
            || !kernel.snapshot(&footprint).is_ok_and(|there| there.is_empty())
    };
    blocking(look).await
}

#[cfg(test)]
mod tests {
    use flannel_core::testing::{FakeKernel, Operation};

    use super::*;

    #[tokio::test]
    async fn a_kernel_that_cannot_be_read_counts_as_in_place() {
        let footprint =
            |text: &str| flannel_backends::all().footprint(&Config::parse(text).unwrap());
        let vxlan = footprint(r#"{"Network":"10.1.0.0/16","Backend":{"Type":"vxlan"}}"#);
        let kernel = FakeKernel::with_uplink("eth0");
        assert!(!in_place(Arc::new(kernel.clone()), vxlan.clone()).await);
        kernel.fail(1, 105, |call| call.operation == Operation::Snapshot);
        assert!(in_place(Arc::new(kernel.clone()), vxlan).await);
        // A network without objects, or with unknown ones.
        assert!(
            in_place(
                Arc::new(kernel.clone()),
                footprint(r#"{"Network":"10.1.0.0/16","Backend":{"Type":"alloc"}}"#)
            )
            .await
        );
        assert!(
            !in_place(
                Arc::new(kernel),
                footprint(r#"{"Network":"10.1.0.0/16","Backend":{"Type":"vlxan"}}"#)
            )
            .await
        );
    }
}
