//! The behaviour that every [`Registry`] must have.

mod one_address;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use flannel_core::lease::{LARGEST_VALUE, LeaseAttrs, TooLarge};
use flannel_core::{Error, Subnets};
use tokio::time::Instant;

use crate::registry::{Entry, HolderId, LeaseGrant, Now, Registry, Watch};

/// A store without leases, on which the suite runs.
pub struct Fixture<'a> {
    /// The registry under test.
    pub registry: Arc<dyn Registry>,
    /// A registry of another client on the same store.
    pub other: Arc<dyn Registry>,
    /// Writes any key below `subnets` with any value, past the registry.
    pub put_raw: &'a (dyn Fn(&str, &str) + Sync),
    /// Writes the network config, past the registry.
    pub put_config: &'a (dyn Fn(&str) + Sync),
}

impl fmt::Debug for Fixture<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Fixture").field("registry", &self.registry).finish_non_exhaustive()
    }
}

/// Runs the suite. It takes about 20 s of the store's time, because leases expire in it.
///
/// # Panics
/// The registry breaks a rule of [`Registry`].
///
/// ```
/// use flannel_subnet::testing::{Fixture, registry_suite};
/// use flannel_subnet::{MemoryRegistry, Registry};
/// use std::sync::Arc;
///
/// // Clones of a `MemoryRegistry` share the store. Another registry would be opened twice.
/// # tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap()
/// #     .block_on(async {
/// let registry = MemoryRegistry::new();
/// registry_suite(&Fixture {
///     registry: Arc::new(registry.clone()),
///     other: Arc::new(registry.clone()),
///     put_raw: &|key, value| registry.put_raw(key, value, None),
///     put_config: &|text| registry.set_config(Some(text)),
/// })
/// .await;
/// # });
/// ```
pub async fn registry_suite(fixture: &Fixture<'_>) {
    config_is_read_and_awaited(fixture).await;
    config_is_written_only_over_the_known_text(fixture).await;
    a_written_lease_is_read_back(fixture).await;
    a_key_is_created_only_once(fixture).await;
    a_key_is_changed_only_at_its_revision(fixture).await;
    of_many_at_once_exactly_one_wins(fixture).await;
    nothing_is_missed_between_list_and_watch(fixture).await;
    renewals_are_no_changes(fixture).await;
    a_lease_expires_without_renewal(fixture).await;
    a_deletion_is_not_the_end_of_the_holder(fixture).await;
    reservations_have_no_holder(fixture).await;
    an_unreadable_key_is_skipped_and_reported(fixture).await;
    one_address::one_of_two_hosts_keeps_the_lease(fixture).await;
    a_value_that_is_too_large_is_skipped_and_can_be_replaced(fixture).await;
}

const DAY: Duration = Duration::from_secs(86_400);
const PATIENCE: Duration = Duration::from_secs(60);

fn key(n: u8) -> Subnets {
    format!("10.77.{n}.0-24").parse().expect("a key")
}

fn attrs(n: u8) -> LeaseAttrs {
    let value = format!(
        r#"{{"PublicIP":"192.0.2.{n}","PublicIPv6":"2001:db8::{n}","BackendType":"vxlan",
        "BackendData":{{"VNI":{n}}},
        "OtherOffers":[{{"PublicIP":"192.0.2.{n}","BackendType":"host-gw"}}]}}"#
    );
    LeaseAttrs::from_json(&value).expect("a value")
}

fn grant(holder: u64, ttl: Duration) -> Option<LeaseGrant> {
    Some(LeaseGrant { holder: HolderId(holder), ttl })
}

/// Waits for an event, with a limit that slow machines meet.
async fn soon<T>(what: &str, future: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, future)
        .await
        .unwrap_or_else(|_| panic!("{what}: nothing happened for {PATIENCE:?}"))
}

fn conflicts<T: fmt::Debug>(result: &Result<T, Error>, on: &Subnets) {
    assert!(matches!(result, Err(Error::Conflict { subnets }) if subnets == on), "{result:?}");
}

async fn clear(fixture: &Fixture<'_>) {
    let listing = fixture.registry.list().await.expect("a list");
    for entry in listing.entries {
        fixture.registry.delete(&entry.lease.subnets, entry.lease.revision).await.expect("deleted");
    }
}

async fn watch_from_now(registry: &dyn Registry) -> Box<dyn Watch> {
    let listing = registry.list().await.expect("a list");
    registry.watch(listing.revision).await.expect("a watch")
}

/// Reads changes until `enough`, the latest for each key.
async fn changes(
    watch: &mut dyn Watch,
    enough: impl Fn(&BTreeMap<String, Now>) -> bool,
) -> BTreeMap<String, Now> {
    let mut changes = BTreeMap::new();
    soon("watch", async {
        while !enough(&changes) {
            let batch = watch.next().await.expect("a watch that works").expect("no gap");
            changes.extend(batch.events.into_iter().map(|event| (event.key, event.now)));
        }
    })
    .await;
    changes
}

async fn config_is_read_and_awaited(fixture: &Fixture<'_>) {
    let registry = &fixture.registry;
    (fixture.put_config)(r#"{"Network":"10.77.0.0/16"}"#);
    let first = registry.config().await.expect("a config");
    assert_eq!(first.text, r#"{"Network":"10.77.0.0/16"}"#);
    assert!(!first.location.is_empty());
    soon("config differs from none", registry.config_changed(None)).await.expect("in reach");
    let changed = registry.config_changed(Some(first.clone()));
    let change = async {
        tokio::task::yield_now().await;
        (fixture.put_config)(r#"{"Network":"10.77.0.0/17"}"#);
    };
    let (changed, ()) = soon("config changes", async { tokio::join!(changed, change) }).await;
    changed.expect("in reach");
    assert_ne!(registry.config().await.expect("a config").text, first.text);
}

async fn config_is_written_only_over_the_known_text(fixture: &Fixture<'_>) {
    let registry = &fixture.registry;
    let known = registry.config().await.expect("a config");
    let refused = |result| matches!(result, Err(Error::Refused { .. }));
    assert!(refused(registry.write_config(None, "{}").await), "the store has a config");
    let text = r#"{"Network":"10.77.0.0/16","Backend":{"Type":"vxlan"}}"#;
    let changed = registry.config_changed(Some(known.clone()));
    let (changed, written) = soon("config changes", async {
        tokio::join!(changed, registry.write_config(Some(&known), text))
    })
    .await;
    changed.expect("in reach");
    written.expect("the known text");
    assert_eq!(registry.config().await.expect("a config").text, text);
    assert!(
        refused(registry.write_config(Some(&known), "{}").await),
        "another was written meanwhile"
    );
    assert_eq!(registry.config().await.expect("a config").text, text);
}

async fn a_written_lease_is_read_back(fixture: &Fixture<'_>) {
    for (n, text) in ["10.77.1.0-24", "10.77.2.0-24&fd00:0:0:2::-64", "0.0.0.0-0&fd00:0:0:3::-64"]
        .iter()
        .enumerate()
    {
        let subnets: Subnets = text.parse().expect("a key");
        let n = n as u8 + 1;
        let written = fixture
            .registry
            .create(&subnets, &attrs(n), grant(u64::from(n), DAY))
            .await
            .expect("created");
        assert_eq!(written.holder, Some(HolderId(u64::from(n))));
        assert_eq!(written.lease.subnets, subnets);
        assert_eq!(written.lease.attrs, attrs(n));
        assert_eq!(fixture.other.entry(&subnets).await.expect("in reach"), Some(written.clone()));
        let listing = fixture.other.list().await.expect("a list");
        assert!(listing.entries.contains(&written), "{listing:?}");
        assert_eq!(listing.entries.len(), usize::from(n));
    }
    clear(fixture).await;
    assert_eq!(fixture.other.list().await.expect("a list").entries, []);
    assert_eq!(fixture.other.entry(&key(1)).await.expect("in reach"), None);
}

async fn a_key_is_created_only_once(fixture: &Fixture<'_>) {
    let first = fixture.registry.create(&key(1), &attrs(1), grant(1, DAY)).await.expect("created");
    conflicts(&fixture.other.create(&key(1), &attrs(2), grant(2, DAY)).await, &key(1));
    conflicts(&fixture.registry.create(&key(1), &attrs(1), grant(1, DAY)).await, &key(1));
    assert_eq!(fixture.other.entry(&key(1)).await.expect("in reach"), Some(first.clone()));
    let listing =
        fixture.other.create_or_list(&key(1), &attrs(2), grant(2, DAY)).await.expect("in reach");
    let listing = listing.expect_err("the key exists");
    assert_eq!(listing.entries, [first]);
    let mut watch = fixture.other.watch(listing.revision).await.expect("a watch");
    let second =
        fixture.other.create_or_list(&key(2), &attrs(2), grant(2, DAY)).await.expect("in reach");
    assert_eq!(fixture.registry.entry(&key(2)).await.expect("in reach"), second.ok());
    let changed = changes(&mut *watch, |changed| !changed.is_empty()).await;
    assert_eq!(changed.into_keys().collect::<Vec<_>>(), [key(2).to_string()]);
    clear(fixture).await;
}

async fn a_key_is_changed_only_at_its_revision(fixture: &Fixture<'_>) {
    let Fixture { registry, other, .. } = fixture;
    let first = registry.create(&key(1), &attrs(1), grant(1, DAY)).await.expect("created");
    let at = first.lease.revision;
    let second = other.update(&key(1), at, &attrs(2), grant(2, DAY)).await.expect("updated");
    assert_ne!(second.lease.revision, at);
    assert_eq!(second.lease.since, first.lease.since);
    assert_eq!(second.holder, Some(HolderId(2)));
    conflicts(&registry.update(&key(1), at, &attrs(3), grant(1, DAY)).await, &key(1));
    conflicts(&registry.delete(&key(1), at).await, &key(1));
    assert_eq!(registry.entry(&key(1)).await.expect("in reach"), Some(second.clone()));
    registry.delete(&key(1), second.lease.revision).await.expect("deleted");
    conflicts(&registry.delete(&key(1), second.lease.revision).await, &key(1));
    conflicts(&registry.update(&key(1), second.lease.revision, &attrs(3), None).await, &key(1));
    assert_eq!(other.entry(&key(1)).await.expect("in reach"), None);
}

async fn of_many_at_once_exactly_one_wins(fixture: &Fixture<'_>) {
    let at_once = async |at: Option<Entry>| {
        let mut tasks = tokio::task::JoinSet::new();
        for n in 1..=24u8 {
            let registry = Arc::clone(if n % 2 == 0 { &fixture.registry } else { &fixture.other });
            let at = at.clone();
            tasks.spawn(async move {
                let grant = grant(u64::from(n) + 100, DAY);
                match at {
                    None => registry.create(&key(9), &attrs(n), grant).await,
                    // With revisions derived from the content, an equal value is not a change.
                    Some(at) => {
                        registry.update(&key(9), at.lease.revision, &attrs(n + 100), grant).await
                    }
                }
            });
        }
        let results = soon("24 writers", tasks.join_all()).await;
        let (won, lost): (Vec<_>, Vec<_>) = results.into_iter().partition(Result::is_ok);
        assert_eq!(won.len(), 1, "{won:?}");
        assert_eq!(lost.len(), 23, "{lost:?}");
        lost.iter().for_each(|lost| conflicts(lost, &key(9)));
        let winner = won.into_iter().next().and_then(Result::ok).expect("one won");
        assert_eq!(fixture.registry.entry(&key(9)).await.expect("in reach"), Some(winner.clone()));
        winner
    };
    let created = at_once(None).await;
    let updated = at_once(Some(created.clone())).await;
    assert_ne!(created.lease.revision, updated.lease.revision);
    clear(fixture).await;
}

async fn nothing_is_missed_between_list_and_watch(fixture: &Fixture<'_>) {
    let Fixture { registry, other, .. } = fixture;
    let stays = other.create(&key(1), &attrs(1), grant(1, DAY)).await.expect("created");
    let goes = other.create(&key(2), &attrs(2), grant(2, DAY)).await.expect("created");
    let listing = registry.list().await.expect("a list");
    let changed = other
        .update(&key(1), stays.lease.revision, &attrs(9), grant(1, DAY))
        .await
        .expect("updated");
    other.delete(&key(2), goes.lease.revision).await.expect("deleted");
    let comes = registry.create(&key(3), &attrs(3), grant(3, DAY)).await.expect("created");
    let mut watch = registry.watch(listing.revision).await.expect("a watch");
    let all = changes(&mut *watch, |changed| changed.len() >= 3).await;
    let expected = [
        (key(1).to_string(), Now::Held(changed)),
        (key(2).to_string(), Now::Gone),
        (key(3).to_string(), Now::Held(comes.clone())),
    ];
    assert_eq!(all, expected.into_iter().collect());

    other.delete(&key(3), comes.lease.revision).await.expect("deleted");
    let changed = changes(&mut *watch, |changed| !changed.is_empty()).await;
    assert_eq!(changed, [(key(3).to_string(), Now::Gone)].into_iter().collect());
    clear(fixture).await;
}

async fn renewals_are_no_changes(fixture: &Fixture<'_>) {
    let held = fixture.registry.create(&key(1), &attrs(1), grant(1, DAY)).await.expect("created");
    let mut watch = watch_from_now(&*fixture.other).await;
    for _ in 0..3 {
        let ttl = fixture.registry.keep_alive(&key(1), HolderId(1)).await.expect("in reach");
        assert_eq!(ttl, Some(DAY));
    }
    // A registry need not know the remaining time.
    if let Some(left) = fixture.other.remaining(&key(1), HolderId(1)).await.expect("in reach") {
        assert!(left <= DAY && left + PATIENCE > DAY, "{left:?}");
    }
    let unknown = fixture.other.remaining(&key(9), HolderId(9)).await.expect("in reach");
    assert_eq!(unknown, None);
    assert_eq!(fixture.other.entry(&key(1)).await.expect("in reach"), Some(held));
    // The next change is the one after the renewals.
    fixture.registry.create(&key(2), &attrs(2), grant(2, DAY)).await.expect("created");
    let changed = changes(&mut *watch, |changed| !changed.is_empty()).await;
    assert_eq!(changed.keys().collect::<Vec<_>>(), [&key(2).to_string()]);
    clear(fixture).await;
}

async fn a_lease_expires_without_renewal(fixture: &Fixture<'_>) {
    let registry = &fixture.registry;
    // Long enough for a machine that stops for a while.
    let ttl = Duration::from_secs(15);
    let renewed = registry.create(&key(1), &attrs(1), grant(11, ttl)).await.expect("created");
    let begin = Instant::now();
    registry.create(&key(2), &attrs(2), grant(12, ttl)).await.expect("created");
    let mut watch = watch_from_now(&*fixture.other).await;
    let expired = soon("expiry", async {
        loop {
            let kept = registry.keep_alive(&key(1), HolderId(11)).await.expect("in reach");
            assert_eq!(kept, Some(ttl), "renewed in time");
            if let Ok(batch) = tokio::time::timeout(ttl / 8, watch.next()).await {
                break batch.expect("a watch that works").expect("no gap").events;
            }
        }
    })
    .await;
    // A store may have a coarser clock.
    assert!(begin.elapsed() + ttl / 4 >= ttl, "expired after {:?}", begin.elapsed());
    let expired: Vec<_> = expired.into_iter().map(|event| (event.key, event.now)).collect();
    assert_eq!(expired, [(key(2).to_string(), Now::Gone)]);
    let listing = fixture.other.list().await.expect("a list");
    assert_eq!(listing.entries, [renewed]);
    assert_eq!(
        registry.keep_alive(&key(2), HolderId(12)).await.expect("in reach"),
        None,
        "forgotten"
    );
    assert_eq!(registry.entry(&key(2)).await.expect("in reach"), None);
    registry.create(&key(2), &attrs(3), grant(13, DAY)).await.expect("free again");
    clear(fixture).await;
}

async fn a_deletion_is_not_the_end_of_the_holder(fixture: &Fixture<'_>) {
    let held = fixture.registry.create(&key(1), &attrs(1), grant(21, DAY)).await.expect("created");
    fixture.other.delete(&key(1), held.lease.revision).await.expect("deleted");
    assert_eq!(fixture.registry.entry(&key(1)).await.expect("in reach"), None);
    let kept = fixture.registry.keep_alive(&key(1), HolderId(21)).await.expect("in reach");
    assert!(kept.is_some_and(|left| left > DAY / 2), "{kept:?}");
}

async fn reservations_have_no_holder(fixture: &Fixture<'_>) {
    let reserved = fixture.registry.create(&key(1), &attrs(1), None).await.expect("created");
    assert_eq!(reserved.holder, None);
    let used = fixture
        .registry
        .update(&key(1), reserved.lease.revision, &attrs(2), None)
        .await
        .expect("updated");
    assert_eq!(used.holder, None);
    assert_eq!(used.lease.attrs, attrs(2));
    assert_eq!(fixture.other.entry(&key(1)).await.expect("in reach"), Some(used));
    clear(fixture).await;
}

async fn an_unreadable_key_is_skipped_and_reported(fixture: &Fixture<'_>) {
    let good = fixture.registry.create(&key(1), &attrs(1), grant(1, DAY)).await.expect("created");
    let mut watch = watch_from_now(&*fixture.other).await;
    let bad = [
        ("nonsense".to_owned(), "{}"),
        (key(2).to_string(), "nonsense"),
        (key(3).to_string(), r#"{"PublicIP":1}"#),
    ];
    bad.iter().for_each(|(key, value)| (fixture.put_raw)(key, value));
    let changed = changes(&mut *watch, |changed| changed.len() >= bad.len()).await;
    assert!(changed.values().all(|now| matches!(now, Now::Unreadable(_))), "{changed:?}");
    for registry in [&fixture.registry, &fixture.other] {
        let listing = registry.list().await.expect("a list");
        assert_eq!(listing.entries, std::slice::from_ref(&good));
        let skipped: BTreeSet<_> = listing.skipped.iter().map(|skipped| &skipped.key).collect();
        assert_eq!(skipped, bad.iter().map(|(key, _)| key).collect());
        assert!(listing.skipped.iter().all(|skipped| skipped.reason.keeps_last()), "{listing:?}");
    }
    conflicts(&fixture.registry.create(&key(2), &attrs(2), grant(2, DAY)).await, &key(2));
    (fixture.put_raw)(&key(2).to_string(), r#"{"PublicIP":"192.0.2.2"}"#);
    let changed = changes(&mut *watch, |changed| !changed.is_empty()).await;
    assert!(
        matches!(changed.get(&key(2).to_string()), Some(Now::Held(_))),
        "repaired: {changed:?}"
    );
}

async fn a_value_that_is_too_large_is_skipped_and_can_be_replaced(fixture: &Fixture<'_>) {
    let registry = &fixture.registry;
    clear(fixture).await;
    let good = registry.create(&key(5), &attrs(5), grant(5, DAY)).await.expect("created");
    let held = registry.create(&key(6), &attrs(6), grant(6, DAY)).await.expect("created");
    let mut watch = watch_from_now(&*fixture.other).await;
    let padding = "x".repeat(LARGEST_VALUE);
    let value = format!(r#"{{"PublicIP":"192.0.2.6","BackendData":"{padding}"}}"#);
    (fixture.put_raw)(&held.lease.subnets.to_string(), &value);
    let changed = changes(&mut *watch, |changed| !changed.is_empty()).await;
    let too_large = TooLarge { size: value.len() };
    let expected = Now::Unreadable(too_large.into());
    assert_eq!(changed.get(&key(6).to_string()), Some(&expected), "{changed:?}");
    let mut at = None;
    for registry in [registry, &fixture.other] {
        let listing = registry.list().await.expect("a list");
        assert!(listing.entries.contains(&good), "{listing:?}");
        let skipped = listing.skipped.iter().find(|skipped| skipped.key == key(6).to_string());
        assert_eq!(skipped.map(|skipped| &skipped.reason), Some(&too_large.into()));
        at = skipped.map(|skipped| skipped.revision);
        let error = registry.entry(&key(6)).await.expect_err("too large").to_string();
        assert!(
            error.contains("10.77.6.0-24") && error.contains(&too_large.to_string()),
            "{error}"
        );
    }
    conflicts(&registry.create(&key(6), &attrs(6), grant(6, DAY)).await, &key(6));
    let mut large = attrs(6);
    large.preferred.data.v4 = Some(format!("{padding:?}").into());
    let refused = registry.update(&key(6), at.expect("skipped"), &large, grant(6, DAY)).await;
    let refused = refused.expect_err("too large").to_string();
    assert!(refused.contains("10.77.6.0-24") && refused.contains("at most 16384"), "{refused}");
    let updated = registry.update(&key(6), at.expect("skipped"), &attrs(6), grant(6, DAY)).await;
    assert_eq!(updated.expect("replaced").lease.attrs, attrs(6));
    let changed = changes(&mut *watch, |changed| !changed.is_empty()).await;
    assert!(matches!(changed.get(&key(6).to_string()), Some(Now::Held(_))), "{changed:?}");
}
