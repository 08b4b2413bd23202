//! The lease engine alone: two nodes take their subnets from one directory, and each sees the other's. No kernel.

use std::sync::Arc;

use flannel_core::SubnetManager;
use flannel_core::lease::{LeaseAttrs, Offer, Origin};
use flannel_subnet::{DirOptions, DirRegistry, HolderId, Identity, LocalManager};

#[tokio::main(flavor = "current_thread")]
async fn main() -> anyhow::Result<()> {
    let dir = tempfile::tempdir()?;
    std::fs::write(dir.path().join("config"), r#"{"Network": "10.1.0.0/16"}"#)?;
    let mut nodes = Vec::new();
    for address in ["192.0.2.1", "192.0.2.2"] {
        let registry = Arc::new(DirRegistry::open(dir.path(), DirOptions::default()).await?);
        let identity =
            Identity { holder: HolderId::random(), previous: None, local_addresses: Vec::new() };
        let node = LocalManager::new(registry, identity);
        let public = [address.parse::<std::net::IpAddr>()?].into_iter().collect();
        let lease =
            node.acquire_lease(&LeaseAttrs::from(Offer { public, ..Offer::default() })).await?;
        println!("{address} has {}", lease.subnets);
        nodes.push((node, lease));
    }
    for (node, own) in &nodes {
        let mut views = node.watch_leases().await?;
        let both = |view: &flannel_core::lease::View| {
            matches!(view.origin, Origin::Live { .. }) && view.leases.len() == 2
        };
        let view = views.wait_for(both).await?;
        let others: Vec<_> =
            view.leases.iter().filter(|l| l.subnets != own.subnets).map(|l| l.subnets).collect();
        println!("{} sees {others:?}", own.subnets);
    }
    Ok(())
}
