//! The process of a data plane: its socket, its answers, and what it does with bad requests.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

mod hand_over;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::UdpSocket;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use flannel_netlink::testing::{in_netns, ip};
use flannel_udp::{Client, Counts, Options, Peers, Request, Status, VERSION};
use test_support::eventually;

const PATIENCE: Duration = Duration::from_secs(20);

/// A process that ends with the test.
struct Process {
    child: Child,
    socket: PathBuf,
    /// Without a data plane it ends with the last one.
    _connection: Client,
}

impl Process {
    fn start(dir: &Path) -> Self {
        let socket = dir.join("udp/socket");
        let mut command = Command::new(env!("CARGO_BIN_EXE_flannel-udp"));
        let child = command.arg(&socket).stdin(Stdio::null()).spawn().unwrap();
        let connect = || {
            let mut client = Client::connect(&socket).ok()?;
            // One from which it takes over answers until then.
            (client.process().ok()?.pid == child.id()).then_some(client)
        };
        let connection = eventually(PATIENCE, connect, || "no answer");
        Self { child, socket, _connection: connection }
    }

    /// Waits for its end.
    fn ended(&mut self) -> ExitStatus {
        eventually(PATIENCE, || self.child.try_wait().unwrap(), || "it goes on")
    }

    fn client(&self) -> Client {
        Client::connect(&self.socket).unwrap()
    }

    fn status(&self) -> Status {
        self.client().ask(&Request::Status).unwrap().unwrap()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn options(device: &str) -> Options {
    Options {
        device: device.into(),
        local: vec![[127, 0, 0, 1].into()],
        port: 8285,
        own: vec!["10.1.7.0/24".parse().unwrap()],
        one_port: false,
        checks_source: true,
        counts_only: false,
        queues: Some(1),
    }
}

fn peers() -> Peers {
    [("10.1.8.0/24".parse().unwrap(), ([192, 0, 2, 8], 8285).into())].into()
}

#[test]
fn only_the_owner_may_ask() {
    let dir = tempfile::tempdir().unwrap();
    let process = Process::start(dir.path());
    let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(process.socket.parent().unwrap()), 0o700);
    assert_eq!(mode(&process.socket), 0o600);
}

#[test]
fn peers_are_kept_and_bad_requests_change_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let process = Process::start(dir.path());
    let mut client = process.client();
    client.ask(&Request::Put(peers())).unwrap();
    assert_eq!((process.status().peers, process.status().options), (peers(), None));
    for bad in ["{", "{\"put\":{\"10.1.9.0\":\"192.0.2.9:1\"}}", "{\"unknown\":1}", "[]"] {
        let mut stream = UnixStream::connect(&process.socket).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        writeln!(stream, "{bad}").unwrap();
        let mut answer = String::new();
        BufReader::new(stream).read_line(&mut answer).unwrap();
        assert!(answer.starts_with("{\"failed\":"), "{bad}: {answer}");
    }
    let counts = client.ask(&Request::Counts).unwrap().unwrap();
    assert_eq!((counts.peers, counts.process), (Peers::new(), process.status().process));
    client.ask(&Request::Delete(peers().into_keys().collect())).unwrap();
    assert_eq!(process.status().peers, Peers::new());
}

#[test]
fn a_device_that_cannot_be_made_is_named_and_the_process_goes_on() {
    in_netns(|| {
        let dir = tempfile::tempdir().unwrap();
        let process = Process::start(dir.path());
        ip("tuntap add dev other0 mode tap");
        let mut client = process.client();
        let error = client.ask(&Request::Start(options("other0"))).unwrap_err().to_string();
        assert!(error.contains("tun device other0") && error.contains("delete it"), "{error}");
        let mut elsewhere = options("flannel0");
        elsewhere.local = vec![[192, 0, 2, 1].into()];
        let error = client.ask(&Request::Start(elsewhere)).unwrap_err().to_string();
        assert!(error.contains("192.0.2.1:8285"), "{error}");
        client.ask(&Request::Put(peers())).unwrap();
        client.ask(&Request::Start(options("flannel0"))).unwrap();
        let status = process.status();
        assert_eq!((status.options, status.peers), (Some(options("flannel0")), peers()));
    });
}

/// Gives the device what the daemon gives it. The kernel itself sends nothing.
fn set_up_device() {
    std::fs::write("/proc/sys/net/ipv6/conf/flannel0/disable_ipv6", "1").unwrap();
    ip("addr add 10.1.7.0/32 dev flannel0");
    ip("link set flannel0 up");
    ip("route add 10.1.0.0/16 dev flannel0");
}

/// Waits until the kernel has noticed, on a thread of its own, that the device has a process again.
/// Until then it drops what is sent there.
fn wait_for_device() {
    eventually(
        PATIENCE,
        || !ip("-br link show flannel0").contains("NO-CARRIER"),
        || ip("link show flannel0"),
    );
}

/// Sends packets to a pod of no peer.
fn send_without_peer(count: u64) {
    let socket = UdpSocket::bind("10.1.7.0:0").unwrap();
    for n in 0..count {
        socket.send_to(&[n as u8], "10.1.99.1:5000").unwrap();
    }
}

#[test]
fn counts_continue_after_a_kill_and_with_other_options() {
    in_netns(|| {
        let dir = tempfile::tempdir().unwrap();
        let process = Process::start(dir.path());
        process.client().ask(&Request::Start(options("flannel0"))).unwrap();
        set_up_device();
        send_without_peer(3);
        let refused = |process: &Process| process.status().counts.no_peer;
        eventually(PATIENCE, || refused(&process) >= 3, || "nothing is counted");
        // What was seen is not lost, also if it is younger than a second.
        let seen = process.status().counts;
        drop(process);
        let second = Process::start(dir.path());
        assert_eq!(second.status().counts, seen);
        second.client().ask(&Request::Start(options("flannel0"))).unwrap();
        wait_for_device();
        // Nobody asks for these before the kill.
        send_without_peer(5);
        let file = dir.path().join("udp/counts");
        let saved =
            || -> Counts { serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap() };
        eventually(PATIENCE, || saved().no_peer >= seen.no_peer + 5, || format!("{:?}", saved()));
        let seen = saved();
        drop(second);
        let third = Process::start(dir.path());
        assert_eq!(third.status().counts, seen);
        third.client().ask(&Request::Start(options("flannel0"))).unwrap();
        let other = Options { queues: Some(2), ..options("flannel0") };
        third.client().ask(&Request::Start(other.clone())).unwrap();
        assert!(refused(&third) >= seen.no_peer);
        third.client().ask(&Request::Stop(other)).unwrap();
        assert!(!file.exists(), "a stop removes what the start has made");
    });
}

/// The last connection ends, and nobody is left who would stop it.
#[test]
fn a_process_without_a_data_plane_ends_with_its_connections() {
    in_netns(|| {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("udp/socket");
        let mut command = Command::new(env!("CARGO_BIN_EXE_flannel-udp"));
        let mut child = command.arg(&socket).stdin(Stdio::null()).spawn().unwrap();
        let connect = || Client::connect(&socket).ok();
        // A look at the state does not end it before its first user comes.
        for _ in 0..5 {
            let mut look = eventually(PATIENCE, connect, || "no socket");
            look.ask(&Request::Counts).unwrap();
        }
        assert_eq!(child.try_wait().unwrap(), None);
        let [mut first, second] = [(); 2].map(|()| eventually(PATIENCE, connect, || "no socket"));
        drop(second);
        first.ask(&Request::Put(peers())).unwrap();
        drop(first);
        let status = eventually(PATIENCE, || child.try_wait().unwrap(), || "it goes on");
        assert!(status.success() && !socket.exists());
    });
}

/// A renamed device has no packets of pods any more.
#[test]
fn a_device_with_another_name_is_replaced() {
    in_netns(|| {
        let dir = tempfile::tempdir().unwrap();
        let process = Process::start(dir.path());
        process.client().ask(&Request::Start(options("flannel0"))).unwrap();
        ip("link set flannel0 name renamed0");
        assert_eq!(process.status().options, None);
        process.client().ask(&Request::Start(options("flannel0"))).unwrap();
        assert_eq!(process.status().options, Some(options("flannel0")));
        assert!(ip("-br link show flannel0").contains("flannel0"));
    });
}

/// The address of one family is not there yet. The other family works meanwhile.
#[test]
fn a_missing_address_concerns_its_family_only() {
    in_netns(|| {
        let dir = tempfile::tempdir().unwrap();
        let process = Process::start(dir.path());
        let of_v4 = options("flannel0");
        let mut both = of_v4.clone();
        both.local.push("2001:db8::1".parse().unwrap());
        both.own.push("fd00:1:0:7::/64".parse().unwrap());
        let start = || process.client().ask(&Request::Start(both.clone()));
        let error = start().unwrap_err().to_string();
        assert!(error.contains("[2001:db8::1]:8285"), "{error}");
        let options = || process.status().options.unwrap();
        assert_eq!(options(), Options { local: of_v4.local.clone(), ..both.clone() });
        set_up_device();
        send_without_peer(3);
        let passed = || process.status().counts.no_peer;
        eventually(PATIENCE, || passed() >= 3, || "IPv4 waits");
        // It does not begin anew at each attempt.
        start().unwrap_err();
        ip("addr add 2001:db8::1/64 dev lo nodad");
        start().unwrap();
        assert_eq!(options(), both);
    });
}

/// The device to the node sends almost nothing and queues everything, so the buffer of the socket
/// is full.
#[test]
fn a_full_buffer_drops_packets_and_does_not_delay_the_end() {
    in_netns(|| {
        let dir = tempfile::tempdir().unwrap();
        let mut process = Process::start(dir.path());
        ip("link add name eth0 type veth peer name eth1");
        ip("addr add 192.0.2.7/24 dev eth0");
        ip("link set eth0 up");
        ip("link set eth1 up");
        ip("neigh add 192.0.2.8 lladdr 0a:00:00:00:00:08 dev eth0");
        let tbf = "qdisc add dev eth0 root tbf rate 8kbit burst 1600 limit 1gb";
        let set = Command::new("tc").args(tbf.split(' ')).output().unwrap();
        assert!(set.status.success(), "{set:?}");
        let options = Options { local: vec![[192, 0, 2, 7].into()], ..options("flannel0") };
        process.client().ask(&Request::Put(peers())).unwrap();
        process.client().ask(&Request::Start(options.clone())).unwrap();
        set_up_device();
        let socket = UdpSocket::bind("10.1.7.0:0").unwrap();
        eventually(
            PATIENCE,
            || {
                // Each fills the buffer by 1 KiB.
                for _ in 0..1000 {
                    let _ = socket.send_to(&[0; 1000], "10.1.8.2:5000");
                }
                process.status().counts.send_failed > 0
            },
            || "the buffer is never full",
        );
        process.client().ask(&Request::Stop(options)).unwrap();
        assert!(process.ended().success());
    });
}

/// The voluntary context switches of all threads.
fn switches(pid: u32) -> u64 {
    let mut sum = 0;
    for task in std::fs::read_dir(format!("/proc/{pid}/task")).unwrap() {
        let status = std::fs::read_to_string(task.unwrap().path().join("status")).unwrap();
        let line = status.lines().find_map(|l| l.strip_prefix("voluntary_ctxt_switches:"));
        sum += line.unwrap().trim().parse::<u64>().unwrap();
    }
    sum
}

#[test]
fn an_idle_process_does_not_wake_up() {
    in_netns(|| {
        let dir = tempfile::tempdir().unwrap();
        let process = Process::start(dir.path());
        process.client().ask(&Request::Start(options("flannel0"))).unwrap();
        set_up_device();
        send_without_peer(1);
        let pid = process.child.id();
        let mut last = (switches(pid), Instant::now());
        eventually(
            PATIENCE,
            || {
                let now = switches(pid);
                if now != last.0 {
                    last = (now, Instant::now());
                }
                // Longer than the time until the counts are saved.
                last.1.elapsed() >= Duration::from_secs(3)
            },
            || "it wakes up",
        );
    });
}
