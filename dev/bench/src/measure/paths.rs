//! The cost of the probes of paths, at a daemon whose peers all answer.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, ensure};
use flannel_api::{Client, PathState, StatusReport};
use flannel_core::address::Family;
use flannel_netlink::testing::{Netns, bridge, ip, run as run_program};

use crate::parts::cluster::{Families, Peer};
use crate::parts::daemon::{Daemon, program};
use crate::parts::report::Report;

/// The maximum processor time of the probes, in per cent of a core.
const CPU_PERCENT: f64 = 1.0;
/// The maximum memory that the probes add.
const RSS_KIB: u64 = 2048;
/// The time after which a daemon is idle.
const SETTLE: Duration = Duration::from_secs(10);

pub(crate) fn run(peers: u32, seconds: u64, flanneld: Option<PathBuf>) -> anyhow::Result<Report> {
    let program = program(flanneld)?;
    let time = Duration::from_secs(seconds);
    let without = measure(&program, peers, "--path-interval=0", time)?;
    let with = measure(&program, peers, "--path-interval=300", time)?;
    let probed = with.probed;
    let wanted = ((f64::from(peers) / 300.0).max(4.0) * seconds as f64).min(f64::from(peers));
    let mut report = Report {
        peers: Some(peers),
        seconds: Some(seconds as f64),
        cpu_percent: Some(((with.cpu - without.cpu) * 10_000.0).round() / 100.0),
        rss_kib: Some(with.rss_kib.saturating_sub(without.rss_kib)),
        wrong: with.wrong,
        ..Report::default()
    };
    report.at_most("cpu_percent", report.cpu_percent, CPU_PERCENT);
    report.at_most("rss_kib", report.rss_kib.map(|kib| kib as f64), RSS_KIB as f64);
    if (probed as f64) < wanted * 0.9 {
        report.wrong.push(format!("{probed} paths have a result, expected {wanted:.0}"));
    }
    Ok(report)
}

/// The cost of one daemon.
struct Cost {
    /// The processor time, as a share of one core.
    cpu: f64,
    rss_kib: u64,
    /// The number of paths that are known to work.
    probed: u64,
    wrong: Vec<String>,
}

fn measure(program: &Path, peers: u32, option: &str, time: Duration) -> anyhow::Result<Cost> {
    let mut daemon = Daemon::start(program, peers, Families::Ipv4, &[option])?;
    let far = Netns::new()?;
    answer_for_all(&daemon, &far)?;
    daemon.rest(SETTLE)?;
    let before = daemon.processor_time()?;
    daemon.rest(time)?;
    let spent = daemon.processor_time()? - before;
    let rss_kib = daemon.kib("VmRSS")?;
    let mut wrong = daemon.compare()?;
    let paths = status(&daemon)?.network.and_then(|network| network.paths);
    let (probed, failing) = paths.map_or((0, 0), |paths| {
        (paths.states.get(&PathState::Ok).copied().unwrap_or_default(), paths.failing)
    });
    if failing > 0 {
        wrong.push(format!("{failing} paths fail"));
    }
    Ok(Cost { cpu: spent.as_secs_f64() / time.as_secs_f64(), rss_kib, probed, wrong })
}

fn status(daemon: &Daemon) -> anyhow::Result<StatusReport> {
    Ok(Client::new(daemon.control_socket()).status()?)
}

fn nft(args: &str) {
    run_program("nft", args);
}

/// Makes one host that has the addresses of all peers: public ones, and addresses of their tunnels.
fn answer_for_all(daemon: &Daemon, far: &Netns) -> anyhow::Result<()> {
    let lease = status(daemon)?.network.context("no network runs")?.lease;
    let own = lease.subnets.first().context("a lease without subnets")?.clone();
    let tunnel = own.split('/').next().unwrap_or_default().to_owned();
    let mac = daemon.netns().run(|| ip("-j link show flannel.1"));
    let mac: serde_json::Value = serde_json::from_str(&mac)?;
    let mac = mac[0]["address"].as_str().context("flannel.1 has no address")?.to_owned();
    let move_wire = format!("link set wire netns {}", far.path().display());
    daemon.netns().run(|| drop(ip(&move_wire)));
    let public = Peer(2).public(Family::V4);
    ensure!(public.to_string().starts_with("172.16."), "{public} is not in 172.16.0.0/12");
    far.run(|| {
        for args in [
            "link set lo up".to_owned(),
            "link set wire up".to_owned(),
            "addr add 192.0.2.254/24 dev wire".to_owned(),
            "link add flannel.1 type vxlan id 1 dstport 8472 local 192.0.2.254 nolearning".into(),
            "link set flannel.1 up".to_owned(),
            // In the main table, so that the route to this daemon's subnet is more specific.
            "route add local 172.16.0.0/12 dev lo table main".to_owned(),
            "route add local 10.0.0.0/8 dev lo table main".to_owned(),
            format!("route add {own} dev flannel.1"),
            format!("neigh add {tunnel} lladdr {mac} dev flannel.1"),
        ] {
            ip(&args);
        }
        bridge(&format!("fdb add {mac} dev flannel.1 dst 192.0.2.1"));
        // Each peer has a MAC address of its own, and this host accepts all of them.
        nft("add table netdev t");
        nft("add chain netdev t c { type filter hook ingress device flannel.1 priority 0; }");
        nft("add rule netdev t c meta pkttype set host");
    });
    Ok(())
}
