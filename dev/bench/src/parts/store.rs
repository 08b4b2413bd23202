//! The store of a cluster in the lab, which can fail: a directory, or an etcd.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc::channel;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use flannel_lab::{Lab, Namespace, Signal};
use nix::sys::signal::kill;
use nix::unistd::Pid;
use tempfile::TempDir;

use crate::parts::etcd::PREFIX;
use crate::parts::faults::Outage;

/// The timeout for etcd to answer after its start.
const PATIENCE: Duration = Duration::from_secs(30);

/// The store of the leases and of the network config.
#[derive(Debug)]
pub(crate) enum Store {
    /// The lab's own.
    Directory(PathBuf),
    Etcd(Etcd),
}

impl Store {
    /// The options of the programs that use it.
    pub(crate) fn options(&self) -> Vec<String> {
        match self {
            Self::Directory(path) => vec![format!("--registry=dir:{}", path.display())],
            Self::Etcd(etcd) => {
                vec!["--registry=etcd".into(), format!("--etcd-endpoints={}", etcd.endpoint)]
            }
        }
    }

    /// Writes a lease as `subnets/KEY`, or the network config.
    pub(crate) fn put(&self, key: &str, value: &str) -> anyhow::Result<()> {
        match self {
            Self::Directory(path) => {
                let file = path.join(key);
                let new = path.join(".new");
                fs::write(&new, value)?;
                fs::rename(&new, &file).with_context(|| file.display().to_string())
            }
            Self::Etcd(etcd) => {
                etcd.ctl(&["put", &format!("{PREFIX}/{key}"), "--", value]).map(drop)
            }
        }
    }

    /// Deletes a lease.
    pub(crate) fn delete(&self, key: &str) -> anyhow::Result<()> {
        match self {
            Self::Directory(path) => Ok(fs::remove_file(path.join(key))?),
            Self::Etcd(etcd) => etcd.ctl(&["del", &format!("{PREFIX}/{key}")]).map(drop),
        }
    }

    /// Puts the store out of reach.
    pub(crate) fn begin(&mut self, outage: Outage) -> anyhow::Result<()> {
        match (self, outage) {
            (Self::Directory(path), _) => Ok(fs::rename(&path, away(path))?),
            (Self::Etcd(etcd), Outage::Gone) => etcd.kill(),
            (Self::Etcd(etcd), Outage::Frozen) => etcd.signal(Signal::SIGSTOP),
        }
    }

    /// Ends [`Store::begin`].
    pub(crate) fn end(&mut self, outage: Outage) -> anyhow::Result<()> {
        match (self, outage) {
            (Self::Directory(path), _) => Ok(fs::rename(away(path), path)?),
            (Self::Etcd(etcd), Outage::Gone) => etcd.start(),
            (Self::Etcd(etcd), Outage::Frozen) => etcd.signal(Signal::SIGCONT),
        }
    }

    /// Compacts the history, and ends all watches by a restart. A directory has no history.
    pub(crate) fn compact(&mut self) -> anyhow::Result<()> {
        let Self::Etcd(etcd) = self else { return Ok(()) };
        let text = etcd.ctl(&["get", "/", "-w", "json"])?;
        let answer: serde_json::Value = serde_json::from_str(&text)?;
        let revision = answer["header"]["revision"].as_u64().context("no revision")?;
        etcd.ctl(&["compact", &revision.to_string()])?;
        etcd.kill()?;
        etcd.start()
    }
}

fn away(path: &Path) -> PathBuf {
    path.with_extension("away")
}

/// An etcd in the namespace of the lab's switch. It ends with this value, and with this process.
#[derive(Debug)]
pub(crate) struct Etcd {
    namespace: Namespace,
    address: String,
    endpoint: String,
    dir: TempDir,
    running: Option<(Pid, JoinHandle<()>)>,
}

impl Etcd {
    /// Starts an etcd and writes the lab's network config to it.
    pub(crate) fn new(lab: &Lab) -> anyhow::Result<Self> {
        let address = lab.switch().addresses().v4.context("the switch has no IPv4 address")?;
        let mut etcd = Self {
            namespace: lab.switch().namespace().clone(),
            address: address.to_string(),
            endpoint: format!("http://{address}:2379"),
            dir: tempfile::tempdir()?,
            running: None,
        };
        etcd.start()?;
        let config = fs::read_to_string(lab.registry().join("config"))?;
        etcd.ctl(&["put", &format!("{PREFIX}/config"), "--", &config])?;
        Ok(etcd)
    }

    /// Starts it, and waits until it answers.
    fn start(&mut self) -> anyhow::Result<()> {
        let program = std::env::var_os("ETCD").unwrap_or_else(|| "etcd".into());
        let peer = format!("http://{}:2380", self.address);
        let mut command = Command::new("setpriv");
        // The kernel kills it with the thread that starts it.
        command.args(["--pdeathsig", "KILL"]).arg(program);
        command.args(["--log-level", "error", "--data-dir"]).arg(self.dir.path());
        command.args(["--listen-client-urls", &self.endpoint]);
        command.args(["--advertise-client-urls", &self.endpoint]);
        command.args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer]);
        command.arg("--initial-cluster").arg(format!("default={peer}"));
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let namespace = self.namespace.clone();
        let (started, pid) = channel();
        let run = move || match command.spawn() {
            Ok(mut child) => {
                let _ = started.send(Ok(child.id()));
                let _ = child.wait();
            }
            Err(error) => _ = started.send(Err(error)),
        };
        let thread = std::thread::spawn(move || drop(namespace.run(run)));
        let pid = pid.recv().context("etcd was not started")?.context("setpriv of util-linux")?;
        self.running = Some((Pid::from_raw(i32::try_from(pid)?), thread));
        let begin = Instant::now();
        while let Err(error) = self.ctl(&["get", "/"]) {
            let ended = self.running.as_ref().is_some_and(|(_, thread)| thread.is_finished());
            ensure!(!ended, "etcd has ended; ETCD can name the program");
            ensure!(begin.elapsed() < PATIENCE, "etcd does not answer: {error:#}");
        }
        Ok(())
    }

    fn signal(&self, signal: Signal) -> anyhow::Result<()> {
        let (pid, _) = self.running.as_ref().context("etcd does not run")?;
        Ok(kill(*pid, signal)?)
    }

    fn kill(&mut self) -> anyhow::Result<()> {
        let (pid, thread) = self.running.take().context("etcd does not run")?;
        // Another process may have the id of one that has ended.
        if !thread.is_finished() {
            kill(pid, Signal::SIGKILL)?;
        }
        thread.join().map_err(|_| anyhow::anyhow!("the thread of etcd panicked"))
    }

    fn ctl(&self, args: &[&str]) -> anyhow::Result<String> {
        let program = std::env::var_os("ETCDCTL").unwrap_or_else(|| "etcdctl".into());
        let mut command = Command::new(program);
        command.env("ETCDCTL_API", "3").args(["--endpoints", &self.endpoint]).args(args);
        let output = self.namespace.output(&mut command)?;
        let error = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "etcdctl {}: {}", args.join(" "), error.trim());
        Ok(String::from_utf8(output.stdout)?)
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        // It may have ended with Ctrl-C at the terminal.
        let _ = self.kill();
    }
}
