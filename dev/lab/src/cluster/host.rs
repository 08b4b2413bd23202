//! A host: a namespace with a link to the switch, a daemon and a pod. The daemon is a process of
//! the lab's own program, which contains flanneld.

use std::fs::{self, File};
use std::io;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, MutexGuard};

use flannel_core::address::Dual;
use flannel_core::runtime::lock;
use nix::sys::signal::Signal;

use crate::cluster::addressing::{link_local_without_dad, nodad, underlay};
use crate::cluster::daemon::{self, PARENT, Spawner};
use crate::cluster::pod::Pod;
use crate::error::{Error, Result};
use crate::subnet_env::SubnetEnv;
use crate::system::namespace::Namespace;
use crate::system::privilege::nsenter;

/// One host of the lab.
#[derive(Debug)]
pub struct Host {
    number: usize,
    namespace: Namespace,
    addresses: Dual<IpAddr>,
    dir: PathBuf,
    registry: PathBuf,
    program: PathBuf,
    spawner: Arc<Spawner>,
    daemon: Mutex<Option<Child>>,
    pod: Mutex<Option<Arc<Pod>>>,
}

/// The arguments of [`Host::new`].
pub(crate) struct Parts {
    pub(crate) number: usize,
    pub(crate) namespace: Namespace,
    pub(crate) addresses: Dual<IpAddr>,
    pub(crate) dir: PathBuf,
    pub(crate) registry: PathBuf,
    pub(crate) program: PathBuf,
    pub(crate) spawner: Arc<Spawner>,
}

impl Host {
    pub(crate) fn new(parts: Parts) -> Self {
        let Parts { number, namespace, addresses, dir, registry, program, spawner } = parts;
        let daemon = Mutex::default();
        let pod = Mutex::default();
        Self { number, namespace, addresses, dir, registry, program, spawner, daemon, pod }
    }

    /// Sets up `lo`, `eth0`, forwarding and default routes. `neighbours` are lines for `ip`.
    pub(crate) fn connect(&self, routers: &Dual<IpAddr>, neighbours: &str) -> Result<()> {
        let mut batch = String::from("link set lo up\n");
        batch += &link_local_without_dad("eth0", &self.addresses, self.number);
        for (family, address) in self.addresses.iter() {
            batch += &format!(
                "addr add {address}/{} dev eth0{}\n",
                underlay(family).len(),
                nodad(family)
            );
        }
        batch += "link set eth0 up\n";
        for router in routers.values() {
            batch += &format!("route add default via {router}\n");
        }
        self.namespace.ip(&(batch + neighbours))?;
        self.namespace.sysctl("net/ipv4/ip_forward", "1")?;
        if self.addresses.v6.is_some() {
            self.namespace.sysctl("net/ipv6/conf/all/forwarding", "1")?;
        }
        fs::create_dir_all(&self.dir).map_err(Error::io(self.dir.display().to_string()))
    }

    /// The name, such as `host-1`.
    pub fn name(&self) -> &str {
        self.namespace.name()
    }

    /// The number of the host, from 1.
    pub fn number(&self) -> usize {
        self.number
    }

    /// Its network namespace.
    pub fn namespace(&self) -> &Namespace {
        &self.namespace
    }

    /// The addresses of its `eth0`.
    pub fn addresses(&self) -> &Dual<IpAddr> {
        &self.addresses
    }

    /// Runs a program in the host's namespace and returns its standard output.
    ///
    /// # Errors
    /// It could not be started, or failed: [`Error::Command`] with its standard error.
    pub fn run(&self, program: &str, args: &[&str]) -> Result<String> {
        let output = self.namespace.output(Command::new(program).args(args))?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        if output.status.success() {
            return Ok(text(&output.stdout));
        }
        let stderr = text(&output.stderr).trim().to_owned();
        Err(Error::Command {
            place: self.name().to_owned(),
            command: format!("{program} {}", args.join(" ")),
            output: if stderr.is_empty() { output.status.to_string() } else { stderr },
        })
    }

    /// The prefix of a command that runs it in the host's namespace, from another terminal.
    pub fn enter_command(&self) -> String {
        nsenter(&self.namespace, self.daemon_pid())
    }

    /// Starts the host's daemon. It appends to the host's log.
    ///
    /// # Errors
    /// It runs already, or could not be started.
    pub fn start_daemon(&self) -> Result<()> {
        self.start_daemon_with(&[])
    }

    /// [`Host::start_daemon`] with further options for flanneld, such as `--nexthop-objects=off`.
    ///
    /// # Errors
    /// It runs already, or could not be started. A daemon that ends because of a wrong option is an
    /// error of [`Host::check_daemon`].
    pub fn start_daemon_with(&self, options: &[&str]) -> Result<()> {
        self.start_daemon_of(&self.program, options)
    }

    /// [`Host::start_daemon_with`] with another program, such as one of another version. See
    /// [`Builder::program`](crate::Builder::program) for its arguments.
    ///
    /// # Errors
    /// The errors of [`Host::start_daemon_with`].
    pub fn start_daemon_of(&self, program: &Path, options: &[&str]) -> Result<()> {
        let mut daemon = self.lock_daemon();
        if let Some(running) = daemon.as_mut()
            && matches!(running.try_wait(), Ok(None))
        {
            let pid = running.id();
            return Err(Error::Unsuitable(format!(
                "{}: flanneld runs already, as process {pid}",
                self.name()
            )));
        }
        let path = self.log_path();
        let log = File::options().create(true).append(true).open(&path);
        let log = log.map_err(Error::io(path.display().to_string()))?;
        let mut command = Command::new(program);
        command.arg("daemon").args(["--iface", "eth0"]);
        command.arg("--registry").arg(format!("dir:{}", self.registry.display()));
        command.arg("--subnet-file").arg(self.subnet_file());
        command.arg("--state-dir").arg(self.dir.join("state")).args(options);
        command.env(PARENT, std::process::id().to_string());
        // Only the log level comes from the user's environment.
        for (name, _) in std::env::vars_os()
            .filter(|(name, _)| name.display().to_string().starts_with("FLANNELD_"))
        {
            command.env_remove(name);
        }
        command
            .env("FLANNELD_LOG", std::env::var_os("FLANNELD_LOG").unwrap_or_else(|| "info".into()));
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        // So that Ctrl-C at the terminal reaches the lab only, which then stops its daemons.
        std::os::unix::process::CommandExt::process_group(&mut command, 0);
        *daemon = Some(self.spawner.spawn(&self.namespace, command)?);
        Ok(())
    }

    /// Ends the daemon by `signal`, or by SIGKILL two seconds later. Returns its exit status;
    /// `None` if there was no daemon.
    ///
    /// # Errors
    /// The signal could not be sent, or waiting failed.
    pub fn stop_daemon(&self, signal: Signal) -> Result<Option<ExitStatus>> {
        let Some(child) = self.lock_daemon().take() else { return Ok(None) };
        Ok(daemon::end(&mut [child], signal)?.pop())
    }

    /// Sends the daemon a signal that does not end it, such as SIGSTOP.
    ///
    /// # Errors
    /// No daemon runs, or the signal could not be sent.
    pub fn signal_daemon(&self, signal: Signal) -> Result<()> {
        match self.lock_daemon().as_ref() {
            Some(child) => daemon::send(child, signal),
            None => Err(Error::Unsuitable(format!(
                "{}: there is no daemon to send {signal} to",
                self.name()
            ))),
        }
    }

    /// Removes the daemon's handle, so that the lab can end all daemons together.
    pub(crate) fn take_daemon(&self) -> Option<Child> {
        self.lock_daemon().take()
    }

    /// The process id of the daemon; `None` if none was started, or it was stopped.
    pub fn daemon_pid(&self) -> Option<u32> {
        self.lock_daemon().as_ref().map(Child::id)
    }

    /// The daemon's resident memory in KiB (`VmRSS`); `None` if it does not run.
    pub fn daemon_rss(&self) -> Option<u64> {
        let status = fs::read_to_string(format!("/proc/{}/status", self.daemon_pid()?)).ok()?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
        line.split_whitespace().next()?.parse().ok()
    }

    /// Checks that the daemon has not ended by itself. No error if none was started.
    ///
    /// # Errors
    /// [`Error::DaemonEnded`] with the end of its log.
    pub fn check_daemon(&self) -> Result<()> {
        let ended = self.lock_daemon().as_mut().map(Child::try_wait);
        let ended =
            ended.transpose().map_err(Error::io(format!("{}: flanneld", self.name())))?.flatten();
        let Some(status) = ended else { return Ok(()) };
        let log = self.log_tail();
        Err(Error::DaemonEnded { host: self.name().to_owned(), status: status.to_string(), log })
    }

    /// The path of the daemon's `subnet.env`.
    pub fn subnet_file(&self) -> PathBuf {
        self.dir.join("subnet.env")
    }

    /// The daemon's `subnet.env`, or `None` if it does not exist yet.
    ///
    /// # Errors
    /// It cannot be read, or a CNI plugin could not use it.
    pub fn subnet_env(&self) -> Result<Option<SubnetEnv>> {
        let path = self.subnet_file();
        match fs::read_to_string(&path) {
            Ok(text) => SubnetEnv::parse(&text, &path).map(Some),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(Error::io(path.display().to_string())(e)),
        }
    }

    /// The log of the host's daemons; empty if none was started.
    ///
    /// # Errors
    /// The log cannot be read.
    pub fn log(&self) -> Result<String> {
        let path = self.log_path();
        match fs::read(&path) {
            Ok(bytes) => Ok(String::from_utf8_lossy(&bytes).into_owned()),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(String::new()),
            Err(e) => Err(Error::io(path.display().to_string())(e)),
        }
    }

    /// The path of the log.
    pub fn log_path(&self) -> PathBuf {
        self.dir.join("flanneld.log")
    }

    /// The host's own directory: log, `subnet.env` and the daemon's state.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The last ten lines of the log, indented, for messages.
    pub(crate) fn log_tail(&self) -> String {
        let log = self.log().unwrap_or_else(|e| e.to_string());
        let lines: Vec<&str> = log.lines().collect();
        let tail = &lines[lines.len().saturating_sub(10)..];
        if tail.is_empty() { "  (empty)".to_owned() } else { format!("  {}", tail.join("\n  ")) }
    }

    /// Adds a pod to the host, with the subnets of `env`.
    ///
    /// # Errors
    /// The host has a pod or a link `cni0`, or the pod cannot be made.
    pub fn add_pod(&self, env: &SubnetEnv) -> Result<Arc<Pod>> {
        self.place_pod(|| Pod::new(&format!("pod-{}", self.number), &self.namespace, env))
    }

    /// Makes a namespace the pod of the host. Another program, such as a CNI plugin, has connected
    /// it. `mtu` is the MTU of the pod's interface, in bytes.
    ///
    /// # Errors
    /// The host has a pod, or the echo service cannot be started.
    pub fn adopt_pod(
        &self,
        namespace: Namespace,
        addresses: Dual<IpAddr>,
        mtu: u32,
    ) -> Result<Arc<Pod>> {
        self.place_pod(|| Pod::adopt(namespace, addresses, mtu))
    }

    fn place_pod(&self, make: impl FnOnce() -> Result<Pod>) -> Result<Arc<Pod>> {
        let mut pod = lock(&self.pod);
        if pod.is_some() {
            return Err(Error::Unsuitable(format!("{} has a pod already", self.name())));
        }
        Ok(pod.insert(Arc::new(make()?)).clone())
    }

    /// Removes the pod and its bridge, if there is one. The links of an adopted pod stay.
    ///
    /// # Errors
    /// `ip` failed.
    pub fn remove_pod(&self) -> Result<()> {
        let pod = lock(&self.pod).take();
        pod.map_or(Ok(()), |pod| self.namespace.ip(pod.unplug()))
    }

    /// The host's pod; `None` if it has none.
    pub fn pod(&self) -> Option<Arc<Pod>> {
        lock(&self.pod).clone()
    }

    fn lock_daemon(&self) -> MutexGuard<'_, Option<Child>> {
        lock(&self.daemon)
    }
}
