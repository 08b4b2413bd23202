//! The time of the doctor, with faults of this host, of the paths, of the peers and of the store.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::ensure;
use flannel_lab::{Lab, Signal};

use crate::parts::cluster::Families;
use crate::parts::faults::{Backend, Layout, Outage};
use crate::parts::plant::{run as run_in, stop, strangers};
use crate::parts::process::prepare;
use crate::parts::report::{Latency, Report};
use crate::parts::site::Site;
use crate::parts::store::{Etcd, Store};

/// The limit for each fault, in seconds.
const LIMIT: f64 = 10.0;
/// The timeout until a fault takes effect, and until it is over.
const PATIENCE: Duration = Duration::from_secs(60);
const HOSTS: usize = 3;

/// A fault, and the check that names it.
struct Fault {
    check: &'static str,
    plant: fn(&mut Site) -> anyhow::Result<()>,
    end: fn(&mut Site) -> anyhow::Result<()>,
}

/// The faults. The first host asks, the second one is its peer.
const FAULTS: [(&str, Fault); 10] = [
    (
        "forwarding off",
        Fault {
            check: "forwarding",
            plant: |site| Ok(site.host(1).namespace().sysctl("net/ipv4/ip_forward", "0")?),
            end: |site| Ok(site.host(1).namespace().sysctl("net/ipv4/ip_forward", "1")?),
        },
    ),
    (
        "tunnel blocked",
        Fault {
            check: "tunnel",
            plant: |site| drop_at_peer(site, "udp dport 8472"),
            end: pass_at_peer,
        },
    ),
    (
        "full size lost",
        Fault {
            check: "path-mtu",
            plant: |site| drop_at_peer(site, "udp dport 8472 meta length > 1400"),
            end: pass_at_peer,
        },
    ),
    (
        "segments lost",
        Fault {
            check: "segments",
            plant: |site| drop_at_peer(site, "tcp dport 8473 meta length > 1000"),
            end: pass_at_peer,
        },
    ),
    (
        "20 nodes down",
        Fault {
            check: "peer",
            plant: |site| {
                let strangers = strangers(site)?;
                strangers
                    .iter()
                    .try_for_each(|(key, value)| site.store.put(&format!("subnets/{key}"), value))
            },
            end: |site| {
                let strangers = strangers(site)?;
                strangers
                    .iter()
                    .try_for_each(|(key, _)| site.store.delete(&format!("subnets/{key}")))
            },
        },
    ),
    (
        "underlay down",
        Fault {
            check: "underlay",
            plant: |site| Ok(site.lab.switch().drop_frames(site.host(1))?),
            end: |site| Ok(site.lab.switch().pass_frames(site.host(1))?),
        },
    ),
    (
        "store down",
        Fault {
            check: "store",
            plant: |site| site.store.begin(Outage::Gone),
            end: |site| site.store.end(Outage::Gone),
        },
    ),
    (
        "store frozen",
        Fault {
            check: "store",
            plant: |site| site.store.begin(Outage::Frozen),
            end: |site| site.store.end(Outage::Frozen),
        },
    ),
    (
        "peer stopped",
        Fault {
            check: "peer",
            plant: |site| Ok(site.lab.switch().cut(site.host(2))?),
            end: |site| Ok(site.lab.switch().reconnect(site.host(2))?),
        },
    ),
    (
        "daemon down",
        Fault {
            check: "daemon",
            plant: |site| stop(site.host(1), Signal::SIGKILL),
            end: |site| site.start_daemon(site.host(1)),
        },
    ),
];

pub(crate) fn run(families: Families) -> anyhow::Result<Report> {
    let interrupter = prepare()?;
    let lab = Lab::builder()
        .hosts(HOSTS)
        .families(families.iter())
        .config_field("EnableNFTables", true)
        .interrupter(interrupter.clone())
        .start()?;
    let store = Store::Etcd(Etcd::new(&lab)?);
    let layout = Layout { backend: Backend::Vxlan, hosts: HOSTS };
    let mut site = Site::run(lab, store, layout, &interrupter)?;
    let mut kinds = BTreeMap::new();
    let mut wrong = Vec::new();
    let healthy = asks(&site, |found| found.is_empty())?;
    kinds.insert("healthy".to_owned(), Latency::of(&[1000.0 * healthy]));
    for (name, fault) in FAULTS {
        (fault.plant)(&mut site)?;
        let took = asks(&site, |found| found.iter().any(|found| found == fault.check));
        (fault.end)(&mut site)?;
        let took = took.map_err(|error| error.context(name))?;
        eprintln!("{name}: {took:.1} s");
        if took > LIMIT {
            wrong.push(format!("{name}: the doctor takes {took:.1} s, expected at most {LIMIT}"));
        }
        kinds.insert(name.to_owned(), Latency::of(&[1000.0 * took]));
        wrong.extend(site.settle(PATIENCE)?);
        asks(&site, |found| found.is_empty()).map_err(|error| error.context(name))?;
    }
    let worst = kinds.values().map(|latency| latency.p99_ms / 1000.0).fold(0.0, f64::max);
    Ok(Report {
        nodes: Some(u32::try_from(HOSTS)?),
        family: Some(families.name()),
        seconds: Some(worst),
        kinds,
        wrong,
        ..Report::default()
    })
}

/// Asks the doctor until the names of its checks are right. Returns the time of that answer, in
/// seconds.
fn asks(site: &Site, is_right: impl Fn(&[String]) -> bool) -> anyhow::Result<f64> {
    let first = Instant::now();
    loop {
        let begin = Instant::now();
        let findings = site.findings(site.host(1))?;
        let took = begin.elapsed().as_secs_f64();
        let checks: Vec<String> = findings.iter().map(|finding| finding.check.clone()).collect();
        if is_right(&checks) {
            return Ok(took);
        }
        ensure!(first.elapsed() < PATIENCE, "the doctor finds {findings:?}");
    }
}

fn drop_at_peer(site: &mut Site, packets: &str) -> anyhow::Result<()> {
    let peer = site.host(2);
    run_in(peer, "nft add table inet guard")?;
    run_in(peer, "nft add chain inet guard into { type filter hook input priority 0; }")?;
    run_in(peer, &format!("nft add rule inet guard into {packets} drop"))
}

fn pass_at_peer(site: &mut Site) -> anyhow::Result<()> {
    run_in(site.host(2), "nft delete table inet guard")
}
