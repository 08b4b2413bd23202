//! Hosts of one cluster are upgraded from an older daemon and downgraded to it, one by one, while
//! packets flow.
//!
//! `FLANNEL_OLD_LAB` is the program `lab` of the older version; by default it is this version. Each
//! host keeps its subnet, and no packet is lost. A host whose state directory the older version
//! made keeps its lease in the store unchanged. An older version may not read a state file of this
//! version. Then it takes over its lease by its public address.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use flannel_core::address::Family;
use flannel_lab::testing::as_root;
use flannel_lab::testing::stream::Traffic;
use flannel_lab::{Host, Lab, Signal};
use serde_json::Value;

const PATIENCE: Duration = Duration::from_secs(120);
const NEW: &str = env!("CARGO_BIN_EXE_lab");

/// The older program.
fn old() -> PathBuf {
    std::env::var_os("FLANNEL_OLD_LAB").map_or_else(|| NEW.into(), PathBuf::from)
}

/// The store of a cluster.
enum Store {
    Directory,
    Etcd(Etcd),
}

/// An etcd in the switch's namespace.
struct Etcd {
    child: Child,
    endpoint: String,
    _dir: tempfile::TempDir,
}

impl Etcd {
    /// Starts it and writes the lab's network config.
    fn start(lab: &Lab) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let address = lab.switch().addresses().v4.unwrap();
        let endpoint = format!("http://{address}:2379");
        let peer = format!("http://{address}:2380");
        let program = std::env::var_os("ETCD").unwrap_or_else(|| "etcd".into());
        let mut command = Command::new(program);
        command.arg("--data-dir").arg(dir.path()).args(["--log-level", "error"]);
        command.args(["--listen-client-urls", &endpoint, "--advertise-client-urls", &endpoint]);
        command.args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer]);
        command.arg("--initial-cluster").arg(format!("default={peer}"));
        command.stdout(Stdio::null()).stderr(Stdio::null());
        let child = lab.switch().namespace().spawn(&mut command).unwrap();
        let etcd = Self { child, endpoint, _dir: dir };
        let config = std::fs::read_to_string(lab.registry().join("config")).unwrap();
        wait_until(
            || etcd.ctl(lab, &["put", "/coreos.com/network/config", &config]).is_some(),
            || "etcd does not answer".to_owned(),
        );
        etcd
    }

    fn ctl(&self, lab: &Lab, args: &[&str]) -> Option<String> {
        let program = std::env::var_os("ETCDCTL").unwrap_or_else(|| "etcdctl".into());
        let mut command = Command::new(program);
        command.env("ETCDCTL_API", "3").args(["--endpoints", &self.endpoint]).args(args);
        let output = lab.switch().namespace().output(&mut command).unwrap();
        output.status.success().then(|| String::from_utf8(output.stdout).unwrap())
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Store {
    /// The options of daemons that use it.
    fn options(&self) -> Vec<&str> {
        match self {
            Self::Directory => Vec::new(),
            Self::Etcd(etcd) => vec!["--registry", "etcd", "--etcd-endpoints", &etcd.endpoint],
        }
    }

    /// The keys of all leases, with their values in the store.
    fn leases(&self, lab: &Lab) -> BTreeMap<String, String> {
        match self {
            Self::Directory => {
                let files = std::fs::read_dir(lab.registry().join("subnets")).unwrap();
                let files = files.map(|file| file.unwrap().path()).filter(|file| file.is_file());
                let name = |file: &Path| file.file_name().unwrap().to_str().unwrap().to_owned();
                files.map(|f| (name(&f), std::fs::read_to_string(&f).unwrap())).collect()
            }
            // With the revision of its last write and its etcd lease.
            Self::Etcd(etcd) => {
                let prefix = "/coreos.com/network/subnets/";
                let text = etcd.ctl(lab, &["get", "--prefix", prefix, "-w", "json"]).unwrap();
                let value: Value = serde_json::from_str(&text).unwrap();
                let pairs = value["kvs"].as_array().unwrap().iter();
                pairs.map(|pair| (pair["key"].to_string(), pair.to_string())).collect()
            }
        }
    }
}

fn wait_until(mut condition: impl FnMut() -> bool, otherwise: impl Fn() -> String) {
    let deadline = Instant::now() + PATIENCE;
    while !condition() {
        assert!(Instant::now() < deadline, "{}", otherwise());
        std::thread::park_timeout(Duration::from_millis(5));
    }
}

/// The number of lines in the host's log that report all peers in place.
fn in_sync(host: &Host) -> usize {
    host.log().unwrap().matches("in sync peers=2").count()
}

fn wait_for_sync(host: &Host, times: usize) {
    wait_until(
        || {
            host.check_daemon().unwrap();
            in_sync(host) >= times
        },
        || format!("{}: not in sync:\n{}", host.name(), host.log().unwrap()),
    );
}

/// The version that starts the cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum First {
    Old,
    New,
}

fn change_versions(backend: &str, etcd: bool, first: First) {
    let lab = Lab::builder().program(NEW).families(Family::BOTH).backend(backend).start().unwrap();
    let store = if etcd { Store::Etcd(Etcd::start(&lab)) } else { Store::Directory };
    let (before, after) = match first {
        First::Old => (old(), PathBuf::from(NEW)),
        First::New => (PathBuf::from(NEW), old()),
    };
    for host in lab.hosts() {
        host.start_daemon_of(&before, &store.options()).unwrap();
    }
    let matrix = lab.wait_until_reachable(PATIENCE).unwrap_or_else(|error| panic!("{error}"));
    assert!(matrix.is_complete(), "{:#?}", matrix.failures().collect::<Vec<_>>());
    lab.hosts().iter().for_each(|host| wait_for_sync(host, 1));
    let envs = || lab.hosts().iter().map(|host| host.subnet_env().unwrap()).collect::<Vec<_>>();
    let leases = store.leases(&lab);
    let subnets = envs();
    assert_eq!(leases.len(), 3, "{leases:?}");

    let traffic = Traffic::start(&lab);
    // First an ordinary stop, then SIGKILL.
    for signal in [Signal::SIGTERM, Signal::SIGKILL] {
        for program in [&after, &before] {
            for host in lab.hosts() {
                let syncs = in_sync(host);
                host.stop_daemon(signal).unwrap().unwrap();
                traffic.wait_for_arrivals();
                host.start_daemon_of(program, &store.options()).unwrap();
                wait_for_sync(host, syncs + 1);
                traffic.wait_for_arrivals();
                let now = store.leases(&lab);
                assert!(now.keys().eq(leases.keys()), "{}: {now:#?}", host.name());
                if first == First::Old {
                    assert_eq!(now, leases, "{}: {}", host.name(), program.display());
                }
            }
            // All hosts have this version now, and each knows all peers.
            assert_eq!(envs(), subnets);
            assert!(lab.matrix(PATIENCE).unwrap().is_complete());
        }
    }
    let (sent, lost) = traffic.end();
    let logs: String = lab.hosts().iter().map(|host| host.log().unwrap()).collect();
    println!("{backend}, etcd {etcd}, {first:?} first: {} of {sent} packets lost", lost.len());
    assert!(lost.is_empty(), "{} of {sent} packets: {lost:#?}\n{logs}", lost.len());
    // 12 streams, 12 changes of versions, twice 25 packets each at least.
    assert!(sent >= 12 * 12 * 50, "{sent} packets are too few for the test");
}

macro_rules! tests {
    ($($name:ident: $backend:literal, $etcd:literal, $first:ident;)*) => {$(
        #[test]
        fn $name() {
            as_root(|| change_versions($backend, $etcd, First::$first));
        }
    )*};
}

tests! {
    vxlan_hosts_change_versions_on_a_directory: "vxlan", false, Old;
    vxlan_hosts_change_versions_on_etcd: "vxlan", true, Old;
    host_gw_hosts_change_versions_on_a_directory: "host-gw", false, Old;
    host_gw_hosts_change_versions_on_etcd: "host-gw", true, Old;
    new_vxlan_hosts_change_versions_on_etcd: "vxlan", true, New;
    new_host_gw_hosts_change_versions_on_a_directory: "host-gw", false, New;
}
