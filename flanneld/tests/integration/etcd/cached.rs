//! Starts without etcd, from the leases that an earlier run cached on disk.

use std::collections::BTreeSet;
use std::fs;
use std::time::{Duration, Instant, SystemTime};

use flannel_netlink::testing::in_netns_async;
use flannel_subnet::Cache;

use super::fixture::{Daemon, Host, delete, etcd_with_peers, peer_key, put_peer, switch, until};
use super::server::Etcd;
use super::witness::{Monitor, agrees, present, wanted};

/// A host whose daemon and etcd were killed, and the objects that its kernel should have.
async fn first_run() -> (Etcd, Host, BTreeSet<String>) {
    switch();
    let mut etcd = etcd_with_peers().await;
    let host = Host::new(1);
    let daemon = host.start(&etcd.endpoint);
    daemon.wait_for_log("in sync peers=3").await;
    // With its subnet file, which comes after the firewall's rules.
    daemon.wait_for_log("running lease").await;
    let cache = Cache::open(host.cache());
    let kept = || cache.load().is_ok_and(|saved| saved.own.is_some() && saved.leases.len() == 4);
    until(30, kept, || format!("the leases are not kept:\n{}", daemon.log())).await;
    let wanted = wanted(&etcd, &host).await;
    daemon.kill();
    etcd.kill();
    (etcd, host, wanted)
}

/// Brings the kernel and the subnet file into the state after a reboot.
fn forget_kernel(host: &Host) {
    host.ip("link del flannel.1");
    fs::remove_file(host.subnet_file()).unwrap();
    assert_eq!(present(host), BTreeSet::new());
}

/// Starts the daemon, waits until its kernel is right, and returns the time.
async fn start(etcd: &Etcd, host: &Host, wanted: &BTreeSet<String>) -> Daemon {
    let begin = Instant::now();
    let daemon = host.start(&etcd.endpoint);
    until(
        30,
        || present(host).is_superset(wanted),
        || format!("{:?}\n{}", present(host), daemon.log()),
    )
    .await;
    let elapsed = begin.elapsed();
    println!("peers in the kernel {elapsed:?} after the start without etcd");
    daemon
}

#[test]
fn cached_peers_and_own_subnet_are_restored_at_once_and_reconciled_later() {
    in_netns_async(|| async {
        let (mut etcd, host, wanted) = first_run().await;
        let own = host.subnet();
        forget_kernel(&host);
        let daemon = start(&etcd, &host, &wanted).await;
        daemon.wait_for_log("until the store answers leases=4 age_seconds=").await;
        daemon.wait_for_log("running").await;
        assert_eq!(host.subnet(), own);
        assert!(host.ip("address show flannel.1").contains(&format!("inet {own}/32")));
        daemon.kill();

        // Objects of an earlier run stay until the store answers.
        let extra = "route 10.1.200.0/24 via 10.1.200.0";
        host.ip("route add 10.1.200.0/24 via 10.1.200.0 dev flannel.1 onlink");
        host.ip("route del 10.1.101.0/24");
        let daemon = start(&etcd, &host, &wanted).await;
        daemon.wait_for_log("running").await;
        assert!(present(&host).contains(extra));
        let monitor = Monitor::of(&host).await;
        assert!(present(&host).contains(extra));

        etcd.go();
        etcd.ready().await;
        delete(&etcd, &peer_key(102)).await;
        put_peer(&etcd, 103, 203).await;
        put_peer(&etcd, 104, 104).await;
        agrees(&etcd, &host, &daemon).await;
        assert_eq!(host.subnet(), own);
        monitor.kept(&[101, 103]);
        daemon.wait_for_log("the store answers").await;
    });
}

#[test]
fn with_an_expired_lease_only_cached_peers_are_restored() {
    in_netns_async(|| async {
        let (mut etcd, host, wanted) = first_run().await;
        let own = host.subnet();
        forget_kernel(&host);
        let cache = Cache::open(host.cache());
        let mut saved = cache.load().unwrap();
        saved.written = SystemTime::now() - Duration::from_secs(60);
        saved.own.as_mut().unwrap().0.expires = Some(SystemTime::now() - Duration::from_secs(1));
        // The machine was started since.
        saved.own_end = None;
        cache.save(&saved).unwrap();
        let mut daemon = start(&etcd, &host, &wanted).await;
        daemon.wait_for_log("has run out").await;
        daemon.wait_for_log("until the store answers leases=4 age_seconds=").await;
        assert!(!host.ip("address show flannel.1").contains(&own), "its own subnet is not set up");
        assert!(!host.subnet_file().exists());
        assert!(daemon.is_running());
        assert_eq!(host.request("/healthz").0, 200);
        let (status, reasons) = host.request("/readyz");
        assert!(status == 503 && reasons.contains("does not hold its lease"), "{status} {reasons}");
        let monitor = Monitor::of(&host).await;

        // etcd still has the lease.
        etcd.go();
        etcd.ready().await;
        daemon.wait_for_log("running").await;
        until(30, || host.request("/readyz").0 == 200, || format!("{:?}", host.request("/readyz")))
            .await;
        agrees(&etcd, &host, &daemon).await;
        assert_eq!(host.subnet(), own);
        assert!(host.ip("address show flannel.1").contains(&format!("inet {own}/32")));
        monitor.kept(&[101, 102, 103]);
    });
}

#[test]
fn a_damaged_cache_is_ignored_and_logged() {
    in_netns_async(|| async {
        let (mut etcd, host, _) = first_run().await;
        forget_kernel(&host);
        let good = fs::read(host.cache()).unwrap();
        let mut flipped = good.clone();
        flipped[good.len() / 2] ^= 0x10;
        for bad in [flipped, good[..good.len() / 2].to_vec(), Vec::new()] {
            fs::write(host.cache(), bad).unwrap();
            let daemon = host.start(&etcd.endpoint);
            daemon.wait_for_log("the cache is ignored").await;
            daemon.wait_for_log(host.cache().to_str().unwrap()).await;
            daemon.wait_for_log("waiting for the store").await;
            assert_eq!(present(&host), BTreeSet::new());
            daemon.kill();
        }
        let daemon = host.start(&etcd.endpoint);
        daemon.wait_for_log("waiting for the store").await;
        etcd.go();
        etcd.ready().await;
        agrees(&etcd, &host, &daemon).await;
    });
}
