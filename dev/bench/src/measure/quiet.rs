//! A large cluster of real daemons in which nothing happens: nothing is found, nothing is logged,
//! and nothing grows.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use flannel_api::PathState;
use flannel_lab::{Host, Interrupter, Lab};

use crate::parts::cluster::Families;
use crate::parts::daemon::processor_time;
use crate::parts::faults::{Backend, Layout};
use crate::parts::growth::Growth;
use crate::parts::process::prepare;
use crate::parts::report::{Report, shorten};
use crate::parts::site::Site;
use crate::parts::store::{Etcd, Store};

/// The pause between two samples.
const PAUSE: Duration = Duration::from_secs(15);
/// The warm-up. After it every path has been probed, the checks of the host have run again, and
/// allocators have grown to their usual size. From then on a quiet cluster does not change.
const WARM_UP: Duration = Duration::from_secs(300);
/// The number of doctors that run at the same time.
const DOCTORS: usize = 4;

pub(crate) fn run(hosts: usize, minutes: u64, families: Families) -> anyhow::Result<Report> {
    let interrupter = prepare()?;
    let duration = Duration::from_secs(60 * minutes);
    let limit = std::fs::read_to_string("/proc/sys/fs/inotify/max_user_instances")?;
    if limit.trim().parse::<usize>()? <= hosts {
        // The other daemons do not notice that the file is removed. Only the machine's root can
        // raise the limit.
        eprintln!("only {} daemons can watch their subnet files", limit.trim());
    }
    let begin = Instant::now();
    let mut site = start(hosts, families, &interrupter)?;
    let started = begin.elapsed().as_secs_f64();
    eprintln!("all daemons are ready after {started:.0} s");
    eprintln!("files in {}", site.lab.dir().display());

    // A short run has a short warm-up.
    let warm_up = WARM_UP.min(duration / 4);
    interrupter.pause(warm_up)?;
    let before = log_sizes(&site)?;
    let spent_before = spent(&site)?;
    let since = Instant::now();
    let mut growth = Growth::new(Duration::ZERO);
    while since.elapsed() < duration {
        site.sample(&mut growth);
        interrupter.pause(PAUSE.min(duration / 12))?;
    }
    let seconds = since.elapsed().as_secs_f64();
    let cpu = (spent(&site)? - spent_before).as_secs_f64() / seconds;
    let mut wrong = logged(&site, &before)?;
    wrong.extend(growth.found());
    if growth.compared() < hosts {
        wrong.push(format!("{} of {hosts} daemons were compared", growth.compared()));
    }
    wrong.extend(found(&site, &interrupter)?);
    if !wrong.is_empty() {
        eprintln!("the files are kept in {}", site.lab.keep_files().display());
    }
    shorten(&mut wrong);
    Ok(Report {
        nodes: Some(u32::try_from(hosts)?),
        family: Some(families.name()),
        ready_seconds: Some(started),
        seconds: Some(seconds),
        cpu_percent: Some((cpu * 10_000.0).round() / 100.0),
        rss_kib: growth.largest_kib(),
        wrong,
        ..Report::default()
    })
}

/// Starts a cluster with vxlan, on an etcd.
fn start(hosts: usize, families: Families, interrupter: &Interrupter) -> anyhow::Result<Site> {
    let lab = Lab::builder()
        .hosts(hosts)
        .families(families.iter())
        .config_field("EnableNFTables", true)
        .interrupter(interrupter.clone())
        .start()?;
    let store = Store::Etcd(Etcd::new(&lab)?);
    let layout = Layout { backend: Backend::Vxlan, hosts };
    Site::run(lab, store, layout, interrupter)
}

/// The size of the log of each daemon, in bytes.
fn log_sizes(site: &Site) -> anyhow::Result<Vec<usize>> {
    site.lab.hosts().iter().map(|host| Ok(host.log()?.len())).collect()
}

/// The processor time of all daemons so far.
fn spent(site: &Site) -> anyhow::Result<Duration> {
    site.lab.hosts().iter().filter_map(Host::daemon_pid).map(processor_time).sum()
}

/// The lines that the daemons have logged since their logs had these sizes. Lines that differ only
/// in their values are one line, with their number.
fn logged(site: &Site, before: &[usize]) -> anyhow::Result<Vec<String>> {
    /// Lines with one constant text.
    struct Line {
        count: usize,
        example: String,
    }
    let mut lines: BTreeMap<String, Line> = BTreeMap::new();
    for (host, before) in site.lab.hosts().iter().zip(before) {
        let log = host.log()?;
        for line in log.get(*before..).unwrap_or_default().lines() {
            let text = line.split_once(' ').map_or(line, |(_time, text)| text);
            // Values are fields, behind the text.
            let constant = text.split_once('=').map_or(text, |(constant, _)| constant);
            let line = lines
                .entry(constant.to_owned())
                .or_insert_with(|| Line { count: 0, example: format!("{}: {text}", host.name()) });
            line.count += 1;
        }
    }
    Ok(lines
        .into_values()
        .map(|Line { count, example }| format!("logged {count} times, as {example}"))
        .collect())
}

/// What the daemons report, and what the doctor finds on each host.
fn found(site: &Site, interrupter: &Interrupter) -> anyhow::Result<Vec<String>> {
    let mut wrong = site.settle(Duration::from_secs(60))?;
    let families = site.envs.first().map_or(0, |env| env.subnets.iter().count());
    let expected = ((site.lab.hosts().len() - 1) * families) as u64;
    for (host, status) in site.lab.hosts().iter().zip(site.statuses()?) {
        let findings = status.findings.iter().filter(|found| Site::is_of_the_lab(found));
        wrong.extend(findings.map(|f| format!("{}: status: {}", host.name(), f.text)));
        let paths = status.network.and_then(|network| network.paths).unwrap_or_default();
        let ok = paths.states.get(&PathState::Ok).copied().unwrap_or_default();
        if ok != expected {
            let host = host.name();
            let states = paths.states;
            wrong.push(format!("{host}: of {expected} paths work {ok}: {states:?}"));
        }
    }
    let queue = Mutex::new(site.lab.hosts().iter());
    let found = Mutex::new(wrong);
    std::thread::scope(|scope| {
        let doctor = || -> anyhow::Result<()> {
            loop {
                interrupter.check()?;
                let next = queue.lock().map_or(None, |mut queue| queue.next());
                let Some(host) = next else { return Ok(()) };
                let lines = site.findings(host)?;
                let lines = lines.iter().map(|f| format!("{}: doctor: {}", host.name(), f.text));
                found.lock().expect("no holder panics").extend(lines);
            }
        };
        let doctors: Vec<_> = (0..DOCTORS).map(|_| scope.spawn(doctor)).collect();
        doctors.into_iter().try_for_each(|doctor| {
            doctor.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    })?;
    Ok(found.into_inner()?)
}
