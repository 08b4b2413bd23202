//! Builds a network from the values in the store.

mod choice;
mod ready;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use flannel_core::backend::{ExternalInterface, Prepared};
use flannel_core::kernel::Footprint;
use flannel_core::lease::View;
use flannel_core::remedy::Trouble;
use flannel_core::runtime::{blocking, lock};
use flannel_core::subnet::Hints;
use flannel_core::{Backend, Config, Error as Cause, Kernel, Lease, SubnetManager, Subnets};
use flannel_doctor::paths::Paths;
use flannel_netlink::NetlinkKernel;
use flannel_options::FileSecrets;
use flannel_route::admission::Handshakes;
use flannel_route::{EngineOptions, Host, JoinOptions};
use flannel_subnet::subnet_file::Known;
use tokio::sync::{OnceCell, watch};
use tokio::time::sleep;

use self::choice::Choice;
pub(super) use self::choice::{Before, Purpose};
pub(super) use self::ready::Ready;
use super::backends::{ActiveBackend, ActiveBackends, BackendRecord};
use super::claims::Claims;
use super::config_validator::ConfigValidator;
use super::own_subnets::OwnSubnets;
use super::proven::Proven;
use super::refusals::{Refusals, Refused};
use super::trial::DeviceTrials;
use super::uplink::{Chosen, addresses_of};
use crate::blocking::BlockingQueue;
use crate::config::DaemonConfig;
use crate::error::Error;
use crate::observe::Observer;
use crate::store::readiness;
use crate::store::wait::{Patience, holding, patiently};
use flannel_backends::{WIREGUARD_KEY, is_wireguard_key};

/// The pause between two networks. Without it, steady changes would keep a core busy.
const REBUILD_PAUSE: Duration = Duration::from_millis(100);

/// Builds networks, one after the other.
pub(super) struct Starter<'a> {
    settings: &'a DaemonConfig,
    kernel: Arc<NetlinkKernel>,
    subnets: Arc<dyn SubnetManager>,
    machine_id: String,
    /// The start is published before the first lease is requested.
    announced: OnceCell<()>,
    record: Arc<BackendRecord>,
    /// The last network; `None` before the first one.
    last: Option<LastNetwork>,
    /// The config to go back to.
    proven: Proven,
    /// The hints of the last start.
    hints: Mutex<Hints>,
    pub(super) refusals: Refusals,
    /// The writes of state files.
    pub(super) writes: BlockingQueue,
    trials: DeviceTrials,
    pub(super) own_subnets: OwnSubnets,
    claims: Claims,
}

/// What a [`Starter`] builds networks with, besides the settings.
pub(super) struct StarterParts {
    pub(super) kernel: Arc<NetlinkKernel>,
    pub(super) subnets: Arc<dyn SubnetManager>,
    pub(super) machine_id: String,
    /// The writes of state files.
    pub(super) writes: BlockingQueue,
    pub(super) trials: DeviceTrials,
    pub(super) own_subnets: OwnSubnets,
    pub(super) claims: Claims,
}

/// The values that the last network was built from.
struct LastNetwork {
    config: Config,
    iface: ExternalInterface,
    /// This node's subnets.
    own: Subnets,
}

/// The values of the store.
struct StoreValues {
    config: Config,
    /// The config comes from the cache.
    cached: bool,
    hints: Hints,
    views: watch::Receiver<View>,
}

/// The options of a network, and the other ends of its channels.
struct JoinPlan {
    options: JoinOptions,
    /// The results of the probes of paths; `None` if paths are not probed.
    paths: Option<Paths>,
    /// Tells the network which handshakes have completed.
    handshakes: watch::Sender<Handshakes>,
}

impl<'a> Starter<'a> {
    pub(super) fn new(settings: &'a DaemonConfig, parts: StarterParts) -> Self {
        let StarterParts { kernel, subnets, machine_id, writes, trials, own_subnets, claims } =
            parts;
        let record = BackendRecord::open(&settings.state_dir).writing_in(writes.clone());
        let proven = Proven::open(&settings.state_dir, &subnets.store_status().store)
            .writing_in(writes.clone());
        Self {
            settings,
            kernel,
            subnets,
            machine_id,
            announced: OnceCell::new(),
            record: Arc::new(record),
            last: None,
            proven,
            hints: Mutex::default(),
            refusals: Refusals::default(),
            writes,
            trials,
            own_subnets,
            claims,
        }
    }

    /// Notes that the network runs.
    pub(super) fn started(&mut self, ready: &Ready) {
        self.last = Some(LastNetwork {
            config: ready.config.clone(),
            iface: ready.uplink.iface.clone(),
            own: ready.joined.network.handle().lease.subnets,
        });
        self.refusals.set(ready.refused.clone());
    }

    /// The config of the last network; `None` before the first one.
    fn last_config(&self) -> Option<&Config> {
        self.last.as_ref().map(|last| &last.config)
    }

    /// Notes that the devices of a network with this config are in the kernel.
    pub(super) async fn works(&self, config: &Config) {
        self.refusals.works(config);
        self.proven.note(config).await;
    }

    /// Builds a network, and repeats that until it succeeds. Meanwhile the lease `held` is renewed.
    ///
    /// # Errors
    /// [`Error::LeaseLost`]. Before the first network, also an error that needs a correction.
    pub(super) async fn next(
        &self,
        held: Option<&Lease>,
        observer: &Observer,
    ) -> Result<Ready, Error> {
        let subnets = &*self.subnets;
        let start = async || {
            Box::pin(self.start(observer)).await.inspect_err(|error| {
                let remedy = error.remedy(&subnets.store_status().kind);
                let trouble = Trouble::new(error.to_string(), remedy);
                observer.note(|facts| facts.waits_for = Some(trouble));
            })
        };
        let has_run = self.last.is_some();
        let build = async {
            if has_run {
                sleep(REBUILD_PAUSE).await;
            }
            let refusals_pass = self.settings.store.refusals_pass();
            patiently(subnets, Patience { has_run, refusals_pass }, start).await
        };
        holding(subnets, held, build).await
    }

    /// Reads everything that a network is built from, and builds it. Nothing is recorded or
    /// published before each backend is prepared.
    ///
    /// # Errors
    /// The store does not answer, or no network can be built from its values.
    async fn start(&self, observer: &Observer) -> Result<Ready, Error> {
        let StoreValues { config, cached, hints, views } = self.read(observer).await?;
        let used = self.last.as_ref().map(|last| last.iface.clone());
        let validator =
            ConfigValidator::new(&self.kernel, self.settings, &hints, views.clone(), used);
        let choice = self.choose(&validator, config, &views).await?;
        // The lease of another config may be one of other families, with other peers.
        let views = self.subnets.watch_leases().await?;
        let Choice { config, uplink, mut prepared, refused, before } = choice;
        let backends = prepared.backends.clone();
        let footprint = backends.footprint(Some(uplink.iface.name))?;
        self.claims.claim(&footprint, &config, &self.settings.subnet_file).await?;
        // A lease may not be had for long, for example because all subnets are taken.
        if self.last.is_none() && before == Before::Nothing && refused.is_none() {
            let networks = Known::Networks(config.pod_networks().collect());
            self.own_subnets.note(networks, observer).await;
        }
        let lapsed = hints.lapsed.is_some();
        let JoinPlan { options, paths, handshakes } = self.join_plan(&config, &backends, hints)?;
        let host = self.host(&uplink.iface);
        let joined = match host.join_prepared(prepared.take_prepared(), options).await {
            Ok(joined) => joined,
            Err(error) if refused.is_none() && self.goes_back(&config, &error) => {
                self.refusals.set(Some(Refused { config, reason: error.to_string() }));
                self.record.drop_unoffered(&*backends.target);
                return Box::pin(self.start(observer)).await;
            }
            Err(error) => {
                // Neither config gets a lease: the next attempt begins with the config of the
                // store.
                if self.last.is_none() && refused.is_some() {
                    self.refusals.set(None);
                }
                return Err(error.into());
            }
        };
        let own = joined.network.handle().lease.subnets;
        self.own_subnets.note(Known::Both(own, config.pod_networks().collect()), observer).await;
        log_choice(&config, &*backends.target, &uplink);
        Ok(Ready {
            config,
            refused,
            before,
            backends,
            record: Arc::clone(&self.record),
            joined,
            handshakes,
            paths,
            validator: validator.using(&uplink.iface, views.clone()),
            views,
            lapsed,
            cached,
            first: self.last.is_none(),
            uplink,
        })
    }

    /// Reads the values of the store. Announces the start before the first lease is requested.
    ///
    /// # Errors
    /// The store does not answer, or has no config.
    async fn read(&self, observer: &Observer) -> Result<StoreValues, Error> {
        let subnets = &*self.subnets;
        let proven = self.proven.get();
        let config = stored(subnets, self.last_config().or(proven.as_ref())).await?;
        let cached = subnets.store_status().confirmed.is_none();
        let hints = subnets.hints().await?;
        self.own_subnets.note_assignment(subnets.assignment(), observer).await;
        lock(&self.hints).clone_from(&hints);
        let views = subnets.watch_leases().await?;
        // Before the next steps, because each of them may fail, in this start and in later ones.
        self.announced
            .get_or_try_init(|| {
                let footprint = self.settings.backends.footprint(&config);
                readiness::announce(subnets, in_place(self.kernel(), footprint))
            })
            .await?;
        Ok(StoreValues { config, cached, hints, views })
    }

    /// The options of a network with this config. Warns about options without an effect.
    ///
    /// # Errors
    /// The options of the backend are wrong.
    fn join_plan(
        &self,
        config: &Config,
        backends: &ActiveBackends,
        hints: Hints,
    ) -> Result<JoinPlan, Error> {
        let settings = self.settings;
        let has_routes = backends.target.footprint(config, None)?.blackholes;
        if !has_routes {
            settings.warn_without_routes(&*backends.target);
        }
        let lapsed = hints.lapsed.is_some();
        let interval = settings.control.path_interval;
        let paths = (!interval.is_zero() && !lapsed).then(|| Paths::new(interval));
        let uses_mtus = settings.path_mtu && has_routes;
        let (handshakes, done) = watch::channel(Handshakes::default());
        // After a start, another key must be in the kernel before peers use it.
        let withholds = self.last.is_none() && !lapsed && backends.encrypts(settings);
        let engine = EngineOptions::default()
            .with_drop_unused_addresses(settings.ip_blackhole_route)
            .with_resync(settings.kernel_resync)
            .with_path_mtus(paths.as_ref().filter(|_| uses_mtus).map(Paths::mtus))
            .with_handshakes(done)
            .with_process_names(self.kernel.clone());
        let options = JoinOptions::default()
            .with_published(hints.last_published.filter(|_| withholds))
            .with_previous(hints.previous)
            .with_lapsed(hints.lapsed)
            .with_engine(engine);
        Ok(JoinPlan { options, paths, handshakes })
    }

    /// Whether the last config that worked is used, because no lease for `config` can be had. While
    /// a network runs, it goes on instead.
    fn goes_back(&self, config: &Config, error: &Cause) -> bool {
        let is_known = self.refusals.get().is_some_and(|refused| refused.config == *config);
        let has_other = self.proven.get().is_some_and(|proven| proven != *config);
        let is_of_config = matches!(
            error,
            Cause::NotReady { .. }
                | Cause::Refused { .. }
                | Cause::OutOfSubnets { .. }
                | Cause::Backend { .. }
        );
        self.last.is_none() && has_other && is_of_config && !is_known
    }

    fn kernel(&self) -> Arc<dyn Kernel> {
        Arc::clone(&self.kernel) as Arc<dyn Kernel>
    }

    /// This host with an external interface.
    pub(super) fn host(&self, iface: &ExternalInterface) -> Host {
        Host::new(iface.clone(), self.kernel(), Arc::clone(&self.subnets))
            .with_machine_id(self.machine_id.clone())
            .with_secrets(Arc::new(secrets(self.settings)))
            .with_state_dir(&self.settings.state_dir)
    }
}

impl DaemonConfig {
    /// Warns about options that have no effect with a backend that leaves routes to others.
    fn warn_without_routes(&self, backend: &dyn Backend) {
        let given =
            [("--ip-blackhole-route", self.ip_blackhole_route), ("--path-mtu", self.path_mtu)];
        for (option, _) in given.into_iter().filter(|(_, given)| *given) {
            let text = "an option has no effect: the backend leaves routes to others";
            tracing::warn!(backend = backend.kind(), option, "{text}");
        }
    }
}

/// Logs the values of a network that is about to run.
fn log_choice(config: &Config, backend: &dyn Backend, uplink: &Chosen) {
    let networks: Vec<_> = config.pod_networks().collect();
    tracing::info!(?networks, backend = backend.kind(), "network config");
    let ExternalInterface { name, mtu, reason, .. } = &uplink.iface;
    let addresses = addresses_of(&uplink.iface);
    tracing::info!(link = %name, %addresses, mtu, %reason, "external interface");
}

/// Prepares a backend.
///
/// # Errors
/// The errors of [`Host::prepare`].
pub(super) async fn prepare(host: &Host, backend: &ActiveBackend) -> Result<Prepared, Error> {
    Ok(host.prepare(&*backend.backend, &backend.config).await?)
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
    let stored = subnets.network_config().await;
    let is_missing = match &stored {
        Err(Cause::NoConfig { .. } | Cause::Config { .. }) => true,
        // From a cache, which may have one that was never used.
        Ok(_) => subnets.store_status().wrong_config.is_some(),
        Err(_) => false,
    };
    match last.filter(|_| is_missing) {
        Some(last) => {
            subnets.use_config(last);
            Ok(last.clone())
        }
        None => Ok(stored?),
    }
}

/// Whether the kernel has objects of an earlier run's network. After a boot it has none.
async fn in_place(kernel: Arc<dyn Kernel>, footprint: Footprint) -> bool {
    // A network without objects is complete. A kernel that cannot be read counts as having some.
    blocking(move || {
        footprint == Footprint::default()
            || !kernel.snapshot(&footprint).is_ok_and(|there| there.is_empty())
    })
    .await
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
