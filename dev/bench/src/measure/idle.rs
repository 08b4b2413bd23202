//! Wake-ups of an idle daemon with peers.

use std::path::PathBuf;
use std::time::Duration;

use crate::parts::cluster::Families;
use crate::parts::daemon::{Daemon, program};
use crate::parts::report::Report;

/// The firewall wakes every five seconds to check its rules. Probes of paths have a bench of their
/// own.
const QUIET: [&str; 2] = ["--iptables-forward-rules=false", "--path-interval=0"];
/// The time after which unused threads of the runtime have ended, and the records of backends that
/// are not in use are not read any more.
const SETTLE: Duration = Duration::from_secs(90);
/// The maximum time from the start of the daemon, which starts its timers, to the measurement.
const START: Duration = Duration::from_secs(60);
const SLOW_TIMER: Duration = Duration::from_secs(300);

pub(crate) fn run(
    peers: u32,
    families: Families,
    seconds: u64,
    flanneld: Option<PathBuf>,
) -> anyhow::Result<Report> {
    let mut daemon = Daemon::start(&program(flanneld)?, peers, families, &QUIET)?;
    daemon.rest(SETTLE)?;
    let before = daemon.switches()?;
    daemon.rest(Duration::from_secs(seconds))?;
    let after = daemon.switches()?;
    let earlier =
        |task: &str| before.iter().find(|(t, _)| t == task).map_or(0, |(_, count)| *count);
    let wakeups = after.iter().map(|(task, count)| count - earlier(task)).sum();
    let mut report = Report {
        peers: Some(peers),
        family: Some(families.name()),
        seconds: Some(seconds as f64),
        wakeups: Some(wakeups),
        rss_kib: Some(daemon.kib("VmRSS")?),
        wrong: daemon.compare()?,
        ..Report::default()
    };
    // The timer for missing kernel messages fires every five minutes. It wakes the loop and the
    // thread that reads. Proxy entries are read every second.
    let timers = (SETTLE.as_secs() + seconds + START.as_secs()) / SLOW_TIMER.as_secs();
    report.at_most("wakeups", Some(wakeups as f64), (4 * timers + 3 * seconds) as f64);
    Ok(report)
}
