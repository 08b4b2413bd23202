//! Builds a network from the values in the store.

use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use flannel_core::backend::{ExternalInterface, Prepared};
use flannel_core::kernel::Footprint;
use flannel_core::lease::View;
use flannel_core::remedy::Trouble;
use flannel_core::runtime::{blocking, lock};
use flannel_core::subnet::Hints;
use flannel_core::{Config, Error as Cause, Kernel, Lease, SubnetManager, Subnets};
use flannel_doctor::paths::Paths;
use flannel_netlink::NetlinkKernel;
use flannel_options::FileSecrets;
use flannel_route::admission::Handshakes;
use flannel_route::moving::{Member, NodeBackends};
use flannel_route::{Host, HostNetwork, JoinOptions};
use tokio::sync::{OnceCell, watch};
use tokio::time::sleep;

use super::config_validator::ConfigValidator;
use super::moving::{Lineup, Moving, Runs, Team};
use super::proven::Proven;
use super::refusals::{Refusals, Refused};
use super::trial::{self, Candidate, KnownStore, UnsavedSecrets};
use super::uplink::{Chosen, addresses_of};
use crate::config::DaemonConfig;
use crate::error::Error;
use crate::observe::{Observer, Rulebook, Running};
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
    moving: Arc<Moving>,
    /// The values that the last network was built from; `None` before the first one.
    last: Option<(Config, ExternalInterface)>,
    /// The config to go back to.
    proven: Proven,
    /// The subnets of the last network; `None` before the first one.
    own: Option<Subnets>,
    /// The hints of the last start.
    hints: Mutex<Hints>,
    pub(super) refusals: Refusals,
}

/// Why a config is tried.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Purpose {
    /// Its network is built next. A secret that it needs is made and stays.
    Use,
    /// A user asks. No command is run, and nothing stays.
    Question,
}

/// The values of the next network.
struct Choice {
    config: Config,
    chosen: Chosen,
    lineup: Lineup,
    /// The config of the store, if it is another one.
    refused: Option<Refused>,
    before: Before,
}

/// Whether there is a config to go back to if the devices of a network cannot be made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Before {
    /// An earlier one.
    Earlier,
    /// The devices are tried for any time.
    Nothing,
}

/// A network that can run.
pub(super) struct Ready {
    pub(super) config: Config,
    /// The config of the store, if no network can be built from it here.
    pub(super) refused: Option<Refused>,
    pub(super) before: Before,
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
        let moving = Arc::new(Moving::open(&settings.state_dir));
        let proven = Proven::open(&settings.state_dir, &subnets.store_status().store);
        Self {
            settings,
            kernel,
            subnets,
            machine_id,
            announced: OnceCell::new(),
            moving,
            last: None,
            proven,
            own: None,
            hints: Mutex::default(),
            refusals: Refusals::default(),
        }
    }

    /// Notes that the network runs.
    pub(super) fn started(&mut self, ready: &Ready) {
        self.last = Some((ready.config.clone(), ready.chosen.iface.clone()));
        self.own = Some(ready.network.handle().lease.subnets);
        self.refusals.set(ready.refused.clone());
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
            Box::pin(self.start()).await.inspect_err(|error| {
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
    async fn start(&self) -> Result<Ready, Error> {
        let (settings, subnets) = (self.settings, &*self.subnets);
        let last = self.last.as_ref().map(|(config, _)| config);
        let proven = self.proven.get();
        let stored = stored(subnets, last.or(proven.as_ref())).await?;
        let cached = subnets.store_status().confirmed.is_none();
        let hints = subnets.hints().await?;
        lock(&self.hints).clone_from(&hints);
        let views = subnets.watch_leases().await?;
        // Before the next steps, because each of them may fail, in this start and in later ones.
        self.announced
            .get_or_try_init(|| {
                let footprint = settings.backends.footprint(&stored);
                readiness::announce(subnets, in_place(self.kernel(), footprint))
            })
            .await?;
        let used = self.last.as_ref().map(|(_, iface)| iface.clone());
        let validator = ConfigValidator::new(&self.kernel, settings, &hints, views.clone(), used);
        let choice = self.choose(&validator, stored, &views).await?;
        // The lease of another config may be one of other families, with other peers.
        let views = subnets.watch_leases().await?;
        let Choice { config, chosen, mut lineup, refused, before } = choice;
        let team = lineup.team.clone();
        let backend = team.target;
        let (drop_unused_addresses, path_mtu) = (settings.ip_blackhole_route, settings.path_mtu);
        let routes = backend.footprint(&config, None)?.blackholes;
        let given = [("--ip-blackhole-route", drop_unused_addresses), ("--path-mtu", path_mtu)];
        for (option, _) in given.into_iter().filter(|(_, given)| *given && !routes) {
            let text = "an option has no effect: the backend leaves routes to others";
            tracing::warn!(backend = backend.kind(), option, "{text}");
        }
        let lapsed = hints.lapsed.is_some();
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
        let host = self.host(&chosen.iface);
        let joined = host.join_prepared(lineup.members(), &team.offers(), join).await;
        let network = match joined {
            Ok(network) => network,
            Err(error) if refused.is_none() && self.goes_back(&config, &error) => {
                self.refusals.set(Some(Refused { config, reason: error.to_string() }));
                self.moving.drop_unoffered(backend);
                return Box::pin(self.start()).await;
            }
            Err(error) => {
                // Neither config gets a lease: the next attempt begins with the config of the
                // store.
                if last.is_none() && refused.is_some() {
                    self.refusals.set(None);
                }
                return Err(error.into());
            }
        };
        let networks: Vec<_> = config.pod_networks().collect();
        tracing::info!(?networks, backend = backend.kind(), "network config");
        let ExternalInterface { name, mtu, reason, .. } = &chosen.iface;
        let addresses = addresses_of(&chosen.iface);
        tracing::info!(link = %name, %addresses, mtu, %reason, "external interface");
        let first = last.is_none();
        let validator = validator.using(&chosen.iface, views.clone());
        let moving = Arc::clone(&self.moving);
        Ok(Ready {
            config,
            refused,
            before,
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
            .with_process_names(self.kernel.clone())
    }

    /// Chooses between the config of the store and, if no network can be built from it, the earlier
    /// ones.
    ///
    /// # Errors
    /// The store does not answer, or no network can be built from the config of the store and from
    /// any other one. The error is that of the config of the store.
    async fn choose(
        &self,
        validator: &ConfigValidator,
        stored: Config,
        views: &watch::Receiver<View>,
    ) -> Result<Choice, Error> {
        let earlier = self.earlier(&stored);
        let before = if self.proven.is(&stored) || earlier.is_empty() {
            Before::Nothing
        } else {
            Before::Earlier
        };
        let refused = self.refusals.get().filter(|refused| refused.config == stored);
        let waits = self.refusals.waits(&stored);
        let known = refused.map(|refused| refused.reason).or(waits);
        let (error, reason) = match known.filter(|_| !earlier.is_empty()) {
            Some(reason) => (None, reason),
            None => match Box::pin(self.lineup(validator, &stored, views, true)).await {
                Ok((chosen, lineup)) => {
                    return Ok(Choice { config: stored, chosen, lineup, refused: None, before });
                }
                Err(error) if error.is_of_store() => return Err(error),
                Err(error) => {
                    let reason = error.to_string();
                    (Some(error), reason)
                }
            },
        };
        let refused = Some(Refused { config: stored.clone(), reason });
        for config in earlier {
            match Box::pin(self.lineup(validator, &config, views, false)).await {
                Ok((chosen, lineup)) => {
                    if config.networks != stored.networks {
                        self.subnets.use_config(&config);
                    }
                    return Ok(Choice { config, chosen, lineup, refused, before: Before::Nothing });
                }
                Err(error) if error.is_of_store() => return Err(error),
                Err(error) => {
                    let backend = config.backend.kind;
                    tracing::warn!(%backend, %error, "an earlier config cannot be used either");
                }
            }
        }
        match error {
            Some(error) => Err(error),
            None => {
                let lineup = self.lineup(validator, &stored, views, true);
                let (chosen, lineup) = Box::pin(lineup).await?;
                Ok(Choice { config: stored, chosen, lineup, refused: None, before })
            }
        }
    }

    /// The configs that this node has used, the preferred one first, without `stored`. After the
    /// first network they get the pod networks of `stored`, because the lease comes from these.
    fn earlier(&self, stored: &Config) -> Vec<Config> {
        let last = self.last.as_ref().map(|(config, _)| config.clone());
        let networks = last.as_ref().map(|_| stored.networks);
        let proven = self.proven.get();
        let mut all: Vec<Config> = Vec::new();
        for config in proven.into_iter().chain(last).chain(self.moving.recorded(stored)) {
            let networks = networks.unwrap_or(config.networks);
            let config = Config { networks, ..config };
            if config != *stored && !all.contains(&config) {
                all.push(config);
            }
        }
        all
    }

    /// The interface and the backends for a network with this config. A config `of_store` that
    /// differs from what this node has offered is tried by the kernel.
    ///
    /// # Errors
    /// No network can be built here.
    async fn lineup(
        &self,
        validator: &ConfigValidator,
        config: &Config,
        views: &watch::Receiver<View>,
        of_store: bool,
    ) -> Result<(Chosen, Lineup), Error> {
        let used = self.last.as_ref().map(|(config, _)| config).filter(|_| of_store);
        let chosen = validator.validate(config, used).await?;
        let is_new = !self.proven.is(config) && !self.earlier(config).is_empty();
        if of_store && is_new {
            self.try_devices(config, &chosen.iface, Purpose::Use).await?;
        }
        let host = self.host(&chosen.iface);
        let prepare = async |runs: &Runs| prepare(&host, runs).await;
        let user = |members: &NodeBackends, member: &Member| {
            // Before the first network nothing can stay as it is.
            let own = self.own?;
            let view = views.borrow().clone();
            members.user_of(&member.lease_type, (own, &view)).cloned()
        };
        let settings = (self.settings, &*self.subnets);
        let lineup = self.moving.lineup(settings, (config, &chosen.iface), prepare, user).await?;
        Ok((chosen, lineup))
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
        let prepared = host.prepare(backend, config).await?;
        let held = self.moving.held(self.settings, config);
        let inlets = backend.datapath(config)?.inlets;
        trial::check(&self.kernel, held, Candidate { config, prepared, inlets }).await
    }

    /// Checks whether a network can be built from `config` in place of the one that runs, which
    /// `validator` knows.
    ///
    /// # Errors
    /// The store does not answer, or no network can be built.
    pub(super) async fn try_out(
        &self,
        validator: &ConfigValidator,
        config: &Config,
        purpose: Purpose,
    ) -> Result<(), Error> {
        let used = self.last.as_ref().map(|(config, _)| config);
        if let Some(reason) = self.refusals.waits(config) {
            return Err(Error::DevicesFailed(reason));
        }
        let chosen = validator.validate(config, used).await?;
        self.try_devices(config, &chosen.iface, purpose).await
    }
}

/// Prepares a backend.
///
/// # Errors
/// Those of [`Host::prepare`].
pub(super) async fn prepare(host: &Host, runs: &Runs) -> Result<Prepared, Error> {
    let (backend, config) = runs.member();
    Ok(host.prepare(backend, config).await?)
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
