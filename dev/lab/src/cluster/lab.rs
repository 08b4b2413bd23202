//! The lab. Its namespaces and links end with the [`Lab`], and with this process.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use flannel_core::Subnet;
use flannel_core::address::{Dual, Family};
use flannel_core::runtime::lock;
use nix::sys::signal::Signal;
use serde_json::{Map, Value, json};
use tempfile::TempDir;

use crate::cluster::addressing::{mac, underlay_address};
use crate::cluster::daemon::{self, Spawner};
use crate::cluster::host::{Host, Parts};
use crate::cluster::switch::Switch;
use crate::error::{Error, Result};
use crate::probe::reach::{Matrix, reach};
use crate::system::interrupt::Interrupter;
use crate::system::namespace::Namespace;
use crate::system::parallel::for_each;
use crate::system::privilege::{check_inotify_limit, has_ipv6, preflight};

/// The maximum number of hosts.
pub const MAX_HOSTS: usize = 250;

/// With more hosts, each gets permanent neighbour entries for the others, because the kernel keeps
/// 1,024 other entries in all namespaces together. Only the machine's root can change that.
///
/// **Source**: linux `net/ipv4/arp.c: arp_tbl.gc_thresh3`, `neighbour.c`.
const KNOWN_NEIGHBOURS: usize = 20;

/// The number of hosts that are set up at the same time.
const WORKERS: usize = 8;

/// The options of a lab. [`Builder::start`] makes it.
#[derive(Debug, Clone)]
#[must_use]
pub struct Builder {
    hosts: usize,
    backend: Value,
    networks: Dual<Subnet>,
    config: Map<String, Value>,
    mtu: u32,
    program: Option<PathBuf>,
    interrupter: Interrupter,
}

impl Default for Builder {
    fn default() -> Self {
        Self {
            hosts: 3,
            backend: json!({ "Type": default_backend() }),
            networks: pod_networks([Family::V4]),
            config: Map::new(),
            mtu: 1500,
            program: None,
            interrupter: Interrupter::default(),
        }
    }
}

/// The type of the first backend of this build.
pub fn default_backend() -> &'static str {
    flannel_backends::all().iter().next().map_or("", |backend| backend.kind())
}

fn pod_networks(families: impl IntoIterator<Item = Family>) -> Dual<Subnet> {
    families
        .into_iter()
        .map(|family| {
            let network = match family {
                Family::V4 => "10.244.0.0/16",
                Family::V6 => "fd00:10:244::/48",
            };
            network.parse::<Subnet>().expect("a constant that is a subnet")
        })
        .collect()
}

impl Builder {
    /// The number of hosts, from 1 to [`MAX_HOSTS`]; default 3.
    pub fn hosts(mut self, hosts: usize) -> Self {
        self.hosts = hosts;
        self
    }

    /// The `Backend` object of the network config, or only its `Type`; default [`default_backend`].
    pub fn backend(mut self, backend: impl Into<Value>) -> Self {
        self.backend = match backend.into() {
            Value::String(kind) => json!({ "Type": kind }),
            object => object,
        };
        self
    }

    /// The address families of the pods; default IPv4. Hosts have both, if the kernel has.
    pub fn families(mut self, families: impl IntoIterator<Item = Family>) -> Self {
        self.networks = pod_networks(families);
        self
    }

    /// Another field of the network config, such as `SubnetLen`. It overrides the lab's value.
    pub fn config_field(mut self, name: &str, value: impl Into<Value>) -> Self {
        self.config.insert(name.to_owned(), value.into());
        self
    }

    /// The MTU of the hosts' links in bytes, at least 1280; default 1500.
    pub fn underlay_mtu(mut self, mtu: u32) -> Self {
        self.mtu = mtu;
        self
    }

    /// The program of the daemons; default this program. With the arguments `daemon` and flanneld's
    /// options, it must call [`end_with_lab`](crate::end_with_lab) and then run flanneld.
    pub fn program(mut self, program: impl Into<PathBuf>) -> Self {
        self.program = Some(program.into());
        self
    }

    /// The handle that interrupts the lab's waits.
    pub fn interrupter(mut self, interrupter: Interrupter) -> Self {
        self.interrupter = interrupter;
        self
    }

    /// Makes the hosts and the switch, without daemons and pods.
    ///
    /// # Errors
    /// This machine cannot run the lab ([`Error::Missing`]), or a step failed.
    pub fn start(self) -> Result<Lab> {
        if !(1..=MAX_HOSTS).contains(&self.hosts) {
            let hosts = self.hosts;
            return Err(Error::Unsuitable(format!("{hosts} hosts: expected 1 to {MAX_HOSTS}")));
        }
        preflight(self.networks.v6.is_some())?;
        let dir = tempfile::Builder::new().prefix("flannel-lab-").tempdir();
        let dir = dir.map_err(Error::io(std::env::temp_dir().display().to_string()))?;
        let registry = dir.path().join("registry");
        write_config(&registry, &self.network_config())?;
        let program = self.program.clone().map_or_else(std::env::current_exe, Ok);
        let program = program.map_err(Error::io("this program's own path"))?;

        let families: Vec<Family> =
            Family::BOTH.into_iter().filter(|f| *f == Family::V4 || has_ipv6()).collect();
        let numbers: Vec<usize> = (1..=self.hosts).collect();
        let namespaces = numbers
            .iter()
            .map(|n| Namespace::new(&format!("host-{n}")))
            .collect::<Result<Vec<_>>>()?;
        self.interrupter.check()?;
        let switch = Switch::new(&families)?;
        switch.plug(&namespaces, self.mtu)?;
        let spawner = Arc::new(Spawner::new());
        let host = |(number, namespace)| {
            Host::new(Parts {
                number,
                namespace,
                addresses: families
                    .iter()
                    .map(|family| underlay_address(*family, number))
                    .collect(),
                dir: dir.path().join(format!("host-{number}")),
                registry: registry.clone(),
                program: program.clone(),
                spawner: spawner.clone(),
            })
        };
        let hosts: Vec<Host> = numbers.into_iter().zip(namespaces).map(host).collect();
        for_each(&hosts, WORKERS, &self.interrupter, |host| {
            host.connect(switch.addresses(), &neighbours(host, self.hosts, &families))
        })?;
        // The program that makes the lab has chosen the commands.
        let kind = self.backend["Type"].as_str().unwrap_or_default().to_lowercase();
        let runs_commands =
            flannel_backends::all().find(&kind).is_ok_and(|backend| backend.runs_commands());
        let options = if runs_commands { vec!["--allow-commands"] } else { Vec::new() };
        let interrupter = self.interrupter;
        Ok(Lab {
            options,
            hosts,
            switch,
            registry,
            dir: Some(dir),
            interrupter,
            last_start: Mutex::default(),
        })
    }

    fn network_config(&self) -> Value {
        let mut config = Map::new();
        config.insert("EnableIPv4".into(), self.networks.v4.is_some().into());
        config.insert("EnableIPv6".into(), self.networks.v6.is_some().into());
        for (family, network) in self.networks.iter() {
            let name = if family == Family::V4 { "Network" } else { "IPv6Network" };
            config.insert(name.into(), network.to_string().into());
        }
        config.insert("Backend".into(), self.backend.clone());
        config.extend(self.config.clone());
        Value::Object(config)
    }
}

fn write_config(registry: &Path, config: &Value) -> Result<()> {
    let path = registry.join("config");
    let write = || {
        fs::create_dir_all(registry)?;
        fs::write(&path, format!("{config:#}\n"))
    };
    write().map_err(Error::io(path.display().to_string()))
}

/// The permanent neighbour entries of a host, as lines for `ip`.
fn neighbours(host: &Host, hosts: usize, families: &[Family]) -> String {
    if hosts <= KNOWN_NEIGHBOURS {
        return String::new();
    }
    let mut batch = String::new();
    for n in (1..=hosts).filter(|n| *n != host.number()) {
        for family in families {
            let address = underlay_address(*family, n);
            let mac = mac(n);
            batch += &format!("neigh add {address} lladdr {mac} dev eth0 nud permanent\n");
        }
    }
    batch
}

/// Hosts and a switch, with daemons and pods on request. Dropping it ends all of them.
///
/// ```no_run
/// // The process must be able to make namespaces: call `flannel_lab::enter` first.
/// use std::time::Duration;
///
/// let lab = flannel_lab::Lab::builder().hosts(2).backend("host-gw").start()?;
/// lab.start_daemons()?;
/// let matrix = lab.wait_until_reachable(Duration::from_secs(30))?;
/// assert!(matrix.is_complete());
/// lab.switch().cut(&lab.hosts()[1])?;
/// assert!(!lab.matrix(Duration::from_secs(1))?.is_complete());
/// # Ok::<(), flannel_lab::Error>(())
/// ```
#[derive(Debug)]
pub struct Lab {
    hosts: Vec<Host>,
    switch: Switch,
    registry: PathBuf,
    dir: Option<TempDir>,
    interrupter: Interrupter,
    last_start: Mutex<Option<Instant>>,
    /// The options of all daemons.
    options: Vec<&'static str>,
}

impl Lab {
    /// The options of a new lab.
    pub fn builder() -> Builder {
        Builder::default()
    }

    /// The hosts, at least one.
    pub fn hosts(&self) -> &[Host] {
        &self.hosts
    }

    /// The switch between them.
    pub fn switch(&self) -> &Switch {
        &self.switch
    }

    /// The directory that is the daemons' registry.
    pub fn registry(&self) -> &Path {
        &self.registry
    }

    /// Starts every host's daemon, with `--allow-commands` if the backend runs commands.
    ///
    /// # Errors
    /// One cannot be started, or the machine allows fewer daemons ([`Error::Missing`]).
    pub fn start_daemons(&self) -> Result<()> {
        check_inotify_limit(self.hosts.len())?;
        for host in &self.hosts {
            self.interrupter.check()?;
            host.start_daemon_with(&self.options)?;
        }
        *lock(&self.last_start) = Some(Instant::now());
        Ok(())
    }

    /// Adds a pod to every host that has none, when its daemon has written `subnet.env`.
    ///
    /// # Blocking
    /// Until all pods are there, at most `patience`.
    ///
    /// # Errors
    /// A daemon ended, or wrote no `subnet.env` in time. Both have the end of its log.
    pub fn add_pods(&self, patience: Duration) -> Result<()> {
        let start = Instant::now();
        let mut waiting: Vec<&Host> =
            self.hosts.iter().filter(|host| host.pod().is_none()).collect();
        while let Some(first) = waiting.first() {
            if start.elapsed() > patience {
                let host = first.name().to_owned();
                let path = first.subnet_file();
                let seconds = patience.as_secs_f64();
                let log = first.log_tail();
                return Err(Error::NoSubnetEnv { host, path, seconds, log });
            }
            let mut ready = Vec::new();
            let mut rest = Vec::new();
            for host in waiting {
                match host.subnet_env()? {
                    Some(env) => ready.push((host, env)),
                    None => {
                        host.check_daemon()?;
                        rest.push(host);
                    }
                }
            }
            for_each(&ready, WORKERS, &self.interrupter, |(host, env)| {
                host.add_pod(env).map(drop)
            })?;
            if ready.is_empty() {
                self.interrupter.pause(Duration::from_millis(5))?;
            }
            waiting = rest;
        }
        Ok(())
    }

    /// Adds the pods as [`Lab::add_pods`] does, and waits until every pod has reached every other.
    ///
    /// # Blocking
    /// At most `patience`. The result lists the pairs that were not reached by then.
    ///
    /// # Errors
    /// A daemon ended or published no subnet, or the lab was interrupted.
    pub fn wait_until_reachable(&self, patience: Duration) -> Result<Matrix> {
        let start = Instant::now();
        self.add_pods(patience)?;
        let mut matrix = self.matrix(patience.saturating_sub(start.elapsed()))?;
        let last_start = *lock(&self.last_start);
        matrix.since = last_start.unwrap_or(start);
        Ok(matrix)
    }

    /// Probes all pairs of pods. Each has `patience` to succeed.
    ///
    /// # Blocking
    /// At most `patience` and a few seconds; less if all pairs succeed.
    ///
    /// # Errors
    /// A daemon ended by itself, or the lab was interrupted.
    pub fn matrix(&self, patience: Duration) -> Result<Matrix> {
        let pods: Vec<_> = self.hosts.iter().filter_map(Host::pod).collect();
        let matrix = reach(&pods, patience, &self.interrupter)?;
        self.hosts.iter().try_for_each(Host::check_daemon)?;
        Ok(matrix)
    }

    /// The directory of the lab's files: the registry, and a directory for each host.
    pub fn dir(&self) -> &Path {
        self.registry.parent().expect("the registry is a directory in the lab's own")
    }

    /// Keeps the lab's files after its end. Returns their directory.
    pub fn keep_files(&mut self) -> PathBuf {
        match self.dir.take() {
            Some(dir) => dir.keep(),
            None => self.dir().to_owned(),
        }
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        let mut daemons: Vec<_> = self.hosts.iter().filter_map(Host::take_daemon).collect();
        // If this fails, the kernel kills the daemons when the spawner's thread ends.
        let _ = daemon::end(&mut daemons, Signal::SIGTERM);
        self.hosts.iter().for_each(|host| host.namespace().end_processes());
    }
}
