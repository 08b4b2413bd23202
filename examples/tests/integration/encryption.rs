//! `RequireEncryption` in real daemons: packets between pods pass by a backend that encrypts, and
//! by nothing else, whatever happens to the daemon, the rules and the routes.

use std::fs::File;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Instant;

use flannel_core::address::Family;
use flannel_lab::testing::as_root;
use flannel_lab::{Host, Lab, Signal};
use serde_json::{Value, json};

use crate::backend::{PATIENCE, PROGRAM, ctl, output_of, text, wait_until};

/// Two hosts with daemons and pods. The backend may claim to encrypt.
fn up(encrypted: bool, nftables: bool) -> Lab {
    let backend = json!({ "Type": "lane", "Lane": 7, "Encrypted": encrypted });
    let lab = Lab::builder().hosts(2).backend(backend).families(Family::BOTH);
    let lab = lab.config_field("EnableNFTables", nftables).program(PROGRAM).start().unwrap();
    for host in lab.hosts() {
        for key in ["net/ipv4/conf/all/rp_filter", "net/ipv4/conf/default/rp_filter"] {
            host.namespace().sysctl(key, "0").unwrap();
        }
        start(host);
    }
    let matrix = lab.wait_until_reachable(PATIENCE).unwrap_or_else(|error| panic!("{error}"));
    assert!(matrix.is_complete(), "{:#?}", matrix.failures().collect::<Vec<_>>());
    lab
}

/// Neither masquerading nor forward rules, so that no other option asks for rules.
fn start(host: &Host) {
    host.start_daemon_with(&["--iptables-forward-rules=false", "--healthz-port=0"]).unwrap();
}

/// The state of the lab for an error.
fn state_of(lab: &Lab) -> String {
    lab.hosts()
        .iter()
        .map(|host| {
            let show = |program, args: &[&str]| host.run(program, args).unwrap_or_default();
            [
                host.log().unwrap(),
                show("nft", &["list", "ruleset"]),
                show("ip", &["route"]),
                show("ip", &["-6", "route"]),
            ]
            .join("\n")
        })
        .collect()
}

/// The number of pings between the pods, of four, that are answered in a short time.
fn answered(lab: &Lab) -> usize {
    let matrix = lab.matrix(std::time::Duration::from_secs(1)).unwrap();
    assert_eq!(matrix.pairs.len(), 4, "both ways, by both families");
    4 - matrix.failures().count()
}

fn wait_for_answers(lab: &Lab, number: usize) {
    wait_until(|| answered(lab) == number, || state_of(lab));
}

/// Routes to the pods of each host by the link of the hosts, without a tunnel.
fn plain_routes(lab: &Lab) {
    for (host, peer) in [(0, 1), (1, 0)].map(|(n, m)| (&lab.hosts()[n], &lab.hosts()[m])) {
        let subnets = peer.subnet_env().unwrap().unwrap().subnets;
        for (family, subnet) in subnets.iter() {
            let subnet = subnet.to_string();
            let via = peer.addresses()[family].unwrap().to_string();
            host.run("ip", &["route", "replace", &subnet, "via", &via]).unwrap();
        }
    }
}

fn patch(lab: &Lab, patch: &str) -> String {
    output_of(lab, &lab.hosts()[0], &["config", "patch", patch])
}

fn status(lab: &Lab, host: &Host) -> Value {
    let output = ctl(lab, host, &["status", "--json"]);
    serde_json::from_slice(&output.stdout).unwrap_or_default()
}

/// The problems of a host, as one text.
fn problems(lab: &Lab, host: &Host) -> String {
    status(lab, host)["problems"].to_string()
}

fn is_ready(lab: &Lab) -> bool {
    lab.hosts().iter().all(|host| status(lab, host)["ready"] == true)
}

fn dropped(lab: &Lab, host: &Host) -> bool {
    let socket = host.dir().join("flanneld.sock").display().to_string();
    let page = host.run("curl", &["-s", "--unix-socket", &socket, "http://x/metrics"]).unwrap();
    let metric = "flannel_firewall_dropped_packets_total{reason=\"unencrypted\"} ";
    let line = page.lines().find_map(|line| line.strip_prefix(metric));
    line.unwrap_or_else(|| panic!("{}", state_of(lab))).parse::<f64>().unwrap() > 0.0
}

/// Pods are reached through the encrypted tunnel only, with rules in nftables or in iptables.
fn only_the_encrypted_tunnel_carries_packets(nftables: bool) {
    as_root(|| {
        let lab = up(true, nftables);
        let hosts = lab.hosts();
        let written = patch(&lab, r#"{"RequireEncryption": true}"#);
        assert!(written.contains("2 leases, all with an encrypted offer"), "{written}");
        assert!(written.contains("Go flannel ignores RequireEncryption"), "{written}");
        let blackholes = |host: &Host| {
            ["-4", "-6"]
                .map(|f| host.run("ip", &[f, "route", "show", "type", "blackhole"]).unwrap())
        };
        let in_place = || hosts.iter().all(|host| blackholes(host).iter().all(|b| !b.is_empty()));
        wait_until(|| in_place() && is_ready(&lab), || state_of(&lab));
        assert_eq!(answered(&lab), 4, "{}", state_of(&lab));

        // Without daemons, plain routes carry nothing.
        for host in hosts {
            host.stop_daemon(Signal::SIGKILL).unwrap();
        }
        assert_eq!(answered(&lab), 4, "the data path stays");
        plain_routes(&lab);
        assert_eq!(answered(&lab), 0, "{}", state_of(&lab));
        // The second line: without rules and routes to the peer, no other route is used.
        for host in hosts {
            let rules = if nftables {
                &["nft", "flush", "ruleset"][..]
            } else {
                &["sh", "-c", "iptables -t mangle -F; ip6tables -t mangle -F"]
            };
            host.run(rules[0], &rules[1..]).unwrap();
        }
        assert_eq!(answered(&lab), 4, "plain routes work: {}", state_of(&lab));
        for (host, peer) in [(&hosts[0], &hosts[1]), (&hosts[1], &hosts[0])] {
            for (family, subnet) in peer.subnet_env().unwrap().unwrap().subnets.iter() {
                host.run("ip", &["route", "del", &subnet.to_string()]).unwrap();
                let via = peer.addresses()[family].unwrap().to_string();
                host.run("ip", &["route", "replace", "default", "via", &via]).unwrap();
            }
        }
        assert_eq!(answered(&lab), 0, "{}", state_of(&lab));

        // The next daemons repair everything.
        hosts.iter().for_each(start);
        wait_for_answers(&lab, 4);

        // Rules that another program removes come back.
        plain_routes_on_a_running_host_are_repaired(&lab);
    });
}

/// A daemon repairs a route to a peer, and a rule, within its usual time.
fn plain_routes_on_a_running_host_are_repaired(lab: &Lab) {
    let begin = Instant::now();
    plain_routes(lab);
    wait_for_answers(lab, 4);
    wait_until(
        || {
            lab.hosts()
                .iter()
                .all(|host| host.run("ip", &["route"]).unwrap().contains("lane7 proto 241"))
        },
        || format!("{:?} {}", begin.elapsed(), state_of(lab)),
    );
}

#[test]
fn only_the_encrypted_tunnel_carries_packets_with_nftables() {
    only_the_encrypted_tunnel_carries_packets(true);
}

#[test]
fn only_the_encrypted_tunnel_carries_packets_with_iptables() {
    only_the_encrypted_tunnel_carries_packets(false);
}

/// A config may require encryption before a backend encrypts: no packet leaves in plain text.
#[test]
fn a_backend_without_encryption_carries_nothing_until_the_option_is_off() {
    as_root(|| {
        let lab = up(false, true);
        let [first, _] = lab.hosts() else { panic!("two hosts") };
        let written = patch(&lab, r#"{"RequireEncryption": true}"#);
        for part in ["the backend lane does not encrypt", "2 of 2 leases", "(2 lane/1)"] {
            assert!(written.contains(part), "{part}: {written}");
        }
        wait_for_answers(&lab, 0);
        let routes = |host: &Host| {
            ["-4", "-6"].map(|f| host.run("ip", &[f, "route", "show", "dev", "lane7"]).unwrap())
        };
        wait_until(
            || lab.hosts().iter().all(|host| !routes(host).concat().contains("via")),
            || state_of(&lab),
        );
        wait_until(
            || {
                let problems = problems(&lab, first);
                problems.contains("its backend lane does not encrypt")
                    && problems.contains("does not encrypt: packets to pods")
                    && problems.contains("is rejected")
            },
            || problems(&lab, first),
        );
        assert_eq!(status(&lab, first)["ready"], false);

        // The blackhole route drops these packets, and they are counted.
        assert_eq!(answered(&lab), 0, "{}", state_of(&lab));
        wait_until(
            || dropped(&lab, first) && problems(&lab, first).contains("leave unencrypted"),
            || problems(&lab, first) + &state_of(&lab),
        );

        // A plain route, as another program may make it.
        plain_routes(&lab);
        assert_eq!(answered(&lab), 0, "{}", state_of(&lab));

        // A host that comes back does not begin with plain routes either.
        first.stop_daemon(Signal::SIGTERM).unwrap();
        start(first);
        wait_until(|| problems(&lab, first).contains("does not encrypt"), || state_of(&lab));
        assert_eq!(answered(&lab), 0, "{}", state_of(&lab));

        let output = text(&ctl(&lab, first, &["config", "check"]));
        assert!(output.contains("2 of 2 leases have no encrypted offer"), "{output}");
        // One peer of another type, as Go flannel has it. No host gets the first subnet.
        let vxlan = r#"{"PublicIP":"192.168.77.250","PublicIPv6":null,"BackendType":"vxlan",
            "BackendData":{"VNI":1,"VtepMAC":"0a:00:00:00:00:07"}}"#;
        std::fs::write(lab.registry().join("subnets/10.244.0.0-24"), vxlan).unwrap();
        let on = r#"{"Backend": {"Encrypted": true}}"#;
        let written = patch(&lab, on);
        assert!(written.contains("1 of 3 leases have no encrypted offer (1 vxlan)"), "{written}");
        wait_for_answers(&lab, 4);

        patch(&lab, r#"{"RequireEncryption": null, "Backend": {"Encrypted": null}}"#);
        let blackholes = || first.run("ip", &["route", "show", "type", "blackhole"]).unwrap();
        wait_until(
            || {
                let rules = first.run("nft", &["list", "tables"]).unwrap();
                !rules.contains("flannel-encryption") && blackholes().is_empty()
            },
            || state_of(&lab),
        );
        plain_routes(&lab);
        wait_for_answers(&lab, 4);
    });
}

/// The daemon of a host whose iptables use the legacy tables and this lock file.
fn program_with_lock(lab: &Lab, lock: &Path) -> PathBuf {
    let tools = lab.dir().join("legacy");
    std::fs::create_dir(&tools).unwrap();
    for program in ["iptables", "ip6tables"] {
        for part in ["", "-save", "-restore"] {
            let legacy = format!("/usr/sbin/{program}-legacy{part}");
            std::os::unix::fs::symlink(legacy, tools.join(format!("{program}{part}"))).unwrap();
        }
    }
    let program = tools.join("daemon");
    let text = format!(
        "#!/bin/sh\nexport PATH={}:$PATH XTABLES_LOCKFILE={}\nexec {PROGRAM} \"$@\"\n",
        tools.display(),
        lock.display()
    );
    std::fs::write(&program, text).unwrap();
    std::fs::set_permissions(&program, PermissionsExt::from_mode(0o755)).unwrap();
    program
}

/// Another program holds the lock of iptables for longer than any limit.
#[test]
fn no_route_and_no_subnet_file_come_before_the_rule() {
    as_root(|| {
        let backend = json!({ "Type": "lane", "Lane": 7, "Encrypted": true });
        let lab = Lab::builder().hosts(2).backend(backend).families(Family::BOTH);
        let lab = lab.config_field("EnableNFTables", false);
        let lab = lab.config_field("RequireEncryption", true).program(PROGRAM).start().unwrap();
        let path = lab.dir().join("xtables.lock");
        let lock = File::create(&path).unwrap();
        lock.lock().unwrap();
        let program = program_with_lock(&lab, &path);
        let options = ["--iptables-forward-rules=false", "--healthz-port=0"];
        let [first, second] = lab.hosts() else { panic!("two hosts") };
        // Routes of an earlier run, which do not encrypt.
        let plain = [("-4", "10.244.99.0/24"), ("-6", "fd00:10:244:99::/64")];
        let via = |family| second.addresses()[family].unwrap().to_string();
        for ((option, subnet), family) in plain.into_iter().zip(Family::BOTH) {
            let route = [option, "route", "add", subnet, "via", &via(family), "proto", "241"];
            first.run("ip", &route).unwrap();
        }
        let routes = |host: &Host, option| {
            host.run("ip", &[option, "route", "show", "proto", "241"]).unwrap()
        };
        for host in lab.hosts() {
            for key in ["net/ipv4/conf/all/rp_filter", "net/ipv4/conf/default/rp_filter"] {
                host.namespace().sysctl(key, "0").unwrap();
            }
            host.start_daemon_of(&program, &options).unwrap();
        }
        let only_blackholes = |host: &Host| {
            ["-4", "-6"].into_iter().all(|option| {
                let routes = routes(host, option);
                !routes.is_empty() && routes.lines().all(|line| line.starts_with("blackhole"))
            })
        };
        wait_until(|| lab.hosts().iter().all(only_blackholes), || state_of(&lab));
        let says = |host: &Host| {
            let problems = problems(&lab, host);
            problems.contains("RequireEncryption comes first")
                && problems.contains("the firewall rules are not in place")
        };
        wait_until(|| lab.hosts().iter().all(says), || problems(&lab, first));
        // Without a required rule, the subnet file would be written after five seconds.
        let begin = Instant::now();
        let limit = std::time::Duration::from_secs(8);
        let is_over = || {
            for host in lab.hosts() {
                assert!(
                    !host.subnet_file().exists() && only_blackholes(host),
                    "{}",
                    state_of(&lab)
                );
                assert_eq!(status(&lab, host)["ready"], false);
            }
            begin.elapsed() > limit
        };
        wait_until(is_over, || state_of(&lab));
        drop(lock);
        let matrix = lab.wait_until_reachable(PATIENCE).unwrap_or_else(|error| panic!("{error}"));
        assert!(matrix.is_complete(), "{:#?}", matrix.failures().collect::<Vec<_>>());
        wait_until(|| is_ready(&lab), || state_of(&lab));
    });
}
