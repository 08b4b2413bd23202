//! Bugs that the simulation of many nodes has found, each as a test.

use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use flannel_core::lease::{LeaseAttrs, Offer, Revision};
use flannel_core::subnet::{LeaseEnd, Loss, Ownership};
use flannel_core::{Error, Result, SubnetManager, Subnets};
use flannel_subnet::testing::TokioClock;
use flannel_subnet::{
    Clock, ConfigText, Entry, HolderId, Identity, LeaseGrant, LeaseList, LocalManager,
    MemoryRegistry, Registry, Watch,
};
use tokio::time::sleep;

const V4: &str = r#"{"Network":"10.1.0.0/16"}"#;
/// Two IPv4 subnets and a hundred IPv6 subnets, so that different pairs often share the IPv4
/// subnet.
const DUAL: &str = r#"{"Network":"10.1.0.0/16","SubnetMax":"10.1.2.0",
    "EnableIPv6":true,"IPv6Network":"fd00:1::/48"}"#;
const DAY: Duration = Duration::from_secs(86_400);

fn key(text: &str) -> Subnets {
    text.parse().unwrap()
}

fn attrs(node: u64) -> LeaseAttrs {
    let addresses = [format!("192.0.2.{node}"), format!("2001:db8::{node}")];
    LeaseAttrs::from(
        Offer::new(addresses.iter().map(|a| a.parse::<IpAddr>().unwrap()).collect())
            .with_kind("vxlan"),
    )
}

fn grant(holder: u64) -> Option<LeaseGrant> {
    Some(LeaseGrant { holder: HolderId(holder), ttl: DAY })
}

fn node(registry: impl Registry + 'static, holder: u64, previous: Option<&str>) -> LocalManager {
    let identity = Identity {
        holder: HolderId(holder),
        previous: previous.map(key),
        local_addresses: Vec::new(),
    };
    LocalManager::with_clock(Arc::new(registry), identity, Arc::new(TokioClock::new()))
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

/// A store whose answers can get lost, and which another node can use just before.
#[derive(Debug, Clone)]
struct LossyStore {
    registry: MemoryRegistry,
    /// The next creation is carried out, but its answer is lost.
    lose_created: Arc<AtomicBool>,
    /// Another node creates this key just before we do.
    faster: Option<Subnets>,
}

impl LossyStore {
    fn new(registry: &MemoryRegistry) -> Self {
        Self { registry: registry.clone(), lose_created: Arc::default(), faster: None }
    }
}

impl fmt::Display for LossyStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("lossy")
    }
}

#[async_trait]
impl Registry for LossyStore {
    async fn config(&self) -> Result<ConfigText> {
        self.registry.config().await
    }
    async fn config_changed(&self, known: Option<ConfigText>) -> Result<()> {
        self.registry.config_changed(known).await
    }
    async fn list(&self) -> Result<LeaseList> {
        self.registry.list().await
    }
    async fn entry(&self, subnets: &Subnets) -> Result<Option<Entry>> {
        self.registry.entry(subnets).await
    }
    async fn create(
        &self,
        subnets: &Subnets,
        attrs: &LeaseAttrs,
        grant: Option<LeaseGrant>,
    ) -> Result<Entry> {
        if let Some(faster) = self.faster {
            let other = self::attrs(99);
            let _ = self.registry.create(&faster, &other, self::grant(99)).await;
        }
        let created = self.registry.create(subnets, attrs, grant).await;
        if self.lose_created.swap(false, Ordering::Relaxed) {
            Err(Error::Store { store: "lossy".into(), source: "no answer".into() })
        } else {
            created
        }
    }
    async fn update(
        &self,
        subnets: &Subnets,
        at: Revision,
        attrs: &LeaseAttrs,
        grant: Option<LeaseGrant>,
    ) -> Result<Entry> {
        self.registry.update(subnets, at, attrs, grant).await
    }
    async fn delete(&self, subnets: &Subnets, at: Revision) -> Result<()> {
        self.registry.delete(subnets, at).await
    }
    async fn keep_alive(&self, subnets: &Subnets, holder: HolderId) -> Result<Option<Duration>> {
        self.registry.keep_alive(subnets, holder).await
    }
    async fn watch(&self, after: Revision) -> Result<Box<dyn Watch>> {
        self.registry.watch(after).await
    }
}

#[tokio::test(start_paused = true)]
async fn the_later_of_two_pairs_with_a_common_subnet_is_deleted() {
    let registry = MemoryRegistry::with_config(DUAL);
    let faster = key("10.1.1.0-24&fd00:1:0:77::-64");
    let manager = node(
        LossyStore { faster: Some(faster), ..LossyStore::new(&registry) },
        1,
        Some("10.1.1.0-24&fd00:1:0:5::-64"),
    );
    let lease = manager.acquire_lease(&attrs(1)).await.unwrap();
    assert!(!lease.subnets.overlaps(&faster), "{lease:?}");
    assert_eq!(keys(&registry).await, [faster.to_string(), lease.subnets.to_string()]);
}

#[tokio::test(start_paused = true)]
async fn a_half_acquired_pair_is_deleted_after_a_restart() {
    let registry = MemoryRegistry::with_config(DUAL);
    let first = key("10.1.1.0-24&fd00:1:0:77::-64");
    registry.create(&first, &attrs(99), grant(99)).await.unwrap();
    registry.create(&key("10.1.1.0-24&fd00:1:0:5::-64"), &attrs(1), grant(1)).await.unwrap();
    let lease = node(registry.clone(), 1, None).acquire_lease(&attrs(1)).await.unwrap();
    assert!(!lease.subnets.overlaps(&first), "{lease:?}");
    // The earlier one stays.
    let kept = node(registry.clone(), 99, None).acquire_lease(&attrs(99)).await.unwrap();
    assert_eq!(kept.subnets, first);
    assert_eq!(keys(&registry).await.len(), 2);
}

#[tokio::test(start_paused = true)]
async fn an_expired_pair_is_not_restored_if_another_node_has_one_of_its_subnets() {
    for lose_created in [false, true] {
        let registry = MemoryRegistry::with_config(DUAL);
        let lossy = LossyStore::new(&registry);
        let lost = Arc::clone(&lossy.lose_created);
        let manager = node(lossy, 1, Some("10.1.1.0-24&fd00:1:0:5::-64"));
        let lease = manager.acquire_lease(&attrs(1)).await.unwrap();
        registry.revoke(HolderId(1));
        registry.create(&key("10.1.1.0-24&fd00:1:0:77::-64"), &attrs(99), grant(99)).await.unwrap();
        lost.store(lose_created, Ordering::Relaxed);
        let end = manager.hold_lease(&lease).await.unwrap();
        assert!(matches!(end, LeaseEnd::Taken { .. }), "{end:?}");
        assert_eq!(keys(&registry).await, ["10.1.1.0-24&fd00:1:0:77::-64"]);
    }
}

#[tokio::test(start_paused = true)]
async fn a_lease_restored_by_a_request_without_an_answer_is_recognized() {
    let registry = MemoryRegistry::with_config(V4);
    let lossy = LossyStore::new(&registry);
    let lost = Arc::clone(&lossy.lose_created);
    let manager = node(lossy, 1, None);
    let lease = manager.acquire_lease(&attrs(1)).await.unwrap();
    registry.revoke(HolderId(1));
    lost.store(true, Ordering::Relaxed);
    let hold = manager.hold_lease(&lease);
    assert!(tokio::time::timeout(3 * DAY, hold).await.is_err(), "the lease stays held");
    assert_eq!(keys(&registry).await, [lease.subnets.to_string()]);
    assert!(matches!(manager.ownership_now(), Ownership::Held { until: Some(_) }));
}

#[tokio::test(start_paused = true)]
async fn of_two_leases_with_our_holder_id_only_the_previous_one_is_kept() {
    let registry = MemoryRegistry::with_config(V4);
    for text in ["10.1.3.0-24", "10.1.7.0-24"] {
        registry.create(&key(text), &attrs(1), grant(1)).await.unwrap();
    }
    let manager = node(registry.clone(), 1, Some("10.1.7.0-24"));
    let lease = manager.acquire_lease(&attrs(1)).await.unwrap();
    assert_eq!(lease.subnets, key("10.1.7.0-24"));
    assert!(tokio::time::timeout(DAY / 24, manager.hold_lease(&lease)).await.is_err());
    assert_eq!(keys(&registry).await, ["10.1.7.0-24"]);
}

#[tokio::test(start_paused = true)]
async fn a_lease_that_a_late_request_created_is_deleted_while_ours_is_held() {
    // Ours is the one that was created first.
    let registry =
        MemoryRegistry::with_config(r#"{"Network":"10.1.0.0/16","SubnetMax":"10.1.99.0"}"#);
    let manager = node(registry.clone(), 1, None);
    let lease = manager.acquire_lease(&attrs(1)).await.unwrap();
    let stray = key("10.1.200.0-24");
    let later = async {
        sleep(DAY / 2).await;
        registry.create(&stray, &attrs(1), grant(1)).await.unwrap();
        // Another node's lease with our address stays.
        registry.create(&key("10.1.201.0-24"), &attrs(1), grant(2)).await.unwrap();
        sleep(Duration::from_secs(60)).await;
    };
    tokio::select! {
        end = manager.hold_lease(&lease) => panic!("{end:?}"),
        () = later => (),
    }
    let left = keys(&registry).await;
    assert!(!left.contains(&stray.to_string()) && left.len() == 2, "{left:?}");
}

/// A boot time that runs slightly slow.
#[derive(Debug)]
struct SlowClock(TokioClock, Duration);

impl SlowClock {
    const RATE: f64 = 0.999_1;
}

#[async_trait]
impl Clock for SlowClock {
    fn boottime(&self) -> Duration {
        (self.0.boottime() - self.1).mul_f64(Self::RATE)
    }
    fn wall(&self) -> SystemTime {
        self.0.wall()
    }
    async fn sleep_until(&self, boottime: Duration) {
        sleep(boottime.saturating_sub(self.boottime()).div_f64(Self::RATE)).await;
    }
    async fn sleep_until_wall(&self, wall: SystemTime) {
        self.0.sleep_until_wall(wall).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_node_with_a_slow_clock_does_not_own_a_lease_that_the_store_expired() {
    let registry = MemoryRegistry::with_config(V4);
    let clock = TokioClock::new();
    let begin = clock.boottime();
    let identity = Identity { holder: HolderId(1), previous: None, local_addresses: Vec::new() };
    let manager = LocalManager::with_clock(
        Arc::new(registry.clone()),
        identity,
        Arc::new(SlowClock(clock, begin)),
    );
    manager.acquire_lease(&attrs(1)).await.unwrap();
    sleep(DAY - DAY / 400).await;
    assert!(
        matches!(manager.ownership_now(), Ownership::Held { until: Some(_) }),
        "{:?}",
        manager.ownership_now()
    );
    sleep(DAY / 400).await;
    assert_eq!(keys(&registry).await, [""; 0], "the store has forgotten it");
    assert!(
        matches!(manager.ownership_now(), Ownership::Lost { why: Loss::Unconfirmed, .. }),
        "{:?}",
        manager.ownership_now()
    );
}
