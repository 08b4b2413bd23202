//! Moves to WireGuard, in a guest whose kernel has it.

use std::process::Command;
use std::time::Duration;

use flannel_lab::testing::stream::Traffic;
use flannel_lab::{Host, Lab};
use serde_json::Value;
use test_support::eventually;
use test_support::guest::in_qemu;

use super::cluster::{Cluster, Pace, at_once, under_traffic};

const MODULES: [&str; 9] = [
    "veth",
    "bridge",
    "vxlan",
    "wireguard",
    "nf_tables",
    "nft_chain_nat",
    "nft_ct",
    "nft_masq",
    "nft_compat",
];

/// Programs in the guest are slow.
const PACE: Pace = Pace { patience: Duration::from_secs(120), gap: Duration::from_millis(100) };

fn lab() -> flannel_lab::Builder {
    Lab::builder().config_field("EnableNFTables", true)
}

/// The device by which a host sends packets to the pod of another one.
fn device(from: &Host, to: &Host) -> String {
    let pod = to.pod().unwrap().addresses().v4.unwrap().to_string();
    let route = from.run("ip", &["route", "get", &pod]).unwrap();
    let device = route.split_whitespace().skip_while(|word| *word != "dev").nth(1);
    device.unwrap_or_else(|| panic!("{route}")).to_owned()
}

/// Whether a small ping from the pod of a host reaches the pod of another one. A large one may not
/// pass, because the pod has the MTU of the old backend.
fn ping(from: &Host, to: &Host) -> bool {
    let to = to.pod().unwrap().addresses().v4.unwrap().to_string();
    let mut command = Command::new("ping");
    let pod = from.pod().unwrap();
    pod.namespace().output(command.args(["-c", "1", "-W", "3", &to])).unwrap().status.success()
}

fn nft(host: &Host, commands: &[&str]) {
    for command in commands {
        host.run("nft", &command.split_whitespace().collect::<Vec<_>>()).unwrap();
    }
}

/// Counts the packets of pods that leave a host unencrypted: packets of vxlan, and plain packets.
struct Watch<'a>(&'a Lab);

impl<'a> Watch<'a> {
    fn start(lab: &'a Lab) -> Self {
        let pods = Self::pods(lab);
        let mut script = String::from("add table netdev watch\n");
        for n in lab.hosts().iter().map(Host::number) {
            script += &format!(
                "add chain netdev watch from{n} {{ type filter hook ingress device port-{n} \
                 priority 0; }}\n\
                 add rule netdev watch from{n} udp dport 8472 counter\n\
                 add rule netdev watch from{n} ip saddr {pods} counter\n\
                 add rule netdev watch from{n} ip daddr {pods} counter\n"
            );
        }
        let file = lab.dir().join("watch.nft");
        std::fs::write(&file, script).unwrap();
        Self::nft(lab, &["-f", file.to_str().unwrap()]);
        Self(lab)
    }

    fn pods(lab: &Lab) -> String {
        let text = std::fs::read_to_string(lab.registry().join("config")).unwrap();
        let config: Value = serde_json::from_str(&text).unwrap();
        config["Network"].as_str().unwrap().to_owned()
    }

    fn nft(lab: &Lab, args: &[&str]) -> String {
        let mut command = Command::new("nft");
        let output = lab.switch().namespace().output(command.args(args)).unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    }

    fn unencrypted(&self, from: &Host) -> u64 {
        let chain = format!("from{}", from.number());
        let shown = Self::nft(self.0, &["list", "chain", "netdev", "watch", &chain]);
        let counts = shown.split("counter packets ").skip(1);
        let count = |text: &str| text.split_whitespace().next()?.parse::<u64>().ok();
        let counts: Vec<u64> = counts.map(|text| count(text).unwrap()).collect();
        assert_eq!(counts.len(), 3, "{shown}");
        counts.iter().sum()
    }
}

/// The hosts read a config with `RequireEncryption` one after the other. Those that have read it
/// drop packets to those that have not.
#[test]
fn a_move_to_required_encryption_sends_no_packet_unencrypted() {
    in_qemu(&MODULES, || {
        let cluster = Cluster::start(lab(), "vxlan", PACE);
        let traffic = Traffic::start_every(PACE.gap, &cluster.lab);
        let hosts = cluster.lab.hosts();
        let watch = Watch::start(&cluster.lab);
        traffic.wait_for_arrivals();
        let mut before = Vec::new();
        for (n, host) in hosts.iter().enumerate() {
            assert!(watch.unencrypted(host) > 0, "packets of vxlan are counted");
            cluster.configure_with(host, "wireguard", &[("RequireEncryption", true.into())]);
            let tables = || host.run("nft", &["list", "tables"]).unwrap();
            eventually(
                PACE.patience,
                || tables().contains("flannel-encryption"),
                || cluster.logs(),
            );
            before.push(watch.unencrypted(host));
            let host_number = host.number();
            let passes = || {
                let pairs = hosts.iter().flat_map(|from| hosts.iter().map(move |to| (from, to)));
                pairs
                    .filter(|(from, to)| from.number() != to.number())
                    .map(|(from, to)| [from.number(), to.number(), ping(from, to).into()])
                    .collect::<Vec<_>>()
            };
            eventually(
                PACE.patience,
                || {
                    passes().iter().all(|[from, to, passes]| {
                        let is_ready = |host: &usize| *host <= host_number;
                        (*passes == 1) == (is_ready(from) == is_ready(to))
                    })
                },
                || format!("{:?}\n{}", passes(), cluster.logs()),
            );
            hosts[..=n].iter().for_each(|host| traffic.wait_for_sent(host.number()));
        }
        hosts.iter().for_each(|host| cluster.wait_for_offers(host, &["wireguard"]));
        traffic.wait_for_arrivals();
        let after: Vec<u64> = hosts.iter().map(|host| watch.unencrypted(host)).collect();
        assert_eq!(after, before, "{}", cluster.logs());
    });
}

/// A firewall drops the packets of WireGuard between two of three hosts.
#[test]
fn two_hosts_without_a_handshake_keep_the_old_backend() {
    in_qemu(&MODULES, || {
        under_traffic(lab(), PACE, "vxlan", |cluster, traffic| {
            let [first, second, third] = cluster.lab.hosts() else { panic!("three hosts") };
            let pairs = [(first, second), (second, first)];
            for (host, peer) in pairs {
                let from = peer.addresses().v4.unwrap();
                nft(
                    host,
                    &[
                        "add table inet block",
                        "add chain inet block in { type filter hook input priority 0 ; }",
                        &format!("add rule inet block in ip saddr {from} udp dport 51820 drop"),
                    ],
                );
            }
            at_once(cluster, "wireguard");
            cluster.wait_for_offers(third, &["wireguard"]);
            for (host, peer) in pairs {
                cluster.wait_for_offers(host, &["wireguard", "vxlan"]);
                let name = format!("of {}", peer.addresses().v4.unwrap());
                let waits = || Cluster::ctl(host, "status").0["network"]["moving"].clone();
                eventually(
                    PACE.patience,
                    || {
                        let text = waits()["waits_for"].to_string();
                        text.contains("handshakes of wireguard with") && text.contains(&name)
                    },
                    waits,
                );
                assert_eq!(device(host, peer), "flannel.1");
                assert_eq!(device(host, third), "flannel-wg");
            }
            traffic.wait_for_arrivals();
            for (host, _) in pairs {
                assert_eq!(cluster.offers(host), ["wireguard", "vxlan"], "{}", cluster.logs());
                nft(host, &["delete table inet block"]);
            }
            for (host, peer) in pairs {
                cluster.wait_for_offers(host, &["wireguard"]);
                // The route may follow the lease.
                eventually(PACE.patience, || device(host, peer) == "flannel-wg", || cluster.logs());
            }
        });
    });
}
