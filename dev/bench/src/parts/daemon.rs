//! A flanneld process of profile `dist` in a network namespace, with a directory of leases.

use std::fs::File;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use flannel_netlink::testing::Netns;
use flannel_subnet_kube::testing::ApiServer;
use tempfile::TempDir;

use crate::parts::cluster::{Families, leases};
use crate::parts::fixture::Fixture;
use crate::parts::witness::compare;

/// The timeout for the objects of all peers.
const PATIENCE: Duration = Duration::from_secs(300);

const UNIT: &str = include_str!("../../../../deploy/systemd/flanneld.service");

/// The environment that the service unit gives to the daemon.
fn environment() -> impl Iterator<Item = (&'static str, &'static str)> {
    let lines = UNIT.lines().filter_map(|line| line.strip_prefix("Environment="));
    lines.flat_map(str::split_whitespace).filter_map(|variable| variable.split_once('='))
}

/// A daemon that runs. Dropping it ends the process.
pub(crate) struct Daemon {
    child: Child,
    fixture: Fixture,
    peers: u32,
    families: Families,
    dir: TempDir,
}

impl Daemon {
    /// Starts `program` and waits until all objects are in place.
    pub(crate) fn start(
        program: &Path,
        peers: u32,
        families: Families,
        options: &[&str],
    ) -> anyhow::Result<Self> {
        Self::start_by(Command::new(program), peers, families, options)
    }

    /// Starts a daemon by a command to which the options of a daemon are added.
    pub(crate) fn start_by(
        mut command: Command,
        peers: u32,
        families: Families,
        options: &[&str],
    ) -> anyhow::Result<Self> {
        let fixture = Fixture::new()?;
        let dir = tempfile::tempdir()?;
        let registry = dir.path().join("network");
        std::fs::create_dir_all(registry.join("subnets"))?;
        std::fs::write(registry.join("config"), families.config())?;
        for lease in leases(peers, families).iter() {
            let file = registry.join("subnets").join(lease.subnets.to_string());
            std::fs::write(&file, lease.attrs.to_json())
                .with_context(|| format!("{}", file.display()))?;
        }
        command.arg(format!("--registry=dir:{}", registry.display())).args(options);
        Self::run(command, fixture, dir, peers, families)
    }

    /// Starts a daemon whose leases are nodes of an API server, which runs in this process.
    pub(crate) fn start_on_kube(program: &Path, peers: u32) -> anyhow::Result<(Self, ApiServer)> {
        let fixture = Fixture::new()?;
        let dir = tempfile::tempdir()?;
        let families = Families::Ipv4;
        let net_config = dir.path().join("net-conf.json");
        std::fs::write(&net_config, families.config())?;
        let server = ApiServer::on(fixture.netns.run(|| TcpListener::bind("127.0.0.1:0"))?);
        crate::measure::kube::fill(&server, peers);
        let mut command = Command::new(program);
        command
            .args(["--kube-subnet-mgr", "--kube-api-url", &server.url(), "--net-config-path"])
            .arg(net_config);
        command.env("NODE_NAME", crate::measure::kube::OWN);
        Ok((Self::run(command, fixture, dir, peers, families)?, server))
    }

    /// Starts a daemon whose command line already names its store.
    fn run(
        mut command: Command,
        fixture: Fixture,
        dir: TempDir,
        peers: u32,
        families: Families,
    ) -> anyhow::Result<Self> {
        command
            .envs(environment())
            .args(["--iface=eth0", "--subnet-file"])
            .arg(dir.path().join("subnet.env"))
            .arg("--state-dir")
            .arg(dir.path().join("state"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(File::create(dir.path().join("log"))?);
        let child = fixture.netns.run(|| command.spawn());
        let child = child.with_context(|| format!("{command:?}"))?;
        let mut daemon = Self { child, fixture, peers, families, dir };
        let begin = Instant::now();
        loop {
            let wrong = daemon.compare();
            match wrong {
                Ok(wrong) if wrong.is_empty() => return Ok(daemon),
                wrong if begin.elapsed() > PATIENCE => {
                    bail!("not in place: {wrong:?}\n{}", daemon.log())
                }
                _ => daemon.rest(Duration::from_millis(100))?,
            }
        }
    }

    /// The differences that an independent reader finds.
    ///
    /// # Errors
    /// The daemon has not made its devices yet.
    pub(crate) fn compare(&self) -> anyhow::Result<Vec<String>> {
        let devices =
            self.fixture.netns.run(|| flannel_netlink::testing::ip("-j link show type vxlan"));
        let devices: Vec<serde_json::Value> = serde_json::from_str(&devices)?;
        let found = devices.iter().filter(|device| device["ifname"].is_string()).count();
        ensure!(found == self.families.iter().count(), "there are {found} tunnel devices");
        compare(&self.fixture.netns, self.peers, self.families)
    }

    /// Waits for this time, and checks that the daemon still runs.
    #[expect(clippy::disallowed_methods, reason = "the daemon must be idle for this time")]
    pub(crate) fn rest(&mut self, time: Duration) -> anyhow::Result<()> {
        std::thread::sleep(time);
        let ended = self.child.try_wait()?;
        ensure!(ended.is_none(), "flanneld ended ({ended:?}):\n{}", self.log());
        Ok(())
    }

    /// The path of its control socket.
    pub(crate) fn control_socket(&self) -> PathBuf {
        self.dir.path().join("flanneld.sock")
    }

    /// The file of a lease in its store.
    pub(crate) fn lease_file(&self, key: &str) -> PathBuf {
        self.dir.path().join("network/subnets").join(key)
    }

    /// Its network namespace.
    pub(crate) fn netns(&self) -> &Netns {
        &self.fixture.netns
    }

    /// Its processor time so far.
    pub(crate) fn processor_time(&self) -> anyhow::Result<Duration> {
        processor_time(self.child.id())
    }

    /// A figure of `/proc/PID/status`, in KiB.
    pub(crate) fn kib(&self, field: &str) -> anyhow::Result<u64> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id()))?;
        figure(&status, field)
    }

    /// The context switches so far, by thread.
    pub(crate) fn switches(&self) -> anyhow::Result<Vec<(String, u64)>> {
        switches(self.child.id())
    }

    fn log(&self) -> String {
        let log = std::fs::read_to_string(self.dir.path().join("log")).unwrap_or_default();
        let lines: Vec<&str> = log.lines().collect();
        lines[lines.len().saturating_sub(10)..].join("\n")
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        // The namespace removes the rest.
        self.fixture.clear(self.peers, self.families, &mut Vec::new());
    }
}

/// The context switches of a process so far, by thread.
pub(crate) fn switches(pid: u32) -> anyhow::Result<Vec<(String, u64)>> {
    let mut all = Vec::new();
    for task in std::fs::read_dir(format!("/proc/{pid}/task"))? {
        let task = task?;
        // A thread may end meanwhile.
        let Ok(status) = std::fs::read_to_string(task.path().join("status")) else { continue };
        let count = figure(&status, "voluntary_ctxt_switches")?
            + figure(&status, "nonvoluntary_ctxt_switches")?;
        all.push((task.file_name().to_string_lossy().into_owned(), count));
    }
    Ok(all)
}

/// The processor time of a process so far, also of threads that have ended.
pub(crate) fn processor_time(pid: u32) -> anyhow::Result<Duration> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    // The name of the program, which is in brackets, may have spaces.
    let fields = stat.rsplit_once(") ").map_or("", |(_, fields)| fields).split(' ');
    // utime and stime, in hundredths of a second on all architectures of Rust for Linux.
    let ticks: Vec<u64> = fields.skip(11).take(2).filter_map(|text| text.parse().ok()).collect();
    ensure!(ticks.len() == 2, "no times in {stat:?}");
    Ok(Duration::from_millis(10) * u32::try_from(ticks.iter().sum::<u64>())?)
}

/// A figure of `/proc/PID/status`.
pub(crate) fn figure(status: &str, field: &str) -> anyhow::Result<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
    let figure = line.and_then(|line| line.split_whitespace().next()?.parse().ok());
    figure.with_context(|| format!("no {field} in the process's status"))
}

/// The named program. Without a name, builds flanneld with the profile `dist`.
pub(crate) fn program(named: Option<PathBuf>) -> anyhow::Result<PathBuf> {
    if let Some(named) = named {
        return Ok(named);
    }
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(cargo)
        .args(["build", "--profile", "dist", "-p", "flanneld", "--message-format", "json"])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .stderr(Stdio::inherit())
        .output()?;
    ensure!(output.status.success(), "flanneld does not build; --flanneld can name a built one");
    let messages = String::from_utf8(output.stdout)?;
    let built =
        messages.lines().filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok());
    let mut executables =
        built.filter_map(|message| message["executable"].as_str().map(PathBuf::from));
    let flanneld = |path: &PathBuf| path.file_name().is_some_and(|name| name == "flanneld");
    executables.rfind(flanneld).context("cargo did not print the path of flanneld")
}
