//! Many nodes that acquire a lease from one etcd at once, each on its own connection.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::time::Instant;

use clap::ValueEnum;
use flannel_core::lease::{LeaseAttrs, Offer};
use flannel_core::{SubnetManager, Subnets};
use flannel_subnet::{HolderId, Identity, LocalManager};
use tokio::sync::Barrier;

use crate::parts::etcd::{Etcd, PREFIX};
use crate::parts::report::{Report, percentile};

/// The maximum number of unary requests of a node, on average.
const RPCS: f64 = 5.0;

/// The number of free subnets.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum Room {
    /// A /8 in /24s
    Sparse,
    /// Exactly as many subnets as nodes
    Full,
}

impl Room {
    fn config(self, nodes: u32) -> String {
        let last = match self {
            Self::Sparse => String::new(),
            Self::Full => {
                let first = u32::from(Ipv4Addr::new(10, 0, 1, 0));
                format!(
                    r#", "SubnetMin": "10.0.1.0", "SubnetMax": "{}""#,
                    Ipv4Addr::from(first + (nodes - 1) * 256)
                )
            }
        };
        format!(r#"{{"Network": "10.0.0.0/8", "SubnetLen": 24{last}}}"#)
    }
}

pub(crate) fn run(nodes: u32, room: Room) -> anyhow::Result<Report> {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()?
        .block_on(storm(nodes, room))
}

async fn storm(nodes: u32, room: Room) -> anyhow::Result<Report> {
    let etcd = Etcd::start().await?;
    etcd.client().await?.put(format!("{PREFIX}/config"), room.config(nodes), None).await?;
    let before = etcd.requests().await?;
    let barrier = Arc::new(Barrier::new(nodes as usize));
    let mut tasks = tokio::task::JoinSet::new();
    let begin = Instant::now();
    for n in 0..nodes {
        let registry = Arc::new(etcd.registry()?);
        let barrier = Arc::clone(&barrier);
        tasks.spawn(async move {
            let identity = Identity {
                holder: HolderId::random(),
                previous: None,
                local_addresses: Vec::new(),
            };
            let manager = LocalManager::new(registry, identity);
            let public = IpAddr::from(Ipv4Addr::from(u32::from(Ipv4Addr::new(172, 16, 0, 1)) + n));
            let attrs =
                LeaseAttrs::from(Offer::new([public].into_iter().collect()).with_kind("vxlan"));
            barrier.wait().await;
            let begin = Instant::now();
            (manager.acquire_lease(&attrs).await, begin.elapsed())
        });
    }
    let results = tasks.join_all().await;
    let seconds = begin.elapsed().as_secs_f64();
    let after = etcd.requests().await?;

    let times: Vec<f64> = results.iter().map(|(_, took)| took.as_secs_f64() * 1e3).collect();
    let mut wrong: Vec<String> =
        results.iter().filter_map(|(lease, _)| Some(lease.as_ref().err()?.to_string())).collect();
    let failed = wrong.len();
    let subnets: Vec<Subnets> =
        results.iter().filter_map(|(lease, _)| Some(lease.as_ref().ok()?.subnets)).collect();
    let duplicates = overlaps(subnets);
    wrong.truncate(5);
    let rpcs = (after.0 - before.0) as f64 / f64::from(nodes);
    let mut report = Report {
        network: Some(format!("{room:?}").to_lowercase()),
        nodes: Some(nodes),
        seconds: Some(seconds),
        rpcs_per_node: Some(rpcs),
        streams_per_node: Some((after.1 - before.1) as f64 / f64::from(nodes)),
        duplicates: Some(duplicates),
        failed: Some(failed),
        p50_ms: Some(percentile(&times, 50)),
        p99_ms: Some(percentile(&times, 99)),
        wrong,
        ..Report::default()
    };
    report.at_most("duplicates", Some(duplicates as f64), 0.0);
    report.at_most("rpcs_per_node", Some(rpcs), RPCS);
    Ok(report)
}

/// The number of subnets that overlap the previous one in the order of addresses.
fn overlaps(mut subnets: Vec<Subnets>) -> usize {
    subnets.sort();
    subnets.windows(2).filter(|pair| pair[0].overlaps(&pair[1])).count()
}
