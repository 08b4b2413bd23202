//! The state without a daemon: the files of the last daemon, and the store.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use flannel_api::{Deployment, Finding, PeerReport, PeerState, VERSION, seconds};
use flannel_backends::Backends;
use flannel_core::lease::LeaseSet;
use flannel_core::object::LinkName;
use flannel_core::subnet::{StoreFailure, StoreKind, StoreReason};
use flannel_core::{Config, Error as CoreError, Kernel, SubnetEnv, Subnets};
use flannel_doctor::checks::host::{CheckedNetwork, check_host};
use flannel_doctor::finding::reports;
use flannel_firewall::LegacyMemory;
use flannel_netlink::NetlinkKernel;
use flannel_netlink::iface::Selectors;
use flannel_options::{RegistryUrl, state_dir};
use flannel_subnet::{Cache, ConfigText, Registry, Saved, subnet_file};
use serde::Serialize;

use crate::error::{Error, Result};
use crate::options::Global;
use crate::terminal::{Style, Terminal, span};
use crate::{Context, status};

/// The usual timeout of the store.
const PATIENCE: Duration = Duration::from_secs(6);

/// Reads the network config, if there is one, and the leases from the store, within a time limit.
pub(crate) async fn ask_store(
    global: &Global,
    patience: Duration,
) -> Result<(flannel_core::Result<ConfigText>, LeaseSet), StoreReason> {
    let asked = async {
        let registry = global.open_registry().await?;
        // A store without a config may have leases.
        let config = match registry.config().await {
            Err(error) if !matches!(error, CoreError::NoConfig { .. }) => return Err(error.into()),
            config => config,
        };
        let leases = registry.list().await?.entries.into_iter().map(|entry| entry.lease).collect();
        Ok::<_, Error>((config, leases))
    };
    match tokio::time::timeout(patience, asked).await {
        Ok(asked) => asked.map_err(|error| {
            let failure = match &error {
                Error::Core(error) => error.store_failure(),
                _ => StoreFailure::Other,
            };
            StoreReason::new(error.to_string(), failure)
        }),
        Err(_) => Err(format!("no answer for {} s", patience.as_secs()).into()),
    }
}

/// The cluster without a daemon.
#[derive(Debug, Default)]
pub(crate) struct Known {
    pub(crate) config: Option<Config>,
    pub(crate) leases: LeaseSet,
    /// The reason why the values may be old, without a full stop. `None` if the store gave them.
    pub(crate) stale: Option<String>,
}

impl Known {
    /// Reads the store, or if it does not answer, the last daemon's cache.
    ///
    /// # Errors
    /// Neither can be read. The text has no full stop.
    pub(crate) async fn of(global: &Global) -> Result<Self, String> {
        let parsed = |text: ConfigText| Config::parse(&text.text).ok();
        let kept = saved(global);
        let error = match ask_store(global, PATIENCE).await {
            Ok((config, leases)) => {
                let config = config.ok().or_else(|| kept?.config).and_then(parsed);
                return Ok(Self { config, leases, stale: None });
            }
            Err(error) => format!("{} does not answer: {error}", store_name(global)),
        };
        let Some(kept) = kept else {
            return Err(format!("{error}; and no daemon has kept leases here"));
        };
        let age = SystemTime::now().duration_since(kept.written).unwrap_or_default().as_secs_f64();
        let stale =
            format!("{error}; the leases are those that the last daemon kept {} ago", span(age));
        Ok(Self { config: kept.config.and_then(parsed), leases: kept.leases, stale: Some(stale) })
    }
}

/// The name of the store.
pub(crate) fn store_name(global: &Global) -> String {
    global.registry.as_ref().map_or_else(|| "--registry".to_owned(), ToString::to_string)
}

/// The kind of the store; `None` if the options name none.
pub(crate) fn store_kind(global: &Global) -> Option<StoreKind> {
    match global.registry.as_ref()? {
        RegistryUrl::Dir(location) => {
            Some(StoreKind::Directory { path: location.path.display().to_string() })
        }
        #[cfg(feature = "etcd")]
        RegistryUrl::Etcd => {
            flannel_options::open_etcd(global.etcd.options()).ok().map(|etcd| etcd.kind())
        }
        #[cfg(not(feature = "etcd"))]
        RegistryUrl::Etcd => None,
    }
}

/// The store by the name that a daemon with these options has for it. `None` if the options name
/// no store.
pub(crate) fn store_url(global: &Global) -> Option<String> {
    match global.registry.as_ref()? {
        #[cfg(feature = "etcd")]
        RegistryUrl::Etcd => {
            flannel_options::open_etcd(global.etcd.options()).ok().map(|etcd| etcd.to_string())
        }
        url => Some(url.to_string()),
    }
}

/// The set of leases that a daemon cached; `None` if the cache does not exist or cannot be read.
pub(crate) fn saved(global: &Global) -> Option<Saved> {
    Cache::open(state_dir::leases(&global.state_dir)).load().ok()
}

/// The subnets of the last daemon here. The subnet file is gone after a reboot, the cache is not.
pub(crate) fn own_subnets(global: &Global) -> Option<Subnets> {
    let previous = subnet_file::previous(&global.subnet_file).ok().flatten();
    previous.or_else(|| Some(saved(global)?.own?.0.subnets))
}

/// The state that the last daemon left.
#[derive(Debug)]
pub(crate) struct LeftState {
    /// Why no daemon answers.
    failure: String,
    pub(crate) findings: Vec<Finding>,
    subnet_file: PathBuf,
    /// The content of the subnet file, or the reason why it cannot be read.
    subnets: Result<SubnetEnv, String>,
    /// The cached leases, or the reason why they cannot be read.
    saved: Result<Saved, String>,
}

/// The state that the last daemon left, as JSON.
#[derive(Serialize)]
pub(crate) struct DownReport {
    version: u32,
    running: bool,
    ready: bool,
    reason: String,
    findings: Vec<Finding>,
    #[serde(skip_serializing_if = "Option::is_none")]
    subnets: Option<Vec<String>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    mtu: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    leases: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    leases_kept: Option<f64>,
}

/// The leases of other nodes without a daemon, as JSON.
#[derive(Debug, Serialize)]
pub(crate) struct LeftPeers {
    version: u32,
    running: bool,
    pub(crate) peers: Vec<PeerReport>,
    /// Why they may be old, without a full stop. `None` if the store gave them.
    pub(crate) stale: Option<String>,
}

impl LeftState {
    /// Reads the files of the last daemon, and checks this host.
    pub(crate) async fn read(
        Context { global, backends, .. }: Context<'_>,
        failure: &flannel_api::Error,
    ) -> Self {
        let cache = Cache::open(state_dir::leases(&global.state_dir));
        Self {
            failure: failure.to_string(),
            findings: findings(global, backends).await,
            subnet_file: global.subnet_file.clone(),
            subnets: subnet_file::read(&global.subnet_file).map_err(|error| error.to_string()),
            saved: cache.load().map_err(|error| error.to_string()),
        }
    }

    /// The state as JSON.
    pub(crate) fn report(&self) -> DownReport {
        let subnets = self.subnets.as_ref().ok();
        let saved = self.saved.as_ref().ok();
        DownReport {
            version: VERSION,
            running: false,
            ready: false,
            reason: self.failure.clone(),
            findings: self.findings.clone(),
            subnets: subnets.map(|env| words(env.subnets.values())),
            mtu: subnets.map(|env| env.mtu),
            leases: saved.map(|saved| saved.leases.len()),
            leases_kept: saved.map(|saved| seconds(saved.written)),
        }
    }
}

fn words<T: ToString>(values: impl Iterator<Item = T>) -> Vec<String> {
    values.map(|value| value.to_string()).collect()
}

impl LeftState {
    /// The page of `status` without a daemon.
    pub(crate) fn page(&self, terminal: &Terminal) -> String {
        let mut text = format!("flanneld  {}\n\n", terminal.style(Style::Bad, "NOT RUNNING"));
        text += &terminal.field("error", Style::Bad, &self.failure);
        text += &terminal.field(
        "",
        Style::Plain,
        "try: systemctl start flanneld; or --control-socket FILE, if it was started with another \
         one",
    );
        text += &status::findings(&self.findings, terminal);
        text.push('\n');
        let lease = match &self.subnets {
            Ok(env) => format!(
                "{}, pods may send {} bytes, according to {}",
                words(env.subnets.values()).join(", "),
                env.mtu,
                self.subnet_file.display()
            ),
            Err(error) => format!("not known: {error}"),
        };
        text += &terminal.field("last lease", Style::Bold, &lease);
        let leases = match &self.saved {
            Ok(saved) => {
                let age = SystemTime::now().duration_since(saved.written).unwrap_or_default();
                let age = span(age.as_secs_f64());
                format!("{}, from {}, saved {age} ago", saved.leases.len(), saved.store)
            }
            Err(error) => format!("none are kept: {error}"),
        };
        text += &terminal.field("leases", Style::Bold, &leases);
        text + &terminal.field(
            "data path",
            Style::Bold,
            "not managed while the daemon is down; flannelctl why ADDRESS asks the kernel",
        )
    }
}

/// Findings on this host for the network of the last daemon; none if that is not known.
async fn findings(global: &Global, backends: &Backends) -> Vec<Finding> {
    let Some(saved) = saved(global) else { return Vec::new() };
    let Some(config) = saved.config.and_then(|text| Config::parse(&text.text).ok()) else {
        return Vec::new();
    };
    let kernel = NetlinkKernel::open().ok();
    let Some(uplink) =
        kernel.and_then(|kernel| uplink(&kernel, &config, &Selectors::default()).ok())
    else {
        return Vec::new();
    };
    let own = own_subnets(global);
    let lease = own.and_then(|own| saved.leases.get(&own).cloned());
    let public = lease.map(|lease| lease.attrs.preferred.public).unwrap_or_default();
    let links = backends.links(uplink, &config);
    let mtu = subnet_file::read(&global.subnet_file).ok().map(|env| env.mtu);
    let datapath = backends.datapath(&config);
    let (transports, outer) = (datapath.transports, datapath.outer);
    let leases = saved.leases;
    let checked =
        CheckedNetwork { config, links, uplink, own, public, leases, mtu, transports, outer };
    let report = check_host(checked, &LegacyMemory::default()).await;
    reports(&report.findings, Deployment::default())
}

/// The interface that a daemon with these selectors chooses.
///
/// # Errors
/// No interface fits.
pub(crate) fn uplink(
    kernel: &NetlinkKernel,
    config: &Config,
    selectors: &Selectors,
) -> Result<LinkName> {
    let pod_networks = config.pod_networks().collect();
    let selectors = Selectors { pod_networks, ..selectors.clone() };
    let chosen = kernel.external_interface(&selectors, config.networks.families());
    let chosen = chosen.map_err(|error| {
        Error::Refused(format!("{error} (--iface names the interface that the daemon used)"))
    })?;
    Ok(chosen.name)
}

/// Every lease except this node's last one, from the store or the cache.
pub(crate) async fn peers(global: &Global) -> Result<LeftPeers> {
    let own = own_subnets(global);
    let Known { leases, stale, .. } = Known::of(global).await.map_err(Error::Refused)?;
    let others = leases.iter().filter(|lease| Some(lease.subnets) != own);
    let peers: Vec<PeerReport> =
        others.map(|lease| PeerReport::new(lease, PeerState::Unknown, None, None)).collect();
    Ok(LeftPeers { version: VERSION, running: false, peers, stale })
}

/// The network config in the store, or if that does not answer, in the last daemon's cache.
///
/// # Errors
/// There is none, or it is wrong.
pub(crate) async fn config(global: &Global) -> Result<Config> {
    let text = match read_config(global).await {
        Ok(text) => text,
        Err(failure) => match saved(global).and_then(|saved| saved.config) {
            Some(text) => text,
            None => return Err(failure),
        },
    };
    Ok(Config::parse(&text.text)
        .map_err(|source| CoreError::Config { location: text.location.clone(), source })?)
}

async fn read_config(global: &Global) -> Result<ConfigText> {
    let registry: Arc<dyn Registry> = global.open_registry().await?;
    Ok(registry.config().await?)
}

/// The kernel of this network namespace.
pub(crate) fn kernel() -> Result<Arc<dyn Kernel>> {
    Ok(Arc::new(NetlinkKernel::open()?))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use flannel_api::Severity;
    use flannel_core::Lease;
    use flannel_core::lease::{LeaseAttrs, Revision};

    use super::*;
    use crate::terminal::tests::assert_page;

    #[test]
    fn the_state_that_the_last_daemon_left_is_shown() {
        let failure = "the daemon does not answer at /run/flannel/flanneld.sock: No such file or \
            directory (os error 2)";
        let file = Path::new("/run/flannel/subnet.env");
        let lease = Lease {
            subnets: "10.1.5.0-24".parse().unwrap(),
            attrs: LeaseAttrs::from_json(r#"{"PublicIP":"192.0.2.5"}"#).unwrap(),
            expires: None,
            since: Revision(1),
            revision: Revision(1),
        };
        let saved = Saved {
            store: "etcd:https://etcd-1:2379,https://etcd-2:2379".into(),
            written: SystemTime::now() - Duration::from_secs(7_500),
            leases: [lease].into_iter().collect(),
            config: None,
            own: None,
            own_end: None,
            lost: None,
        };
        let env = "FLANNEL_NETWORK=10.1.0.0/16\nFLANNEL_SUBNET=10.1.5.1/24\nFLANNEL_MTU=1450\n\
            FLANNEL_IPMASQ=true\n";
        let strict = Finding {
            check: "rp-filter".into(),
            severity: Severity::Warning,
            text: "rp_filter of flannel.1 is strict".into(),
            repair: Some("sysctl -w net.ipv4.conf.flannel/1.rp_filter=2".into()),
        };
        let left = LeftState {
            failure: failure.into(),
            findings: vec![strict],
            subnet_file: file.into(),
            subnets: Ok(SubnetEnv::parse(env).unwrap()),
            saved: Ok(saved),
        };
        assert_page("status_left", |terminal| left.page(terminal));
        fn missing<T>(file: &str) -> Result<T, String> {
            Err(format!("{file}: No such file or directory (os error 2)"))
        }
        let nothing = LeftState {
            failure: failure.into(),
            findings: Vec::new(),
            subnet_file: file.into(),
            subnets: missing("/run/flannel/subnet.env"),
            saved: missing("/var/lib/flannel/leases"),
        };
        assert_page("status_nothing_left", |terminal| nothing.page(terminal));
    }
}
