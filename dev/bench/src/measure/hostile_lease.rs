//! One hostile lease among many others. It is older than all of them, and changes without end.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::ensure;
use flannel_core::address::Family;
use flannel_netlink::testing::ip;
use serde_json::{Value, json};

use crate::parts::cluster::{Families, Peer, peers};
use crate::parts::daemon::Daemon;
use crate::parts::report::Report;

/// The key of the hostile lease. If leases in a directory clash, the one with the smallest key is
/// accepted.
const HOSTILE: &str = "10.0.1.0-24";
/// An ordinary lease that comes and goes. Its route shows that all changes before it are taken in.
const WITNESS: &str = "10.250.0.0-24";
/// The number of changes of each kind.
const CHANGES: u32 = 20;
const PATIENCE: Duration = Duration::from_secs(60);
const CPU_MS: f64 = 50.0;
const RSS_KIB: f64 = 2048.0;

pub(crate) fn run(count: u32, flanneld: Option<PathBuf>) -> anyhow::Result<Report> {
    let command = match flanneld {
        Some(program) => Command::new(program),
        None => {
            let mut command = Command::new(std::env::current_exe()?);
            command.arg("flanneld");
            command
        }
    };
    let options = ["--path-interval=0", "--iptables-forward-rules=false"];
    let mut daemon = Daemon::start_by(command, count, Families::Ipv4, &options)?;
    // The first changes also grow what the daemon keeps for later ones.
    for change in 0..2 * CHANGES {
        witness(&mut daemon, change)?;
    }
    let before = routes(&daemon, count);
    let rss = daemon.kib("VmRSS")?;
    let mut report = Report {
        peers: Some(count),
        samples: Some((CHANGES as usize) * KINDS.len()),
        routes_before: Some(before.len()),
        ..Report::default()
    };
    let mut worst: f64 = 0.0;
    let mut fewest = before.len();
    for (what, value) in KINDS {
        let spent = daemon.processor_time()?;
        for change in 0..CHANGES {
            std::fs::write(daemon.lease_file(HOSTILE), value(count, change))?;
            witness(&mut daemon, change)?;
        }
        let spent = daemon.processor_time()? - spent;
        worst = worst.max(spent.as_secs_f64() * 1e3 / f64::from(CHANGES));
        let after = routes(&daemon, count);
        let lost = before.iter().filter(|route| !after.contains(route));
        report.wrong.extend(lost.take(3).map(|route| format!("{what}: lost {route}")));
        fewest = fewest.min(after.len());
    }
    report.routes_after = Some(fewest);
    report.cpu_ms_per_change = Some(worst);
    let more = daemon.kib("VmRSS")?.saturating_sub(rss);
    report.rss_kib = Some(more);
    report.at_most("cpu_ms_per_change", Some(worst), CPU_MS);
    report.at_most("rss_kib", Some(more as f64), RSS_KIB);
    Ok(report)
}

/// Makes a value for this number of peers. The second number differs for each change.
type Make = fn(u32, u32) -> String;

/// The kinds of hostile values.
const KINDS: [(&str, Make); 6] = [
    ("the MAC address of another node", |count, n| value(&[victim(count, n, false)])),
    ("the MAC address and public address of another node", |count, n| {
        value(&[victim(count, n, true)])
    }),
    ("the MAC addresses of 50 nodes", |count, n| {
        value(&(n..n + 50).map(|n| victim(count, n, false)).collect::<Vec<_>>())
    }),
    ("16 KB of offers", |count, n| {
        value(&(n..n + 120).map(|n| victim(count, n, false)).collect::<Vec<_>>())
    }),
    ("a megabyte of offers", |count, n| {
        value(&(n..n + 8000).map(|n| victim(count, n, false)).collect::<Vec<_>>())
    }),
    ("a megabyte of nonsense", |_, n| format!("{n}{}", "[".repeat(1 << 20))),
];

/// An offer with the MAC address of the `n`th other node.
fn victim(count: u32, n: u32, with_public: bool) -> Value {
    let victim = Peer(2 + n % count);
    let public =
        if with_public { victim.public(Family::V4).to_string() } else { "198.51.100.9".into() };
    let data = json!({ "VNI": 1, "VtepMAC": victim.mac(Family::V4).to_string() });
    json!({ "PublicIP": public, "BackendType": "vxlan", "BackendData": data })
}

fn value(offers: &[Value]) -> String {
    let mut value = offers[0].clone();
    value["OtherOffers"] = offers[1..].into();
    value.to_string()
}

/// Adds the witness, or removes it, and waits for its route.
fn witness(daemon: &mut Daemon, change: u32) -> anyhow::Result<()> {
    let file = daemon.lease_file(WITNESS);
    let is_there = change.is_multiple_of(2);
    if is_there {
        let mut lease = Peer(250 << 8).lease(Families::Ipv4);
        lease.attrs.preferred.public.v4 = Some([198, 51, 100, 250].into());
        std::fs::write(&file, lease.attrs.to_json())?;
    } else {
        std::fs::remove_file(&file)?;
    }
    let begin = Instant::now();
    loop {
        let route = daemon.netns().run(|| ip("-4 route show 10.250.0.0/24"));
        if route.trim().is_empty() != is_there {
            return Ok(());
        }
        ensure!(begin.elapsed() < PATIENCE, "the daemon does not take in a lease: {route:?}");
        daemon.rest(Duration::from_millis(5))?;
    }
}

/// The routes to the other peers.
fn routes(daemon: &Daemon, count: u32) -> Vec<String> {
    let theirs: BTreeSet<String> =
        peers(count).map(|peer| peer.subnet(Family::V4).to_string()).collect();
    let shown = daemon.netns().run(|| ip("-4 route show dev flannel.1"));
    shown
        .lines()
        .filter(|line| line.split_whitespace().next().is_some_and(|dst| theirs.contains(dst)))
        .map(str::to_owned)
        .collect()
}
