//! A process takes over from another one, or fails to.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr as UnixAddr, UnixDatagram};
use std::sync::atomic::{AtomicBool, Ordering};

use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, SockFlag, SockType, SockaddrStorage, bind, setsockopt, socket, sockopt,
};

use super::*;

#[test]
fn a_process_takes_over_and_one_that_is_stopped_leaves_the_device() {
    in_netns(|| {
        let dir = tempfile::tempdir().unwrap();
        let mut old = Process::start(dir.path());
        let mut client = old.client();
        client.ask(&Request::Put(peers())).unwrap();
        client.ask(&Request::Start(options("flannel0"))).unwrap();
        let mut new = Process::start(dir.path());
        assert!(old.ended().success());
        let status = new.status();
        assert_eq!((status.options, status.peers), (Some(options("flannel0")), peers()));
        // Of a data plane with other options.
        new.client().ask(&Request::Stop(options("flannel1"))).unwrap();
        assert_eq!(new.child.try_wait().unwrap(), None);
        new.client().ask(&Request::Stop(options("flannel0"))).unwrap();
        assert!(new.ended().success());
        assert!(ip("-br link show flannel0").contains("flannel0") && !new.socket.exists());
        // Without its device it ends, so that it is started again.
        let mut last = Process::start(dir.path());
        last.client().ask(&Request::Start(options("flannel0"))).unwrap();
        ip("link delete flannel0");
        assert!(!last.ended().success());
    });
}

/// A process with a data plane that counts packets, two queues of which are many descriptors.
fn running(dir: &Path) -> Process {
    let process = Process::start(dir);
    let options = Options { queues: Some(2), ..options("flannel0") };
    process.client().ask(&Request::Put(peers())).unwrap();
    process.client().ask(&Request::Start(options)).unwrap();
    set_up_device();
    process
}

/// Packets pass, and the table is there.
fn assert_works(process: &Process) {
    let before = process.status().counts.no_peer;
    send_without_peer(3);
    let now = || process.status().counts.no_peer;
    eventually(PATIENCE, || now() >= before + 3, || format!("{} after {before}", now()));
    assert_eq!(process.status().peers, peers());
}

/// The other process ends midway, or hangs.
#[test]
fn a_process_goes_on_when_a_hand_over_fails() {
    in_netns(|| {
        let dir = tempfile::tempdir().unwrap();
        let process = running(dir.path());
        for lines in ["", "null\n"] {
            for ends in [true, false] {
                let mut stream = UnixStream::connect(&process.socket).unwrap();
                stream.set_read_timeout(Some(PATIENCE)).unwrap();
                write!(stream, "\"hand_over\"\n{lines}").unwrap();
                let mut reader = BufReader::new(stream);
                let mut answer = String::new();
                reader.read_line(&mut answer).unwrap();
                assert!(answer.contains("\"status\""), "{answer}");
                if !ends {
                    // Until it has no more patience.
                    reader.read_to_end(&mut Vec::new()).unwrap();
                }
                drop(reader);
                assert_works(&process);
            }
        }
        let mut next = Process::start(dir.path());
        assert_works(&next);
        assert_eq!(next.child.try_wait().unwrap(), None);
        // A device with another name is not handed over, and its threads run all the time.
        ip("link set flannel0 name renamed0");
        let mut stream = UnixStream::connect(&next.socket).unwrap();
        writeln!(stream, "\"hand_over\"").unwrap();
        BufReader::new(stream).read_line(&mut String::new()).unwrap();
        ip("link set renamed0 down");
        ip("link set renamed0 name flannel0");
        ip("link set flannel0 up");
        ip("route add 10.1.0.0/16 dev flannel0");
        assert_works(&next);
        next.client().end().unwrap();
        assert!(next.ended().success());
    });
}

/// They begin at the same time. Only the last one goes on, and it can be reached.
#[test]
fn several_processes_take_over_one_after_the_other() {
    in_netns(|| {
        let dir = tempfile::tempdir().unwrap();
        let mut first = running(dir.path());
        let mut others = Vec::new();
        for _ in 0..4 {
            let mut command = Command::new(env!("CARGO_BIN_EXE_flannel-udp"));
            let child = command.arg(&first.socket).stdin(Stdio::null()).spawn();
            others.push(child.unwrap());
        }
        let running = |others: &mut Vec<Child>| {
            others
                .iter_mut()
                .map(|child| usize::from(child.try_wait().unwrap().is_none()))
                .sum::<usize>()
        };
        assert!(first.ended().success());
        eventually(PATIENCE, || running(&mut others) == 1, || "several go on");
        // It has not taken the name of the socket yet, perhaps.
        let pid = || Some(Client::connect(&first.socket).ok()?.process().ok()?.pid);
        let pid = eventually(PATIENCE, pid, || "nobody answers");
        let last = others.iter_mut().find(|child| child.id() == pid).unwrap();
        assert_eq!(last.try_wait().unwrap(), None, "the one that answers goes on");
        assert_works(&first);
        first.client().end().unwrap();
        for mut child in others {
            assert!(child.wait().unwrap().success());
        }
    });
}

/// It may be swapped out. Nobody knows its version then.
#[test]
fn a_process_that_does_not_answer_is_not_ended() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("udp/socket");
    std::fs::create_dir(dir.path().join("udp")).unwrap();
    let listener = UnixListener::bind(&socket).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_flannel-udp"));
    let mut new = command.arg(&socket).stdin(Stdio::null()).spawn().unwrap();
    let (mut stream, _) = listener.accept().unwrap();
    let mut lines = BufReader::new(&mut stream);
    lines.read_line(&mut String::new()).unwrap();
    drop(stream);
    assert!(!eventually(PATIENCE, || new.try_wait().unwrap(), || "it goes on").success());
    listener.set_nonblocking(true).unwrap();
    assert!(listener.accept().is_err(), "it asks for the end");
}

/// The limit of the second process is too low for the descriptors of the first.
#[test]
fn a_process_goes_on_when_descriptors_do_not_arrive() {
    in_netns(|| {
        let dir = tempfile::tempdir().unwrap();
        let process = running(dir.path());
        let script = format!("ulimit -n 9; exec {} $0", env!("CARGO_BIN_EXE_flannel-udp"));
        let mut command = Command::new("sh");
        command.args(["-c", &script]).arg(&process.socket).stderr(Stdio::piped());
        let output = command.output().unwrap();
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && error.contains("of 9 descriptors"), "{error}");
        assert_works(&process);
    });
}

/// Two processes would take each other's packets.
#[test]
fn a_device_has_one_process() {
    in_netns(|| {
        let dir = tempfile::tempdir().unwrap();
        let other = tempfile::tempdir().unwrap();
        let first = running(dir.path());
        let second = Process::start(other.path());
        let error = second.client().ask(&Request::Start(options("flannel0"))).unwrap_err();
        assert!(error.to_string().contains("another data plane has it"), "{error}");
        assert_works(&first);
        let elsewhere = Options { port: 8286, ..options("flannel1") };
        second.client().ask(&Request::Start(elsewhere)).unwrap();
        drop(first);
        second.client().ask(&Request::Start(options("flannel0"))).unwrap();
    });
}

#[test]
fn a_process_with_another_protocol_is_ended() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("udp/socket");
    std::fs::create_dir(dir.path().join("udp")).unwrap();
    let listener = UnixListener::bind(&socket).unwrap();
    let old = std::thread::spawn(move || {
        // The first connection asks for the process, the second ends it.
        let status = r#"{"status":{"version":999,"program":"9.9.9","pid":1,"other":7}}"#;
        ["\"status\"\n", "\"end\"\n"].map(|expected| {
            let (mut stream, _) = listener.accept().unwrap();
            let mut line = String::new();
            BufReader::new(stream.try_clone().unwrap()).read_line(&mut line).unwrap();
            let answer = if expected == "\"end\"\n" { "\"done\"" } else { status };
            writeln!(stream, "{answer}").unwrap();
            (line, expected)
        })
    });
    // The file of the socket stays, as after a kill.
    let mut command = Command::new(env!("CARGO_BIN_EXE_flannel-udp"));
    let mut new = command.arg(&socket).stdin(Stdio::null()).spawn().unwrap();
    for (line, expected) in old.join().unwrap() {
        assert_eq!(line, expected);
    }
    let (process, client) = eventually(
        PATIENCE,
        || {
            let mut client = Client::connect(&socket).ok()?;
            Some((client.process().ok()?, client))
        },
        || "no answer",
    );
    assert_eq!((process.version, process.pid), (VERSION, new.id()));
    client.end().unwrap();
    assert!(eventually(PATIENCE, || new.try_wait().unwrap(), || "it goes on").success());
}

/// A stranger of the same user tries all the time to share the port. Each datagram is counted by
/// the old process or by the new one.
#[test]
fn a_stranger_gets_no_datagram_during_a_hand_over() {
    in_netns(|| {
        ip("link set lo up");
        let dir = tempfile::tempdir().unwrap();
        let mut process = Process::start(dir.path());
        let local = vec![[127, 0, 0, 1].into(), std::net::Ipv6Addr::LOCALHOST.into()];
        let options = Options { local: local.clone(), queues: Some(4), ..options("flannel0") };
        process.client().ask(&Request::Start(options.clone())).unwrap();
        let stops = AtomicBool::new(false);
        let sent = std::thread::scope(|scope| {
            let steal = || {
                while !stops.load(Ordering::Relaxed) {
                    for at in &local {
                        assert_eq!(share(*at).err(), Some(Errno::EADDRINUSE), "{at}");
                    }
                }
            };
            let send = || {
                let mut sent = 0;
                while !stops.load(Ordering::Relaxed) {
                    for at in &local {
                        let socket = UdpSocket::bind((*at, 0)).unwrap();
                        socket.send_to(b"x", (*at, 8285)).unwrap();
                        sent += 1;
                    }
                    // The buffers are not full while nobody reads them.
                    std::thread::park_timeout(Duration::from_micros(100));
                }
                sent
            };
            let stealing = scope.spawn(steal);
            let sending = scope.spawn(send);
            for _ in 0..5 {
                let next = Process::start(dir.path());
                assert!(process.ended().success());
                process = next;
            }
            let before = process.status().counts.bad_datagram;
            let now = || process.status().counts.bad_datagram;
            eventually(PATIENCE, || now() > before, || "no datagram arrives any more");
            stops.store(true, Ordering::Relaxed);
            stealing.join().unwrap();
            sending.join().unwrap()
        });
        let counted = || process.status().counts.bad_datagram;
        eventually(PATIENCE, || counted() == sent, || format!("{} of {sent}", counted()));
        assert_eq!(process.status().options, Some(options));
    });
}

/// Binds a socket that shares the port of the data plane.
fn share(at: IpAddr) -> nix::Result<OwnedFd> {
    let family = if at.is_ipv6() { AddressFamily::Inet6 } else { AddressFamily::Inet };
    let socket = socket(family, SockType::Datagram, SockFlag::SOCK_CLOEXEC, None)?;
    setsockopt(&socket, sockopt::ReusePort, &true)?;
    bind(socket.as_raw_fd(), &SockaddrStorage::from(SocketAddr::new(at, 8285)))?;
    Ok(socket)
}

/// The variable by which the stranger knows its part, and its test.
const HOLDS: &str = "FLANNEL_UDP_HOLDS";
const HOLDING: &str =
    "hand_over::a_stranger_with_the_name_of_the_lock_does_not_keep_a_data_plane_down";

/// Holds the names of sockets of both kinds until the end of its input.
fn hold_the_name() {
    let address = UnixAddr::from_abstract_name("flannel-udp/flannel0").unwrap();
    let _stream = UnixListener::bind_addr(&address).unwrap();
    let _datagram = UnixDatagram::bind_addr(&address).unwrap();
    println!("\nheld");
    std::io::stdin().read_to_end(&mut Vec::new()).unwrap();
}

/// A process without a queue of the device has the name of the lock.
#[test]
fn a_stranger_with_the_name_of_the_lock_does_not_keep_a_data_plane_down() {
    if std::env::var_os(HOLDS).is_some() {
        return hold_the_name();
    }
    in_netns(|| {
        let dir = tempfile::tempdir().unwrap();
        let mut command = Command::new("setpriv");
        command.args(["--bounding-set=-all", "--inh-caps=-all"]);
        command.arg(std::env::current_exe().unwrap());
        command.args([HOLDING, "--exact", "--nocapture"]).env(HOLDS, "1");
        let mut stranger = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(stranger.stdout.take().unwrap()).lines();
        assert!(lines.any(|line| line.unwrap() == "held"));
        for _ in 0..2 {
            let process = Process::start(dir.path());
            process.client().ask(&Request::Start(options("flannel0"))).unwrap();
            // The device has one process, also if another one has the name.
            let other = tempfile::tempdir().unwrap();
            let second = Process::start(other.path());
            let error = second.client().ask(&Request::Start(options("flannel0"))).unwrap_err();
            assert!(error.to_string().contains("another data plane has it"), "{error}");
        }
        drop(stranger.stdin.take());
        stranger.wait().unwrap();
    });
}

/// Lists of processes show it, also if it was started by another name.
#[test]
fn the_process_has_a_name_of_its_own() {
    let dir = tempfile::tempdir().unwrap();
    let copy = dir.path().join("exe");
    // A copy by this process fails here and there: a child that another test starts meanwhile has
    // the file open, and the kernel runs no file that a process may write to.
    let program = env!("CARGO_BIN_EXE_flannel-udp");
    let copied = Command::new("cp").arg(program).arg(&copy).status().unwrap();
    assert!(copied.success());
    let socket = dir.path().join("udp/socket");
    let mut child = Command::new(&copy).arg(&socket).stdin(Stdio::null()).spawn().unwrap();
    let connected = eventually(PATIENCE, || Client::connect(&socket).ok(), || "no socket");
    let name = std::fs::read_to_string(format!("/proc/{}/comm", child.id())).unwrap();
    assert_eq!(name, "flannel-udp\n");
    connected.end().unwrap();
    child.wait().unwrap();
}
