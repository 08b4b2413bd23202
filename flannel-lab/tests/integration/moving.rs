//! A cluster moves from one backend to another while packets and TCP connections go between all
//! pods.

use std::fs;
use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use flannel_core::address::Family;
use flannel_lab::testing::as_root;
use flannel_lab::testing::stream::Traffic;
use flannel_lab::{Host, Lab, Namespace, Signal};
use serde_json::{Value, json};
use test_support::eventually;

const PATIENCE: Duration = Duration::from_secs(60);
/// The devices of an unused backend stay for more than a minute.
const DEVICES: Duration = Duration::from_secs(150);
/// Larger than any packet, so that a connection depends on the MTU of the path.
const CHUNK: usize = 16 << 10;

/// A cluster whose hosts have configs of their own, as during a rolling restart.
struct Cluster {
    lab: Lab,
}

impl Cluster {
    fn start(backend: &str) -> Self {
        let program = env!("CARGO_BIN_EXE_lab");
        let lab = Lab::builder().program(program).families(Family::BOTH).backend(backend);
        let cluster = Self { lab: lab.start().unwrap() };
        for host in cluster.lab.hosts() {
            let dir = cluster.registry(host);
            fs::create_dir_all(&dir).unwrap();
            fs::create_dir_all(cluster.lab.registry().join("subnets")).unwrap();
            std::os::unix::fs::symlink(cluster.lab.registry().join("subnets"), dir.join("subnets"))
                .unwrap();
            cluster.configure(host, backend);
            cluster.start_daemon(host);
        }
        let matrix = cluster.lab.wait_until_reachable(PATIENCE).unwrap_or_else(|e| panic!("{e}"));
        assert!(matrix.is_complete(), "{}", cluster.logs());
        cluster
    }

    fn registry(&self, host: &Host) -> PathBuf {
        self.lab.dir().join(format!("registry-{}", host.number()))
    }

    fn start_daemon(&self, host: &Host) {
        host.start_daemon_with(&["--registry", &format!("dir:{}", self.registry(host).display())])
            .unwrap();
    }

    /// Gives a host a config with this backend.
    fn configure(&self, host: &Host, backend: &str) {
        let text = fs::read_to_string(self.lab.registry().join("config")).unwrap();
        let mut config: Value = serde_json::from_str(&text).unwrap();
        config["Backend"] = json!({ "Type": backend });
        let (file, new) =
            (self.registry(host).join("config"), self.registry(host).join("config.new"));
        fs::write(&new, config.to_string()).unwrap();
        fs::rename(&new, &file).unwrap();
    }

    fn logs(&self) -> String {
        let log = |host: &Host| format!("--- {}\n{}", host.name(), host.log().unwrap());
        self.lab.hosts().iter().map(log).collect()
    }

    /// The backend types in the lease of a host, the preferred one first.
    fn offers(&self, host: &Host) -> Vec<String> {
        let address = host.addresses().v4.unwrap().to_string();
        let files = fs::read_dir(self.lab.registry().join("subnets")).unwrap();
        let read =
            |path: PathBuf| serde_json::from_str::<Value>(&fs::read_to_string(path).ok()?).ok();
        let files = files.map(|file| file.unwrap().path()).filter(|file| file.is_file());
        let mut leases = files.filter_map(read);
        let Some(lease) = leases.find(|lease| lease["PublicIP"] == *address) else {
            return Vec::new();
        };
        let others = lease["OtherOffers"].as_array().cloned().unwrap_or_default();
        let all = [&lease].into_iter().chain(&others);
        all.map(|offer| offer["BackendType"].as_str().unwrap().to_owned()).collect()
    }

    fn wait_for_offers(&self, host: &Host, expected: &[&str]) {
        eventually(
            PATIENCE,
            || {
                host.check_daemon().unwrap();
                self.offers(host) == expected
            },
            || format!("{}: {:?}\n{}", host.name(), self.offers(host), self.logs()),
        );
    }

    /// Runs `flannelctl --json` on a host. Returns its answer, and whether all is well.
    fn ctl(host: &Host, verb: &str) -> (Value, bool) {
        let mut command = Command::new(env!("CARGO_BIN_EXE_lab"));
        command.args(["ctl", "--json", "--control-socket"]);
        command.arg(host.dir().join("flanneld.sock")).arg(verb);
        let output = host.namespace().output(&mut command).unwrap();
        (serde_json::from_slice(&output.stdout).unwrap_or_default(), output.status.success())
    }

    /// The doctor and the status understand a host in the midst of a move.
    fn is_well(&self, host: &Host, to: &str, offers: &[&str]) {
        let status = || Self::ctl(host, "status").0["network"]["moving"].clone();
        let moving = status();
        assert_eq!((&moving["to"], &moving["offers"]), (&json!(to), &json!(offers)), "{moving}");
        let doctor = || Self::ctl(host, "doctor");
        eventually(PATIENCE, || doctor().1, || format!("{}\n{}", doctor().0, self.logs()));
    }

    /// Waits until all hosts run only this backend. `links` has the devices that are gone.
    fn wait_for_end(&self, backend: &str, links: &[&str]) {
        self.lab.hosts().iter().for_each(|host| self.wait_for_offers(host, &[backend]));
        for host in self.lab.hosts() {
            let is_there = |link: &&&str| host.run("ip", &["link", "show", link]).is_ok();
            let file = host.dir().join("state/backends");
            let kept = || fs::read_to_string(&file).unwrap();
            let is_alone = || kept().matches("lease_type").count() == 1;
            eventually(
                DEVICES,
                || links.iter().find(is_there).is_none() && is_alone(),
                || format!("{}: {}\n{}", host.name(), kept(), self.logs()),
            );
        }
    }
}

/// A TCP connection between two pods, on which chunks go there and back.
struct Connection {
    name: String,
    stop: Arc<AtomicBool>,
    client: JoinHandle<Result<usize, String>>,
}

impl Connection {
    /// One connection from each pod to each other, in each family.
    fn all(lab: &Lab) -> Vec<Self> {
        let pods: Vec<_> = lab.hosts().iter().map(|host| host.pod().unwrap()).collect();
        let pairs = pods.iter().flat_map(|from| pods.iter().map(move |to| (from, to)));
        pairs
            .filter(|(from, to)| from.name() != to.name())
            .flat_map(|(from, to)| {
                let to_each = to.addresses().values().copied().collect::<Vec<_>>().into_iter();
                to_each.map(|address| {
                    let name = format!("{} to {address}", from.name());
                    Self::start(name, from.namespace(), (to.namespace(), address))
                })
            })
            .collect()
    }

    fn start(name: String, from: &Namespace, (to, address): (&Namespace, IpAddr)) -> Self {
        let listener = to.run(|| TcpListener::bind((address, 0)).unwrap()).unwrap();
        let target: SocketAddr = listener.local_addr().unwrap();
        std::thread::spawn(move || {
            let (mut peer, _) = listener.accept().unwrap();
            let mut chunk = vec![0; CHUNK];
            while peer.read_exact(&mut chunk).is_ok() && peer.write_all(&chunk).is_ok() {}
        });
        let mut stream = from.run(|| TcpStream::connect(target).unwrap()).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let client = std::thread::spawn(move || {
            let (mut chunk, mut count) = (vec![0; CHUNK], 0_usize);
            while !stopped.load(Ordering::Relaxed) {
                let sent = vec![count as u8; CHUNK];
                stream.write_all(&sent).map_err(|error| format!("chunk {count}: {error}"))?;
                stream.read_exact(&mut chunk).map_err(|error| format!("chunk {count}: {error}"))?;
                if chunk != sent {
                    return Err(format!("chunk {count} came back changed"));
                }
                count += 1;
                std::thread::park_timeout(Duration::from_millis(20));
            }
            Ok(count)
        });
        Self { name, stop, client }
    }

    fn end(self) {
        self.stop.store(true, Ordering::Relaxed);
        match self.client.join().unwrap() {
            Ok(chunks) => assert!(chunks > 20, "{}: {chunks} chunks are too few", self.name),
            Err(error) => panic!("{}: {error}", self.name),
        }
    }
}

/// Moves a cluster under traffic. No packet may be lost, and no connection may break.
fn under_traffic(backend: &str, moves: impl FnOnce(&Cluster, &Traffic)) {
    let cluster = Cluster::start(backend);
    let (traffic, connections) = (Traffic::start(&cluster.lab), Connection::all(&cluster.lab));
    moves(&cluster, &traffic);
    traffic.wait_for_arrivals();
    connections.into_iter().for_each(Connection::end);
    let (sent, lost) = traffic.end();
    assert!(lost.is_empty(), "{} of {sent}: {lost:#?}\n{}", lost.len(), cluster.logs());
    // 12 streams.
    assert!(sent >= 12 * 100, "{sent} packets are too few for the test");
}

/// All hosts get the config at the same time.
fn at_once(cluster: &Cluster, to: &str) {
    cluster.lab.hosts().iter().for_each(|host| cluster.configure(host, to));
}

/// Each host gets the config with a restart. The others run the old one meanwhile.
fn rolling(cluster: &Cluster, traffic: &Traffic, [from, to]: [&str; 2]) {
    let hosts = cluster.lab.hosts();
    for (n, host) in hosts.iter().enumerate() {
        // First an ordinary stop, then SIGKILL.
        let signal = if n % 2 == 0 { Signal::SIGTERM } else { Signal::SIGKILL };
        host.stop_daemon(signal).unwrap().unwrap();
        traffic.wait_for_arrivals();
        cluster.configure(host, to);
        cluster.start_daemon(host);
        if n + 1 < hosts.len() {
            cluster.wait_for_offers(host, &[from, to]);
            assert_eq!(cluster.offers(&hosts[n + 1]), [from]);
        }
        traffic.wait_for_arrivals();
    }
}

#[test]
fn a_cluster_moves_from_host_gw_to_vxlan_at_once() {
    as_root(|| {
        under_traffic("host-gw", |cluster, _| {
            at_once(cluster, "vxlan");
            cluster.wait_for_end("vxlan", &[]);
        });
    });
}

#[test]
fn a_cluster_moves_from_vxlan_to_host_gw_at_once() {
    as_root(|| {
        under_traffic("vxlan", |cluster, _| {
            at_once(cluster, "host-gw");
            cluster.wait_for_end("host-gw", &["flannel.1", "flannel-v6.1"]);
            for host in cluster.lab.hosts() {
                assert_eq!(host.subnet_env().unwrap().unwrap().mtu, 1500);
            }
        });
    });
}

#[test]
fn a_cluster_moves_from_host_gw_to_vxlan_by_a_rolling_restart() {
    as_root(|| {
        under_traffic("host-gw", |cluster, traffic| {
            rolling(cluster, traffic, ["host-gw", "vxlan"]);
            cluster.lab.hosts().iter().for_each(|it| cluster.wait_for_offers(it, &["vxlan"]));
        });
    });
}

#[test]
fn a_cluster_moves_from_vxlan_to_host_gw_by_a_rolling_restart() {
    as_root(|| {
        under_traffic("vxlan", |cluster, traffic| {
            rolling(cluster, traffic, ["vxlan", "host-gw"]);
            cluster.lab.hosts().iter().for_each(|it| cluster.wait_for_offers(it, &["host-gw"]));
        });
    });
}

/// One host is killed in the midst of the move, then the config of all hosts goes back.
#[test]
fn a_move_survives_a_kill_and_goes_back() {
    as_root(|| {
        under_traffic("vxlan", |cluster, traffic| {
            let [first, second, third] = cluster.lab.hosts() else { panic!("three hosts") };
            cluster.configure(first, "host-gw");
            cluster.configure(second, "host-gw");
            cluster.wait_for_offers(first, &["vxlan", "host-gw"]);
            cluster.wait_for_offers(second, &["vxlan", "host-gw"]);
            cluster.is_well(second, "host-gw", &["vxlan", "host-gw"]);
            first.stop_daemon(Signal::SIGKILL).unwrap().unwrap();
            traffic.wait_for_arrivals();
            cluster.start_daemon(first);
            traffic.wait_for_arrivals();
            cluster.wait_for_offers(first, &["vxlan", "host-gw"]);
            assert_eq!(cluster.offers(third), ["vxlan"]);
            cluster.configure(second, "vxlan");
            traffic.wait_for_arrivals();
            assert_eq!(cluster.offers(second), ["vxlan", "host-gw"], "the first offers both");
            cluster.configure(first, "vxlan");
            for host in [first, second, third] {
                cluster.wait_for_offers(host, &["vxlan"]);
            }
            traffic.wait_for_arrivals();
        });
    });
}
