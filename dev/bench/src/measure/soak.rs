//! Random faults on two clusters of real daemons, while packets flow between all pods.
//!
//! There is one fault at a time. Packets may be lost only between hosts that the fault may break,
//! and only until its repair is over. Afterwards all must be as before.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::ensure;
use flannel_core::address::Family;
use flannel_lab::Interrupter;
use flannel_lab::testing::stream::{Lost, Traffic};

use crate::parts::faults::{Backend, Kind, Layout, Schedule, Step};
use crate::parts::growth::Growth;
use crate::parts::process::prepare;
use crate::parts::report::{Latency, Report, shorten};
use crate::parts::site::Site;

/// The time between two packets of a stream.
const GAP: Duration = Duration::from_millis(10);
/// The time in which a cluster must be as before, after the end of a fault.
const REPAIR: Duration = Duration::from_secs(15);
/// The longest time for a repair after an outage of the store.
const RECONNECT: Duration = Duration::from_secs(30);
/// The time after which a cluster that does not recover ends the soak.
const GIVE_UP: Duration = Duration::from_secs(90);
/// The timeout at the end until the doctor finds nothing.
const CALM: Duration = Duration::from_secs(90);
/// The pause between two faults.
const REST: Duration = Duration::from_millis(300);
/// A packet on its way when the fault is planted may be lost, although it was sent before.
const ON_ITS_WAY: Duration = Duration::from_millis(50);

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

/// A soak under way, and what it has found so far.
struct Soak {
    sites: Vec<Site>,
    interrupter: Interrupter,
    begin: Instant,
    growth: Growth,
    spells: Vec<Spell>,
    /// The time of each repair in milliseconds, by kind of fault.
    repairs: BTreeMap<Kind, Vec<f64>>,
    wrong: Vec<String>,
}

/// The numbers of packets in both clusters.
#[derive(Default)]
struct Packets {
    sent: usize,
    lost: usize,
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
    let sites = start(layouts, &interrupter)?;
    let traffic: Vec<Traffic> =
        sites.iter().map(|site| Traffic::start_every(GAP, &site.lab)).collect();
    let mut soak = Soak {
        sites,
        interrupter,
        begin: Instant::now(),
        growth: Growth::new((duration / 6).min(Duration::from_secs(120))),
        spells: Vec::new(),
        repairs: BTreeMap::new(),
        wrong: Vec::new(),
    };
    for step in Schedule::new(seed, layouts.to_vec()) {
        if soak.begin.elapsed() >= duration || !soak.take(step)? {
            break;
        }
    }
    soak.interrupter.check()?;
    let seconds = soak.begin.elapsed().as_secs_f64();
    let packets = soak.count_losses(traffic);
    soak.examine()?;
    let latencies =
        soak.repairs.into_iter().map(|(kind, times)| (kind.name().into(), Latency::of(&times)));
    Ok(Report {
        seed: Some(seed),
        nodes: Some(u32::try_from(hosts)?),
        seconds: Some(seconds),
        samples: Some(soak.spells.len()),
        packets: Some(packets.sent),
        lost: Some(packets.lost),
        rss_kib: soak.growth.largest_kib(),
        kinds: latencies.collect(),
        wrong: soak.wrong,
        ..Report::default()
    })
}

/// Starts the clusters.
fn start(layouts: [Layout; 2], interrupter: &Interrupter) -> anyhow::Result<Vec<Site>> {
    let mut sites = Vec::new();
    for layout in layouts {
        let site = Site::start(layout, interrupter)?;
        eprintln!(
            "{} hosts with {}: files in {}",
            layout.hosts,
            site.name(),
            site.lab.dir().display()
        );
        sites.push(site);
    }
    Ok(sites)
}

impl Soak {
    /// Plants a fault and waits for the repair. Returns whether the soak can go on, because all is
    /// as before.
    fn take(&mut self, step: Step) -> anyhow::Result<bool> {
        let site = &mut self.sites[step.cluster];
        let planted = Instant::now();
        let at = self.begin.elapsed().as_secs_f64();
        eprint!("{at:>7.1} s  {:<8} {step}, for {:.1} s: ", site.name(), step.hold.as_secs_f64());
        let outcome = suffer(site, step, &self.interrupter);
        let cluster = step.cluster;
        self.spells.push(Spell { cluster, step, begin: planted, end: Instant::now() });
        let took = match outcome {
            Ok(took) => took,
            Err(error) => {
                eprintln!("{error:#}");
                self.wrong.push(format!("{at:.1} s: {}: {step}: {error:#}", site.name()));
                return Ok(false);
            }
        };
        eprintln!("as before after {:.2} s", took.as_secs_f64());
        self.repairs.entry(step.fault.kind).or_default().push(took.as_secs_f64() * 1e3);
        let most = if step.outage.is_some() { RECONNECT } else { REPAIR };
        if took > most {
            self.wrong.push(format!(
                "{at:.1} s: {}: {step}: as before after {:.1} s, expected within {} s",
                site.name(),
                took.as_secs_f64(),
                most.as_secs()
            ));
        }
        self.sites.iter().for_each(|site| site.sample(&mut self.growth));
        self.interrupter.pause(REST)?;
        Ok(true)
    }

    /// Ends the traffic, and notes the losses that no fault excuses.
    fn count_losses(&mut self, traffic: Vec<Traffic>) -> Packets {
        let mut packets = Packets::default();
        for (cluster, (site, traffic)) in self.sites.iter().zip(traffic).enumerate() {
            let (sent, missing) = traffic.end();
            packets.sent += sent;
            packets.lost += missing.len();
            let missing: Vec<Packet> = missing.iter().map(Packet::from).collect();
            let name = site.name();
            self.wrong.extend(
                unexcused(&self.spells, site.layout, cluster, &missing, self.begin)
                    .into_iter()
                    .map(|line| format!("{name}: {line}")),
            );
        }
        packets
    }

    /// Examines the clusters and the memory of the daemons at the end. Keeps the files if something
    /// is wrong.
    fn examine(&mut self) -> anyhow::Result<()> {
        for site in &self.sites {
            self.wrong.extend(healthy(site, &self.interrupter)?);
        }
        self.wrong.extend(self.growth.found());
        eprintln!("{} daemons were compared with themselves", self.growth.compared());
        if !self.wrong.is_empty() {
            for site in &mut self.sites {
                let files = site.lab.keep_files().display().to_string();
                eprintln!("{}: the files are kept in {files}", site.name());
            }
        }
        shorten(&mut self.wrong);
        Ok(())
    }
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
    let mut found: BTreeMap<LossyPath, Vec<Instant>> = BTreeMap::new();
    for packet in lost {
        if spells.iter().any(|spell| spell.excuses(layout, cluster, packet)) {
            continue;
        }
        let spell = spells.iter().rposition(|spell| spell.begin <= packet.at + ON_ITS_WAY);
        let path = LossyPath { spell, hosts: packet.hosts, family: packet.family };
        found.entry(path).or_default().push(packet.at);
    }
    let mut lines = Vec::new();
    for (path, times) in found {
        let seconds = |at: Option<&Instant>| {
            at.map_or(0.0, |at| at.saturating_duration_since(since).as_secs_f64())
        };
        let first = seconds(times.iter().min());
        let last = seconds(times.iter().max());
        let fault = match path.spell.map(|n| &spells[n]) {
            None => "before the first fault".to_owned(),
            Some(spell) => {
                let word = if times.iter().any(|at| *at <= spell.end) { "during" } else { "after" };
                let other = if spell.cluster == cluster { "" } else { " in the other cluster" };
                format!("{word} `{}`{other}", spell.step)
            }
        };
        let count = times.len();
        let LossyPath { hosts: [from, to], family, .. } = path;
        lines.push(format!(
            "{count} packets from host {from} to host {to} ({family}) lost at {first:.2} to \
             {last:.2} s, {fault}"
        ));
    }
    lines
}

/// A path that lost packets.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct LossyPath {
    /// The last fault before the losses, as its place among the spells.
    spell: Option<usize>,
    hosts: [usize; 2],
    family: Family,
}

/// What is wrong at the end of the soak.
fn healthy(site: &Site, interrupter: &Interrupter) -> anyhow::Result<Vec<String>> {
    let mut wrong = site.settle(RECONNECT)?;
    let begin = Instant::now();
    for host in site.lab.hosts() {
        loop {
            // `repairs` reports that another program changes objects. That program is the soak.
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
    use crate::parts::faults::Fault;

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
