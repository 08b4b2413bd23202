//! Peers that arrive all at once.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use flannel_backend_vxlan::VxlanBackend;
use flannel_core::testing::FakeSubnets;
use flannel_core::{Backend, LeaseSet, Origin, Revision, SubnetManager, View};
use flannel_netlink::testing::ip;

use crate::cluster::{Families, device, leases};
use crate::floor;
use crate::ground::Ground;
use crate::report::{Report, median};
use crate::witness::compare;

/// Floor and subject alternate, so that a machine whose speed drifts misleads nobody.
const PAIRS: usize = 5;

pub(crate) fn run(peers: u32, families: Families) -> anyhow::Result<Report> {
    let all = leases(peers, families);
    let (mut pairs, mut wrong) = (Vec::new(), Vec::new());
    for _ in 0..PAIRS {
        let floor = floor(peers, families, &mut wrong)?;
        let ours = ours(peers, families, &all, &mut wrong)?;
        pairs.push((ours.as_secs_f64(), floor.as_secs_f64()));
    }
    Ok(Report {
        bench: "arrive",
        peers,
        family: families.name().into(),
        seconds: median(pairs.iter().map(|pair| pair.0)),
        floor_seconds: median(pairs.iter().map(|pair| pair.1)),
        ratio: median(pairs.iter().map(|pair| pair.0 / pair.1)),
        ok: wrong.is_empty(),
        wrong,
    })
}

/// From the sending of the view to the last acknowledgement, by the engine as a daemon runs it.
fn ours(peers: u32, families: Families, all: &LeaseSet, wrong: &mut Vec<String>) -> anyhow::Result<Duration> {
    let ground = Ground::new()?;
    let subnets = FakeSubnets::with_config(&families.config());
    let host = ground.host(Arc::new(subnets.clone()))?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let took = runtime.block_on(async {
        let config = subnets.network_config().await?;
        let network = VxlanBackend.register(&host, &config).await?;
        let mut status = network.handle().status;
        let views = subnets.watch_leases().await?;
        let mut leases = all.clone();
        leases.insert(network.handle().lease);
        let measure = async {
            status.wait_for(|status| status.in_sync).await?;
            let view = View { leases, origin: Origin::Live { revision: Revision(u64::from(peers)) } };
            let start = Instant::now();
            subnets.set_view(view);
            let arrived = status.wait_for(|status| status.in_sync && status.peers == peers as usize);
            tokio::time::timeout(Duration::from_secs(600), arrived)
                .await
                .context("not all peers arrived")??;
            anyhow::Ok(start.elapsed())
        };
        tokio::select! {
            ended = network.run(views) => anyhow::bail!("the network ended: {ended:?}"),
            took = measure => took,
        }
    })?;
    wrong.extend(compare(&ground.netns, peers, families)?);
    Ok(took)
}

/// The raw writer with its best batch size, each size in a fresh namespace.
fn floor(peers: u32, families: Families, wrong: &mut Vec<String>) -> anyhow::Result<Duration> {
    let mut best = Duration::MAX;
    for batch in floor::BATCHES {
        let ground = Ground::new()?;
        let took = ground.netns.run(|| -> anyhow::Result<Duration> {
            let mut indexes = flannel_core::Dual::default();
            for family in families.iter() {
                let (dev, vni, mtu) = (device(family), u32::from(family.bits()), 1400);
                let local = if family.bits() == 32 { "192.0.2.1" } else { "2001:db8::1" };
                ip(&format!(
                    "link add {dev} mtu {mtu} type vxlan id {vni} local {local} dev eth0 dstport 8472 nolearning"
                ));
                ip(&format!("link set {dev} up"));
                let shown: serde_json::Value = serde_json::from_str(&ip(&format!("-j link show {dev}")))?;
                indexes[family] = shown[0]["ifindex"].as_u64().map(|index| index as u32);
            }
            let messages = floor::encode(peers, families, |family| indexes[family].unwrap_or_default());
            floor::send(&messages, batch)
        })?;
        wrong.extend(compare(&ground.netns, peers, families)?);
        best = best.min(took);
    }
    Ok(best)
}
