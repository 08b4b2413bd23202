//! Random faults on two clusters of real daemons, while packets flow between all pods.
//!
//! One fault at a time. Packets may be lost only between hosts that the fault may break, and only
//! until its repair is over. Afterwards all must be as before.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::ensure;
use flannel_core::address::Family;
use flannel_lab::Interrupter;
use flannel_lab::testing::stream::{Lost, Traffic};

use crate::parts::faults::{Backend, Layout, Schedule, Step};
use crate::parts::growth::Growth;
use crate::parts::process::prepare;
use crate::parts::report::{Latency, Report};
use crate::parts::site::Site;

/// The time between two packets of a stream.
const GAP: Duration = Duration::from_millis(10);
/// The time in which a cluster must be as before, after the end of a fault.
const REPAIR: Duration = Duration::from_secs(15);
/// The longest time for a repair after an outage of the store.
const RECONNECT: Duration = Duration::from_secs(30);
/// The time after which a cluster that does not recover ends the soak.
const GIVE_UP: Duration = Duration::from_secs(90);
/// The time for the doctor to find nothing, at the end.
const CALM: Duration = Duration::from_secs(90);
/// The pause between two faults.
const REST: Duration = Duration::from_millis(300);
/// A packet on its way when the fault is planted may be lost, although it was sent before.
const ON_ITS_WAY: Duration = Duration::from_millis(50);
/// The maximum number of problems that are listed.
const LISTED: usize = 40;

/// The time of a fault, from before it was planted until all was as before.
struct Spell {
    cluster: usize,
    step: Step,
    begin: Instant,
    end: Instant,
}

impl Spell {
    /// Whether the packet may be lost.
    fn excuses(&self, layout: Layout, cluster: usize, lost: &Packet) -> bool {
        self.cluster == cluster
            && (self.begin..=self.end + ON_ITS_WAY).contains(&(lost.at + ON_ITS_WAY))
            && self.step.fault.breaks(layout, lost.hosts, lost.family)
    }
}

/// A packet that was lost.
#[derive(Debug, Clone, Copy)]
struct Packet {
    hosts: [usize; 2],
    family: Family,
    at: Instant,
}

impl From<&Lost> for Packet {
    fn from(lost: &Lost) -> Self {
        Self { hosts: lost.hosts, family: lost.family, at: lost.at }
    }
}

pub(crate) fn run(hosts: usize, minutes: u64, seed: Option<u64>) -> anyhow::Result<Report> {
    let interrupter = prepare()?;
    let clock = std::time::UNIX_EPOCH.elapsed()?.as_nanos() as u64 % 1_000_000;
    let seed = seed.unwrap_or(clock);
    let layouts = [
        Layout { backend: Backend::Vxlan, hosts: hosts.div_ceil(2) },
        Layout { backend: Backend::HostGw, hosts: hosts / 2 },
    ];
    let duration = Duration::from_secs(60 * minutes);
    eprintln!("soak: --hosts {hosts} --minutes {minutes} --seed {seed}");
    let mut sites = Vec::new();
    for layout in layouts {
        let site = Site::start(layout, &interrupter)?;
        eprintln!(
            "{} hosts with {}: files in {}",
            layout.hosts,
            site.name(),
            site.lab.dir().display()
        );
        sites.push(site);
    }
    let traffic: Vec<Traffic> =
        sites.iter().map(|site| Traffic::start_every(GAP, &site.lab)).collect();
    let begin = Instant::now();
    let mut growth = Growth::new((duration / 6).min(Duration::from_secs(120)));
    let mut spells = Vec::new();
    let mut wrong = Vec::new();
    let mut kinds = BTreeMap::new();
    for step in Schedule::new(seed, layouts.to_vec()) {
        if begin.elapsed() >= duration {
            break;
        }
        let site = &mut sites[step.cluster];
        let planted = Instant::now();
        let at = begin.elapsed().as_secs_f64();
        eprint!("{at:>7.1} s  {:<8} {step}, for {:.1} s: ", site.name(), step.hold.as_secs_f64());
        let outcome = suffer(site, step, &interrupter);
        let Step { cluster, .. } = step;
        spells.push(Spell { cluster, step, begin: planted, end: Instant::now() });
        let took = match outcome {
            Ok(took) => took,
            Err(error) => {
                eprintln!("{error:#}");
                wrong.push(format!("{at:.1} s: {}: {step}: {error:#}", site.name()));
                break;
            }
        };
        eprintln!("as before after {:.2} s", took.as_secs_f64());
        let times: &mut Vec<f64> = kinds.entry(step.fault.kind).or_default();
        times.push(took.as_secs_f64() * 1e3);
        let most = if step.outage.is_some() { RECONNECT } else { REPAIR };
        if took > most {
            wrong.push(format!(
                "{at:.1} s: {}: {step}: as before after {:.1} s, expected within {} s",
                site.name(),
                took.as_secs_f64(),
                most.as_secs()
            ));
        }
        sites.iter().for_each(|site| site.sample(&mut growth));
        interrupter.pause(REST)?;
    }
    interrupter.check()?;
    let seconds = begin.elapsed().as_secs_f64();
    let mut packets = 0;
    let mut lost = 0;
    for (cluster, (site, traffic)) in sites.iter().zip(traffic).enumerate() {
        let (sent, missing) = traffic.end();
        packets += sent;
        lost += missing.len();
        let missing: Vec<Packet> = missing.iter().map(Packet::from).collect();
        let name = site.name();
        wrong.extend(
            unexcused(&spells, site.layout, cluster, &missing, begin)
                .into_iter()
                .map(|line| format!("{name}: {line}")),
        );
    }
    for site in &sites {
        wrong.extend(healthy(site, &interrupter)?);
    }
    wrong.extend(growth.found());
    eprintln!("{} daemons were compared with themselves", growth.compared());
    if !wrong.is_empty() {
        for site in &mut sites {
            eprintln!("{}: the files are kept in {}", site.name(), site.lab.keep_files().display());
        }
    }
    if wrong.len() > LISTED {
        let more = wrong.len() - LISTED;
        wrong.truncate(LISTED);
        wrong.push(format!("and {more} more"));
    }
    let latencies =
        kinds.into_iter().map(|(kind, times)| (kind.name().into(), Latency::of(&times)));
    Ok(Report {
        seed: Some(seed),
        nodes: Some(u32::try_from(hosts)?),
        seconds: Some(seconds),
        samples: Some(spells.len()),
        packets: Some(packets),
        lost: Some(lost),
        rss_kib: growth.largest_kib(),
        kinds: latencies.collect(),
        wrong,
        ..Report::default()
    })
}

/// Plants a fault, ends it, and waits until all is as before. Returns the time since its end.
fn suffer(site: &mut Site, step: Step, interrupter: &Interrupter) -> anyhow::Result<Duration> {
    if let Some(outage) = step.outage {
        site.store.begin(outage)?;
    }
    step.fault.plant(site)?;
    interrupter.pause(step.hold)?;
    step.fault.end(site)?;
    if let Some(outage) = step.outage {
        // A daemon that starts meanwhile uses its cache.
        interrupter.pause(step.hold)?;
        site.store.end(outage)?;
    }
    let ended = Instant::now();
    let wrong = site.settle(GIVE_UP)?;
    let seconds = GIVE_UP.as_secs();
    ensure!(wrong.is_empty(), "not as before after {seconds} s: {}", wrong.join("; "));
    Ok(ended.elapsed())
}

/// The losses that no fault excuses: one line for each path and the fault during or after which
/// they happened.
fn unexcused(
    spells: &[Spell],
    layout: Layout,
    cluster: usize,
    lost: &[Packet],
    since: Instant,
) -> Vec<String> {
    type Path = (Option<usize>, [usize; 2], Family);
    let mut found: BTreeMap<Path, Vec<Instant>> = BTreeMap::new();
    for packet in lost {
        if spells.iter().any(|spell| spell.excuses(layout, cluster, packet)) {
            continue;
        }
        let before = spells.iter().rposition(|spell| spell.begin <= packet.at + ON_ITS_WAY);
        found.entry((before, packet.hosts, packet.family)).or_default().push(packet.at);
    }
    let line = |((before, [from, to], family), times): (Path, Vec<Instant>)| {
        let seconds = |at: Option<&Instant>| {
            at.map_or(0.0, |at| at.saturating_duration_since(since).as_secs_f64())
        };
        let first = seconds(times.iter().min());
        let last = seconds(times.iter().max());
        let fault = match before.map(|n| &spells[n]) {
            None => "before the first fault".to_owned(),
            Some(spell) => {
                let word = if times.iter().any(|at| *at <= spell.end) { "during" } else { "after" };
                let other = if spell.cluster == cluster { "" } else { " in the other cluster" };
                format!("{word} `{}`{other}", spell.step)
            }
        };
        format!(
            "{} packets from host {from} to host {to} ({family}) lost at {first:.2} to {last:.2} \
             s, {fault}",
            times.len()
        )
    };
    found.into_iter().map(line).collect()
}

/// What is wrong at the end of the soak.
fn healthy(site: &Site, interrupter: &Interrupter) -> anyhow::Result<Vec<String>> {
    let mut wrong = site.settle(RECONNECT)?;
    let begin = Instant::now();
    for host in site.lab.hosts() {
        loop {
            // The soak is the other program of which `repairs` tells.
            let mut findings = site.findings(host)?;
            findings.retain(|finding| finding.check != "repairs");
            if findings.is_empty() {
                break;
            }
            if begin.elapsed() > CALM {
                wrong.extend(
                    findings.iter().map(|f| format!("{}: doctor: {}", host.name(), f.text)),
                );
                break;
            }
            interrupter.pause(Duration::from_secs(1))?;
        }
        let panics = host.log()?.matches("panicked").count();
        if panics > 0 {
            wrong.push(format!("{}: its log has {panics} panics", host.name()));
        }
    }
    Ok(wrong.into_iter().map(|line| format!("{}: {line}", site.name())).collect())
}

#[cfg(test)]
mod tests {
    use crate::parts::faults::{Fault, Kind};

    use super::*;

    const LAYOUT: Layout = Layout { backend: Backend::HostGw, hosts: 4 };

    /// A fault from second 10 to 12, and packets that were lost.
    fn found(lost: &[(u64, [usize; 2], Family)]) -> Vec<String> {
        let since = Instant::now();
        let second = |n: u64| since + Duration::from_millis(n);
        let fault = Fault { kind: Kind::RouteDeleted, host: 1, peer: 3, family: Family::V4 };
        let step = Step { cluster: 1, fault, outage: None, hold: Duration::ZERO };
        let spell = Spell { cluster: 1, step, begin: second(10_000), end: second(12_000) };
        let lost: Vec<Packet> = lost
            .iter()
            .map(|(at, hosts, family)| Packet { hosts: *hosts, family: *family, at: second(*at) })
            .collect();
        unexcused(&[spell], LAYOUT, 1, &lost, since)
    }

    #[test]
    fn losses_of_the_broken_path_are_excused_while_it_is_broken() {
        let path = [1, 3];
        let excused = [(9_960, path, Family::V4), (11_000, path, Family::V4)];
        assert_eq!(found(&excused), Vec::<String>::new());
        let step = "`route deleted on host 1 for host 3 (IPv4)`";
        for (at, hosts, family, place) in [
            (9_900, path, Family::V4, "before the first fault".to_owned()),
            (11_000, path, Family::V6, format!("during {step}")),
            (11_000, [3, 1], Family::V4, format!("during {step}")),
            (12_010, path, Family::V4, format!("after {step}")),
        ] {
            let [from, to] = hosts;
            let seconds = at as f64 / 1e3;
            let expected = format!(
                "1 packets from host {from} to host {to} ({family}) lost at {seconds:.2} to \
                 {seconds:.2} s, {place}"
            );
            assert_eq!(found(&[(at, hosts, family)]), [expected]);
        }
    }

    #[test]
    fn losses_of_one_path_are_one_line() {
        let lost = [13_000, 13_500].map(|at| (at, [2, 4], Family::V6));
        assert_eq!(found(&lost).len(), 1);
        assert!(
            found(&lost)[0].starts_with("2 packets from host 2 to host 4 (IPv6) lost at 13.00")
        );
    }
}
