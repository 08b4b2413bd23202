//! Lists in several pages, while other writers change the keys.

use std::collections::BTreeMap;

use etcd_client::{Txn, TxnOp};
use flannel_subnet::{Now, Registry, SkipReason};
use flannel_subnet_etcd::EtcdRegistry;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::proxy::Proxy;
use super::server::Etcd;
use super::{key, registry, within};

const LEASES: &str = "/coreos.com/network/subnets";
/// Less than the first page, and more than anything before it.
const IN_THE_FIRST_PAGE: usize = 10_000;

fn value(n: u32) -> String {
    format!(
        r#"{{"PublicIP":"192.0.2.{n}","BackendType":"vxlan","BackendData":"{}"}}"#,
        "x".repeat(400)
    )
}

/// 600 leases. The first page has 64 of them.
async fn fill(etcd: &Etcd) {
    let mut client = etcd.client().await;
    for second in 1..=5u32 {
        let key = |third: u32| format!("{LEASES}/10.{second}.{third}.0-24");
        let puts: Vec<_> = (0..120).map(|n| TxnOp::put(key(n), value(1), None)).collect();
        client.txn(Txn::new().and_then(puts)).await.unwrap();
    }
}

/// A registry behind a proxy that holds back all requests after the first page.
async fn held(etcd: &Etcd) -> (Proxy, EtcdRegistry) {
    let proxy = Proxy::of(etcd).await;
    let registry = registry(std::slice::from_ref(&proxy.endpoint));
    proxy.hold_after(IN_THE_FIRST_PAGE);
    (proxy, registry)
}

/// The public address of each lease.
async fn addresses(registry: &EtcdRegistry) -> BTreeMap<String, String> {
    let entries = registry.list().await.unwrap().entries;
    let address = |lease: &flannel_core::Lease| lease.attrs.preferred.public.v4.unwrap();
    let pair = |entry: flannel_subnet::Entry| {
        (entry.lease.subnets.to_string(), address(&entry.lease).to_string())
    };
    entries.into_iter().map(pair).collect()
}

/// The number of lists that etcd has answered with this code.
async fn answered(etcd: &Etcd, code: &str) -> u32 {
    let address = etcd.endpoint.trim_start_matches("http://");
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(b"GET /metrics HTTP/1.0\r\n\r\n").await.unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).await.unwrap();
    let is_it = |line: &&str| {
        let labels = [format!("grpc_code=\"{code}\""), "grpc_method=\"Range\"".to_owned()];
        line.starts_with("grpc_server_handled_total") && labels.iter().all(|l| line.contains(l))
    };
    let line = text.lines().find(is_it);
    line.map_or(0, |line| line.rsplit_once(' ').unwrap().1.parse().unwrap())
}

#[tokio::test]
async fn changes_between_two_pages_are_reported_by_the_watch_and_not_in_the_list() {
    let etcd = Etcd::start().await;
    fill(&etcd).await;
    let before = addresses(&registry(&etcd.endpoints())).await;
    let (proxy, registry) = held(&etcd).await;
    let changing = async {
        within(20, "the first page", proxy.holds()).await;
        let mut client = etcd.client().await;
        for key in ["10.1.0.0-24", "10.5.7.0-24", "10.5.200.0-24"] {
            client.put(format!("{LEASES}/{key}"), value(7), None).await.unwrap();
        }
        for key in ["10.1.1.0-24", "10.5.8.0-24"] {
            client.delete(format!("{LEASES}/{key}"), None).await.unwrap();
        }
        proxy.release();
    };
    let (listing, ()) = tokio::join!(registry.list(), changing);
    let listing = listing.unwrap();
    let listed = listing.entries.iter().map(|entry| entry.lease.subnets.to_string());
    assert!(listed.eq(before.keys().cloned()), "no key is missing, none is new");
    for entry in &listing.entries {
        let public = entry.lease.attrs.preferred.public.v4.unwrap();
        assert_eq!(public.to_string(), "192.0.2.1", "{}", entry.lease.subnets);
        assert!(entry.lease.revision <= listing.revision);
    }
    let mut watch = registry.watch(listing.revision).await.unwrap();
    let mut changes = Vec::new();
    within(20, "all changes", async {
        while changes.len() < 5 {
            changes.extend(watch.next().await.unwrap().expect("no gap").events);
        }
    })
    .await;
    let names = changes.iter().map(|event| (event.key.as_str(), event.now == Now::Gone));
    let expected = [
        ("10.1.0.0-24", false),
        ("10.5.7.0-24", false),
        ("10.5.200.0-24", false),
        ("10.1.1.0-24", true),
        ("10.5.8.0-24", true),
    ];
    assert_eq!(names.collect::<Vec<_>>(), expected);
}

#[tokio::test]
async fn a_list_whose_revision_is_compacted_begins_again_with_pages_as_large_as_before() {
    let etcd = Etcd::start().await;
    fill(&etcd).await;
    let (proxy, registry) = held(&etcd).await;
    let compacting = async {
        within(20, "the first page", proxy.holds()).await;
        let mut client = etcd.client().await;
        let put = client.put(format!("{LEASES}/10.5.200.0-24"), value(7), None).await.unwrap();
        client.compact(put.header().unwrap().revision(), None).await.unwrap();
        proxy.release();
    };
    let begin = answered(&etcd, "OK").await;
    let (listing, ()) = tokio::join!(registry.list(), compacting);
    let listing = listing.unwrap();
    assert_eq!(listing.entries.len(), 601);
    assert!(listing.entries.iter().any(|entry| entry.lease.subnets == key("10.5.200.0-24")));
    assert_eq!(answered(&etcd, "OutOfRange").await, 1, "no smaller page is tried");
    // One page of the first revision, and pages of 64, 512 and 25 keys.
    assert_eq!(answered(&etcd, "OK").await - begin, 4);
}

#[tokio::test]
async fn a_watch_ends_after_as_many_skipped_keys_as_a_list_has() {
    let etcd = Etcd::start().await;
    let registry = registry(&etcd.endpoints());
    let listing = registry.list().await.unwrap();
    let mut watch = registry.watch(listing.revision).await.unwrap();
    let mut client = etcd.client().await;
    let long = "x".repeat(10_000);
    let writing = async {
        // Two keys that alternate, and never more than 120 keys in all.
        for round in 0..=flannel_subnet::MOST_SKIPPED / 120 {
            let put = |n| TxnOp::put(format!("{LEASES}/lock-{n}"), format!("{round}"), None);
            client.txn(Txn::new().and_then((0..120).map(put).collect::<Vec<_>>())).await.unwrap();
        }
        client.put(format!("{LEASES}/{long}"), "x", None).await.unwrap();
    };
    let reading = async {
        let mut skipped = 0;
        while let Some(batch) = watch.next().await.unwrap() {
            for event in batch.events {
                let is_skipped = matches!(event.now, Now::Unreadable(SkipReason::Unreadable(_)));
                assert!(is_skipped && event.key.len() < 200, "{event:?}");
                skipped += 1;
            }
        }
        skipped
    };
    let (skipped, ()) = within(60, "the end", async { tokio::join!(reading, writing) }).await;
    assert!(skipped <= flannel_subnet::MOST_SKIPPED, "{skipped}");
    let skipped = registry.list().await.unwrap().skipped;
    assert_eq!(skipped.len(), 121);
    assert!(skipped.iter().all(|skipped| skipped.key.len() < 200));
}
