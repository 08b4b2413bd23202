//! Faults of an encrypted tunnel between two network namespaces, and what the doctor says.

use std::fs;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use flannel_api::PeerState;
use flannel_core::SubnetManager;
use flannel_core::address::{Dual, Family};
use flannel_core::backend::{Datapath, Transport};
use flannel_core::object::LinkName;
use flannel_core::status::Status;
use flannel_core::testing::FakeSubnets;
use flannel_doctor::finding::Check;
use flannel_doctor::inputs::network::Target;
use flannel_doctor::path_probe::server::{ServerConfig, serve};
use flannel_doctor::{Finding, Network, examine_path};
use flannel_netlink::testing::{Netns, in_netns, ip, run};
use test_support::guest::in_qemu;
use tokio::sync::{oneshot, watch};

/// Private keys of the ends, a further one, and their public keys.
const KEYS: [(&str, &str); 3] = [
    (
        "ERERERERERERERERERERERERERERERERERERERERERE=",
        "e06Qm75//kTEZaIgA31gjuNYl9Me+XLwf3SJLLD3PxM=",
    ),
    (
        "IiIiIiIiIiIiIiIiIiIiIiIiIiIiIiIiIiIiIiIiIiI=",
        "D6poTtKIZ7l/Smot7l34zpdOdrcBjj8iocTPJnhXDyA=",
    ),
    (
        "MzMzMzMzMzMzMzMzMzMzMzMzMzMzMzMzMzMzMzMzMzM=",
        "ew1H2TQn+DERYHgcfHM/2J+IlwrvSQ2KoO4ZpMuKGxQ=",
    ),
];
const PORT: u16 = 8473;

fn name() -> LinkName {
    "flannel-wg".parse().unwrap()
}

fn wg(args: &str) {
    run("wg", &format!("set flannel-wg {args}"));
}

/// Adds the other end to the end `n`, without a memory of earlier handshakes.
fn peer(n: usize) {
    let other = 1 - n;
    let key = KEYS[1 - n].1;
    wg(&format!("peer {key} remove"));
    wg(&format!(
        "peer {key} preshared-key /run/psk allowed-ips 10.1.{other}.0/24 endpoint \
         192.0.2.{other}:51820"
    ));
}

/// Makes the end `n`.
fn end(n: usize) {
    for args in [
        format!("addr add 192.0.2.{n}/24 dev up0"),
        "link set up0 up".to_owned(),
        "link add flannel-wg type wireguard".to_owned(),
        format!("addr add 10.1.{n}.0/32 dev flannel-wg"),
        "link set flannel-wg mtu 1420 up".to_owned(),
        "route add 10.1.0.0/16 dev flannel-wg".to_owned(),
    ] {
        ip(&args);
    }
    wg(&format!("private-key /run/key{n} listen-port 51820"));
    peer(n);
}

fn datapath() -> Datapath {
    let mut datapath = Datapath::default();
    datapath.devices.v4 = Some(name());
    datapath.overhead.v4 = Some(60);
    datapath.transports = vec![Transport::Udp(51820)];
    datapath.encrypted = [name()].into();
    datapath
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
}

/// Serves the far end until the sender is dropped.
fn serve_far(end: oneshot::Receiver<()>) {
    runtime().block_on(async {
        let subnets = FakeSubnets::new("10.1.0.0/16");
        subnets.put("10.1.0.0-24", "192.0.2.0");
        let (_status, status) = watch::channel(Arc::new(Status::default()));
        let config = ServerConfig {
            port: PORT,
            tunnels: Dual { v4: Some((name(), "10.1.1.0".parse().unwrap())), v6: None },
            bare: Dual { v4: "up0".parse().ok().zip("192.0.2.1".parse().ok()), v6: None },
            public: Dual::default(),
            mtu: 1420,
            views: subnets.watch_leases().await.unwrap(),
            status,
        };
        tokio::select! {
            never = serve(config) => match never {},
            _ = end => {}
        }
    });
}

/// The finding about the path from the near end to the far one.
fn finding() -> Option<Finding> {
    let network = Network {
        daemon: true,
        known: true,
        backend: "wireguard".into(),
        datapath: datapath(),
        uplink: "up0".parse().ok(),
        mtu: Some(1420),
        ..Network::default()
    };
    let target = Target {
        key: "10.1.1.0-24".into(),
        subnets: vec!["10.1.1.0/24".parse().unwrap()],
        public: ["192.0.2.1".parse().unwrap()].into_iter().collect(),
        backend: "wireguard".into(),
        state: PeerState::InPlace,
        mtus: Dual::default(),
    };
    runtime().block_on(examine_path(&network, &target, Family::V4, PORT)).unwrap().finding
}

/// Asserts that the check finds this, at the latest when the daemon answers in time.
fn assert_finding(check: &Check, text: &str) {
    let is = |found: &Finding| found.check == *check && found.text.contains(text);
    let mut found = Vec::new();
    while !found.iter().flatten().any(is) {
        assert!(found.len() < 4, "{text}: {found:?}");
        found.push(finding());
    }
}

fn passes() -> bool {
    std::panic::catch_unwind(|| run("ping", "-c 1 -W 6 -q 10.1.1.0")).is_ok()
}

/// The modules of the guest of these tests.
const MODULES: [&str; 4] = ["veth", "wireguard", "crc32c_generic", "nf_tables"];

/// Two ends of a tunnel, the near one in the network namespace of the caller.
struct Tunnel {
    far: Netns,
}

impl Tunnel {
    /// Runs `test` with a tunnel that works, and whose far end answers [`finding`].
    fn with(test: fn(&Self)) {
        Self::without_daemon(move |tunnel| {
            std::thread::scope(|threads| {
                let (stop, end) = oneshot::channel();
                threads.spawn(|| tunnel.far.run(|| serve_far(end)));
                assert!(passes());
                assert_eq!(finding(), None);
                test(tunnel);
                drop(stop);
            });
        });
    }

    /// Runs `test` with a tunnel whose far end has an older daemon, or none.
    fn without_daemon(test: impl FnOnce(&Self) + Send + 'static) {
        in_netns(|| {
            for (n, (key, _)) in KEYS.iter().enumerate() {
                fs::write(format!("/run/key{n}"), key).unwrap();
            }
            fs::write("/run/psk", KEYS[0].0).unwrap();
            fs::write("/run/psk2", KEYS[1].0).unwrap();
            let far = Netns::new().unwrap();
            ip(&format!("link add up0 type veth peer name up0 netns {}", far.path().display()));
            end(0);
            far.run(|| end(1));
            test(&Self { far });
        });
    }

    /// Both ends without sessions, and as they should be.
    fn reset(&self) {
        self.far.run(|| {
            wg(&format!("peer {} remove", KEYS[2].1));
            peer(1);
        });
        peer(0);
    }

    /// Configures the far end with `wg set`.
    fn far_wg(&self, args: &str) {
        self.far.run(|| wg(args));
    }
}

/// Drops the packets of the tunnel that arrive.
fn block() {
    run("nft", "add table inet block");
    run("nft", "add chain inet block in { type filter hook input priority 0 ; }");
    run("nft", "add rule inet block in udp dport 51820 drop");
}

fn unblock() {
    run("nft", "delete table inet block");
}

#[test]
fn other_keys_and_a_missing_peer_are_told_apart() {
    in_qemu(&MODULES, || {
        Tunnel::with(|tunnel| {
            tunnel.reset();
            tunnel.far_wg(&format!("peer {} preshared-key /run/psk2", KEYS[0].1));
            assert_finding(&Check::Handshake, "it has another preshared key (PSK, PSKFile)");

            tunnel.reset();
            tunnel.far_wg("private-key /run/key2");
            assert_finding(&Check::Handshake, &format!("has the public key {}", KEYS[2].1));
            tunnel.far_wg("private-key /run/key1");

            tunnel.reset();
            tunnel.far_wg(&format!("peer {} remove", KEYS[0].1));
            assert_finding(&Check::Handshake, "it has no peer for this node");
            tunnel.far_wg(&format!("peer {} allowed-ips 10.1.0.0/24", KEYS[2].1));
            assert_finding(&Check::Handshake, &format!("by the public key {}", KEYS[2].1));
        });
    });
}

#[test]
fn the_direction_of_blocked_packets_is_named() {
    in_qemu(&MODULES, || {
        Tunnel::with(|tunnel| {
            tunnel.reset();
            tunnel.far.run(block);
            let text = "packets to its UDP port 51820 do not arrive, and those from it arrive";
            assert_finding(&Check::Handshake, text);
            block();
            assert_finding(&Check::Handshake, "no packet arrives, at UDP port 51820 there");
            tunnel.far.run(unblock);
            assert_finding(
                &Check::Handshake,
                "packets from there do not arrive at UDP port 51820 of this node",
            );
            unblock();

            tunnel.reset();
            tunnel.far.run(|| ip("link set flannel-wg down"));
            assert_finding(&Check::Handshake, "its UDP port 51820 is closed");
        });
    });
}

/// The far end remembers a handshake of a time that is to come again.
#[test]
fn a_clock_that_was_set_back_is_found() {
    in_qemu(&MODULES, || {
        Tunnel::with(|tunnel| {
            let now = SystemTime::now() - Duration::from_secs(3_600);
            let now = now.duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs();
            run("date", &format!("-s @{now}"));
            peer(0);
            assert!(!passes(), "the kernel ignores such a handshake");
            assert_finding(&Check::Clock, "the clock of this host was set back");
            // The repair of the finding.
            tunnel.far.run(|| peer(1));
            peer(0);
            assert!(passes());
        });
    });
}

#[test]
fn without_an_answer_the_possible_causes_are_named() {
    in_qemu(&MODULES, || {
        Tunnel::without_daemon(|tunnel| {
            tunnel.far_wg(&format!("peer {} preshared-key /run/psk2", KEYS[0].1));
            assert_finding(
                &Check::Handshake,
                "nothing comes from it: UDP port 51820 may be blocked",
            );
            // It begins handshakes, and gets no answer.
            tunnel.reset();
            tunnel.far.run(block);
            std::thread::scope(|threads| {
                threads.spawn(|| {
                    let ping = || std::panic::catch_unwind(|| run("ping", "-c 8 -q 10.1.0.0"));
                    tunnel.far.run(ping)
                });
                assert_finding(
                    &Check::Handshake,
                    "are lost, or the preshared keys (PSK, PSKFile) differ",
                );
            });
        });
    });
}
