//! The containers of the manifest and of the chart, as a kubelet runs them: with a read-only root
//! and /proc/sys, with only the mounts and capabilities of the manifest, and against an API server
//! that enforces the role.

use std::fs;
use std::io::{Read, Write};
use std::net::{IpAddr, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use test_support::eventually;

use flannel_core::Subnet;
use flannel_lab::Namespace;
use flannel_subnet_kube::testing::ApiServer;
use serde_json::{Value, json};

use crate::container::{Api, NODE_NAME, Node, image, output_of};
use crate::objects::{cleanup, dual_stack, manifest, of_kind, udp};
use flannel_lab::testing::as_root;

const PATIENCE: Duration = Duration::from_secs(60);

/// A node with flannel's pod, and its API server.
struct Cluster {
    objects: Vec<Value>,
    node: Node,
    server: ApiServer,
}

/// flanneld in its container.
struct Daemon<'a> {
    cluster: &'a Cluster,
    process: Child,
    deadline: Instant,
}

impl Cluster {
    /// A cluster of this node and one of Go flannel's, with pods of both families.
    fn new(objects: Vec<Value>) -> Self {
        let mut node = Node::new(of_kind(&objects, "DaemonSet"), of_kind(&objects, "ConfigMap"));
        let signed = rcgen::generate_simple_self_signed(["127.0.0.1".to_owned()]).unwrap();
        let certificate = signed.cert.pem();
        let key = signed.signing_key.serialize_pem();
        let server = node.net.run(|| ApiServer::with_tls(&certificate, &key)).unwrap();
        let account = node.host("/account");
        fs::create_dir(&account).unwrap();
        for (name, text) in
            [("token", "a-token"), ("namespace", "kube-flannel"), ("ca.crt", &certificate)]
        {
            fs::write(account.join(name), text).unwrap();
        }
        node.api =
            Some(Api { port: server.url().rsplit_once(':').unwrap().1.parse().unwrap(), account });
        server.expect_token("a-token");
        forbid_other_requests(&server, &of_kind(&objects, "ClusterRole")["rules"]);
        let spec = |n: u8| {
            let v4 = format!("10.244.{n}.0/24");
            let v6 = format!("fd00:10:244:{n}::/64");
            json!({ "podCIDR": v4, "podCIDRs": [v4, v6] })
        };
        server.put_node(NODE_NAME, json!({ "spec": spec(7) }));
        let mut peer = json!({
            "flannel.alpha.coreos.com/backend-data": r#"{"VNI":1,"VtepMAC":"0a:00:00:00:00:08"}"#,
            "flannel.alpha.coreos.com/backend-v6-data":
                r#"{"VNI":1,"VtepMAC":"0a:00:00:00:06:08"}"#,
            "flannel.alpha.coreos.com/backend-type": "vxlan",
            "flannel.alpha.coreos.com/kube-subnet-manager": "true",
            "flannel.alpha.coreos.com/public-ip": "192.0.2.8",
            "flannel.alpha.coreos.com/public-ipv6": "2001:db8::8",
        });
        let net_conf = of_kind(&objects, "ConfigMap")["data"]["net-conf.json"].as_str().unwrap();
        if net_conf.contains(r#""Type": "udp""#) {
            peer["flannel.alpha.coreos.com/backend-type"] = "".into();
            peer["flannel.alpha.coreos.com/backend-data"] = "null".into();
            peer["flannel.alpha.coreos.com/backend-v6-data"] = "null".into();
        }
        server.put_node("of-go", json!({ "metadata": { "annotations": peer }, "spec": spec(8) }));
        Self { objects, node, server }
    }

    /// Runs the init containers, on directories that root may write only with CAP_DAC_OVERRIDE, as
    /// if they belonged to another user. (An ordinary user's namespace cannot change the owner.)
    fn install(&self) {
        let directories = ["/opt/cni/bin", "/etc/cni/net.d"].map(|path| self.node.host(path));
        let set_mode = |mode| {
            for directory in &directories {
                fs::set_permissions(directory, fs::Permissions::from_mode(mode)).unwrap();
            }
        };
        set_mode(0o555);
        for name in ["install-cni-plugin", "install-cni"] {
            assert_eq!(output_of(&mut self.node.container(name)), "");
        }
        set_mode(0o755);
        let plugin = self.node.host("/opt/cni/bin/flannel");
        assert_eq!(fs::read(&plugin).unwrap(), fs::read(image().join("flannel")).unwrap());
        assert_eq!(fs::metadata(&plugin).unwrap().permissions().mode() & 0o7777, 0o755);
        assert_eq!(
            self.conflist(),
            of_kind(&self.objects, "ConfigMap")["data"]["cni-conf.json"].as_str().unwrap()
        );
    }

    fn conflist(&self) -> String {
        fs::read_to_string(self.node.host("/etc/cni/net.d/10-flannel.conflist")).unwrap()
    }

    fn subnet_env(&self) -> String {
        fs::read_to_string(self.node.host("/run/flannel/subnet.env")).unwrap()
    }

    /// Runs flanneld until its node is ready.
    fn start(&self) -> Daemon<'_> {
        let mut command = self.node.container("kube-flannel");
        let log = fs::File::create(self.node.host("/log")).unwrap();
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        let process = self.node.net.spawn(&mut command).unwrap();
        let mut daemon = Daemon { cluster: self, process, deadline: Instant::now() + PATIENCE };
        daemon.wait_until(|| {
            self.get("/readyz").is_some_and(|answer| answer.starts_with("HTTP/1.1 200 "))
        });
        daemon
    }

    /// flanneld's answer at the port of its probes.
    fn get(&self, path: &str) -> Option<String> {
        self.node
            .net
            .run(|| {
                let mut stream = TcpStream::connect("127.0.0.1:8081").ok()?;
                stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
                write!(stream, "GET {path} HTTP/1.1\r\nHost: node\r\nConnection: close\r\n\r\n")
                    .ok()?;
                let mut answer = String::new();
                stream.read_to_string(&mut answer).ok()?;
                Some(answer)
            })
            .unwrap()
    }

    fn log(&self) -> String {
        fs::read_to_string(self.node.host("/log")).unwrap()
    }

    /// The output of a program on the node.
    fn on_node(&self, line: &str) -> String {
        let mut words = line.split(' ');
        let output = self.node.net.output(Command::new(words.next().unwrap()).args(words)).unwrap();
        assert!(output.status.success(), "{line}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }

    /// The next step of a runtime: it calls the installed plugin with the installed config for a
    /// pod.
    fn check_addresses_of_a_pod(&self) {
        let plugins = std::env::var("CNI_PLUGINS").unwrap_or_else(|_| "/usr/lib/cni".into());
        assert!(
            Path::new(&plugins).join("bridge").exists(),
            "{plugins}/bridge is needed: containernetworking-plugins"
        );
        let list: Value = serde_json::from_str(&self.conflist()).unwrap();
        let mut conf = list["plugins"][0].clone();
        conf["name"] = list["name"].clone();
        conf["cniVersion"] = list["cniVersion"].clone();
        let pod = Namespace::new("pod").unwrap();
        fs::create_dir_all(self.node.host("/var/lib/cni")).unwrap();
        let mounts = ["/opt/cni/bin", "/run/flannel", "/var/lib/cni"]
            .map(|path| (self.node.host(path), path.to_owned()));
        let runtime =
            ["sys_admin", "sys_ptrace", "net_admin", "net_raw", "dac_override"].map(str::to_owned);
        let mut command = self.node.inside("runtime", &runtime, &mounts);
        command.args(["env", "CNI_COMMAND=ADD", "CNI_CONTAINERID=c1", "CNI_IFNAME=eth0"]);
        command.args([
            format!("CNI_PATH=/opt/cni/bin:{plugins}"),
            format!("CNI_NETNS={}", pod.path().display()),
        ]);
        command
            .arg("/opt/cni/bin/flannel")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut plugin = self.node.net.spawn(&mut command).unwrap();
        plugin.stdin.take().unwrap().write_all(conf.to_string().as_bytes()).unwrap();
        let output = plugin.wait_with_output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));

        let result: Value = serde_json::from_str(&text).unwrap();
        let env = self.subnet_env();
        let subnets =
            env.lines().filter_map(|line| line.split_once("_SUBNET=")).map(|(_, subnet)| subnet);
        let subnets: Vec<Subnet> = subnets.map(|subnet| subnet.parse().unwrap()).collect();
        let addresses =
            result["ips"].as_array().unwrap().iter().map(|ip| ip["address"].as_str().unwrap());
        let addresses: Vec<IpAddr> =
            addresses.map(|text| text.split('/').next().unwrap().parse().unwrap()).collect();
        assert_eq!(addresses.len(), subnets.len());
        assert!(
            addresses.iter().all(|address| subnets.iter().any(|subnet| subnet.contains(*address))),
            "{result}"
        );
        let links = pod.output(Command::new("ip").args(["addr", "show", "dev", "eth0"])).unwrap();
        let links = String::from_utf8(links.stdout).unwrap();
        assert!(addresses.iter().all(|address| links.contains(&format!("{address}/"))), "{links}");
    }

    /// Uninstalls as documented.
    fn clean_up(mut self, device: &str) {
        let cleanup = cleanup();
        self.node.take(of_kind(&cleanup, "DaemonSet"));
        let output = self.node.net.output(&mut self.node.container("cleanup")).unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
        assert!(text.contains(&format!("delete link {device}")), "{text}");
        assert!(!self.on_node("ip link").contains("flannel"));
        assert!(!self.on_node("nft list ruleset").to_lowercase().contains("flannel"));
        for path in ["/etc/cni/net.d", "/opt/cni/bin", "/run/flannel", "/var/lib/flannel"] {
            let left: Vec<_> = fs::read_dir(self.node.host(path)).unwrap().collect();
            assert!(left.is_empty(), "{path}: {left:?}");
        }
    }
}

/// Forbids every request that no rule of the role grants.
fn forbid_other_requests(server: &ApiServer, rules: &Value) {
    let has = |rule: &Value, field: &str, text: &str| {
        rule[field].as_array().unwrap().iter().any(|known| known == text)
    };
    for verb in ["get", "list", "watch", "create", "update", "patch", "delete"] {
        for resource in ["nodes", "nodes/status", "pods"] {
            let mut rules = rules.as_array().unwrap().iter();
            if !rules.any(|rule| has(rule, "resources", resource) && has(rule, "verbs", verb)) {
                server.forbid(verb, resource);
            }
        }
    }
}

impl Drop for Daemon<'_> {
    fn drop(&mut self) {
        let others = self.others();
        _ = self.process.kill();
        _ = self.process.wait();
        end(&others);
    }
}

/// Ends processes, as a container runtime ends those that a container leaves.
fn end(pids: &[String]) {
    if !pids.is_empty() {
        // Some may have ended meanwhile, which is an error of `kill`.
        let _ = Command::new("kill").arg("-KILL").args(pids).status().unwrap();
    }
}

impl Daemon<'_> {
    /// The processes that the daemon has started and that still run.
    fn others(&self) -> Vec<String> {
        let pid = self.process.id();
        let pids = Command::new("pgrep").args(["--parent", &pid.to_string()]).output().unwrap();
        String::from_utf8(pids.stdout).unwrap().lines().map(str::to_owned).collect()
    }

    fn wait_until(&mut self, mut holds: impl FnMut() -> bool) {
        while !holds() {
            assert_eq!(self.process.try_wait().unwrap(), None, "{}", self.cluster.log());
            assert!(
                Instant::now() < self.deadline,
                "{:?}\n{}",
                self.cluster.get("/readyz"),
                self.cluster.log()
            );
            std::thread::park_timeout(Duration::from_millis(20));
        }
    }

    /// Checks its capabilities, and that it needed no others.
    fn has_two_capabilities(&self) {
        let status = fs::read_to_string(format!("/proc/{}/status", self.process.id())).unwrap();
        for set in ["CapPrm", "CapEff", "CapBnd"] {
            // CAP_NET_ADMIN is 12, CAP_NET_RAW is 13.
            assert!(status.contains(&format!("{set}:\t0000000000003000\n")), "{status}");
        }
        assert!(status.contains("NoNewPrivs:\t1\n"));
        let log = self.cluster.log();
        assert!(!log.contains("WARN") && !log.contains("ERROR"), "{log}");
    }

    /// Checks this node's annotations and condition in the API server.
    fn has_annotations(&mut self, annotations: &[(&str, &str)]) {
        let server = &self.cluster.server;
        for (name, value) in annotations {
            let found = server.annotation(NODE_NAME, &format!("flannel.alpha.coreos.com/{name}"));
            assert_eq!(found.as_deref(), Some(*value), "{name}");
        }
        let condition = || server.condition(NODE_NAME, "NetworkUnavailable");
        self.wait_until(|| condition().is_some_and(|condition| condition["status"] == "False"));
    }

    fn stop(mut self) {
        let others = self.others();
        let kill = Command::new("kill").arg(self.process.id().to_string()).status().unwrap();
        let process = &mut self.process;
        let cluster = self.cluster;
        let status = eventually(
            PATIENCE,
            || process.try_wait().unwrap(),
            || format!("it still runs:\n{}", cluster.log()),
        );
        assert!(kill.success() && status.success(), "{}", self.cluster.log());
        end(&others);
        let state = fs::read_dir(self.cluster.node.host("/var/lib/flannel")).unwrap();
        assert!(state.count() > 0, "its state is on the host");
    }
}

#[test]
fn the_manifest_makes_a_node_ready_and_cleanup_removes_all() {
    as_root(|| {
        let cluster = Cluster::new(manifest());
        cluster.install();
        let mut daemon = cluster.start();
        assert!(cluster.get("/healthz").unwrap().starts_with("HTTP/1.1 200 "));
        let env = "FLANNEL_NETWORK=10.244.0.0/16\nFLANNEL_SUBNET=10.244.7.1/24\n\
            FLANNEL_MTU=1450\nFLANNEL_IPMASQ=true\n";
        assert_eq!(cluster.subnet_env(), env);
        assert!(cluster.on_node("ip link show flannel.1").contains("mtu 1450"));
        assert!(cluster.on_node("ip route").contains("10.244.8.0/24"), "to the node of Go flannel");
        assert!(
            cluster.on_node("iptables-save -t nat").contains("-A FLANNEL-POSTRTG -s 10.244.0.0/16")
        );
        daemon.has_annotations(&[
            ("public-ip", "192.0.2.1"),
            ("backend-type", "vxlan"),
            ("kube-subnet-manager", "true"),
        ]);
        daemon.has_two_capabilities();
        cluster.check_addresses_of_a_pod();
        daemon.stop();
        cluster.clean_up("flannel.1");
    });
}

/// The daemon cannot change the setting, because /proc/sys is read-only in the container.
#[test]
fn a_tunnel_that_accepts_router_advertisements_is_reported() {
    as_root(|| {
        let cluster = Cluster::new(manifest());
        cluster.node.net.sysctl("net/ipv6/conf/all/forwarding", "0").unwrap();
        let daemon = cluster.start();
        let log = cluster.log();
        let warnings: Vec<&str> = log.lines().filter(|line| line.contains("WARN")).collect();
        let repair = "sysctl -w net/ipv6/conf/flannel.1/accept_ra=0";
        assert!(matches!(&warnings[..], [line] if line.contains(repair)), "{log}");
        daemon.stop();
    });
}

/// The objects of the chart for the backend udp, on nodes whose kernel does not move the packets.
fn udp_process() -> Vec<Value> {
    let mut objects = udp();
    let map = objects.iter_mut().find(|object| object["kind"] == "ConfigMap").unwrap();
    let config = &mut map["data"]["net-conf.json"];
    let kind = r#""Type": "udp""#;
    let text = config.as_str().unwrap().replace(kind, &format!(r#"{kind}, "Path": "process""#));
    assert!(text.contains("process"), "{text}");
    *config = text.into();
    objects
}

/// The process that moves the packets ends with the container. The device and its route stay.
#[test]
fn the_chart_for_udp_has_the_device_and_keeps_it_over_a_restart() {
    as_root(|| {
        let cluster = Cluster::new(udp_process());
        cluster.install();
        let mut daemon = cluster.start();
        let env = cluster.subnet_env();
        assert!(env.contains("FLANNEL_MTU=1472\n"), "{env}");
        daemon.has_annotations(&[("public-ip", "192.0.2.1"), ("backend-type", "")]);
        daemon.has_two_capabilities();
        assert_eq!(daemon.others().len(), 1, "the process that moves the packets");
        cluster.check_addresses_of_a_pod();
        let device = cluster.on_node("ip -o link show flannel0");
        daemon.stop();
        assert!(cluster.on_node("ip route").contains("10.244.0.0/16 dev flannel0"));

        let daemon = cluster.start();
        let index = |line: &str| line.split(':').next().map(str::to_owned);
        assert_eq!(index(&cluster.on_node("ip -o link show flannel0")), index(&device));
        daemon.has_two_capabilities();
        daemon.stop();
        cluster.clean_up("flannel0");
    });
}

/// The config alone was changed to udp, and the container has not got the device.
#[test]
fn udp_without_the_device_is_refused_with_the_cure() {
    as_root(|| {
        let mut objects = udp_process();
        let kind = |object: &Value| object["kind"] == "DaemonSet";
        let set = of_kind(&manifest(), "DaemonSet").clone();
        *objects.iter_mut().find(|object| kind(object)).unwrap() = set;
        let cluster = Cluster::new(objects);
        let mut command = cluster.node.container("kube-flannel");
        let output = cluster.node.net.output(&mut command).unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{text}");
        let end = text.lines().last().unwrap();
        assert!(end.contains("/dev/net/tun: No such file"), "{text}");
        assert!(end.contains("`privileged: true`"), "{text}");
        assert!(!cluster.on_node("ip link").contains("flannel"));
        let lease = cluster.server.annotation(NODE_NAME, "flannel.alpha.coreos.com/public-ip");
        assert_eq!(lease, None, "nothing is published");
    });
}

/// With the values of a cluster of both families and rules in nftables.
#[test]
fn the_chart_makes_a_node_ready_and_cleanup_removes_all() {
    as_root(|| {
        let cluster = Cluster::new(dual_stack());
        cluster.install();
        let mut daemon = cluster.start();
        let env = cluster.subnet_env();
        for line in ["FLANNEL_SUBNET=10.244.7.1/24", "FLANNEL_IPV6_SUBNET=fd00:10:244:7::1/64"] {
            assert!(env.lines().any(|known| known == line), "{line}: {env}");
        }
        // The peer is on the same link.
        assert!(
            cluster.on_node("ip route").contains("10.244.8.0/24 ")
                && cluster.on_node("ip -6 route").contains("fd00:10:244:8::/64 ")
        );
        let tables = cluster.on_node("nft list tables");
        assert!(
            tables.contains("ip flannel-ipv4") && tables.contains("ip6 flannel-ipv6"),
            "{tables}"
        );
        assert!(!cluster.on_node("iptables-save").contains("FLANNEL"));
        daemon.has_annotations(&[("public-ip", "192.0.2.1"), ("public-ipv6", "2001:db8::1")]);
        daemon.has_two_capabilities();
        cluster.check_addresses_of_a_pod();
        daemon.stop();
        cluster.clean_up("flannel.1");
    });
}
