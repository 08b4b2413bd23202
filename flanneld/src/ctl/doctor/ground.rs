//! What there is to be looked at: as the daemon says, or without it as store, cache and kernel do.

use std::time::{Duration, Instant};

use flannel_core::{Config, Dual, Family, Lease, LeaseSet, LinkName, Subnets};
use flannel_firewall::LegacyMemory;
use flannel_subnet::SubnetEnv;
use serde_json::Value;

use super::Diagnosis;
use super::mtu::Fault;
use super::peers::Target;
use crate::backends;
use crate::ctl::client::Client;
use crate::ctl::options::Global;
use crate::ctl::{Failure, Result, offline, status};
use crate::preflight::{self, Finding, Look, Scene};
#[cfg(feature = "etcd")]
use crate::problems::bring_back_etcd;
use crate::problems::{Problem, bring_back_dir};
use crate::registry::RegistryUrl;
use crate::report::{PeerReport, Report, StoreReport};

/// So long a daemon may be at work before that is told as a fault.
const MOMENT: Duration = Duration::from_secs(2);

/// What is to be looked at.
#[derive(Debug, Default)]
pub(super) struct Ground {
    pub(super) daemon: bool,
    /// Where the daemon's leases are kept.
    pub(super) store: Option<String>,
    /// It is known which devices there should be.
    pub(super) known: bool,
    pub(super) tunnels: Dual<LinkName>,
    pub(super) uplink: Option<LinkName>,
    /// Packets of pods go between some nodes as they are, without a tunnel.
    pub(super) bare: bool,
    /// What pods may send, in bytes.
    pub(super) mtu: Option<u32>,
    pub(super) targets: Vec<Target>,
}

impl Ground {
    /// The families that pods have addresses of, as tunnels show, or peers where there are none.
    pub(super) fn families(&self) -> Vec<Family> {
        let of_peers =
            |family| self.targets.iter().flat_map(|t| &t.subnets).any(|s| s.family() == family);
        let has = |family: &Family| match self.tunnels.is_empty() {
            true => of_peers(*family),
            false => self.tunnels[*family].is_some(),
        };
        Family::BOTH.into_iter().filter(has).collect()
    }
}

/// As the daemon says.
pub(super) async fn with_daemon(
    client: &Client,
    value: &Value,
    diagnosis: &mut Diagnosis,
) -> Result<Ground> {
    let report = settled(client, status::report(value)?).await?;
    let (store, other): (Vec<_>, Vec<_>) =
        report.problems.iter().partition(|p| p.text.starts_with("the store "));
    let finding = |check: &'static str| {
        move |problem: &Problem| {
            let made = if problem.is_error() { Finding::error } else { Finding::warning };
            Finding { mend: problem.hint.clone(), ..made(check, problem.text.as_str()) }
        }
    };
    diagnosis.layer(
        "store",
        report.store.as_ref().map_or_else(|| "not opened yet".to_owned(), store_text),
        store.into_iter().map(finding("store")).map(Fault::from).collect(),
    );
    let word = if report.ready { "ready" } else { "not ready" };
    diagnosis.layer(
        "daemon",
        format!("flanneld {}, {word}", report.daemon.version),
        other.into_iter().map(finding("daemon")).map(Fault::from).collect(),
    );
    let Some(network) = report.network else {
        diagnosis.unknown("host", "no network runs");
        return Ok(Ground {
            daemon: true,
            store: report.store.map(|store| store.name),
            ..Ground::default()
        });
    };
    diagnosis.host(Look { findings: report.findings, unread: report.unread });
    let peers = client.ask("GET", "/v1/peers")?;
    let peers: Vec<PeerReport> = serde_json::from_value(peers["peers"].clone()).unwrap_or_default();
    let device = |family: Family| network.devices.get(&family.to_string())?.parse().ok();
    Ok(Ground {
        daemon: true,
        store: report.store.map(|store| store.name),
        known: true,
        tunnels: Dual::from_fn(device),
        uplink: network.interface.name.parse().ok(),
        bare: network.bare_routes,
        mtu: Some(network.mtu),
        targets: peers.iter().map(target).collect(),
    })
}

/// The report when the daemon has done what it is at, or is at it for longer than a moment.
async fn settled(client: &Client, mut report: Report) -> Result<Report> {
    let at_it = |report: &Report| {
        report
            .network
            .as_ref()
            .is_some_and(|network| network.live && !network.in_sync && network.failing.total == 0)
    };
    let start = Instant::now();
    while at_it(&report) && start.elapsed() < MOMENT {
        tokio::time::sleep(MOMENT / 20).await;
        report = status::report(&client.ask("GET", "/v1/status")?)?;
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
        state: peer.state.clone(),
    }
}

/// As far as store, cache and kernel lead.
pub(super) async fn without_daemon(
    global: &Global,
    iface: &[String],
    failure: &Failure,
    diagnosis: &mut Diagnosis,
) -> Ground {
    let (text, leases) = match offline::ask_store(global).await {
        Ok((config, leases)) => {
            let text = format!("{} answers, {} leases", offline::store_name(global), leases.len());
            diagnosis.layer("store", text, Vec::new());
            (config.map_err(|error| error.to_string()), leases)
        }
        Err(error) => {
            let name = offline::store_name(global);
            let finding = Finding::error("store", format!("{name} does not answer: {error}"));
            diagnosis.layer(
                "store",
                format!("{name} does not answer"),
                vec![finding.mend(store_mend(global)).into()],
            );
            let saved = offline::saved(global);
            let leases = saved.iter().flat_map(|saved| saved.leases.iter().cloned()).collect();
            // It was told of; what was kept comes below.
            (Err(String::new()), leases)
        }
    };
    let finding = Finding::error("daemon", failure.to_string()).mend("systemctl start flanneld");
    diagnosis.layer("daemon", "does not run", vec![finding.into()]);
    let parsed = text.and_then(|text| {
        Config::parse(&text.text)
            .map_err(|error| format!("network config in {}: {error}", text.location))
    });
    if let Err(error) = &parsed
        && !error.is_empty()
    {
        let finding = Finding::error("config", error.as_str()).mend("flannelctl config set FILE");
        diagnosis.faults.push(finding.into());
    }
    // What the last daemon ran with leads on.
    let kept = || offline::saved(global).and_then(|saved| Config::parse(&saved.config?.text).ok());
    let Some(config) = parsed.ok().or_else(kept) else {
        diagnosis.unknown("host", "there is no network config that could be read");
        return Ground::default();
    };
    of_config(global, iface, (config, leases), diagnosis).await
}

/// What brings a store back.
fn store_mend(global: &Global) -> String {
    match &global.registry {
        Some(RegistryUrl::Dir(location)) => bring_back_dir(location.path.display()),
        #[cfg(feature = "etcd")]
        Some(RegistryUrl::Etcd) => bring_back_etcd(&global.etcd.options().endpoints.join(",")),
        None => "flannelctl --registry URL doctor".to_owned(),
    }
}

async fn of_config(
    global: &Global,
    iface: &[String],
    (config, leases): (Config, LeaseSet),
    diagnosis: &mut Diagnosis,
) -> Ground {
    let own = offline::own_subnets(global);
    let tunnels = backends::devices(&config);
    let uplink = offline::uplink(&config, iface);
    let is_own = |lease: &Lease| Some(lease.subnets) == own;
    let public = leases
        .iter()
        .find(|lease| is_own(lease))
        .map(|lease| lease.attrs.public)
        .unwrap_or_default();
    match uplink {
        Some(uplink) => {
            let scene =
                Scene { config: config.clone(), uplink, own, public, leases: leases.clone() };
            diagnosis.host(preflight::look(scene, &LegacyMemory::default()).await);
        }
        None => diagnosis
            .unknown("host", "no interface fits; --iface names the one that the daemon uses"),
    }
    let state = |subnets: &Subnets| {
        let inside = |subnet| config.pod_networks().any(|network| network.covers(&subnet));
        if subnets.iter().all(inside) { offline::UNKNOWN } else { "not believed" }
    };
    let target = |lease: &std::sync::Arc<Lease>| Target {
        key: lease.subnets.to_string(),
        subnets: lease.subnets.iter().collect(),
        public: lease.attrs.public,
        backend: lease.attrs.backend_type.to_string(),
        state: state(&lease.subnets).to_owned(),
    };
    Ground {
        daemon: false,
        store: None,
        known: true,
        tunnels,
        uplink,
        bare: backends::datapath(&config).bare,
        mtu: SubnetEnv::read(&global.subnet_file).ok().map(|env| env.mtu),
        targets: leases.iter().filter(|lease| !is_own(lease)).map(target).collect(),
    }
}
