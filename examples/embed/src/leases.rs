//! The lease engine on an etcd with TLS.

use std::net::IpAddr;
use std::path::Path;
use std::sync::Arc;

use flannel_core::lease::{LeaseAttrs, Offer};
use flannel_core::{Credential, SubnetManager};
use flannel_subnet::{HolderId, Identity, LocalManager, Registry};
use flannel_subnet_etcd::{EtcdOptions, EtcdRegistry};

/// Takes a lease. The CA is a value, which may come from anywhere.
pub async fn on_etcd(endpoint: &str, ca: &Path) -> anyhow::Result<()> {
    let options = EtcdOptions {
        endpoints: vec![endpoint.to_owned()],
        ca: Some(Credential::value(std::fs::read(ca)?)),
        ..EtcdOptions::default()
    };
    let registry = Arc::new(EtcdRegistry::new(options)?);
    registry.write_config(None, r#"{"Network": "10.1.0.0/16"}"#).await?;
    let identity =
        Identity { holder: HolderId::random(), previous: None, local_addresses: Vec::new() };
    let manager = LocalManager::new(registry, identity);
    let public = ["192.0.2.1".parse::<IpAddr>()?].into_iter().collect();
    let attrs = LeaseAttrs::from(Offer::new(public));
    let lease = manager.acquire_lease(&attrs).await?;
    println!("this node has {}", lease.subnets);
    Ok(())
}
