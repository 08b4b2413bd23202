//! The conformance suite, and the content of etcd, byte for byte.

use std::sync::Arc;
use std::time::Duration;

use etcd_client::{GetOptions, PutOptions};
use flannel_core::lease::{LeaseAttrs, Revision};
use flannel_core::{Error, SubnetManager};
use flannel_subnet::testing::{Fixture, registry_suite};
use flannel_subnet::{HolderId, LeaseGrant, Now, Registry, SkipReason, Skipped};
use flannel_subnet_etcd::{EtcdOptions, EtcdRegistry};

use super::server::Etcd;
use super::{DAY, Peer, V4, attrs, grant, key, node, options, registry, within};

const PREFIX: &str = "/coreos.com/network";

#[tokio::test]
async fn etcd_passes_the_suite() {
    suite("/coreos.com/network", "/coreos.com/network").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn etcd_passes_the_suite_on_many_threads_and_below_any_prefix() {
    suite("some//where/./else/", "some/where/else").await;
}

async fn suite(prefix: &str, clean: &str) {
    let etcd = Etcd::start().await;
    let options = EtcdOptions { prefix: prefix.into(), ..options(&etcd.endpoints()) };
    registry_suite(&Fixture {
        registry: Arc::new(EtcdRegistry::new(options.clone()).unwrap()),
        other: Arc::new(EtcdRegistry::new(options).unwrap()),
        put_raw: &|key, value| etcd.put_now(&format!("{clean}/subnets/{key}"), value),
        put_config: &|text| etcd.put_now(&format!("{clean}/config"), text),
    })
    .await;
}

#[tokio::test]
async fn keys_and_values_have_the_bytes_of_go_flannel() {
    let etcd = Etcd::start().await;
    let registry = registry(&etcd.endpoints());
    let golden = [
        (
            "10.5.34.0-24",
            concat!(
                r#"{"PublicIP":"1.2.3.4","PublicIPv6":null,"BackendType":"vxlan","#,
                r#""BackendData":{"VNI":1,"VtepMAC":"aa:bb:cc:dd:ee:ff"}}"#
            ),
        ),
        (
            "10.5.35.0-24&fd00:0:0:5::-64",
            r#"{"PublicIP":"1.2.3.5","PublicIPv6":"2001:db8::5","BackendType":"host-gw"}"#,
        ),
        (
            "0.0.0.0-0&fd00:0:0:6::-64",
            r#"{"PublicIP":"0.0.0.0","PublicIPv6":"2001:db8::6","BackendType":"host-gw"}"#,
        ),
    ];
    for (n, (text, value)) in golden.iter().enumerate() {
        let attrs = LeaseAttrs::from_json(value).unwrap();
        registry.create(&key(text), &attrs, grant(n as u64 + 1)).await.unwrap();
    }
    // An update writes the same.
    let first = registry.entry(&key("10.5.34.0-24")).await.unwrap().unwrap();
    let updated = registry
        .update(&key("10.5.34.0-24"), first.lease.revision, &first.lease.attrs, grant(1))
        .await;
    assert_eq!(updated.unwrap().lease.since, first.lease.since);
    let mut client = etcd.client().await;
    let got = client.get("", Some(GetOptions::new().with_all_keys())).await.unwrap();
    let mut stored: Vec<_> = got
        .kvs()
        .iter()
        .map(|kv| {
            (kv.key_str().unwrap().to_owned(), kv.value_str().unwrap().to_owned(), kv.lease())
        })
        .collect();
    stored.sort_by_key(|(.., lease)| *lease);
    let expected: Vec<_> = golden
        .iter()
        .enumerate()
        .map(|(n, (key, value))| {
            (format!("{PREFIX}/subnets/{key}"), (*value).to_owned(), n as i64 + 1)
        })
        .collect();
    assert_eq!(stored, expected, "no other key exists");
    let lease = client.lease_client().time_to_live(1, None).await.unwrap();
    assert_eq!(lease.granted_ttl(), 86_400);
}

#[tokio::test]
async fn leases_written_by_go_flannel_are_read() {
    let etcd = Etcd::start().await;
    let mut client = etcd.client().await;
    let lease = client.lease_grant(86_400, None).await.unwrap().id();
    let value = concat!(
        r#"{"PublicIP":"192.0.2.9","PublicIPv6":null,"BackendType":"vxlan","#,
        r#""BackendData":{"VNI":1}}"#
    );
    let options = PutOptions::new().with_lease(lease);
    client.put(format!("{PREFIX}/subnets/10.1.9.0-24"), value, Some(options)).await.unwrap();
    client
        .put(format!("{PREFIX}/subnets/10.1.10.0-24"), r#"{"PublicIP":"192.0.2.10"}"#, None)
        .await
        .unwrap();
    // None of these is below the prefix.
    for key in
        ["/coreos.com/networks/subnets/10.1.11.0-24", "/coreos.com/network/subnetsX/10.1.12.0-24"]
    {
        client.put(key, value, None).await.unwrap();
    }
    let listing = registry(&etcd.endpoints()).list().await.unwrap();
    let holders: Vec<_> =
        listing.entries.iter().map(|e| (e.lease.subnets.to_string(), e.holder)).collect();
    let holder = Some(HolderId(lease.cast_unsigned()));
    assert_eq!(holders, [("10.1.10.0-24".to_owned(), None), ("10.1.9.0-24".to_owned(), holder)]);
    assert_eq!(listing.skipped, []);
}

#[tokio::test]
async fn foreign_keys_are_skipped_and_remove_no_peer() {
    let etcd = Etcd::start().await;
    let registry = registry(&etcd.endpoints());
    registry.create(&key("10.1.5.0-24"), &attrs(&["192.0.2.5"]), grant(5)).await.unwrap();
    let mut peer = Peer::of(&registry).await;
    for foreign in ["lock", "10.1.6.0-24/x", "0.0.0.0-0", "10.1.7.0-32", ""] {
        etcd.put(&format!("{PREFIX}/subnets/{foreign}"), "x").await;
    }
    etcd.client().await.put(format!("{PREFIX}/subnets/bin"), vec![0xff, 0xfe], None).await.unwrap();
    registry.create(&key("10.1.8.0-24"), &attrs(&["192.0.2.8"]), grant(8)).await.unwrap();
    peer.sees(5, &["10.1.5.0-24", "10.1.8.0-24"]).await;
    let listing = registry.list().await.unwrap();
    assert_eq!(listing.entries.len(), 2, "{:?}", listing.skipped);
    assert_eq!(listing.skipped.len(), 6, "{:?}", listing.skipped);
}

/// The pages of such a list are larger than any answer that is read.
#[tokio::test]
async fn values_of_a_megabyte_neither_fail_a_list_nor_hide_other_leases() {
    let etcd = Etcd::start().await;
    let mut client = etcd.client().await;
    let patient = Duration::from_secs(20);
    let options = EtcdOptions { request_timeout: patient, ..options(&etcd.endpoints()) };
    let registry = EtcdRegistry::new(options).unwrap();
    let large = vec![b'x'; 1_400_000];
    for n in 0..40 {
        let leases = format!("{PREFIX}/subnets");
        client.put(format!("{leases}/10.1.{n}.128-25"), large.clone(), None).await.unwrap();
        client.put(format!("{leases}/foreign-{n}"), large.clone(), None).await.unwrap();
        let subnets = key(&format!("10.1.{n}.0-25"));
        registry.create(&subnets, &attrs(&[&format!("192.0.2.{n}")]), grant(5)).await.unwrap();
    }
    let listing = within(60, "a list", registry.list()).await.unwrap();
    assert_eq!(listing.entries.len(), 40);
    assert_eq!(listing.skipped.len(), 80);
    let too_large = |skipped: &&Skipped| matches!(skipped.reason, SkipReason::TooLarge(_));
    assert_eq!(listing.skipped.iter().filter(too_large).count(), 40);
    let mut watch = registry.watch(Revision(1)).await.unwrap();
    let mut seen = std::collections::BTreeSet::new();
    within(60, "all changes", async {
        while seen.len() < 120 {
            let batch = watch.next().await.unwrap().expect("no gap");
            seen.extend(batch.events.into_iter().map(|event| event.key));
        }
    })
    .await;
}

#[tokio::test]
async fn leases_above_4_mib_are_listed_in_pages() {
    let etcd = Etcd::start().await;
    let mut client = etcd.client().await;
    let value = format!(
        r#"{{"PublicIP":"192.0.2.1","PublicIPv6":null,"BackendType":"vxlan","BackendData":"{}"}}"#,
        "x".repeat(1000)
    );
    for third in 0..40u32 {
        let puts: Vec<_> = (0..120u32)
            .map(|n| {
                etcd_client::TxnOp::put(
                    format!("{PREFIX}/subnets/10.{third}.{n}.0-24"),
                    value.as_str(),
                    None,
                )
            })
            .collect();
        client.txn(etcd_client::Txn::new().and_then(puts)).await.unwrap();
    }
    let registry = registry(&etcd.endpoints());
    assert_eq!(registry.list().await.unwrap().entries.len(), 4800);
    // A watch from the beginning reports them in the same way.
    let mut watch = registry.watch(Revision(1)).await.unwrap();
    let mut count = 0;
    within(30, "all changes", async {
        while count < 4800 {
            count += watch.next().await.unwrap().expect("no gap").events.len();
        }
    })
    .await;
}

#[tokio::test]
async fn the_number_of_requests_of_a_start_does_not_depend_on_the_number_of_leases() {
    let mut requests = Vec::new();
    for peers in [0u8, 200] {
        let etcd = Etcd::start().await;
        etcd.put(&format!("{PREFIX}/config"), V4).await;
        let registry = registry(&etcd.endpoints());
        for n in 0..peers {
            let text = format!("10.1.{}.0-24", n + 1);
            registry
                .create(&key(&text), &attrs(&[&format!("192.0.2.{n}")]), grant(u64::from(n) + 1))
                .await
                .unwrap();
        }
        let manager = node(&registry, 1000);
        let mut views = manager.watch_leases().await.unwrap();
        let lease = manager.acquire_lease(&attrs(&["198.51.100.1"])).await.unwrap();
        let all = views.wait_for(|view| view.leases.len() == usize::from(peers) + 1);
        drop(within(30, "all leases", all).await.unwrap());
        assert!(lease.expires.is_some());
        requests.push(manager.store_status().requests());
    }
    assert_eq!(requests[0], requests[1]);
    // The config, two lists (to choose, and to follow), the watch, the lease.
    assert!(requests[0] <= 5, "{requests:?}");
}

#[tokio::test]
async fn renewals_write_nothing_and_wake_no_watch() {
    let etcd = Etcd::start().await;
    let registry = registry(&etcd.endpoints());
    registry.create(&key("10.1.5.0-24"), &attrs(&["192.0.2.5"]), grant(5)).await.unwrap();
    let before = registry.list().await.unwrap();
    let mut watch = registry.watch(before.revision).await.unwrap();
    for _ in 0..20 {
        assert_eq!(registry.keep_alive(&key("10.1.5.0-24"), HolderId(5)).await.unwrap(), Some(DAY));
    }
    assert_eq!(registry.list().await.unwrap(), before, "the revision of the whole store too");
    registry.create(&key("10.1.6.0-24"), &attrs(&["192.0.2.6"]), grant(6)).await.unwrap();
    let batch = within(20, "a change", watch.next()).await.unwrap().unwrap();
    let keys: Vec<_> = batch.events.iter().map(|event| event.key.as_str()).collect();
    assert_eq!(keys, ["10.1.6.0-24"], "no event precedes it");
    assert_eq!(
        registry.keep_alive(&key("10.1.5.0-24"), HolderId(77)).await.unwrap(),
        None,
        "an unknown holder"
    );
}

#[tokio::test]
async fn an_existing_etcd_lease_is_used_again() {
    let etcd = Etcd::start().await;
    let before = registry(&etcd.endpoints());
    let after = registry(&etcd.endpoints());
    before.create(&key("10.1.5.0-24"), &attrs(&["192.0.2.5"]), grant(5)).await.unwrap();
    after.create(&key("10.1.6.0-24"), &attrs(&["192.0.2.5"]), grant(5)).await.unwrap();
    let mut client = etcd.client().await;
    assert_eq!(client.leases().await.unwrap().leases().len(), 1);
    client.lease_revoke(5).await.unwrap();
    assert_eq!(after.list().await.unwrap().entries, []);
    // It relies on the etcd lease, which was revoked.
    after.create(&key("10.1.5.0-24"), &attrs(&["192.0.2.5"]), grant(5)).await.unwrap();
    // One that is too short would end while its holder relies on it.
    let short = LeaseGrant { holder: HolderId(9), ttl: Duration::from_secs(30) };
    after.create(&key("10.1.7.0-24"), &attrs(&["192.0.2.7"]), Some(short)).await.unwrap();
    let error =
        before.create(&key("10.1.8.0-24"), &attrs(&["192.0.2.7"]), grant(9)).await.unwrap_err();
    assert!(error.to_string().contains("30s"), "{error}");
}

#[tokio::test]
async fn holder_ids_that_are_not_lease_ids_are_refused() {
    let etcd = Etcd::start().await;
    let registry = registry(&etcd.endpoints());
    for holder in [0, u64::MAX] {
        let error =
            registry.create(&key("10.1.5.0-24"), &attrs(&[]), grant(holder)).await.unwrap_err();
        assert!(matches!(error, Error::Refused { .. }), "{error}");
        assert_eq!(registry.keep_alive(&key("10.1.5.0-24"), HolderId(holder)).await.unwrap(), None);
    }
}

#[tokio::test]
async fn a_missing_config_is_reported_and_a_deletion_is_a_change() {
    let etcd = Etcd::start().await;
    let registry = registry(&etcd.endpoints());
    let error = registry.config().await.unwrap_err().to_string();
    assert!(
        error.contains(&etcd.endpoint) && error.contains("/coreos.com/network/config"),
        "{error}"
    );
    etcd.put(&format!("{PREFIX}/config"), "nonsense").await;
    let error = node(&registry, 1).network_config().await.unwrap_err().to_string();
    assert!(error.contains("/coreos.com/network/config"), "{error}");
    let known = registry.config().await.unwrap();
    let changed = registry.config_changed(Some(known));
    tokio::pin!(changed);
    assert!(is_pending(&mut changed).await, "nothing has changed");
    etcd.client().await.delete(format!("{PREFIX}/config"), None).await.unwrap();
    within(20, "the deletion", changed).await.unwrap();
}

/// Whether the future is not ready, although all requests are answered.
async fn is_pending(future: &mut (impl Future<Output = flannel_core::Result<()>> + Unpin)) -> bool {
    tokio::time::timeout(Duration::from_millis(300), future).await.is_err()
}

#[tokio::test]
async fn an_event_contains_the_holder_of_the_key() {
    let etcd = Etcd::start().await;
    let registry = registry(&etcd.endpoints());
    let mut watch = registry.watch(registry.list().await.unwrap().revision).await.unwrap();
    let written =
        registry.create(&key("10.1.5.0-24"), &attrs(&["192.0.2.5"]), grant(5)).await.unwrap();
    let batch = within(20, "a change", watch.next()).await.unwrap().unwrap();
    assert_eq!(batch.revision, written.lease.revision);
    assert!(matches!(&batch.events[0].now, Now::Held(entry) if *entry == written), "{batch:?}");
}
