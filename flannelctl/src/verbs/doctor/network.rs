//! The network to examine: from the daemon, or without it from the store, the cache and the kernel.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use flannel_api::{
    Client, Deployment, NetworkReport, PathReport, PathsSummary, PeerReport, PeerState, Problem,
    ProblemCause, StatusReport, StoreReport, TransportReport,
};
use flannel_core::address::Dual;
use flannel_core::backend::{Datapath, Transport};
use flannel_core::lease::{LeaseSet, Offer};
use flannel_core::object::MacAddr;
use flannel_core::subnet::{StoreFailure, StoreReason};
use flannel_core::{Config, Lease, Remedy, Subnet};
use flannel_doctor::checks::host::{CheckedNetwork, HostReport, check_host};
use flannel_doctor::diagnosis::contest::contest;
use flannel_doctor::diagnosis::mtu::Fault;
use flannel_doctor::finding::Check;
use flannel_doctor::inputs::network::Target;
use flannel_doctor::store::Lock;
use flannel_doctor::{Examination, Finding, Layer, LayerState, Network};
use flannel_firewall::LegacyMemory;
use flannel_netlink::NetlinkKernel;
use flannel_netlink::iface::Selectors;
use flannel_subnet::{ConfigText, subnet_file};
use serde_json::Value;

use super::store::{ask_for_time, lock, slow};
use crate::error::Result;
use crate::options::Global;
use crate::verbs::paths::numbers;
use crate::{Context, offline};

/// The time in which a daemon must apply changes. If it takes longer, this is a fault.
pub(super) const SETTLE_TIME: Duration = Duration::from_secs(2);
/// The timeout of the store if no daemon runs.
pub(super) const PATIENCE: Duration = Duration::from_secs(4);

/// Adds the layers that the daemon reports on.
pub(super) async fn with_daemon(
    Context { client, global, .. }: Context<'_>,
    report: StatusReport,
    examination: &mut Examination,
) -> Result<Network> {
    let report = settled(client, report).await?;
    let deployment = report.daemon.deployment;
    let (store, other): (Vec<_>, Vec<_>) = report
        .problems
        .iter()
        .partition(|problem| matches!(problem.cause, ProblemCause::StoreUnreachable { .. }));
    let mut of_store: Vec<Finding> =
        store.into_iter().map(|problem| finding(Check::Store, problem)).collect();
    if let Some(StoreReport { name, error: None, .. }) = &report.store {
        of_store.extend(ask_for_time(global, name).await);
    }
    examination.layer(
        "store",
        report.store.as_ref().map_or_else(|| "not opened yet".to_owned(), store_text),
        of_store.into_iter().map(Fault::from).collect(),
    );
    let word = if report.ready { "ready" } else { "not ready" };
    let again = report.network.as_ref().and_then(|n| contest(&n.repairs, report.time));
    let of_daemon = other.into_iter().map(|problem| finding(Check::Daemon, problem)).chain(again);
    examination.layer(
        "daemon",
        format!("flanneld {}, {word}", report.daemon.version),
        of_daemon.map(Fault::from).collect(),
    );
    let Some(network) = report.network else {
        examination.unknown("host", "no network runs");
        return Ok(Network { daemon: true, deployment, ..Network::default() });
    };
    let findings = report.findings.into_iter().map(Finding::from).collect();
    examination.host(HostReport { findings, unread: report.unread });
    let peers = client.peers()?.peers;
    let mut targets: Vec<Target> = peers.iter().map(target).collect();
    if let Some(summary) = &network.paths {
        let state = match summary {
            PathsSummary { error: Some(_), .. } => LayerState::Unknown,
            PathsSummary { failing: 0, .. } => LayerState::Ok,
            _ => LayerState::Finding,
        };
        examination.layers.push(Layer { layer: "paths", state, text: numbers(summary) });
        // An older daemon has no probes.
        let paths = client.paths().map_or_else(|_| Vec::new(), |report| report.paths);
        note_paths(&mut targets, &paths);
    }
    Ok(Network {
        daemon: true,
        deployment,
        known: true,
        backend: network.lease_type.clone(),
        datapath: datapath(&network),
        uplink: network.interface.name.parse().ok(),
        mtu: Some(network.mtu),
        targets,
        published: Dual::default(),
    })
}

/// The finding on a problem that the daemon reports.
fn finding(check: Check, problem: &Problem) -> Finding {
    let remedy = problem.hint.clone().map(Remedy::Run);
    Finding { remedy, ..Finding::new(check, problem.severity, problem.text.as_str()) }
}

/// Adds the results of the daemon's probes. Peers with failing paths come first, so that the
/// examination asks them first.
fn note_paths(targets: &mut [Target], paths: &[PathReport]) {
    let failing: BTreeSet<&str> =
        paths.iter().filter(|path| path.since.is_some()).map(|path| path.key.as_str()).collect();
    let mtus: BTreeMap<_, u32> = paths
        .iter()
        .filter_map(|path| Some(((path.key.clone(), path.family.clone()), path.mtu?.into())))
        .collect();
    for target in &mut *targets {
        target.mtus =
            Dual::from_fn(|family| mtus.get(&(target.key.clone(), family.to_string())).copied());
    }
    targets.sort_by_key(|target| !failing.contains(target.key.as_str()));
}

/// The data path that the daemon reports.
fn datapath(network: &NetworkReport) -> Datapath {
    let mut datapath = Datapath::default();
    datapath.devices =
        Dual::from_fn(|family| network.devices.get(&family.to_string())?.parse().ok());
    datapath.overhead = Dual::from_fn(|family| network.overhead.get(&family.to_string()).copied());
    datapath.transports = network
        .transports
        .iter()
        .filter_map(|transport| match transport {
            TransportReport::Udp(port) => Some(Transport::Udp(*port)),
            TransportReport::Protocol(number) => Some(Transport::Protocol(*number)),
            _ => None,
        })
        .collect();
    datapath.bare = network.bare_routes;
    datapath
}

/// Waits until the daemon has applied its changes, at most `SETTLE_TIME`, and returns its report.
async fn settled(client: &Client, mut report: StatusReport) -> Result<StatusReport> {
    let is_applying = |report: &StatusReport| {
        report
            .network
            .as_ref()
            .is_some_and(|network| network.live && !network.in_sync && network.failing.total == 0)
    };
    let start = Instant::now();
    while is_applying(&report) && start.elapsed() < SETTLE_TIME {
        tokio::time::sleep(SETTLE_TIME / 20).await;
        report = client.status()?;
    }
    Ok(report)
}

fn store_text(store: &StoreReport) -> String {
    match (&store.error, store.answered) {
        (Some(error), _) => format!("{} does not answer: {error}", store.name),
        (None, Some(_)) => format!("{} answers", store.name),
        (None, None) => format!("{} has not answered yet", store.name),
    }
}

fn target(peer: &PeerReport) -> Target {
    Target {
        key: peer.key.clone(),
        subnets: peer.subnets.iter().filter_map(|text| text.parse().ok()).collect(),
        public: peer
            .public
            .iter()
            .filter_map(|text| text.parse::<std::net::IpAddr>().ok())
            .collect(),
        backend: peer.backend.clone(),
        state: peer.state,
        mtus: Dual::default(),
    }
}

/// Adds the layers of the store, the cache and the kernel.
pub(super) async fn without_daemon(
    context: Context<'_>,
    selectors: &Selectors,
    failure: &flannel_api::Error,
    examination: &mut Examination,
) -> Network {
    let global = context.global;
    let StoreState { text, leases } = store_layer(global, examination).await;
    let finding =
        Finding::error(Check::Daemon, failure.to_string()).with_remedy(Remedy::StartDaemon);
    examination.layer("daemon", "does not run", vec![finding.into()]);
    let parsed = text.map(|text| {
        let text = text?;
        Config::parse(&text.text)
            .map_err(|error| format!("network config in {}: {error}", text.location))
    });
    if let Some(Err(error)) = &parsed {
        let finding = Finding::error(Check::Config, error.as_str()).with_remedy(Remedy::SetConfig);
        examination.faults.push(finding.into());
    }
    // Use the config of the last daemon.
    let kept = || offline::saved(global).and_then(|saved| Config::parse(&saved.config?.text).ok());
    let Some(config) = parsed.and_then(Result::ok).or_else(kept) else {
        examination.unknown("host", "no network config can be read");
        return Network::default();
    };
    of_config(context, selectors, config, leases, examination).await
}

/// The state of the store, or of the cache if the store does not answer.
struct StoreState {
    /// The network config, or the reason why it cannot be read. `None` if the store does not
    /// answer.
    text: Option<Result<ConfigText, String>>,
    leases: LeaseSet,
}

/// Asks the store, and adds its layer.
async fn store_layer(global: &Global, examination: &mut Examination) -> StoreState {
    let start = Instant::now();
    match offline::ask_store(global, PATIENCE).await {
        Ok((config, leases)) => {
            let text = format!("{} answers, {} leases", offline::store_name(global), leases.len());
            let slow = slow(global, start.elapsed()).map(Fault::from);
            examination.layer("store", text, slow.into_iter().collect());
            StoreState { text: Some(config.map_err(|error| error.to_string())), leases }
        }
        Err(error) => {
            // The doctor gives up before the store names the process that it waits for.
            let error = match lock(global) {
                Lock::Held(by) => {
                    let holder = match &by {
                        Some(holder) => holder.to_string(),
                        None => "another process".to_owned(),
                    };
                    let text = format!("{error}: .lock: held by {holder}");
                    StoreReason::new(text, StoreFailure::Locked { by })
                }
                Lock::Free => error,
            };
            let name = offline::store_name(global);
            let finding = Finding::error(Check::Store, format!("{name} does not answer: {error}"));
            let remedy = store_remedy(global, error.failure);
            examination.layer(
                "store",
                format!("{name} does not answer"),
                vec![finding.with_remedy(remedy).into()],
            );
            let saved = offline::saved(global);
            let leases = saved.iter().flat_map(|saved| saved.leases.iter().cloned()).collect();
            StoreState { text: None, leases }
        }
    }
}

/// What repairs the store, by the cause of the failure of a request to it.
fn store_remedy(global: &Global, failure: StoreFailure) -> Remedy {
    match offline::store_kind(global) {
        Some(store) => Remedy::RestoreStore { store, failure },
        None => Remedy::run("flannelctl --registry URL doctor"),
    }
}

async fn of_config(
    Context { global, backends, .. }: Context<'_>,
    selectors: &Selectors,
    config: Config,
    leases: LeaseSet,
    examination: &mut Examination,
) -> Network {
    let own = offline::own_subnets(global);
    let kernel = NetlinkKernel::open().ok();
    let uplink = kernel.and_then(|kernel| offline::uplink(&kernel, &config, selectors).ok());
    let mtu = subnet_file::read(&global.subnet_file).ok().map(|env| env.mtu);
    let is_own = |lease: &Lease| Some(lease.subnets) == own;
    let offer = leases.iter().find(|lease| is_own(lease)).map(|lease| &lease.attrs.preferred);
    let public = offer.map(|offer| offer.public).unwrap_or_default();
    let published = offer.map(published).unwrap_or_default();
    match uplink {
        Some(uplink) => {
            let links = backends.links(uplink, &config);
            let datapath = backends.datapath(&config);
            let checked = CheckedNetwork {
                config: config.clone(),
                links,
                uplink,
                own,
                public,
                leases: leases.clone(),
                mtu,
                transports: datapath.transports,
                outer: datapath.outer,
            };
            examination.host(check_host(checked, &LegacyMemory::default()).await);
        }
        None => examination.unknown(
            "host",
            "no interface is suitable; name the interface of the daemon with --iface",
        ),
    }
    Network {
        daemon: false,
        deployment: Deployment::default(),
        known: true,
        backend: backends.lease_type(&config).to_owned(),
        datapath: backends.datapath(&config),
        uplink,
        mtu,
        targets: leases
            .iter()
            .filter(|lease| !is_own(lease))
            .map(|lease| target_of_lease(lease, &config))
            .collect(),
        published,
    }
}

/// The target of a lease, by the config alone.
fn target_of_lease(lease: &Lease, config: &Config) -> Target {
    let is_inside = |subnet: Subnet| config.pod_networks().any(|network| network.covers(&subnet));
    let are_inside = lease.subnets.iter().all(is_inside);
    Target {
        key: lease.subnets.to_string(),
        subnets: lease.subnets.iter().collect(),
        public: lease.attrs.preferred.public,
        backend: lease.attrs.preferred.kind.to_string(),
        state: if are_inside { PeerState::Unknown } else { PeerState::Rejected },
        mtus: Dual::default(),
    }
}

/// The MAC addresses of the tunnels in a lease: those in its backend data, in a field of any name.
fn published(offer: &Offer) -> Dual<MacAddr> {
    Dual::from_fn(|family| {
        let data: Value = serde_json::from_str(offer.data[family].as_deref()?).ok()?;
        data.as_object()?.values().find_map(|value| value.as_str()?.parse().ok())
    })
}
