//! The leases of all nodes: what changes them, what does not, and reports of wrong ones.

use std::time::Duration;

use flannel_core::SubnetManager;
use flannel_core::lease::Origin;
use flannel_core::subnet::SkippedEntry;
use serde_json::json;
use test_support::Logged;

use crate::fixture::{DUAL, Fixture, PREFIX, V4, blank, leases, peer, until, wait};

#[tokio::test]
async fn nodes_are_added_changed_and_removed() {
    let fixture = Fixture::new(V4);
    fixture.server.put_node("old", peer("10.1.2.0/24", "192.0.2.2", "0a:00:00:00:00:02"));
    let (_manager, views) = fixture.following().await;
    assert_eq!(leases(&views.borrow()), ["10.1.2.0-24 vxlan 192.0.2.2"]);
    fixture.server.put_node("new", peer("10.1.3.0/24", "192.0.2.3", "0a:00:00:00:00:03"));
    until(|| views.borrow().leases.len() == 2).await;
    fixture.server.put_node("old", peer("10.1.2.0/24", "192.0.2.99", "0a:00:00:00:00:02"));
    until(|| leases(&views.borrow())[0].ends_with("192.0.2.99")).await;
    fixture.server.delete_node("old");
    until(|| leases(&views.borrow()) == ["10.1.3.0-24 vxlan 192.0.2.3"]).await;
    // A node without flannel has no lease any more.
    fixture.server.modify("new", |node| {
        node["metadata"]["annotations"][format!("{PREFIX}kube-subnet-manager")] = json!("false");
    });
    until(|| views.borrow().leases.is_empty()).await;
}

#[tokio::test]
async fn in_dual_stack_a_change_of_either_family_alone_is_a_change() {
    let fixture = Fixture::new(DUAL);
    let mut node = peer("10.1.2.0/24", "192.0.2.2", "0a:00:00:00:00:02");
    node["spec"]["podCIDRs"] = json!(["10.1.2.0/24", "fd00:0:0:2::/64"]);
    node["metadata"]["annotations"][format!("{PREFIX}public-ipv6")] = json!("2001:db8::2");
    node["metadata"]["annotations"][format!("{PREFIX}backend-v6-data")] = json!("{}");
    fixture.server.put_node("peer", node);
    let (_manager, mut views) = fixture.following().await;
    assert_eq!(
        leases(&views.borrow_and_update()),
        ["10.1.2.0-24&fd00:0:0:2::-64 vxlan 192.0.2.2 2001:db8::2"]
    );
    for (name, value) in [
        ("public-ip", "192.0.2.7"),
        ("public-ipv6", "2001:db8::7"),
        ("backend-data", "{\"VNI\":2}"),
        ("backend-v6-data", "{\"VNI\":3}"),
        ("backend-type", "host-gw"),
    ] {
        fixture.server.modify("peer", |node| {
            node["metadata"]["annotations"][format!("{PREFIX}{name}")] = json!(value);
        });
        wait(views.changed()).await.unwrap();
        let view = views.borrow_and_update().clone();
        assert!(format!("{:?}", view.leases).contains("10.1.2.0-24"));
        let text = format!("{:?}", view.leases.iter().collect::<Vec<_>>()).replace('\\', "");
        assert!(text.contains(value), "{name}: {text}");
    }
}

#[tokio::test]
async fn families_enabled_before_a_lease_is_acquired_are_used() {
    let fixture = Fixture::new(V4);
    fixture.server.put_node("me", blank(&["10.1.1.0/24", "fd00:0:0:1::/64"]));
    fixture.server.put_node("peer", peer("10.1.2.0/24", "192.0.2.2", "0a:00:00:00:00:02"));
    fixture.server.modify("peer", |node| {
        node["spec"]["podCIDRs"] = json!(["10.1.2.0/24", "fd00:0:0:2::/64"]);
    });
    let (manager, views) = fixture.following().await;
    assert_eq!(leases(&views.borrow()), ["10.1.2.0-24 vxlan 192.0.2.2"]);
    fixture.write_config(DUAL);
    let views = manager.watch_leases().await.unwrap();
    until(|| leases(&views.borrow()) == ["10.1.2.0-24&fd00:0:0:2::-64 vxlan 192.0.2.2"]).await;
    let lease = manager.acquire_lease(&crate::fixture::vxlan()).await.unwrap();
    // Now they cannot change.
    fixture.write_config(V4);
    let views = manager.watch_leases().await.unwrap();
    until(|| views.borrow().leases.get(&lease.subnets).is_some()).await;
    assert_eq!(views.borrow().leases.len(), 2);
}

#[tokio::test]
async fn a_lease_is_acquired_from_the_returned_config() {
    let fixture = Fixture::new(V4);
    fixture.server.put_node("me", blank(&["10.1.1.0/24", "fd00:0:0:1::/64"]));
    let manager = fixture.manager("me").await;
    let config = manager.network_config().await.unwrap();
    // Like the kubelet with a ConfigMap, while the network is being built.
    fixture.write_config(DUAL);
    let views = manager.watch_leases().await.unwrap();
    let lease = manager.acquire_lease(&crate::fixture::vxlan()).await.unwrap();
    assert_eq!(lease.subnets.to_string(), "10.1.1.0-24");
    until(|| views.borrow().leases.get(&lease.subnets).is_some()).await;
    manager.watch_leases().await.unwrap();
    views.has_changed().expect("the views of a running network are not closed");
    assert_eq!(manager.network_config().await.unwrap().networks, config.networks);
}

#[tokio::test]
async fn heartbeats_notify_no_receiver() {
    let fixture = Fixture::new(V4);
    fixture.server.put_node("peer", peer("10.1.2.0/24", "192.0.2.2", "0a:00:00:00:00:02"));
    let (manager, mut views) = fixture.following().await;
    let before = views.borrow_and_update().clone();
    let confirmed = || manager.store_status().confirmed.unwrap().revision.0;
    let from = confirmed();
    for _ in 0..100 {
        fixture.server.heartbeat("peer");
    }
    until(|| confirmed() >= from + 100).await;
    assert!(!views.has_changed().unwrap());
    let now = views.borrow();
    assert_eq!(now.leases.changes_since(&before.leases).count(), 0);
    let Origin::Live { revision } = now.origin else { panic!("{:?}", now.origin) };
    assert!(revision.0 >= from + 100, "the view has the latest version");
}

#[tokio::test]
async fn among_thousands_the_nodes_deleted_in_an_outage_are_removed() {
    let fixture = Fixture::new(V4);
    let many = |from: u32| {
        (from..from + 1201).map(|n| {
            let cidr = format!("10.1.{}.{}/30", n / 64, n % 64 * 4);
            (
                format!("node-{n}"),
                peer(&cidr, &format!("192.0.{}.{}", 3 + n / 256, n % 256), "0a:00:00:00:00:02"),
            )
        })
    };
    fixture.server.put_node("me", blank(&["10.1.254.0/24"]));
    fixture.server.fill(many(0));
    let (_manager, views) = fixture.following().await;
    assert_eq!(views.borrow().leases.len(), 1201);
    assert_eq!(
        fixture.server.count("NotOlderThan"),
        1,
        "a list from the server's cache has no pages"
    );
    // Without a watch, other nodes were created and deleted.
    (0..1000).for_each(|n| fixture.server.delete_node(&format!("node-{n}")));
    fixture.server.fill(many(1100));
    until(|| views.borrow().leases.len() == 1301).await;
    assert_eq!(fixture.server.count("NotOlderThan"), 2);
    assert_eq!(fixture.server.count("limit="), 0);
}

/// A restarted daemon may reach an API server that lacks the last nodes.
#[tokio::test]
async fn the_state_of_a_late_server_is_not_used() {
    let fixture = Fixture::new(V4);
    fixture.server.put_node("me", blank(&["10.1.1.0/24"]));
    fixture.server.put_node("old", peer("10.1.2.0/24", "192.0.2.2", "0a:00:00:00:00:02"));
    let new = peer("10.1.3.0/24", "192.0.2.3", "0a:00:00:00:00:03");
    fixture.server.put_node_without_event("new", new);
    fixture.server.heartbeat("me");
    let manager = fixture.manager("me").await;
    let views = manager.watch_leases().await.unwrap();
    until(|| fixture.server.count("GET /api/v1/nodes?") >= 3).await;
    assert!(matches!(views.borrow().origin, Origin::Cached { .. }), "{:?}", views.borrow().origin);
    assert_eq!(fixture.server.count("watch="), 0);
    let error = manager.store_status().last_error.unwrap().text;
    assert!(error.contains("Too large resource version"), "{error}");
    fixture.server.show_all();
    until(|| {
        leases(&views.borrow()) == ["10.1.2.0-24 vxlan 192.0.2.2", "10.1.3.0-24 vxlan 192.0.2.3"]
    })
    .await;
    assert!(matches!(views.borrow().origin, Origin::Live { .. }));
    assert_eq!(fixture.server.count("limit="), 0, "the server's store is not read");
}

/// The server may get no changes from its store, or its cache may be stuck.
#[tokio::test]
async fn a_server_with_a_late_cache_is_listed_from_its_store() {
    let fixture = Fixture::new(V4);
    fixture.server.put_node("me", blank(&["10.1.1.0/24"]));
    let many = (0..600).map(|n| {
        let cidr = format!("10.1.{}.{}/30", n / 64, n % 64 * 4);
        (format!("node-{n}"), peer(&cidr, "192.0.2.9", "0a:00:00:00:00:02"))
    });
    fixture.server.fill(many);
    fixture
        .server
        .put_node_without_event("new", peer("10.1.250.0/24", "192.0.2.3", "0a:00:00:00:00:03"));
    fixture.server.heartbeat("me");
    let manager = fixture.manager("me").await;
    let first = fixture.server.hold("NotOlderThan");
    let views = manager.watch_leases().await.unwrap();
    until(|| first.is_there()).await;
    let second = fixture.server.hold("NotOlderThan");
    drop(first);
    until(|| second.is_there()).await;
    // It is late until its answer has come, so that slow machines do not matter.
    assert_eq!(fixture.server.count("limit="), 0, "the cache is waited for");
    tokio::time::pause();
    tokio::time::advance(Duration::from_secs(11)).await;
    tokio::time::resume();
    drop(second);
    until(|| views.borrow().leases.len() == 601).await;
    assert_eq!(fixture.server.count("limit=500"), 2);
    assert_eq!(fixture.server.count("continue="), 1);
    // The watch continues from there when the server gets changes.
    until(|| fixture.server.count("watch=") == 1).await;
    fixture.server.delete_node("new");
    fixture.server.show_all();
    until(|| views.borrow().leases.len() == 600).await;
    assert_eq!(fixture.server.count("limit=500"), 2);
}

#[tokio::test]
async fn without_an_own_node_the_first_list_comes_from_the_servers_store() {
    let fixture = Fixture::new(V4);
    fixture.server.put_node("me", blank(&["10.1.1.0/24"]));
    let manager = fixture.manager("me").await;
    manager.network_config().await.unwrap();
    fixture
        .server
        .put_node_without_event("new", peer("10.1.3.0/24", "192.0.2.3", "0a:00:00:00:00:03"));
    fixture.server.delete_node("me");
    let views = manager.watch_leases().await.unwrap();
    until(|| leases(&views.borrow()) == ["10.1.3.0-24 vxlan 192.0.2.3"]).await;
    assert_eq!(fixture.server.count("NotOlderThan"), 0);
    assert_eq!(fixture.server.count("limit=500"), 1);
}

#[tokio::test]
async fn wrong_peers_are_reported_and_affect_no_other() {
    let fixture = Fixture::new(V4);
    fixture.server.put_node("good", peer("10.1.2.0/24", "192.0.2.2", "0a:00:00:00:00:02"));
    fixture.server.put_node("bad-address", peer("10.1.3.0/24", "nonsense", "0a:00:00:00:00:03"));
    fixture.server.put_node("bad-cidr", peer("10.1.4.0", "192.0.2.4", "0a:00:00:00:00:04"));
    let (manager, views) = fixture.following().await;
    assert!(leases(&views.borrow()).contains(&"10.1.2.0-24 vxlan 192.0.2.2".to_owned()));
    let skipped = || manager.store_status().skipped;
    assert_eq!(skipped().len(), 2, "{:?}", skipped());
    let SkippedEntry { key, reason, .. } = &skipped()[0];
    assert_eq!(key, "node bad-address");
    let expected = "annotation flannel.alpha.coreos.com/public-ip: \"nonsense\" is not valid, \
                    expected an IPv4 address such as 192.0.2.1";
    assert_eq!(reason, expected);
    assert!(skipped()[1].reason.contains("its PodCIDR \"10.1.4.0\" is not"), "{:?}", skipped());
    fixture.server.put_node("bad-address", peer("10.1.3.0/24", "192.0.2.3", "0a:00:00:00:00:03"));
    fixture.server.delete_node("bad-cidr");
    until(|| skipped().is_empty() && views.borrow().leases.len() == 2).await;
}

#[tokio::test]
async fn of_many_wrong_peers_a_few_are_logged_and_the_others_are_counted() {
    let logged = Logged::default();
    let _guard = tracing::subscriber::set_default(logged.clone());
    let fixture = Fixture::new(V4);
    let wrong = |n: u32| peer(&format!("10.1.{n}.0/24"), "nonsense", "0a:00:00:00:00:02");
    fixture.server.put_node("me", blank(&["10.1.254.0/24"]));
    fixture.server.fill((0..200).map(|n| (format!("node-{n}"), wrong(n))));
    let (manager, _views) = fixture.following().await;
    assert_eq!(manager.store_status().skipped.len(), 200);
    assert_eq!(logged.count("a node has a problem"), 5);
    assert_eq!(logged.count("more nodes have a problem more=195"), 1);
    // Known problems are not logged again.
    fixture.server.put_node("node-200", wrong(200));
    until(|| manager.store_status().skipped.len() == 201).await;
    assert_eq!(logged.count("a node has a problem"), 6);
    assert_eq!(logged.warnings().len(), 7);
}
