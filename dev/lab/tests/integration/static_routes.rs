//! The lab reports reachability correctly, without any flanneld. Routes are static.

use std::time::{Duration, Instant};

use flannel_core::Subnet;
use flannel_core::address::{Dual, Family};
use flannel_lab::{Host, Interrupter, Lab, Namespace, Pair, SubnetEnv, Unreached};

use flannel_lab::testing::as_root;

const PATIENCE: Duration = Duration::from_secs(20);
const SHORT: Duration = Duration::from_millis(300);

fn subnets(host: &Host, families: &[Family]) -> Dual<Subnet> {
    let n = host.number();
    let text = |family: &Family| match family {
        Family::V4 => format!("10.244.{n}.0/24"),
        Family::V6 => format!("fd00:10:244:{n}::/64"),
    };
    families.iter().map(|family| text(family).parse::<Subnet>().unwrap()).collect()
}

/// A lab with static routes and pods, as host-gw would make it.
fn routed(hosts: usize, families: &[Family], pod_mtu: u32) -> Lab {
    let lab = Lab::builder()
        .hosts(hosts)
        .families(families.iter().copied())
        .backend("host-gw")
        .start()
        .unwrap();
    for host in lab.hosts() {
        let mut routes = String::new();
        for peer in lab.hosts().iter().filter(|peer| peer.number() != host.number()) {
            for (family, subnet) in subnets(peer, families).iter() {
                routes +=
                    &format!("route add {subnet} via {}\n", peer.addresses()[family].unwrap());
            }
        }
        host.namespace().ip(&routes).unwrap();
        host.add_pod(&SubnetEnv::new(subnets(host, families), pod_mtu)).unwrap();
    }
    lab
}

/// Probes repeatedly, each time for longer, until every pair is as expected, because a slow machine
/// answers late.
fn until_each(lab: &Lab, mut patience: Duration, as_expected: impl Fn(&Pair) -> bool) {
    loop {
        let matrix = lab.matrix(patience).unwrap();
        if matrix.pairs.iter().all(&as_expected) {
            return;
        }
        assert!(patience < PATIENCE, "{matrix:#?}");
        patience *= 2;
    }
}

#[test]
fn pods_reach_each_other_over_static_routes() {
    as_root(|| {
        let lab = routed(3, &Family::BOTH, 1500);
        let matrix = lab.wait_until_reachable(PATIENCE).unwrap();
        assert!(matrix.is_complete(), "{:#?}", matrix.failures().collect::<Vec<_>>());
        assert_eq!(matrix.pairs.len(), 12);
        for pair in &matrix.pairs {
            assert!(pair.rtt.is_some_and(|rtt| rtt < Duration::from_secs(5)), "{pair:?}");
            let headers = if pair.family == Family::V4 { 20 } else { 40 };
            // 64 KiB, and a segment that fills the MTU with headers and timestamps.
            assert_eq!(pair.tcp_bytes, 65_536 + 1500 - headers - 20 - 12, "{pair:?}");
        }
        assert!(matrix.time_to_complete().unwrap() < PATIENCE);
    });
}

#[test]
fn each_family_is_probed_alone() {
    as_root(|| {
        for family in Family::BOTH {
            let matrix = routed(2, &[family], 1500).matrix(PATIENCE).unwrap();
            assert!(matrix.is_complete(), "{matrix:#?}");
            assert!(
                matrix.pairs.iter().all(|pair| pair.family == family) && matrix.pairs.len() == 2
            );
        }
    });
}

/// The hosts' links take less than the MTU of pods, and the hosts know it. TCP works because of
/// path MTU discovery, and the wrong MTU must be found nevertheless.
#[test]
fn a_wrong_mtu_is_detected_if_the_hosts_report_it() {
    as_root(|| {
        let lab = routed(2, &Family::BOTH, 1500);
        for host in lab.hosts() {
            host.run("ip", &["link", "set", "eth0", "mtu", "1400"]).unwrap();
        }
        let start = Instant::now();
        let matrix = lab.matrix(PATIENCE).unwrap();
        assert!(start.elapsed() < PATIENCE, "a wrong MTU does not repair itself: no need to wait");
        for pair in &matrix.pairs {
            assert_eq!(pair.error, Some(Unreached::PathMtu { mtu: 1500, path: 1400 }), "{pair:?}");
        }
        assert_eq!((matrix.pairs.len(), matrix.complete), (4, None));
    });
}

/// The path drops big packets silently, as some tunnels do.
#[test]
fn a_wrong_mtu_is_detected_if_no_host_reports_it() {
    as_root(|| {
        let lab = routed(2, &Family::BOTH, 1500);
        lab.switch()
            .namespace()
            .ip("link set port-1 mtu 1400\nlink set port-2 mtu 1400\n")
            .unwrap();
        until_each(&lab, SHORT, |pair| pair.error == Some(Unreached::FullSizeLost { size: 1500 }));
    });
}

#[test]
fn a_cut_link_and_its_repair_are_detected() {
    as_root(|| {
        let lab = routed(3, &Family::BOTH, 1500);
        let third = &lab.hosts()[2];
        let touches = |pair: &Pair| pair.from == "pod-3" || pair.to == "pod-3";
        for (cut, repair) in [
            (
                flannel_lab::Switch::cut as fn(&_, &_) -> _,
                flannel_lab::Switch::reconnect as fn(&_, &_) -> _,
            ),
            (flannel_lab::Switch::drop_frames, flannel_lab::Switch::pass_frames),
        ] {
            assert!(lab.matrix(PATIENCE).unwrap().is_complete());
            cut(lab.switch(), third).unwrap();
            until_each(&lab, SHORT, |pair| {
                let expected = touches(pair).then_some(Unreached::NoReply);
                pair.error == expected && pair.rtt.is_none() == touches(pair)
            });
            repair(lab.switch(), third).unwrap();
            assert!(lab.matrix(PATIENCE).unwrap().is_complete());
        }
    });
}

#[test]
fn a_pod_without_tcp_is_detected() {
    as_root(|| {
        let lab = routed(2, &[Family::V4], 1500);
        // Pings pass. The answers of the echo service are lost, or connections are refused.
        let pod = lab.hosts()[1].pod().unwrap();
        pod.namespace().ip("rule add ipproto tcp sport 7 blackhole\n").unwrap();
        until_each(&lab, Duration::from_secs(3), |pair| {
            pair.error == (pair.from == "pod-1").then_some(Unreached::TcpStalled { bytes: 0 })
        });
        pod.namespace().ip("rule del ipproto tcp sport 7 blackhole\n").unwrap();
        lab.hosts()[1].namespace().ip("rule add ipproto tcp dport 7 prohibit\n").unwrap();
        until_each(&lab, SHORT, |pair| {
            pair.from != "pod-1" || matches!(pair.error, Some(Unreached::Tcp(_)))
        });
    });
}

/// More hosts than the kernel's limit of neighbour entries allows.
#[test]
fn forty_hosts_reach_each_other() {
    as_root(|| {
        let matrix = routed(40, &[Family::V4], 1500).matrix(Duration::from_secs(60)).unwrap();
        assert!(matrix.is_complete(), "{:#?}", matrix.failures().take(5).collect::<Vec<_>>());
        assert_eq!(matrix.pairs.len(), 40 * 39);
    });
}

#[test]
fn hosts_run_programs_and_replace_their_pods() {
    as_root(|| {
        let lab = routed(2, &Family::BOTH, 1450);
        let [first, second] = lab.hosts() else { panic!("{:?}", lab.hosts()) };
        assert!(
            first.run("ip", &["addr", "show", "dev", "eth0"]).unwrap().contains("192.168.77.1/24")
        );
        let error = first.run("ip", &["link", "show", "nothing"]).unwrap_err().to_string();
        assert!(
            error.contains("host-1: `ip link show nothing` failed")
                && error.contains("does not exist"),
            "{error}"
        );
        let error =
            first.namespace().ip("link show lo\nlink set nothing up\n").unwrap_err().to_string();
        assert!(error.contains("`ip link set nothing up` failed: Cannot find device"), "{error}");
        assert!(
            first.run("ip", &["route", "get", "8.8.8.8"]).unwrap().contains("via 192.168.77.254")
        );
        // A new pod is made from another subnet.env.
        second.remove_pod().unwrap();
        assert_eq!(lab.matrix(SHORT).unwrap().pairs.len(), 0);
        assert!(first.add_pod(&SubnetEnv::new(subnets(first, &[Family::V4]), 1450)).is_err());
        second.add_pod(&SubnetEnv::new(subnets(second, &[Family::V4]), 1400)).unwrap();
        let matrix = lab.matrix(PATIENCE).unwrap();
        assert!(matrix.is_complete() && matrix.pairs.len() == 2, "{matrix:#?}");
        assert_eq!(second.pod().unwrap().mtu(), 1400);
        assert_eq!(first.log().unwrap(), "");
        assert!(first.subnet_env().unwrap().is_none() && first.daemon_rss().is_none());
    });
}

/// A namespace that another program connected is a pod. The lab does not remove its links.
#[test]
fn a_namespace_of_another_program_is_adopted_as_a_pod() {
    as_root(|| {
        let lab = routed(2, &[Family::V4], 1500);
        let host = &lab.hosts()[0];
        host.remove_pod().unwrap();
        let pod = Namespace::new("a pod").unwrap();
        let path = pod.path();
        let wire = format!("link add theirs type veth peer name eth0 netns {}\n", path.display());
        host.namespace()
            .ip(&(wire + "link set theirs up\naddr add 10.244.1.1/24 dev theirs\n"))
            .unwrap();
        pod.ip(
            "link set eth0 up\naddr add 10.244.1.2/24 dev eth0\nroute add default via 10.244.1.1\n",
        )
        .unwrap();
        let addresses = Dual { v4: Some("10.244.1.2".parse().unwrap()), v6: None };
        host.adopt_pod(pod.clone(), addresses, 1500).unwrap();
        let matrix = lab.matrix(PATIENCE).unwrap();
        assert!(matrix.is_complete() && matrix.pairs.len() == 2, "{matrix:#?}");
        assert!(host.adopt_pod(pod.clone(), addresses, 1500).is_err(), "it has a pod already");
        host.remove_pod().unwrap();
        assert!(host.pod().is_none());
        host.namespace().ip("link show theirs\n").unwrap();
        // The kernel removes both ends of the link when nobody holds the namespace any more.
        drop(pod);
    });
}

#[test]
fn an_interrupt_ends_every_wait_and_leaves_nothing_behind() {
    as_root(|| {
        let interrupter = Interrupter::default();
        let lab = Lab::builder().hosts(2).interrupter(interrupter.clone()).start().unwrap();
        let dir = lab.dir().to_owned();
        let namespace = lab.hosts()[0].namespace().path();
        assert!(dir.join("registry/config").exists() && namespace.exists());
        let start = Instant::now();
        let signal = std::thread::spawn(move || interrupter.interrupt());
        // No daemon writes a subnet.env.
        let error = lab.wait_until_reachable(Duration::from_secs(60)).unwrap_err();
        assert!(matches!(error, flannel_lab::Error::Interrupted), "{error}");
        assert!(start.elapsed() < Duration::from_secs(30));
        signal.join().unwrap();
        drop(lab);
        assert!(!dir.exists());
    });
}
