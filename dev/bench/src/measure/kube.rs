//! A cluster of Kubernetes nodes of real size: 20 KB each, of which flannel needs a few hundred
//! bytes.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use flannel_core::SubnetManager;
use flannel_core::address::Family;
use flannel_core::lease::{Origin, View};
use flannel_subnet_kube::testing::ApiServer;
use flannel_subnet_kube::{KubeManager, KubeOptions, NodeIdentity};
use serde_json::{Value, json};
use tokio::sync::watch;

use crate::parts::cluster::{Families, Peer, peers};
use crate::parts::daemon::{Daemon, program};
use crate::parts::report::{Report, percentile};

const FAMILY: Family = Family::V4;
/// This node.
pub(crate) const OWN: &str = "node-1";
/// The size of a node in bytes: the average in KEP-589.
const BYTES: usize = 20_000;
const PREFIX: &str = "flannel.alpha.coreos.com/";
const P99_MS: f64 = 5.0;
const RSS_MIB: f64 = 25.0;
const PEAK_MIB: f64 = 60.0;
/// The pause after the last object is in place.
const REST: Duration = Duration::from_secs(5);
/// The timeout of each step.
const PATIENCE: Duration = Duration::from_secs(300);

/// The name and the content of a node as kubelet and controllers write it. It has a lease unless it
/// is this one.
pub(crate) fn node(peer: Peer) -> (String, Value) {
    let n = peer.0;
    let subnet = peer.subnet(FAMILY).to_string();
    let conditions = ["MemoryPressure", "DiskPressure", "PIDPressure", "Ready"].map(condition);
    let mut node = json!({
        "metadata": {
            "labels": {
                "kubernetes.io/hostname": format!("node-{n}"),
                "kubernetes.io/os": "linux",
                "topology.kubernetes.io/zone": "z1",
            },
            "annotations": annotations(peer),
            "managedFields": [{
                "manager": "kubelet",
                "operation": "Update",
                "fieldsV1": { "f:status": { "f:images": {}, "f:conditions": {
                    "k:{\"type\":\"Ready\"}": { "f:lastHeartbeatTime": {}, "f:status": {} },
                } } },
            }],
        },
        "spec": {
            "podCIDR": subnet,
            "podCIDRs": [subnet],
            "providerID": format!("cloud:///z1/i-{n:016x}"),
        },
        "status": {
            "conditions": conditions,
            "capacity": { "cpu": "64", "memory": "263000000Ki", "pods": "110" },
            "images": [],
        },
    });
    // Images fill the node up to its size.
    let missing = BYTES.saturating_sub(node.to_string().len());
    let each = image(10).to_string().len() + 1;
    node["status"]["images"] = (0..missing / each).map(image).collect();
    (format!("node-{n}"), node)
}

fn annotations(peer: Peer) -> Value {
    let mut annotations = json!({
        "node.alpha.kubernetes.io/ttl": "300",
        "volumes.kubernetes.io/controller-managed-attach-detach": "true",
    });
    if peer.0 != 1 {
        let data = format!(r#"{{"VNI":1,"VtepMAC":"{}"}}"#, peer.mac(FAMILY));
        annotations[format!("{PREFIX}kube-subnet-manager")] = json!("true");
        annotations[format!("{PREFIX}backend-type")] = json!("vxlan");
        annotations[format!("{PREFIX}backend-data")] = json!(data);
        annotations[format!("{PREFIX}public-ip")] = json!(peer.public(FAMILY).to_string());
    }
    annotations
}

fn condition(kind: &str) -> Value {
    json!({
        "type": kind,
        "status": "False",
        "reason": format!("Kubelet{kind}"),
        "message": format!("kubelet says {kind}"),
        "lastHeartbeatTime": "2026-11-21T20:00:00Z",
        "lastTransitionTime": "2026-11-01T00:00:00Z",
    })
}

fn image(i: usize) -> Value {
    let name = format!("registry.example/team/service-{i}");
    let names = [format!("{name}@sha256:{:064x}", i * 7919), format!("{name}:v1.{i}")];
    json!({ "names": names, "sizeBytes": 100_000_000 + i })
}

/// Adds `count` nodes and this one to an API server.
pub(crate) fn fill(server: &ApiServer, count: u32) {
    server.fill(std::iter::once(Peer(1)).chain(peers(count)).map(node));
}

/// Starts a manager on a server with `count` nodes, and waits for its first complete view.
pub(crate) async fn follow(
    url: &str,
    dir: &std::path::Path,
    count: u32,
) -> anyhow::Result<(KubeManager, watch::Receiver<View>)> {
    let net_config = dir.join("net-conf.json");
    std::fs::write(&net_config, Families::Ipv4.config())?;
    let options = KubeOptions {
        api_url: Some(url.to_owned()),
        net_config,
        ..KubeOptions::new(NodeIdentity::Node(OWN.to_owned()))
    };
    let manager = KubeManager::open(options).await?;
    let mut views = manager.watch_leases().await?;
    let complete = views.wait_for(|view| matches!(view.origin, Origin::Live { .. }));
    let leases = tokio::time::timeout(PATIENCE, complete).await.context("no list")??.leases.len();
    ensure!(leases == count as usize, "{leases} leases of {count}");
    Ok((manager, views))
}

/// One changed node among many: the time from the write in the API server until the set of leases
/// has the change.
pub(crate) fn event(nodes: u32, events: u32) -> anyhow::Result<Report> {
    let server = ApiServer::new();
    let dir = tempfile::tempdir()?;
    fill(&server, nodes);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let figures = runtime.block_on(async {
        let (_manager, mut views) = follow(&server.url(), dir.path(), nodes).await?;
        let mut figures = Vec::new();
        // The first ones warm up.
        for n in 0..events + 50 {
            let peer = Peer(2 + n % nodes);
            let (name, mut node) = node(peer);
            let public = format!("198.51.{}.{}", n >> 8 & 255, n & 255);
            node["metadata"]["annotations"][format!("{PREFIX}public-ip")] = json!(public);
            let public = Some(public.parse()?);
            views.mark_unchanged();
            let begin = Instant::now();
            server.put_node(&name, node);
            let subnets = flannel_core::Subnets::new([peer.subnet(FAMILY)]).context("a subnet")?;
            let seen = views.wait_for(|view: &View| {
                let lease = view.leases.get(&subnets);
                lease.is_some_and(|lease| lease.attrs.preferred.public.v4 == public)
            });
            tokio::time::timeout(PATIENCE, seen).await.context("an event was lost")??;
            if n >= 50 {
                figures.push(begin.elapsed().as_secs_f64() * 1e3);
            }
        }
        anyhow::Ok(figures)
    })?;
    let mut report = Report {
        nodes: Some(nodes),
        events: Some(events),
        p50_ms: Some(percentile(&figures, 50)),
        p99_ms: Some(percentile(&figures, 99)),
        ..Report::default()
    };
    report.at_most("p99_ms", report.p99_ms, P99_MS);
    Ok(report)
}

/// The resident memory of a daemon with `nodes` nodes, now and at most.
pub(crate) fn memory(nodes: u32, flanneld: Option<PathBuf>) -> anyhow::Result<Report> {
    let program = program(flanneld)?;
    let start = Instant::now();
    let (mut daemon, server) = Daemon::start_on_kube(&program, nodes)?;
    let seconds = start.elapsed().as_secs_f64();
    daemon.rest(REST)?;
    let rss = daemon.kib("VmRSS")?;
    let peak = daemon.kib("VmHWM")?;
    let mut report = Report {
        nodes: Some(nodes),
        seconds: Some(seconds),
        rss_kib: Some(rss),
        hwm_kib: Some(peak),
        wrong: daemon.compare()?,
        ..Report::default()
    };
    report.at_most("rss_kib / 1024", Some(rss as f64 / 1024.0), RSS_MIB);
    report.at_most("hwm_kib / 1024", Some(peak as f64 / 1024.0), PEAK_MIB);
    drop(daemon);
    drop(server);
    Ok(report)
}
