//! Runs one network, from its start until one of the values that it was built from changes.

use std::collections::BTreeSet;
use std::sync::Arc;

use flannel_core::backend::Datapath;
use flannel_core::kernel::Footprint;
use flannel_core::lease::{Origin, View};
use flannel_core::network::NetworkHandle;
use flannel_core::object::LinkName;
use flannel_core::{Config, Lease, Network, Subnet, SubnetManager};
use flannel_doctor::path_probe::server::ServerConfig;
use flannel_doctor::paths::{Paths, ProbeSettings};
use flannel_route::admission::Handshakes;
use flannel_route::moving::Tunnels;
use tokio::sync::watch;

use super::backends::{ActiveBackend, ActiveBackends, BackendRecord};
use super::config_validator::ConfigValidator;
use super::controllers::absent_backends::AbsentBackendController;
use super::controllers::config::ConfigController;
use super::controllers::firewall::FirewallController;
use super::controllers::handshakes::HandshakeController;
use super::controllers::host_findings::HostFindingsController;
use super::controllers::lease::LeaseController;
use super::controllers::lease_times::LeaseTimesController;
use super::controllers::leftovers::LeftoverController;
use super::controllers::leftovers::go_flannel::GoFlannel;
use super::controllers::leftovers::old_networks::OldNetworks;
use super::controllers::moves::MoveController;
use super::controllers::new_keys::NewKeyController;
use super::controllers::paths::{PathController, ProbeServer};
use super::controllers::probation::{ProbationController, ProofController};
use super::controllers::questions::QuestionController;
use super::controllers::routes::RouteController;
use super::controllers::status_log::StatusLogController;
use super::controllers::subnet_file::SubnetFile;
use super::controllers::uplink::UplinkController;
use super::controllers::{Controllers, Ended};
use super::refusals::Refused;
use super::start::{Before, Purpose, Ready, Starter, prepare, stored};
use super::uplink::Chosen;
use crate::config::DaemonConfig;
use crate::error::Error;
use crate::observe::{FirewallRules, Observer, RunningGuard};

/// What all networks of a daemon share.
#[derive(Clone, Copy)]
pub(super) struct DaemonContext<'a> {
    pub(super) settings: &'a DaemonConfig,
    pub(super) subnets: &'a dyn SubnetManager,
    pub(super) starter: &'a Starter<'a>,
    pub(super) go_flannel: &'a GoFlannel,
    pub(super) observer: &'a Observer,
}

/// A network that runs: what its controllers share.
pub(super) struct RunningNetwork<'a> {
    pub(super) settings: &'a DaemonConfig,
    pub(super) subnets: &'a dyn SubnetManager,
    pub(super) starter: &'a Starter<'a>,
    pub(super) go_flannel: &'a GoFlannel,
    pub(super) observer: &'a Observer,
    pub(super) config: Config,
    /// The config comes from the cache.
    pub(super) cached: bool,
    /// This node holds no lease: it ran out, and the store does not answer.
    pub(super) lapsed: bool,
    /// It is the first network of this daemon.
    pub(super) first: bool,
    pub(super) before: Before,
    pub(super) handle: NetworkHandle,
    pub(super) views: watch::Receiver<View>,
    pub(super) backends: ActiveBackends,
    pub(super) record: Arc<BackendRecord>,
    pub(super) uplink: Chosen,
    pub(super) validator: ConfigValidator,
    pub(super) datapath: Datapath,
    pub(super) footprint: Footprint,
    /// Whether the firewall rules are in place, or cannot be made and are not required.
    pub(super) rules_settled: watch::Receiver<bool>,
    /// The exclusions from masquerading of the config, as of now.
    excluded: watch::Sender<Vec<Subnet>>,
    tunnels: watch::Receiver<Option<Tunnels>>,
    withholds_offers: bool,
}

/// The parts of a network that one service each takes.
struct Parts {
    routes: Box<dyn Network>,
    handshakes: watch::Sender<Handshakes>,
    /// The devices on which handshakes decide how peers are reached.
    tunnel_devices: BTreeSet<LinkName>,
    tunnels: watch::Sender<Option<Tunnels>>,
    rules_settled: watch::Sender<bool>,
    rules: watch::Sender<FirewallRules>,
    paths: Option<Paths>,
    probes: ProbeSettings,
    probe_server: ServerConfig,
}

/// A network that is about to run.
struct Assembled<'a> {
    network: RunningNetwork<'a>,
    parts: Parts,
    /// The config of the store, if the network was not built from it.
    refused: Option<Refused>,
    /// Observers see the network until this is dropped.
    shown: RunningGuard<'a>,
}

/// Runs a network until the next one is built, because a value that it was built from has changed.
/// Returns the next one.
///
/// # Errors
/// The network stops, or the lease is lost.
pub(super) async fn run(daemon: DaemonContext<'_>, ready: Ready) -> Result<Ready, Error> {
    let held = (!ready.lapsed).then(|| ready.joined.network.handle().lease);
    // A large future, of which each caller would have a copy on its stack.
    Box::pin(run_until_next(daemon, ready, held.as_ref())).await
}

/// Runs the controllers until the next network is built or this one stops.
async fn run_until_next(
    daemon: DaemonContext<'_>,
    ready: Ready,
    held: Option<&Lease>,
) -> Result<Ready, Error> {
    warn_if_stale(daemon.subnets, &ready.views.borrow());
    let Assembled { network, parts, refused, shown: _shown } = daemon.assemble(ready)?;
    // Before objects are put for its pod networks.
    let state_dir = &daemon.settings.state_dir;
    let old_networks =
        OldNetworks::record(state_dir, &network.config, daemon.starter.writes.clone()).await;
    let former = old_networks.former().to_vec();
    let mut services = network.services(parts, former);
    let mut triggers = network.triggers(refused, old_networks);
    let ended = tokio::select! {
        ended = services.first_end() => ended,
        ended = triggers.first_end() => ended,
    };
    let reason = match ended {
        Ended::Rebuild(reason) => reason,
        Ended::Failed(error) => return Err(error),
    };
    drop(triggers);
    let subnet_file = network.subnet_file();
    // The next network may take long, because of a store that does not answer.
    tokio::select! {
        ended = services.first_end() => match ended {
            Ended::Rebuild(reason) => daemon.rebuild(reason, held).await,
            Ended::Failed(error) => Err(error),
        },
        ready = daemon.rebuild(reason, held) => ready,
        error = subnet_file.restore() => Err(error),
    }
}

impl<'a> DaemonContext<'a> {
    /// Builds the next network, while the lease `held` is renewed.
    async fn rebuild(&self, reason: String, held: Option<&Lease>) -> Result<Ready, Error> {
        tracing::info!(%reason, "rebuilding the network");
        Box::pin(self.starter.next(held, self.observer)).await
    }

    /// Connects the parts of a network, and shows it to observers.
    ///
    /// # Errors
    /// The options of a backend are wrong.
    fn assemble(self, ready: Ready) -> Result<Assembled<'a>, Error> {
        let Self { settings, subnets, starter, go_flannel, observer } = self;
        let (rules, rules_shown) = watch::channel(settings.firewall.firewall_rules(&ready.config));
        let excluded = watch::Sender::new(ready.config.masquerade_exclude.clone());
        let running = ready.running(settings, rules_shown, excluded.subscribe());
        let probes = running.probes(&settings.control);
        let probe_server = running.probe_server(settings.control.doctor_port);
        let shown = observer.running(running);
        let needs_handshakes = ready.joined.needs_handshakes;
        let tunnel_devices =
            if needs_handshakes { ready.backends.handshakes_on(settings) } else { BTreeSet::new() };
        // Nothing is known before the first read.
        let unread = (!tunnel_devices.is_empty()).then(Tunnels::default);
        let (tunnels, tunnels_seen) = watch::channel(unread);
        let (settled, rules_settled) = watch::channel(false);
        let network = RunningNetwork {
            settings,
            subnets,
            starter,
            go_flannel,
            observer,
            cached: ready.cached,
            lapsed: ready.lapsed,
            first: ready.first,
            before: ready.before,
            withholds_offers: ready.joined.withholds_offers,
            handle: ready.joined.network.handle(),
            views: ready.views,
            datapath: ready.backends.datapath(settings),
            footprint: ready.backends.footprint(Some(ready.uplink.iface.name))?,
            config: ready.config,
            backends: ready.backends,
            record: ready.record,
            uplink: ready.uplink,
            validator: ready.validator,
            rules_settled,
            excluded,
            tunnels: tunnels_seen,
        };
        let parts = Parts {
            routes: ready.joined.network,
            handshakes: ready.handshakes,
            tunnel_devices,
            tunnels,
            rules_settled: settled,
            rules,
            paths: ready.paths,
            probes,
            probe_server,
        };
        Ok(Assembled { network, parts, refused: ready.refused, shown })
    }
}

impl RunningNetwork<'_> {
    /// The subnet file of this network.
    pub(super) fn subnet_file(&self) -> SubnetFile<'_> {
        SubnetFile { network: self }
    }

    /// Checks that a network can be built from the config of the store, or from the one in use.
    ///
    /// # Errors
    /// The store does not answer, or no network can be built.
    pub(super) async fn validate_stored(&self) -> Result<(), Error> {
        // The next network may be built from another config.
        let next = stored(self.subnets, Some(&self.config)).await?;
        self.validator.usable(next, Some(&self.config)).await.map(drop)
    }

    /// Checks that the next network can be built from this config. Notes the result.
    ///
    /// # Errors
    /// The store does not answer, or no network can be built.
    async fn validate_next(&self, config: &Config) -> Result<(), Error> {
        let tried = self.starter.try_out(&self.validator, config, Purpose::Use).await.map(drop);
        let refused = match &tried {
            Err(error) if error.is_of_store() => return tried,
            Err(error) => Some(Refused { config: config.clone(), reason: error.to_string() }),
            Ok(()) => None,
        };
        self.starter.refusals.set(refused);
        tried
    }

    /// The controllers that keep the network working until the next one is built.
    fn services(&self, parts: Parts, former: Vec<Subnet>) -> Controllers<'_> {
        let mut services = Controllers::default();
        services.add(RouteController { network: self, routes: parts.routes }.run());
        let firewall = FirewallController {
            options: &self.settings.firewall,
            config: &self.config,
            datapath: &self.datapath,
            own: self.handle.lease.subnets,
            excluded: self.excluded.subscribe(),
            former,
            lapsed: self.lapsed,
            first: self.first,
            settled: parts.rules_settled,
            state: parts.rules,
        };
        services.add(firewall.run());
        let kernel = Arc::clone(&self.uplink.kernel);
        let handshakes = HandshakeController {
            read: move |link| kernel.tunnel(link),
            devices: parts.tunnel_devices,
            open: parts.handshakes,
            tunnels: parts.tunnels,
        };
        services.add(handshakes.run());
        services.add(ProbeServer { config: parts.probe_server }.run());
        let paths = PathController {
            settings: parts.probes,
            handle: self.handle.clone(),
            paths: parts.paths,
        };
        services.add(paths.run());
        services.add(QuestionController { network: self }.run());
        services.add(StatusLogController { status: self.handle.status.clone() }.run());
        let lease_times =
            LeaseTimesController { observer: self.observer, views: self.views.clone() };
        services.add(lease_times.run());
        let findings =
            HostFindingsController { observer: self.observer, rules: self.rules_settled.clone() };
        services.add(findings.run());
        services
    }

    /// The controllers that end when the network must be rebuilt. `refused` is the config of the
    /// store, if the network was not built from it.
    fn triggers(&self, refused: Option<Refused>, old_networks: OldNetworks) -> Controllers<'_> {
        let mut triggers = Controllers::default();
        triggers.add(LeaseController { network: self }.run());
        let config = ConfigController {
            subnets: self.subnets,
            used: &self.config,
            cached: self.cached,
            refused,
            validate: async |to: &Config| self.validate_next(to).await,
            observer: self.observer,
            excluded: self.excluded.clone(),
        };
        triggers.add(config.run());
        triggers.add(UplinkController { network: self }.run());
        let moves = MoveController {
            record: &self.record,
            backends: &self.backends,
            own: self.handle.lease.subnets,
            views: self.views.clone(),
            status: self.handle.status.clone(),
            tunnels: self.tunnels.clone(),
            kernel: &self.uplink.kernel,
            observer: self.observer,
        };
        triggers.add(moves.run());
        let host = self.starter.host(&self.uplink.iface);
        let absent = AbsentBackendController {
            record: &self.record,
            backends: &self.backends,
            own: self.handle.lease.subnets,
            views: self.views.clone(),
            prepare: async move |backend: &ActiveBackend| prepare(&host, backend).await,
        };
        triggers.add(absent.run());
        triggers.add(ProofController { network: self }.run());
        triggers.add(ProbationController { network: self }.run());
        let new_keys = NewKeyController {
            withheld: self.withholds_offers,
            before: self.before,
            backends: &self.backends,
            status: self.handle.status.clone(),
        };
        triggers.add(new_keys.run());
        triggers.add(LeftoverController { network: self, old_networks }.run());
        triggers
    }
}

/// Logs that the leases come from the cache of an earlier run.
fn warn_if_stale(subnets: &dyn SubnetManager, view: &View) {
    let status = subnets.store_status();
    if let Origin::Cached { written: Some(written) } = view.origin
        && status.confirmed.is_none()
    {
        let age_seconds = written.elapsed().unwrap_or_default().as_secs();
        tracing::warn!(
            leases = view.leases.len(), age_seconds, store = %status.store,
            "stale: leases from the cache are put in place; nothing is deleted until the store \
             answers"
        );
    }
}
