//! Tests with strace: the processes of an idle daemon, and that repairs do not wait for the disk.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use flannel_netlink::testing::{in_netns, ip};
use nix::sys::signal::Signal;

use crate::running::{Daemon, wait_until};

/// `--iptables-resync`, which counts seconds.
const RESYNC: Duration = Duration::from_secs(1);
const PERIODS: u32 = 3;

/// A daemon under strace, on a host with an uplink, in the namespace of the calling test.
struct Traced {
    dir: tempfile::TempDir,
    daemon: Daemon,
}

impl Traced {
    fn start(config: &str) -> Self {
        ip("link add eth0 type veth peer name wire");
        ip("link set wire up");
        ip("address add 192.0.2.1/24 dev eth0");
        ip("link set eth0 up");
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join("network/subnets")).unwrap();
        fs::write(dir.path().join("network/config"), config).unwrap();
        let peer = r#"{"PublicIP":"192.0.2.7","BackendType":"vxlan",
            "BackendData":{"VNI":1,"VtepMAC":"0a:00:00:00:00:07"}}"#;
        fs::write(dir.path().join("network/subnets/10.1.7.0-24"), peer).unwrap();
        let program =
            std::env::var_os("FLANNELD").unwrap_or_else(|| env!("CARGO_BIN_EXE_flanneld").into());
        // With -D strace is the background process, and ends with the daemon.
        let mut command = Command::new("strace");
        command.args([
            "-D",
            "-f",
            "-qq",
            "-e",
            "trace=process",
            "-e",
            "signal=none",
            "-s",
            "256",
            "-o",
        ]);
        command.arg(dir.path().join("trace")).arg(program);
        command.arg("--registry").arg(format!("dir:{}", dir.path().join("network").display()));
        command.arg("--subnet-file").arg(dir.path().join("subnet.env"));
        command.arg("--state-dir").arg(dir.path().join("state"));
        command.args(["--iface=eth0", "--ip-masq", "--iptables-resync=1"]);
        let traced = Self { daemon: Daemon::start(&mut command), dir };
        traced.daemon.wait_for_log("in sync");
        wait_until(
            || traced.request("/readyz").starts_with("HTTP/1.1 200"),
            || format!("{}\n{}", traced.request("/readyz"), traced.daemon.log()),
        );
        traced.settle();
        traced
    }

    /// Waits until the start is over, with its single check for rules of other modes.
    fn settle(&self) {
        let mut processes = 0;
        let mut since = Instant::now();
        wait_until(
            || {
                let now = started(&self.trace()).len();
                if now != processes {
                    processes = now;
                    since = Instant::now();
                }
                since.elapsed() > RESYNC * 3 / 2
            },
            || format!("{}\n{}", self.trace(), self.daemon.log()),
        );
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn request(&self, target: &str) -> String {
        let mut stream = UnixStream::connect(self.path("flanneld.sock")).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        write!(stream, "GET {target} HTTP/1.1\r\n\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    }

    fn trace(&self) -> String {
        fs::read_to_string(self.path("trace")).unwrap()
    }

    /// Ends it as systemd does.
    fn stop(mut self) {
        self.daemon.signal(Signal::SIGTERM);
        assert_eq!(self.daemon.ended().code(), Some(0));
    }

    /// The processes that were started within `periods`, while status and metrics are requested all
    /// the time.
    fn started_in(&self, periods: u32) -> Vec<String> {
        let begin = Instant::now();
        let mut looks = 0;
        let before = started(&self.trace()).len();
        // There is no event to wait for.
        wait_until(
            || {
                assert!(self.request("/v1/status").contains("\"ready\":true"));
                assert!(self.request("/metrics").contains("flannel_ready 1"));
                looks += 1;
                begin.elapsed() >= RESYNC * periods
            },
            || self.daemon.log(),
        );
        assert!(looks > 3, "{looks}");
        started(&self.trace()).split_off(before)
    }
}

/// Checks that no process is started in one of three measurements. The others may contain the end
/// of a slow start, late output of strace, or the search for rules of other modes every 30 s. A
/// process that is started in every period is in all of them.
fn assert_starts_nothing(traced: &Traced) {
    let seen: Vec<_> =
        (0..3).map(|_| traced.started_in(PERIODS)).take_while(|all| !all.is_empty()).collect();
    assert!(seen.len() < 3, "{seen:#?}");
}

/// The programs that were executed, and `fork` for each new process, without threads.
fn started(trace: &str) -> Vec<String> {
    trace
        .lines()
        .filter_map(|line| {
            let call = line.split_once(' ')?.1.trim_start();
            if let Some(rest) = call.strip_prefix("execve(\"") {
                let program = rest.split('"').next()?;
                return Some(program.rsplit('/').next()?.to_owned());
            }
            let makes =
                ["clone(", "clone3(", "fork(", "vfork("].iter().any(|name| call.starts_with(name));
            (makes && !call.contains("CLONE_THREAD")).then(|| "fork".to_owned())
        })
        .collect()
}

#[test]
fn threads_are_not_counted_as_processes() {
    let trace = "7  execve(\"/usr/sbin/iptables-save\", [\"x\"], 0x7 /* 1 var */) = 0\n\
        7  clone3({flags=CLONE_VM|CLONE_THREAD, exit_signal=0} <unfinished ...>\n\
        7  <... clone3 resumed> => {parent_tid=[8]}, 88) = 8\n\
        7  clone3({flags=CLONE_VM|CLONE_VFORK, exit_signal=SIGCHLD}, 88) = 9\n\
        9  exit_group(0) = ?\n";
    assert_eq!(started(trace), ["iptables-save", "fork"]);
}

#[test]
fn with_nftables_no_process_is_started() {
    in_netns(|| {
        // Reading these tables starts a process, so it is not done in every period.
        let old = Command::new("iptables-legacy").args(["-P", "FORWARD", "DROP"]).output().unwrap();
        assert!(old.status.success(), "{old:?}");
        let traced = Traced::start(
            r#"{"Network":"10.1.0.0/16","SubnetMin":"10.1.128.0","SubnetMax":"10.1.191.0",
                "EnableNFTables":true,"Backend":{"Type":"vxlan"}}"#,
        );
        assert!(traced.request("/v1/status").contains("iptables-legacy"));
        assert!(
            started(&traced.trace()).contains(&"iptables-legacy-save".to_owned()),
            "{}",
            traced.trace()
        );
        assert_starts_nothing(&traced);
        traced.stop();
    });
}

#[test]
fn with_iptables_no_process_is_started() {
    in_netns(|| {
        let traced = Traced::start(
            r#"{"Network":"10.1.0.0/16","SubnetMin":"10.1.128.0","SubnetMax":"10.1.191.0",
                "Backend":{"Type":"vxlan"}}"#,
        );
        assert!(
            started(&traced.trace()).contains(&"iptables-save".to_owned()),
            "{}",
            traced.trace()
        );
        assert_starts_nothing(&traced);
        traced.stop();
    });
}

/// The disk takes 15 s for each file.
#[test]
fn a_busy_disk_does_not_delay_repairs() {
    in_netns(|| {
        ip("link add eth0 type veth peer name wire");
        ip("link set wire up");
        ip("address add 192.0.2.1/24 dev eth0");
        ip("link set eth0 up");
        let dir = tempfile::tempdir().unwrap();
        let leases = dir.path().join("network/subnets");
        fs::create_dir_all(&leases).unwrap();
        let config = r#"{"Network":"10.1.0.0/16","Backend":{"Type":"host-gw"}}"#;
        fs::write(dir.path().join("network/config"), config).unwrap();
        for (subnet, public) in [("10.1.4.0-24", "192.0.2.1"), ("10.1.7.0-24", "192.0.2.7")] {
            let lease = format!(r#"{{"PublicIP":"{public}","BackendType":"host-gw"}}"#);
            fs::write(leases.join(subnet), lease).unwrap();
        }
        // The files of an earlier run are there, so the daemon writes nothing before the subnet
        // file.
        let state = dir.path().join("state");
        fs::create_dir(&state).unwrap();
        fs::write(state.join("mark"), "00000000000000ab\n").unwrap();
        fs::write(state.join("networks"), "10.1.0.0/16\n").unwrap();
        let store = format!("dir:{}?assign=static", dir.path().join("network").display());
        let proven = format!(r#"{{"store":"{store}","config":{config}}}"#);
        fs::write(state.join("config"), proven).unwrap();
        let backend = r#"{"lease_type":"host-gw","offered":true,"backend":{"Type":"host-gw"}}"#;
        fs::write(state.join("backends"), format!(r#"{{"backends":[{backend}]}}"#)).unwrap();
        // With -D strace is the background process, and ends with the daemon.
        let mut command = Command::new("strace");
        command.args(["-D", "-f", "-qq", "-e", "trace=fsync", "-e", "signal=none", "-o"]);
        command.arg(dir.path().join("trace"));
        command.args(["-e", "inject=fsync:delay_enter=15000000", env!("CARGO_BIN_EXE_flanneld")]);
        command
            .arg("--registry")
            .arg(format!("dir:{}?assign=static", dir.path().join("network").display()));
        command.arg("--subnet-file").arg(dir.path().join("run/subnet.env"));
        command.arg("--state-dir").arg(&state);
        command.arg("--iface=eth0");
        fs::create_dir(dir.path().join("run")).unwrap();
        let daemon = Daemon::start(&mut command);
        daemon.wait_for_log("in sync peers=1");
        // The daemon writes the subnet file, and waits for the disk.
        let writes = || {
            let names = fs::read_dir(dir.path().join("run"))
                .unwrap()
                .map(|entry| entry.unwrap().file_name());
            names.filter(|name| name.to_string_lossy().contains("subnet.env")).collect::<Vec<_>>()
        };
        wait_until(|| !writes().is_empty(), || daemon.log());
        let began = writes();
        assert!(began.len() == 1 && began[0] != "subnet.env", "{began:?}\n{}", daemon.log());
        let shown = || ip("route show 10.1.7.0/24");
        assert!(shown().contains("via 192.0.2.7"), "{}", shown());
        ip("route del 10.1.7.0/24");
        wait_until(|| !shown().is_empty(), || daemon.log());
        assert_eq!(writes(), began, "the disk was faster: {}", daemon.log());
    });
}
