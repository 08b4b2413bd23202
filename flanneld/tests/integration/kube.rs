//! The daemon on the Kubernetes API: real daemons on hosts made of network namespaces, and an API
//! server that checks its requests strictly.
//!
//! The tests read a host's kernel with iproute2.

use std::fs;
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::Command;

use flannel_netlink::testing::{Netns, bridge, in_netns, ip};
use flannel_subnet_kube::testing::{ApiServer, Cut};
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use test_support::write_script;

use crate::running::{Daemon, take_the_port, wait_until};

const PREFIX: &str = "flannel.alpha.coreos.com/";
const VXLAN: &str = r#"{"Network":"10.1.0.0/16","Backend":{"Type":"vxlan"}}"#;
/// A config for hosts with addresses of both families.
const DUAL: &str = r#"{"Network":"10.1.0.0/16","EnableIPv6":true,"IPv6Network":"fd00::/48",
    "Backend":{"Type":"vxlan"}}"#;
/// The address of the API server.
const SWITCH: &str = "192.0.2.254";

/// A switch in the namespace of the calling test, with the API server on it.
fn cluster() -> ApiServer {
    ip("link add br0 type bridge stp_state 0 mcast_snooping 0");
    ip(&format!("address add {SWITCH}/24 dev br0"));
    ip("-6 address add 2001:db8::254/64 dev br0 nodad");
    ip("link set br0 up");
    ApiServer::on(TcpListener::bind((SWITCH, 0)).unwrap())
}

/// A host on the switch: `192.0.2.<n>`, the node `node-<n>`.
struct Host {
    netns: Netns,
    n: u8,
    dir: tempfile::TempDir,
    config: &'static str,
}

impl Host {
    fn new(n: u8, config: &'static str) -> Self {
        let netns = Netns::new().unwrap();
        let path = netns.path();
        ip(&format!("link add port-{n} type veth peer name eth0 netns {}", path.display()));
        ip(&format!("link set port-{n} master br0 up"));
        netns.run(|| {
            ip(&format!("address add 192.0.2.{n}/24 dev eth0"));
            ip(&format!("-6 address add 2001:db8::{n}/64 dev eth0 nodad"));
            ip("link set eth0 up");
        });
        Self { netns, n, dir: tempfile::tempdir().unwrap(), config }
    }

    fn name(&self) -> String {
        format!("node-{}", self.n)
    }

    fn subnet_file(&self) -> PathBuf {
        self.dir.path().join("run/subnet.env")
    }

    fn subnet_env(&self) -> String {
        fs::read_to_string(self.subnet_file()).unwrap_or_default()
    }

    fn start(&self, server: &ApiServer, args: &[&str]) -> Daemon {
        let mut command = self.command(&["--kube-api-url", &server.url()]);
        command.args(args).env("NODE_NAME", self.name());
        self.netns.run(|| Daemon::start(&mut command))
    }

    /// A daemon with the API server's address, which does not know its node yet.
    fn command(&self, api: &[&str]) -> Command {
        let net_config = self.dir.path().join("net-conf.json");
        fs::write(&net_config, self.config).unwrap();
        let program =
            std::env::var_os("FLANNELD").unwrap_or_else(|| env!("CARGO_BIN_EXE_flanneld").into());
        let mut command = Command::new(program);
        command.args(["--kube-subnet-mgr", "-iface=eth0"]).args(api);
        command
            .arg("--net-config-path")
            .arg(net_config)
            .arg("--subnet-file")
            .arg(self.subnet_file());
        command.arg("--state-dir").arg(self.dir.path().join("state"));
        command.env_remove("NODE_NAME").env_remove("POD_NAME").env_remove("POD_NAMESPACE");
        command
    }

    /// The kernel's objects on the tunnel: a line for each route, neighbour and forwarding entry.
    fn objects(&self) -> String {
        self.netns.run(|| {
            if !ip("-br link").contains("flannel.1") {
                return String::new();
            }
            [
                ip("-4 route show dev flannel.1"),
                ip("neigh show dev flannel.1 nud permanent"),
                bridge("fdb show dev flannel.1"),
            ]
            .concat()
        })
    }

    fn holds(&self, daemon: &Daemon, parts: &[&str]) {
        let all = || parts.iter().all(|part| self.objects().contains(part));
        wait_until(all, || {
            format!("{parts:?} are not all in\n{}\n{}", self.objects(), daemon.log())
        });
    }

    fn mac(&self) -> String {
        let text = self.netns.run(|| ip("-j link show flannel.1"));
        serde_json::from_str::<Value>(&text).unwrap()[0]["address"].as_str().unwrap().to_owned()
    }
}

/// A node as the kubelet registers it.
fn blank(cidrs: &[&str]) -> Value {
    json!({ "metadata": { "labels": {} }, "spec": { "podCIDR": cidrs[0], "podCIDRs": cidrs },
        "status": { "conditions": [{ "type": "Ready", "status": "True" }] } })
}

/// A node that Go flannel runs on.
fn go_peer(cidr: &str, public: &str, mac: &str) -> Value {
    let mut node = blank(&[cidr]);
    node["metadata"]["annotations"] = json!({
        format!("{PREFIX}kube-subnet-manager"): "true",
        format!("{PREFIX}backend-type"): "vxlan",
        format!("{PREFIX}backend-data"): format!(r#"{{"VNI":1,"VtepMAC":"{mac}"}}"#),
        format!("{PREFIX}public-ip"): public,
    });
    node
}

/// Status and reason of the condition NetworkUnavailable.
fn network_unavailable(server: &ApiServer, node: &str) -> (String, String) {
    let condition = server.condition(node, "NetworkUnavailable").unwrap_or_default();
    let text = |field: &str| condition[field].as_str().unwrap_or_default().to_owned();
    (text("status"), text("reason"))
}

fn wait_for_condition(server: &ApiServer, node: &str, status: &str, reason: &str, daemon: &Daemon) {
    wait_until(
        || network_unavailable(server, node) == (status.to_owned(), reason.to_owned()),
        || format!("{:?}\n{}", server.condition(node, "NetworkUnavailable"), daemon.log()),
    );
}

/// A cluster of `node-1`, whose daemon runs on the host, and `node-2`, which runs Go flannel. The
/// network is in place.
fn cluster_with_a_peer() -> (ApiServer, Host, Daemon) {
    let server = cluster();
    server.put_node("node-1", blank(&["10.1.1.0/24"]));
    server.put_node("node-2", go_peer("10.1.2.0/24", "192.0.2.2", "0a:00:00:00:00:02"));
    let host = Host::new(1, VXLAN);
    let daemon = host.start(&server, &[]);
    host.holds(&daemon, &["via 10.1.2.0 "]);
    wait_for_condition(&server, "node-1", "False", "FlannelIsUp", &daemon);
    (server, host, daemon)
}

#[test]
fn two_nodes_get_objects_for_each_other_and_for_a_node_of_go_flannel() {
    in_netns(|| {
        let server = cluster();
        server.put_node("node-1", blank(&["10.1.1.0/24"]));
        server.put_node("node-2", blank(&["10.1.2.0/24"]));
        server.put_node("node-3", go_peer("10.1.3.0/24", "192.0.2.3", "0a:00:00:00:00:03"));
        let hosts = [1, 2].map(|n| Host::new(n, VXLAN));
        let daemons = hosts.each_ref().map(|host| host.start(&server, &[]));
        // Compared below with the objects of the other.
        daemons.iter().for_each(|daemon| daemon.wait_for_log("running lease"));
        for (host, (other, daemon)) in hosts.iter().zip(hosts.iter().rev().zip(&daemons)) {
            let peer = other.n;
            host.holds(
                daemon,
                &[
                    &format!("via 10.1.{peer}.0 "),
                    &format!("10.1.{peer}.0 lladdr {}", other.mac()),
                    &format!("{} dst 192.0.2.{peer} self permanent", other.mac()),
                    "via 10.1.3.0 ",
                    "0a:00:00:00:00:03 dst 192.0.2.3 self permanent",
                ],
            );
            let annotations = &server.node(&host.name()).unwrap()["metadata"]["annotations"];
            let data = format!(r#"{{"VNI":1,"VtepMAC":"{}"}}"#, host.mac());
            let expected = json!({
                "flannel.alpha.coreos.com/kube-subnet-manager": "true",
                "flannel.alpha.coreos.com/backend-type": "vxlan",
                "flannel.alpha.coreos.com/backend-data": data,
                "flannel.alpha.coreos.com/public-ip": format!("192.0.2.{}", host.n),
            });
            assert_eq!(*annotations, expected);
            let env = format!(
                "FLANNEL_NETWORK=10.1.0.0/16\nFLANNEL_SUBNET=10.1.{}.1/24\nFLANNEL_MTU=1450\n\
                 FLANNEL_IPMASQ=false\n",
                host.n
            );
            assert_eq!(host.subnet_env(), env);
            wait_for_condition(&server, &host.name(), "False", "FlannelIsUp", daemon);
        }
        server.delete_node("node-3");
        wait_until(
            || hosts.iter().all(|host| !host.objects().contains("10.1.3.0")),
            || format!("{}\n{}", hosts[0].objects(), hosts[1].objects()),
        );
    });
}

#[test]
fn the_condition_is_false_while_the_network_is_in_place_and_true_after_a_lost_lease() {
    in_netns(|| {
        let server = cluster();
        server.put_node("node-1", json!({}));
        let host = Host::new(1, VXLAN);
        let daemon = host.start(&server, &[]);
        // The wait for a late PodCIDR is logged once.
        daemon.wait_for_log("waiting reason=kube:");
        daemon.wait_for_log("node node-1: it has no IPv4 PodCIDR yet");
        assert_eq!(server.condition("node-1", "NetworkUnavailable"), None);
        server.put_node("node-1", blank(&["10.1.1.0/24"]));
        wait_for_condition(&server, "node-1", "False", "FlannelIsUp", &daemon);
        let mac = host.mac();
        assert!(host.subnet_env().contains("FLANNEL_SUBNET=10.1.1.1/24\n"));
        // The node is registered again with another PodCIDR: the lease moves, and the daemon goes
        // on.
        server.delete_node("node-1");
        daemon.wait_for_log("lease is lost reason=there is no such node any more");
        let requests = server.requests().len();
        server.put_node("node-1", blank(&["10.1.9.0/24"]));
        wait_for_condition(&server, "node-1", "False", "FlannelIsUp", &daemon);
        daemon.wait_for_log("rebuilding the network reason=this node was given 10.1.9.0-24");
        wait_until(|| host.subnet_env().contains("FLANNEL_SUBNET=10.1.9.1/24\n"), || daemon.log());
        assert_eq!(host.mac(), mac, "peers keep the MAC address that they know");
        assert!(
            server.annotation("node-1", &format!("{PREFIX}backend-data")).unwrap().contains(&mac)
        );
        assert!(server.requests().len() < requests + 40, "{:#?}", &server.requests()[requests..]);
        // Its PodCIDR is removed.
        server.modify("node-1", |node| node["spec"] = json!({}));
        wait_for_condition(&server, "node-1", "True", "FlannelIsDown", &daemon);
        let message = server.condition("node-1", "NetworkUnavailable").unwrap()["message"].clone();
        assert_eq!(message, "it has no PodCIDR any more");
        server.modify("node-1", |node| node["spec"] = json!({ "podCIDR": "10.1.9.0/24" }));
        wait_for_condition(&server, "node-1", "False", "FlannelIsUp", &daemon);
    });
}

/// Without a valid lease the node's condition is true, and its peers stay in place.
#[test]
fn a_pod_cidr_outside_the_network_leaves_the_network_in_place() {
    in_netns(|| {
        let (server, host, daemon) = cluster_with_a_peer();
        server.modify("node-1", |node| node["spec"] = json!({ "podCIDR": "10.9.0.0/24" }));
        wait_for_condition(&server, "node-1", "True", "FlannelIsDown", &daemon);
        let message = server.condition("node-1", "NetworkUnavailable").unwrap()["message"].clone();
        let message = message.as_str().unwrap();
        assert!(
            message.starts_with("its PodCIDR 10.9.0.0/24 lies outside the pod network 10.1.0.0/16"),
            "{message}"
        );
        // Changes of peers are followed.
        server.put_node("node-3", go_peer("10.1.3.0/24", "192.0.2.3", "0a:00:00:00:00:03"));
        host.holds(&daemon, &["via 10.1.2.0 ", "via 10.1.3.0 "]);
        server.delete_node("node-2");
        wait_until(|| !host.objects().contains("10.1.2.0"), || daemon.log());
        assert!(!daemon.log().contains("rebuilding the network"), "{}", daemon.log());
        server.modify("node-1", |node| node["spec"] = json!({ "podCIDR": "10.1.9.0/24" }));
        daemon.wait_for_log("rebuilding the network reason=this node was given 10.1.9.0-24");
        wait_for_condition(&server, "node-1", "False", "FlannelIsUp", &daemon);
        assert!(
            host.subnet_env().contains("FLANNEL_SUBNET=10.1.9.1/24\n"),
            "{}",
            host.subnet_env()
        );
    });
}

/// A rebuild for another reason meanwhile restores the network, which follows the peers.
#[test]
fn a_rebuild_without_a_valid_lease_restores_the_network() {
    in_netns(|| {
        let (server, host, daemon) = cluster_with_a_peer();
        let mac = host.mac();
        let address =
            || host.netns.run(|| ip("-4 address show dev flannel.1")).contains("10.1.1.0/32");
        assert!(address());
        let trouble: [&dyn Fn(); 2] = [
            &|| server.modify("node-1", |node| node["spec"] = json!({ "podCIDR": "10.9.0.0/24" })),
            &|| {
                server.delete_node("node-1");
            },
        ];
        for (n, trouble) in (3..).zip(trouble) {
            trouble();
            daemon.wait_for_log(
                ["lies outside the pod network", "there is no such node any more"][n - 3],
            );
            if n == 3 {
                wait_for_condition(&server, "node-1", "True", "FlannelIsDown", &daemon);
            }
            let mtu = 1406 - n;
            // First the interface changes, then the config.
            if n == 3 {
                host.netns.run(|| ip(&format!("link set eth0 mtu {mtu}")));
            } else {
                let config = VXLAN.replace("\"vxlan\"", &format!("\"vxlan\",\"MTU\":{mtu}"));
                fs::write(host.dir.path().join("net-conf.json"), config).unwrap();
            }
            let env = format!("FLANNEL_SUBNET=10.1.1.1/24\nFLANNEL_MTU={}\n", mtu - 50);
            wait_until(|| host.subnet_env().contains(&env), || daemon.log());
            server.put_node(
                &format!("peer-{n}"),
                go_peer(
                    &format!("10.1.{n}.0/24"),
                    &format!("192.0.2.{n}"),
                    &format!("0a:00:00:00:00:{n:02}"),
                ),
            );
            host.holds(&daemon, &["via 10.1.2.0 ", &format!("via 10.1.{n}.0 ")]);
            assert!(address() && host.mac() == mac, "{}", daemon.log());
            if n == 3 {
                assert_eq!(network_unavailable(&server, "node-1").0, "True", "it has no lease");
            }
        }
        server.put_node("node-1", blank(&["10.1.9.0/24"]));
        daemon.wait_for_log("rebuilding the network reason=this node was given 10.1.9.0-24");
        wait_for_condition(&server, "node-1", "False", "FlannelIsUp", &daemon);
        assert_eq!(host.mac(), mac);
    });
}

#[test]
fn the_network_stays_without_the_api_server_and_is_updated_afterwards() {
    in_netns(|| {
        let (server, host, daemon) = cluster_with_a_peer();
        let before = host.objects();
        let env = host.subnet_env();
        server.fail(u32::MAX, 500, None);
        server.cut(Cut::MidEvent);
        daemon.wait_for_log("store lost, the last leases stay in use leases=2 error=500 ");
        server.delete_node("node-2");
        server.put_node("node-3", go_peer("10.1.3.0/24", "192.0.2.3", "0a:00:00:00:00:03"));
        let asked = server.requests().len();
        wait_until(|| server.requests().len() >= asked + 3, || daemon.log());
        assert_eq!((host.objects(), host.subnet_env()), (before, env), "{}", daemon.log());
        server.fail(0, 500, None);
        daemon.wait_for_log("the store answers");
        host.holds(&daemon, &["via 10.1.3.0 "]);
        wait_until(|| !host.objects().contains("10.1.2.0"), || host.objects());
        assert!(!daemon.log().contains("rebuilding the network"), "{}", daemon.log());
        assert_eq!(
            daemon.log().matches("store lost").count(),
            1,
            "the outage is logged once: {}",
            daemon.log()
        );
        assert_eq!(network_unavailable(&server, "node-1").0, "False");
    });
}

#[test]
fn the_public_ip_annotation_of_the_node_overrides_the_command_line() {
    in_netns(|| {
        let server = cluster();
        let mut node = blank(&["10.1.1.0/24"]);
        node["metadata"]["annotations"] =
            json!({ format!("{PREFIX}node-public-ip"): "198.51.100.5" });
        server.put_node("node-1", node);
        let host = Host::new(1, VXLAN);
        let public = || server.annotation("node-1", &format!("{PREFIX}public-ip"));
        let mut daemon = host.start(&server, &["--public-ip=203.0.113.7"]);
        daemon.wait_for_log("running lease");
        assert_eq!(public().as_deref(), Some("198.51.100.5"), "{}", daemon.log());
        daemon.signal(Signal::SIGTERM);
        daemon.ended();
        // Without it the command line counts.
        server.modify("node-1", |node| {
            node["metadata"]["annotations"]
                .as_object_mut()
                .unwrap()
                .remove(&format!("{PREFIX}node-public-ip"));
        });
        let daemon = host.start(&server, &["--public-ip=203.0.113.7"]);
        daemon.wait_for_log("running lease");
        assert_eq!(public().as_deref(), Some("203.0.113.7"), "{}", daemon.log());
    });
}

#[test]
fn nodes_with_another_annotation_prefix_are_no_peers() {
    in_netns(|| {
        let server = cluster();
        server.put_node("node-1", blank(&["10.1.1.0/24"]));
        server.put_node("node-2", blank(&["10.1.2.0/24"]));
        server.put_node("node-3", go_peer("10.1.3.0/24", "192.0.2.3", "0a:00:00:00:00:03"));
        let hosts = [1, 2].map(|n| Host::new(n, VXLAN));
        let daemons = hosts
            .each_ref()
            .map(|host| host.start(&server, &["--kube-annotation-prefix=example.com/net"]));
        daemons.iter().for_each(|daemon| daemon.wait_for_log("running lease"));
        for (host, (other, daemon)) in hosts.iter().zip(hosts.iter().rev().zip(&daemons)) {
            host.holds(daemon, &[&format!("10.1.{}.0 lladdr {}", other.n, other.mac())]);
            assert!(
                !host.objects().contains("10.1.3.0"),
                "the node belongs to the other flannel: {}",
                host.objects()
            );
            let data = format!(r#"{{"VNI":1,"VtepMAC":"{}"}}"#, host.mac());
            let expected = json!({
                "example.com/net-kube-subnet-manager": "true",
                "example.com/net-backend-type": "vxlan",
                "example.com/net-backend-data": data,
                "example.com/net-public-ip": format!("192.0.2.{}", host.n),
            });
            assert_eq!(server.node(&host.name()).unwrap()["metadata"]["annotations"], expected);
        }
    });
}

#[test]
fn a_malformed_config_is_refused_and_the_running_network_stays() {
    in_netns(|| {
        let server = cluster();
        server.put_node("node-1", blank(&["10.1.1.0/24"]));
        let host = Host::new(1, VXLAN);
        let daemon = host.start(&server, &[]);
        daemon.wait_for_log("running lease");
        let write =
            |config: &str| fs::write(host.dir.path().join("net-conf.json"), config).unwrap();
        write(r#"{"Network":"10.1.0.0/16","Backend":{"Type":"vxlan""#);
        daemon.wait_for_log("the network config was changed, but is wrong and not used error=");
        daemon.wait_for_log("net-conf.json");
        server.put_node("node-2", go_peer("10.1.2.0/24", "192.0.2.2", "0a:00:00:00:00:02"));
        host.holds(&daemon, &["via 10.1.2.0 "]);
        assert!(!daemon.log().contains("rebuilding the network"), "{}", daemon.log());
        assert!(
            host.subnet_env().contains("FLANNEL_SUBNET=10.1.1.1/24\n"),
            "{}",
            host.subnet_env()
        );
        wait_for_condition(&server, "node-1", "False", "FlannelIsUp", &daemon);
        // A corrected config is used.
        write(r#"{"Network":"10.1.0.0/16","Backend":{"Type":"host-gw"}}"#);
        daemon.wait_for_log("rebuilding the network reason=the network config has changed");
    });
}

/// With the pod's name from a manifest, and the API server and the account from a kubeconfig.
#[test]
fn the_node_comes_from_the_pod_and_the_server_from_a_kubeconfig() {
    in_netns(|| {
        let server = cluster();
        server.put_node("node-1", blank(&["10.1.1.0/24"]));
        server.put_pod("kube-flannel", "kube-flannel-ds-x", "node-1");
        server.forbid("get", "pods");
        server.expect_token("secret");
        let host = Host::new(1, VXLAN);
        let kubeconfig = host.dir.path().join("kubeconfig");
        let token = host.dir.path().join("token");
        let text = format!(
            "apiVersion: v1\nkind: Config\ncurrent-context: c\n\
             clusters: [{{name: c, cluster: {{server: \"{}\"}}}}]\n\
             contexts: [{{name: c, context: {{cluster: c, user: u}}}}]\n\
             users: [{{name: u, user: {{tokenFile: token}}}}]\n",
            server.url()
        );
        fs::write(&kubeconfig, text).unwrap();
        fs::write(&token, "expired").unwrap();
        let mut command = host.command(&["--kubeconfig-file", kubeconfig.to_str().unwrap()]);
        command.env("POD_NAME", "kube-flannel-ds-x").env("POD_NAMESPACE", "kube-flannel");
        let daemon = host.netns.run(|| Daemon::start(&mut command));
        daemon.wait_for_log("the API server does not accept this node's credentials (401");
        fs::write(&token, "secret").unwrap();
        daemon.wait_for_log("this node's account needs the verb \"get\" on the resource \"pods\"");
        server.permit_all();
        daemon.wait_for_log("running lease=10.1.1.0-24");
        let public = server.annotation("node-1", &format!("{PREFIX}public-ip"));
        assert_eq!(public.as_deref(), Some("192.0.2.1"));
        wait_for_condition(&server, "node-1", "False", "FlannelIsUp", &daemon);
        // A daemon whose environment does not name the node.
        drop(daemon);
        let mut command = host.command(&["--kubeconfig-file", kubeconfig.to_str().unwrap()]);
        let mut daemon =
            host.netns.run(|| Daemon::start(command.env("POD_NAME", "kube-flannel-ds-x")));
        assert!(!daemon.ended().success());
        daemon.wait_for_log("expected NODE_NAME in the environment, or POD_NAMESPACE and POD_NAME");
    });
}

/// A plugin of the kubeconfig prints the token, and the environment names a proxy.
#[test]
fn a_kubeconfig_may_name_a_plugin_and_the_environment_a_proxy() {
    in_netns(|| {
        let server = cluster();
        server.put_node("node-1", blank(&["10.1.1.0/24"]));
        server.expect_token("secret");
        let host = Host::new(1, VXLAN);
        let kubeconfig = host.dir.path().join("kubeconfig");
        let plugin = "#!/bin/sh\necho '{\"kind\":\"ExecCredential\",\"apiVersion\":\
                      \"client.authentication.k8s.io/v1\",\"status\":{\"token\":\"secret\"}}'\n";
        write_script(&host.dir.path().join("plugin"), plugin);
        let start = |url: &str| {
            let text = format!(
                "current-context: c\nclusters: [{{name: c, cluster: {{server: \"{url}\"}}}}]\n\
                 contexts: [{{name: c, context: {{cluster: c, user: u}}}}]\n\
                 users: [{{name: u, user: {{exec: {{command: ./plugin, interactiveMode: Never, \
                 apiVersion: client.authentication.k8s.io/v1}}}}}}]\n"
            );
            fs::write(&kubeconfig, text).unwrap();
            let mut command = host.command(&["--kubeconfig-file", kubeconfig.to_str().unwrap()]);
            command.env("NODE_NAME", "node-1").env("HTTP_PROXY", "http://127.0.0.1:1");
            command.env("NO_PROXY", "192.0.2.0/24");
            host.netns.run(|| Daemon::start(&mut command))
        };
        let daemon = start(&server.url());
        daemon.wait_for_log("running lease=10.1.1.0-24");
        assert!(!daemon.log().contains("secret"), "{}", daemon.log());
        drop(daemon);
        start("http://api.example:6443").wait_for_log("the proxy http://127.0.0.1:1/ does not");
    });
}

#[test]
fn a_restart_changes_neither_the_node_nor_the_tunnel() {
    in_netns(|| {
        let (server, host, mut daemon) = cluster_with_a_peer();
        daemon.signal(Signal::SIGTERM);
        assert_eq!(daemon.ended().code(), Some(0), "{}", daemon.log());
        let before = server.node("node-1");
        let mac = host.mac();
        let patches = server.count("PATCH");
        // A peer that was deleted meanwhile is removed after the first list.
        server.delete_node("node-2");
        let daemon = host.start(&server, &[]);
        daemon.wait_for_log("running lease");
        wait_until(|| !host.objects().contains("10.1.2.0"), || host.objects());
        assert_eq!(
            (server.node("node-1"), host.mac(), server.count("PATCH")),
            (before, mac, patches),
            "{}",
            daemon.log()
        );
    });
}

/// Because pods must not be scheduled here before the network of this boot is in place.
#[test]
fn the_condition_of_an_earlier_boot_is_withdrawn_first() {
    in_netns(|| {
        let server = cluster();
        let up = json!([{ "type": "NetworkUnavailable", "status": "False",
            "reason": "FlannelIsUp", "message": "Flannel is running on this node",
            "lastHeartbeatTime": "2026-11-21T20:00:00Z",
            "lastTransitionTime": "2026-11-21T20:00:00Z" }]);
        // The node has no PodCIDR yet.
        server.put_node("node-1", json!({ "status": { "conditions": up } }));
        let host = Host::new(1, VXLAN);
        let mut daemon = host.start(&server, &[]);
        let message =
            || server.condition("node-1", "NetworkUnavailable").unwrap()["message"].clone();
        wait_until(|| message() == "flannel has only just been started", || daemon.log());
        server.modify("node-1", |node| node["spec"] = json!({ "podCIDR": "10.1.1.0/24" }));
        wait_for_condition(&server, "node-1", "False", "FlannelIsUp", &daemon);
        // The content of each patch: the condition's status, or the lease.
        let patches = || -> Vec<String> {
            let status = |patch: &Value| {
                patch["status"]["conditions"][0]["status"].as_str().map(str::to_owned)
            };
            server
                .patches()
                .iter()
                .map(|patch| status(patch).unwrap_or_else(|| "lease".to_owned()))
                .collect()
        };
        let first = Some(&"True".to_owned());
        let last = Some(&"False".to_owned());
        assert_eq!(
            (patches().first(), patches().last()),
            (first, last),
            "{:?}\n{}",
            patches(),
            daemon.log()
        );
        assert_eq!(
            patches().iter().filter(|patch| *patch == "False").count(),
            1,
            "{:?}",
            patches()
        );
        for (gone, more) in [(false, &[][..]), (true, &["True", "False"])] {
            let before = patches().len();
            daemon.signal(Signal::SIGTERM);
            assert_eq!(daemon.ended().code(), Some(0), "{}", daemon.log());
            if gone {
                host.netns.run(|| ip("link delete flannel.1"));
            }
            daemon = host.start(&server, &[]);
            daemon.wait_for_log("in sync");
            wait_until(
                || patches().len() == before + more.len(),
                || format!("{:?}\n{}", patches(), daemon.log()),
            );
            assert_eq!(patches()[before..], *more);
            assert_eq!(network_unavailable(&server, "node-1").0, "False");
        }
    });
}

/// As after a boot without an address, or with a config that names no backend, on a node that has
/// no earlier one: repeated starts fail.
#[test]
fn a_failing_start_withdraws_the_old_condition_unless_the_network_is_in_place() {
    in_netns(|| {
        let (server, host, mut daemon) = cluster_with_a_peer();
        daemon.signal(Signal::SIGTERM);
        assert_eq!(daemon.ended().code(), Some(0), "{}", daemon.log());
        let start = |config: &str, message: &str| {
            let mut command = host.command(&["--kube-api-url", &server.url()]);
            fs::write(host.dir.path().join("net-conf.json"), config).unwrap();
            for file in ["state/backends", "state/config"] {
                fs::remove_file(host.dir.path().join(file)).unwrap_or_default();
            }
            let mut daemon =
                host.netns.run(|| Daemon::start(command.env("NODE_NAME", host.name())));
            assert_eq!(daemon.ended().code(), Some(1), "{}", daemon.log());
            daemon.wait_for_log(message);
            network_unavailable(&server, "node-1").0
        };
        host.netns.run(|| ip("-6 address flush dev eth0"));
        let misspelt = VXLAN.replace("vxlan", "vlxan");
        for (config, message) in [(DUAL, "IPv6"), (&misspelt, "\"vlxan\"")] {
            assert_eq!(start(config, message), "False", "the network of the last run is in place");
        }
        host.netns.run(|| ip("link delete flannel.1"));
        let before = server.condition("node-1", "NetworkUnavailable").unwrap();
        for (config, message) in [(DUAL, "IPv6"), (&misspelt, "\"vlxan\"")] {
            assert_eq!(start(config, message), "True", "nothing is in place");
            server.modify("node-1", |node| node["status"]["conditions"] = json!([before]));
        }
    });
}

/// The record of the last run has a config that can be used.
#[test]
fn a_start_with_a_config_that_cannot_be_used_runs_the_network_of_the_last_run() {
    in_netns(|| {
        let (server, host, mut daemon) = cluster_with_a_peer();
        host.netns.run(|| ip("-6 address flush dev eth0"));
        let misspelt = VXLAN.replace("vxlan", "vlxan");
        let mut peer = 2;
        for (config, message) in [
            (&*misspelt, "\"vlxan\" is not a backend"),
            (DUAL, "no usable IPv6 address"),
            ("{", "one JSON object"),
            (&*VXLAN.replace("10.1.", "10.7."), "10.1.1.0/24"),
        ] {
            daemon.signal(Signal::SIGTERM);
            assert_eq!(daemon.ended().code(), Some(0), "{}", daemon.log());
            let mut command = host.command(&["--kube-api-url", &server.url()]);
            fs::write(host.dir.path().join("net-conf.json"), config).unwrap();
            daemon = host.netns.run(|| Daemon::start(command.env("NODE_NAME", host.name())));
            daemon.wait_for_log(message);
            daemon.wait_for_log("networks=[10.1.0.0/16] backend=\"vxlan\"");
            daemon.wait_for_log("in sync peers=1");
            // The lease is held from then on.
            daemon.wait_for_log("running lease=");
            // Peers are followed after that too.
            peer += 1;
            let address = format!("192.0.2.{peer}");
            server.put_node("node-2", go_peer("10.1.2.0/24", &address, "0a:00:00:00:00:02"));
            let entry = format!("0a:00:00:00:00:02 dst {address} self permanent");
            host.holds(&daemon, &[&entry]);
        }
    });
}

/// The pod network of the cluster is replaced. The new node object has no pod CIDR at first.
#[test]
fn a_start_with_other_networks_goes_on_when_the_node_gets_its_pod_cidr() {
    in_netns(|| {
        let (server, host, mut daemon) = cluster_with_a_peer();
        let proven = host.dir.path().join("state/config");
        wait_until(|| proven.exists(), || daemon.log());
        daemon.signal(Signal::SIGTERM);
        assert_eq!(daemon.ended().code(), Some(0), "{}", daemon.log());
        let mut command = host.command(&["--kube-api-url", &server.url()]);
        let config = VXLAN.replace("10.1.", "10.7.");
        fs::write(host.dir.path().join("net-conf.json"), config).unwrap();
        server.put_node("node-1", json!({ "metadata": { "labels": {} }, "spec": {} }));
        let daemon = host.netns.run(|| Daemon::start(command.env("NODE_NAME", host.name())));
        daemon.wait_for_log("it has no IPv4 PodCIDR yet");
        server.put_node("node-1", blank(&["10.7.1.0/24"]));
        daemon.wait_for_log("networks=[10.7.0.0/16] backend=\"vxlan\"");
        daemon.wait_for_log("running lease=10.7.1.0-24");
    });
}

#[test]
fn public_ip_overwrite_changes_the_published_address() {
    in_netns(|| {
        let (server, _host, daemon) = cluster_with_a_peer();
        for address in [Some("203.0.113.9"), Some("203.0.113.66"), None] {
            server.modify("node-1", |node| {
                let annotations = node["metadata"]["annotations"].as_object_mut().unwrap();
                annotations.remove(&format!("{PREFIX}public-ip-overwrite"));
                annotations.extend(
                    address.map(|address| (format!("{PREFIX}public-ip-overwrite"), json!(address))),
                );
            });
            let public = address.unwrap_or("192.0.2.1");
            daemon.wait_for_log(&format!("annotation=public-ip value={public}"));
            assert_eq!(
                server.annotation("node-1", &format!("{PREFIX}public-ip")).as_deref(),
                Some(public)
            );
        }
        assert!(!daemon.log().contains("another writer removed or changed"), "{}", daemon.log());
        server.modify("node-1", |node| {
            node["metadata"]["annotations"] =
                json!({ format!("{PREFIX}public-ip-overwrite"): "nowhere" });
        });
        daemon.wait_for_log("another writer removed or changed annotations of this node");
        daemon.wait_for_log("public-ip-overwrite: \"nowhere\" is not valid");
        let public = || server.annotation("node-1", &format!("{PREFIX}public-ip"));
        wait_until(|| public().as_deref() == Some("192.0.2.1"), || daemon.log());
    });
}

#[test]
fn the_condition_is_true_while_the_data_path_is_broken() {
    const DUAL: &str = r#"{"Network":"10.1.0.0/16","EnableIPv6":true,
        "IPv6Network":"fd00::/48","Backend":{"Type":"vxlan"}}"#;
    in_netns(|| {
        let server = cluster();
        server.put_node("node-1", blank(&["10.1.1.0/24", "fd00:0:0:1::/64"]));
        let mut peer = go_peer("10.1.2.0/24", "192.0.2.2", "0a:00:00:00:00:02");
        peer["spec"]["podCIDRs"] = json!(["10.1.2.0/24", "fd00:0:0:2::/64"]);
        peer["metadata"]["annotations"][format!("{PREFIX}public-ipv6")] = json!("2001:db8::2");
        let data = r#"{"VNI":1,"VtepMAC":"0a:00:00:00:00:62"}"#;
        peer["metadata"]["annotations"][format!("{PREFIX}backend-v6-data")] = json!(data);
        server.put_node("node-2", peer);
        let host = Host::new(1, DUAL);
        let daemon = host.start(&server, &[]);
        wait_for_condition(&server, "node-1", "False", "FlannelIsUp", &daemon);
        host.netns.run(|| take_the_port(&daemon));
        daemon.wait_for_log("not in sync: the kernel refused");
        wait_for_condition(&server, "node-1", "True", "FlannelIsDown", &daemon);
        let message = server.condition("node-1", "NetworkUnavailable").unwrap()["message"].clone();
        assert!(message.as_str().unwrap().starts_with("the kernel refuses: put "), "{message}");
        host.netns.run(|| ip("link delete other"));
        wait_for_condition(&server, "node-1", "False", "FlannelIsUp", &daemon);
        let routes = host.netns.run(|| ip("-6 route show dev flannel-v6.1"));
        assert!(routes.contains("fd00:0:0:2::/64"), "{routes}");
    });
}

#[test]
fn a_wrong_ca_is_logged_and_retried() {
    in_netns(|| {
        ip("link set lo up");
        ip("link add eth0 type veth peer name wire");
        ip("link set wire up");
        ip("address add 192.0.2.1/24 dev eth0");
        ip("link set eth0 up");
        let signed = rcgen::generate_simple_self_signed(["127.0.0.1".to_owned()]).unwrap();
        let other = rcgen::generate_simple_self_signed(["127.0.0.1".to_owned()]).unwrap();
        let server = ApiServer::with_tls(&signed.cert.pem(), &signed.signing_key.serialize_pem());
        server.put_node("node-1", blank(&["10.1.1.0/24"]));
        let host = Host {
            netns: Netns::new().unwrap(),
            n: 1,
            dir: tempfile::tempdir().unwrap(),
            config: VXLAN,
        };
        let kubeconfig = host.dir.path().join("kubeconfig");
        let ca = host.dir.path().join("ca");
        let text = format!(
            "apiVersion: v1\nkind: Config\ncurrent-context: c\n\
             clusters: [{{name: c, cluster: {{server: \"{}\", certificate-authority: ca}}}}]\n\
             contexts: [{{name: c, context: {{cluster: c}}}}]\n",
            server.url()
        );
        fs::write(&kubeconfig, text).unwrap();
        fs::write(&ca, other.cert.pem()).unwrap();
        let mut command = host.command(&["--kubeconfig-file", kubeconfig.to_str().unwrap()]);
        let daemon = Daemon::start(command.env("NODE_NAME", "node-1"));
        daemon.wait_for_log("the API server's certificate is not accepted (");
        daemon.wait_for_log("expected one that the CA of the kubeconfig");
        fs::write(&ca, signed.cert.pem()).unwrap();
        daemon.wait_for_log("running lease=10.1.1.0-24");
        wait_for_condition(&server, "node-1", "False", "FlannelIsUp", &daemon);
    });
}

#[test]
fn missing_permissions_to_list_or_watch_nodes_are_logged() {
    in_netns(|| {
        let server = cluster();
        server.put_node("node-1", blank(&["10.1.1.0/24"]));
        let host = Host::new(1, VXLAN);
        server.forbid("list", "nodes");
        let daemon = host.start(&server, &[]);
        daemon
            .wait_for_log("this node's account needs the verb \"list\" on the resource \"nodes\"");
        server.forbid("watch", "nodes");
        server.permit("list", "nodes");
        daemon
            .wait_for_log("this node's account needs the verb \"watch\" on the resource \"nodes\"");
        server.permit_all();
        server.put_node("node-2", go_peer("10.1.2.0/24", "192.0.2.2", "0a:00:00:00:00:02"));
        host.holds(&daemon, &["via 10.1.2.0 "]);
        wait_for_condition(&server, "node-1", "False", "FlannelIsUp", &daemon);
    });
}

#[test]
fn another_pod_network_waits_for_a_restart_and_another_backend_does_not() {
    in_netns(|| {
        let server = cluster();
        server.put_node("node-1", blank(&["10.1.1.0/24"]));
        let host = Host::new(1, VXLAN);
        let daemon = host.start(&server, &[]);
        daemon.wait_for_log("running lease");
        let write =
            |config: &str| fs::write(host.dir.path().join("net-conf.json"), config).unwrap();
        write(r#"{"Network":"10.2.0.0/16","Backend":{"Type":"vxlan"}}"#);
        daemon.wait_for_log("the network config has other networks now");
        assert!(!daemon.log().contains("rebuilding the network"), "{}", daemon.log());
        write(r#"{"Network":"10.1.0.0/16","Backend":{"Type":"host-gw"}}"#);
        daemon.wait_for_log("rebuilding the network reason=the network config has changed");
        let kind = || server.annotation("node-1", &format!("{PREFIX}backend-type"));
        wait_until(|| kind().as_deref() == Some("host-gw"), || daemon.log());
    });
}

/// A node of Go flannel keeps the move at the step in which both backends are offered.
#[test]
fn a_move_offers_both_backends_until_go_flannel_has_restarted() {
    in_netns(|| {
        let (server, host, daemon) = cluster_with_a_peer();
        let annotation = |name: &str| server.annotation("node-1", &format!("{PREFIX}{name}"));
        let config = host.dir.path().join("net-conf.json");
        fs::write(config, VXLAN.replace("vxlan", "host-gw")).unwrap();
        daemon.wait_for_log("this node offers vxlan, host-gw now");
        daemon.wait_for_log("waits_for=offers of host-gw by 10.1.2.0-24 of 192.0.2.2 (vxlan)");
        let offer = r#"{"PublicIP":"192.0.2.1","PublicIPv6":null,"BackendType":"host-gw"}"#;
        assert_eq!(annotation("other-offers"), Some(format!("[{offer}]")));
        assert_eq!(annotation("backend-type").as_deref(), Some("vxlan"));
        assert!(annotation("backend-data").unwrap().contains(&host.mac()));
        host.holds(&daemon, &["10.1.2.0/24", "0a:00:00:00:00:02"]);
        server.modify("node-2", |node| {
            let annotations = &mut node["metadata"]["annotations"];
            annotations[format!("{PREFIX}backend-type")] = "host-gw".into();
            annotations[format!("{PREFIX}backend-data")] = "null".into();
        });
        wait_until(|| annotation("other-offers").is_none(), || daemon.log());
        assert_eq!(annotation("backend-type").as_deref(), Some("host-gw"));
        assert_eq!(annotation("backend-data").as_deref(), Some("null"));
        let routes = || host.netns.run(|| ip("route show"));
        wait_until(
            || routes().lines().any(|it| it.contains("10.1.2.0/24") && it.contains("192.0.2.2")),
            || format!("{}\n{}", routes(), daemon.log()),
        );
        assert!(
            host.netns.run(|| ip("link show")).contains("flannel.1"),
            "a peer may still use it"
        );
    });
}

/// The network, its lease and later comparisons use one config.
#[test]
fn a_reload_during_a_start_does_not_change_its_config() {
    in_netns(|| {
        let server = cluster();
        server.put_node("node-1", json!({}));
        let host = Host::new(1, VXLAN);
        let daemon = host.start(&server, &[]);
        daemon.wait_for_log("it has no IPv4 PodCIDR yet");
        // The next attempt blocks after it has read its config.
        let held = server.hold("GET /api/v1/nodes/node-1");
        wait_until(|| held.is_there(), || daemon.log());
        let other = r#"{"Network":"10.2.0.0/16","Backend":{"Type":"vxlan"}}"#;
        fs::write(host.dir.path().join("net-conf.json"), other).unwrap();
        daemon.signal(Signal::SIGHUP);
        daemon.wait_for_log("SIGHUP: read again result=");
        server.put_node("node-1", blank(&["10.1.1.0/24"]));
        drop(held);
        daemon.wait_for_log("running lease");
        daemon.wait_for_log("the network config has other networks now");
        assert!(
            host.subnet_env().contains("FLANNEL_NETWORK=10.1.0.0/16\n"),
            "{}",
            host.subnet_env()
        );
        wait_for_condition(&server, "node-1", "False", "FlannelIsUp", &daemon);
    });
}

#[test]
fn host_gw_routes_both_families_and_a_disabled_condition_is_not_set() {
    const DUAL: &str = r#"{"Network":"10.1.0.0/16","EnableIPv6":true,
        "IPv6Network":"fd00::/48","Backend":{"Type":"host-gw"}}"#;
    in_netns(|| {
        let server = cluster();
        server.put_node("node-1", blank(&["10.1.1.0/24", "fd00:0:0:1::/64"]));
        server.put_node("node-2", blank(&["10.1.2.0/24", "fd00:0:0:2::/64"]));
        let others =
            json!({ "type": "NetworkUnavailable", "status": "False", "reason": "RouteCreated" });
        server.modify("node-1", |node| node["status"]["conditions"] = json!([others]));
        let hosts = [1, 2].map(|n| Host::new(n, DUAL));
        let daemons = hosts
            .each_ref()
            .map(|host| host.start(&server, &["--set-node-network-unavailable=false"]));
        let routes = || hosts[0].netns.run(|| [ip("route show"), ip("-6 route show")].concat());
        wait_until(
            || {
                ["10.1.2.0/24 ", "via 192.0.2.2", "fd00:0:0:2::/64 via 2001:db8::2"]
                    .iter()
                    .all(|part| routes().contains(part))
            },
            || format!("{}\n{}", routes(), daemons[0].log()),
        );
        daemons[0].wait_for_log("running lease");
        let expected = json!({
            format!("{PREFIX}kube-subnet-manager"): "true",
            format!("{PREFIX}backend-type"): "host-gw",
            format!("{PREFIX}backend-data"): "null",
            format!("{PREFIX}public-ip"): "192.0.2.1",
            format!("{PREFIX}backend-v6-data"): "null",
            format!("{PREFIX}public-ipv6"): "2001:db8::1",
        });
        assert_eq!(server.node("node-1").unwrap()["metadata"]["annotations"], expected);
        assert_eq!(server.condition("node-1", "NetworkUnavailable"), Some(others));
        assert_eq!(server.condition("node-2", "NetworkUnavailable"), None);
    });
}

#[test]
fn a_refusal_is_retried_and_an_invalid_value_stops_the_daemon() {
    in_netns(|| {
        let server = cluster();
        server.put_node("node-1", blank(&["10.1.1.0/24"]));
        let host = Host::new(1, VXLAN);
        // As in a cluster that boots, whose API server answers before it has loaded permissions.
        server.forbid("get", "nodes");
        let daemon = host.start(&server, &[]);
        daemon.wait_for_log("waiting reason=");
        daemon.wait_for_log("this node's account needs the verb \"get\" on the resource \"nodes\"");
        server.permit_all();
        daemon.wait_for_log("running lease");
        drop(daemon);
        let mut daemon = host.start(&server, &["--kube-api-url=nonsense"]);
        assert_eq!(daemon.ended().code(), Some(2));
        daemon.wait_for_log("--kube-api-url: \"nonsense\" is no URL");
    });
}

/// While a node waits for its lease, pods get no addresses of an earlier subnet.
#[test]
fn a_subnet_file_is_removed_if_the_node_has_other_podcidrs_or_none() {
    in_netns(|| {
        let server = cluster();
        let stale = |subnet: &str| {
            format!(
                "FLANNEL_NETWORK=10.1.0.0/16\nFLANNEL_SUBNET={subnet}\nFLANNEL_MTU=1400\n\
                 FLANNEL_IPMASQ=false\n"
            )
        };
        let host = Host::new(1, VXLAN);
        fs::create_dir_all(host.subnet_file().parent().unwrap()).unwrap();
        for cidr in [None, Some("10.9.0.0/24")] {
            fs::write(host.subnet_file(), stale("10.1.1.1/24")).unwrap();
            let mut node = blank(&["10.1.1.0/24"]);
            node["spec"] = cidr.map_or_else(|| json!({}), |cidr| json!({ "podCIDR": cidr }));
            server.put_node("node-1", node);
            let daemon = host.start(&server, &[]);
            wait_until(|| host.subnet_env().is_empty(), || daemon.log());
            server.modify("node-1", |node| node["spec"] = json!({ "podCIDR": "10.1.1.0/24" }));
            daemon.wait_for_log("running lease");
            assert_eq!(host.subnet_env(), stale("10.1.1.1/24").replace("1400", "1450"));
        }
        // The same subnet: the file stays while the node waits for a valid address. With another
        // PodCIDR it goes before the annotations are written.
        let held = host.subnet_env();
        let wrong = format!("{PREFIX}public-ip-overwrite");
        for (cidr, file) in [("10.1.1.0/24", held.as_str()), ("10.1.2.0/24", "")] {
            let mut node = blank(&[cidr]);
            node["metadata"]["annotations"] = json!({ wrong.clone(): "no address" });
            server.put_node("node-1", node);
            fs::write(host.subnet_file(), &held).unwrap();
            let daemon = host.start(&server, &[]);
            daemon.wait_for_log("waiting reason");
            wait_until(|| host.subnet_env() == file, || daemon.log());
        }
    });
}

/// Also while a network runs, which does not restore the file.
#[test]
fn a_subnet_file_is_removed_when_the_node_gets_other_podcidrs() {
    in_netns(|| {
        let (server, host, daemon) = cluster_with_a_peer();
        assert!(host.subnet_env().contains("10.1.1.1/24"), "{}", daemon.log());
        server.modify("node-1", |node| node["spec"] = json!({ "podCIDR": "10.1.9.0/24" }));
        daemon.wait_for_log("the subnet file has other subnets or networks than this node");
        wait_until(|| host.subnet_env().contains("10.1.9.1/24"), || daemon.log());
        assert!(!daemon.log().contains("another program removed"), "{}", daemon.log());
    });
}
