//! Tests of the observer, and the network on fakes that other tests observe.

use flannel_core::address::Dual;
use flannel_core::backend::ExternalInterface;
use flannel_core::network::NetworkHandle;
use flannel_core::object::PublicKey;
use flannel_core::testing::{FakeKernel, FakeSubnets};
use flannel_doctor::inputs::tunnels::Tunnels;
use flannel_doctor::path_probe::server;
use flannel_netlink::{Session, Tunnel};
use flannel_route::{Host, JoinOptions};

use super::*;
use crate::config::FirewallConfig;

/// A device with a peer for each handshake and number of sent bytes. Peer `n` has the subnet
/// 10.1.(7 + n).0/24.
pub(crate) fn tunnels_with<const N: usize>(sessions: [(Option<SystemTime>, u64); N]) -> Tunnels {
    let sessions = (0..)
        .zip(sessions)
        .map(|(n, (handshake, sent))| {
            let n = n as u8 + 7;
            let allowed = Dual { v4: format!("10.1.{n}.0/24").parse().ok(), v6: None };
            let put = Some(([192, 0, 2, n], 51820).into());
            Session {
                key: PublicKey([n; 32]),
                allowed,
                psk: None,
                put,
                endpoint: put,
                handshake,
                received: 1,
                sent,
            }
        })
        .collect();
    let tunnel = Tunnel { key: PublicKey([1; 32]), port: 51820, sessions };
    Tunnels(vec![("flannel-wg".parse().unwrap(), tunnel)])
}

/// A network on fakes, with three peers and this status.
pub(crate) async fn network(mut status: Status) -> (FakeSubnets, Running) {
    let subnets = FakeSubnets::new("10.1.0.0/16");
    let attrs = flannel_core::lease::LeaseAttrs::from(
        flannel_core::lease::Offer::new(["192.0.2.1".parse().unwrap()].into_iter().collect())
            .with_kind("vxlan"),
    );
    let lease = subnets.acquire_lease(&attrs).await.unwrap();
    for n in [7, 8, 9] {
        subnets.put(&format!("10.1.{n}.0-24"), &format!("192.0.2.{n}"));
    }
    let views = subnets.watch_leases().await.unwrap();
    status.leases = views.borrow().leases.clone();
    let status = watch::channel(Arc::new(status)).1;
    let config = subnets.network_config().await.unwrap();
    let running = Running {
        datapath: flannel_backends::all().datapath(&config),
        links: Vec::new(),
        config,
        iface: ExternalInterface::new(
            "eth0".parse().unwrap(),
            1500,
            Dual { v4: Some("192.0.2.1".parse().unwrap()), v6: None },
        )
        .with_reason("it has the default route"),
        kernel: Arc::new(FakeKernel::with_uplink("eth0")),
        encrypted: None,
        record_keepers: Vec::new(),
        handle: NetworkHandle::new(lease, 1450, status),
        views,
        firewall_rules: watch::channel(FirewallRules::Unwanted).1,
        masquerade: FirewallConfig::default(),
        excluded: watch::channel(Vec::new()).1,
        paths: None,
        lapsed: false,
        since: SystemTime::now(),
    };
    (subnets, running)
}

#[tokio::test]
async fn a_network_is_known_while_it_runs() {
    let observer = Observer::default();
    assert!(observer.snapshot().network.is_none());
    let waits = Some(Trouble::new("a config", Remedy::SetConfig));
    observer.note(|facts| facts.waits_for = waits.clone());
    assert_eq!(observer.snapshot().facts.waits_for, waits);
    let (subnets, running) = network(Status::default()).await;
    let views = running.views.clone();
    let guard = observer.running(running);
    let snapshot = observer.snapshot();
    assert_eq!((snapshot.facts.networks, snapshot.facts.waits_for), (1, None));
    assert_eq!(snapshot.network.unwrap().view.leases.len(), 4);
    let change = async {
        subnets.put("10.1.7.0-24", "192.0.2.77");
        while observer.snapshot().changed.is_empty() {
            tokio::task::yield_now().await;
        }
    };
    tokio::select! {
        biased;
        never = observer.follow(views) => match never {},
        () = change => (),
    }
    let changed: Vec<String> =
        observer.snapshot().changed.keys().map(ToString::to_string).collect();
    assert_eq!(changed, ["10.1.7.0-24"]);
    drop(guard);
    assert!(observer.snapshot().network.is_none());
}

#[tokio::test]
async fn counters_go_on_after_a_rebuild() {
    use flannel_core::object::ObjectKind;
    use flannel_core::status::Damage;

    let observer = Observer::default();
    let what = (ObjectKind::Route, Damage::Deletion);
    let mut firewall = flannel_firewall::Status::default();
    firewall.repairs = 3;
    let (_firewall, firewall) = watch::channel(firewall);
    for networks in 1..=3 {
        let mut status = Status::default();
        status.applied = 5;
        status.refused = 4;
        status.repaired = 2;
        status.repairs.insert(what, 2);
        status.latency.record(Duration::from_millis(1));
        let (_subnets, mut running) = network(status).await;
        running.firewall_rules = watch::channel(FirewallRules::Kept(firewall.clone())).1;
        let guard = observer.running(running);
        let counted = || {
            let Counters { applied, refused, repaired, repairs, latency, firewall_repairs, .. } =
                observer.snapshot().counters;
            [applied, refused, repaired, repairs[&what], latency.count(), firewall_repairs]
        };
        let expected = [5, 4, 2, 2, 1, 3].map(|one| one * networks);
        assert_eq!(counted(), expected);
        drop(guard);
        assert_eq!(counted(), expected, "between two networks");
    }
}

/// Peers without a tunnel or a handshake ask at the public address, even behind NAT or as a
/// second address of the interface.
#[tokio::test]
async fn probes_are_answered_on_the_public_address_too() {
    let (subnets, mut running) = network(Status::default()).await;
    subnets.put("10.1.3.0-24", "127.0.0.1");
    running.iface.name = "lo".parse().unwrap();
    // Addresses of this process only, and ports outside the system's range.
    let [.., high, low] = std::process::id().to_be_bytes();
    let [one, other] = [77, 78].map(|n| std::net::Ipv4Addr::new(127, n, high, low));
    for (backend, own, public, port) in [
        (r#"{"Type":"vxlan","DirectRouting":true}"#, one, other, 31_417),
        (r#"{"Type":"vxlan","DirectRouting":true}"#, one, one, 31_418),
        (r#"{"Type":"wireguard"}"#, one, other, 31_419),
    ] {
        let config = format!(r#"{{"Network":"10.1.0.0/16","Backend":{backend}}}"#);
        running.config = Config::parse(&config).unwrap();
        running.datapath = flannel_backends::all().datapath(&running.config);
        running.iface.address.v4 = Some(own.into());
        running.iface.public.v4 = Some(public.into());
        let peer = async {
            for address in [own, public] {
                let mut tries = 0;
                while tokio::net::TcpStream::connect((address, port)).await.is_err() {
                    tries += 1;
                    assert!(tries < 500, "nothing listens on {address}");
                    tokio::time::sleep(Duration::from_millis(10)).await;
                }
            }
        };
        tokio::select! {
            never = server::serve(running.probe_server(port)) => match never {},
            () = peer => {}
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_busy_network_does_not_delay_a_status() {
    let (subnets, mut running) = network(Status::default()).await;
    let host = Host::new(running.iface.clone(), Arc::clone(&running.kernel), Arc::new(subnets));
    // A network that does not run accepts requests and answers none.
    let busy = host
        .join(
            &**flannel_backends::all().find("host-gw").unwrap(),
            &running.config,
            JoinOptions::default(),
        )
        .await
        .unwrap();
    running.handle = busy.network.handle();
    let views = running.views.clone();
    let observer = Observer::default();
    let _guard = observer.running(running);
    let start = tokio::time::Instant::now();
    let network = observer.snapshot_of_peers().await.network.unwrap();
    assert!(network.waiting.is_none() && !network.status.settled);
    assert!(start.elapsed() <= Duration::from_millis(200), "{:?}", start.elapsed());
    // A status waits for the end of a round.
    let round = async {
        tokio::time::sleep(Duration::from_millis(110)).await;
        busy.network.run(views).await
    };
    let network = tokio::select! {
        ended = round => panic!("{ended:?}"),
        snapshot = observer.snapshot_of_peers() => snapshot.network.unwrap(),
    };
    assert!(network.waiting.is_some());
}

#[tokio::test(start_paused = true)]
async fn observers_are_notified_once_for_each_change() {
    let observer = Observer::default();
    let mut changes = observer.changes();
    let (_subnets, mut running) = network(Status::default()).await;
    let (sender, status) = watch::channel(Arc::new(Status::default()));
    running.handle.status = status;
    sender.send_replace(Arc::default());
    let _guard = observer.running(running);
    let quiet = Duration::from_secs(3600);
    for _ in 0..2 {
        let mut woken = 0;
        while tokio::time::timeout(quiet, changes.next()).await.is_ok() {
            woken += 1;
            assert!(woken <= 2, "one for the phase, and one for the unseen status");
        }
        assert!(woken >= 1);
        sender.send_replace(Arc::default());
    }
}
