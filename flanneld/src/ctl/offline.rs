//! What can be said without a daemon: what the last one left behind, and what the store holds.

use std::sync::Arc;
use std::time::SystemTime;

use flannel_core::{Config, Error, Kernel, Lease, LinkName, Subnets};
use flannel_firewall::LegacyMemory;
use flannel_netlink::NetlinkKernel;
use flannel_netlink::iface::Selectors;
use flannel_subnet::{Cache, Registry, Saved, SubnetEnv};
use serde_json::{Value, json};

use super::options::Global;
use super::paper::{Ink, Paper, span};
use super::{Failure, Result, Said, status};
use crate::preflight::{self, Finding, Scene};
use crate::report::{PeerReport, VERSION, seconds};

/// The state of a peer of which nobody knows.
pub(crate) const UNKNOWN: &str = "not known";

/// The last good set of leases that a daemon kept; `None` if there is none that can be read.
pub(crate) fn saved(global: &Global) -> Option<Saved> {
    Cache::open(global.state_dir.join("leases")).load().ok()
}

/// The subnets that the last daemon had here.
pub(crate) fn own_subnets(global: &Global) -> Option<Subnets> {
    SubnetEnv::read(&global.subnet_file).ok().and_then(|env| env.previous())
}

/// What is left of the last daemon.
pub(crate) async fn status(global: &Global, paper: &Paper, failure: &Failure) -> Said {
    let mut value = status::down(&failure.to_string());
    let mut text = format!("flanneld  {}\n\n", paper.ink(Ink::Bad, "NOT RUNNING"));
    text += &paper.field("error", Ink::Bad, &failure.to_string());
    text += &paper.field(
        "",
        Ink::Plain,
        "try: systemctl status flanneld; or --control-socket FILE, if it was started with another one",
    );
    let found = findings(global).await;
    text += &status::findings(&found, paper);
    value["findings"] = json!(found);
    text.push('\n');
    match SubnetEnv::read(&global.subnet_file) {
        Ok(env) => {
            let subnets: Vec<String> = env.subnets.values().map(ToString::to_string).collect();
            let left = format!(
                "{}, pods may send {} bytes, says {}",
                subnets.join(", "),
                env.mtu,
                global.subnet_file.display()
            );
            text += &paper.field("last lease", Ink::Bold, &left);
            value["subnets"] = json!(subnets);
            value["mtu"] = json!(env.mtu);
        }
        Err(error) => text += &paper.field("last lease", Ink::Bold, &format!("not known: {error}")),
    }
    match Cache::open(global.state_dir.join("leases")).load() {
        Ok(saved) => {
            let age = SystemTime::now().duration_since(saved.written).unwrap_or_default().as_secs_f64();
            let kept = format!("{} of {}, kept {} ago", saved.leases.len(), saved.store, span(age));
            text += &paper.field("leases", Ink::Bold, &kept);
            value["leases"] = json!(saved.leases.len());
            value["leases_kept"] = json!(seconds(saved.written));
        }
        Err(error) => text += &paper.field("leases", Ink::Bold, &format!("none are kept: {error}")),
    }
    text += &paper.field(
        "data path",
        Ink::Bold,
        "stays as the daemon left it; flannelctl why ADDRESS asks the kernel",
    );
    Said { text, value, ok: false }
}

/// What about the host stands in the way of the network that the last daemon ran; nothing, if that is not known.
async fn findings(global: &Global) -> Vec<Finding> {
    let Some(saved) = saved(global) else { return Vec::new() };
    let Some(config) = saved.config.and_then(|text| Config::parse(&text.text).ok()) else {
        return Vec::new();
    };
    let Some(uplink) = uplink(&config, &[]) else { return Vec::new() };
    let own = own_subnets(global);
    let lease = own.and_then(|own| saved.leases.get(&own).cloned());
    let public = lease.map(|lease| lease.attrs.public).unwrap_or_default();
    let scene = Scene { config, uplink, own, public, leases: saved.leases };
    preflight::look(scene, &LegacyMemory::default()).await.findings
}

/// The interface that the daemon would choose, with these `--iface`.
pub(crate) fn uplink(config: &Config, iface: &[String]) -> Option<LinkName> {
    let iface = iface.iter().filter(|name| !name.is_empty()).cloned().collect();
    let selectors = Selectors { iface, ..Selectors::default() };
    let kernel = NetlinkKernel::open().ok()?;
    kernel.external_interface(&selectors, config.networks.families()).ok().map(|chosen| chosen.name)
}

/// Every lease in the store but the one that was this node's.
pub(crate) async fn peers(global: &Global) -> Result<Value> {
    let own = own_subnets(global);
    let peer = |lease: &Lease| PeerReport {
        key: lease.subnets.to_string(),
        subnets: lease.subnets.iter().map(|subnet| subnet.to_string()).collect(),
        public: lease.attrs.public.values().map(ToString::to_string).collect(),
        backend: lease.attrs.backend_type.to_string(),
        state: UNKNOWN.to_owned(),
        reason: None,
        changed: None,
    };
    let mut leases = global.open_registry().await?.list().await?.entries;
    leases.sort_by_key(|entry| entry.lease.subnets);
    let others = leases.iter().filter(|entry| Some(entry.lease.subnets) != own);
    let peers: Vec<PeerReport> = others.map(|entry| peer(&entry.lease)).collect();
    Ok(json!({ "version": VERSION, "running": false, "peers": peers }))
}

/// The network config in the store, or if that does not answer, as the last daemon saw it.
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
    let wrong = |source| Error::Config { location: text.location.clone(), source };
    Ok(Config::parse(&text.text).map_err(wrong)?)
}

async fn read_config(global: &Global) -> Result<flannel_subnet::ConfigText> {
    let registry: Arc<dyn Registry> = global.open_registry().await?;
    Ok(registry.config().await?)
}

/// The kernel of this network namespace.
pub(crate) fn kernel() -> Result<Arc<dyn Kernel>> {
    Ok(Arc::new(NetlinkKernel::open()?))
}
