//! The process of a data plane: its socket, its answers, and what it does with bad requests.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

use std::io::{BufRead, BufReader, Write};
use std::net::UdpSocket;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use flannel_netlink::testing::{in_netns, ip};
use flannel_udp::{Client, Counts, Options, Peers, Request, Status};
use test_support::eventually;

const PATIENCE: Duration = Duration::from_secs(20);

/// A process that ends with the test.
struct Process {
    child: Child,
    socket: PathBuf,
}

impl Process {
    fn start(dir: &Path) -> Self {
        let socket = dir.join("udp/socket");
        let mut command = Command::new(env!("CARGO_BIN_EXE_flannel-udp"));
        let child = command.arg(&socket).stdin(Stdio::null()).spawn().unwrap();
        let process = Self { child, socket };
        eventually(PATIENCE, || Client::connect(&process.socket).is_ok(), || "no answer");
        process
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
    assert_eq!((mode(process.socket.parent().unwrap()), mode(&process.socket)), (0o700, 0o600));
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
    assert_eq!((counts.peers, counts.program), (Peers::new(), process.status().program));
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

#[test]
fn a_process_takes_over_and_one_that_is_stopped_leaves_the_device() {
    in_netns(|| {
        let dir = tempfile::tempdir().unwrap();
        let mut old = Process::start(dir.path());
        let mut client = old.client();
        client.ask(&Request::Put(peers())).unwrap();
        client.ask(&Request::Start(options("flannel0"))).unwrap();
        let mut new = Process::start(dir.path());
        assert!(eventually(PATIENCE, || old.child.try_wait().unwrap(), || "it goes on").success());
        let status = new.status();
        assert_eq!((status.options, status.peers), (Some(options("flannel0")), peers()));
        // Of a data plane with other options.
        new.client().ask(&Request::Stop(options("flannel1"))).unwrap();
        assert_eq!(new.child.try_wait().unwrap(), None);
        new.client().ask(&Request::Stop(options("flannel0"))).unwrap();
        assert!(eventually(PATIENCE, || new.child.try_wait().unwrap(), || "it goes on").success());
        assert!(ip("-br link show flannel0").contains("flannel0") && !new.socket.exists());
        // Without its device it ends, so that it is started again.
        let mut last = Process::start(dir.path());
        last.client().ask(&Request::Start(options("flannel0"))).unwrap();
        ip("link delete flannel0");
        assert!(
            !eventually(PATIENCE, || last.child.try_wait().unwrap(), || "it goes on").success()
        );
    });
}

/// Gives the device what the daemon gives it. The kernel itself sends nothing.
fn set_up_device() {
    std::fs::write("/proc/sys/net/ipv6/conf/flannel0/disable_ipv6", "1").unwrap();
    ip("addr add 10.1.7.0/32 dev flannel0");
    ip("link set flannel0 up");
    ip("route add 10.1.0.0/16 dev flannel0");
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

/// The voluntary context switches of all threads.
fn switches(pid: u32) -> u64 {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    let of = |task: std::io::Result<std::fs::DirEntry>| -> u64 {
        let status = std::fs::read_to_string(task.unwrap().path().join("status")).unwrap();
        let line = status.lines().find_map(|l| l.strip_prefix("voluntary_ctxt_switches:"));
        line.unwrap().trim().parse().unwrap()
    };
    tasks.map(of).sum()
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
        let quiet = || {
            let now = switches(pid);
            if now != last.0 {
                last = (now, Instant::now());
            }
            // Longer than the time until the counts are saved.
            last.1.elapsed() >= Duration::from_secs(3)
        };
        eventually(PATIENCE, quiet, || "it wakes up");
    });
}
