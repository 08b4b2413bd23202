//! A host: a namespace with a wire to the switch, a daemon and a pod. The daemon is a separate
//! process, started anew from the lab's own program, so it is the very same code that users run.

use std::fs::{self, File};
use std::io;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use flannel_core::address::Dual;
use nix::sys::signal::Signal;

use crate::daemon::{self, Nursery, PARENT};
use crate::error::{Error, Result};
use crate::namespace::Namespace;
use crate::pod::Pod;
use crate::privilege::nsenter;
use crate::subnet_env::SubnetEnv;
use crate::switch::{nodad, quiet_link_local, underlay};

/// One host of the lab.
#[derive(Debug)]
pub struct Host {
    number: usize,
    namespace: Namespace,
    addresses: Dual<IpAddr>,
    dir: PathBuf,
    registry: PathBuf,
    program: PathBuf,
    nursery: Arc<Nursery>,
    daemon: Mutex<Option<Child>>,
    pod: Mutex<Option<Arc<Pod>>>,
}

/// What a host is made of.
pub(crate) struct Parts {
    pub(crate) number: usize,
    pub(crate) namespace: Namespace,
    pub(crate) addresses: Dual<IpAddr>,
    pub(crate) dir: PathBuf,
    pub(crate) registry: PathBuf,
    pub(crate) program: PathBuf,
    pub(crate) nursery: Arc<Nursery>,
}

impl Host {
    pub(crate) fn new(parts: Parts) -> Self {
        let Parts { number, namespace, addresses, dir, registry, program, nursery } = parts;
        let (daemon, pod) = (Mutex::default(), Mutex::default());
        Self { number, namespace, addresses, dir, registry, program, nursery, daemon, pod }
    }

    /// Brings up `lo` and `eth0`, forwarding and the default routes; `neighbours` are lines for `ip`.
    pub(crate) fn connect(&self, routers: &Dual<IpAddr>, neighbours: &str) -> Result<()> {
        let mut batch = String::from("link set lo up\n");
        batch += &quiet_link_local("eth0", &self.addresses, self.number);
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

    /// `host-1` for the first.
    pub fn name(&self) -> &str {
        self.namespace.name()
    }

    /// Its place among the hosts, from 1.
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

    /// Runs a program in the host's namespace and returns what it printed.
    ///
    /// # Errors
    /// It could not be started, or failed: [`Error::Command`] with what it said.
    pub fn run(&self, program: &str, args: &[&str]) -> Result<String> {
        let output = self.output(Command::new(program).args(args))?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        if output.status.success() {
            return Ok(text(&output.stdout));
        }
        let said = text(&output.stderr).trim().to_owned();
        Err(Error::Command {
            place: self.name().to_owned(),
            command: format!("{program} {}", args.join(" ")),
            output: if said.is_empty() { output.status.to_string() } else { said },
        })
    }

    /// Runs a program in the host's namespace and waits for its end, successful or not.
    ///
    /// # Errors
    /// It could not be started.
    pub fn output(&self, command: &mut Command) -> Result<Output> {
        self.namespace.output(command)
    }

    /// Starts a program in the host's namespace; the caller owns it.
    ///
    /// # Errors
    /// It could not be started.
    pub fn spawn(&self, command: &mut Command) -> Result<Child> {
        self.namespace.spawn(command)
    }

    /// The command that runs a shell or the command behind it in the host's namespace, for a person at
    /// another terminal.
    pub fn enter_command(&self) -> String {
        nsenter(&self.namespace, self.daemon_pid())
    }

    /// Starts the host's daemon; it appends to the log of an earlier one.
    ///
    /// # Errors
    /// It runs already, or could not be started.
    pub fn start_daemon(&self) -> Result<()> {
        self.start_daemon_with(&[])
    }

    /// [`Host::start_daemon`] with further options for flanneld, such as `--nexthop-objects=off`.
    ///
    /// # Errors
    /// It runs already, or could not be started. Options that it does not know end it at once, which
    /// [`Host::check_daemon`] tells.
    pub fn start_daemon_with(&self, options: &[&str]) -> Result<()> {
        self.start_daemon_of(&self.program, options)
    }

    /// [`Host::start_daemon_with`] of another `program` than the lab's, such as one of another version. It is called as
    /// [`Builder::program`](crate::Builder::program) says.
    ///
    /// # Errors
    /// Those of [`Host::start_daemon_with`].
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
        // The lab is what its options say, not what the environment does; only the logging is the user's.
        for (name, _) in std::env::vars_os()
            .filter(|(name, _)| name.display().to_string().starts_with("FLANNELD_"))
        {
            command.env_remove(name);
        }
        command
            .env("FLANNELD_LOG", std::env::var_os("FLANNELD_LOG").unwrap_or_else(|| "info".into()));
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        // Ctrl-C at the terminal is for the lab, which then stops its daemons.
        std::os::unix::process::CommandExt::process_group(&mut command, 0);
        *daemon = Some(self.nursery.spawn(&self.namespace, command)?);
        Ok(())
    }

    /// Ends the daemon by `signal`, and by SIGKILL if that does not help within two seconds; returns how it
    /// ended, `None` if there was none.
    ///
    /// # Errors
    /// It could not be signalled or waited for.
    pub fn stop_daemon(&self, signal: Signal) -> Result<Option<ExitStatus>> {
        let Some(child) = self.lock_daemon().take() else { return Ok(None) };
        Ok(daemon::end(&mut [child], signal)?.pop())
    }

    /// Sends the daemon a signal that does not end it, such as SIGSTOP.
    ///
    /// # Errors
    /// There is no daemon, or it could not be signalled.
    pub fn signal_daemon(&self, signal: Signal) -> Result<()> {
        match self.lock_daemon().as_ref() {
            Some(child) => daemon::send(child, signal),
            None => Err(Error::Unsuitable(format!(
                "{}: there is no daemon to send {signal} to",
                self.name()
            ))),
        }
    }

    /// The daemon, for the lab to end it together with others.
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

    /// Makes sure that the daemon, if one was started, has not ended by itself.
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

    /// Where the daemon writes its `subnet.env`.
    pub fn subnet_file(&self) -> PathBuf {
        self.dir.join("subnet.env")
    }

    /// The daemon's `subnet.env`; `None` if there is none yet.
    ///
    /// # Errors
    /// It cannot be read, or is not what a CNI plugin can use.
    pub fn subnet_env(&self) -> Result<Option<SubnetEnv>> {
        let path = self.subnet_file();
        match fs::read_to_string(&path) {
            Ok(text) => SubnetEnv::parse(&text, &path).map(Some),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(Error::io(path.display().to_string())(e)),
        }
    }

    /// Everything that the host's daemons logged; empty if none was started.
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

    /// Where the daemon's log is.
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

    /// Puts a pod on the host, as `env` says; there must be none yet, nor a link `cni0`.
    ///
    /// # Errors
    /// There is one, or it cannot be made.
    pub fn add_pod(&self, env: &SubnetEnv) -> Result<Arc<Pod>> {
        self.place_pod(|| Pod::new(&format!("pod-{}", self.number), &self.namespace, env))
    }

    /// Makes a pod of a namespace that somebody else has connected to the host, such as a CNI plugin; there must
    /// be none yet. `mtu` is that of its interface, in bytes.
    ///
    /// # Errors
    /// There is one, or its echo service cannot be started.
    pub fn adopt_pod(
        &self,
        namespace: Namespace,
        addresses: Dual<IpAddr>,
        mtu: u32,
    ) -> Result<Arc<Pod>> {
        self.place_pod(|| Pod::adopt(namespace, addresses, mtu))
    }

    fn place_pod(&self, make: impl FnOnce() -> Result<Pod>) -> Result<Arc<Pod>> {
        let mut pod = self.pod.lock().unwrap_or_else(PoisonError::into_inner);
        if pod.is_some() {
            return Err(Error::Unsuitable(format!("{} has a pod already", self.name())));
        }
        Ok(pod.insert(Arc::new(make()?)).clone())
    }

    /// Takes the pod and its bridge away; nothing happens if there is none. The links of an adopted pod stay for
    /// those who made them.
    ///
    /// # Errors
    /// `ip` failed.
    pub fn remove_pod(&self) -> Result<()> {
        let pod = self.pod.lock().unwrap_or_else(PoisonError::into_inner).take();
        pod.map_or(Ok(()), |pod| self.namespace.ip(pod.unplug()))
    }

    /// The host's pod; `None` if none was put there.
    pub fn pod(&self) -> Option<Arc<Pod>> {
        self.pod.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn lock_daemon(&self) -> MutexGuard<'_, Option<Child>> {
        self.daemon.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
