//! The requests that a manager makes.

use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use async_trait::async_trait;
use flannel_core::backoff::FailurePauses;
use flannel_core::lease::{LeaseAttrs, Revision};
use flannel_core::subnet::{LeaseEnd, StoreReason};
use flannel_core::{Error, Lease, Result, SubnetManager, Subnets};
use flannel_subnet::testing::TokioClock;
use flannel_subnet::{
    Batch, Clock, ConfigText, Entry, HolderId, Identity, LeaseGrant, LeaseList, LocalManager,
    MemoryRegistry, Reflector, Registry, Watch,
};
use mockall::mock;

mock! {
    #[derive(Debug)]
    Store {}
    impl fmt::Display for Store {
        fn fmt<'a>(&self, f: &mut fmt::Formatter<'a>) -> fmt::Result;
    }
    #[async_trait]
    impl Registry for Store {
        async fn config(&self) -> Result<ConfigText>;
        async fn config_changed(&self, known: Option<ConfigText>) -> Result<()>;
        async fn list(&self) -> Result<LeaseList>;
        async fn entry(&self, subnets: &Subnets) -> Result<Option<Entry>>;
        async fn create(
            &self,
            subnets: &Subnets,
            attrs: &LeaseAttrs,
            grant: Option<LeaseGrant>,
        ) -> Result<Entry>;
        async fn create_or_list(
            &self,
            subnets: &Subnets,
            attrs: &LeaseAttrs,
            grant: Option<LeaseGrant>,
        ) -> Result<Result<Entry, LeaseList>>;
        async fn update(
            &self,
            subnets: &Subnets,
            at: Revision,
            attrs: &LeaseAttrs,
            grant: Option<LeaseGrant>,
        ) -> Result<Entry>;
        async fn delete(&self, subnets: &Subnets, at: Revision) -> Result<()>;
        async fn keep_alive(&self, subnets: &Subnets, holder: HolderId) -> Result<Option<Duration>>;
        async fn watch(&self, after: Revision) -> Result<Box<dyn Watch>>;
        fn trouble(&self) -> Option<StoreReason>;
        fn failure_pauses(&self) -> FailurePauses;
    }
}

const DAY: Duration = Duration::from_secs(86_400);

fn entry(holder: Option<u64>) -> Entry {
    let attrs = LeaseAttrs::from_json(r#"{"PublicIP":"192.0.2.1","BackendType":"vxlan"}"#).unwrap();
    let lease = Lease {
        subnets: "10.1.5.0-24".parse().unwrap(),
        attrs,
        expires: None,
        since: Revision(1),
        revision: Revision(7),
    };
    Entry { lease: lease.into(), holder: holder.map(HolderId) }
}

/// A store with a config and these leases, which is listed once. Other requests must be expected.
fn store(entries: Vec<Entry>) -> MockStore {
    let mut store = MockStore::new();
    store.expect_fmt().returning(|f| f.write_str("mock"));
    store.expect_failure_pauses().returning(FailurePauses::of_local_store);
    store.expect_config().times(1).returning(|| {
        Ok(ConfigText { location: "config".into(), text: r#"{"Network":"10.1.0.0/16"}"#.into() })
    });
    store.expect_list().times(1).returning(move || {
        Ok(LeaseList { entries: entries.clone(), revision: Revision(9), ..LeaseList::default() })
    });
    store
}

async fn acquire(store: MockStore) -> Lease {
    let identity = Identity { holder: HolderId(1), previous: None, local_addresses: Vec::new() };
    let manager = LocalManager::with_clock(Arc::new(store), identity, Arc::new(TokioClock::new()));
    manager.acquire_lease(&entry(None).lease.attrs).await.unwrap()
}

#[tokio::test]
async fn a_restart_without_changes_renews_and_writes_nothing() {
    let mut store = store(vec![entry(Some(1))]);
    store
        .expect_keep_alive()
        .times(1)
        .withf(|_, holder| *holder == HolderId(1))
        .returning(|_, _| Ok(Some(DAY)));
    assert!(acquire(store).await.expires.is_some());
}

#[tokio::test]
async fn an_equal_reservation_costs_no_request() {
    assert_eq!(acquire(store(vec![entry(None)])).await.expires, None);
}

#[tokio::test]
async fn a_takeover_is_one_compare_and_swap_at_the_read_revision() {
    let mut store = store(vec![entry(Some(2))]);
    let grant = Some(LeaseGrant { holder: HolderId(1), ttl: DAY });
    store
        .expect_update()
        .times(1)
        .withf(move |_, at, _, given| *at == Revision(7) && *given == grant)
        .returning(|_, _, _, _| Ok(entry(Some(1))));
    acquire(store).await;
}

/// An entry with these subnets and this holder.
fn at(subnets: Subnets, holder: u64) -> Entry {
    let entry = entry(Some(holder));
    Entry { lease: Lease { subnets, ..Lease::clone(&entry.lease) }.into(), ..entry }
}

#[tokio::test]
async fn a_new_lease_is_three_requests() {
    let mut store = store(Vec::new());
    store
        .expect_create_or_list()
        .times(1)
        .withf(|_, _, grant| *grant == Some(LeaseGrant { holder: HolderId(1), ttl: DAY }))
        .returning(|subnets, _, _| Ok(Ok(at(*subnets, 1))));
    acquire(store).await;
}

#[tokio::test]
async fn a_lost_race_costs_one_more_request() {
    let mut store = store(Vec::new());
    let lost = Arc::new(OnceLock::new());
    store.expect_create_or_list().times(2).returning({
        let lost = Arc::clone(&lost);
        move |subnets, _, _| match lost.set(*subnets) {
            Ok(()) => {
                let mut other = at(*subnets, 2);
                Arc::make_mut(&mut other.lease).attrs.preferred.public =
                    ["192.0.2.2".parse::<std::net::IpAddr>().unwrap()].into_iter().collect();
                Ok(Err(LeaseList { entries: vec![other], ..LeaseList::default() }))
            }
            Err(_) => Ok(Ok(at(*subnets, 1))),
        }
    });
    assert_ne!(lost.get(), Some(&acquire(store).await.subnets));
}

/// A store that reports a conflict without its content.
#[tokio::test(start_paused = true)]
async fn after_a_lost_race_without_content_the_store_is_listed_later() {
    let mut store = MockStore::new();
    store.expect_fmt().returning(|f| f.write_str("mock"));
    let config =
        || ConfigText { location: "config".into(), text: r#"{"Network":"10.1.0.0/16"}"#.into() };
    store.expect_config().returning(move || Ok(config()));
    store.expect_list().times(4).returning(|| Ok(LeaseList::default()));
    let mut refusals = 3;
    store.expect_create_or_list().times(4).returning(move |subnets, _, _| {
        let refused = refusals > 0;
        refusals -= i32::from(refused);
        Ok(if refused { Err(LeaseList::default()) } else { Ok(at(*subnets, 1)) })
    });
    let begin = tokio::time::Instant::now();
    acquire(store).await;
    assert!(begin.elapsed() > Duration::ZERO, "it does not spin");
}

/// A watch that reports nothing, like one with a dead connection.
struct Silence;

#[async_trait]
impl Watch for Silence {
    async fn next(&mut self) -> Result<Option<Batch>> {
        std::future::pending().await
    }
}

/// Holds the lease of `entry(Some(1))` on a store whose list once returned only `listed`.
async fn hold(mut store: MockStore, listed: Vec<Entry>) -> LeaseEnd {
    store.expect_watch().times(1).returning(|_| Ok(Box::new(Silence)));
    store.expect_failure_pauses().returning(FailurePauses::of_local_store);
    store.expect_fmt().returning(|f| f.write_str("mock"));
    store.expect_list().times(1).returning(move || {
        Ok(LeaseList { entries: listed.clone(), revision: Revision(9), ..LeaseList::default() })
    });
    let clock = TokioClock::new();
    let identity = Identity { holder: HolderId(1), previous: None, local_addresses: Vec::new() };
    let held = Lease { expires: Some(clock.wall()), ..Lease::clone(&entry(Some(1)).lease) };
    let manager = LocalManager::with_clock(Arc::new(store), identity, Arc::new(clock));
    manager.hold_lease(&held).await.unwrap()
}

#[tokio::test(start_paused = true)]
async fn a_renewal_reads_the_key_if_the_view_differs() {
    let mut store = MockStore::new();
    let mut entries = vec![None, Some(entry(Some(1))), Some(entry(Some(1)))];
    store.expect_entry().returning(move |_| Ok(entries.pop().flatten()));
    store.expect_keep_alive().returning(|_, _| Ok(Some(DAY)));
    assert_eq!(hold(store, Vec::new()).await, LeaseEnd::Deleted);
}

#[tokio::test(start_paused = true)]
async fn a_node_that_lost_ownership_reads_the_key_before_it_owns_again() {
    let mut store = MockStore::new();
    let begin = tokio::time::Instant::now();
    store.expect_keep_alive().returning(move |_, _| match begin.elapsed() {
        passed if passed < Duration::from_secs(1) || passed > 2 * DAY => Ok(Some(DAY)),
        _ => Err(Error::Store { store: "mock".into(), source: "out of reach".into() }),
    });
    store.expect_entry().times(1).returning(|_| Ok(Some(entry(Some(1)))));
    store.expect_entry().times(1).returning(|_| Ok(Some(entry(Some(2)))));
    let LeaseEnd::Taken { by } = hold(store, vec![entry(Some(1))]).await else { panic!("taken") };
    assert!(by.contains("0002"), "{by}");
}

/// The watch is silent and the list outdated, but renewals succeed.
#[tokio::test(start_paused = true)]
async fn a_renewal_reads_the_key_even_if_the_view_does_not_differ() {
    let mut store = MockStore::new();
    store.expect_keep_alive().returning(|_, _| Ok(Some(DAY)));
    store.expect_entry().returning(|_| Ok(Some(entry(Some(2)))));
    let end = hold(store, vec![entry(Some(1))]).await;
    assert!(matches!(end, LeaseEnd::Taken { .. }), "{end:?}");
}

fn refusal() -> Error {
    Error::Refused { store: "memory".into(), reason: "the certificate has expired".into() }
}

#[tokio::test]
async fn a_refusal_confirms_nothing_and_the_cache_answers() {
    let path = tempfile::tempdir().unwrap();
    let path = path.path().join("leases");
    let identity = || Identity { holder: HolderId(1), previous: None, local_addresses: Vec::new() };
    let registry = Arc::new(MemoryRegistry::with_config(r#"{"Network":"10.1.0.0/16"}"#));
    let before = LocalManager::new(registry, identity()).with_cache(&path);
    let lease = before.acquire_lease(&entry(None).lease.attrs).await.unwrap();
    let mut views = before.watch_leases().await.unwrap();
    views.wait_for(|view| view.leases.len() == 1).await.unwrap();
    let kept = async {
        while !path.exists() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), kept).await.expect("the lease is kept on disk");

    let mut store = MockStore::new();
    store.expect_fmt().returning(|f| f.write_str("memory"));
    store.expect_trouble().return_const(None);
    store.expect_config().returning(|| Err(refusal()));
    store.expect_list().returning(|| Err(refusal()));
    let after = LocalManager::new(Arc::new(store), identity()).with_cache(&path);
    let config = after.network_config().await.unwrap();
    assert_eq!(config.pod_networks().next().unwrap().to_string(), "10.1.0.0/16");
    let status = after.store_status();
    assert!(status.confirmed.is_none() && status.failures() == 1, "{status:?}");
    assert!(status.last_error.unwrap().text.contains("has expired"));
    assert_eq!(after.hints().await.unwrap().previous, Some(lease.subnets));
    assert_eq!(after.acquire_lease(&lease.attrs).await.unwrap().subnets, lease.subnets);
}

/// Thousands of nodes ask a server that they share.
#[tokio::test(start_paused = true)]
async fn a_store_that_fails_is_listed_after_its_own_pauses() {
    let local: fn() -> FailurePauses = FailurePauses::of_local_store;
    for (pauses, lists) in [(local, 100..300), (FailurePauses::of_shared_server, 8..17)] {
        let requests = Arc::new(AtomicUsize::new(0));
        let mut store = MockStore::new();
        store.expect_fmt().returning(|f| f.write_str("mock"));
        store.expect_failure_pauses().returning(pauses);
        let counted = Arc::clone(&requests);
        store.expect_list().returning(move || {
            counted.fetch_add(1, Ordering::Relaxed);
            Err(Error::Store { store: "mock".into(), source: "out of reach".into() })
        });
        let reflector = Reflector::start(Arc::new(store));
        tokio::time::sleep(Duration::from_secs(600)).await;
        drop(reflector);
        let sent = requests.load(Ordering::Relaxed);
        assert!(lists.contains(&sent), "{sent} requests in ten minutes, expected {lists:?}");
    }
}

/// A watch that a proxy ends.
struct MinuteWatch;

#[async_trait]
impl Watch for MinuteWatch {
    async fn next(&mut self) -> Result<Option<Batch>> {
        tokio::time::sleep(Duration::from_secs(60)).await;
        Err(Error::Store { store: "mock".into(), source: "it ended the watch".into() })
    }
}

#[tokio::test(start_paused = true)]
async fn watches_that_a_proxy_ends_are_begun_again_soon() {
    let lists = Arc::new(AtomicUsize::new(0));
    let mut store = MockStore::new();
    store.expect_fmt().returning(|f| f.write_str("mock"));
    store.expect_failure_pauses().returning(FailurePauses::of_shared_server);
    let counted = Arc::clone(&lists);
    store.expect_list().returning(move || {
        counted.fetch_add(1, Ordering::Relaxed);
        Ok(LeaseList::default())
    });
    store.expect_watch().returning(|_| Ok(Box::new(MinuteWatch)));
    let reflector = Reflector::start(Arc::new(store));
    tokio::time::sleep(Duration::from_secs(3_600)).await;
    drop(reflector);
    // Each pause is at most 1.6 s.
    let lists = lists.load(Ordering::Relaxed);
    assert!((58..=60).contains(&lists), "{lists} watches of a minute in an hour");
}

/// A list does not name all keys that cannot be used, if somebody wrote very many.
#[tokio::test(start_paused = true)]
async fn a_node_whose_previous_key_is_not_listed_takes_other_subnets() {
    let mut store = MockStore::new();
    store.expect_fmt().returning(|f| f.write_str("mock"));
    store.expect_trouble().return_const(None);
    store.expect_config().returning(|| {
        let text = r#"{"Network":"10.1.0.0/16"}"#.into();
        Ok(ConfigText { location: "mock".into(), text })
    });
    store.expect_list().times(1..5).returning(|| Ok(LeaseList::default()));
    let previous: Subnets = "10.1.5.0-24".parse().unwrap();
    store.expect_create_or_list().times(1..5).returning(move |subnets, attrs, grant| {
        if *subnets == previous {
            return Ok(Err(LeaseList::default()));
        }
        let mut entry = entry(grant.map(|grant| grant.holder.0));
        let lease = Arc::make_mut(&mut entry.lease);
        lease.subnets = *subnets;
        lease.attrs = attrs.clone();
        Ok(Ok(entry))
    });
    let identity =
        Identity { holder: HolderId(1), previous: Some(previous), local_addresses: Vec::new() };
    let manager = LocalManager::new(Arc::new(store), identity);
    let attrs = entry(None).lease.attrs.clone();
    let lease = tokio::time::timeout(DAY, manager.acquire_lease(&attrs));
    let lease = lease.await.expect("within a day").unwrap();
    assert_ne!(lease.subnets, previous);
}
