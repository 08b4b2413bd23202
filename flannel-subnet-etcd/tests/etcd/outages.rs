//! Failures of etcd, and their effect on leases and views.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use flannel_core::lease::Origin;
use flannel_core::{Error, SubnetManager};
use flannel_subnet::{HolderId, LeaseGrant, Registry};
use flannel_subnet_etcd::{EtcdOptions, EtcdRegistry};
use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream};

use super::proxy::Proxy;
use super::server::{Etcd, etcdctl};
use super::{DAY, Peer, V4, attrs, grant, hold, key, node, options, registry, until, within};

const PREFIX: &str = "/coreos.com/network";

async fn create(registry: &EtcdRegistry, n: u8) {
    let text = format!("10.1.{n}.0-24");
    let attrs = attrs(&[&format!("192.0.2.{n}")]);
    registry.create(&key(&text), &attrs, grant(u64::from(n))).await.unwrap();
}

#[tokio::test]
async fn each_unreachable_endpoint_is_named() {
    let endpoints = ["http://127.0.0.1:1".to_owned(), "http://[::1]:1".to_owned()];
    let options = EtcdOptions { patience: Duration::from_secs(1), ..options(&endpoints) };
    let begin = Instant::now();
    let error = EtcdRegistry::new(options).unwrap().list().await.unwrap_err();
    assert!(matches!(error, Error::Store { .. }), "a later attempt may succeed: {error}");
    let elapsed = begin.elapsed();
    let default = EtcdOptions::default().patience;
    assert!(elapsed >= Duration::from_secs(1) && elapsed < default, "{elapsed:?}");
    for says in [&endpoints[0], &endpoints[1], "/coreos.com/network/subnets", "refused"] {
        assert!(error.to_string().contains(says), "{says}: {error}");
    }
}

#[tokio::test]
async fn the_reason_for_a_missing_answer_is_known_before_the_request_fails() {
    let mut etcd = Etcd::start().await;
    etcd.kill();
    let manager = node(&registry(&etcd.endpoints()), 1);
    let asking = tokio::spawn({
        let manager = Arc::clone(&manager);
        async move { manager.network_config().await }
    });
    until(10, "the reason", || async { manager.store_status().last_error.is_some() }).await;
    let reason = manager.store_status().last_error.unwrap().text;
    assert!(
        reason.contains(&etcd.endpoint) && reason.contains("/config") && reason.contains("refused")
    );
    assert!(!asking.is_finished(), "the request is repeated");
    etcd.go();
    let error = within(20, "an answer", asking).await.unwrap().unwrap_err();
    assert!(matches!(error, Error::NoConfig { .. }), "{error}");
    assert_eq!(manager.store_status().last_error, None);
}

/// The callers pause between requests, longer and longer.
#[tokio::test]
async fn during_an_outage_a_request_asks_each_endpoint_once() {
    let mut etcd = Etcd::start().await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    let asked = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&asked);
    let dead = tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            counted.fetch_add(1, Ordering::Relaxed);
            drop(stream);
        }
    });
    etcd.kill();
    let endpoints = [endpoint, etcd.endpoint.clone()];
    let options = EtcdOptions { patience: Duration::from_secs(2), ..options(&endpoints) };
    let registry = EtcdRegistry::new(options).unwrap();
    let mut counts = Vec::new();
    for _ in 0..3 {
        asked.store(0, Ordering::Relaxed);
        assert!(matches!(registry.list().await, Err(Error::Store { .. })));
        counts.push(asked.load(Ordering::Relaxed));
    }
    assert!(counts[0] > 3 && counts[1..] == [1, 1], "{counts:?}");
    // After an answer, requests are repeated again.
    etcd.go();
    etcd.ready().await;
    until(20, "an answer", || async { registry.list().await.is_ok() }).await;
    etcd.kill();
    asked.store(0, Ordering::Relaxed);
    assert!(matches!(registry.list().await, Err(Error::Store { .. })));
    assert!(asked.load(Ordering::Relaxed) > 3, "{asked:?}");
    dead.abort();
}

#[tokio::test]
async fn requests_succeed_despite_a_dead_endpoint() {
    let etcd = Etcd::start().await;
    let endpoints =
        ["http://127.0.0.1:1".to_owned(), "http://127.0.0.1:2".to_owned(), etcd.endpoint.clone()];
    for n in 1..=12 {
        let begin = Instant::now();
        create(&registry(&endpoints), n).await;
        assert!(begin.elapsed() < Duration::from_secs(10), "{:?}", begin.elapsed());
    }
}

#[tokio::test]
async fn a_repeated_request_distinguishes_other_writers() {
    let etcd = Etcd::start().await;
    let other = registry(&etcd.endpoints());
    let held = key("10.1.5.0-24");
    let reserved = key("10.1.6.0-24");
    let one = attrs(&["192.0.2.1"]);
    let two = attrs(&["192.0.2.2"]);
    let entry = other.create(&held, &one, grant(1)).await.unwrap();
    other.create(&reserved, &one, None).await.unwrap();
    let stale = entry.lease.revision;
    let entry = other.update(&held, stale, &one, grant(1)).await.unwrap();
    // About half of them try the dead endpoint first, and repeat their first request.
    for _ in 0..12 {
        let repeating = || registry(&["http://127.0.0.1:1".to_owned(), etcd.endpoint.clone()]);
        let conflicts = |error: Error| assert!(matches!(error, Error::Conflict { .. }), "{error}");
        conflicts(repeating().create(&held, &one, None).await.unwrap_err());
        conflicts(repeating().create(&reserved, &two, None).await.unwrap_err());
        conflicts(repeating().update(&held, stale, &one, None).await.unwrap_err());
        conflicts(repeating().delete(&held, stale).await.unwrap_err());
    }
    assert_eq!(other.entry(&held).await.unwrap(), Some(entry));
    // A list of all keys must not confuse it with a similar key.
    let own = other.create(&key("10.1.7.0-24"), &two, None).await.unwrap();
    for _ in 0..12 {
        let repeating = registry(&["http://127.0.0.1:1".to_owned(), etcd.endpoint.clone()]);
        let listing = repeating.create_or_list(&held, &two, None).await.unwrap().unwrap_err();
        assert!(listing.entries.contains(&own), "{listing:?}");
    }
}

#[tokio::test]
async fn a_write_whose_answer_was_lost_is_recognized() {
    let etcd = Etcd::start().await;
    let direct = registry(&etcd.endpoints());
    let proxy = Proxy::of(&etcd).await;
    let patient = EtcdOptions {
        request_timeout: Duration::from_secs(30),
        ..options(std::slice::from_ref(&proxy.endpoint))
    };
    let registry = EtcdRegistry::new(patient).unwrap();
    let subnets = key("10.1.5.0-24");
    let other = key("10.1.6.0-24");
    let one = attrs(&["192.0.2.1"]);
    let two = attrs(&["192.0.2.2"]);
    registry.list().await.unwrap();

    proxy.mute();
    let (created, ()) = tokio::join!(registry.create(&subnets, &one, None), async {
        until(10, "the key is written", || async {
            direct.entry(&subnets).await.unwrap().is_some()
        })
        .await;
        proxy.cut();
    });
    let created = created.unwrap();
    assert_eq!(direct.entry(&subnets).await.unwrap(), Some(created.clone()));

    let at = created.lease.revision;
    proxy.mute();
    let (updated, ()) = tokio::join!(registry.update(&subnets, at, &two, None), async {
        until(10, "the key is changed", || async {
            direct.entry(&subnets).await.unwrap().is_some_and(|entry| entry.lease.revision > at)
        })
        .await;
        proxy.cut();
    });
    let updated = updated.unwrap();
    assert_eq!(direct.entry(&subnets).await.unwrap(), Some(updated.clone()));

    proxy.mute();
    let (deleted, ()) = tokio::join!(registry.delete(&subnets, updated.lease.revision), async {
        until(10, "the key is deleted", || async {
            direct.entry(&subnets).await.unwrap().is_none()
        })
        .await;
        proxy.cut();
    });
    deleted.unwrap();

    // The answer to the grant is lost.
    proxy.mute();
    let (created, ()) = tokio::join!(registry.create(&other, &one, grant(6)), async {
        let granted = || async { !etcd.client().await.leases().await.unwrap().leases().is_empty() };
        until(10, "the lease is granted", granted).await;
        proxy.cut();
    });
    assert_eq!(created.unwrap().holder, Some(HolderId(6)));
}

#[tokio::test]
async fn a_silent_endpoint_costs_one_time_limit() {
    let silent = Etcd::start().await;
    let good = Etcd::start().await;
    let endpoints = [silent.endpoint.clone(), good.endpoint.clone()];
    let request_timeout = Duration::from_secs(8);
    let registry =
        EtcdRegistry::new(EtcdOptions { request_timeout, ..options(&endpoints) }).unwrap();
    silent.pause();
    create(&registry, 1).await;
    let begin = Instant::now();
    create(&registry, 2).await;
    assert!(begin.elapsed() < request_timeout, "the endpoint that answers stays in use");
    silent.resume();
}

#[tokio::test]
async fn leases_survive_a_killed_and_restarted_etcd() {
    let mut etcd = Etcd::start().await;
    // The node's subnet is none of those that are created below.
    let config = r#"{"Network":"10.1.0.0/16","SubnetMin":"10.1.100.0"}"#;
    etcd.put(&format!("{PREFIX}/config"), config).await;
    let registry = registry(&etcd.endpoints());
    create(&registry, 5).await;
    let mut peer = Peer::of(&registry).await;
    let manager = node(&registry, 1);
    let (lease, held) = hold(&manager, &["192.0.2.1"]).await;
    let before = peer.views.borrow().leases.clone();
    etcd.kill();
    // A request during the outage.
    let renewal = tokio::spawn({
        let registry = registry.clone();
        async move { registry.keep_alive(&key("10.1.5.0-24"), HolderId(5)).await }
    });
    let creation = tokio::spawn({
        let registry = registry.clone();
        async move { registry.create(&key("10.1.6.0-24"), &attrs(&["192.0.2.6"]), grant(6)).await }
    });
    until(10, "the outage is noticed", || async {
        manager.store_status().failures() > 0 || etcd_is_down(&etcd).await
    })
    .await;
    etcd.go();
    assert_eq!(within(20, "renewed", renewal).await.unwrap().unwrap(), Some(DAY));
    within(20, "created", creation).await.unwrap().unwrap();
    let mut expected: Vec<_> = before.iter().map(|lease| lease.subnets.to_string()).collect();
    expected.push("10.1.6.0-24".into());
    expected.sort_by_key(|text| key(text));
    peer.sees(20, &expected.iter().map(String::as_str).collect::<Vec<_>>()).await;
    assert!(!held.is_finished());
    assert_eq!(
        registry.entry(&lease.subnets).await.unwrap().unwrap().lease.revision,
        lease.revision
    );
    held.abort();
}

async fn etcd_is_down(etcd: &Etcd) -> bool {
    TcpStream::connect(etcd.endpoint.trim_start_matches("http://")).await.is_err()
}

/// `ETCD_PAUSE` is the number of seconds; 3 by default.
#[tokio::test]
async fn requests_succeed_after_a_frozen_etcd_resumes() {
    let pause = std::env::var("ETCD_PAUSE")
        .map_or(3, |seconds| seconds.parse().expect("ETCD_PAUSE in seconds"));
    let etcd = Etcd::start().await;
    etcd.put(&format!("{PREFIX}/config"), V4).await;
    let registry = EtcdRegistry::new(EtcdOptions {
        request_timeout: Duration::from_secs(1),
        patience: Duration::from_secs(pause + 20),
        ..options(&etcd.endpoints())
    });
    let registry = registry.unwrap();
    create(&registry, 5).await;
    let mut peer = Peer::of(&registry).await;
    let (lease, held) = hold(&node(&registry, 1), &["192.0.2.1"]).await;
    let first = registry.entry(&key("10.1.5.0-24")).await.unwrap().unwrap();
    etcd.pause();
    let mut requests = tokio::task::JoinSet::new();
    // Other subnets than the subnet of the node.
    let others: Vec<u8> =
        (20..).filter(|n| key(&format!("10.1.{n}.0-24")) != lease.subnets).take(4).collect();
    for n in others.iter().copied() {
        let registry = registry.clone();
        // Carried out, though the answer is late. It is recognized by the repeated request.
        requests.spawn(async move { create(&registry, n).await });
    }
    requests.spawn({
        let registry = registry.clone();
        let at = first.lease.revision;
        async move {
            let changed = attrs(&["192.0.2.55"]);
            registry.update(&key("10.1.5.0-24"), at, &changed, grant(5)).await.unwrap();
        }
    });
    // The pause itself.
    tokio::time::sleep(Duration::from_secs(pause)).await;
    etcd.resume();
    within(40, "all requests", async {
        while let Some(done) = requests.join_next().await {
            done.unwrap();
        }
    })
    .await;
    let mut expected: Vec<_> =
        others.into_iter().chain([5]).map(|n| key(&format!("10.1.{n}.0-24"))).collect();
    expected.push(lease.subnets);
    expected.sort();
    let expected: Vec<_> = expected.iter().map(ToString::to_string).collect();
    peer.sees(30, &expected.iter().map(String::as_str).collect::<Vec<_>>()).await;
    assert!(!held.is_finished());
    held.abort();
}

/// A connection that is dead without a message, as after a pulled cable.
#[tokio::test]
async fn a_dead_connection_is_noticed_within_10_seconds() {
    let etcd = Etcd::start().await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    let to = etcd.endpoint.trim_start_matches("http://").to_owned();
    // Forwards until a signal, then nothing. New connections work again.
    let (cut, is_cut) = tokio::sync::watch::channel(0u32);
    tokio::spawn(async move {
        while let Ok((mut near, _)) = listener.accept().await {
            let to = to.clone();
            let mut is_cut = is_cut.clone();
            let born = *is_cut.borrow_and_update();
            tokio::spawn(async move {
                let mut far = TcpStream::connect(to).await.unwrap();
                let cut = async { drop(is_cut.wait_for(|now| *now > born).await) };
                tokio::select! {
                    _ = copy_bidirectional(&mut near, &mut far) => return,
                    () = cut => (),
                }
                // The two ends stay open.
                std::future::pending::<()>().await;
            });
        }
    });
    let registry = registry(&[endpoint]);
    let mut watch = registry.watch(registry.list().await.unwrap().revision).await.unwrap();
    cut.send(1).unwrap();
    let begin = Instant::now();
    let error = within(30, "the end of the watch", watch.next()).await.unwrap_err();
    // It takes up to 9.5 s. Without a time limit for the ping it would be more than 25 s.
    assert!(begin.elapsed() < Duration::from_secs(20), "{:?}", begin.elapsed());
    assert!(error.to_string().contains("/coreos.com/network/subnets"), "{error}");
    create(&registry, 1).await;
    // While etcd is quiet but alive, no connection is closed. A machine that stops for longer than
    // the time limit may close one, but not two.
    let quiet = async || {
        let mut watch = registry.watch(registry.list().await.unwrap().revision).await.unwrap();
        match tokio::time::timeout(Duration::from_secs(25), watch.next()).await {
            Ok(Ok(batch)) => panic!("nothing has changed: {batch:?}"),
            Ok(Err(error)) => Some(error),
            Err(_) => None,
        }
    };
    if let Some(first) = quiet().await {
        let second = quiet().await;
        assert!(second.is_none(), "{first}, {second:?}");
    }
}

#[tokio::test]
async fn a_compaction_under_the_watch_causes_a_new_list() {
    let etcd = Etcd::start().await;
    let registry = registry(&etcd.endpoints());
    let listed = registry.list().await.unwrap().revision;
    create(&registry, 5).await;
    create(&registry, 6).await;
    let mut client = etcd.client().await;
    let now = registry.list().await.unwrap().revision;
    client.compact(now.0.cast_signed(), None).await.unwrap();
    let mut watch = registry.watch(listed).await.unwrap();
    assert_eq!(
        within(20, "the gap", watch.next()).await.unwrap(),
        None,
        "not an empty batch, and no error"
    );

    // A follower notices nothing.
    let mut peer = Peer::of(&registry).await;
    for n in 7..=9 {
        create(&registry, n).await;
        let now = registry.list().await.unwrap().revision;
        client.compact(now.0.cast_signed(), None).await.unwrap();
    }
    let six = registry.entry(&key("10.1.6.0-24")).await.unwrap().unwrap();
    registry.delete(&key("10.1.6.0-24"), six.lease.revision).await.unwrap();
    peer.sees(10, &["10.1.5.0-24", "10.1.7.0-24", "10.1.8.0-24", "10.1.9.0-24"]).await;
}

async fn leader(members: &[Etcd]) -> usize {
    let begin = Instant::now();
    while begin.elapsed() < Duration::from_secs(30) {
        for (n, member) in members.iter().enumerate() {
            if let Ok(status) = member.client().await.status().await
                && status.header().is_some_and(|header| header.member_id() == status.leader())
            {
                return n;
            }
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    panic!("no leader")
}

#[tokio::test]
async fn a_killed_leader_delays_requests_but_fails_none() {
    let mut members = Etcd::cluster().await;
    let endpoints: Vec<String> = members.iter().map(|member| member.endpoint.clone()).collect();
    members[0].put(&format!("{PREFIX}/config"), V4).await;
    let registries: Vec<_> = (0..6).map(|_| registry(&endpoints)).collect();
    let mut peers = Vec::new();
    for registry in &registries {
        peers.push(Peer::of(registry).await);
    }
    let stop = Arc::new(AtomicBool::new(false));
    let mut tasks = tokio::task::JoinSet::new();
    for (n, registry) in registries.iter().enumerate() {
        let registry = registry.clone();
        let stop = Arc::clone(&stop);
        tasks.spawn(async move {
            let mut done = Vec::new();
            for round in 0.. {
                let text = format!("10.{}.{}.0-24", n + 1, round % 250);
                let attrs = attrs(&[&format!("192.0.{n}.1")]);
                let entry =
                    registry.create(&key(&text), &attrs, grant(n as u64 + 1)).await.unwrap();
                let ttl = registry.keep_alive(&key(&text), HolderId(n as u64 + 1)).await.unwrap();
                assert_eq!(ttl, Some(DAY));
                if round % 2 == 0 {
                    registry.delete(&key(&text), entry.lease.revision).await.unwrap();
                } else {
                    done.push(text);
                }
                if stop.load(Ordering::Relaxed) || round >= 240 {
                    return done;
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            unreachable!()
        });
    }
    let some = || async { registries[0].list().await.unwrap().entries.len() > 20 };
    until(30, "leases are made", some).await;
    let first = leader(&members).await;
    members[first].kill();
    let before = registries[0].list().await.unwrap().entries.len();
    let more = || async { registries[0].list().await.unwrap().entries.len() > before + 20 };
    until(30, "leases are made without the leader", more).await;
    members[first].go();
    stop.store(true, Ordering::Relaxed);
    let mut expected: Vec<_> = within(60, "all requests", tasks.join_all()).await.concat();
    expected.sort_by_key(|text| key(text));
    let expected: Vec<_> = expected.iter().map(String::as_str).collect();
    for peer in &mut peers {
        peer.sees(30, &expected).await;
    }
}

#[tokio::test]
async fn a_cluster_without_a_majority_is_an_outage() {
    let mut members = Etcd::cluster().await;
    let endpoints: Vec<String> = members.iter().map(|member| member.endpoint.clone()).collect();
    let patience = Duration::from_secs(2);
    let registry = EtcdRegistry::new(EtcdOptions { patience, ..options(&endpoints) }).unwrap();
    create(&registry, 5).await;
    let mut peer = Peer::of(&registry).await;
    members[1].kill();
    members[2].kill();
    let error = within(20, "an error", registry.list()).await.unwrap_err();
    assert!(matches!(error, Error::Store { .. }), "{error}");
    assert_eq!(super::names(&peer.views.borrow()), ["10.1.5.0-24"], "the last set is still used");
    members[1].go();
    until(30, "a majority", || async { registry.list().await.is_ok() }).await;
    create(&registry, 6).await;
    peer.sees(30, &["10.1.5.0-24", "10.1.6.0-24"]).await;
}

/// Restores the member from a snapshot.
fn restore(etcd: &mut Etcd, snapshot: &Path) {
    etcd.kill();
    let restored = etcd.dir().join("restored");
    let args = [
        "snapshot",
        "restore",
        snapshot.to_str().unwrap(),
        "--data-dir",
        restored.to_str().unwrap(),
    ];
    let cluster = etcd.initial_cluster();
    let [name, peers, peer] = &cluster;
    let more = ["--name", name, "--initial-cluster", peers, "--initial-advertise-peer-urls", peer];
    etcdctl(&[&args[..], &more[..]].concat());
    etcd.replace_data(&restored);
    etcd.go();
}

#[tokio::test]
async fn after_a_restored_backup_leases_are_compared_by_value() {
    let mut etcd = Etcd::start().await;
    let registry = registry(&etcd.endpoints());
    for n in [5, 6] {
        create(&registry, n).await;
    }
    let snapshot = etcd.dir().join("snapshot");
    etcd.snapshot(&snapshot);
    // After the backup: a deletion, a change, and many creations, which increase the revision.
    let now = registry.list().await.unwrap();
    registry.delete(&key("10.1.5.0-24"), now.entries[0].lease.revision).await.unwrap();
    let six = now.entries[1].lease.clone();
    registry.update(&six.subnets, six.revision, &attrs(&["192.0.2.66"]), grant(6)).await.unwrap();
    for n in 10..20 {
        create(&registry, n).await;
    }
    let mut peer = Peer::of(&registry).await;
    let ahead = registry.list().await.unwrap().revision;
    restore(&mut etcd, &snapshot);
    peer.sees(30, &["10.1.5.0-24", "10.1.6.0-24"]).await;
    let view = peer.views.borrow().clone();
    assert_eq!(
        view.leases.get(&six.subnets).unwrap().attrs,
        attrs(&["192.0.2.6"]),
        "the old value"
    );
    assert!(
        matches!(view.origin, Origin::Live { revision } if revision < ahead),
        "{:?}",
        view.origin
    );
    // A list just before and a watch just after the restoration wait for a revision that may never
    // exist.
    let mut watch = registry.watch(ahead).await.unwrap();
    assert_eq!(within(20, "the gap", watch.next()).await.unwrap(), None);
    create(&registry, 7).await;
    peer.sees(10, &["10.1.5.0-24", "10.1.6.0-24", "10.1.7.0-24"]).await;
}

#[tokio::test]
async fn a_lease_that_expired_in_an_outage_is_restored_by_its_holder() {
    let mut etcd = Etcd::start().await;
    let registry = registry(&etcd.endpoints());
    let ttl = Duration::from_secs(2);
    let grant = Some(LeaseGrant { holder: HolderId(5), ttl });
    registry.create(&key("10.1.5.0-24"), &attrs(&["192.0.2.5"]), grant).await.unwrap();
    etcd.kill();
    etcd.go();
    until(20, "the lease has expired", || async {
        registry.list().await.unwrap().entries.is_empty()
    })
    .await;
    assert_eq!(registry.keep_alive(&key("10.1.5.0-24"), HolderId(5)).await.unwrap(), None);
    registry.create(&key("10.1.5.0-24"), &attrs(&["192.0.2.5"]), grant).await.unwrap();
}
