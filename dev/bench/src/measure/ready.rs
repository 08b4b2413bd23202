//! The time from a daemon's start until `/readyz` answers 200, with its leases in an etcd on the
//! same host.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use tokio::runtime::Builder;

use crate::parts::cluster::{Families, leases};
use crate::parts::daemon::program;
use crate::parts::etcd::{Etcd, PREFIX};
use crate::parts::fixture::Fixture;
use crate::parts::report::{Report, median};
use crate::parts::witness::compare;

const SECONDS: f64 = 0.15;
/// The number of runs, each in a new namespace with a new etcd.
const RUNS: usize = 5;
/// The address of its health port, in its own namespace.
const HEALTH: &str = "127.0.0.1:10254";
/// The timeout.
const PATIENCE: Duration = Duration::from_secs(60);

pub(crate) fn run(
    peers: u32,
    families: Families,
    flanneld: Option<PathBuf>,
) -> anyhow::Result<Report> {
    let program = program(flanneld)?;
    let mut seconds = Vec::new();
    let mut wrong = Vec::new();
    for _ in 0..RUNS {
        seconds.push(once(&program, peers, families, &mut wrong)?.as_secs_f64());
    }
    let mut report = Report {
        peers: Some(peers),
        family: Some(families.name()),
        samples: Some(RUNS),
        seconds: Some(median(seconds)),
        wrong,
        ..Report::default()
    };
    report.at_most("seconds", report.seconds, SECONDS);
    Ok(report)
}

/// A process that ends with this value.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn once(
    program: &Path,
    peers: u32,
    families: Families,
    wrong: &mut Vec<String>,
) -> anyhow::Result<Duration> {
    let fixture = Fixture::new()?;
    let dir = tempfile::tempdir()?;
    let took = fixture.netns.run(|| -> anyhow::Result<Duration> {
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let etcd = runtime.block_on(filled(peers, families))?;
        let start = Instant::now();
        let child = Command::new(program)
            .args(["--iface=eth0", "--etcd-endpoints", etcd.endpoint(), "--subnet-file"])
            .arg(dir.path().join("subnet.env"))
            .arg("--state-dir")
            .arg(dir.path().join("state"))
            .args(["--healthz-ip=127.0.0.1", "--healthz-port=10254"])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .with_context(|| format!("{}", program.display()))?;
        let _running = Running(child);
        while !is_ready() {
            ensure!(start.elapsed() < PATIENCE, "flanneld is not ready");
            std::thread::park_timeout(Duration::from_millis(1));
        }
        let took = start.elapsed();
        ensure!(dir.path().join("subnet.env").exists(), "ready without a subnet file");
        Ok(took)
    })?;
    // When the daemon is ready, the objects of all peers exist.
    wrong.extend(compare(&fixture.netns, peers, families)?);
    fixture.clear(peers, families, wrong);
    Ok(took)
}

/// Whether `/readyz` answers 200. It does not answer before the daemon listens.
fn is_ready() -> bool {
    let request = || -> std::io::Result<String> {
        let mut stream = TcpStream::connect(HEALTH)?;
        stream
            .write_all(b"GET /readyz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok(answer)
    };
    request().is_ok_and(|answer| answer.starts_with("HTTP/1.1 200 "))
}

/// An etcd with the config and the leases.
async fn filled(peers: u32, families: Families) -> anyhow::Result<Etcd> {
    let etcd = Etcd::start().await?;
    let mut client = etcd.client().await?;
    client.put(format!("{PREFIX}/config"), families.config(), None).await?;
    for lease in leases(peers, families).iter() {
        client
            .put(format!("{PREFIX}/subnets/{}", lease.subnets), lease.attrs.to_json(), None)
            .await?;
    }
    Ok(etcd)
}
