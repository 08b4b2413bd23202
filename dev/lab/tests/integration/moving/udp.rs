//! Changes of the code that moves the packets of udp, in a guest whose kernel can do it.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::Duration;

use flannel_lab::{Host, Lab, Pod};
use serde_json::json;
use test_support::eventually;
use test_support::guest::in_qemu;

use super::cluster::{Cluster, Pace};

const MODULES: [&str; 11] = [
    "veth",
    "bridge",
    "fou",
    "ipip",
    "nf_tables",
    "nft_fib_inet",
    "iptable_nat",
    "iptable_filter",
    "xt_MASQUERADE",
    "xt_comment",
    "xt_mark",
];

/// Programs in the guest are slow.
const PACE: Pace = Pace { patience: Duration::from_secs(120), gap: Duration::from_millis(100) };

/// The kind of the device of a host.
fn kind(host: &Host) -> &'static str {
    let shown = host.run("ip", &["-d", "link", "show", "flannel0"]).unwrap_or_default();
    match () {
        () if shown.contains("encap fou") => "kernel",
        () if shown.contains("tun type tun") => "process",
        () => "none",
    }
}

/// The packets that a host has not forwarded because they are larger than the MTU.
fn too_large(host: &Host) -> u64 {
    let counts = host.run("cat", &["/proc/net/snmp"]).unwrap();
    let mut lines = counts.lines().filter_map(|line| line.strip_prefix("Ip: "));
    let names = lines.next().unwrap();
    let counts = lines.next().unwrap();
    let mut all = names.split(' ').zip(counts.split(' '));
    all.find(|(name, _)| *name == "FragFails").unwrap().1.parse().unwrap()
}

/// Sends a stream from a pod to another one.
fn stream_arrives(from: &Pod, to: &Pod) {
    let address = to.addresses().v4.unwrap();
    let listener = to.namespace().run(|| TcpListener::bind((address, 0)).unwrap()).unwrap();
    let target = listener.local_addr().unwrap();
    let sent: Vec<u8> = (0..1 << 20).map(|n: u32| (n / 3) as u8).collect();
    std::thread::scope(|scope| {
        let received = scope.spawn(|| {
            let mut stream = listener.accept().unwrap().0;
            let mut received = Vec::new();
            stream.set_read_timeout(Some(PACE.patience)).unwrap();
            stream.read_to_end(&mut received).unwrap();
            received
        });
        let mut stream = from.namespace().run(|| TcpStream::connect(target).unwrap()).unwrap();
        stream.set_write_timeout(Some(PACE.patience)).unwrap();
        stream.write_all(&sent).unwrap();
        drop(stream);
        assert!(received.join().unwrap() == sent, "{} to {}", from.name(), to.name());
    });
}

/// Each host in turn gives its packets to a process, and then to the kernel again. Both kinds reach
/// each other meanwhile.
#[test]
fn hosts_of_udp_change_the_code_that_moves_packets() {
    in_qemu(&[&MODULES[..], &["tun"]].concat(), || {
        let cluster = Cluster::start(Lab::builder().hosts(2), "udp", PACE);
        let hosts = cluster.lab.hosts();
        assert_eq!([0, 1].map(|n| kind(&hosts[n])), ["kernel"; 2]);
        for path in ["process", "kernel"] {
            for host in hosts {
                let backend = json!({ "Type": "udp", "Path": path });
                cluster.configure_with(host, "udp", &[("Backend", backend)]);
                eventually(
                    PACE.patience,
                    || kind(host) == path,
                    || format!("{} is no {path}\n{}", kind(host), cluster.logs()),
                );
                let status = || Cluster::ctl(host, "status").0["network"]["path"].clone();
                let by = if path == "kernel" { "the kernel" } else { "a process" };
                eventually(PACE.patience, || status() == by, || status().to_string());
                let matrix = cluster.lab.wait_until_reachable(PACE.patience);
                let matrix = matrix.unwrap_or_else(|error| panic!("{error}"));
                assert!(matrix.is_complete(), "{path} at {}\n{}", host.name(), cluster.logs());
                // Without a network card in between, the kernel does not segment what it sends.
                let [first, second] = [0, 1].map(|n| hosts[n].pod().unwrap());
                stream_arrives(&first, &second);
                stream_arrives(&second, &first);
                for host in hosts {
                    assert_eq!(too_large(host), 0, "{path} at {}", host.name());
                }
            }
        }
    });
}
