//! The daemon: choose the interface, get a lease, say so in the subnet file, and keep the kernel following the leases.
//!
//! **Source**: flannel `main.go`, for the order.

use std::convert::Infallible;
use std::io::ErrorKind;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use flannel_core::backend::Backends;
use flannel_core::backend::ExternalInterface;
use flannel_core::kernel::Footprint;
use flannel_core::lease::{Origin, View};
use flannel_core::network::{Ended, NetworkHandle};
use flannel_core::status::Status;
use flannel_core::{Backend, Config, Kernel, Lease, SubnetManager, Subnets};
use flannel_doctor::path_probe::server;
use flannel_netlink::NetlinkKernel;
use flannel_options::{FileSecrets, state_dir};
use flannel_route::{Host, HostNetwork, JoinOptions};
use flannel_subnet::{HolderId, SubnetEnv, SubnetEnvError};
use tokio::sync::{OnceCell, watch};

use crate::changed_config;
use crate::config::{DaemonConfig, NexthopObjects};
use crate::config_validator::ConfigValidator;
use crate::control::Servers;
use crate::disk::run_blocking_in_order;
use crate::error::Error;
use crate::firewall::Rulebook;
use crate::leftovers::go_flannel::GoFlannel;
use crate::leftovers::old_networks::OldNetworks;
use crate::log::log_status;
use crate::observe::{Observer, Running};
use crate::preflight;
use crate::readiness;
use crate::registry::{self, Node};
use crate::state;
use crate::uplink::{Chosen, addresses_of};
use crate::wait::{Patience, STORE_AGAIN, hold, holding, patiently};

/// Between two networks, so that what changes all the time does not keep a core busy.
const REBUILD_PAUSE: Duration = Duration::from_millis(100);
/// Until it is judged again whether a network could be built.
const SECOND_THOUGHT: Duration = Duration::from_secs(10);
/// So long the subnet file waits for firewall rules, whoever has locked them, and for the tunnel.
const RULES: Duration = Duration::from_secs(5);

/// Runs the daemon: see [`Daemon::run`](crate::Daemon::run).
pub(crate) async fn run(settings: &DaemonConfig, observer: &Observer) -> Result<Infallible, Error> {
    // First: whoever had it may have had the sockets too.
    let _alone = state_dir::lock(&settings.state_dir).await?;
    let servers = Servers::open(&settings.control, &settings.subnet_file).await?;
    tokio::select! {
        ended = run_networks(settings, observer) => ended,
        never = servers.serve(observer) => match never {},
    }
}

/// One network after the other.
async fn run_networks(settings: &DaemonConfig, observer: &Observer) -> Result<Infallible, Error> {
    let kernel = Arc::new(open_kernel(settings)?);
    let holder = state::holder_id(&settings.state_dir)?;
    let go_flannel = GoFlannel::find(&settings.subnet_file, &settings.state_dir)?;
    let node = Node {
        holder,
        previous: previous_subnets(settings),
        addresses: addresses(&kernel, settings)?,
        renew_margin: settings.renew_margin,
        cache: state_dir::leases(&settings.state_dir),
    };
    let subnets = registry::open(&settings.store, node).await?;
    observer.opened(Arc::clone(&subnets));
    tokio::select! {
        ended = follow_store(settings, &kernel, &subnets, (holder, &go_flannel), observer) => ended,
        never = readiness::publish(&*subnets, observer) => match never {},
    }
}

/// Runs networks on an open store.
async fn follow_store(
    settings: &DaemonConfig,
    kernel: &Arc<NetlinkKernel>,
    subnets: &Arc<dyn SubnetManager>,
    (holder, go_flannel): (HolderId, &GoFlannel),
    observer: &Observer,
) -> Result<Infallible, Error> {
    // Published before the first lease is asked for.
    let announced = OnceCell::new();
    // The lease of the last network, which lasts until the next one has it.
    let mut held: Option<Lease> = None;
    let mut has_run = false;
    // What the last network was built from.
    let mut last: Option<(Config, ExternalInterface)> = None;
    loop {
        let start = async || {
            let started = start(
                settings,
                kernel,
                subnets,
                &announced,
                state::identity(holder),
                last.as_ref(),
            )
            .await;
            started.inspect_err(|error| observer.waits_for(error.to_string()))
        };
        let build = async {
            if has_run {
                tokio::time::sleep(REBUILD_PAUSE).await;
            }
            let patience = Patience { has_run, refusals_pass: settings.store.refusals_pass() };
            patiently(&**subnets, patience, start).await
        };
        let ready = holding(&**subnets, held.as_ref(), build).await?;
        has_run = true;
        last = Some((ready.config.clone(), ready.chosen.iface.clone()));
        held = (!ready.lapsed).then(|| ready.network.handle().lease);
        let reason = run_network(settings, &**subnets, ready, go_flannel, observer).await?;
        tracing::info!("building the network anew: {reason}");
    }
}

/// The kernel, and whether to use its nexthop objects.
fn open_kernel(settings: &DaemonConfig) -> Result<NetlinkKernel, Error> {
    let kernel = NetlinkKernel::open()?;
    match settings.nexthop_objects {
        NexthopObjects::Off => Ok(kernel.without_nexthops()),
        NexthopObjects::On if !kernel.nexthop_ids(&Footprint::default())?.usable => {
            Err(Error::NoNexthopObjects)
        }
        NexthopObjects::Auto | NexthopObjects::On => Ok(kernel),
    }
}

/// A network that can run.
struct Ready {
    config: Config,
    backend: &'static dyn Backend,
    network: HostNetwork,
    views: watch::Receiver<View>,
    /// It leads to the peers, but this node has no lease: its time ran out, and the store does not answer.
    lapsed: bool,
    /// The config comes from the cache.
    cached: bool,
    /// This daemon has built none before.
    first: bool,
    chosen: Chosen,
    validator: ConfigValidator,
}

impl Ready {
    /// The network as those see it who look on.
    fn running(&self, backends: &Backends, rulebook: watch::Receiver<Rulebook>) -> Running {
        Running {
            config: self.config.clone(),
            backend: self.backend.kind(),
            datapath: backends.datapath(&self.config),
            links: backends.links(self.chosen.iface.name, &self.config),
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

/// Asks the store for everything that a network is built from, and builds it.
async fn start(
    settings: &DaemonConfig,
    kernel: &Arc<NetlinkKernel>,
    subnets: &Arc<dyn SubnetManager>,
    announced: &OnceCell<()>,
    identity: String,
    last: Option<&(Config, ExternalInterface)>,
) -> Result<Ready, Error> {
    let (last, used) = last.map(|(config, iface)| (config, iface.clone())).unzip();
    let stored = stored(&**subnets, last).await?;
    let cached = subnets.store_status().confirmed.is_none();
    let hints = subnets.hints().await?;
    let views = subnets.watch_leases().await?;
    // Before anything that may end this start, and the next one, and the next.
    announced
        .get_or_try_init(|| {
            let footprint = settings.backends.footprint(&stored);
            let in_place = in_place(Arc::clone(kernel) as Arc<dyn Kernel>, footprint);
            readiness::announce(&**subnets, in_place)
        })
        .await?;
    let validator = ConfigValidator::new(kernel, settings, &hints, views.clone(), used);
    let (config, chosen) = validator.usable(stored, last).await?;
    let backend = settings.backends.find(&config.backend.kind)?;
    let lapsed = hints.lapsed.is_some();
    let host =
        Host::new(chosen.iface.clone(), Arc::clone(kernel) as Arc<dyn Kernel>, Arc::clone(subnets))
            .with_machine_id(identity)
            .with_secrets(Arc::new(FileSecrets::new(&settings.state_dir)));
    let drop_unused_addresses = settings.ip_blackhole_route;
    if drop_unused_addresses && !backend.footprint(&config, None)?.blackholes {
        let kind = backend.kind();
        tracing::warn!(
            "--ip-blackhole-route has no effect: backend {kind}: it leaves routes to others"
        );
    }
    let join = JoinOptions { lapsed: hints.lapsed, drop_unused_addresses };
    let network = host.join(backend, &config, join).await?;
    tracing::info!(networks = ?config.pod_networks().collect::<Vec<_>>(), backend = backend.kind(), "network config");
    let iface = &host.uplink;
    tracing::info!(
        "external interface {}: {} ({}; MTU {})",
        iface.name,
        addresses_of(iface),
        iface.reason,
        iface.mtu
    );
    let first = last.is_none();
    let validator = validator.using(&chosen.iface);
    Ok(Ready { config, backend, network, views, lapsed, cached, first, chosen, validator })
}

/// The network config of the store; where that has no good one, the `last` one stays in force, which the store tells.
async fn stored(subnets: &dyn SubnetManager, last: Option<&Config>) -> Result<Config, Error> {
    use flannel_core::Error as Cause;

    match (subnets.network_config().await, last) {
        (Err(Cause::NoConfig { .. } | Cause::Config { .. }), Some(last)) => Ok(last.clone()),
        (stored, _) => Ok(stored?),
    }
}

/// Whether anything of an earlier run's network is in the kernel. After a boot nothing is.
async fn in_place(kernel: Arc<dyn Kernel>, footprint: Footprint) -> bool {
    let look = move || {
        // Whoever puts nothing there lacks nothing. A kernel that cannot be read has not been looked at.
        footprint == Footprint::default()
            || !kernel.snapshot(&footprint).is_ok_and(|there| there.is_empty())
    };
    tokio::task::spawn_blocking(look)
        .await
        .unwrap_or_else(|panic| std::panic::resume_unwind(panic.into_panic()))
}

/// One network, from its start until something it was built from changes: the reason.
async fn run_network(
    settings: &DaemonConfig,
    subnets: &dyn SubnetManager,
    ready: Ready,
    go_flannel: &GoFlannel,
    observer: &Observer,
) -> Result<String, Error> {
    warn_if_stale(subnets, &ready.views.borrow());
    let (settled, rules) = watch::channel(false);
    let (book, rulebook) = watch::channel(settings.firewall.rulebook());
    let running = ready.running(&settings.backends, rulebook);
    let responder = server::serve(running.probe_server(settings.control.doctor_port));
    let _running = observer.running(running);
    let Ready { config, backend, network, views, lapsed, cached, first, chosen, validator } = ready;
    let handle = network.handle();
    let own = handle.lease.subnets;
    let firewall = async {
        if lapsed {
            return Ok(std::future::pending().await);
        }
        settings.firewall.keep(&config, &own, first, (settled, book)).await
    };
    let looks = look_around(observer, rules.clone(), lapsed);
    let judge = async |to: &Config| validator.judge(to, Some(&config)).await.map(drop);
    // What the next network would be built from may be another config, which waits for nothing else.
    let judge_anew = async || {
        let next = stored(subnets, Some(&config)).await?;
        validator.usable(next, Some(&config)).await.map(drop)
    };
    let hold = async {
        if lapsed {
            return until_live(subnets, own, views.clone(), &judge_anew, observer).await;
        }
        publish(settings, &config, &handle, rules, (go_flannel, observer)).await?;
        tracing::info!(
            lease = %own, backend = backend.kind(), mtu = handle.mtu,
            subnet_file = %settings.subnet_file.display(), "running"
        );
        hold(subnets, &handle.lease).await
    };
    let uplink = chosen.iface.name;
    let (kernel, footprint) = (chosen.kernel.clone(), backend.footprint(&config, Some(uplink))?);
    let old_networks = OldNetworks::new(&settings.state_dir);
    let recorded = old_networks.record(&config).await;
    tokio::select! {
        never = old_networks.clear(recorded, kernel.clone(), footprint.clone(), handle.status.clone()) => match never {},
        never = go_flannel.clear(kernel, (footprint, &config), handle.status.clone()) => match never {},
        ended = network.run(views.clone()) => match ended? {
            Ended::Rebuild(reason) => Ok(reason),
            ended => Err(Error::Stopped(format!("{ended:?}"))),
        },
        reason = hold => reason,
        reason = changed_config::to_apply(subnets, (&config, cached), &judge, observer) => reason,
        reason = chosen.changed(&config, &judge_anew, observer) => Ok(reason),
        never = firewall => match never? {},
        never = log_status(handle.status.clone()) => match never {},
        never = observer.follow(views.clone()) => match never {},
        never = looks => match never {},
        never = responder => match never {},
    }
}

/// Without a lease of its own a network lasts until the store can be asked for one, and the next network can be built: the
/// reason.
async fn until_live(
    subnets: &dyn SubnetManager,
    own: Subnets,
    mut views: watch::Receiver<View>,
    judge: impl AsyncFn() -> Result<(), Error>,
    observer: &Observer,
) -> Result<String, Error> {
    tracing::warn!(
        lease = %own,
        "this node's lease has run out: peers are kept in place, its own subnet is not, until {} answers",
        subnets.store_status().store
    );
    if views.wait_for(|view| matches!(view.origin, Origin::Live { .. })).await.is_err() {
        // Nobody follows the store any more, which the network itself tells.
        std::future::pending::<()>().await;
    }
    let mut said = None;
    while let Err(error) = judge().await {
        // It may have gone again, which is no news.
        let gone = error.is_of_store();
        let why = (!gone).then(|| error.to_string());
        if let Some(why) = why.as_ref().filter(|why| said.as_ref() != Some(*why)) {
            tracing::warn!(
                "the store answers, but no lease is asked for, since no network could be built: {why}"
            );
        }
        observer.cannot_follow(why.clone());
        said = why.or(said);
        tokio::time::sleep(if gone { STORE_AGAIN } else { SECOND_THOUGHT }).await;
    }
    Ok("the store answers, and can be asked for a lease".to_owned())
}

/// Lets pods start: they do because of the subnet file, and find the rules and the tunnel there. What makes their bridge would otherwise
/// have Linux take the tunnel's IPv6 address for the anycast address of the bridge's subnet, which no TCP connection is made to.
async fn publish(
    settings: &DaemonConfig,
    config: &Config,
    handle: &NetworkHandle,
    rules: watch::Receiver<bool>,
    (go_flannel, observer): (&GoFlannel, &Observer),
) -> Result<(), Error> {
    rules_and_tunnel(rules, handle.status.clone()).await;
    let env = subnet_env(settings, config, handle);
    let (path, go_flannel) = (settings.subnet_file.clone(), go_flannel.clone());
    run_blocking_in_order(move || env.write_atomic(&path).map(|()| go_flannel.wrote_subnet_file()))
        .await?;
    observer.subnet_file_written();
    Ok(())
}

/// Waits until they are there, but not for ever.
async fn rules_and_tunnel(
    mut rules: watch::Receiver<bool>,
    mut status: watch::Receiver<Arc<Status>>,
) {
    // What these return keeps the channel's senders waiting.
    let there = async {
        drop(rules.wait_for(|settled| *settled).await);
        drop(status.wait_for(|status| status.own_in_place).await);
    };
    let _ = tokio::time::timeout(RULES, there).await;
}

/// Says once what about this host may stand in the way, when firewall rules are in place, or cannot be.
async fn look_around(
    observer: &Observer,
    mut rules: watch::Receiver<bool>,
    lapsed: bool,
) -> Infallible {
    if !lapsed {
        let _ = tokio::time::timeout(RULES, rules.wait_for(|settled| *settled)).await;
    }
    if let Some(network) = observer.snapshot().network {
        observer.look(&network).await.findings.iter().for_each(preflight::log);
    }
    std::future::pending().await
}

/// Leases of an earlier run are put in place, and said to be no more than that.
fn warn_if_stale(subnets: &dyn SubnetManager, view: &View) {
    let status = subnets.store_status();
    if let (Origin::Cached { written: Some(written) }, None) = (view.origin, status.confirmed) {
        let age = written.elapsed().unwrap_or_default().as_secs();
        tracing::warn!(
            "stale: {} leases from the cache, written {age} s ago, are put in place; nothing is deleted until {} answers",
            view.leases.len(),
            status.store
        );
    }
}

/// What the last run wrote; a file that cannot be read is as good as none, but said.
fn previous_subnets(settings: &DaemonConfig) -> Option<Subnets> {
    match SubnetEnv::read(&settings.subnet_file) {
        Ok(env) => env.previous(),
        Err(SubnetEnvError::Io { source, .. }) if source.kind() == ErrorKind::NotFound => None,
        Err(error) => {
            tracing::warn!("the previous subnet is not known: {error}");
            None
        }
    }
}

/// The addresses by which a lease is known to be this host's.
fn addresses(kernel: &NetlinkKernel, settings: &DaemonConfig) -> Result<Vec<IpAddr>, Error> {
    let interfaces = kernel.interfaces()?;
    let local = interfaces.iter().flat_map(|interface| &interface.addresses).map(|a| a.address);
    Ok(settings.interface.public.values().copied().chain(local).collect())
}

fn subnet_env(settings: &DaemonConfig, config: &Config, handle: &NetworkHandle) -> SubnetEnv {
    SubnetEnv {
        networks: config.pod_networks().collect(),
        subnets: handle.lease.subnets.iter().collect(),
        mtu: handle.mtu,
        ip_masq: settings.firewall.masquerade,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "helpers of tests are tests")]
mod tests {
    use flannel_core::testing::{FakeKernel, Operation};
    use tokio::time::Instant;

    use super::*;

    #[tokio::test]
    async fn what_cannot_be_looked_at_counts_as_in_place() {
        let footprint =
            |text: &str| flannel_backends::all().footprint(&Config::parse(text).unwrap());
        let vxlan = footprint(r#"{"Network":"10.1.0.0/16","Backend":{"Type":"vxlan"}}"#);
        let kernel = FakeKernel::with_uplink("eth0");
        assert!(!in_place(Arc::new(kernel.clone()), vxlan.clone()).await);
        kernel.fail(1, 105, |call| call.operation == Operation::Snapshot);
        assert!(in_place(Arc::new(kernel.clone()), vxlan).await);
        // Nobody puts anything there, or nobody knows what.
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

    /// Firewall rules that never come, and a tunnel that cannot be had, keep pods back for a while only.
    #[tokio::test(start_paused = true)]
    async fn rules_and_tunnel_are_waited_for_but_not_for_ever() {
        for (settled, tunnel) in [(true, true), (true, false), (false, true), (false, false)] {
            let (_rulebook, rules) = watch::channel(settled);
            let mut status = Status::default();
            status.own_in_place = tunnel;
            let (_network, status) = watch::channel(Arc::new(status));
            let start = Instant::now();
            tokio::time::timeout(2 * RULES, rules_and_tunnel(rules, status)).await.unwrap();
            let (took, due) =
                (start.elapsed(), if settled && tunnel { Duration::ZERO } else { RULES });
            assert!(due <= took && took < due + RULES, "{settled} {tunnel}: {took:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn rules_and_tunnel_end_the_wait_as_soon_as_they_are_there() {
        let (rulebook, rules) = watch::channel(false);
        let (network, status) = watch::channel(Arc::new(Status::default()));
        let start = Instant::now();
        let come = async {
            tokio::time::sleep(RULES / 4).await;
            rulebook.send(true).unwrap();
            tokio::time::sleep(RULES / 4).await;
            network.send_modify(|status| Arc::make_mut(status).own_in_place = true);
        };
        tokio::join!(rules_and_tunnel(rules, status), come);
        assert!(start.elapsed() < RULES * 3 / 4, "{:?}", start.elapsed());
    }
}
