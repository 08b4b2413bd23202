//! Probes over a real tunnel between two network namespaces.

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use flannel_api::{Deployment, PathReport, PathState};
use flannel_backend_vxlan::VxlanBackend;
use flannel_core::address::{Dual, Family};
use flannel_core::lease::{LeaseAttrs, LeaseSet, Offer, Revision};
use flannel_core::network::NetworkHandle;
use flannel_core::status::Status;
use flannel_core::{Backend, Config, Lease};
use flannel_doctor::Network;
use flannel_doctor::paths::{Paths, ProbeSettings, probe};
use flannel_netlink::testing::{Netns, bridge, in_netns_async, ip, run};
use test_support::eventually_async;
use test_support::forge::{Flood, RawIcmp};
use tokio::sync::watch;
use tokio::task::spawn_blocking;

const MACS: [&str; 2] = ["0a:00:00:00:00:01", "0a:00:00:00:00:02"];

/// Makes the host with this number: an uplink `eth0` and a tunnel to the other one.
fn host(n: usize) {
    let own = n + 1;
    let other = 2 - n;
    for args in [
        "link set lo up".to_owned(),
        format!("addr add 192.0.2.{own}/24 dev eth0"),
        format!("addr add 2001:db8::{own}/64 dev eth0 nodad"),
        "link set eth0 up".to_owned(),
        format!("link add flannel.1 address {} type vxlan id 1 dstport 8472 nolearning", MACS[n]),
        format!("addr add 10.1.{own}.0/32 dev flannel.1"),
        "link set flannel.1 mtu 1450 up".to_owned(),
        format!(
            "link add flannel-v6.1 address {} type vxlan id 1 dstport 8473 nolearning \
            udp6zerocsumrx local 2001:db8::{own}",
            MACS[n]
        ),
        format!("addr add fd00:1:0:{own}::/128 dev flannel-v6.1 nodad"),
        "link set flannel-v6.1 mtu 1430 up".to_owned(),
        format!("neigh add 10.1.{other}.0 lladdr {} dev flannel.1", MACS[1 - n]),
        format!("route add 10.1.{other}.0/24 via 10.1.{other}.0 dev flannel.1 onlink"),
        format!("neigh add fd00:1:0:{other}:: lladdr {} dev flannel-v6.1", MACS[1 - n]),
        format!("route add fd00:1:0:{other}::/64 dev flannel-v6.1"),
    ] {
        ip(&args);
    }
    bridge(&format!("fdb add {} dev flannel.1 dst 192.0.2.{other}", MACS[1 - n]));
    bridge(&format!("fdb add {} dev flannel-v6.1 dst 2001:db8::{other}", MACS[1 - n]));
}

fn lease(n: u8) -> Lease {
    let public: Dual<IpAddr> = [format!("192.0.2.{n}"), format!("2001:db8::{n}")]
        .map(|a| a.parse().unwrap())
        .into_iter()
        .collect();
    Lease {
        subnets: format!("10.1.{n}.0-24&fd00:1:0:{n}::-64").parse().unwrap(),
        attrs: LeaseAttrs::from(Offer::new(public).with_kind("vxlan")),
        expires: None,
        since: Revision(1),
        revision: Revision(1),
    }
}

fn settings() -> ProbeSettings {
    let config = r#"{"Network":"10.1.0.0/16","EnableIPv6":true,"IPv6Network":"fd00:1::/48",
        "Backend":{"Type":"vxlan"}}"#;
    let network = Network {
        daemon: true,
        known: true,
        backend: "vxlan".into(),
        datapath: VxlanBackend.datapath(&Config::parse(config).unwrap()).unwrap(),
        uplink: Some("eth0".parse().unwrap()),
        mtu: Some(1430),
        ..Network::default()
    };
    ProbeSettings { interval: Duration::from_secs(300), doctor_port: 0, network }
}

/// Drops tunnel packets of more than 1400 bytes on the wire, until the table `netdev t` is deleted.
fn narrow() {
    run("nft", "add table netdev t");
    run("nft", "add chain netdev t c { type filter hook ingress device eth0 priority 0; }");
    run("nft", "add rule netdev t c meta length > 1400 drop");
}

/// The time in which a path gets a state.
const PATIENCE: Duration = Duration::from_secs(60);

/// Waits until the path of a peer in a family has a state, and returns it.
async fn until(paths: &Paths, key: &str, family: &str, state: PathState) -> PathReport {
    let of_peer = |path: &PathReport| path.key.starts_with(key) && path.family == family;
    eventually_async(
        PATIENCE,
        async || {
            paths
                .report(Deployment::Systemd)
                .into_iter()
                .find(|path| of_peer(path) && path.state == state)
        },
        || format!("{key} {family} is not {state}: {:#?}", paths.report(Deployment::Systemd)),
    )
    .await
}

#[test]
fn faults_of_a_real_tunnel_are_told_apart_and_pass() {
    in_netns_async(async || {
        let far = Netns::new().unwrap();
        let file = far.path();
        ip(&format!("link add eth0 type veth peer name eth0 netns {}", file.display()));
        host(0);
        far.run(|| host(1));
        let mut status = Status::default();
        // The third one does not exist.
        status.leases = LeaseSet::from_iter([lease(1), lease(2), lease(9)]);
        let (network, receiver) = watch::channel(Arc::new(status));
        let handle = NetworkHandle::new(lease(1), 1430, receiver);
        let settings = settings();
        let paths = Paths::new(Duration::from_secs(300));
        let checks = async {
            for family in ["IPv4", "IPv6"] {
                let works = until(&paths, "10.1.2.0", family, PathState::Ok).await;
                assert!(works.round_trip.is_some() && works.since.is_none(), "{works:?}");
            }
            assert_eq!(paths.report(Deployment::Systemd).len(), 4, "two peers, two families");
            far.run(|| {
                run("nft", "add table inet t");
                run("nft", "add chain inet t c { type filter hook input priority 0; }");
                run("nft", "add rule inet t c udp dport 8472-8473 drop");
            });
            for family in ["IPv4", "IPv6"] {
                let blocked = until(&paths, "10.1.2.0", family, PathState::TunnelBlocked).await;
                assert!(blocked.since.is_some(), "{blocked:?}");
            }
            far.run(|| run("nft", "delete table inet t"));
            for family in ["IPv4", "IPv6"] {
                until(&paths, "10.1.2.0", family, PathState::Ok).await;
            }
            far.run(narrow);
            until(&paths, "10.1.2.0", "IPv4", PathState::FullSizeLost).await;
            until(&paths, "10.1.2.0", "IPv6", PathState::FullSizeLost).await;
            // The examination finds the size: 1400 bytes without the header of the tunnel.
            let passes = async || {
                paths
                    .report(Deployment::Systemd)
                    .into_iter()
                    .find_map(|path| path.passes.filter(|_| path.family == "IPv4"))
            };
            let otherwise = || format!("no size: {:#?}", paths.report(Deployment::Systemd));
            assert_eq!(eventually_async(PATIENCE, passes, otherwise).await, 1350);
            far.run(|| run("nft", "delete table netdev t"));
            until(&paths, "10.1.2.0", "IPv4", PathState::Ok).await;
            // No node answers any more.
            far.run(|| ip("link set eth0 down"));
            until(&paths, "10.1.2.0", "IPv4", PathState::UnderlayDown).await;
            let summary = paths.summary();
            assert_eq!(
                (summary.failing, summary.states[&PathState::Unknown]),
                (2, 2),
                "{summary:?}"
            );
            // A peer that is gone has no path.
            network.send_modify(|status| {
                Arc::make_mut(status).leases = LeaseSet::from_iter([lease(1)]);
            });
            eventually_async(
                PATIENCE,
                async || paths.report(Deployment::Systemd).is_empty(),
                || format!("{:#?}", paths.report(Deployment::Systemd)),
            )
            .await;
        };
        tokio::select! {
            never = probe(&settings, handle, &paths) => match never {},
            () = checks => {}
        }
    });
}

/// The MTU of a route does not limit probes, so that the end of the loss is noticed.
#[test]
fn a_path_has_an_mtu_until_full_size_passes() {
    in_netns_async(async || {
        let far = Netns::new().unwrap();
        let file = far.path();
        ip(&format!("link add eth0 type veth peer name eth0 netns {}", file.display()));
        host(0);
        far.run(|| {
            host(1);
            narrow();
        });
        let mut status = Status::default();
        status.leases = LeaseSet::from_iter([lease(1), lease(2)]);
        let (_network, receiver) = watch::channel(Arc::new(status));
        let handle = NetworkHandle::new(lease(1), 1430, receiver);
        let settings = settings();
        let paths = Paths::new(Duration::from_secs(300));
        let mut mtus = paths.mtus();
        let checks = async {
            for (family, route, mtu) in [
                ("IPv4", "10.1.2.0/24 via 10.1.2.0 dev flannel.1 onlink", 1350),
                ("IPv6", "fd00:1:0:2::/64 dev flannel-v6.1", 1330),
            ] {
                let path = until(&paths, "10.1.2.0", family, PathState::MtuLowered).await;
                // A late echo can make the result a bit too small.
                let found = path.mtu.filter(|found| (mtu - 50..=mtu).contains(found)).unwrap();
                assert_eq!(path.repair, None);
                ip(&format!("route replace {route} mtu {found}"));
            }
            mtus.wait_for(|mtus| mtus.len() == 2).await.unwrap();
            assert_eq!(paths.summary().failing, 0);
            far.run(|| run("nft", "delete table netdev t"));
            for family in ["IPv4", "IPv6"] {
                until(&paths, "10.1.2.0", family, PathState::Ok).await;
            }
            mtus.wait_for(|mtus| mtus.is_empty()).await.unwrap();
        };
        tokio::select! {
            never = probe(&settings, handle, &paths) => match never {},
            () = checks => {}
        }
    });
}

/// A pod on host 0, whose packets reach the host with any source address.
fn pod(netns: &Netns) {
    for kind in ["all", "default"] {
        std::fs::write(format!("/proc/sys/net/ipv4/conf/{kind}/rp_filter"), "0").unwrap();
    }
    ip(&format!("link add pod0 type veth peer name eth0 netns {}", netns.path().display()));
    ip("addr add 10.1.1.1/24 dev pod0");
    ip("addr add fd00:1:0:1::1/64 dev pod0 nodad");
    ip("link set pod0 up");
    netns.run(|| {
        ip("addr add 10.1.1.9/24 dev eth0");
        ip("addr add fd00:1:0:1::9/64 dev eth0 nodad");
        ip("link set eth0 up");
        ip("route add default via 10.1.1.1");
        ip("route add default via fd00:1:0:1::1");
    });
}

/// Answers to all echoes of host 0 to the tunnel address of host 1, from a pod.
fn flood(family: Family, earlier: Vec<u8>) -> Flood {
    let [attacker, node, source, peer] = match family {
        Family::V4 => ["10.1.1.9", "10.1.1.1", "10.1.1.0", "10.1.2.0"],
        Family::V6 => ["fd00:1:0:1::9", "fd00:1:0:1::1", "fd00:1:0:1::", "fd00:1:0:2::"],
    }
    .map(|address| address.parse().unwrap());
    Flood { attacker, node, source, peer, earlier }
}

/// Ends floods when it is dropped.
#[derive(Default)]
struct Over(Arc<AtomicBool>);

impl Drop for Over {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// An echo that arrives at the other host, in each family.
async fn seen_there(far: &Arc<Netns>) -> Vec<(Family, Vec<u8>)> {
    let mut seen = Vec::new();
    for family in Family::BOTH {
        let far = Arc::clone(far);
        let echo = spawn_blocking(move || {
            far.run(move || RawIcmp::open(family == Family::V6).next_echo(PATIENCE))
        })
        .await
        .unwrap();
        seen.push((family, echo.unwrap().icmp));
    }
    seen
}

#[test]
fn a_pod_that_forges_answers_changes_no_path() {
    in_netns_async(async || {
        let far = Arc::new(Netns::new().unwrap());
        let pods = Arc::new(Netns::new().unwrap());
        let file = far.path();
        ip(&format!("link add eth0 type veth peer name eth0 netns {}", file.display()));
        host(0);
        far.run(|| host(1));
        pod(&pods);
        let mut status = Status::default();
        status.leases = LeaseSet::from_iter([lease(1), lease(2)]);
        let (_network, receiver) = watch::channel(Arc::new(status));
        let handle = NetworkHandle::new(lease(1), 1430, receiver);
        let settings = settings();
        let paths = Paths::new(Duration::from_secs(300));
        let mut mtus = paths.mtus();
        let over = Over::default();
        let both = async |state| {
            for family in ["IPv4", "IPv6"] {
                until(&paths, "10.1.2.0", family, state).await;
            }
        };
        let checks = async {
            for (family, echo) in seen_there(&far).await {
                let pods = Arc::clone(&pods);
                let over = Arc::clone(&over.0);
                let flood = flood(family, echo);
                spawn_blocking(move || pods.run(|| flood.run(1290, &over)));
            }
            both(PathState::Ok).await;
            far.run(|| {
                run("nft", "add table inet t");
                run("nft", "add chain inet t c { type filter hook input priority 0; }");
                run("nft", "add rule inet t c udp dport 8472-8473 drop");
            });
            both(PathState::TunnelBlocked).await;
            // They stay blocked over further probes.
            let of = || {
                paths.report(Deployment::Systemd).into_iter().map(|path| (path.state, path.probed))
            };
            let (_, before) = of().unzip::<_, _, Vec<_>, Vec<_>>();
            eventually_async(
                PATIENCE,
                async || of().zip(&before).all(|((_, at), before)| at > *before),
                || format!("{:#?}", paths.report(Deployment::Systemd)),
            )
            .await;
            assert!(
                of().all(|(state, _)| state == PathState::TunnelBlocked),
                "{:#?}",
                paths.report(Deployment::Systemd)
            );
            far.run(|| run("nft", "delete table inet t"));
            both(PathState::Ok).await;
            // Packets of full size are lost. The forged reports name a smaller size than the path
            // takes. A late echo can make the result a bit too small.
            far.run(narrow);
            both(PathState::MtuLowered).await;
            for path in paths.report(Deployment::Systemd) {
                let takes = if path.family == "IPv4" { 1350 } else { 1330 };
                let mtu = path.mtu.unwrap();
                assert!((takes - 35..=takes).contains(&mtu), "{path:?}");
            }
            far.run(|| run("nft", "delete table netdev t"));
            both(PathState::Ok).await;
            mtus.wait_for(|mtus| mtus.is_empty()).await.unwrap();
        };
        tokio::select! {
            never = probe(&settings, handle, &paths) => match never {},
            () = checks => {}
        }
    });
}

/// Without a tunnel, and without a route to the node, no echo leaves this host.
#[test]
fn a_path_whose_echoes_cannot_be_sent_is_probed_again() {
    in_netns_async(async || {
        let far = Netns::new().unwrap();
        let file = far.path();
        ip(&format!("link add eth0 type veth peer name eth0 netns {}", file.display()));
        let set_up = |n: u8| {
            ip(&format!("addr add 192.0.2.{n}/24 dev eth0"));
            ip("link set eth0 up");
        };
        set_up(1);
        far.run(|| {
            set_up(2);
            ip("addr add 198.51.100.2/32 dev eth0");
        });
        let mut peer = lease(2);
        peer.subnets = "10.1.2.0-24".parse().unwrap();
        peer.attrs.preferred.kind = "host-gw".into();
        peer.attrs.preferred.public = Dual { v4: Some("198.51.100.2".parse().unwrap()), v6: None };
        let mut status = Status::default();
        status.leases = LeaseSet::from_iter([peer]);
        let (_network, receiver) = watch::channel(Arc::new(status));
        let handle = NetworkHandle::new(lease(1), 1500, receiver);
        let network = Network {
            daemon: true,
            known: true,
            backend: "host-gw".into(),
            uplink: Some("eth0".parse().unwrap()),
            mtu: Some(1500),
            ..Network::default()
        };
        let interval = Duration::from_secs(300);
        let settings = ProbeSettings { interval, doctor_port: 0, network };
        let paths = Paths::new(interval);
        let checks = async {
            for _ in 0..2 {
                ip("route add 198.51.100.2 via 192.0.2.2");
                until(&paths, "10.1.2.0", "IPv4", PathState::Ok).await;
                ip("route del 198.51.100.2");
                until(&paths, "10.1.2.0", "IPv4", PathState::UnderlayDown).await;
            }
        };
        tokio::select! {
            never = probe(&settings, handle, &paths) => match never {},
            () = checks => {}
        }
    });
}
