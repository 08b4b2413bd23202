//! The plugin with the plugins of clusters (`bridge`, `host-local`, `portmap`, `loopback` of
//! containernetworking-plugins), in network namespaces, as root and as an ordinary user.

use std::fs;
use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;
use test_support::eventually;

use flannel_core::Subnet;
use flannel_core::address::{Dual, Family};
use flannel_lab::{Builder, Lab, Namespace};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::runtime::{Answer, Attach, answer, call, flannel, names};
use flannel_lab::testing::as_root;

const PATIENCE: Duration = Duration::from_secs(30);

/// The directory of the plugins: `CNI_PLUGINS`, or Debian's.
fn plugins() -> String {
    std::env::var("CNI_PLUGINS").unwrap_or_else(|_| "/usr/lib/cni".into())
}

/// A host with a runtime.
struct Node {
    host: Namespace,
    dir: TempDir,
    subnet_file: PathBuf,
}

/// The runtime's view of a pod.
struct Sandbox {
    namespace: Namespace,
    attach: Attach,
}

impl Sandbox {
    fn new(name: &str) -> Self {
        let namespace = Namespace::new(name).unwrap();
        let attach = Attach::new(name, "eth0", &namespace.path());
        Self { namespace, attach }
    }

    /// The output of `ip` inside.
    fn ip(&self, args: &str) -> String {
        ip(&self.namespace, args)
    }
}

fn ip(namespace: &Namespace, args: &str) -> String {
    let output = namespace.output(Command::new("ip").args(args.split_whitespace())).unwrap();
    assert!(output.status.success(), "ip {args}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

impl Node {
    fn new(host: &Namespace, subnet_file: &Path) -> Self {
        let dir = tempfile::tempdir().unwrap();
        Self { host: host.clone(), dir, subnet_file: subnet_file.to_owned() }
    }

    /// A host with a `subnet.env` for these families.
    fn alone(families: &[Family], ip_masq: bool) -> Self {
        let host = Namespace::new("host").unwrap();
        host.ip("link set lo up\nlink add uplink type bridge\nlink set uplink up\naddr add \
            192.0.2.1/24 dev uplink\naddr add 2001:db8::1/64 dev uplink nodad\n")
            .unwrap();
        let mut node = Self::new(&host, Path::new(""));
        node.subnet_file = node.dir.path().join("subnet.env");
        let mut env = format!("FLANNEL_MTU=1450\nFLANNEL_IPMASQ={ip_masq}\n");
        for family in families {
            env += match family {
                Family::V4 => "FLANNEL_NETWORK=10.244.0.0/16\nFLANNEL_SUBNET=10.244.5.1/24\n",
                Family::V6 => {
                    "FLANNEL_IPV6_NETWORK=fd00:10:244::/48\n\
                     FLANNEL_IPV6_SUBNET=fd00:10:244:5::1/64\n"
                }
            };
        }
        fs::write(&node.subnet_file, env).unwrap();
        node
    }

    /// The plugin config of kube-flannel.yml, with the state in the test's directory.
    fn conf(&self, more: &Value) -> Value {
        let mut conf = json!({
            "cniVersion": "1.0.0", "name": "cbr0", "type": "flannel",
            "subnetFile": self.subnet_file, "dataDir": self.dir.path().join("flannel"),
            "ipam": { "dataDir": self.dir.path().join("host-local") },
            "delegate": { "hairpinMode": true, "isDefaultGateway": true },
        });
        conf.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        conf
    }

    fn call(&self, command: &str, sandbox: &Sandbox, conf: &Value) -> Answer {
        let kind = conf["type"].as_str().unwrap();
        let program = if kind == "flannel" { flannel() } else { Path::new(&plugins()).join(kind) };
        assert!(program.exists(), "{} is needed: containernetworking-plugins", program.display());
        let output = call(
            &program,
            command,
            &sandbox.attach,
            &plugins(),
            &conf.to_string(),
            Some(&self.host),
            &[],
        );
        answer(&output)
    }

    /// ADD of a list of plugins. As in a runtime, the result of each goes to the next.
    fn add(&self, sandbox: &Sandbox, plugins: &[Value]) -> Result<Value, Value> {
        plugins.iter().try_fold(Value::Null, |result, conf| {
            self.call("ADD", sandbox, &with_result(conf, &result))
        })
    }

    /// CHECK of a list of plugins. Each gets the result of the whole ADD.
    fn check(&self, sandbox: &Sandbox, plugins: &[Value], result: &Value) -> Result<(), Value> {
        plugins
            .iter()
            .try_for_each(|conf| self.call("CHECK", sandbox, &with_result(conf, result)).map(drop))
    }

    /// DEL of a list of plugins, in reverse order.
    fn del(&self, sandbox: &Sandbox, plugins: &[Value], result: &Value) -> Result<(), Value> {
        plugins
            .iter()
            .rev()
            .try_for_each(|conf| self.call("DEL", sandbox, &with_result(conf, result)).map(drop))
    }

    /// Addresses that host-local has allocated.
    fn reserved(&self) -> Vec<String> {
        let mut names = names(&self.dir.path().join("host-local/cbr0"));
        names.retain(|name| !name.starts_with("last_reserved_ip") && name != "lock");
        names
    }

    /// Files of the plugin.
    fn state(&self) -> Vec<String> {
        names(&self.dir.path().join("flannel"))
    }

    fn assert_nothing_is_left(&self) {
        assert_eq!(self.reserved(), [""; 0]);
        assert_eq!(self.state(), [""; 0]);
    }
}

fn with_result(conf: &Value, result: &Value) -> Value {
    let mut conf = conf.clone();
    if !result.is_null() {
        conf["prevResult"] = result.clone();
    }
    conf
}

/// The addresses and gateways of a result.
fn addresses(result: &Value) -> (Dual<IpAddr>, Dual<IpAddr>) {
    let mut addresses = Vec::<IpAddr>::new();
    let mut gateways = Vec::<IpAddr>::new();
    for ip in result["ips"].as_array().unwrap() {
        let (address, _) = ip["address"].as_str().unwrap().split_once('/').unwrap();
        addresses.push(address.parse().unwrap());
        gateways.push(ip["gateway"].as_str().unwrap().parse().unwrap());
    }
    (addresses.into_iter().collect(), gateways.into_iter().collect())
}

/// A client inside `from` connects to `peer` and exchanges bytes with a server inside `to` that
/// listens at `local`.
fn exchange(from: &Namespace, peer: SocketAddr, to: &Namespace, local: SocketAddr) {
    // An IPv6 address is tentative at first.
    let bind = || TcpListener::bind(local).ok();
    let listener = to.run(|| eventually(PATIENCE, bind, || format!("no bind to {local}"))).unwrap();
    let server = std::thread::spawn(move || {
        listener.set_nonblocking(true).unwrap();
        let (mut stream, _) = eventually(
            PATIENCE,
            || listener.accept().ok(),
            || format!("no client connected to {local}"),
        );
        stream.write_all(b"hello").unwrap();
    });
    // A connection that timed out may have been accepted, and the server accepts only one.
    let connect = || TcpStream::connect_timeout(&peer, PATIENCE).ok();
    let mut stream =
        from.run(|| eventually(PATIENCE, connect, || format!("no connection to {peer}"))).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let mut message = String::new();
    stream.read_to_string(&mut message).unwrap();
    assert_eq!(message, "hello");
    server.join().unwrap();
}

fn a_pod_is_connected_and_disconnected(families: &[Family]) {
    let node = Node::alone(families, true);
    let pod = Sandbox::new("pod-1");
    let loopback = json!({ "cniVersion": "1.0.0", "name": "lo", "type": "loopback" });
    let lo = Sandbox {
        namespace: pod.namespace.clone(),
        attach: Attach { ifname: "lo".into(), ..pod.attach.clone() },
    };
    node.call("ADD", &lo, &loopback).unwrap();
    let flannel = [node.conf(&json!({}))];
    let result = node.add(&pod, &flannel).unwrap();

    let (addresses, gateways) = addresses(&result);
    assert!(addresses.families().eq(families.iter().copied()), "{result}");
    for (family, address) in addresses.iter() {
        let subnet: Subnet =
            ["10.244.5.0/24", "fd00:10:244:5::/64"][family as usize].parse().unwrap();
        assert!(subnet.contains(*address) && gateways[family] == subnet.nth(1), "{result}");
        assert!(pod.ip("addr show dev eth0").contains(&format!("{address}/{}", subnet.len())));
        let gateway = gateways[family].unwrap();
        exchange(&pod.namespace, (gateway, 4000).into(), &node.host, (gateway, 4000).into());
        exchange(&node.host, (*address, 4000).into(), &pod.namespace, (*address, 4000).into());
        let flag = if family == Family::V4 { "-4" } else { "-6" };
        let network = ["10.244.0.0/16", "fd00:10:244::/48"][family as usize];
        let routes = pod.ip(&format!("{flag} route"));
        assert!(
            routes.contains(&format!("{network} via {gateway}")) && routes.contains("default via"),
            "{routes}"
        );
    }
    assert!(pod.ip("link show dev eth0").contains("mtu 1450"));
    assert_eq!(node.reserved().len(), families.len());
    assert_eq!(node.state(), ["pod-1", "pod-1:eth0"]);

    node.check(&pod, &flannel, &result).unwrap();
    let lost = addresses.values().next().unwrap();
    let len = if lost.is_ipv4() { 24 } else { 64 };
    pod.ip(&format!("addr del {lost}/{len} dev eth0"));
    let error = node.check(&pod, &flannel, &result).unwrap_err();
    assert!(error["msg"].as_str().unwrap().contains(&lost.to_string()), "{error}");

    node.del(&pod, &flannel, &result).unwrap();
    assert!(!pod.ip("link").contains("eth0"));
    node.assert_nothing_is_left();
    node.del(&pod, &flannel, &result).unwrap();
    node.call("DEL", &lo, &loopback).unwrap();
}

macro_rules! in_families {
    ($run:ident: $($name:ident $families:expr;)*) => {$(
        #[test]
        fn $name() {
            as_root(|| $run(&$families));
        }
    )*};
}

in_families! { a_pod_is_connected_and_disconnected:
    a_pod_is_connected_and_disconnected_in_ipv4 [Family::V4];
    a_pod_is_connected_and_disconnected_in_ipv6 [Family::V6];
    a_pod_is_connected_and_disconnected_in_both_families Family::BOTH;
}

#[test]
fn portmap_behind_flannel_maps_a_port_to_the_pod() {
    as_root(|| {
        let node = Node::alone(&Family::BOTH, true);
        let pod = Sandbox::new("pod-1");
        let portmap = json!({
            "cniVersion": "1.0.0", "name": "cbr0", "type": "portmap", "snat": true,
            "runtimeConfig": {
                "portMappings": [{ "hostPort": 8080, "containerPort": 80, "protocol": "tcp" }],
            },
        });
        let plugins = [node.conf(&json!({})), portmap];
        let result = node.add(&pod, &plugins).unwrap();
        // portmap 1.1.1 looks for its IPv4 rules among the IPv6 rules, so only flannel is checked.
        node.check(&pod, &plugins[..1], &result).unwrap();
        let hosts = ["192.0.2.1", "2001:db8::1"].map(|address| address.parse::<IpAddr>().unwrap());
        for (family, address) in addresses(&result).0.iter() {
            exchange(
                &node.host,
                (hosts[family as usize], 8080).into(),
                &pod.namespace,
                (*address, 80).into(),
            );
        }
        node.del(&pod, &plugins, &result).unwrap();
        for host in hosts {
            let closed = node
                .host
                .run(|| TcpStream::connect_timeout(&(host, 8080).into(), PATIENCE))
                .unwrap();
            assert_eq!(closed.unwrap_err().kind(), std::io::ErrorKind::ConnectionRefused);
        }
        node.assert_nothing_is_left();
    });
}

/// Without `--ip-masq` the bridge masquerades, and its rules are removed with the pod.
#[test]
fn the_bridge_masquerades_if_flannel_does_not() {
    as_root(|| {
        let node = Node::alone(&[Family::V4], false);
        let pod = Sandbox::new("pod-1");
        let rules = || {
            let output =
                node.host.output(Command::new("iptables").args(["-t", "nat", "-S"])).unwrap();
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            String::from_utf8(output.stdout).unwrap().matches("pod-1").count()
        };
        let plugins = [node.conf(&json!({}))];
        let result = node.add(&pod, &plugins).unwrap();
        assert!(rules() > 0);
        node.del(&pod, &plugins, &result).unwrap();
        assert_eq!(rules(), 0);
    });
}

#[test]
fn a_pod_whose_namespace_is_gone_releases_its_address() {
    as_root(|| {
        let node = Node::alone(&Family::BOTH, true);
        // A path that disappears with the namespace. The number of an open file may be reused.
        let namespace = Namespace::new("pod-1").unwrap();
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("netns");
        std::os::unix::fs::symlink(namespace.path(), &path).unwrap();
        let attach = Attach::new("pod-1", "eth0", &path);
        let plugins = [node.conf(&json!({}))];
        let gone = Sandbox { namespace: Namespace::new("gone").unwrap(), attach };
        let result = node.add(&gone, &plugins).unwrap();
        fs::remove_file(&path).unwrap();
        drop(namespace);
        assert_eq!(node.reserved().len(), 2);
        node.del(&gone, &plugins, &result).unwrap();
        node.assert_nothing_is_left();
    });
}

/// Links, namespaces and `subnet.env` are gone, and the plugins' state in /var is left. The runtime
/// calls DEL for every earlier pod, with its old path or with none.
fn after_a_reboot_pods_release_their_addresses(ip_masq: bool) {
    let mut node = Node::alone(&Family::BOTH, ip_masq);
    let plugins = [node.conf(&json!({}))];
    let pods = ["pod-1", "pod-2"].map(|name| {
        let pod = Sandbox::new(name);
        let result = node.add(&pod, &plugins).unwrap();
        (pod, result)
    });
    assert_eq!((node.reserved().len(), node.state().len()), (4, 4));

    node.host = Namespace::new("host").unwrap();
    fs::remove_file(&node.subnet_file).unwrap();
    for (netns, (pod, result)) in ["/run/netns/of-before", ""].into_iter().zip(pods) {
        // The namespace exists, but not its path.
        let gone = Sandbox {
            namespace: Namespace::new("gone").unwrap(),
            attach: Attach { netns: netns.into(), ..pod.attach },
        };
        drop(pod.namespace);
        for _ in 0..2 {
            node.del(&gone, &plugins, &result).unwrap();
        }
    }
    node.assert_nothing_is_left();
}

#[test]
fn after_a_reboot_pods_release_their_addresses_if_flannel_masquerades() {
    as_root(|| {
        after_a_reboot_pods_release_their_addresses(true);
    });
}

#[test]
fn after_a_reboot_pods_release_their_addresses_if_the_bridge_masquerades() {
    as_root(|| {
        after_a_reboot_pods_release_their_addresses(false);
    });
}

/// The Go plugin called the bridge with this text, and saved it under the container's name.
#[test]
fn a_pod_of_the_go_plugin_releases_its_address() {
    as_root(|| {
        let node = Node::alone(&[Family::V4], true);
        let pod = Sandbox::new("pod-1");
        let saved = format!(
            concat!(
                r#"{{"cniVersion":"1.0.0","hairpinMode":true,"ipMasq":false,"#,
                r#""ipam":{{"dataDir":{:?},"ranges":[[{{"subnet":"10.244.5.0/24"}}]],"#,
                r#""routes":[{{"dst":"10.244.0.0/16"}}],"type":"host-local"}},"#,
                r#""isDefaultGateway":true,"isGateway":true,"mtu":1450,"name":"cbr0","#,
                r#""type":"bridge"}}"#
            ),
            node.dir.path().join("host-local")
        );
        let result = node.call("ADD", &pod, &serde_json::from_str(&saved).unwrap()).unwrap();
        fs::create_dir(node.dir.path().join("flannel")).unwrap();
        fs::write(node.dir.path().join("flannel/pod-1"), saved).unwrap();
        assert_eq!((node.reserved().len(), node.state().len()), (1, 1));
        let plugins = [node.conf(&json!({}))];
        node.check(&pod, &plugins, &result).unwrap();
        node.del(&pod, &plugins, &result).unwrap();
        assert!(!pod.ip("link").contains("eth0"));
        node.assert_nothing_is_left();
        node.del(&pod, &plugins, &result).unwrap();
    });
}

/// The bridge does not find host-local for a moment, as during an update of plugins. The error is
/// passed on, and the retry completes the DEL.
#[test]
fn an_incomplete_del_is_completed_by_the_next_del() {
    as_root(|| {
        let node = Node::alone(&Family::BOTH, true);
        let pod = Sandbox::new("pod-1");
        let conf = node.conf(&json!({}));
        node.add(&pod, std::slice::from_ref(&conf)).unwrap();
        let few = node.dir.path().join("few");
        fs::create_dir(&few).unwrap();
        std::os::unix::fs::symlink(Path::new(&plugins()).join("bridge"), few.join("bridge"))
            .unwrap();
        let del = |path: &str| {
            let output = call(
                &flannel(),
                "DEL",
                &pod.attach,
                path,
                &conf.to_string(),
                Some(&node.host),
                &[],
            );
            answer(&output)
        };
        let error = del(few.to_str().unwrap()).unwrap_err();
        assert!(error["msg"].as_str().unwrap().contains("host-local"), "{error}");
        assert_eq!((node.reserved().len(), node.state().len()), (2, 2));
        del(&plugins()).unwrap();
        node.assert_nothing_is_left();
        assert!(!pod.ip("link").contains("eth0"));
    });
}

#[test]
fn every_version_of_the_plugins_connects_a_pod() {
    as_root(|| {
        let node = Node::alone(&[Family::V4], true);
        for (version, checks) in [
            ("0.1.0", false),
            ("0.2.0", false),
            ("0.3.0", false),
            ("0.3.1", false),
            ("0.4.0", true),
            ("1.0.0", true),
        ] {
            let pod = Sandbox::new(&format!("pod-{version}"));
            let plugins = [node.conf(&json!({ "cniVersion": version }))];
            let result = node.add(&pod, &plugins).unwrap();
            // Results of the oldest two have one address for each family.
            let address = result["ip4"]["ip"]
                .as_str()
                .or_else(|| result["ips"][0]["address"].as_str())
                .unwrap();
            assert!(pod.ip("addr show dev eth0").contains(address), "{version}: {result}");
            assert_eq!(result["cniVersion"], version);
            let checked = node.check(&pod, &plugins, &result);
            assert_eq!(checked.is_ok(), checks, "{version}: {checked:?}");
            if checks {
                pod.ip("addr flush dev eth0");
                node.check(&pod, &plugins, &result).unwrap_err();
            }
            node.del(&pod, &plugins, &result).unwrap();
            node.assert_nothing_is_left();
        }
    });
}

/// host-local has no free address. Its error is passed on, and nothing is left.
#[test]
fn an_add_without_a_free_address_leaves_nothing_behind() {
    as_root(|| {
        let node = Node::alone(&[Family::V4], true);
        let env = fs::read_to_string(&node.subnet_file)
            .unwrap()
            .replace("10.244.5.1/24", "10.244.5.1/30");
        fs::write(&node.subnet_file, env).unwrap();
        let plugins = [node.conf(&json!({}))];
        let first = Sandbox::new("pod-1");
        let second = Sandbox::new("pod-2");
        let result = node.add(&first, &plugins).unwrap();
        let error = node.add(&second, &plugins).unwrap_err();
        assert!(error["msg"].as_str().unwrap().contains("no IP addresses available"), "{error}");
        assert_eq!((node.reserved().len(), node.state().len()), (1, 2));
        assert!(!second.ip("link").contains("eth0"));
        node.del(&first, &plugins, &result).unwrap();
        node.add(&second, &plugins).unwrap();
    });
}

/// The lab's program, which runs the daemons. `FLANNEL_LAB` is the path of a copy for users who
/// cannot build it.
fn lab() -> Builder {
    if let Some(program) = std::env::var_os("FLANNEL_LAB") {
        return Lab::builder().program(program);
    }
    let mut build = Command::new(env!("CARGO"));
    build.args(["build", "--quiet", "--package", "flannel-lab", "--bin", "lab"]);
    if !cfg!(debug_assertions) {
        build.arg("--release");
    }
    assert!(
        build.current_dir(env!("CARGO_MANIFEST_DIR")).status().unwrap().success(),
        "building the lab"
    );
    Lab::builder().program(Path::new(env!("CARGO_BIN_EXE_flannel")).with_file_name("lab"))
}

/// Two hosts with real daemons, whose pods are created by CNI calls.
fn pods_reach_each_other(backend: &str, families: &[Family]) {
    let lab = lab().hosts(2).backend(backend).families(families.iter().copied()).start().unwrap();
    lab.start_daemons().unwrap();
    let mut nodes = Vec::new();
    for host in lab.hosts() {
        let env = eventually(
            PATIENCE,
            || {
                host.check_daemon().unwrap();
                host.subnet_env().unwrap()
            },
            || host.log().unwrap(),
        );
        let node = Node::new(host.namespace(), &host.subnet_file());
        let pod = Sandbox::new(&format!("pod-{}", host.number()));
        let delegate = json!({ "delegate": { "isDefaultGateway": true, "ipMasq": false } });
        let plugins = [node.conf(&delegate)];
        let result = node.add(&pod, &plugins).unwrap();
        let addresses = addresses(&result).0;
        assert!(
            env.subnets.iter().all(|(family, subnet)| subnet.contains(addresses[family].unwrap()))
        );
        host.adopt_pod(pod.namespace.clone(), addresses, env.mtu).unwrap();
        nodes.push((node, pod, plugins, result));
    }
    let matrix = lab.matrix(PATIENCE).unwrap();
    assert!(matrix.is_complete(), "{:#?}", matrix.failures().collect::<Vec<_>>());
    assert_eq!(matrix.pairs.len(), 2 * families.len());
    for (node, pod, plugins, result) in &nodes {
        node.check(pod, plugins, result).unwrap();
        node.del(pod, plugins, result).unwrap();
        node.assert_nothing_is_left();
    }
}

macro_rules! reach {
    ($($name:ident $backend:literal $families:expr;)*) => {$(
        #[test]
        fn $name() {
            as_root(|| pods_reach_each_other($backend, &$families));
        }
    )*};
}

reach! {
    pods_reach_each_other_over_vxlan_in_ipv4 "vxlan" [Family::V4];
    pods_reach_each_other_over_vxlan_in_ipv6 "vxlan" [Family::V6];
    pods_reach_each_other_over_vxlan_in_both_families "vxlan" Family::BOTH;
    pods_reach_each_other_over_host_gw_in_ipv4 "host-gw" [Family::V4];
    pods_reach_each_other_over_host_gw_in_ipv6 "host-gw" [Family::V6];
    pods_reach_each_other_over_host_gw_in_both_families "host-gw" Family::BOTH;
}
