//! Hosts, the switch that joins them, and the daemons on them.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use flannel_netlink::testing::{Netns, ip};

use super::server::Etcd;

/// Daemons take subnets up to 10.1.99.0. Tests write leases of peers above that range.
pub(crate) const CONFIG: &str = r#"{"Network":"10.1.0.0/16","SubnetMin":"10.1.1.0",
    "SubnetMax":"10.1.99.0","Backend":{"Type":"vxlan"}}"#;
pub(crate) const PREFIX: &str = "/coreos.com/network";
/// The address of etcd.
pub(crate) const SWITCH: &str = "192.0.2.254";

/// A switch in the namespace of the calling test, where etcd is too.
pub(crate) fn switch() {
    ip("link add br0 type bridge stp_state 0 mcast_snooping 0");
    ip(&format!("address add {SWITCH}/24 dev br0"));
    ip("link set br0 up");
}

/// An etcd that the hosts reach, with a network config and three peers that have no daemon.
pub(crate) async fn etcd_with_peers() -> Etcd {
    let etcd = Etcd::spawn_on(SWITCH, "http", &[]);
    etcd.ready().await;
    fill(&etcd).await;
    etcd
}

pub(crate) async fn fill(etcd: &Etcd) {
    etcd.put(&format!("{PREFIX}/config"), CONFIG).await;
    for n in [101, 102, 103] {
        put_peer(etcd, n, n).await;
    }
}

/// The lease `10.1.<n>.0-24` of a peer at `192.0.2.<public>`.
pub(crate) async fn put_peer(etcd: &Etcd, n: u8, public: u8) {
    let value = format!(
        r#"{{"PublicIP":"192.0.2.{public}","PublicIPv6":null,"BackendType":"vxlan",
            "BackendData":{{"VNI":1,"VtepMAC":"{}"}}}}"#,
        mac(n)
    );
    etcd.put(&peer_key(n), &value).await;
}

pub(crate) fn peer_key(n: u8) -> String {
    format!("{PREFIX}/subnets/10.1.{n}.0-24")
}

pub(crate) fn mac(n: u8) -> String {
    format!("0a:00:00:00:00:{n:02x}")
}

pub(crate) async fn delete(etcd: &Etcd, key: &str) {
    etcd.client().await.delete(key, None).await.unwrap();
}

/// A host on the switch, `192.0.2.<n>`.
pub(crate) struct Host {
    pub(crate) netns: Netns,
    pub(crate) n: u8,
    pub(crate) dir: tempfile::TempDir,
}

impl Host {
    pub(crate) fn new(n: u8) -> Self {
        let netns = Netns::new().unwrap();
        let path = netns.path();
        ip(&format!("link add port-{n} type veth peer name eth0 netns {}", path.display()));
        ip(&format!("link set port-{n} master br0 up"));
        netns.run(|| {
            ip(&format!("address add 192.0.2.{n}/24 dev eth0"));
            ip("link set eth0 up");
        });
        Self { netns, n, dir: tempfile::tempdir().unwrap() }
    }

    /// Drops packets on the way to the switch silently.
    pub(crate) fn cut(&self) {
        ip(&format!("link set port-{} nomaster", self.n));
    }

    pub(crate) fn repair(&self) {
        ip(&format!("link set port-{} master br0", self.n));
    }

    pub(crate) fn ip(&self, args: &str) -> String {
        self.netns.run(|| ip(args))
    }

    pub(crate) fn public(&self) -> String {
        format!("192.0.2.{}", self.n)
    }

    pub(crate) fn subnet_file(&self) -> PathBuf {
        self.dir.path().join("run/subnet.env")
    }

    pub(crate) fn cache(&self) -> PathBuf {
        self.dir.path().join("state/leases")
    }

    /// The subnet in the subnet file, such as `10.1.5.0`. Waits for the file.
    pub(crate) fn subnet(&self) -> String {
        let begin = Instant::now();
        let text = loop {
            match fs::read_to_string(self.subnet_file()) {
                Ok(text) => break text,
                Err(error) => {
                    assert!(begin.elapsed() < Duration::from_secs(20), "no subnet file: {error}");
                }
            }
            std::thread::yield_now();
        };
        let subnet = text.lines().find_map(|line| line.strip_prefix("FLANNEL_SUBNET=")).unwrap();
        format!("{}.0", subnet.strip_suffix(".1/24").unwrap())
    }

    /// Status and body of a request to the daemon's control socket.
    pub(crate) fn request(&self, target: &str) -> (u16, String) {
        let mut stream = UnixStream::connect(self.dir.path().join("run/flanneld.sock")).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        write!(stream, "GET {target} HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned())
    }

    pub(crate) fn mark(&self) -> String {
        let text = fs::read_to_string(self.dir.path().join("state/mark")).unwrap();
        text.lines().last().unwrap().to_owned()
    }

    /// Starts the daemon with these options and variables.
    pub(crate) fn start_with(&self, args: &[&str], env: &[(&str, &str)]) -> Daemon {
        let mut command = command(self.dir.path());
        command.arg("-iface=eth0").args(args).envs(env.iter().copied());
        self.netns.run(|| Daemon::start(&mut command))
    }

    pub(crate) fn start(&self, endpoints: &str) -> Daemon {
        self.start_with(&["--etcd-endpoints", endpoints], &[])
    }
}

fn command(dir: &Path) -> Command {
    let program =
        std::env::var_os("FLANNELD").unwrap_or_else(|| env!("CARGO_BIN_EXE_flanneld").into());
    let mut command = Command::new(program);
    command.arg("--subnet-file").arg(dir.join("run/subnet.env"));
    command.arg("--state-dir").arg(dir.join("state"));
    command
}

/// A daemon in the namespace of the switch, where etcd listens on `lo`.
pub(crate) fn start_on_switch(dir: &Path, args: &[&str]) -> Daemon {
    Daemon::start(command(dir).arg("-iface=br0").args(args))
}

pub(crate) struct Daemon {
    child: Child,
    log: Arc<Mutex<String>>,
}

impl Daemon {
    pub(crate) fn start(command: &mut Command) -> Self {
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let stderr = child.stderr.take().unwrap();
        let log = Arc::default();
        collect(stderr, &log);
        Self { child, log }
    }

    pub(crate) fn log(&self) -> String {
        self.log.lock().unwrap().clone()
    }

    /// The number of log lines with a text.
    pub(crate) fn log_count(&self, text: &str) -> usize {
        self.log().matches(text).count()
    }

    pub(crate) async fn wait_for_log(&self, text: &str) {
        until(
            60,
            || self.log_count(text) > 0,
            || format!("{text:?} was never logged:\n{}", self.log()),
        )
        .await;
    }

    pub(crate) fn signal(&self, signal: nix::sys::signal::Signal) {
        let pid = nix::unistd::Pid::from_raw(self.child.id().cast_signed());
        nix::sys::signal::kill(pid, signal).unwrap();
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn is_running(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }

    /// Kills it.
    pub(crate) fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    pub(crate) async fn ended(&mut self) -> ExitStatus {
        let log = Arc::clone(&self.log);
        let over = || self.child.try_wait().unwrap().is_some();
        until(60, over, || format!("the daemon still runs:\n{}", log.lock().unwrap())).await;
        self.child.wait().unwrap()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Reads everything into a text, on another thread.
pub(crate) fn collect(mut from: impl Read + Send + 'static, into: &Arc<Mutex<String>>) {
    let into = Arc::clone(into);
    std::thread::spawn(move || {
        let mut buffer = [0; 4096];
        while let Ok(len @ 1..) = from.read(&mut buffer) {
            into.lock().unwrap().push_str(&String::from_utf8_lossy(&buffer[..len]));
        }
    });
}

pub(crate) async fn until(
    seconds: u64,
    mut condition: impl FnMut() -> bool,
    otherwise: impl Fn() -> String,
) {
    test_support::eventually_async(Duration::from_secs(seconds), async || condition(), otherwise)
        .await;
}
