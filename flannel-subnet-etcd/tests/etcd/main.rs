//! The registry in etcd, on real etcd processes that the tests start: `etcd` in the search path, or
//! the program that `ETCD` names.

#![allow(clippy::unwrap_used, reason = "test helpers are test code")]

mod certificates;
mod leases;
mod outages;
mod pages;
mod proxy;
mod security;
mod server;
mod store;

use std::future::Future;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;
use test_support::eventually_async;

use flannel_core::lease::{LeaseAttrs, Offer, Origin, View};
use flannel_core::{SubnetManager, Subnets};
use flannel_subnet::{HolderId, Identity, LeaseGrant, LocalManager, Reflector};
use flannel_subnet_etcd::{EtcdOptions, EtcdRegistry};
use tokio::sync::watch;
use tokio::time::timeout;

const DAY: Duration = Duration::from_secs(86_400);
const V4: &str = r#"{"Network":"10.1.0.0/16"}"#;

fn key(text: &str) -> Subnets {
    text.parse().unwrap()
}

fn attrs(addresses: &[&str]) -> LeaseAttrs {
    LeaseAttrs::from(
        Offer::new(addresses.iter().map(|a| a.parse::<IpAddr>().unwrap()).collect())
            .with_kind("vxlan"),
    )
}

fn grant(holder: u64) -> Option<LeaseGrant> {
    Some(LeaseGrant { holder: HolderId(holder), ttl: DAY })
}

/// Options for these endpoints with short time limits.
fn options(endpoints: &[String]) -> EtcdOptions {
    EtcdOptions {
        endpoints: endpoints.to_vec(),
        request_timeout: Duration::from_secs(2),
        ..EtcdOptions::default()
    }
}

fn registry(endpoints: &[String]) -> EtcdRegistry {
    EtcdRegistry::new(options(endpoints)).unwrap()
}

fn node(registry: &EtcdRegistry, holder: u64) -> Arc<LocalManager> {
    let identity =
        Identity { holder: HolderId(holder), previous: None, local_addresses: Vec::new() };
    Arc::new(LocalManager::new(Arc::new(registry.clone()), identity))
}

/// Waits for a future that must be ready within `seconds`.
async fn within<T>(seconds: u64, what: &str, future: impl Future<Output = T>) -> T {
    let limit = Duration::from_secs(seconds);
    timeout(limit, future).await.unwrap_or_else(|_| panic!("{what}: not within {limit:?}"))
}

/// Polls a condition that nothing reports.
async fn until(seconds: u64, what: &str, condition: impl AsyncFnMut() -> bool) {
    eventually_async(Duration::from_secs(seconds), condition, || what).await;
}

fn names(view: &View) -> Vec<String> {
    view.leases.iter().map(|lease| lease.subnets.to_string()).collect()
}

/// A node that only follows.
struct Peer {
    _reflector: Reflector,
    views: watch::Receiver<View>,
}

impl Peer {
    async fn of(registry: &EtcdRegistry) -> Self {
        let reflector = Reflector::start(Arc::new(registry.clone()));
        let mut views = reflector.views();
        let live = views.wait_for(|view| matches!(view.origin, Origin::Live { .. }));
        drop(within(30, "first view", live).await.unwrap());
        Self { _reflector: reflector, views }
    }

    async fn sees(&mut self, seconds: u64, keys: &[&str]) {
        let seen = self.views.wait_for(|view| names(view) == keys);
        let what = format!("{keys:?} seen");
        drop(within(seconds, &what, seen).await.unwrap());
    }
}

/// Holds its lease in a task.
async fn hold(
    manager: &Arc<LocalManager>,
    addresses: &[&str],
) -> (flannel_core::Lease, tokio::task::JoinHandle<flannel_core::subnet::LeaseEnd>) {
    let lease = within(30, "a lease", manager.acquire_lease(&attrs(addresses))).await.unwrap();
    let mut views = manager.watch_leases().await.unwrap();
    let task = tokio::spawn({
        let manager = Arc::clone(manager);
        let lease = lease.clone();
        async move { manager.hold_lease(&lease).await.unwrap() }
    });
    let live = views.wait_for(|view| matches!(view.origin, Origin::Live { .. }));
    drop(within(30, "own view", live).await.unwrap());
    (lease, task)
}
