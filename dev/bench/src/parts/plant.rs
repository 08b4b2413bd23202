//! Plants the faults of a soak in a cluster, and ends them.

use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use flannel_core::address::Family;
use flannel_core::{Subnet, Subnets};
use flannel_lab::{Host, Signal};
use serde_json::{Value, json};

use crate::parts::faults::{Fault, Kind};
use crate::parts::site::{Site, public, router};

/// The time for the doctor to name a fault, and for a daemon without a lease to end.
const PATIENCE: Duration = Duration::from_secs(10);
/// The number of nodes that come and go.
const STRANGERS: usize = 20;
/// A MAC address that no host has.
const STRANGER: &str = "0a:99:99:99:99:99";

impl Fault {
    /// Plants the fault.
    pub(crate) fn plant(self, site: &mut Site) -> anyhow::Result<()> {
        let host = site.host(self.host);
        match self.kind {
            Kind::DaemonKilled => stop(host, Signal::SIGKILL)?,
            Kind::DaemonStopped => stop(host, Signal::SIGTERM)?,
            Kind::AllDaemonsKilled => {
                for host in short_lived(site) {
                    stop(host, Signal::SIGKILL)?;
                }
            }
            Kind::FirewallWiped => run(host, "nft flush ruleset")?,
            Kind::SubnetFileRemoved => std::fs::remove_file(host.subnet_file())?,
            Kind::UnderlayMtu => run(host, "ip link set eth0 mtu 1400")?,
            Kind::ConfigChanged => {
                site.store.put("config", &config(site, |backend| backend["MTU"] = 1400.into())?)?;
            }
            Kind::ConfigImpossible => {
                for host in site.lab.hosts() {
                    run(host, "ip link add stranger type vxlan id 7 dstport 8472 dev eth0")?;
                }
                let impossible =
                    |backend: &mut Value| *backend = json!({ "Type": "vxlan", "VNI": 7 });
                site.store.put("config", &config(site, impossible)?)?;
            }
            Kind::LeasesChurned => {
                for (key, value) in strangers(site)? {
                    site.store.put(&format!("subnets/{key}"), &value)?;
                }
            }
            Kind::StoreCompacted => {
                site.lab.switch().drop_frames(host)?;
                let strangers = strangers(site)?;
                for (key, value) in &strangers {
                    site.store.put(&format!("subnets/{key}"), value)?;
                }
                for (key, _) in &strangers {
                    site.store.delete(&format!("subnets/{key}"))?;
                }
                site.store.compact()?;
            }
            Kind::LeaseDeleted => {
                let subnets = Subnets::new(site.envs[self.host - 1].subnets.values().copied());
                let key = subnets.context("a host with a lease has a subnet")?;
                site.store.delete(&format!("subnets/{key}"))?;
            }
            Kind::LinkDown => run(host, "ip link set eth0 down")?,
            Kind::CarrierLost => site.lab.switch().cut(host)?,
            Kind::FramesDropped => site.lab.switch().drop_frames(host)?,
            Kind::PathBlocked => self.block(site)?,
            Kind::ForwardingOff | Kind::TunnelForwardingOff | Kind::ArpIgnored => {
                let (key, value, _) = self.sysctl()?;
                host.namespace().sysctl(key, value)?;
            }
            _ => run(host, &self.drift(site)?)?,
        }
        Ok(())
    }

    /// Ends what the daemons do not repair.
    pub(crate) fn end(self, site: &Site) -> anyhow::Result<()> {
        let host = site.host(self.host);
        match self.kind {
            Kind::DaemonKilled | Kind::DaemonStopped => site.start_daemon(host)?,
            Kind::AllDaemonsKilled => {
                for host in short_lived(site) {
                    site.start_daemon(host)?;
                }
            }
            Kind::UnderlayMtu => {
                run(host, "ip link set eth0 mtu 1500")?;
                forget_path_mtus(site)?;
            }
            Kind::ConfigChanged => {
                site.store.put("config", &config(site, |_| ())?)?;
                forget_path_mtus(site)?;
            }
            Kind::ConfigImpossible => {
                site.store.put("config", &config(site, |_| ())?)?;
                for host in site.lab.hosts() {
                    run(host, "ip link delete stranger")?;
                }
            }
            Kind::LeasesChurned => {
                for (key, _) in strangers(site)? {
                    site.store.delete(&format!("subnets/{key}"))?;
                }
            }
            Kind::LeaseDeleted => {
                let begin = Instant::now();
                // It stops, because somebody deleted its lease. A service manager starts it again.
                while host.check_daemon().is_ok() {
                    ensure!(begin.elapsed() < PATIENCE, "its daemon goes on without a lease");
                    std::thread::park_timeout(Duration::from_millis(10));
                }
                site.start_daemon(host)?;
            }
            Kind::LinkDown => site.raise_link(self.host)?,
            Kind::CarrierLost => site.lab.switch().reconnect(host)?,
            Kind::FramesDropped | Kind::StoreCompacted => {
                let bridge = format!("br{}", site.layout.link(self.host));
                let port = format!("link set port-{} master {bridge}\n", self.host);
                site.lab.switch().namespace().ip(&port)?;
            }
            Kind::PathBlocked => run(host, "nft delete table inet soak")?,
            Kind::ForwardingOff | Kind::TunnelForwardingOff | Kind::ArpIgnored => {
                self.cure(site)?;
            }
            _ => {}
        }
        Ok(())
    }

    /// Drops the packets of the peer: in the tunnel, or for the pods of the host.
    fn block(self, site: &Site) -> anyhow::Result<()> {
        let host = site.host(self.host);
        run(host, "nft add table inet soak")?;
        for (chain, hook) in [("arriving", "input"), ("passing", "forward")] {
            let chain = format!("add chain inet soak {chain}");
            let hook = format!("{{ type filter hook {hook} priority 0; }}");
            run(host, &format!("nft {chain} {hook}"))?;
        }
        for (family, word) in [(Family::V4, "ip"), (Family::V6, "ip6")] {
            let underlay = public(site.layout, self.peer, family);
            let pods = subnet(site, self.peer, family)?;
            run(
                host,
                &format!(
                    "nft add rule inet soak arriving {word} saddr {underlay} udp dport 8472 drop"
                ),
            )?;
            run(host, &format!("nft add rule inet soak passing {word} saddr {pods} drop"))?;
        }
        Ok(())
    }

    /// A sysctl, its wrong value, and the doctor's check of it.
    fn sysctl(self) -> anyhow::Result<(&'static str, &'static str, &'static str)> {
        Ok(match self.kind {
            Kind::ForwardingOff => ("net/ipv4/ip_forward", "0", "forwarding"),
            Kind::TunnelForwardingOff => ("net/ipv4/conf/flannel.1/forwarding", "0", "forwarding"),
            Kind::ArpIgnored => ("net/ipv4/conf/eth0/arp_ignore", "8", "arp"),
            kind => bail!("{} is no sysctl", kind.name()),
        })
    }

    /// Runs the command of the doctor's finding.
    fn cure(self, site: &Site) -> anyhow::Result<()> {
        let host = site.host(self.host);
        let (key, _, check) = self.sysctl()?;
        let begin = Instant::now();
        loop {
            let findings = site.findings(host)?;
            let found = findings.iter().find(|finding| finding.check == check);
            if let Some(command) = found.and_then(|finding| finding.repair.as_deref()) {
                let mut shell = Command::new("sh");
                let output = host.namespace().output(shell.args(["-ec", command]))?;
                let error = String::from_utf8_lossy(&output.stderr);
                ensure!(output.status.success(), "{command}: {}", error.trim());
                return Ok(());
            }
            ensure!(
                begin.elapsed() < PATIENCE,
                "the doctor does not name {key}: it finds {findings:?}"
            );
        }
    }

    /// The command with which another program changes an object of the daemon.
    fn drift(self, site: &Site) -> anyhow::Result<String> {
        let host = site.host(self.host);
        let family = self.family;
        let v4 = family == Family::V4;
        let subnet = subnet(site, self.peer, family)?;
        let (inet, device) = if v4 { ("-4", "flannel.1") } else { ("-6", "flannel-v6.1") };
        let tunnel = subnet.base();
        Ok(match self.kind {
            Kind::DeviceDeleted => format!("ip link del {device}"),
            Kind::DeviceDown => format!("ip link set {device} down"),
            Kind::RouteDeleted => format!("ip {inet} route del {subnet}"),
            Kind::RouteToNowhere => format!("ip {inet} route replace blackhole {subnet}"),
            Kind::RouteElsewhere => {
                let router = router(site.layout, self.host, family);
                format!("ip {inet} route replace {subnet} via {router} dev eth0")
            }
            // iproute2 6.1 cannot flush routes by nexthop object. The kernel deletes them with it.
            Kind::RoutesFlushed if v4 => "ip nexthop flush protocol 241".into(),
            Kind::RoutesFlushed => "ip -6 route flush root fd00:10:244::/48 proto 241".into(),
            Kind::NexthopDeleted => {
                let v4 = self::subnet(site, self.peer, Family::V4)?;
                let routes = host.run("ip", &["-j", "route", "show", &v4.to_string()])?;
                let routes: Value = serde_json::from_str(&routes)?;
                let id = routes[0]["nhid"].as_u64().context("a route without a nexthop object")?;
                format!("ip nexthop del id {id}")
            }
            Kind::NeighbourDeleted => format!("ip neigh del {tunnel} dev {device}"),
            Kind::NeighbourChanged => {
                format!("ip neigh replace {tunnel} lladdr {STRANGER} dev {device} nud permanent")
            }
            Kind::EntryDeleted | Kind::EntryChanged => {
                let neighbours = host.run("ip", &["-j", inet, "neigh", "show", "dev", device])?;
                let neighbours: Vec<Value> = serde_json::from_str(&neighbours)?;
                let peer = neighbours.iter().find(|entry| entry["dst"] == tunnel.to_string());
                let mac = peer.and_then(|entry| entry["lladdr"].as_str());
                let mac = mac.with_context(|| format!("{tunnel} has no neighbour entry"))?;
                if self.kind == Kind::EntryDeleted {
                    format!("bridge fdb del {mac} dev {device}")
                } else {
                    let router = router(site.layout, self.host, family);
                    format!("bridge fdb replace {mac} dev {device} dst {router} self permanent")
                }
            }
            kind => bail!("{} changes no object", kind.name()),
        })
    }
}

/// Ends the daemon of a host.
pub(crate) fn stop(host: &Host, signal: Signal) -> anyhow::Result<()> {
    host.stop_daemon(signal)?.with_context(|| format!("{} has no daemon", host.name()))?;
    Ok(())
}

/// Runs a command on a host.
pub(crate) fn run(host: &Host, command: &str) -> anyhow::Result<()> {
    let words: Vec<&str> = command.split_whitespace().collect();
    let (program, args) = words.split_first().context("an empty command")?;
    host.run(program, args)?;
    Ok(())
}

/// The hosts whose daemons may be restarted.
fn short_lived(site: &Site) -> impl Iterator<Item = &Host> {
    let layout = site.layout;
    site.lab.hosts().iter().filter(move |host| !layout.lives_long(host.number()))
}

fn subnet(site: &Site, host: usize, family: Family) -> anyhow::Result<Subnet> {
    site.envs[host - 1].subnets[family].context("every host has a subnet of each family")
}

/// The network config with a changed backend.
fn config(site: &Site, change: impl FnOnce(&mut Value)) -> anyhow::Result<String> {
    // The lab's own file is the registry of one of the clusters.
    let mut config: Value = serde_json::from_str(&site.config)?;
    change(&mut config["Backend"]);
    Ok(config.to_string())
}

/// Kernels remember for ten minutes that a path took smaller packets.
fn forget_path_mtus(site: &Site) -> anyhow::Result<()> {
    for host in site.lab.hosts() {
        run(host, "ip route flush cache")?;
        run(host, "ip -6 route flush cache")?;
    }
    Ok(())
}

/// Leases of nodes that do not exist, with subnets that no host has.
pub(crate) fn strangers(site: &Site) -> anyhow::Result<Vec<(String, String)>> {
    let kind = site.name();
    let mut found = Vec::new();
    for n in 1..=255 {
        let texts = [format!("10.244.{n}.0/24"), format!("fd00:10:244:{n:x}::/64")];
        let subnets = texts.iter().map(|text| text.parse()).collect::<Result<Vec<Subnet>, _>>()?;
        let mut all = site.envs.iter().flat_map(|env| env.subnets.values());
        if all.any(|other| subnets.iter().any(|subnet| other.overlaps(subnet))) {
            continue;
        }
        let data = |bits: u8| {
            serde_json::json!({
                "VNI": 1, "VtepMAC": format!("0a:00:00:00:{bits:02x}:{n:02x}")
            })
        };
        let mut value = serde_json::json!({
            "PublicIP": format!("192.168.77.{}", 100 + found.len()),
            "PublicIPv6": format!("fd00:77::{:x}", 0x100 + found.len()),
            "BackendType": kind,
        });
        if kind == "vxlan" {
            value["BackendData"] = data(4);
            value["BackendV6Data"] = data(6);
        }
        let key = Subnets::new(subnets).context("two subnets")?;
        found.push((key.to_string(), value.to_string()));
        if found.len() == STRANGERS {
            break;
        }
    }
    Ok(found)
}
