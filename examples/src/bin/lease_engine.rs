//! The lease engine alone, on etcd: two nodes acquire subnets, and each sees that of the other.

use std::net::IpAddr;
use std::sync::Arc;

use flannel_core::SubnetManager;
use flannel_core::lease::{LeaseAttrs, Offer, Origin, View};
use flannel_subnet::{HolderId, Identity, LocalManager, Registry};
use flannel_subnet_etcd::{EtcdOptions, EtcdRegistry};

fn main() -> anyhow::Result<()> {
    examples::in_sandbox(two_nodes)
}

/// A connection to the etcd of the sandbox.
fn connect() -> anyhow::Result<EtcdRegistry> {
    let endpoints = vec![examples::Etcd::ENDPOINT.into()];
    Ok(EtcdRegistry::new(EtcdOptions { endpoints, ..EtcdOptions::default() })?)
}

async fn two_nodes() -> anyhow::Result<()> {
    let _etcd = examples::Etcd::start()?;
    // Waits until etcd answers.
    connect()?.write_config(None, r#"{"Network": "10.1.0.0/16"}"#).await?;
    let mut nodes = Vec::new();
    for address in ["192.0.2.1", "192.0.2.2"] {
        let identity =
            Identity { holder: HolderId::random(), previous: None, local_addresses: Vec::new() };
        let node = LocalManager::new(Arc::new(connect()?), identity);
        let public = [address.parse::<IpAddr>()?].into_iter().collect();
        let lease = node.acquire_lease(&LeaseAttrs::from(Offer::new(public))).await?;
        // A program that uses its subnet for longer also runs `hold_lease`: see `engines`.
        println!("{address} has {}", lease.subnets);
        nodes.push((node, lease));
    }
    for (node, own) in &nodes {
        let mut views = node.watch_leases().await?;
        let both = |view: &View| {
            matches!(view.origin, Origin::Live { .. }) && view.leases.len() == nodes.len()
        };
        let view = views.wait_for(both).await?;
        let others: Vec<_> =
            view.leases.iter().filter(|l| l.subnets != own.subnets).map(|l| l.subnets).collect();
        println!("{} sees {others:?}", own.subnets);
    }
    Ok(())
}
