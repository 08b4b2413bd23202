//! `LocalManager` on the registry in memory, with paused time.

use std::collections::BTreeSet;
use std::future::Future;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;
use test_support::{Logged, eventually_async};

use flannel_core::address::Family;
use flannel_core::lease::{LeaseAttrs, Offer, Origin, View};
use flannel_core::subnet::{Calls, LeaseEnd, Loss, Ownership};
use flannel_core::{Error, Lease, SubnetManager, Subnets};
use flannel_subnet::testing::TokioClock;
use flannel_subnet::{
    Entry, HolderId, Identity, LeaseGrant, LocalManager, MemoryRegistry, Reflector, Registry,
};
use tokio::task::JoinHandle;
use tokio::time::Instant;

const V4: &str = r#"{"Network":"10.1.0.0/16"}"#;
const V6: &str = r#"{"EnableIPv4":false,"EnableIPv6":true,"IPv6Network":"fd00:1::/48"}"#;
const DUAL: &str = r#"{"Network":"10.1.0.0/16","EnableIPv6":true,"IPv6Network":"fd00:1::/48"}"#;
const HOUR: Duration = Duration::from_secs(3600);
const DAY: Duration = Duration::from_secs(86_400);

fn key(text: &str) -> Subnets {
    text.parse().unwrap()
}

fn attrs(addresses: &[&str]) -> LeaseAttrs {
    LeaseAttrs::from(
        Offer::new(addresses.iter().map(|a| a.parse::<IpAddr>().unwrap()).collect())
            .with_kind("vxlan"),
    )
}

/// The attributes of the same node with another VTEP.
fn other_data(of: &LeaseAttrs) -> LeaseAttrs {
    let mut attrs = of.clone();
    attrs.preferred.data.v4 = Some(r#"{"VNI":2}"#.into());
    attrs
}

fn node(registry: &MemoryRegistry, holder: u64) -> LocalManager {
    node_with_previous(registry, holder, None)
}

fn node_with_previous(
    registry: &MemoryRegistry,
    holder: u64,
    previous: Option<&str>,
) -> LocalManager {
    let identity = Identity {
        holder: HolderId(holder),
        previous: previous.map(key),
        local_addresses: vec!["192.0.2.1".parse().unwrap(), "2001:db8::1".parse().unwrap()],
    };
    LocalManager::with_clock(Arc::new(registry.clone()), identity, Arc::new(TokioClock::new()))
}

fn grant(holder: u64) -> Option<LeaseGrant> {
    Some(LeaseGrant { holder: HolderId(holder), ttl: DAY })
}

async fn put(
    registry: &MemoryRegistry,
    text: &str,
    attrs: &LeaseAttrs,
    holder: Option<u64>,
) -> Entry {
    registry.create(&key(text), attrs, holder.and_then(grant)).await.unwrap()
}

async fn keys(registry: &MemoryRegistry) -> Vec<String> {
    registry
        .list()
        .await
        .unwrap()
        .entries
        .iter()
        .map(|entry| entry.lease.subnets.to_string())
        .collect()
}

/// A node that holds its lease in a task.
struct Held {
    manager: Arc<LocalManager>,
    lease: Lease,
    task: JoinHandle<flannel_core::Result<LeaseEnd>>,
}

async fn hold(manager: LocalManager, attrs: &LeaseAttrs) -> Held {
    let manager = Arc::new(manager);
    let lease = manager.acquire_lease(attrs).await.unwrap();
    let mut views = manager.watch_leases().await.unwrap();
    let task = tokio::spawn({
        let manager = Arc::clone(&manager);
        let lease = lease.clone();
        async move { manager.hold_lease(&lease).await }
    });
    soon(views.wait_for(|view| matches!(view.origin, Origin::Live { .. }))).await.unwrap();
    Held { manager, lease, task }
}

impl Held {
    /// The reason for the end, which comes within a second.
    async fn end(self) -> LeaseEnd {
        soon(self.task).await.unwrap().unwrap()
    }
}

async fn soon<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(Duration::from_secs(1), future).await.expect("happens within a second")
}

#[tokio::test(start_paused = true)]
async fn a_new_node_gets_a_subnet_and_keeps_it_over_restarts() {
    let registry = MemoryRegistry::with_config(V4);
    let first = node(&registry, 1).acquire_lease(&attrs(&["192.0.2.1"])).await.unwrap();
    let subnet = first.subnets.family(Family::V4).unwrap();
    assert!(subnet.len() == 24 && subnet.to_string().starts_with("10.1."), "{subnet}");
    assert!(first.expires.is_some());
    // It is found by holder ID even with another address, and by address even with another holder
    // ID.
    let by_holder = node(&registry, 1).acquire_lease(&attrs(&["192.0.2.9"])).await.unwrap();
    assert_eq!(by_holder.subnets, first.subnets);
    let by_address = node(&registry, 2).acquire_lease(&attrs(&["192.0.2.9"])).await.unwrap();
    assert_eq!(by_address.subnets, first.subnets);
    assert_eq!(registry.entry(&first.subnets).await.unwrap().unwrap().holder, Some(HolderId(2)));
    assert_eq!(keys(&registry).await.len(), 1);
}

#[tokio::test(start_paused = true)]
async fn the_previous_subnets_come_back_if_they_are_free_and_fit() {
    let registry = MemoryRegistry::with_config(V4);
    let acquire = async |n: u64, previous: &str| {
        let manager = node_with_previous(&registry, n, Some(previous));
        manager.acquire_lease(&attrs(&[&format!("192.0.2.{n}")])).await.unwrap().subnets.to_string()
    };
    assert_eq!(acquire(1, "10.1.7.0-24").await, "10.1.7.0-24");
    for (n, taken_or_unfit) in
        [(2, "10.1.7.0-24"), (3, "10.1.0.0-24"), (4, "10.1.8.0-25"), (5, "10.2.7.0-24")]
    {
        let subnets = acquire(n, taken_or_unfit).await;
        assert!(subnets != taken_or_unfit && subnets.ends_with("-24"), "{subnets}");
    }
    put(&registry, "10.1.32.0-19", &attrs(&["192.0.2.77"]), Some(77)).await;
    assert_ne!(acquire(6, "10.1.40.0-24").await, "10.1.40.0-24", "overlaps");
}

#[tokio::test(start_paused = true)]
async fn a_lease_that_no_longer_fits_is_deleted_but_a_reservation_stays() {
    for (holder, left) in [(Some(1), 1), (Some(9), 1), (None, 2)] {
        let registry = MemoryRegistry::with_config(V4);
        let us = attrs(&["192.0.2.1"]);
        put(&registry, "10.9.1.0-24", &us, holder).await;
        let lease = node(&registry, 1).acquire_lease(&us).await.unwrap();
        assert!(lease.subnets.to_string().starts_with("10.1."), "{lease:?}");
        assert_eq!(keys(&registry).await.len(), left, "{holder:?}");
        let again = node(&registry, 1).acquire_lease(&us).await.unwrap();
        assert_eq!(again.subnets, lease.subnets);
    }
}

#[tokio::test(start_paused = true)]
async fn among_leases_with_our_address_the_holder_id_then_the_age_decides() {
    let us = attrs(&["192.0.2.1"]);
    for (holder, expected) in [(7, "10.1.3.0-24"), (1, "10.1.5.0-24")] {
        let registry = MemoryRegistry::with_config(V4);
        put(&registry, "10.1.5.0-24", &us, Some(6)).await;
        put(&registry, "10.1.3.0-24", &us, Some(7)).await;
        let lease = node(&registry, holder).acquire_lease(&us).await.unwrap();
        assert_eq!(lease.subnets, key(expected));
    }
}

#[tokio::test(start_paused = true)]
async fn all_subnets_are_assigned_and_the_next_node_gets_an_error() {
    for (config, total) in [
        (r#"{"Network":"10.1.0.0/22","SubnetLen":28}"#, 63),
        (r#"{"EnableIPv4":false,"EnableIPv6":true,"IPv6Network":"fd00:1::/58"}"#, 63),
    ] {
        let registry = MemoryRegistry::with_config(config);
        let address = |n: u64| attrs(&[&format!("192.0.2.{n}"), &format!("2001:db8::{n}")]);
        let mut tasks = tokio::task::JoinSet::new();
        for n in 1..=total {
            let manager = node(&registry, n);
            tasks.spawn(async move { manager.acquire_lease(&address(n)).await.unwrap().subnets });
        }
        let subnets: BTreeSet<Subnets> = tasks.join_all().await.into_iter().collect();
        assert_eq!(subnets.len() as u64, total);
        let error = node(&registry, 99).acquire_lease(&address(99)).await.unwrap_err();
        assert!(matches!(error, Error::OutOfSubnets { total: 63, .. }), "{error}");
    }
}

#[tokio::test(start_paused = true)]
async fn an_unreadable_key_occupies_its_subnet() {
    let registry = MemoryRegistry::with_config(r#"{"Network":"10.1.0.0/26","SubnetLen":28}"#);
    registry.put_raw("10.1.0.16-28", "nonsense", None);
    registry.put_raw("nonsense", "{}", None);
    put(&registry, "10.1.0.48-28", &attrs(&["192.0.2.8"]), Some(8)).await;
    let manager = node(&registry, 1);
    let lease = manager.acquire_lease(&attrs(&["192.0.2.1"])).await.unwrap();
    assert_eq!(lease.subnets, key("10.1.0.32-28"));
    let skipped: Vec<String> =
        manager.store_status().skipped.into_iter().map(|entry| entry.key).collect();
    assert_eq!(skipped, ["10.1.0.16-28", "nonsense"]);
    let other = node(&registry, 2);
    let error = soon(other.acquire_lease(&attrs(&["192.0.2.2"]))).await.unwrap_err();
    assert!(matches!(error, Error::OutOfSubnets { total: 3, .. }), "{error}");
}

/// A value that is not a lease keeps the last one, but a node that has started since does not know
/// it. So a value that is too large counts as none, on all nodes alike.
#[tokio::test(start_paused = true)]
async fn a_lease_that_becomes_too_large_is_gone_for_all_nodes_and_its_node_restores_it() {
    let registry = MemoryRegistry::with_config(V4);
    let large = format!(r#"{{"PublicIP":"192.0.2.7","BackendData":"{}"}}"#, "x".repeat(20_000));
    put(&registry, "10.1.7.0-24", &attrs(&["192.0.2.7"]), Some(7)).await;
    put(&registry, "10.1.8.0-24", &attrs(&["192.0.2.8"]), Some(8)).await;
    let running = Reflector::start(Arc::new(registry.clone()));
    let mut views = running.views();
    drop(soon(views.wait_for(|view| view.leases.len() == 2)).await.unwrap());
    registry.put_raw("10.1.7.0-24", &large, None);
    let started = Reflector::start(Arc::new(registry.clone()));
    for mut views in [views, started.views()] {
        let is_gone =
            |view: &View| view.leases.len() == 1 && view.leases.get(&key("10.1.8.0-24")).is_some();
        drop(soon(views.wait_for(is_gone)).await.unwrap());
    }

    let manager = Arc::new(node(&registry, 1));
    let lease = manager.acquire_lease(&attrs(&["192.0.2.1"])).await.unwrap();
    assert_ne!(lease.subnets, key("10.1.7.0-24"), "its subnet stays occupied");
    let mut own = manager.watch_leases().await.unwrap();
    let holding = tokio::spawn({
        let manager = Arc::clone(&manager);
        let lease = lease.clone();
        async move { manager.hold_lease(&lease).await }
    });
    drop(soon(own.wait_for(|view| view.leases.get(&lease.subnets).is_some())).await.unwrap());
    registry.put_raw(&lease.subnets.to_string(), &large, None);
    let is_restored = |view: &View| {
        let now = view.leases.get(&lease.subnets);
        now.is_some_and(|now| now.attrs == lease.attrs && now.revision > lease.revision)
    };
    drop(soon(own.wait_for(is_restored)).await.unwrap());
    assert!(!holding.is_finished(), "the node still holds its lease");
    holding.abort();
}

#[tokio::test(start_paused = true)]
async fn a_hundred_thousand_leases_leave_room_or_cause_a_clear_error() {
    let (logged, _guard) = Logged::collect();
    let registry = MemoryRegistry::with_config(V4);
    let value = r#"{"PublicIP":"192.0.2.66","BackendType":"vxlan"}"#;
    let name = |bits: u32, len: u8| format!("{}-{len}", std::net::Ipv4Addr::from_bits(bits));
    let in_network = |n: u32| 0x0a01_0000 + n;
    for n in 0..50_000 {
        registry.put_raw(&name(0x1400_0000 + (n << 8), 24), value, None);
        registry.put_raw(&format!("nonsense-{n}"), value, None);
    }
    // These take the subnets up to 10.1.78.0.
    (0..10_000).for_each(|n| registry.put_raw(&name(in_network(2 * n), 31), value, None));
    let manager = node(&registry, 1);
    let lease = manager.acquire_lease(&attrs(&["192.0.2.1"])).await.unwrap();
    let subnet = lease.subnets.family(Family::V4).unwrap();
    assert!(subnet.base() > IpAddr::from([10, 1, 78, 0]), "{subnet}");
    assert_eq!(logged.count("more keys of the store are skipped more=49995"), 1);
    assert!(logged.warnings().len() <= 6, "{:?}", logged.warnings());

    (79..256).for_each(|n| registry.put_raw(&name(in_network(n << 8), 24), value, None));
    let other = node(&registry, 2);
    let error = soon(other.acquire_lease(&attrs(&["192.0.2.2"]))).await.unwrap_err();
    assert!(matches!(error, Error::OutOfSubnets { total: 255, .. }), "{error}");
}

#[tokio::test(start_paused = true)]
async fn of_many_unreadable_keys_a_few_are_logged_and_the_others_are_counted() {
    let (logged, _guard) = Logged::collect();
    let registry = MemoryRegistry::with_config(V4);
    (0..1000).for_each(|n| registry.put_raw(&format!("nonsense-{n}"), "{}", None));
    let manager = node(&registry, 1);
    manager.hints().await.unwrap();
    assert_eq!(manager.store_status().skipped.len(), 1000);
    assert_eq!(logged.count("a key of the store is skipped"), 5);
    assert_eq!(logged.count("more keys of the store are skipped more=995"), 1);
    // Known keys are not logged again.
    registry.put_raw("other", "{}", None);
    manager.hints().await.unwrap();
    let keys = logged.count("a key of the store is skipped");
    assert_eq!(keys, 6, "{:?}", logged.warnings());
    assert_eq!(logged.warnings().len(), 7, "{:?}", logged.warnings());
}

#[tokio::test(start_paused = true)]
async fn a_takeover_is_a_warning_unless_another_flannel_on_this_host_had_the_lease() {
    let lease = "10.1.5.0-24";
    for (previous, after_another_flannel, warnings) in [
        (Some(lease), true, 0),
        (Some(lease), false, 1),
        (Some("10.1.6.0-24"), true, 1),
        (None, true, 1),
    ] {
        let logged = Logged::default();
        let _guard = tracing::subscriber::set_default(logged.clone());
        let registry = MemoryRegistry::with_config(V4);
        let ours = attrs(&["192.0.2.1"]);
        put(&registry, lease, &ours, Some(2)).await;
        let manager =
            node_with_previous(&registry, 1, previous).after_another_flannel(after_another_flannel);
        assert_eq!(manager.acquire_lease(&ours).await.unwrap().subnets, key(lease));
        let earlier = logged.count("taking over the lease of an earlier flannel on this host");
        let counts = (logged.warnings().len(), earlier);
        assert_eq!(counts, (warnings, 1 - warnings), "{previous:?} {after_another_flannel}");
    }
}

#[tokio::test(start_paused = true)]
async fn both_families_are_picked_independently_and_ipv6_alone_works() {
    let registry = MemoryRegistry::with_config(DUAL);
    let dual =
        node(&registry, 1).acquire_lease(&attrs(&["192.0.2.1", "2001:db8::1"])).await.unwrap();
    assert_eq!(dual.subnets.iter().map(|s| s.len()).collect::<Vec<_>>(), [24, 64]);

    let registry = MemoryRegistry::with_config(V6);
    let first = hold(node(&registry, 1), &attrs(&["2001:db8::1"])).await;
    let second = node(&registry, 2).acquire_lease(&attrs(&["2001:db8::2"])).await.unwrap();
    assert!(first.lease.subnets.to_string().starts_with("0.0.0.0-0&fd00:1:"));
    assert!(
        !first.lease.subnets.overlaps(&second.subnets),
        "a missing IPv4 address identifies no node"
    );
    let restarted = node(&registry, 3).acquire_lease(&attrs(&["2001:db8::1"])).await.unwrap();
    assert_eq!(restarted.subnets, first.lease.subnets);
    assert!(matches!(first.end().await, LeaseEnd::Taken { .. }));
}

#[tokio::test(start_paused = true)]
async fn a_renewed_lease_never_expires_and_notifies_no_receiver() {
    let registry = MemoryRegistry::with_config(V4);
    let held = hold(node(&registry, 1), &attrs(&["192.0.2.1"])).await;
    let observer = node(&registry, 2);
    let mut views = observer.watch_leases().await.unwrap();
    soon(views.wait_for(|view| view.leases.len() == 1)).await.unwrap();
    let before = held.manager.store_status().requests();
    tokio::time::sleep(10 * DAY).await;
    assert!(!views.has_changed().unwrap());
    assert_eq!(
        held.manager.store_status().requests() - before,
        20,
        "two requests every 23 hours, no more"
    );
    assert!(held.manager.remaining().is_some_and(|left| left > HOUR - Duration::from_secs(1)));
    assert!(!held.task.is_finished());
}

#[tokio::test(start_paused = true)]
async fn an_unreadable_lease_is_restored_at_the_next_renewal() {
    let registry = MemoryRegistry::with_config(V4);
    let held = hold(node(&registry, 1), &attrs(&["192.0.2.1"])).await;
    let key = held.lease.subnets;
    registry.put_raw(&key.to_string(), "not json", None);
    tokio::time::sleep(DAY).await;
    let entry = registry.entry(&key).await.unwrap().unwrap();
    assert_eq!(entry.holder, Some(HolderId(1)));
    assert_eq!(entry.lease.attrs, held.lease.attrs);
    assert!(matches!(held.manager.ownership_now(), Ownership::Held { until: Some(_) }));
    assert!(!held.task.is_finished());
}

#[tokio::test(start_paused = true)]
async fn a_changed_config_is_reported_and_a_wrong_one_is_ignored() {
    let registry = MemoryRegistry::with_config(V4);
    let manager = node(&registry, 1);
    let known = manager.network_config().await.unwrap();
    let changed = manager.config_changed(&known);
    tokio::pin!(changed);
    for text in [Some("nonsense"), None, Some(V4)] {
        registry.set_config(text);
        assert!(tokio::time::timeout(HOUR, &mut changed).await.is_err(), "{text:?}");
        let wrong = manager.store_status().wrong_config;
        assert_eq!(wrong.is_none(), text == Some(V4), "{text:?}: {wrong:?}");
    }
    registry.set_outage(true);
    registry.set_config(Some(V6));
    assert!(tokio::time::timeout(HOUR, &mut changed).await.is_err(), "out of reach");
    registry.set_outage(false);
    let config = tokio::time::timeout(HOUR, changed).await.unwrap().unwrap();
    assert!(config.networks.v6.is_some());
}

#[tokio::test(start_paused = true)]
async fn a_lease_is_acquired_again_with_a_wrong_or_missing_config() {
    let registry = MemoryRegistry::with_config("nonsense");
    let manager = node(&registry, 1);
    manager.acquire_lease(&attrs(&["192.0.2.1"])).await.unwrap_err();
    registry.set_config(Some(V4));
    let lease = manager.acquire_lease(&attrs(&["192.0.2.1"])).await.unwrap();
    for text in [Some("nonsense"), None] {
        registry.set_config(text);
        manager.network_config().await.unwrap_err();
        let again = manager.acquire_lease(&attrs(&["192.0.2.1"])).await.unwrap();
        assert_eq!(again.subnets, lease.subnets, "{text:?}");
    }
}

/// A network and its lease are of the same config.
#[tokio::test(start_paused = true)]
async fn a_lease_is_acquired_from_the_returned_config() {
    let registry = MemoryRegistry::with_config(V4);
    let manager = node(&registry, 1);
    let given = manager.network_config().await.unwrap();
    registry.set_config(Some(r#"{"Network":"10.9.0.0/16"}"#));
    let lease = manager.acquire_lease(&attrs(&["192.0.2.1"])).await.unwrap();
    let own = lease.subnets.family(Family::V4).unwrap();
    assert!(given.networks.v4.unwrap().network.covers(&own), "{own}");
    let waits = manager.config_changed(&given).await.unwrap();
    assert_ne!(waits.networks, given.networks, "the new one is reported and waits for a restart");
    assert_eq!(manager.network_config().await.unwrap().networks, given.networks);
}

#[tokio::test(start_paused = true)]
async fn a_deletion_stops_the_node_at_once() {
    let registry = MemoryRegistry::with_config(V4);
    let held = hold(node(&registry, 1), &attrs(&["192.0.2.1"])).await;
    let manager = Arc::clone(&held.manager);
    registry.delete_key(&held.lease.subnets.to_string());
    assert_eq!(held.end().await, LeaseEnd::Deleted);
    let why = Loss::Ended(LeaseEnd::Deleted);
    assert!(matches!(manager.ownership_now(), Ownership::Lost { why: now, .. } if now == why));
    assert_eq!(keys(&registry).await, [""; 0], "nothing is restored");
}

#[tokio::test(start_paused = true)]
async fn of_two_nodes_with_one_address_the_first_ends_and_names_the_second() {
    let registry = MemoryRegistry::with_config(V4);
    let us = attrs(&["192.0.2.1"]);
    let first = hold(node(&registry, 0xaaa), &us).await;
    let second = hold(node(&registry, 0xbbb), &other_data(&us)).await;
    assert_eq!(first.lease.subnets, second.lease.subnets);
    let LeaseEnd::Taken { by } = first.end().await else { panic!("taken") };
    assert!(by.contains("192.0.2.1") && by.contains("0bbb") && by.contains("0aaa"), "{by}");
    tokio::time::sleep(3 * DAY).await;
    assert!(!second.task.is_finished());
    assert_eq!(keys(&registry).await.len(), 1);
}

#[tokio::test(start_paused = true)]
async fn an_outage_changes_neither_the_view_nor_a_lease_that_outlives_it() {
    let registry = MemoryRegistry::with_config(V4);
    put(&registry, "10.1.9.0-24", &attrs(&["192.0.2.9"]), None).await;
    let held = hold(node(&registry, 1), &attrs(&["192.0.2.1"])).await;
    let views = held.manager.watch_leases().await.unwrap();
    registry.set_outage(true);
    tokio::time::sleep(23 * HOUR + HOUR / 2).await;
    assert_eq!(views.borrow().leases.len(), 2);
    let status = held.manager.store_status();
    assert!(status.failures() > 0 && status.last_error.is_some(), "{status:?}");
    assert!(status.calls["renew"].failed > 0 && status.calls["create"].failed == 0, "{status:?}");
    assert!(held.manager.remaining().is_some_and(|left| left <= HOUR / 2 + HOUR / 60));
    registry.set_outage(false);
    tokio::time::sleep(2 * Duration::from_secs(60)).await;
    assert!(held.manager.remaining().is_some_and(|left| left > 23 * HOUR));
    assert_eq!(held.manager.store_status().last_error, None);
    assert!(!held.task.is_finished());
}

#[tokio::test(start_paused = true)]
async fn ownership_is_published_when_it_changes_and_when_it_ends() {
    let registry = MemoryRegistry::with_config(V4);
    let manager = node(&registry, 1);
    let mut ownership = manager.ownership();
    assert_eq!(*ownership.borrow_and_update(), Ownership::NotAcquired);
    let lease = manager.acquire_lease(&attrs(&["192.0.2.1"])).await.unwrap();
    assert!(ownership.has_changed().unwrap());
    let published = ownership.borrow_and_update().clone();
    let Ownership::Held { until: Some(until) } = published else { panic!("{published:?}") };
    // Nothing holds the lease, so no request notices its end.
    let begin = Instant::now();
    ownership.changed().await.unwrap();
    let after = begin.elapsed();
    assert!(after + Duration::from_secs(1) >= DAY - DAY / 1000 && after <= DAY, "{after:?}");
    let published = ownership.borrow_and_update().clone();
    let Ownership::Lost { since, why } = published else { panic!("{published:?}") };
    assert_eq!(why, Loss::Unconfirmed);
    let apart = since.duration_since(until).unwrap_or_else(|error| error.duration());
    assert!(apart < Duration::from_secs(1), "{apart:?}");
    // It expires in the store, and another node takes it.
    tokio::time::sleep(DAY / 500).await;
    put(&registry, &lease.subnets.to_string(), &attrs(&["192.0.2.9"]), Some(9)).await;
    let end = manager.hold_lease(&lease).await.unwrap();
    assert!(matches!(end, LeaseEnd::Taken { .. }), "{end:?}");
    let published = ownership.borrow_and_update().clone();
    assert!(matches!(&published, Ownership::Lost { why: Loss::Ended(why), .. } if *why == end));
    manager.acquire_lease(&attrs(&["192.0.2.1"])).await.unwrap();
    assert!(ownership.borrow_and_update().is_held());
}

#[tokio::test(start_paused = true)]
async fn a_node_with_an_expired_lease_is_not_the_owner_and_restores_it() {
    let registry = MemoryRegistry::with_config(V4);
    let held = hold(node(&registry, 1), &attrs(&["192.0.2.1"])).await;
    registry.set_outage(true);
    tokio::time::sleep(25 * HOUR).await;
    assert!(
        matches!(held.manager.ownership_now(), Ownership::Lost { why: Loss::Unconfirmed, .. }),
        "{:?}",
        held.manager.ownership_now()
    );
    assert!(!held.task.is_finished(), "the state of the key is not known yet");
    registry.set_outage(false);
    let subnets = held.lease.subnets;
    eventually_async(
        2 * Duration::from_secs(60),
        async || registry.entry(&subnets).await.unwrap().is_some(),
        || "not acquired again",
    )
    .await;
    assert!(matches!(held.manager.ownership_now(), Ownership::Held { until: Some(_) }));
    tokio::time::sleep(3 * DAY).await;
    assert!(!held.task.is_finished());
}

#[tokio::test(start_paused = true)]
async fn an_expired_subnet_that_another_node_took_is_not_restored() {
    let registry = MemoryRegistry::with_config(V4);
    let held = hold(node(&registry, 1), &attrs(&["192.0.2.1"])).await;
    registry.set_outage(true);
    tokio::time::sleep(25 * HOUR).await;
    let value = attrs(&["192.0.2.2"]).to_json();
    registry.put_raw(&held.lease.subnets.to_string(), &value, grant(2));
    registry.set_outage(false);
    let end =
        tokio::time::timeout(Duration::from_secs(120), held.task).await.unwrap().unwrap().unwrap();
    let LeaseEnd::Taken { by } = end else { panic!("{end:?}") };
    assert!(by.contains("192.0.2.2"), "{by}");
}

#[tokio::test(start_paused = true)]
async fn a_revoked_holder_restores_its_lease_at_once() {
    let registry = MemoryRegistry::with_config(V4);
    let held = hold(node(&registry, 1), &attrs(&["192.0.2.1"])).await;
    registry.revoke(HolderId(1));
    let subnets = held.lease.subnets;
    eventually_async(
        Duration::from_secs(1),
        async || registry.entry(&subnets).await.unwrap().is_some(),
        || "not acquired again",
    )
    .await;
    assert!(!held.task.is_finished());
}

#[tokio::test(start_paused = true)]
async fn foreign_attributes_are_replaced_and_published_ones_are_kept() {
    let registry = MemoryRegistry::with_config(V4);
    let us = attrs(&["192.0.2.1"]);
    let held = hold(node(&registry, 1), &us).await;
    let subnets = held.lease.subnets;
    let stored = async || registry.entry(&subnets).await.unwrap().unwrap().lease.attrs.clone();

    registry.put_raw(&subnets.to_string(), &other_data(&us).to_json(), grant(1));
    eventually_async(Duration::from_secs(1), async || stored().await == us, || "not restored")
        .await;

    let current = registry.entry(&subnets).await.unwrap().unwrap().lease;
    let lease = Lease { revision: current.revision, ..held.lease.clone() };
    let published = held.manager.publish(&lease, &other_data(&us)).await.unwrap();
    tokio::time::sleep(2 * DAY).await;
    assert_eq!(stored().await, other_data(&us));
    let stale = held.manager.publish(&lease, &us).await.unwrap_err();
    assert!(matches!(stale, Error::Conflict { .. }), "{stale}");
    held.manager.publish(&published, &us).await.unwrap();
    assert!(!held.task.is_finished());

    // Our holder ID with another node's address: a copy of our state directory.
    registry.put_raw(&subnets.to_string(), &attrs(&["192.0.2.2"]).to_json(), grant(1));
    let LeaseEnd::Taken { by } = held.end().await else { panic!("taken") };
    assert!(by.contains("192.0.2.2") && by.contains("copied"), "{by}");
}

#[tokio::test(start_paused = true)]
async fn a_reservation_stays_a_reservation() {
    let registry = MemoryRegistry::with_config(V4);
    let reserved = LeaseAttrs::from(attrs(&["192.0.2.1"]).preferred.with_kind(""));
    put(&registry, "10.1.5.0-24", &reserved, None).await;
    let us = attrs(&["192.0.2.1"]);
    let held = hold(node(&registry, 1), &us).await;
    assert_eq!(held.lease.subnets, key("10.1.5.0-24"));
    assert_eq!(held.lease.expires, None);
    assert_eq!(held.manager.ownership_now(), Ownership::Held { until: None });
    let before = held.manager.store_status().requests();
    tokio::time::sleep(10 * DAY).await;
    assert_eq!(held.manager.store_status().requests(), before, "nothing to renew");
    let entry = registry.entry(&held.lease.subnets).await.unwrap().unwrap();
    assert_eq!(entry.holder, None);
    assert_eq!(entry.lease.attrs, us);

    // Its attributes were removed, and are written again.
    registry.put_raw("10.1.5.0-24", &reserved.to_json(), None);
    let subnets = held.lease.subnets;
    let filled = async || registry.entry(&subnets).await.unwrap().unwrap().lease.attrs == us;
    eventually_async(Duration::from_secs(1), filled, || "not filled in").await;

    // A second node with the same address.
    let second = hold(node(&registry, 2), &other_data(&us)).await;
    assert!(matches!(held.end().await, LeaseEnd::Taken { .. }));
    registry.delete_key("10.1.5.0-24");
    assert_eq!(second.end().await, LeaseEnd::Deleted);
}

#[tokio::test(start_paused = true)]
async fn recently_freed_subnets_are_picked_last() {
    let registry = MemoryRegistry::with_config(r#"{"Network":"10.1.0.0/26","SubnetLen":28}"#);
    let first = put(&registry, "10.1.0.16-28", &attrs(&["192.0.2.8"]), Some(8)).await;
    let manager = node(&registry, 1);
    let mut views = manager.watch_leases().await.unwrap();
    soon(views.wait_for(|view| view.leases.len() == 1)).await.unwrap();
    registry.delete(&first.lease.subnets, first.lease.revision).await.unwrap();
    soon(views.wait_for(|view| view.leases.is_empty())).await.unwrap();
    let mut order = Vec::new();
    for _ in 0..3 {
        let lease = manager.acquire_lease(&attrs(&["192.0.2.1"])).await.unwrap();
        order.push(lease.subnets.to_string());
        // Another node has it from now on.
        let value = attrs(&[&format!("192.0.2.{}", 20 + order.len())]).to_json();
        registry.put_raw(&lease.subnets.to_string(), &value, None);
    }
    assert_eq!(order[2], "10.1.0.16-28", "{order:?}");
}

#[tokio::test(start_paused = true)]
async fn hints_find_our_lease_by_holder_or_by_address() {
    let registry = MemoryRegistry::with_config(V4);
    let manager = node_with_previous(&registry, 1, Some("10.1.3.0-24"));
    let previous = async || manager.hints().await.unwrap().previous.unwrap().to_string();
    assert_eq!(manager.hints().await.unwrap().last_published, None);
    assert_eq!(previous().await, "10.1.3.0-24");

    let by_subnets = other_data(&attrs(&["192.0.2.33"]));
    put(&registry, "10.1.3.0-24", &by_subnets, Some(3)).await;
    assert_eq!(
        manager.hints().await.unwrap().last_published,
        None,
        "another node has our previous subnets"
    );
    put(&registry, "10.1.4.0-24", &attrs(&["192.0.2.1"]), Some(4)).await;
    assert_eq!(previous().await, "10.1.4.0-24");
    put(&registry, "10.1.5.0-24", &attrs(&["192.0.2.1"]), Some(5)).await;
    assert_eq!(previous().await, "10.1.3.0-24", "two leases have our address");
    put(&registry, "10.1.6.0-24", &attrs(&["192.0.2.66"]), Some(1)).await;
    assert_eq!(previous().await, "10.1.6.0-24");
    assert!(manager.hints().await.unwrap().public.is_empty());
}

#[tokio::test(start_paused = true)]
async fn config_errors_name_the_location() {
    let registry = MemoryRegistry::new();
    let manager = node(&registry, 1);
    let error = manager.acquire_lease(&attrs(&["192.0.2.1"])).await.unwrap_err();
    assert!(
        matches!(&error, Error::NoConfig { location } if location.contains("config")),
        "{error}"
    );
    registry.set_config(Some(r#"{"Network":7}"#));
    let error = manager.network_config().await.unwrap_err().to_string();
    assert!(error.contains("config") && error.contains("field Network: 7"), "{error}");
    assert_eq!(manager.store_status().failures(), 0, "the store answered");
    assert_eq!(manager.store_status().requests(), 2);
    assert_eq!(manager.store_status().calls["config"], Calls { sent: 2, failed: 0 });
}

#[tokio::test(start_paused = true)]
async fn ownership_is_counted_from_the_request_not_from_the_reply() {
    let registry = MemoryRegistry::with_config(V4);
    let delay = Duration::from_secs(600);
    registry.set_reply_delay(delay);
    let manager = Arc::new(node(&registry, 1));
    let lease = manager.acquire_lease(&attrs(&["192.0.2.1"])).await.unwrap();
    assert!(
        manager.remaining().is_some_and(|left| left <= DAY - delay),
        "{:?}",
        manager.ownership_now()
    );
    let held = tokio::spawn({
        let manager = Arc::clone(&manager);
        async move { manager.hold_lease(&lease).await }
    });
    // At all times the store keeps the key at least as long as the node owns it.
    for _ in 0..400 {
        tokio::time::sleep(delay).await;
        assert!(
            manager.remaining().is_some_and(|left| left <= DAY - delay || left > DAY - 2 * delay)
        );
    }
    registry.set_outage(true);
    let left = manager.remaining().expect("a lease that is held");
    tokio::time::sleep(left - Duration::from_secs(1)).await;
    registry.set_outage(false);
    registry.set_reply_delay(Duration::ZERO);
    assert_eq!(keys(&registry).await.len(), 1, "the key still exists");
    assert!(!held.is_finished());
}

#[tokio::test(start_paused = true)]
async fn a_lease_whose_reply_was_lost_is_found_again() {
    let registry = MemoryRegistry::with_config(V4);
    registry.set_reply_delay(Duration::from_secs(10));
    let manager = node(&registry, 1);
    let us = attrs(&["192.0.2.1"]);
    let lost = tokio::time::timeout(Duration::from_secs(15), manager.acquire_lease(&us)).await;
    assert!(lost.is_err());
    let lease = manager.acquire_lease(&us).await.unwrap();
    assert_eq!(keys(&registry).await, [lease.subnets.to_string()]);
}

#[tokio::test(start_paused = true)]
async fn another_manager_can_continue_to_hold_a_lease() {
    let registry = MemoryRegistry::with_config(V4);
    let lease = node(&registry, 1).acquire_lease(&attrs(&["192.0.2.1"])).await.unwrap();
    tokio::time::sleep(20 * HOUR).await;
    let manager = Arc::new(node(&registry, 1));
    let held = tokio::spawn({
        let manager = Arc::clone(&manager);
        let lease = lease.clone();
        async move { manager.hold_lease(&lease).await }
    });
    tokio::time::sleep(3 * DAY).await;
    assert!(!held.is_finished());
    registry.delete_key(&lease.subnets.to_string());
    assert_eq!(soon(held).await.unwrap().unwrap(), LeaseEnd::Deleted);
}

#[tokio::test(start_paused = true)]
async fn a_publication_is_recognized_if_the_watch_is_faster_than_the_reply() {
    let registry = MemoryRegistry::with_config(V4);
    let us = attrs(&["192.0.2.1"]);
    let held = hold(node(&registry, 1), &us).await;
    registry.set_reply_delay(Duration::from_secs(2));
    held.manager.publish(&held.lease, &other_data(&us)).await.unwrap();
    tokio::time::sleep(Duration::from_secs(60)).await;
    registry.set_reply_delay(Duration::ZERO);
    let entry = registry.entry(&held.lease.subnets).await.unwrap().unwrap();
    assert_eq!(entry.lease.attrs, other_data(&us));
    assert!(!held.task.is_finished());
}
