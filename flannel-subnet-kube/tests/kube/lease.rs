//! This node's lease: its publication, the changes that move it, and that it stays otherwise.

use std::net::IpAddr;

use flannel_core::address::{Dual, Family};
use flannel_core::subnet::{LeaseEnd, SkippedEntry};
use flannel_core::{Error, SubnetManager, Subnets};
use flannel_subnet_kube::{KubeManager, KubeOptions, NodeIdentity};
use serde_json::{Value, json};

use crate::fixture::{
    DUAL, Fixture, MAC, PREFIX, V4, attrs, blank, leases, peer, until, vxlan, wait, withdrawn,
};

/// Flannel's annotations of a node, as JSON.
fn annotations(fixture: &Fixture, node: &str) -> Value {
    let node = fixture.server.node(node).unwrap();
    let all = node["metadata"]["annotations"].as_object().cloned().unwrap_or_default();
    Value::Object(all.into_iter().filter(|(name, _)| name.starts_with(PREFIX)).collect())
}

#[tokio::test]
async fn a_lease_has_the_pod_cidr_and_the_annotations_of_go_flannel() {
    let fixture = Fixture::new(V4);
    fixture.server.put_node("me", blank(&["10.1.5.0/24", "fd00:0:0:5::/64"]));
    let manager = fixture.manager("me").await;
    let lease = manager.acquire_lease(&vxlan()).await.unwrap();
    assert_eq!(lease.subnets.to_string(), "10.1.5.0-24");
    assert_eq!(lease.expires, None);
    let expected = json!({
        "flannel.alpha.coreos.com/kube-subnet-manager": "true",
        "flannel.alpha.coreos.com/backend-type": "vxlan",
        "flannel.alpha.coreos.com/backend-data": MAC,
        "flannel.alpha.coreos.com/public-ip": "192.0.2.1",
    });
    assert_eq!(annotations(&fixture, "me"), expected);
    let patches = fixture.server.count("PATCH");
    assert_eq!(patches, 1);
    manager.acquire_lease(&vxlan()).await.unwrap();
    assert_eq!(fixture.server.count("PATCH"), patches, "present annotations are not written again");
    let views = manager.watch_leases().await.unwrap();
    until(|| leases(&views.borrow()) == ["10.1.5.0-24 vxlan 192.0.2.1"]).await;
    let own = views.borrow().leases.get(&lease.subnets).cloned().unwrap();
    assert_eq!(own.attrs, lease.attrs, "peers read the lease that this node holds");
    assert_eq!(own.since, lease.since, "peers read the lease that this node holds");
}

#[tokio::test]
async fn a_dual_stack_lease_with_another_prefix_is_published() {
    let fixture = Fixture::new(DUAL);
    fixture.server.put_node("me", blank(&["10.1.5.0/24", "fd00:0:0:5::/64"]));
    let mut options = fixture.options("me");
    options.prefix = "example.com/net".parse().unwrap();
    let manager = KubeManager::open(options).await.unwrap();
    let attrs = attrs("host-gw", &["192.0.2.1", "2001:db8::1"], [None, None]);
    let lease = manager.acquire_lease(&attrs).await.unwrap();
    assert_eq!(lease.subnets.to_string(), "10.1.5.0-24&fd00:0:0:5::-64");
    let expected = json!({
        "example.com/net-kube-subnet-manager": "true", "example.com/net-backend-type": "host-gw",
        "example.com/net-backend-data": "null", "example.com/net-public-ip": "192.0.2.1",
        "example.com/net-backend-v6-data": "null", "example.com/net-public-ipv6": "2001:db8::1",
    });
    assert_eq!(fixture.server.node("me").unwrap()["metadata"]["annotations"], expected);
}

#[tokio::test]
async fn prescribed_addresses_are_hints_and_overwrites_are_published() {
    let fixture = Fixture::new(V4);
    let mut node = blank(&["10.1.5.0/24"]);
    node["metadata"]["annotations"] = json!({
        format!("{PREFIX}node-public-ip"): "198.51.100.5",
        format!("{PREFIX}node-public-ipv6"): "2001:db8::5",
        format!("{PREFIX}public-ip-overwrite"): "203.0.113.9",
        format!("{PREFIX}public-ipv6-overwrite"): "2001:db8::9",
        format!("{PREFIX}iface"): "eth1, 10.0.0.0/8,",
    });
    node["status"]["addresses"] = json!([
        { "type": "Hostname", "address": "me" },
        { "type": "InternalIP", "address": "10.0.0.5" },
        { "type": "InternalIP", "address": "10.0.0.6" },
        { "type": "ExternalIP", "address": "203.0.113.9" },
        { "type": "InternalIP", "address": "fd00::5" },
    ]);
    fixture.server.put_node("me", node);
    let manager = fixture.manager("me").await;
    let hints = manager.hints().await.unwrap();
    let advertised: Dual<IpAddr> = ["203.0.113.9".parse().unwrap()].into_iter().collect();
    assert_eq!(hints.advertised, advertised, "of the families of the network config");
    assert_eq!(hints.public[Family::V4], Some("198.51.100.5".parse().unwrap()));
    assert_eq!(hints.public[Family::V6], Some("2001:db8::5".parse().unwrap()));
    assert_eq!(hints.interface, ["eth1", "10.0.0.0/8"]);
    assert_eq!(hints.node_addresses[Family::V4], Some("10.0.0.5".parse().unwrap()));
    assert_eq!(hints.node_addresses[Family::V6], Some("fd00::5".parse().unwrap()));
    assert_eq!(hints.last_published, None);
    assert_eq!(hints.previous, None);
    let lease = manager.acquire_lease(&vxlan()).await.unwrap();
    assert_eq!(lease.attrs, vxlan(), "the overwrite is not part of the lease");
    assert_eq!(
        fixture.server.annotation("me", &format!("{PREFIX}public-ip")).unwrap(),
        "203.0.113.9"
    );
    // A restart finds the MAC address that peers use.
    let hints = fixture.manager("me").await.hints().await.unwrap();
    let last_published = Some(attrs("vxlan", &["203.0.113.9"], [Some(MAC), None]));
    let expected =
        hints.clone().with_last_published(last_published).with_previous(Some(lease.subnets));
    assert_eq!(hints, expected);
    assert_eq!(hints.advertised, advertised);
}

#[tokio::test]
async fn a_removed_overwrite_is_no_longer_published() {
    let set = |fixture: &Fixture, overwrite: Option<&str>| {
        fixture.server.modify("me", |node| {
            node["metadata"]["annotations"][format!("{PREFIX}public-ip-overwrite")] =
                json!(overwrite);
            if overwrite.is_none() {
                let annotations = node["metadata"]["annotations"].as_object_mut().unwrap();
                annotations.remove(&format!("{PREFIX}public-ip-overwrite"));
            }
        });
    };
    for overwrites in
        [&[None][..], &[Some("203.0.113.66"), None], &[None, Some("203.0.113.66"), None]]
    {
        let fixture = Fixture::new(V4);
        fixture.server.put_node("me", blank(&["10.1.1.0/24"]));
        set(&fixture, Some("203.0.113.9"));
        let (manager, _) = fixture.following().await;
        let held = manager.acquire_lease(&vxlan()).await.unwrap();
        let public = || fixture.server.annotation("me", &format!("{PREFIX}public-ip")).unwrap();
        assert_eq!(public(), "203.0.113.9");
        let follow = async {
            for overwrite in overwrites {
                set(&fixture, *overwrite);
                until(|| public() == overwrite.unwrap_or("192.0.2.1")).await;
            }
        };
        tokio::select! {
            end = manager.hold_lease(&held) => panic!("{end:?}"),
            () = follow => {}
        }
        // Nor by a manager that publishes something else.
        let other = attrs("vxlan", &["192.0.2.2"], [Some(MAC), None]);
        assert_eq!(manager.publish(&held, &other).await.unwrap().attrs, other);
        assert_eq!(public(), "192.0.2.2");
    }
}

#[tokio::test]
async fn a_wrong_overwrite_is_reported_and_does_not_prevent_repairs() {
    let fixture = Fixture::new(V4);
    let (manager, _) = fixture.following().await;
    let held = manager.acquire_lease(&vxlan()).await.unwrap();
    let steps = async {
        let overwrite = format!("{PREFIX}public-ip-overwrite");
        let skipped = || manager.store_status().skipped;
        for (text, public) in [("203.0.113.9", "203.0.113.9"), ("2001:db8::9", "192.0.2.1")] {
            fixture.server.modify("me", |node| {
                node["metadata"]["annotations"] = json!({ overwrite.as_str(): text });
            });
            let expected =
                [("kube-subnet-manager", "true"), ("public-ip", public), ("backend-data", MAC)];
            let is = |name: &str| fixture.server.annotation("me", &format!("{PREFIX}{name}"));
            until(|| expected.iter().all(|(name, text)| is(name).as_deref() == Some(text))).await;
        }
        until(|| skipped().len() == 1).await;
        let expected = "annotation flannel.alpha.coreos.com/public-ip-overwrite: \
                        \"2001:db8::9\" is not valid, expected an IPv4 address such as 192.0.2.1; \
                        it is not used";
        assert_eq!(skipped(), [SkippedEntry::new("node me", expected)]);
        fixture.server.modify("me", |node| {
            drop(node["metadata"]["annotations"].as_object_mut().unwrap().remove(&overwrite));
        });
        until(|| skipped().is_empty()).await;
    };
    tokio::select! {
        end = manager.hold_lease(&held) => panic!("{end:?}"),
        () = steps => {}
    }
}

/// For a node without annotations it is refused. See wrong.rs.
#[tokio::test]
async fn a_wrong_overwrite_does_not_delay_a_later_start() {
    let fixture = Fixture::new(V4);
    let (manager, _) = fixture.following().await;
    manager.acquire_lease(&vxlan()).await.unwrap();
    fixture.server.modify("me", |node| {
        node["metadata"]["annotations"][format!("{PREFIX}public-ip-overwrite")] =
            json!("203.0.113.");
    });
    fixture.manager("me").await.acquire_lease(&vxlan()).await.unwrap();
    let public = fixture.server.annotation("me", &format!("{PREFIX}public-ip"));
    assert_eq!(public.as_deref(), Some("192.0.2.1"), "its own");
}

#[tokio::test]
async fn an_overwrite_of_a_disabled_family_is_ignored() {
    let fixture = Fixture::new(V4);
    let mut node = blank(&["10.1.1.0/24"]);
    node["metadata"]["annotations"] =
        json!({ format!("{PREFIX}public-ipv6-overwrite"): "nowhere" });
    fixture.server.put_node("me", node);
    let (manager, views) = fixture.following().await;
    manager.acquire_lease(&vxlan()).await.unwrap();
    until(|| views.borrow().leases.len() == 1).await;
    assert_eq!(manager.store_status().skipped, []);
}

#[tokio::test]
async fn the_node_name_is_read_from_the_pod() {
    let fixture = Fixture::new(V4);
    fixture.server.put_node("me", blank(&["10.1.5.0/24"]));
    fixture.server.put_pod("kube-flannel", "flannel-x", "");
    let pod = NodeIdentity::Pod { namespace: "kube-flannel".into(), name: "flannel-x".into() };
    let manager =
        KubeManager::open(KubeOptions { identity: pod, ..fixture.options("") }).await.unwrap();
    let error = manager.hints().await.unwrap_err();
    assert!(
        matches!(&error, Error::NotReady { .. })
            && error.to_string().contains("kube-flannel/flannel-x"),
        "{error}"
    );
    fixture.server.put_pod("kube-flannel", "flannel-x", "me");
    assert_eq!(manager.acquire_lease(&vxlan()).await.unwrap().subnets.to_string(), "10.1.5.0-24");
    assert_eq!(fixture.server.count("/pods/"), 2, "the node is asked for once");
}

#[tokio::test]
async fn changed_pod_cidrs_move_the_lease() {
    let fixture = Fixture::new(V4);
    let (manager, _) = fixture.following().await;
    let held = manager.acquire_lease(&vxlan()).await.unwrap();
    let ownership = manager.ownership();
    let lost = || withdrawn(&ownership);
    let to: Subnets = "10.1.9.0-24".parse().unwrap();
    let (end, ()) = tokio::join!(wait(manager.hold_lease(&held)), async {
        // Like a node that was deleted and registers again.
        until(|| fixture.server.count("watch=") > 0).await;
        fixture.server.delete_node("me");
        until(|| lost().as_deref() == Some("there is no such node any more")).await;
        fixture.server.put_node("me", blank(&["10.1.9.0/24"]));
    });
    assert_eq!(end.unwrap(), LeaseEnd::Moved { to });
    assert!(lost().is_some_and(|why| why.contains("10.1.9.0-24")));
    assert_eq!(manager.acquire_lease(&vxlan()).await.unwrap().subnets, to);
    assert_eq!(lost(), None);
}

#[tokio::test]
async fn a_node_created_again_with_its_pod_cidr_has_its_lease_again() {
    let fixture = Fixture::new(V4);
    let (manager, _) = fixture.following().await;
    let held = manager.acquire_lease(&vxlan()).await.unwrap();
    let before = annotations(&fixture, "me");
    let ownership = manager.ownership();
    let lost = || withdrawn(&ownership);
    let steps = async {
        until(|| fixture.server.count("watch=") > 0).await;
        fixture.server.delete_node("me");
        until(|| lost().is_some()).await;
        fixture.server.put_node("me", blank(&[]));
        until(|| lost().as_deref() == Some("it has no PodCIDR any more")).await;
        fixture.server.put_node("me", blank(&["10.1.1.0/24"]));
        until(|| lost().is_none() && annotations(&fixture, "me") == before).await;
    };
    tokio::select! {
        end = manager.hold_lease(&held) => panic!("{end:?}"),
        () = steps => {}
    }
}

/// The network may be built again for another reason, and must not be lost meanwhile.
#[tokio::test]
async fn a_lease_stays_in_force_while_the_node_has_no_complete_one() {
    let fixture = Fixture::new(V4);
    let mut node = blank(&["10.1.1.0/24"]);
    node["metadata"]["annotations"] = json!({ format!("{PREFIX}node-public-ip"): "198.51.100.5" });
    fixture.server.put_node("me", node.clone());
    let (manager, _) = fixture.following().await;
    let held = manager.acquire_lease(&vxlan()).await.unwrap();
    let hints = manager.hints().await.unwrap();
    let others =
        attrs("vxlan", &["192.0.2.1"], [Some(r#"{"VNI":7,"VtepMAC":"0a:00:00:00:00:01"}"#), None]);
    let mut malformed = node.clone();
    malformed["metadata"]["annotations"][format!("{PREFIX}public-ip-overwrite")] =
        json!("nonsense");
    let patches = fixture.server.count("PATCH");
    for wrong in [None, Some(blank(&[])), Some(blank(&["10.9.0.0/24"])), Some(malformed)] {
        match &wrong {
            None => fixture.server.delete_node("me"),
            Some(node) => fixture.server.put_node("me", node.clone()),
        }
        if wrong.is_none() {
            assert_eq!(manager.hints().await.unwrap(), hints);
        }
        manager.hints().await.unwrap();
        let kept = manager
            .acquire_lease(&others)
            .await
            .unwrap_or_else(|error| panic!("{wrong:?}: {error}"));
        assert_eq!(kept.subnets, held.subnets, "{wrong:?}");
        assert_eq!(kept.attrs, others, "{wrong:?}");
        assert_eq!(fixture.server.count("PATCH"), patches, "nothing is published: {wrong:?}");
        // A node that never had a lease waits.
        let error = fixture.manager("me").await.acquire_lease(&others).await.unwrap_err();
        assert!(matches!(error, Error::NotReady { .. }), "{error:?}");
    }
    // The holder publishes it when the node exists.
    let kept = manager.acquire_lease(&others).await.unwrap();
    let steps = async {
        fixture.server.put_node("me", node);
        let data = || fixture.server.annotation("me", &format!("{PREFIX}backend-data"));
        until(|| data().is_some_and(|data| data.contains("\"VNI\":7"))).await;
    };
    tokio::select! {
        end = manager.hold_lease(&kept) => panic!("{end:?}"),
        () = steps => {}
    }
}

#[tokio::test]
async fn unusable_pod_cidrs_lose_the_lease_and_do_not_move_it() {
    for (config, own, wrong) in [
        (
            V4,
            &["10.1.1.0/24"][..],
            &[
                (
                    &["10.9.0.0/24"][..],
                    "its PodCIDR 10.9.0.0/24 lies outside the pod network 10.1.0.0/16",
                ),
                (&["fd00:0:0:1::/64"], "it has no PodCIDR any more"),
            ][..],
        ),
        (
            DUAL,
            &["10.1.1.0/24", "fd00:0:0:1::/64"],
            &[
                (&["10.1.9.0/24"], "it has no IPv6 PodCIDR"),
                (
                    &["10.1.9.0/24", "fd01::/64"],
                    "its PodCIDR fd01::/64 lies outside the pod network fd00::/48",
                ),
            ],
        ),
    ] {
        let fixture = Fixture::new(config);
        fixture.server.put_node("me", blank(own));
        let (manager, views) = fixture.following().await;
        let held = manager.acquire_lease(&vxlan()).await.unwrap();
        let ownership = manager.ownership();
        let lost = || withdrawn(&ownership);
        let mut n = 1;
        let steps = async {
            for (cidrs, why) in wrong {
                fixture.server.put_node("me", blank(cidrs));
                until(|| lost().is_some_and(|lost| lost.starts_with(why))).await;
                // Peers are followed nevertheless.
                n += 1;
                let cidr = format!("10.1.{n}.0/24");
                let public = format!("192.0.2.{n}");
                fixture
                    .server
                    .put_node(&format!("n{n}"), peer(&cidr, &public, "0a:00:00:00:00:02"));
                until(|| leases(&views.borrow()).iter().any(|lease| lease.ends_with(&public)))
                    .await;
            }
            fixture.server.put_node("me", blank(own));
            until(|| lost().is_none()).await;
            fixture.server.put_node("me", blank(wrong[0].0));
            until(|| lost().is_some()).await;
        };
        tokio::select! {
            end = manager.hold_lease(&held) => panic!("{end:?}"),
            () = steps => {}
        }
        let end = wait(async {
            let fits = async {
                fixture.server.put_node("me", blank(&["10.1.200.0/24", "fd00:0:0:200::/64"]));
                std::future::pending::<()>().await;
            };
            tokio::select! { end = manager.hold_lease(&held) => end, () = fits => unreachable!() }
        });
        let LeaseEnd::Moved { to } = end.await.unwrap() else {
            panic!("the lease moves once it can")
        };
        assert!(to.to_string().starts_with("10.1.200.0-24"), "{to}");
    }
}

#[tokio::test]
async fn removed_or_changed_annotations_are_restored() {
    let fixture = Fixture::new(V4);
    let (manager, _) = fixture.following().await;
    let held = manager.acquire_lease(&vxlan()).await.unwrap();
    let before = annotations(&fixture, "me");
    let steps = async {
        for change in [
            |node: &mut Value| {
                drop(node["metadata"].as_object_mut().unwrap().remove("annotations"));
            },
            |node: &mut Value| {
                node["metadata"]["annotations"]["flannel.alpha.coreos.com/public-ip"] =
                    json!("192.0.2.66");
            },
            |node: &mut Value| {
                node["metadata"]["annotations"]["flannel.alpha.coreos.com/kube-subnet-manager"] =
                    json!("false");
            },
        ] {
            fixture.server.modify("me", change);
            assert_ne!(annotations(&fixture, "me"), before);
            until(|| annotations(&fixture, "me") == before).await;
        }
        // A new overwrite takes effect.
        fixture.server.modify("me", |node| {
            node["metadata"]["annotations"]["flannel.alpha.coreos.com/public-ip-overwrite"] =
                json!("203.0.113.9");
        });
        until(|| {
            annotations(&fixture, "me")["flannel.alpha.coreos.com/public-ip"] == "203.0.113.9"
        })
        .await;
    };
    tokio::select! {
        end = manager.hold_lease(&held) => panic!("{end:?}"),
        () = steps => {}
    }
    let patches = fixture.server.count("PATCH");
    assert!(patches <= 6, "{patches} patches");
}

/// Whether Go flannel notices an update in dual stack: only if texts of both families differ.
fn go_notices(before: &Value, after: &Value) -> bool {
    let differ = |names: [&str; 3]| {
        names
            .iter()
            .any(|name| before[format!("{PREFIX}{name}")] != after[format!("{PREFIX}{name}")])
    };
    differ(["backend-data", "backend-type", "public-ip"])
        && differ(["backend-v6-data", "backend-type", "public-ipv6"])
}

#[tokio::test]
async fn in_dual_stack_go_flannel_notices_a_change_of_one_family() {
    for (kind, data) in [
        ("vxlan", [Some(MAC), Some(r#"{"VNI":1,"VtepMAC":"0a:00:00:00:00:06"}"#)]),
        ("host-gw", [None, None]),
    ] {
        let fixture = Fixture::new(DUAL);
        fixture.server.put_node("me", blank(&["10.1.1.0/24", "fd00:0:0:1::/64"]));
        let (manager, views) = fixture.following().await;
        let mut held =
            manager.acquire_lease(&attrs(kind, &["192.0.2.1", "2001:db8::1"], data)).await.unwrap();
        let mut before = annotations(&fixture, "me");
        for public in [
            ["192.0.2.2", "2001:db8::1"],
            ["192.0.2.3", "2001:db8::1"],
            ["192.0.2.3", "2001:db8::4"],
            ["192.0.2.5", "2001:db8::5"],
            ["192.0.2.6", "2001:db8::5"],
        ] {
            let wanted = attrs(kind, &public, data);
            held = manager.publish(&held, &wanted).await.unwrap();
            let after = annotations(&fixture, "me");
            assert!(go_notices(&before, &after), "{before} {after}");
            // All readers get the same values: our nodes, Go's nodes, and a node that takes over.
            assert_eq!(held.attrs, wanted);
            until(|| {
                views.borrow().leases.get(&held.subnets).is_some_and(|lease| lease.attrs == wanted)
            })
            .await;
            for (name, data) in [("backend-data", data[0]), ("backend-v6-data", data[1])] {
                let text = after[format!("{PREFIX}{name}")].as_str().unwrap();
                assert_eq!(text.trim_start(), data.unwrap_or("null"));
                if data.is_some() {
                    let pieces: Vec<&str> = text.trim_matches(['"', '}']).split(":\"").collect();
                    assert!(
                        pieces.len() == 2 && pieces[1].starts_with("0a:00:"),
                        "Go's way to a MAC address: {pieces:?}"
                    );
                }
            }
            // No further write follows, from a restart or from the running daemon.
            let patches = fixture.server.count("PATCH");
            let manager = fixture.manager("me").await;
            assert_eq!(manager.hints().await.unwrap().last_published, Some(wanted.clone()));
            manager.acquire_lease(&wanted).await.unwrap();
            assert_eq!(fixture.server.count("PATCH"), patches);
            assert_eq!(annotations(&fixture, "me"), after);
            before = after;
        }
        // A foreign change of one family is reverted in a way that Go's nodes notice.
        let steps = async {
            fixture.server.modify("me", |node| {
                node["metadata"]["annotations"]["flannel.alpha.coreos.com/public-ip"] =
                    json!("192.0.2.66");
            });
            let changed = annotations(&fixture, "me");
            until(|| go_notices(&changed, &annotations(&fixture, "me"))).await;
        };
        tokio::select! {
            end = manager.hold_lease(&held) => panic!("{end:?}"),
            () = steps => {}
        }
    }
}

#[tokio::test]
async fn a_conflict_over_annotations_slows_down() {
    let fixture = Fixture::new(V4);
    let (manager, _) = fixture.following().await;
    let held = manager.acquire_lease(&vxlan()).await.unwrap();
    let patches = fixture.server.count("PATCH");
    let begin = std::time::Instant::now();
    let steps = async {
        for n in 1..=6 {
            fixture.server.modify("me", |node| {
                drop(node["metadata"].as_object_mut().unwrap().remove("annotations"));
            });
            until(|| fixture.server.count("PATCH") >= patches + n).await;
        }
    };
    tokio::select! {
        end = manager.hold_lease(&held) => panic!("{end:?}"),
        () = steps => {}
    }
    // At least half of 100, 200, 400, 800 and 1600 ms.
    assert!(begin.elapsed() >= std::time::Duration::from_millis(1550), "{:?}", begin.elapsed());
}

#[tokio::test]
async fn a_late_watch_neither_loses_nor_moves_a_lease() {
    let fixture = Fixture::new(V4);
    for old in [blank(&["10.1.9.0/24"]), blank(&[])] {
        fixture.server.put_node("me", old);
        let (manager, views) = fixture.following().await;
        // The watch does not show it, but a request does.
        fixture.server.put_node_without_event("me", blank(&["10.1.1.0/24"]));
        let held = manager.acquire_lease(&vxlan()).await.unwrap();
        assert_eq!(held.subnets.to_string(), "10.1.1.0-24");
        let ownership = manager.ownership();
        let lost = || withdrawn(&ownership);
        let asked = fixture.server.count("GET /api/v1/nodes/me");
        let steps = async {
            until(|| fixture.server.count("GET /api/v1/nodes/me") > asked).await;
            fixture.server.show_all();
            until(|| leases(&views.borrow()) == ["10.1.1.0-24 vxlan 192.0.2.1"]).await;
        };
        tokio::select! {
            end = wait(manager.hold_lease(&held)) => panic!("{end:?}"),
            () = steps => {}
        }
        assert!(!ownership.has_changed().unwrap() && lost().is_none());
    }
}

#[tokio::test]
async fn other_attributes_are_published_and_other_subnets_are_a_conflict() {
    let fixture = Fixture::new(V4);
    let (manager, views) = fixture.following().await;
    let held = manager.acquire_lease(&vxlan()).await.unwrap();
    let other = attrs("vxlan", &["192.0.2.2"], [Some(MAC), None]);
    let lease = manager.publish(&held, &other).await.unwrap();
    assert_eq!(lease.attrs, other);
    until(|| leases(&views.borrow()) == ["10.1.1.0-24 vxlan 192.0.2.2"]).await;
    fixture.server.put_node("me", blank(&["10.1.2.0/24"]));
    let error = manager.publish(&held, &other).await.unwrap_err();
    assert!(matches!(error, Error::Conflict { .. }), "{error}");
}
