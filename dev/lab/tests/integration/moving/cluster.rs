//! A cluster whose hosts have configs of their own, and connections between its pods.

use std::fs;
use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use flannel_lab::testing::stream::Traffic;
use flannel_lab::{Builder, Host, Lab, Namespace, Signal};
use serde_json::{Value, json};
use test_support::eventually;

/// The devices of an unused backend stay for more than a minute.
const DEVICES: Duration = Duration::from_secs(300);
/// Larger than any packet, so that a connection depends on the MTU of the path.
const CHUNK: usize = 16 << 10;

/// A cluster whose hosts have configs of their own, as during a rolling restart.
pub(crate) struct Cluster {
    pub(crate) lab: Lab,
    pace: Pace,
}

/// The speed of the machine.
#[derive(Clone, Copy)]
pub(crate) struct Pace {
    /// The timeout for a step.
    pub(crate) patience: Duration,
    /// The time between two packets of a stream.
    pub(crate) gap: Duration,
}

impl Pace {
    /// The machine of a test.
    pub(crate) const USUAL: Self =
        Self { patience: Duration::from_secs(180), gap: Duration::from_millis(4) };
}

impl Cluster {
    pub(crate) fn start(lab: Builder, backend: &str, pace: Pace) -> Self {
        let lab = lab.program(env!("CARGO_BIN_EXE_lab")).backend(backend).start().unwrap();
        let cluster = Self { lab, pace };
        for host in cluster.lab.hosts() {
            let dir = cluster.registry(host);
            fs::create_dir_all(&dir).unwrap();
            fs::create_dir_all(cluster.lab.registry().join("subnets")).unwrap();
            std::os::unix::fs::symlink(cluster.lab.registry().join("subnets"), dir.join("subnets"))
                .unwrap();
            cluster.configure(host, backend);
            cluster.start_daemon(host);
        }
        let matrix =
            cluster.lab.wait_until_reachable(pace.patience).unwrap_or_else(|e| panic!("{e}"));
        assert!(matrix.is_complete(), "{}", cluster.logs());
        cluster
    }

    /// The timeout for a step.
    pub(crate) fn patience(&self) -> Duration {
        self.pace.patience
    }

    fn registry(&self, host: &Host) -> PathBuf {
        self.lab.dir().join(format!("registry-{}", host.number()))
    }

    pub(crate) fn start_daemon(&self, host: &Host) {
        host.start_daemon_with(&["--registry", &format!("dir:{}", self.registry(host).display())])
            .unwrap();
    }

    /// Gives a host a config with this backend.
    pub(crate) fn configure(&self, host: &Host, backend: &str) {
        self.configure_with(host, backend, &[]);
    }

    /// Gives a host a config with this backend and these further options of it.
    pub(crate) fn configure_with(&self, host: &Host, backend: &str, more: &[(&str, Value)]) {
        let text = fs::read_to_string(self.lab.registry().join("config")).unwrap();
        let mut config: Value = serde_json::from_str(&text).unwrap();
        config["Backend"] = json!({ "Type": backend });
        more.iter().for_each(|(field, value)| config[*field] = value.clone());
        let file = self.registry(host).join("config");
        let new = self.registry(host).join("config.new");
        fs::write(&new, config.to_string()).unwrap();
        fs::rename(&new, &file).unwrap();
    }

    pub(crate) fn logs(&self) -> String {
        self.lab
            .hosts()
            .iter()
            .map(|host| format!("--- {}\n{}", host.name(), host.log().unwrap()))
            .collect()
    }

    /// The backend types in the lease of a host, the preferred one first.
    pub(crate) fn offers(&self, host: &Host) -> Vec<String> {
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

    pub(crate) fn wait_for_offers(&self, host: &Host, expected: &[&str]) {
        eventually(
            self.pace.patience,
            || {
                host.check_daemon().unwrap();
                self.offers(host) == expected
            },
            || format!("{}: {:?}\n{}", host.name(), self.offers(host), self.logs()),
        );
    }

    /// Runs `flannelctl --json` on a host. Returns its answer, and whether all is well.
    pub(crate) fn ctl(host: &Host, verb: &str) -> (Value, bool) {
        let mut command = Command::new(env!("CARGO_BIN_EXE_lab"));
        command.args(["ctl", "--json", "--control-socket"]);
        command.arg(host.dir().join("flanneld.sock")).arg(verb);
        let output = host.namespace().output(&mut command).unwrap();
        (serde_json::from_slice(&output.stdout).unwrap_or_default(), output.status.success())
    }

    /// The doctor and the status understand a host in the midst of a move.
    pub(crate) fn is_well(&self, host: &Host, to: &str, offers: &[&str]) {
        let status = || Self::ctl(host, "status").0["network"]["moving"].clone();
        // The lease has the offers before the status.
        eventually(
            self.pace.patience,
            || {
                let moving = status();
                moving["to"] == json!(to) && moving["offers"] == json!(offers)
            },
            || status().to_string(),
        );
        let doctor = || Self::ctl(host, "doctor");
        eventually(
            self.pace.patience,
            || doctor().1,
            || format!("{}\n{}", doctor().0, self.logs()),
        );
    }

    /// Waits until all hosts run only this backend. `links` has the devices that are gone.
    pub(crate) fn wait_for_end(&self, backend: &str, links: &[&str]) {
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
    fn all(lab: &Lab, pace: Pace) -> Vec<Self> {
        let pods: Vec<_> = lab.hosts().iter().map(|host| host.pod().unwrap()).collect();
        let pairs = pods.iter().flat_map(|from| pods.iter().map(move |to| (from, to)));
        pairs
            .filter(|(from, to)| from.name() != to.name())
            .flat_map(|(from, to)| {
                let to_each = to.addresses().values().copied().collect::<Vec<_>>().into_iter();
                to_each.map(|address| {
                    let name = format!("{} to {address}", from.name());
                    Self::start(name, from.namespace(), to.namespace(), address, pace)
                })
            })
            .collect()
    }

    fn start(name: String, from: &Namespace, to: &Namespace, address: IpAddr, pace: Pace) -> Self {
        let listener = to.run(|| TcpListener::bind((address, 0)).unwrap()).unwrap();
        let target: SocketAddr = listener.local_addr().unwrap();
        std::thread::spawn(move || {
            let (mut peer, _) = listener.accept().unwrap();
            let mut chunk = vec![0; CHUNK];
            while peer.read_exact(&mut chunk).is_ok() && peer.write_all(&chunk).is_ok() {}
        });
        let mut stream = from.run(|| TcpStream::connect(target).unwrap()).unwrap();
        stream.set_read_timeout(Some(pace.patience)).unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let client = std::thread::spawn(move || {
            let mut chunk = vec![0; CHUNK];
            let mut count = 0_usize;
            while !stopped.load(Ordering::Relaxed) {
                let sent = vec![count as u8; CHUNK];
                stream.write_all(&sent).map_err(|error| format!("chunk {count}: {error}"))?;
                stream.read_exact(&mut chunk).map_err(|error| format!("chunk {count}: {error}"))?;
                if chunk != sent {
                    return Err(format!("chunk {count} came back changed"));
                }
                count += 1;
                std::thread::park_timeout(5 * pace.gap);
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
pub(crate) fn under_traffic(
    lab: Builder,
    pace: Pace,
    backend: &str,
    moves: impl FnOnce(&Cluster, &Traffic),
) {
    let cluster = Cluster::start(lab, backend, pace);
    let traffic = Traffic::start_every(pace.gap, &cluster.lab);
    let connections = Connection::all(&cluster.lab, pace);
    moves(&cluster, &traffic);
    // Some moves are so short that hardly a packet is sent meanwhile.
    for _ in 0..4 {
        traffic.wait_for_arrivals();
    }
    connections.into_iter().for_each(Connection::end);
    let (sent, lost) = traffic.end();
    assert!(lost.is_empty(), "{} of {sent}: {lost:#?}\n{}", lost.len(), cluster.logs());
    assert!(sent >= 12 * 100, "{sent} packets are too few for the test");
}

/// All hosts get the config at the same time.
pub(crate) fn at_once(cluster: &Cluster, to: &str) {
    cluster.lab.hosts().iter().for_each(|host| cluster.configure(host, to));
}

/// Each host gets the config with a restart. The others run the old one meanwhile.
pub(crate) fn rolling(cluster: &Cluster, traffic: &Traffic, [from, to]: [&str; 2]) {
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
