//! A manager that starts while its store is unreachable, with time paused.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use flannel_core::address::Dual;
use flannel_core::lease::{LeaseAttrs, Origin, View};
use flannel_core::subnet::{LeaseEnd, Loss, Ownership, StoreFailure};
use flannel_core::{Error, Lease, SubnetManager, Subnets};
use flannel_subnet::testing::TokioClock;
use flannel_subnet::{
    Cache, Clock, HolderId, Identity, LeaseGrant, LocalManager, MemoryRegistry, Registry,
};
use tokio::sync::watch;
use tokio::time::{sleep, timeout};

const MINUTE: Duration = Duration::from_secs(60);
const CONFIG: &str = r#"{"Network":"10.1.0.0/16"}"#;
const HOUR: Duration = Duration::from_secs(3600);
const DAY: Duration = Duration::from_secs(86_400);

fn key(text: &str) -> Subnets {
    text.parse().unwrap()
}

fn attrs(node: u8) -> LeaseAttrs {
    LeaseAttrs::from_json(&format!(r#"{{"PublicIP":"192.0.2.{node}","BackendType":"vxlan"}}"#))
        .unwrap()
}

/// A wall clock with an offset in seconds, which a test sets, and a boot.
#[derive(Debug, Clone)]
struct WallClock {
    clock: TokioClock,
    offset: watch::Sender<i64>,
    boot: Option<&'static str>,
}

impl WallClock {
    fn new(clock: &TokioClock, offset: i64, boot: Option<&'static str>) -> Self {
        Self { clock: clock.clone(), offset: watch::Sender::new(offset), boot }
    }

    fn set(&self, offset: i64) {
        self.offset.send_replace(offset);
    }
}

#[async_trait]
impl Clock for WallClock {
    fn boottime(&self) -> Duration {
        self.clock.boottime()
    }
    fn boot(&self) -> Option<String> {
        self.boot.map(ToOwned::to_owned)
    }
    fn wall(&self) -> SystemTime {
        let offset = *self.offset.borrow();
        let by = Duration::from_secs(offset.unsigned_abs());
        if offset < 0 { self.clock.wall() - by } else { self.clock.wall() + by }
    }
    async fn sleep_until(&self, boottime: Duration) {
        self.clock.sleep_until(boottime).await;
    }
    async fn sleep_until_wall(&self, wall: SystemTime) {
        let mut set = self.offset.subscribe();
        tokio::select! {
            () = sleep(wall.duration_since(self.wall()).unwrap_or_default()) => (),
            _ = set.changed() => (),
        }
    }
}

struct Fixture {
    registry: MemoryRegistry,
    clock: TokioClock,
    dir: tempfile::TempDir,
}

impl Fixture {
    fn new() -> Self {
        let registry = MemoryRegistry::with_config(CONFIG);
        Self { registry, clock: TokioClock::new(), dir: tempfile::tempdir().unwrap() }
    }

    fn path(&self) -> std::path::PathBuf {
        self.dir.path().join("leases")
    }

    fn node(&self, wall: i64) -> LocalManager {
        self.node_with_holder(1, wall)
    }

    fn node_with_holder(&self, holder: u64, wall: i64) -> LocalManager {
        self.manager(holder, None, wall).with_cache(self.path())
    }

    /// A node without a cache.
    fn manager(&self, holder: u64, previous: Option<Subnets>, wall: i64) -> LocalManager {
        let identity = Identity { holder: HolderId(holder), previous, local_addresses: Vec::new() };
        let clock = Arc::new(WallClock::new(&self.clock, wall, None));
        LocalManager::with_clock(Arc::new(self.registry.clone()), identity, clock)
    }

    /// A node whose clock a test sets.
    fn node_with_clock(&self, clock: &WallClock) -> LocalManager {
        let identity =
            Identity { holder: HolderId(1), previous: None, local_addresses: Vec::new() };
        let clock = Arc::new(clock.clone());
        LocalManager::with_clock(Arc::new(self.registry.clone()), identity, clock)
            .with_cache(self.path())
    }

    async fn peer(&self, text: &str, n: u8) {
        let grant = Some(LeaseGrant { holder: HolderId(u64::from(n)), ttl: 9 * DAY });
        self.registry.create(&key(text), &attrs(n), grant).await.unwrap();
    }

    /// A first run that had a lease and saw one peer. The store is unreachable afterwards.
    async fn first_run(&self) -> Lease {
        self.first_run_of(self.node(0)).await
    }

    async fn first_run_of(&self, manager: LocalManager) -> Lease {
        self.peer("10.1.77.0-24", 77).await;
        let mut views = manager.watch_leases().await.unwrap();
        let lease = manager.acquire_lease(&attrs(1)).await.unwrap();
        live(&mut views, 2).await;
        self.saved(&manager, &lease, |_| true).await;
        self.registry.set_outage(true);
        lease
    }

    /// Holds until the cache on disk is `good`.
    async fn saved(&self, manager: &LocalManager, lease: &Lease, good: impl Fn(&Lease) -> bool) {
        let saved = async {
            loop {
                if let Ok(saved) = Cache::open(self.path()).load()
                    && saved.own.is_some_and(|(own, _)| own.subnets == lease.subnets && good(&own))
                    && saved.leases.len() == 2
                {
                    return;
                }
                sleep(Duration::from_millis(100)).await;
            }
        };
        tokio::select! {
            end = manager.hold_lease(lease) => panic!("{end:?}"),
            saved = timeout(MINUTE, saved) => saved.expect("saved within a minute"),
        }
    }
}

/// A service manager starts both daemons again and again.
#[tokio::test(start_paused = true)]
async fn a_lease_that_another_host_with_our_address_took_stays_with_it_until_it_is_released() {
    let fixture = Fixture::new();
    fixture.first_run().await;
    fixture.registry.set_outage(false);
    let first = fixture.node(0);
    let lease = first.acquire_lease(&attrs(1)).await.unwrap();
    let subnets = lease.subnets;
    // The second host has no state directory, and a new holder ID at each start.
    let second = async |holder| {
        let manager = fixture.manager(holder, None, 0);
        assert_eq!(manager.acquire_lease(&attrs(1)).await.unwrap().subnets, subnets);
    };
    second(0xbb).await;
    let end = timeout(MINUTE, first.hold_lease(&lease)).await.unwrap().unwrap();
    assert!(matches!(&end, LeaseEnd::Taken { by } if by.contains("00bb")), "{end:?}");
    let saved = || Cache::open(fixture.path()).load().unwrap();
    for holder in [0xbb, 0xcc] {
        second(holder).await;
        let again = fixture.node(0);
        let before = saved();
        tokio::time::advance(MINUTE).await;
        let mut views = again.watch_leases().await.unwrap();
        live(&mut views, 2).await;
        let error = again.acquire_lease(&attrs(1)).await.unwrap_err();
        assert!(matches!(&error, Error::Refused { .. }), "{error}");
        let failure = error.store_failure();
        assert!(matches!(failure, StoreFailure::RivalHost { reserved: false, .. }), "{failure:?}");
        let text = error.to_string();
        for part in ["192.0.2.1", &HolderId(holder).to_string(), "another public address"] {
            assert!(text.contains(part), "{text}");
        }
        let written = async {
            while saved().written == before.written {
                sleep(Duration::from_millis(100)).await;
            }
        };
        timeout(MINUTE, written).await.expect("written within a minute");
        assert_eq!(saved().own, None);
        assert_eq!(saved().lost, Some(subnets));
    }
    // Another flannel ran here meanwhile, and has the lease.
    let manager = fixture.manager(1, Some(subnets), 0).with_cache(fixture.path());
    let manager = manager.after_another_flannel(true);
    manager.acquire_lease(&attrs(1)).await.unwrap();
    // The other host is gone.
    second(0xdd).await;
    fixture.node(0).acquire_lease(&attrs(1)).await.unwrap_err();
    fixture.registry.delete_key(&subnets.to_string());
    fixture.node(0).acquire_lease(&attrs(1)).await.unwrap();
}

/// The lease in the cache belongs to the other flannel by now. If it was used, the daemon would
/// take the value in the store for the value of another host, and leave the lease to that host.
#[tokio::test(start_paused = true)]
async fn after_another_flannel_the_lease_in_the_cache_is_not_used() {
    let fixture = Fixture::new();
    let subnets = fixture.first_run().await.subnets;
    fixture.registry.set_outage(false);
    let mut theirs = attrs(1);
    theirs.preferred.data.v4 = Some(r#"{"VNI":2}"#.into());
    let grant = LeaseGrant { holder: HolderId(0xbb), ttl: DAY };
    fixture.registry.put_raw(&subnets.to_string(), &theirs.to_json(), Some(grant));
    fixture.registry.set_outage(true);
    let manager = fixture.manager(1, Some(subnets), 0).with_cache(fixture.path());
    let manager = manager.after_another_flannel(true);
    manager.acquire_lease(&attrs(1)).await.unwrap_err();
    fixture.registry.set_outage(false);
    let lease = manager.acquire_lease(&attrs(1)).await.unwrap();
    assert_eq!(lease.subnets, subnets);
    assert_eq!(lease.attrs, attrs(1));
    let held = timeout(MINUTE, manager.hold_lease(&lease)).await;
    assert!(held.is_err(), "it was lost: {held:?}");
}

/// A reservation has no holder ID, so another MAC address shows that it is another host's.
#[tokio::test(start_paused = true)]
async fn a_reservation_that_another_host_with_our_address_took_stays_with_it() {
    let fixture = Fixture::new();
    let subnets = fixture.first_run().await.subnets;
    fixture.registry.set_outage(false);
    let reserve = |attrs: &LeaseAttrs| {
        fixture.registry.put_raw(&subnets.to_string(), &attrs.to_json(), None);
    };
    reserve(&attrs(1));
    let first = fixture.node(0);
    let lease = first.acquire_lease(&attrs(1)).await.unwrap();
    assert_eq!(lease.subnets, subnets);
    assert_eq!(lease.expires, None);
    let mut theirs = attrs(1);
    theirs.preferred.data.v4 = Some(r#"{"VtepMAC":"0a:00:00:00:00:bb"}"#.into());
    let second = async || {
        let manager = fixture.manager(0xbb, None, 0);
        assert_eq!(manager.acquire_lease(&theirs).await.unwrap().subnets, subnets);
    };
    second().await;
    let end = timeout(MINUTE, first.hold_lease(&lease)).await.unwrap().unwrap();
    assert!(matches!(&end, LeaseEnd::Taken { by } if by.contains("as a reservation")), "{end:?}");
    for _ in 0..2 {
        let error = fixture.node(0).acquire_lease(&attrs(1)).await.unwrap_err();
        let text = error.to_string();
        assert!(text.contains("192.0.2.1 (vxlan), as a reservation"), "{text}");
        let rival = StoreFailure::RivalHost { lease: subnets, reserved: true };
        assert_eq!(error.store_failure(), rival);
        second().await;
    }
    // An operator reserves it anew, for the host that comes first.
    let mut blank = attrs(1);
    // As `flannelctl lease reserve` writes it.
    blank.preferred.data = Dual::default();
    reserve(&blank);
    assert_eq!(fixture.node(0).acquire_lease(&attrs(1)).await.unwrap().subnets, subnets);
}

async fn live(views: &mut watch::Receiver<View>, leases: usize) {
    let is_live =
        |view: &View| matches!(view.origin, Origin::Live { .. }) && view.leases.len() == leases;
    timeout(MINUTE, views.wait_for(is_live)).await.expect("within a minute").unwrap();
}

#[tokio::test(start_paused = true)]
async fn without_the_store_all_data_come_from_the_cache_at_once() {
    let fixture = Fixture::new();
    let lease = fixture.first_run().await;
    let begin = tokio::time::Instant::now();
    let manager = fixture.node(0);
    let view = manager.watch_leases().await.unwrap().borrow().clone();
    assert!(matches!(view.origin, Origin::Cached { written: Some(_) }), "{:?}", view.origin);
    assert_eq!(view.leases.get(&key("10.1.77.0-24")).unwrap().attrs, attrs(77));
    assert_eq!(manager.network_config().await.unwrap().networks.v4.unwrap().subnet_len, 24);
    assert_eq!(manager.hints().await.unwrap().previous, Some(lease.subnets));
    assert_eq!(manager.acquire_lease(&attrs(1)).await.unwrap().subnets, lease.subnets);
    assert!(begin.elapsed() < Duration::from_millis(100), "{:?}", begin.elapsed());
    assert!(manager.remaining().is_some_and(|left| left > 22 * HOUR && left < DAY));
}

#[tokio::test(start_paused = true)]
async fn cached_leases_are_reconciled_when_the_store_is_back() {
    let fixture = Fixture::new();
    let lease = fixture.first_run().await;
    let manager = Arc::new(fixture.node(0));
    let mut views = manager.watch_leases().await.unwrap();
    // With another VTEP.
    let mut other = attrs(1);
    other.preferred.data.v4 = Some(r#"{"VNI":2}"#.into());
    let held = manager.acquire_lease(&other).await.unwrap();
    assert_eq!(held.subnets, lease.subnets);
    let hold = tokio::spawn({
        let manager = Arc::clone(&manager);
        async move { manager.hold_lease(&held).await }
    });
    sleep(HOUR).await;
    fixture.registry.delete_key("10.1.77.0-24");
    fixture.registry.set_outage(false);
    live(&mut views, 1).await;
    // It is renewed and restored before the end that the cache has.
    sleep(DAY).await;
    assert!(!hold.is_finished());
    assert!(
        matches!(manager.ownership_now(), Ownership::Held { until: Some(_) }),
        "{:?}",
        manager.ownership_now()
    );
}

#[tokio::test(start_paused = true)]
async fn attributes_that_differ_from_the_cache_are_published_when_the_store_is_back() {
    let fixture = Fixture::new();
    let lease = fixture.first_run().await;
    let manager = fixture.node(0);
    let mut other = attrs(1);
    other.preferred.data.v4 = Some(r#"{"VNI":2}"#.into());
    let held = manager.acquire_lease(&other).await.unwrap();
    fixture.registry.set_outage(false);
    let published = async {
        while fixture.registry.entry(&lease.subnets).await.unwrap().unwrap().lease.attrs != other {
            sleep(Duration::from_millis(100)).await;
        }
    };
    tokio::select! {
        end = manager.hold_lease(&held) => panic!("{end:?}"),
        published = timeout(MINUTE, published) => published.expect("within a minute"),
    }
}

#[tokio::test(start_paused = true)]
async fn a_cached_lease_that_was_deleted_in_the_store_ends() {
    let fixture = Fixture::new();
    let lease = fixture.first_run().await;
    fixture.registry.delete_key(&lease.subnets.to_string());
    let manager = fixture.node(0);
    let held = manager.acquire_lease(&attrs(1)).await.unwrap();
    fixture.registry.set_outage(false);
    let end = timeout(MINUTE, manager.hold_lease(&held)).await.unwrap().unwrap();
    assert_eq!(end, LeaseEnd::Deleted);
    // No restart finds it.
    assert_eq!(Cache::open(fixture.path()).load().unwrap().own, None);
    fixture.registry.set_outage(true);
    let error = fixture.node(0).acquire_lease(&attrs(1)).await.unwrap_err();
    assert!(matches!(error, Error::Store { .. }), "{error}");
}

/// The daemon ends at once after the deletion, before it writes its cache.
#[tokio::test(start_paused = true)]
async fn a_lease_that_the_node_itself_deletes_leaves_the_cache_first() {
    let fixture = Fixture::new();
    let lease = fixture.first_run().await;
    fixture.registry.set_outage(false);
    fixture.registry.set_config(Some(r#"{"Network":"10.2.0.0/16"}"#));
    let own = || Cache::open(fixture.path()).load().unwrap().own.map(|(own, _)| own.subnets);
    assert_eq!(own(), Some(lease.subnets));
    let moved = fixture.node(0).acquire_lease(&attrs(1)).await.unwrap();
    assert_eq!(fixture.registry.entry(&lease.subnets).await.unwrap(), None);
    assert_eq!(own(), None);
    assert_ne!(moved.subnets, lease.subnets);
}

/// The daemon started without the store, and holds the lease of its cache. A peer appears while it
/// moves, so the cache is written again.
#[tokio::test(start_paused = true)]
async fn a_deleted_lease_does_not_come_back_into_the_cache_while_the_node_moves() {
    let fixture = Fixture::new();
    let lease = fixture.first_run().await;
    let manager = fixture.node(0);
    let mut views = manager.watch_leases().await.unwrap();
    assert_eq!(manager.acquire_lease(&attrs(1)).await.unwrap().subnets, lease.subnets);
    fixture.registry.set_outage(false);
    live(&mut views, 2).await;
    fixture.registry.set_config(Some(r#"{"Network":"10.2.0.0/16"}"#));
    fixture.registry.set_reply_delay(MINUTE);
    let own = || Cache::open(fixture.path()).load().unwrap().own.map(|(own, _)| own.subnets);
    let own_attrs = attrs(1);
    let moving = manager.acquire_lease(&own_attrs);
    let watching = async {
        let is_gone = |view: &View| view.leases.get(&lease.subnets).is_none();
        drop(views.wait_for(is_gone).await.unwrap());
        fixture.peer("10.2.78.0-24", 78).await;
        let written = |saved: &flannel_subnet::Saved| saved.leases.len() == 2;
        while !Cache::open(fixture.path()).load().is_ok_and(|saved| written(&saved)) {
            sleep(Duration::from_millis(100)).await;
        }
        own()
    };
    let (moved, meanwhile) = tokio::join!(moving, watching);
    assert_eq!(meanwhile, None);
    let moved = moved.unwrap().subnets;
    timeout(MINUTE, async {
        while own() != Some(moved) {
            sleep(Duration::from_millis(100)).await;
        }
    })
    .await
    .expect("the new lease is saved within a minute");
}

/// The holder was revoked long before the end of its lease. The daemon may end while the answer to
/// its next request is on the way.
#[tokio::test(start_paused = true)]
async fn a_lease_that_the_store_has_denied_leaves_the_cache_before_it_is_acquired_again() {
    let fixture = Fixture::new();
    fixture.first_run().await;
    fixture.registry.set_outage(false);
    let manager = fixture.node(0);
    let held = manager.acquire_lease(&attrs(1)).await.unwrap();
    let own = || Cache::open(fixture.path()).load().unwrap().own.map(|(own, _)| own.subnets);
    assert_eq!(own(), Some(held.subnets));
    fixture.registry.revoke(HolderId(1));
    fixture.registry.set_reply_delay(MINUTE);
    let forgotten = async {
        while own().is_some() {
            sleep(Duration::from_millis(100)).await;
        }
    };
    tokio::select! {
        end = manager.hold_lease(&held) => panic!("{end:?}"),
        forgotten = timeout(HOUR, forgotten) => forgotten.expect("within an hour"),
    }
    fixture.registry.set_outage(true);
    drop(manager);
    let error = fixture.node(0).acquire_lease(&attrs(1)).await.unwrap_err();
    assert!(matches!(error, Error::Store { .. }), "{error}");
}

/// The new config waits for a restart. The host restarts while the store cannot be reached.
#[tokio::test(start_paused = true)]
async fn the_config_in_the_cache_is_one_of_the_lease_in_it() {
    let fixture = Fixture::new();
    let lease = fixture.first_run().await;
    fixture.registry.set_outage(false);
    let manager = fixture.node(0);
    let mut views = manager.watch_leases().await.unwrap();
    let known = manager.network_config().await.unwrap();
    let held = manager.acquire_lease(&attrs(1)).await.unwrap();
    assert_eq!(held.subnets, lease.subnets);
    live(&mut views, 2).await;
    let other = r#"{"Network":"10.2.0.0/16","Backend":{"Type":"host-gw"}}"#;
    fixture.registry.set_config(Some(other));
    let new = timeout(MINUTE, manager.config_changed(&known)).await.unwrap().unwrap();
    assert_ne!(new.networks, known.networks);
    manager.network_config().await.unwrap();
    fixture.peer("10.1.78.0-24", 78).await;
    live(&mut views, 3).await;
    let saved = || Cache::open(fixture.path()).load().unwrap();
    let written = async {
        while saved().leases.len() < 3 {
            sleep(Duration::from_millis(100)).await;
        }
    };
    tokio::select! {
        end = manager.hold_lease(&held) => panic!("{end:?}"),
        written = timeout(MINUTE, written) => written.expect("written within a minute"),
    }
    drop(manager);
    fixture.registry.set_outage(true);
    let next = fixture.node(0);
    assert_eq!(next.network_config().await.unwrap().networks, known.networks);
    assert_eq!(next.acquire_lease(&attrs(1)).await.unwrap().subnets, lease.subnets);
}

/// The node could not use the config of the store, and took a lease of an earlier one.
#[tokio::test(start_paused = true)]
async fn the_cache_has_the_config_that_the_lease_was_taken_from() {
    let fixture = Fixture::new();
    fixture.registry.set_config(Some(r#"{"Network":"10.2.0.0/16"}"#));
    let manager = fixture.node(0);
    let stored = manager.network_config().await.unwrap();
    let earlier = flannel_core::Config::parse(CONFIG).unwrap();
    assert_ne!(stored.networks, earlier.networks);
    manager.use_config(&earlier);
    let lease = fixture.first_run_of(manager).await;
    let next = fixture.node(0);
    assert_eq!(next.network_config().await.unwrap().networks, earlier.networks);
    assert_eq!(next.acquire_lease(&attrs(1)).await.unwrap().subnets, lease.subnets);
}

/// Some stores distinguish a deleted lease from an expired one only if it was renewed before.
#[tokio::test(start_paused = true)]
async fn a_cached_lease_is_renewed_as_soon_as_the_store_is_back() {
    let fixture = Fixture::new();
    let lease = fixture.first_run().await;
    let manager = fixture.node(0);
    let mut views = manager.watch_leases().await.unwrap();
    let held = manager.acquire_lease(&attrs(1)).await.unwrap();
    assert_eq!(held.subnets, lease.subnets);
    let renewed = async {
        sleep(10 * MINUTE).await;
        let before = manager.remaining().unwrap();
        fixture.registry.set_outage(false);
        live(&mut views, 2).await;
        let renewed = async {
            while manager.remaining().unwrap() <= before {
                sleep(Duration::from_millis(10)).await;
            }
        };
        timeout(Duration::from_secs(1), renewed).await.expect("within a second");
    };
    tokio::select! {
        end = manager.hold_lease(&held) => panic!("{end:?}"),
        () = renewed => (),
    }
}

#[tokio::test(start_paused = true)]
async fn a_cached_lease_counts_only_until_its_end_by_wall_clock() {
    let fixture = Fixture::new();
    let lease = fixture.first_run().await;
    for (holder, wall, ours) in
        [(1, 0, true), (1, 80_000, true), (1, 90_000, false), (1, -60, false), (2, 0, false)]
    {
        let manager = fixture.node_with_holder(holder, wall);
        let acquired = manager.acquire_lease(&attrs(1)).await;
        assert_eq!(
            acquired.as_ref().is_ok_and(|own| own.subnets == lease.subnets),
            ours,
            "{wall}: {acquired:?}"
        );
        assert_eq!(manager.ownership_now() == Ownership::NotAcquired, !ours);
        let view = manager.watch_leases().await.unwrap().borrow().clone();
        assert_eq!(view.leases.len(), 2, "peers come from the cache nevertheless");
    }
}

#[tokio::test(start_paused = true)]
async fn an_expired_lease_is_a_hint_until_the_store_answers() {
    let fixture = Fixture::new();
    let lease = fixture.first_run().await;
    assert_eq!(fixture.node(0).hints().await.unwrap().lapsed, None, "it is still ours");
    assert!(fixture.node_with_holder(2, 0).hints().await.is_err(), "it never was ours");
    for wall in [90_000, -60] {
        let manager = fixture.node(wall);
        let begin = tokio::time::Instant::now();
        let hints = manager.hints().await.unwrap();
        assert!(begin.elapsed() < Duration::from_millis(100), "{:?}", begin.elapsed());
        assert_eq!(hints.lapsed.map(|lapsed| lapsed.subnets), Some(lease.subnets));
        assert_eq!(hints.last_published, Some(attrs(1)));
        assert_eq!(manager.ownership_now(), Ownership::NotAcquired);
        manager.acquire_lease(&attrs(1)).await.unwrap_err();
    }
    fixture.registry.set_outage(false);
    let hints = fixture.node(90_000).hints().await.unwrap();
    assert_eq!(hints.lapsed, None);
    assert_eq!(hints.previous, Some(lease.subnets));
}

/// The daemon's host was off, and has started with the wall clock of its last end.
async fn after_a_restart_of_the_host(fixture: &Fixture) -> (WallClock, LocalManager, Lease) {
    let before = WallClock::new(&fixture.clock, 0, Some("one boot"));
    let lease = fixture.first_run_of(fixture.node_with_clock(&before)).await;
    let clock = WallClock::new(&fixture.clock, 3600, Some("another boot"));
    let manager = fixture.node_with_clock(&clock);
    let held = manager.acquire_lease(&attrs(1)).await.unwrap();
    assert!(manager.ownership_now().is_held() && manager.relies_on_wall_clock());
    assert_eq!(held.subnets, lease.subnets);
    (clock, manager, held)
}

async fn changed(ownership: &mut watch::Receiver<Ownership>) -> Ownership {
    timeout(Duration::from_secs(1), ownership.changed()).await.expect("at once").unwrap();
    ownership.borrow_and_update().clone()
}

#[tokio::test(start_paused = true)]
async fn ownership_from_the_cache_ends_when_the_wall_clock_passes_its_end() {
    let fixture = Fixture::new();
    let logged = test_support::Logged::default();
    let _guard = tracing::subscriber::set_default(logged.clone());
    let (clock, manager, held) = after_a_restart_of_the_host(&fixture).await;
    let mut ownership = manager.ownership();
    ownership.mark_unchanged();
    let steps = async {
        // A step that does not pass the end changes only what is shown.
        clock.set(2 * 3600);
        assert!(changed(&mut ownership).await.is_held());
        clock.set(72 * 3600);
        let now = changed(&mut ownership).await;
        assert!(matches!(now, Ownership::Lost { why: Loss::Unconfirmed, .. }), "{now:?}");
        assert_eq!(manager.remaining(), None);
        assert_eq!(logged.count("the wall clock has passed the end of the lease"), 1);
        // The hold asks the store at once.
        sleep(Duration::from_millis(10)).await;
        assert_eq!(logged.count("the lease was not renewed in time"), 1);
        // A step back does not bring it back. Only the store can.
        clock.set(3600);
        sleep(MINUTE).await;
        assert!(!manager.ownership_now().is_held(), "{:?}", manager.ownership_now());
        fixture.registry.set_outage(false);
        sleep(2 * MINUTE).await;
        assert!(manager.ownership_now().is_held(), "{:?}", manager.ownership_now());
        // From now on only boot time counts.
        for offset in [72 * 3600, -72 * 3600] {
            clock.set(offset);
            sleep(MINUTE).await;
            assert!(manager.ownership_now().is_held(), "{:?}", manager.ownership_now());
        }
        assert!(manager.remaining().is_some_and(|left| left > 22 * HOUR));
    };
    tokio::select! {
        end = manager.hold_lease(&held) => panic!("{end:?}"),
        () = steps => (),
    }
}

/// Without a step, the two clocks reach the end together, and a slow wall clock reaches it later.
#[tokio::test(start_paused = true)]
async fn ownership_from_the_cache_ends_by_boot_time_too() {
    let fixture = Fixture::new();
    let (clock, manager, held) = after_a_restart_of_the_host(&fixture).await;
    let steps = async {
        clock.set(3600 - 600);
        sleep(22 * HOUR).await;
        assert!(manager.ownership_now().is_held());
        sleep(HOUR).await;
        assert!(clock.wall() < held.expires.unwrap());
        assert!(!manager.ownership_now().is_held(), "{:?}", manager.ownership_now());
    };
    tokio::select! {
        end = manager.hold_lease(&held) => panic!("{end:?}"),
        () = steps => (),
    }
}

/// Another node took the subnets while this host was off.
#[tokio::test(start_paused = true)]
async fn a_lease_from_the_cache_that_another_node_took_ends_when_the_store_answers() {
    let fixture = Fixture::new();
    let (clock, manager, held) = after_a_restart_of_the_host(&fixture).await;
    fixture.registry.revoke(HolderId(1));
    let grant = LeaseGrant { holder: HolderId(0xbb), ttl: DAY };
    fixture.registry.put_raw(&held.subnets.to_string(), &attrs(2).to_json(), Some(grant));
    let steps = async {
        clock.set(72 * 3600);
        sleep(MINUTE).await;
        assert!(!manager.ownership_now().is_held());
        fixture.registry.set_outage(false);
        std::future::pending::<()>().await;
    };
    let end = tokio::select! {
        end = timeout(10 * MINUTE, manager.hold_lease(&held)) => end.unwrap().unwrap(),
        () = steps => unreachable!(),
    };
    assert!(matches!(&end, LeaseEnd::Taken { by } if by.contains("192.0.2.2")), "{end:?}");
    // The next run gets other subnets.
    let next = fixture.node_with_clock(&clock);
    assert_ne!(next.acquire_lease(&attrs(1)).await.unwrap().subnets, held.subnets);
}

/// No other node took the subnets.
#[tokio::test(start_paused = true)]
async fn an_expired_lease_from_the_cache_is_acquired_again_if_it_is_free() {
    let fixture = Fixture::new();
    let (clock, manager, held) = after_a_restart_of_the_host(&fixture).await;
    fixture.registry.revoke(HolderId(1));
    let steps = async {
        clock.set(72 * 3600);
        sleep(MINUTE).await;
        assert!(!manager.ownership_now().is_held());
        fixture.registry.set_outage(false);
        sleep(2 * MINUTE).await;
        assert!(manager.ownership_now().is_held() && !manager.relies_on_wall_clock());
        let entry = fixture.registry.entry(&held.subnets).await.unwrap().unwrap();
        assert_eq!(entry.holder, Some(HolderId(1)));
    };
    tokio::select! {
        end = manager.hold_lease(&held) => panic!("{end:?}"),
        () = steps => (),
    }
}

#[tokio::test(start_paused = true)]
async fn while_the_machine_runs_a_restarted_daemon_counts_by_boot_time() {
    let fixture = Fixture::new();
    let clock = WallClock::new(&fixture.clock, 0, Some("one boot"));
    let lease = fixture.first_run_of(fixture.node_with_clock(&clock)).await;
    // Before the time of writing, and after the end.
    for offset in [-72 * 3600, 72 * 3600] {
        clock.set(offset);
        let manager = fixture.node_with_clock(&clock);
        assert_eq!(manager.hints().await.unwrap().lapsed, None);
        let held = manager.acquire_lease(&attrs(1)).await.unwrap();
        assert_eq!(held.subnets, lease.subnets);
        assert!(manager.ownership_now().is_held() && !manager.relies_on_wall_clock());
        clock.set(-offset);
        sleep(MINUTE).await;
        assert!(manager.ownership_now().is_held(), "{:?}", manager.ownership_now());
    }
    // A wall clock that was set back while no daemon ran hides the end, but the boot time shows it.
    clock.set(-12 * 3600);
    sleep(DAY).await;
    let manager = fixture.node_with_clock(&clock);
    assert!(manager.hints().await.unwrap().lapsed.is_some());
    manager.acquire_lease(&attrs(1)).await.unwrap_err();
}

/// After the next restart of the machine, the file would give the lease for too long.
#[tokio::test(start_paused = true)]
async fn the_cache_is_written_again_when_the_wall_clock_is_set() {
    let fixture = Fixture::new();
    fixture.peer("10.1.77.0-24", 77).await;
    // Three days fast.
    let clock = WallClock::new(&fixture.clock, 72 * 3600, Some("one boot"));
    let manager = fixture.node_with_clock(&clock);
    let lease = manager.acquire_lease(&attrs(1)).await.unwrap();
    let latest = clock.wall() + DAY;
    fixture.saved(&manager, &lease, |own| own.expires.unwrap() + HOUR > latest).await;
    clock.set(0);
    let latest = clock.wall() + DAY;
    fixture.saved(&manager, &lease, |own| own.expires.unwrap() <= latest).await;
}

#[tokio::test(start_paused = true)]
async fn a_reservation_never_expires() {
    let fixture = Fixture::new();
    fixture.registry.create(&key("10.1.5.0-24"), &attrs(1), None).await.unwrap();
    let lease = fixture.first_run().await;
    assert_eq!(lease.subnets, key("10.1.5.0-24"));
    for wall in [-86_400, 0, 90_000_000] {
        let manager = fixture.node(wall);
        assert_eq!(manager.acquire_lease(&attrs(1)).await.unwrap().expires, None);
        assert_eq!(manager.ownership_now(), Ownership::Held { until: None });
    }
}

#[tokio::test(start_paused = true)]
async fn a_renewal_updates_the_cache() {
    let fixture = Fixture::new();
    fixture.peer("10.1.77.0-24", 77).await;
    let manager = fixture.node(0);
    let lease = manager.acquire_lease(&attrs(1)).await.unwrap();
    let first = lease.expires.unwrap();
    fixture.saved(&manager, &lease, |_| true).await;
    let held = timeout(23 * HOUR + HOUR / 60, manager.hold_lease(&lease)).await;
    assert!(held.is_err(), "{held:?}");
    fixture.saved(&manager, &lease, |own| own.expires.unwrap() > first + 22 * HOUR).await;
}

#[tokio::test(start_paused = true)]
async fn many_changes_cause_few_writes() {
    let fixture = Fixture::new();
    let manager = fixture.node(0);
    let mut views = manager.watch_leases().await.unwrap();
    live(&mut views, 0).await;
    let mut written = std::collections::BTreeSet::new();
    for n in 1..=200 {
        fixture.peer(&format!("10.1.{n}.0-24"), n).await;
        sleep(Duration::from_millis(100)).await;
        written.extend(modified(&fixture.path()));
    }
    live(&mut views, 200).await;
    sleep(Duration::from_secs(6)).await;
    assert_eq!(Cache::open(fixture.path()).load().unwrap().leases.len(), 200);
    assert!((2..=6).contains(&written.len()), "{written:?}");
}

fn modified(path: &Path) -> Option<SystemTime> {
    Cache::open(path).load().ok().map(|saved| saved.written)
}

#[tokio::test(start_paused = true)]
async fn a_damaged_cache_is_treated_as_missing() {
    let fixture = Fixture::new();
    fixture.first_run().await;
    std::fs::write(fixture.path(), "flannel-leases 1 0000000000000000\n{}\n").unwrap();
    let manager = fixture.node(0);
    assert_eq!(*manager.watch_leases().await.unwrap().borrow(), View::unknown());
    assert!(matches!(manager.network_config().await, Err(Error::Store { .. })));
    assert!(matches!(manager.acquire_lease(&attrs(1)).await, Err(Error::Store { .. })));
    fixture.registry.set_outage(false);
    manager.acquire_lease(&attrs(1)).await.unwrap();
}

/// A wrong config of the store must not end a network that worked before a restart.
#[tokio::test(start_paused = true)]
async fn a_start_with_a_wrong_config_uses_the_last_good_one() {
    let fixture = Fixture::new();
    let lease = fixture.first_run().await;
    fixture.registry.set_outage(false);
    let other = r#"{"Network":"10.2.0.0/16"}"#;
    for wrong in ["{", r#"{"Network":"10.1.0.0/33"}"#] {
        fixture.registry.set_config(Some(wrong));
        assert!(fixture.manager(2, None, 0).network_config().await.is_err(), "it has no cache");
        let manager = fixture.node(0);
        let used = manager.network_config().await.unwrap();
        assert_eq!(used.networks.v4.unwrap().network, "10.1.0.0/16".parse().unwrap());
        assert!(manager.store_status().wrong_config.is_some());
        assert_eq!(manager.acquire_lease(&attrs(1)).await.unwrap().subnets, lease.subnets);
        assert!(manager.network_config().await.is_err(), "the caller has one");
    }
    fixture.registry.set_config(Some(other));
    let used = fixture.node(0).network_config().await.unwrap();
    assert_eq!(used.networks.v4.unwrap().network, "10.2.0.0/16".parse().unwrap());
}
