//! The state without a daemon: the files of the last daemon, and the store.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use flannel_api::{Finding, PeerReport, VERSION, seconds};
use flannel_backends::Backends;
use flannel_core::lease::LeaseSet;
use flannel_core::object::LinkName;
use flannel_core::{Config, Error as CoreError, Kernel, Subnets};
use flannel_doctor::checks::host::{HostScene, check_host};
use flannel_firewall::LegacyMemory;
use flannel_netlink::NetlinkKernel;
use flannel_netlink::iface::Selectors;
use flannel_options::state_dir;
use flannel_subnet::{Cache, ConfigText, Registry, Saved, SubnetEnv};
use serde_json::{Value, json};

use crate::error::{Error, Result};
use crate::options::Global;
use crate::terminal::{Style, Terminal, span};
use crate::{Context, Output, status};

/// The state of a peer without a daemon.
pub(crate) const UNKNOWN: &str = "not known";

/// The usual timeout of the store.
const PATIENCE: Duration = Duration::from_secs(6);

/// Reads the network config, if there is one, and the leases from the store, within a time limit.
pub(crate) async fn ask_store(
    global: &Global,
    patience: Duration,
) -> Result<(flannel_core::Result<ConfigText>, LeaseSet), String> {
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
        Ok(asked) => asked.map_err(|error| error.to_string()),
        Err(_) => Err(format!("no answer for {} s", patience.as_secs())),
    }
}

/// The cluster without a daemon.
#[derive(Debug, Default)]
pub(crate) struct Known {
    pub(crate) config: Option<Config>,
    pub(crate) leases: LeaseSet,
    /// The reason why the values may be old, without a full stop; `None`: the store gave them.
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

/// The store by the name that a daemon with these options has for it; `None`: none is named.
pub(crate) fn store_url(global: &Global) -> Option<String> {
    match global.registry.as_ref()? {
        #[cfg(feature = "etcd")]
        flannel_options::RegistryUrl::Etcd => {
            flannel_options::open_etcd(global.etcd.options()).ok().map(|etcd| etcd.to_string())
        }
        url => Some(url.to_string()),
    }
}

/// The set of leases that a daemon cached; `None` if there is no cache, or it cannot be read.
pub(crate) fn saved(global: &Global) -> Option<Saved> {
    Cache::open(state_dir::leases(&global.state_dir)).load().ok()
}

/// The subnets of the last daemon here. The subnet file is gone after a reboot, the cache is not.
pub(crate) fn own_subnets(global: &Global) -> Option<Subnets> {
    let env = SubnetEnv::read(&global.subnet_file).ok().and_then(|env| env.previous());
    env.or_else(|| Some(saved(global)?.own?.0.subnets))
}

/// The status without a daemon: the state that the last daemon left.
pub(crate) async fn status(
    Context { global, backends, terminal, .. }: Context<'_>,
    failure: &flannel_api::Error,
) -> Output {
    let left = Left {
        findings: findings(global, backends).await,
        subnets: SubnetEnv::read(&global.subnet_file).map_err(|error| error.to_string()),
        saved: Cache::open(state_dir::leases(&global.state_dir))
            .load()
            .map_err(|error| error.to_string()),
    };
    let failure = failure.to_string();
    let mut value = status::down(&failure);
    value["findings"] = json!(left.findings);
    if let Ok(env) = &left.subnets {
        value["subnets"] = json!(words(env.subnets.values()));
        value["mtu"] = json!(env.mtu);
    }
    if let Ok(saved) = &left.saved {
        value["leases"] = json!(saved.leases.len());
        value["leases_kept"] = json!(seconds(saved.written));
    }
    Output { text: page(&failure, &left, &global.subnet_file, terminal), value, ok: false }
}

/// The state that the last daemon left.
struct Left {
    findings: Vec<Finding>,
    /// The subnet file, or the reason why it cannot be read.
    subnets: Result<SubnetEnv, String>,
    /// The cached leases, or the reason why they cannot be read.
    saved: Result<Saved, String>,
}

fn words<T: ToString>(values: impl Iterator<Item = T>) -> Vec<String> {
    values.map(|value| value.to_string()).collect()
}

/// The page of `status` without a daemon.
fn page(failure: &str, left: &Left, subnet_file: &Path, terminal: &Terminal) -> String {
    let mut text = format!("flanneld  {}\n\n", terminal.style(Style::Bad, "NOT RUNNING"));
    text += &terminal.field("error", Style::Bad, failure);
    text += &terminal.field(
        "",
        Style::Plain,
        "try: systemctl start flanneld; or --control-socket FILE, if it was started with another \
         one",
    );
    text += &status::findings(&left.findings, terminal);
    text.push('\n');
    let lease = match &left.subnets {
        Ok(env) => format!(
            "{}, pods may send {} bytes, according to {}",
            words(env.subnets.values()).join(", "),
            env.mtu,
            subnet_file.display()
        ),
        Err(error) => format!("not known: {error}"),
    };
    text += &terminal.field("last lease", Style::Bold, &lease);
    let leases = match &left.saved {
        Ok(saved) => {
            let age = SystemTime::now().duration_since(saved.written).unwrap_or_default();
            let age = span(age.as_secs_f64());
            format!("{} of {}, kept {age} ago", saved.leases.len(), saved.store)
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
    let mtu = SubnetEnv::read(&global.subnet_file).ok().map(|env| env.mtu);
    let scene = HostScene { config, links, uplink, own, public, leases: saved.leases, mtu };
    check_host(scene, &LegacyMemory::default()).await.findings
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
    let chosen = kernel.external_interface(selectors, config.networks.families());
    let chosen = chosen.map_err(|error| {
        Error::Refused(format!("{error} (--iface names the interface that the daemon used)"))
    })?;
    Ok(chosen.name)
}

/// Every lease except this node's last one, from the store or the cache.
pub(crate) async fn peers(global: &Global) -> Result<Value> {
    let own = own_subnets(global);
    let Known { leases, stale, .. } = Known::of(global).await.map_err(Error::Refused)?;
    let others = leases.iter().filter(|lease| Some(lease.subnets) != own);
    let peers: Vec<PeerReport> =
        others.map(|lease| PeerReport::new(lease, UNKNOWN, None, None)).collect();
    Ok(json!({ "version": VERSION, "running": false, "peers": peers, "stale": stale }))
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
    let wrong = |source| CoreError::Config { location: text.location.clone(), source };
    Ok(Config::parse(&text.text).map_err(wrong)?)
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
    use flannel_core::Lease;
    use flannel_core::lease::{LeaseAttrs, Revision};

    use super::*;
    use crate::terminal::tests::assert_page;

    #[test]
    fn the_state_that_the_last_daemon_left_is_shown() {
        let failure = "flanneld does not answer at /run/flannel/flanneld.sock: No such file or \
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
        let strict = Finding::warning("rp-filter", "rp_filter of flannel.1 is strict")
            .with_command("sysctl -w net.ipv4.conf.flannel/1.rp_filter=2");
        let left = Left {
            findings: vec![strict],
            subnets: Ok(SubnetEnv::parse(env, file).unwrap()),
            saved: Ok(saved),
        };
        assert_page("status_left", |terminal| page(failure, &left, file, terminal));
        fn missing<T>(file: &str) -> Result<T, String> {
            Err(format!("{file}: No such file or directory (os error 2)"))
        }
        let nothing = Left {
            findings: Vec::new(),
            subnets: missing("/run/flannel/subnet.env"),
            saved: missing("/var/lib/flannel/leases"),
        };
        assert_page("status_nothing_left", |terminal| page(failure, &nothing, file, terminal));
    }
}
