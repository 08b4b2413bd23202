//! The memory of an idle daemon with many peers.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use crate::parts::cluster::Families;
use crate::parts::daemon::{Daemon, program};
use crate::parts::report::Report;

/// The limits: a number of peers, and the maximum memory in MiB up to this number.
const RSS_MIB: [(u32, f64); 2] = [(5_000, 14.0), (50_000, 64.0)];
/// The pause after the last object is in place.
const REST: Duration = Duration::from_secs(5);

pub(crate) fn run(
    peers: u32,
    families: Families,
    flanneld: Option<PathBuf>,
) -> anyhow::Result<Report> {
    let program = program(flanneld)?;
    let start = Instant::now();
    let mut daemon = Daemon::start(&program, peers, families, &[])?;
    let seconds = start.elapsed().as_secs_f64();
    daemon.rest(REST)?;
    let rss = daemon.kib("VmRSS")?;
    let mut report = Report {
        peers: Some(peers),
        family: Some(families.name()),
        seconds: Some(seconds),
        rss_kib: Some(rss),
        hwm_kib: Some(daemon.kib("VmHWM")?),
        wrong: daemon.compare()?,
        ..Report::default()
    };
    if let Some((_, limit)) = RSS_MIB.iter().find(|(most, _)| peers <= *most) {
        report.at_most("rss_kib / 1024", Some(rss as f64 / 1024.0), *limit);
    }
    Ok(report)
}
