//! A node's lease on etcd: created, used again, taken over, ended, and distinguished from others.

use std::sync::Arc;

use etcd_client::{EventType, GetOptions, WatchOptions};
use flannel_core::address::Family;
use flannel_core::subnet::LeaseEnd;
use flannel_core::{Error, Lease, SubnetManager};
use flannel_subnet::{HolderId, Registry};
use flannel_subnet_etcd::EtcdRegistry;

use super::server::Etcd;
use super::{V4, attrs, grant, hold, key, node, registry, until, within};

const PREFIX: &str = "/coreos.com/network";
const US: [&str; 1] = ["192.0.2.1"];

async fn with_config(config: &str) -> (Etcd, EtcdRegistry) {
    let etcd = Etcd::start().await;
    etcd.put(&format!("{PREFIX}/config"), config).await;
    let registry = registry(&etcd.endpoints());
    (etcd, registry)
}

async fn acquire(registry: &EtcdRegistry, holder: u64, address: &str) -> Lease {
    within(30, "a lease", node(registry, holder).acquire_lease(&attrs(&[address]))).await.unwrap()
}

async fn count(registry: &EtcdRegistry) -> usize {
    registry.list().await.unwrap().entries.len()
}

async fn ended(task: tokio::task::JoinHandle<LeaseEnd>) -> LeaseEnd {
    within(10, "the end of the lease", task).await.unwrap()
}

#[tokio::test]
async fn a_node_keeps_its_subnet_over_restarts() {
    let (etcd, registry) = with_config(V4).await;
    let first = acquire(&registry, 1, "192.0.2.1").await;
    let again = acquire(&registry, 1, "192.0.2.1").await;
    assert_eq!(again.subnets, first.subnets, "nothing was written");
    assert_eq!(again.revision, first.revision, "nothing was written");
    // Another address is written, under the same etcd lease.
    let moved = acquire(&registry, 1, "192.0.2.9").await;
    assert_eq!(moved.subnets, first.subnets);
    assert_eq!(moved.since, first.since);
    assert_eq!(count(&registry).await, 1);
    assert_eq!(etcd.client().await.leases().await.unwrap().leases().len(), 1);
}

#[tokio::test]
async fn a_key_with_our_address_is_taken_over() {
    let (_etcd, registry) = with_config(V4).await;
    registry.create(&key("10.1.7.0-24"), &attrs(&US), grant(77)).await.unwrap();
    let lease = acquire(&registry, 1, US[0]).await;
    assert_eq!(lease.subnets, key("10.1.7.0-24"));
    assert_eq!(registry.entry(&lease.subnets).await.unwrap().unwrap().holder, Some(HolderId(1)));
}

#[tokio::test]
async fn of_two_daemons_with_one_address_the_first_ends_and_names_the_second() {
    let (_etcd, registry) = with_config(V4).await;
    let first = node(&registry, 1);
    let second = node(&registry, 2);
    let (lease, held) = hold(&first, &US).await;
    let (taken, stays) = hold(&second, &US).await;
    assert_eq!(taken.subnets, lease.subnets);
    let LeaseEnd::Taken { by } = ended(held).await else { panic!("taken") };
    assert!(by.contains("192.0.2.1") && by.contains(&HolderId(2).to_string()), "{by}");
    assert!(!stays.is_finished());
    assert_eq!(registry.entry(&lease.subnets).await.unwrap().unwrap().holder, Some(HolderId(2)));
    assert_eq!(count(&registry).await, 1);
    stays.abort();
}

#[tokio::test]
async fn a_deleted_key_stops_its_node() {
    let (etcd, registry) = with_config(V4).await;
    let (lease, held) = hold(&node(&registry, 1), &US).await;
    etcd.client().await.delete(format!("{PREFIX}/subnets/{}", lease.subnets), None).await.unwrap();
    assert_eq!(ended(held).await, LeaseEnd::Deleted);
    assert_eq!(count(&registry).await, 0);
}

#[tokio::test]
async fn a_revoked_lease_is_restored() {
    let (etcd, registry) = with_config(V4).await;
    let (lease, held) = hold(&node(&registry, 1), &US).await;
    etcd.client().await.lease_revoke(1).await.unwrap();
    until(10, "the key is back", || async {
        registry
            .entry(&lease.subnets)
            .await
            .unwrap()
            .is_some_and(|entry| entry.holder == Some(HolderId(1)))
    })
    .await;
    assert!(!held.is_finished());
    held.abort();
}

#[tokio::test]
async fn a_reservation_stays_a_reservation() {
    let (_etcd, registry) = with_config(V4).await;
    registry.create(&key("10.1.7.0-24"), &attrs(&US), None).await.unwrap();
    let mut changed = attrs(&US);
    changed.preferred.data.v4 = Some(r#"{"VNI":1}"#.into());
    let manager = node(&registry, 1);
    let lease = manager.acquire_lease(&changed).await.unwrap();
    assert_eq!(lease.subnets, key("10.1.7.0-24"));
    assert_eq!(lease.expires, None);
    let entry = registry.entry(&lease.subnets).await.unwrap().unwrap();
    assert_eq!(entry.holder, None);
    assert_eq!(entry.lease.attrs, changed);
}

#[tokio::test]
async fn an_ipv6_only_network_assigns_leases() {
    let config = r#"{"EnableIPv4":false,"EnableIPv6":true,"IPv6Network":"fd00:1::/48"}"#;
    let (etcd, registry) = with_config(config).await;
    let one = acquire(&registry, 1, "2001:db8::1").await;
    let two = acquire(&registry, 2, "2001:db8::2").await;
    assert_ne!(one.subnets, two.subnets);
    assert!(
        one.subnets.family(Family::V4).is_none()
            && one.subnets.to_string().starts_with("0.0.0.0-0&fd00:1:")
    );
    assert_eq!(
        acquire(&registry, 3, "2001:db8::1").await.subnets,
        one.subnets,
        "taken over by address"
    );
    let mut client = etcd.client().await;
    let stored = client.get(format!("{PREFIX}/subnets/{}", one.subnets), None).await.unwrap();
    let value = stored.kvs()[0].value_str().unwrap();
    assert_eq!(value, r#"{"PublicIP":"0.0.0.0","PublicIPv6":"2001:db8::1","BackendType":"vxlan"}"#);
}

#[tokio::test]
async fn simultaneous_nodes_get_all_subnets_once() {
    // 62 subnets of 4 addresses between the first and the last.
    let (_etcd, registry) = with_config(r#"{"Network":"10.1.0.0/24","SubnetLen":30}"#).await;
    let mut tasks = tokio::task::JoinSet::new();
    for n in 1..=63u64 {
        let registry = registry.clone();
        tasks.spawn(async move { acquire(&registry, n, &format!("192.0.2.{n}")).await.subnets });
    }
    let mut all: Vec<_> = within(60, "63 leases", tasks.join_all()).await;
    all.sort();
    all.dedup();
    assert_eq!(all.len(), 63);
    let error = node(&registry, 99).acquire_lease(&attrs(&["192.0.2.99"])).await.unwrap_err();
    assert!(matches!(error, Error::OutOfSubnets { total: 63, .. }), "{error}");
}

/// All writes of a node, as another client sees them.
#[tokio::test]
async fn only_leases_are_written() {
    let (etcd, registry) = with_config(V4).await;
    let mut client = etcd.client().await;
    let start = client.get(PREFIX, None).await.unwrap().header().unwrap().revision() + 1;
    let (lease, held) = hold(&node(&registry, 1), &US).await;
    held.abort();
    registry.keep_alive(&lease.subnets, HolderId(1)).await.unwrap();
    let moved = acquire(&registry, 1, "192.0.2.9").await;
    registry.delete(&moved.subnets, moved.revision).await.unwrap();
    let options = WatchOptions::new().with_all_keys().with_start_revision(start);
    let mut events = client.watch("", Some(options)).await.unwrap();
    let mut seen = Vec::new();
    within(10, "three events", async {
        while seen.len() < 3 {
            let message = events.message().await.unwrap().unwrap();
            seen.extend(message.events().iter().map(|event| {
                (event.event_type(), event.kv().unwrap().key_str().unwrap().to_owned())
            }));
        }
    })
    .await;
    let key = format!("{PREFIX}/subnets/{}", lease.subnets);
    let expected =
        [EventType::Put, EventType::Put, EventType::Delete].map(|kind| (kind, key.clone()));
    assert_eq!(seen, expected);
    let left =
        client.get("", Some(GetOptions::new().with_all_keys().with_keys_only())).await.unwrap();
    let left: Vec<_> = left.kvs().iter().map(|kv| kv.key_str().unwrap()).collect();
    assert_eq!(left, ["/coreos.com/network/config"]);
}

#[tokio::test]
async fn a_held_lease_outlives_its_time_to_live() {
    let (_etcd, registry) = with_config(V4).await;
    let identity = flannel_subnet::Identity {
        holder: HolderId(1),
        previous: None,
        local_addresses: Vec::new(),
    };
    // Renewed after a third of it, so that the machine may stop for 10 s.
    let ttl = std::time::Duration::from_secs(15);
    let manager =
        flannel_subnet::LocalManager::new(Arc::new(registry.clone()), identity).with_ttl(ttl);
    let (lease, held) = hold(&Arc::new(manager), &US).await;
    registry
        .create(
            &key("10.9.9.0-24"),
            &attrs(&[]),
            Some(flannel_subnet::LeaseGrant { holder: HolderId(9), ttl }),
        )
        .await
        .unwrap();
    until(90, "the other's end", || async { count(&registry).await == 1 }).await;
    let entry = registry.entry(&lease.subnets).await.unwrap().unwrap();
    assert_eq!(entry.lease.revision, lease.revision, "renewed without a write");
    assert!(!held.is_finished());
    held.abort();
}
