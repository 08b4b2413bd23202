//! The backend `udp`, whose packets a process moves: its part of the status, the metrics and the
//! doctor, and the end of the process under traffic.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{IpAddr, Ipv4Addr, UdpSocket};
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};
use std::time::Duration;

use flannel_lab::testing::as_root;
use flannel_lab::testing::stream::Traffic;
use flannel_lab::{Host, Lab, Namespace, Signal};
use nix::sys::signal::kill;
use nix::unistd::Pid;
use serde_json::{Value, json};
use test_support::{eventually, receive_from};

use crate::traffic;

/// The first finding about dropped packets comes after 30 s.
const PATIENCE: Duration = Duration::from_secs(90);
/// The UDP port of all nodes.
const PORT: u16 = 8285;
/// A host that is not a node.
const STRANGER: &str = "192.168.77.200";
const PACKETS: usize = 200;

fn up() -> Lab {
    let backend = json!({ "Type": "udp", "Path": "process" });
    let lab = Lab::builder().hosts(2).backend(backend).program(env!("CARGO_BIN_EXE_lab"));
    let lab = lab.start().unwrap();
    for host in lab.hosts() {
        for key in ["net/ipv4/conf/all/rp_filter", "net/ipv4/conf/default/rp_filter"] {
            host.namespace().sysctl(key, "0").unwrap();
        }
    }
    lab.start_daemons().unwrap();
    let matrix = lab.wait_until_reachable(PATIENCE).unwrap_or_else(|error| panic!("{error}"));
    assert!(matrix.is_complete(), "{:?}", matrix.failures().collect::<Vec<_>>());
    lab
}

fn pod(host: &Host) -> (Namespace, Ipv4Addr) {
    let pod = host.pod().unwrap();
    let Some(IpAddr::V4(address)) = pod.addresses().v4 else { panic!("no address") };
    (pod.namespace().clone(), address)
}

pub(crate) fn ctl(lab: &Lab, host: &Host, args: &[&str]) -> Value {
    let mut command = Command::new(env!("CARGO_BIN_EXE_lab"));
    command.args(["ctl", "--json"]).args(args);
    command.arg("--registry").arg(format!("dir:{}", lab.registry().display()));
    command.arg("--control-socket").arg(host.dir().join("flanneld.sock"));
    command.arg("--subnet-file").arg(host.subnet_file());
    command.arg("--state-dir").arg(host.dir().join("state"));
    let output = host.namespace().output(&mut command).unwrap();
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {output:?}"))
}

/// Waits until the route to an address has this verdict. Returns the report.
fn why(lab: &Lab, host: &Host, address: Ipv4Addr, verdict: &str) -> Value {
    let ask = || ctl(lab, host, &["why", &address.to_string()]);
    eventually(
        PATIENCE,
        || Some(ask()).filter(|why| why["verdict"].as_str().unwrap().starts_with(verdict)),
        || format!("{:#}", ask()),
    )
}

#[test]
fn why_explains_the_path_through_the_process() {
    as_root(|| {
        let lab = up();
        let [host, other] = lab.hosts() else { panic!("two hosts") };
        let to = pod(other).1;
        let node = other.addresses().v4.unwrap();
        let good = format!("packets go through flannel0 to {node}, everything is in place");
        let report = why(&lab, host, to, &good);
        let subnet = other.subnet_env().unwrap().unwrap().subnets.v4.unwrap();
        let object = format!("record udp {subnet} to {node}:{PORT}");
        let objects = report["objects"].as_array().unwrap();
        let of_guard = format!("record guard-udp {subnet} from {node}");
        let mut found: Vec<_> =
            objects.iter().map(|it| it["object"].as_str().unwrap().to_owned()).collect();
        found.sort();
        assert_eq!(found, [of_guard, object], "{report:#}");
        assert!(objects.iter().all(|it| it["state"] == "in place"), "{report:#}");
        assert_eq!((&report["ok"], &report["kernel"]), (&true.into(), &"dev flannel0".into()));

        // Another program takes the packets.
        host.run("ip", &["route", "add", &format!("{to}/32"), "dev", "eth0"]).unwrap();
        let report = why(&lab, host, to, "shadowed: packets go dev eth0 instead of dev flannel0");
        assert_eq!(report["ok"], false);
        host.run("sh", &["-ec", report["hint"].as_str().unwrap()]).unwrap();
        why(&lab, host, to, &good);

        // The process does not know an address of no node.
        let nobody = why(&lab, host, [10, 244, 255, 7].into(), "no node holds a subnet");
        assert_eq!(nobody["ok"], false);
        // Without a daemon, the route of the process is still there.
        host.stop_daemon(Signal::SIGTERM).unwrap();
        let report = why(&lab, host, to, &format!("it belongs to {node}, and the daemon does not"));
        assert_eq!(report["kernel"], "dev flannel0");
    });
}

/// The value of a metric with these labels. It may be missing for a second after the start.
pub(crate) fn metric(host: &Host, name: &str) -> u64 {
    let page = || {
        let mut stream = UnixStream::connect(host.dir().join("flanneld.sock")).unwrap();
        let request = b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";
        stream.write_all(request).unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        text
    };
    let value = |page: &str| {
        let line = page.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '))?;
        Some(line.parse().unwrap())
    };
    eventually(PATIENCE, || value(&page()).is_some(), || format!("{name} is not in {}", page()));
    value(&page()).unwrap()
}

/// The counts of packets and bytes in the status of a host. They equal the metrics.
fn counts(lab: &Lab, host: &Host, direction: &str) -> (u64, u64) {
    let status = || {
        let traffic = ctl(lab, host, &["status"])["network"]["traffic"].clone();
        traffic.is_object().then_some(traffic)
    };
    // The daemon asks the process once a second.
    let before = eventually(PATIENCE, status, || "the status has no traffic");
    let count = |what: &str| {
        let name = format!("flannel_data_plane_{what}_total{{direction=\"{direction}\"}}");
        let before = &before[format!("{direction}_{what}")];
        let now = metric(host, &name);
        // The daemons' probes go on meanwhile.
        assert!(before.as_u64().is_some_and(|before| before <= now), "{before}, then {now}");
        now
    };
    (count("packets"), count("bytes"))
}

/// A host on the link of all nodes.
fn stranger(lab: &Lab) -> Namespace {
    let stranger = Namespace::new("stranger").unwrap();
    let batch = format!(
        "link add port-stranger type veth peer name eth0 netns {}\n\
         link set port-stranger master br0 up\n",
        stranger.path().display()
    );
    lab.switch().namespace().ip(&batch).unwrap();
    stranger.ip(&format!("addr add {STRANGER}/24 dev eth0\nlink set eth0 up\n")).unwrap();
    stranger
}

/// An IP packet without a payload.
pub(crate) fn packet(from: Ipv4Addr, to: Ipv4Addr) -> Vec<u8> {
    let mut packet = vec![0x45, 0, 0, 20, 0, 1, 0, 0, 64, 253, 0, 0];
    packet.extend(from.octets().into_iter().chain(to.octets()));
    let words = packet.chunks(2).map(|word| u32::from(word[0]) << 8 | u32::from(word[1]));
    let sum: u32 = words.sum();
    packet[10..12].copy_from_slice(&(!((sum & 0xffff) + (sum >> 16)) as u16).to_be_bytes());
    packet
}

/// The text of the doctor's finding about the data plane.
fn finding(lab: &Lab, host: &Host) -> Option<String> {
    let report = ctl(lab, host, &["doctor"]);
    let findings = report["findings"].as_array().unwrap();
    // The doctor knows that the process at the port is a data plane.
    assert!(findings.iter().all(|found| found["check"] != "port"), "{report:#}");
    let found = findings.iter().find(|found| found["check"] == "data-plane")?;
    Some(found["text"].as_str().unwrap().to_owned())
}

#[test]
fn packets_are_counted_and_forged_ones_are_reported() {
    as_root(|| {
        let lab = up();
        let [host, other] = lab.hosts() else { panic!("two hosts") };
        let (near, from) = pod(host);
        let (far, to) = pod(other);
        let sent = counts(&lab, host, "sent");
        let received = counts(&lab, other, "received");
        let inbox = far.run(|| UdpSocket::bind((to, 5000))).unwrap().unwrap();
        inbox.set_read_timeout(Some(PATIENCE)).unwrap();
        let outbox = near.run(|| UdpSocket::bind((from, 0))).unwrap().unwrap();
        for _ in 0..PACKETS {
            outbox.send_to(&[7; 100], (to, 5000)).unwrap();
            assert_eq!(receive_from(&inbox, &mut [0; 200]).unwrap().0, 100);
        }
        // With the headers of IP and UDP.
        let packets = PACKETS as u64;
        let bytes = PACKETS as u64 * 128;
        for (before, host, direction) in [(sent, host, "sent"), (received, other, "received")] {
            // The daemon reads the counts once a second.
            let now = || counts(&lab, host, direction);
            eventually(
                PATIENCE,
                || {
                    let now = now();
                    now.0 >= before.0 + packets && now.1 >= before.1 + bytes
                },
                || format!("{direction}: {:?} after {before:?}", now()),
            );
        }
        assert_eq!(finding(&lab, other), None);

        // The stranger sends as the first pod.
        let socket = stranger(&lab).run(|| UdpSocket::bind("0.0.0.0:0")).unwrap().unwrap();
        let node = other.addresses().v4.unwrap();
        let dropped = "flannel_data_plane_dropped_packets_total{reason=\"foreign_node\"}";
        let before = metric(other, dropped);
        let forged = packet(from, to);
        let text = eventually(
            PATIENCE,
            || {
                socket.send_to(&forged, (node, PORT)).unwrap();
                finding(&lab, other)
            },
            || other.log().unwrap(),
        );
        let home = host.addresses().v4.unwrap();
        let expected = format!(
            "packets with the source {from} were sent by {STRANGER} and not by their node, {home}"
        );
        assert!(text.starts_with(&expected), "{text}");
        eventually(PATIENCE, || metric(other, dropped) > before, || other.log().unwrap());
        assert_eq!(finding(&lab, host), None, "it is not about the other host");
        // It stays for minutes. A daemon that starts sees packets of the past only.
        assert_eq!(finding(&lab, other), Some(text));
        other.stop_daemon(Signal::SIGTERM).unwrap();
        other.start_daemon().unwrap();
        eventually(
            PATIENCE,
            || ctl(&lab, other, &["status"])["network"]["in_sync"] == true,
            || other.log().unwrap(),
        );
        assert_eq!(finding(&lab, other), None);
        eventually(PATIENCE, || metric(other, dropped) > before, || other.log().unwrap());
    });
}

/// The process of a host's data plane.
pub(crate) fn data_plane(host: &Host) -> i32 {
    let socket = host.dir().join("state/udp/socket");
    let list = host.run("ps", &["-eo", "pid,args"]).unwrap();
    let mut lines = list.lines().filter(|line| line.ends_with(&*socket.to_string_lossy()));
    lines.next().and_then(|line| line.split_whitespace().next()?.parse().ok()).unwrap_or_default()
}

/// A new data plane takes over from the one that runs, as for an upgrade.
#[test]
fn a_data_plane_of_udp_hands_over_without_the_loss_of_a_packet() {
    as_root(|| {
        let lab = traffic::up("udp");
        let traffic = Traffic::start(&lab);
        for _ in 0..3 {
            for host in lab.hosts() {
                let before = data_plane(host);
                let mut command = Command::new(env!("CARGO_BIN_EXE_lab"));
                command.arg("udp-data-plane");
                command.arg(host.dir().join("state/udp/socket")).stdin(Stdio::null());
                let mut process = host.namespace().spawn(&mut command).unwrap();
                eventually(
                    PATIENCE,
                    || data_plane(host) == process.id() as i32,
                    || format!("{before} has not handed over"),
                );
                traffic.wait_for_arrivals();
                assert_eq!(process.try_wait().unwrap(), None);
            }
        }
        // The daemons have found the new processes, and none that is missing.
        let logs = traffic::logs(&lab);
        assert!(!logs.contains("an object was repaired object=record udp"), "{logs}");
        traffic::assert_no_loss(traffic, &lab, 1000);
    });
}

/// The daemon replaces a data plane of another version: one that it finds when it starts, and one
/// that has taken over beside it.
#[test]
fn a_data_plane_of_udp_with_another_version_is_replaced_without_the_loss_of_a_packet() {
    as_root(|| {
        let lab = traffic::up("udp");
        let traffic = Traffic::start(&lab);
        let version = |host: &Host| data_plane_status(host)?["program"].as_str().map(str::to_owned);
        let current = version(&lab.hosts()[0]).unwrap();
        for host in lab.hosts() {
            for is_found in [true, false] {
                if is_found {
                    host.stop_daemon(Signal::SIGKILL).unwrap().unwrap();
                }
                let mut command = Command::new(env!("CARGO_BIN_EXE_lab"));
                command.args(["udp-process", "0.0.0-other"]);
                command.arg(host.dir().join("state/udp/socket")).stdin(Stdio::null());
                let mut other = host.namespace().spawn(&mut command).unwrap();
                if is_found {
                    eventually(
                        PATIENCE,
                        || version(host).is_some_and(|version| version != current),
                        || "the other version does not take over",
                    );
                    traffic.wait_for_arrivals();
                    host.start_daemon().unwrap();
                }
                let ended =
                    eventually(PATIENCE, || other.try_wait().unwrap(), || traffic::logs(&lab));
                assert!(ended.success(), "{ended}");
                eventually(
                    PATIENCE,
                    || version(host).is_some_and(|version| version == current),
                    || traffic::logs(&lab),
                );
                traffic.wait_for_arrivals();
            }
        }
        traffic::assert_no_loss(traffic, &lab, 1000);
    });
}

/// The state of a host's data plane, or `None` if nobody answers.
fn data_plane_status(host: &Host) -> Option<Value> {
    let mut stream = UnixStream::connect(host.dir().join("state/udp/socket")).ok()?;
    stream.write_all(b"\"status\"\n").ok()?;
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line).ok()?;
    Some(serde_json::from_str::<Value>(&line).ok()?["status"].take())
}

/// The daemon starts another data plane, with the same peers and the same counts.
#[test]
fn a_data_plane_of_udp_that_was_killed_is_back() {
    as_root(|| {
        let lab = traffic::up("udp");
        let traffic = Traffic::start(&lab);
        let before = data_plane(&lab.hosts()[1]);
        let seen = data_plane_status(&lab.hosts()[1]).unwrap();
        kill(Pid::from_raw(before), Signal::SIGKILL).unwrap();
        traffic.wait_for_arrivals();
        let now = data_plane_status(&lab.hosts()[1]).unwrap();
        assert_eq!(now["peers"], seen["peers"]);
        for count in ["sent_packets", "received_packets"] {
            let of = |status: &Value| status["counts"][count].as_u64().unwrap();
            assert!(of(&now) > of(&seen), "{count}: {} after {}", of(&now), of(&seen));
        }
        let now = data_plane(&lab.hosts()[1]);
        assert!(now != 0 && now != before, "{before}, then {now}");
        let (sent, lost) = traffic.end();
        assert!(lost.iter().all(|lost| lost.hosts.contains(&2)), "{lost:#?}");
        println!("{} of {sent} packets were lost", lost.len());
    });
}

/// Both backends write the same leases.
#[test]
fn a_change_to_alloc_leaves_no_device_and_no_data_plane() {
    as_root(|| {
        let lab = up();
        let file = lab.registry().join("config");
        let new = lab.registry().join("config.new");
        let mut config: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
        config["Backend"] = json!({ "Type": "alloc" });
        fs::write(&new, config.to_string()).unwrap();
        fs::rename(&new, &file).unwrap();
        for host in lab.hosts() {
            let left = || {
                let links = host.run("ip", &["-o", "link"]).unwrap();
                let network = ctl(&lab, host, &["status"])["network"].take();
                let is_done = network["backend"] == "alloc" && !links.contains("flannel0");
                (!is_done || data_plane(host) != 0).then_some((links, network))
            };
            eventually(PATIENCE, || left().is_none(), || format!("{:?}", left()));
        }
    });
}
