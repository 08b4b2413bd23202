//! A cluster of real daemons in the lab, for long checks: its start, its health, and the state of
//! its kernels.

use std::collections::BTreeSet;
use std::fmt::Write;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use flannel_api::{Client, Finding, StatusReport};
use flannel_core::address::Family;
use flannel_lab::{Host, Interrupter, Lab, SubnetEnv};
use serde_json::Value;

use crate::parts::faults::{Backend, Layout};
use crate::parts::growth::Growth;
use crate::parts::store::{Etcd, Store};

/// The pause between two looks at a cluster that is not healthy yet.
const LOOK: Duration = Duration::from_millis(50);

/// The largest cluster whose pods are probed. The daemons of a larger one probe all paths.
const PROBED: usize = 40;

/// Depends on the machine: the doctor of a lab reports the module `br_netfilter`.
const OF_THE_MACHINE: &str = "bridge-netfilter";

/// A cluster. Dropping it ends all of its processes.
#[derive(Debug)]
pub(crate) struct Site {
    pub(crate) lab: Lab,
    pub(crate) store: Store,
    pub(crate) layout: Layout,
    /// The network config at the start.
    pub(crate) config: String,
    /// The options of its daemons.
    options: Vec<String>,
    /// The subnets of the hosts.
    pub(crate) envs: Vec<SubnetEnv>,
    /// The state of each host's kernel while nothing is wrong.
    healthy: Vec<BTreeSet<String>>,
    interrupter: Interrupter,
}

impl Site {
    /// Makes the hosts of a soak and starts their daemons: with vxlan on etcd, with host-gw on a
    /// directory. The first has its firewall rules in nftables, the second in iptables.
    pub(crate) fn start(layout: Layout, interrupter: &Interrupter) -> anyhow::Result<Self> {
        let builder = Lab::builder().families(Family::BOTH);
        let builder = match layout.backend {
            Backend::Vxlan => builder
                .backend(serde_json::json!({ "Type": "vxlan", "DirectRouting": true }))
                .config_field("EnableNFTables", true),
            Backend::HostGw => builder.backend("host-gw"),
        };
        let lab = builder.hosts(layout.hosts).interrupter(interrupter.clone()).start()?;
        if layout.backend == Backend::Vxlan {
            second_link(&lab, layout)?;
        }
        let store = match layout.backend {
            Backend::Vxlan => Store::Etcd(Etcd::new(&lab)?),
            Backend::HostGw => Store::Directory(lab.registry().to_owned()),
        };
        Self::run(lab, store, layout, interrupter)
    }

    /// Starts the daemons of a lab, and waits until every pod reaches every other.
    pub(crate) fn run(
        lab: Lab,
        store: Store,
        layout: Layout,
        interrupter: &Interrupter,
    ) -> anyhow::Result<Self> {
        let mut options = store.options();
        options.push("--ip-masq".into());
        let config = std::fs::read_to_string(lab.registry().join("config"))?;
        let interrupter = interrupter.clone();
        let envs = Vec::new();
        let healthy = Vec::new();
        let mut site = Self { lab, store, layout, config, options, envs, healthy, interrupter };
        for host in site.lab.hosts() {
            // Those that the machine may have would drop packets, which the doctor reports.
            for device in ["all", "default", "eth0"] {
                host.namespace().sysctl(&format!("net/ipv4/conf/{device}/rp_filter"), "0")?;
            }
            site.interrupter.check()?;
            site.start_daemon(host)?;
        }
        site.lab.add_pods(site.patience())?;
        for host in site.lab.hosts() {
            site.envs.push(host.subnet_env()?.context("a host with a pod has no subnet file")?);
        }
        let wrong = site.settle(site.patience())?;
        ensure!(wrong.is_empty(), "the cluster does not start: {:.1000}", wrong.join("; "));
        site.healthy = site.lab.hosts().iter().map(picture).collect::<Result<_, _>>()?;
        Ok(site)
    }

    /// The time for the start, on a slow machine.
    fn patience(&self) -> Duration {
        let hosts = self.lab.hosts().len() as u64;
        Duration::from_millis(60_000 + 10 * hosts * hosts)
    }

    /// The name in messages.
    pub(crate) fn name(&self) -> &'static str {
        match self.layout.backend {
            Backend::Vxlan => "vxlan",
            Backend::HostGw => "host-gw",
        }
    }

    /// A host by its number.
    pub(crate) fn host(&self, number: usize) -> &Host {
        &self.lab.hosts()[number - 1]
    }

    pub(crate) fn start_daemon(&self, host: &Host) -> anyhow::Result<()> {
        let options: Vec<&str> = self.options.iter().map(String::as_str).collect();
        Ok(host.start_daemon_with(&options)?)
    }

    /// The status of each daemon.
    pub(crate) fn statuses(&self) -> anyhow::Result<Vec<StatusReport>> {
        self.lab.hosts().iter().map(|host| Ok(status(host)?)).collect()
    }

    /// Waits until all daemons are ready, the kernels are as they were at the start, and every pod
    /// reaches every other, unless they are too many. Returns what is wrong in the end.
    pub(crate) fn settle(&self, patience: Duration) -> anyhow::Result<Vec<String>> {
        let deadline = Instant::now() + patience;
        loop {
            self.interrupter.pause(LOOK)?;
            let wrong = self.problems()?;
            if wrong.is_empty() {
                break;
            }
            if Instant::now() > deadline {
                return Ok(wrong);
            }
        }
        if self.lab.hosts().len() > PROBED {
            return Ok(Vec::new());
        }
        let left = deadline.saturating_duration_since(Instant::now());
        let matrix = self.lab.matrix(left.max(Duration::from_secs(1)))?;
        Ok(matrix
            .failures()
            .map(|pair| {
                let why = pair.error.as_ref().map(ToString::to_string).unwrap_or_default();
                format!("{} does not reach {} ({}): {why}", pair.from, pair.to, pair.family)
            })
            .collect())
    }

    /// What is not as it should be, without the paths between pods.
    fn problems(&self) -> anyhow::Result<Vec<String>> {
        let mut wrong = Vec::new();
        for (n, host) in self.lab.hosts().iter().enumerate() {
            self.interrupter.check()?;
            if let Err(why) = self.is_healthy(n, host) {
                wrong.push(format!("{}: {why:#}", host.name()));
            }
        }
        Ok(wrong)
    }

    fn is_healthy(&self, n: usize, host: &Host) -> anyhow::Result<()> {
        host.check_daemon()?;
        let status = status(host)?;
        let problems: Vec<&str> = status.problems.iter().map(|p| p.text.as_str()).collect();
        ensure!(status.ready && problems.is_empty(), "it reports {problems:?}");
        let network = status.network.context("no network runs")?;
        let peers = self.lab.hosts().len() as u64 - 1;
        ensure!(
            network.in_sync && network.live && network.accepted == peers && network.rejected == 0,
            "in sync: {}, live: {}, {} of {peers} peers, {} rejected",
            network.in_sync,
            network.live,
            network.accepted,
            network.rejected
        );
        let env = host.subnet_env()?.context("it has no subnet file")?;
        if let Some(before) = self.envs.get(n) {
            ensure!(env == *before, "its subnet file has {env:?}, before it had {before:?}");
        }
        if let Some(healthy) = self.healthy.get(n) {
            let now = picture(host)?;
            let missing: Vec<&String> = healthy.difference(&now).collect();
            let added: Vec<&String> = now.difference(healthy).collect();
            let differs = !(missing.is_empty() && added.is_empty());
            ensure!(
                !differs,
                "missing: {:.500}, too much: {:.500}",
                shown(&missing),
                shown(&added)
            );
        }
        Ok(())
    }

    /// Takes a sample of each daemon.
    pub(crate) fn sample(&self, growth: &mut Growth) {
        for host in self.lab.hosts() {
            if let Some(pid) = host.daemon_pid() {
                growth.sample(&format!("{} {}", self.name(), host.name()), pid);
            }
        }
    }

    /// The doctor's findings on a host.
    pub(crate) fn findings(&self, host: &Host) -> anyhow::Result<Vec<Finding>> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["ctl", "doctor", "--json", "--iface", "eth0"]).args(self.store.options());
        command.arg("--control-socket").arg(host.dir().join("flanneld.sock"));
        command.arg("--subnet-file").arg(host.subnet_file());
        command.arg("--state-dir").arg(host.dir().join("state"));
        let output = host.namespace().output(&mut command)?;
        let mut answer: Value = serde_json::from_slice(&output.stdout).with_context(|| {
            format!("{}: doctor: {}", host.name(), String::from_utf8_lossy(&output.stderr))
        })?;
        let findings: Vec<Finding> = serde_json::from_value(answer["findings"].take())?;
        Ok(findings.into_iter().filter(Self::is_of_the_lab).collect())
    }

    /// Whether a finding does not depend on the machine.
    pub(crate) fn is_of_the_lab(finding: &Finding) -> bool {
        finding.check != OF_THE_MACHINE
    }

    /// The owner of a host's link sets it up, with its addresses and default routes.
    pub(crate) fn raise_link(&self, host: usize) -> anyhow::Result<()> {
        Ok(self.host(host).namespace().ip(&uplink(self.layout, host))?)
    }
}

fn status(host: &Host) -> Result<StatusReport, flannel_api::Error> {
    Client::new(host.dir().join("flanneld.sock")).status()
}

fn shown(lines: &[&String]) -> String {
    format!("{lines:?}")
}

/// The address of a host, or of the router if the number is 254, on its link.
fn address(link: usize, family: Family, n: usize) -> String {
    match family {
        Family::V4 => format!("192.168.{}.{n}", 77 + link),
        Family::V6 => format!("fd00:{}::{n:x}", 77 + link),
    }
}

/// The address of a host's router.
pub(crate) fn router(layout: Layout, host: usize, family: Family) -> String {
    address(layout.link(host), family, 254)
}

/// The address of a host's `eth0`.
pub(crate) fn public(layout: Layout, host: usize, family: Family) -> String {
    address(layout.link(host), family, host)
}

/// Lines for `ip` that set up the link of a host.
fn uplink(layout: Layout, host: usize) -> String {
    let [v4, v6] = Family::BOTH.map(|family| public(layout, host, family));
    let mut lines = format!(
        "link set eth0 up\naddr replace fe80::{host:x}/64 dev eth0 nodad\n\
         addr replace {v4}/24 dev eth0\naddr replace {v6}/64 dev eth0 nodad\n"
    );
    for family in Family::BOTH {
        let _ = writeln!(lines, "route replace default via {}", router(layout, host, family));
    }
    lines
}

/// Moves the hosts of the second link to a bridge of their own. The switch is its router.
fn second_link(lab: &Lab, layout: Layout) -> anyhow::Result<()> {
    let switch = lab.switch().namespace();
    let [v4, v6] = Family::BOTH.map(|family| address(1, family, 254));
    let mut batch = format!(
        "link add br1 type bridge stp_state 0 mcast_snooping 0\n\
         link set br1 addrgenmode none\naddr add fe80::fe/64 dev br1 nodad\n\
         addr add {v4}/24 dev br1\naddr add {v6}/64 dev br1 nodad\nlink set br1 up\n"
    );
    let moved: Vec<&Host> =
        lab.hosts().iter().filter(|host| layout.link(host.number()) == 1).collect();
    for host in &moved {
        let _ = writeln!(batch, "link set port-{} nomaster", host.number());
        let _ = writeln!(batch, "link set port-{} master br1", host.number());
    }
    // Otherwise a bridge changes its address with its ports, and hosts lose their router.
    batch += "link set br0 address 02:f1:00:00:01:00\nlink set br1 address 02:f1:00:00:01:01\n";
    switch.ip(&batch)?;
    switch.sysctl("net/ipv4/ip_forward", "1")?;
    switch.sysctl("net/ipv6/conf/all/forwarding", "1")?;
    for host in moved {
        let [v4, v6] = Family::BOTH.map(|family| address(0, family, 254));
        // An IPv6 address does not take its default route with it.
        let lines = format!(
            "route del default via {v4}\nroute del default via {v6}\n\
             addr flush dev eth0 scope global\n"
        );
        host.namespace().ip(&(lines + &uplink(layout, host.number())))?;
    }
    Ok(())
}

/// What the daemon, the lab and their neighbours have in the kernel, as iproute2 and nft show it.
fn picture(host: &Host) -> anyhow::Result<BTreeSet<String>> {
    let mut lines = BTreeSet::new();
    for (program, args) in [
        ("ip", "-4 route show table main"),
        ("ip", "-6 route show table main"),
        ("ip", "-o nexthop show"),
        ("ip", "-4 neigh show nud permanent"),
        ("ip", "-6 neigh show nud permanent"),
        ("ip", "-o link show"),
        ("ip", "-o -d link show type vxlan"),
        ("ip", "-o address show scope global"),
        ("bridge", "fdb show"),
        ("nft", "-s list ruleset"),
    ] {
        let text = host.run(program, &args.split(' ').collect::<Vec<_>>())?;
        for line in text.lines() {
            // Entries of other bridges are learned.
            if program != "bridge" || line.contains(" dev flannel") {
                lines.insert(format!("{program} {}", plain(line)));
            }
        }
    }
    Ok(lines)
}

/// A line without what may change: the index of a device, the ids of nexthop objects, and the state
/// that a tunnel has after a change of its carrier.
fn plain(line: &str) -> String {
    let line = line.replace('\\', " ").replace(" state UP ", " state UNKNOWN ");
    let mut words = line.split_whitespace();
    let mut kept = Vec::new();
    while let Some(word) = words.next() {
        let is_first = kept.is_empty();
        let is_index = word.strip_suffix(':').is_some_and(|text| text.parse::<u32>().is_ok());
        if word == "nhid" || (is_first && word == "id") {
            words.next();
        } else if !(is_first && is_index) {
            kept.push(word);
        }
    }
    kept.join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_has_no_indexes_and_no_ids() {
        for (line, expected) in [
            (
                "id 17 via 10.1.7.0 dev flannel.1 scope link proto 241 onlink",
                "via 10.1.7.0 dev flannel.1 scope link proto 241 onlink",
            ),
            (
                "10.1.7.0/24 nhid 17 via 10.1.7.0 dev flannel.1 onlink ",
                "10.1.7.0/24 via 10.1.7.0 dev flannel.1 onlink",
            ),
            (
                "7: flannel.1: <UP> mtu 1450 state UP mode\\    vxlan id 1 local 192.168.77.1",
                "flannel.1: <UP> mtu 1450 state UNKNOWN mode vxlan id 1 local 192.168.77.1",
            ),
        ] {
            assert_eq!(plain(line), expected);
        }
    }
}
