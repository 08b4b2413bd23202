//! The backend `udp`: a process on a node without capabilities, and a pod with raw sockets.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::fd::AsFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr as UnixAddr, UnixDatagram, UnixStream};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use flannel_core::address::Family;
use flannel_lab::testing::as_root;
use flannel_lab::testing::stream::Traffic;
use flannel_lab::{Host, Lab, Pod};
use serde_json::json;
use socket2::{Domain, Socket, Type};
use test_support::eventually;
use tun_rs::DeviceBuilder;

use crate::traffic;
use crate::udp::{data_plane, metric};

const PATIENCE: Duration = Duration::from_secs(90);
const PORT: u16 = 8285;
/// The variable with the addresses of the node for the process of the stranger.
const STRANGER: &str = "FLANNEL_LAB_STRANGER";
const TEST: &str = "attacks::udp::a_stranger_and_a_pod_with_raw_sockets_harm_nobody";
/// The packets of a pod that have as many segments as bytes, in each family and round.
const PACKETS: u64 = 20;
const ROUNDS: u64 = 3;
const MOST_MEMORY: u64 = 8 << 10;
const MOST_DELAY: Duration = Duration::from_millis(100);

/// Takes the port of the data plane, and the name of its claim, whenever it can. Prints how many
/// datagrams it has got.
fn steal(addresses: &str) {
    let stops = AtomicBool::new(false);
    let addresses: Vec<IpAddr> = addresses.split(' ').map(|ip| ip.parse().unwrap()).collect();
    let name = UnixAddr::from_abstract_name("flannel-udp/flannel0").unwrap();
    let mut sockets = Vec::new();
    let mut names = Vec::new();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let _ = std::io::stdin().read_to_end(&mut Vec::new());
            stops.store(true, Ordering::Relaxed);
        });
        println!("\nready");
        while !stops.load(Ordering::Relaxed) {
            sockets.extend(addresses.iter().filter_map(|address| share(*address).ok()));
            names.extend(UnixDatagram::bind_addr(&name));
            // A fault of this test must not use up the descriptors.
            if sockets.len() > 100 {
                break;
            }
            std::thread::park_timeout(Duration::from_micros(200));
        }
    });
    let stolen: usize = sockets
        .iter()
        .map(|socket| std::iter::from_fn(|| socket.recv(&mut [0; 9]).ok()).count())
        .sum();
    println!("stolen {stolen} by {} sockets and {} names", sockets.len(), names.len());
}

/// A socket that shares the port of the data plane.
fn share(address: IpAddr) -> std::io::Result<UdpSocket> {
    let socket = Socket::new(Domain::for_address((address, 0).into()), Type::DGRAM, None)?;
    socket.set_reuse_port(true)?;
    socket.set_nonblocking(true)?;
    socket.bind(&SocketAddr::new(address, PORT).into())?;
    Ok(socket.into())
}

/// The stranger on a node: it has the user id of the daemon, and no capabilities.
struct Stranger(Child);

impl Stranger {
    fn on(host: &Host) -> Self {
        let addresses =
            [host.addresses().v4, host.addresses().v6].map(|ip| ip.unwrap().to_string());
        let mut command = Command::new("setpriv");
        command.args(["--no-new-privs", "--bounding-set=-all", "--inh-caps=-all"]);
        command.arg(std::env::current_exe().unwrap()).args([TEST, "--exact", "--nocapture"]);
        command.env(STRANGER, addresses.join(" ")).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = host.namespace().spawn(&mut command).unwrap();
        let mut lines = BufReader::new(child.stdout.as_mut().unwrap());
        let mut line = String::new();
        while line != "ready\n" {
            line.clear();
            assert_ne!(lines.read_line(&mut line).unwrap(), 0, "it has ended");
        }
        Self(child)
    }

    /// Ends it. Returns what it has got.
    fn end(mut self) -> String {
        drop(self.0.stdin.take());
        let mut text = String::new();
        self.0.stdout.take().unwrap().read_to_string(&mut text).unwrap();
        self.0.wait().unwrap();
        text.lines().find(|line| line.starts_with("stolen")).unwrap_or(&text).to_owned()
    }
}

/// A packet of TCP with its vnet header, in which each byte is a segment.
fn tiny_segments(from: IpAddr, to: IpAddr) -> Vec<u8> {
    const PAYLOAD: usize = 60_000;
    let (mut ip, gso_type) = match (from, to) {
        (IpAddr::V4(from), IpAddr::V4(to)) => {
            let mut header = crate::udp::packet(from, to);
            header[9] = 6;
            header[2..4].copy_from_slice(&(20 + 20 + PAYLOAD as u16).to_be_bytes());
            header[10..12].copy_from_slice(&[0; 2]);
            let words = header.chunks(2).map(|word| u32::from(word[0]) << 8 | u32::from(word[1]));
            let sum: u32 = words.sum();
            let sum = !((sum & 0xffff) + (sum >> 16)) as u16;
            header[10..12].copy_from_slice(&sum.to_be_bytes());
            (header, 1)
        }
        (IpAddr::V6(from), IpAddr::V6(to)) => {
            let mut header = vec![0x60, 0, 0, 0, 0, 0, 6, 64];
            header[4..6].copy_from_slice(&(20 + PAYLOAD as u16).to_be_bytes());
            header.extend(from.octets().into_iter().chain(to.octets()));
            (header, 4)
        }
        _ => panic!("{from} and {to} are not of one family"),
    };
    let start = ip.len() as u16;
    // Its checksum is left to the kernel.
    ip.extend([0x12, 0x34, 0x14, 0x51, 0, 0, 0, 1, 0, 0, 0, 1, 0x50, 0x10, 1, 2, 0, 0, 0, 0]);
    ip.extend([7; PAYLOAD]);
    let mut vnet = vec![1, gso_type];
    for word in [0, 1, start, 16] {
        vnet.extend(word.to_ne_bytes());
    }
    [vnet, ip].concat()
}

/// A device by which a pod sends packets with vnet headers of its own, as by a raw socket.
fn raw_device(pod: &Pod) -> File {
    let namespace = pod.namespace();
    let device = namespace
        .run(|| {
            let device = DeviceBuilder::new().name("raw0").offload(true).build_sync().unwrap();
            File::from(device.as_fd().try_clone_to_owned().unwrap())
        })
        .unwrap();
    for key in ["ipv4/ip_forward", "ipv6/conf/all/forwarding"] {
        namespace.sysctl(&format!("net/{key}"), "1").unwrap();
    }
    for key in ["all", "raw0"] {
        namespace.sysctl(&format!("net/ipv4/conf/{key}/rp_filter"), "0").unwrap();
    }
    namespace.ip("link set raw0 up\n").unwrap();
    device
}

/// Another address of the subnet of a pod.
fn neighbour(address: IpAddr) -> IpAddr {
    match address {
        IpAddr::V4(v4) => (u32::from(v4) & !0xff | 200).to_be_bytes().into(),
        IpAddr::V6(v6) => (u128::from(v6) & !0xffff | 200).to_be_bytes().into(),
    }
}

/// The resident memory of a process, in KiB.
fn memory(pid: i32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.split_whitespace().next().unwrap().parse().unwrap()
}

fn memories(lab: &Lab) -> Vec<[u64; 2]> {
    lab.hosts().iter().map(|host| [host.daemon_rss().unwrap(), memory(data_plane(host))]).collect()
}

/// The time for an answer of `/healthz`.
fn health(host: &Host) -> Duration {
    let begin = Instant::now();
    let mut stream = UnixStream::connect(host.dir().join("flanneld.sock")).unwrap();
    stream.write_all(b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    assert!(text.starts_with("HTTP/1.1 200"), "{text}");
    begin.elapsed()
}

/// Another process takes over the data plane of a host.
fn hand_over(host: &Host) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_lab"));
    command.arg("udp-data-plane").arg(host.dir().join("state/udp/socket")).stdin(Stdio::null());
    let mut process = host.namespace().spawn(&mut command).unwrap();
    let pid = process.id() as i32;
    eventually(PATIENCE, || data_plane(host) == pid, || "nobody has handed over");
    assert_eq!(process.try_wait().unwrap(), None);
}

#[test]
fn a_stranger_and_a_pod_with_raw_sockets_harm_nobody() {
    if let Ok(addresses) = std::env::var(STRANGER) {
        return steal(&addresses);
    }
    as_root(|| {
        let backend = json!({ "Type": "udp", "Path": "process" });
        let lab = traffic::up(backend);
        let [host, other, _] = lab.hosts() else { panic!("three hosts") };
        let pod = host.pod().unwrap();
        let target = other.pod().unwrap();
        let mut raw = raw_device(&pod);
        let traffic = Traffic::start(&lab);
        traffic.wait_for_arrivals();
        let before = memories(&lab);
        let stranger = Stranger::on(host);
        let dropped = "flannel_data_plane_dropped_packets_total{reason=\"tiny_segments\"}";
        let mut delays = Vec::new();
        for round in 1..=ROUNDS {
            for family in Family::BOTH {
                let from = neighbour(pod.addresses()[family].unwrap());
                let packet = tiny_segments(from, target.addresses()[family].unwrap());
                for _ in 0..PACKETS {
                    raw.write_all(&packet).unwrap();
                }
            }
            let expected = 2 * round * PACKETS;
            let now = || metric(host, dropped);
            eventually(PATIENCE, || now() >= expected, || format!("{} of {expected}", now()));
            hand_over(host);
            traffic.wait_for_arrivals();
            for _ in 0..10 {
                delays.extend(lab.hosts().iter().map(health));
            }
        }
        let after = memories(&lab);
        assert_eq!(stranger.end(), "stolen 0 by 0 sockets and 0 names");
        traffic::assert_no_loss(traffic, &lab, 1000);
        // A processor that is busy with other tests may delay a few.
        delays.sort();
        let late = delays[delays.len() * 9 / 10];
        assert!(late < MOST_DELAY, "{late:?} {delays:?}");
        for (before, after) in before.iter().flatten().zip(after.iter().flatten()) {
            let grown = after.saturating_sub(*before);
            assert!(grown < MOST_MEMORY, "{before} KiB, then {after} KiB");
        }
        println!("memory {before:?} then {after:?} KiB; /healthz {late:?}");
    });
}
