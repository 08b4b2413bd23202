//! Configs from which some hosts cannot build a network now. The network that runs goes on.

use std::fs;
use std::net::UdpSocket;

use flannel_lab::testing::as_root;
use flannel_lab::testing::stream::Traffic;
use flannel_lab::{Host, Lab, Signal};
use serde_json::{Value, json};
use test_support::eventually;

use super::cluster::{Cluster, Pace, at_once, under_traffic};

/// A device with the VNI and the port of flannel.1, which the kernel has once.
const STRANGER: &str = "link add stranger type vxlan id 1 dstport 8472 dev eth0";

fn ip(host: &Host, arguments: &str) {
    host.run("ip", &arguments.split(' ').collect::<Vec<_>>()).unwrap();
}

/// A backend whose device this kernel does not have, or `None` if it has all devices.
fn missing_kind(host: &Host) -> Option<&'static str> {
    let is_there = |kind: &str| {
        let made = host.run("ip", &["link", "add", "probe0", "type", kind]).is_ok();
        if made {
            ip(host, "link delete probe0");
        }
        made
    };
    ["ipip", "wireguard"].into_iter().find(|kind| !is_there(kind))
}

/// The reason for which a host does not use the config of the store.
fn refusal(host: &Host) -> Value {
    Cluster::ctl(host, "status").0["network"]["refused_config"].clone()
}

fn wait_for_refusal(cluster: &Cluster, host: &Host, part: &str) {
    eventually(
        cluster.patience(),
        || {
            host.check_daemon().unwrap();
            refusal(host)["reason"].as_str().is_some_and(|reason| reason.contains(part))
        },
        || format!("{}: {}\n{}", host.name(), refusal(host), cluster.logs()),
    );
    eventually(
        cluster.patience(),
        || {
            let (status, is_well) = Cluster::ctl(host, "status");
            is_well && status["ready"] == true
        },
        || Cluster::ctl(host, "status").0.to_string(),
    );
}

fn wait_for_use(cluster: &Cluster, host: &Host) {
    eventually(
        cluster.patience(),
        || {
            host.check_daemon().unwrap();
            let status = Cluster::ctl(host, "status").0;
            status["network"].is_object() && status["network"]["refused_config"].is_null()
        },
        || format!("{}: {}\n{}", host.name(), refusal(host), cluster.logs()),
    );
}

/// A route that no lease needs is removed.
fn is_repaired(cluster: &Cluster, host: &Host) {
    let subnet = host.subnet_env().unwrap().unwrap().subnets.v4.unwrap().to_string();
    let of_nobody = subnet.replace(".0/24", ".128/25");
    ip(host, &format!("route add blackhole {of_nobody} proto 241"));
    let routes = || host.run("ip", &["route", "show", "proto", "241"]).unwrap();
    eventually(
        cluster.patience(),
        || !routes().contains(&of_nobody),
        || format!("{}\n{}", routes(), cluster.logs()),
    );
}

fn restart(cluster: &Cluster, traffic: &Traffic, host: &Host, signal: Signal) {
    host.stop_daemon(signal).unwrap().unwrap();
    traffic.wait_for_arrivals();
    cluster.start_daemon(host);
    traffic.wait_for_arrivals();
}

/// All hosts read it, refuse it, and are restarted. Then they follow the next configs.
#[test]
fn a_backend_that_no_kernel_has_changes_nothing() {
    as_root(|| {
        under_traffic(Lab::builder(), Pace::USUAL, "vxlan", |cluster, traffic| {
            let hosts = cluster.lab.hosts();
            // An unknown type is the same on a kernel that has all devices.
            let kind = missing_kind(&hosts[0]).unwrap_or("nosuch");
            at_once(cluster, kind);
            hosts.iter().for_each(|host| wait_for_refusal(cluster, host, kind));
            traffic.wait_for_arrivals();
            for (host, signal) in hosts.iter().zip([Signal::SIGKILL, Signal::SIGTERM]) {
                restart(cluster, traffic, host, signal);
                wait_for_refusal(cluster, host, kind);
                assert_eq!(cluster.offers(host), ["vxlan"]);
            }
            at_once(cluster, "vxlan");
            hosts.iter().for_each(|host| wait_for_use(cluster, host));
            at_once(cluster, kind);
            hosts.iter().for_each(|host| wait_for_refusal(cluster, host, kind));
            at_once(cluster, "host-gw");
            hosts.iter().for_each(|host| cluster.wait_for_offers(host, &["host-gw"]));
        });
    });
}

/// One host cannot follow, then it can.
#[test]
fn a_device_that_another_one_excludes_holds_up_the_move_of_its_host_only() {
    as_root(|| {
        under_traffic(Lab::builder(), Pace::USUAL, "host-gw", |cluster, traffic| {
            let [first, second, third] = cluster.lab.hosts() else { panic!("three hosts") };
            ip(first, STRANGER);
            at_once(cluster, "vxlan");
            wait_for_refusal(cluster, first, "stranger");
            for host in [second, third] {
                cluster.wait_for_offers(host, &["host-gw", "vxlan"]);
            }
            restart(cluster, traffic, first, Signal::SIGKILL);
            wait_for_refusal(cluster, first, "stranger");
            restart(cluster, traffic, second, Signal::SIGKILL);
            cluster.wait_for_offers(second, &["host-gw", "vxlan"]);
            assert_eq!(cluster.offers(first), ["host-gw"]);
            ip(first, "link delete stranger");
            for host in [first, second, third] {
                cluster.wait_for_offers(host, &["vxlan"]);
            }
        });
    });
}

/// The next device of the same type needs a port that another program has.
#[test]
fn a_port_in_use_changes_nothing() {
    as_root(|| {
        under_traffic(Lab::builder(), Pace::USUAL, "vxlan", |cluster, traffic| {
            let hosts = cluster.lab.hosts();
            let bind = |host: &Host| {
                host.namespace().run(|| UdpSocket::bind(("0.0.0.0", 9472)).unwrap()).unwrap()
            };
            let _sockets: Vec<_> = hosts.iter().map(bind).collect();
            let backend = json!({ "Type": "vxlan", "Port": 9472 });
            for host in hosts {
                cluster.configure_with(host, "vxlan", &[("Backend", backend.clone())]);
                wait_for_refusal(cluster, host, "in use");
                let device = host.run("ip", &["-d", "link", "show", "flannel.1"]).unwrap();
                assert!(device.contains("dstport 8472"), "{device}");
            }
            is_repaired(cluster, &hosts[0]);
            restart(cluster, traffic, &hosts[0], Signal::SIGKILL);
            at_once(cluster, "vxlan");
            hosts.iter().for_each(|host| wait_for_use(cluster, host));
        });
    });
}

/// Another field than the backend cannot be used, or the whole config.
#[test]
fn a_restart_keeps_the_last_network_that_worked() {
    as_root(|| {
        under_traffic(Lab::builder(), Pace::USUAL, "vxlan", |cluster, traffic| {
            let too_small = [("Backend", json!({ "Type": "vxlan", "MTU": 100 }))];
            let no_backend_and_other_network = [("Network", json!("10.200.0.0/16"))];
            let wrong = [("SubnetLen", json!(99))];
            for (backend, fields) in [
                ("vxlan", &too_small[..]),
                ("nosuch", &no_backend_and_other_network),
                ("vxlan", &wrong),
            ] {
                for (host, signal) in
                    cluster.lab.hosts().iter().zip([Signal::SIGKILL, Signal::SIGTERM])
                {
                    let subnets = || host.subnet_env().unwrap().unwrap().subnets;
                    let before = subnets();
                    cluster.configure_with(host, backend, fields);
                    wait_for_refusal(cluster, host, "");
                    restart(cluster, traffic, host, signal);
                    wait_for_refusal(cluster, host, "");
                    is_repaired(cluster, host);
                    assert_eq!((subnets(), cluster.offers(host)), (before, vec!["vxlan".into()]));
                }
            }
            at_once(cluster, "host-gw");
            let hosts = cluster.lab.hosts();
            hosts.iter().for_each(|host| cluster.wait_for_offers(host, &["host-gw"]));
        });
    });
}

/// A daemon of an earlier version has recorded a backend that it could not set up.
#[test]
fn a_recorded_backend_that_cannot_be_built_is_left_out() {
    as_root(|| {
        under_traffic(Lab::builder(), Pace::USUAL, "vxlan", |cluster, traffic| {
            for host in cluster.lab.hosts() {
                let kind = missing_kind(host).unwrap_or("nosuch");
                host.stop_daemon(Signal::SIGKILL).unwrap().unwrap();
                let member = |kind: &str, offered: bool| {
                    let backend = json!({ "Type": kind });
                    json!({ "lease_type": kind, "offered": offered, "backend": backend })
                };
                let members = [member("vxlan", true), member(kind, false)];
                let record = json!({ "backends": members }).to_string();
                fs::write(host.dir().join("state/backends"), record).unwrap();
                cluster.start_daemon(host);
                traffic.wait_for_arrivals();
                wait_for_use(cluster, host);
                assert_eq!(cluster.offers(host), ["vxlan"]);
                restart(cluster, traffic, host, Signal::SIGTERM);
                wait_for_use(cluster, host);
            }
        });
    });
}
