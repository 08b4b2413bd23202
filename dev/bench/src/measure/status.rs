//! The time in which a daemon with many peers answers a request for its status.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::ensure;

use crate::parts::cluster::Families;
use crate::parts::daemon::{Daemon, program};
use crate::parts::report::{Latency, Report};

const P99_MS: f64 = 50.0;
/// The pause after the last object is in place.
const REST: Duration = Duration::from_secs(1);

pub(crate) fn run(
    peers: u32,
    families: Families,
    samples: u32,
    flanneld: Option<PathBuf>,
) -> anyhow::Result<Report> {
    let mut daemon = Daemon::start(&program(flanneld)?, peers, families, &[])?;
    daemon.rest(REST)?;
    let socket = daemon.control_socket();
    let mut figures = Vec::new();
    for _ in 0..samples {
        let start = Instant::now();
        let reported = request_status(&socket)?;
        figures.push(start.elapsed().as_secs_f64() * 1e3);
        ensure!(reported == u64::from(peers), "the status has {reported} peers of {peers}");
    }
    let Latency { samples, p50_ms, p99_ms } = Latency::of(&figures);
    let mut report = Report {
        peers: Some(peers),
        family: Some(families.name()),
        samples: Some(samples),
        p50_ms: Some(p50_ms),
        p99_ms: Some(p99_ms),
        wrong: daemon.compare()?,
        ..Report::default()
    };
    report.at_most("p99_ms", report.p99_ms, P99_MS);
    Ok(report)
}

/// Requests the status as flannelctl does, and returns the number of peers in it.
fn request_status(socket: &Path) -> anyhow::Result<u64> {
    let mut stream = UnixStream::connect(socket)?;
    stream.write_all(b"GET /v1/status HTTP/1.1\r\nHost: flanneld\r\nConnection: close\r\n\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or((&answer, ""));
    ensure!(head.starts_with("HTTP/1.1 200 "), "{head}");
    let status: serde_json::Value = serde_json::from_str(body)?;
    status["network"]["accepted"]
        .as_u64()
        .ok_or_else(|| anyhow::anyhow!("no number of peers in the answer: {:.300}", body))
}
