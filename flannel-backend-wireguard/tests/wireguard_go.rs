//! The objects of the backend in two wireguard-go, another implementation of WireGuard, on any
//! kernel with tun devices. They are set through its socket (UAPI).

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

use std::fmt::Write as _;
use std::io::{Read, Write};
use std::net::IpAddr;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use flannel_backend_wireguard::WireguardBackend;
use flannel_core::address::Dual;
use flannel_core::backend::ExternalInterface;
use flannel_core::lease::LeaseAttrs;
use flannel_core::object::{Link, LinkKind, Object, ObjectSet, PeerAttributes};
use flannel_core::testing::{FakeKernel, FakeSubnets};
use flannel_core::{SubnetManager, Subnets};
use flannel_netlink::testing::{Netns, ip, run};
use flannel_route::{Host, JoinOptions};
use test_support::eventually;

/// A config whose first subnet belongs to the node with the number `n`.
fn config(n: u8) -> String {
    let psk = "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=";
    let backend =
        format!(r#"{{"Type":"wireguard","PSK":"{psk}","PersistentKeepaliveInterval":25}}"#);
    format!(r#"{{"Network":"10.1.0.0/16","SubnetMin":"10.1.{n}.0","Backend":{backend}}}"#)
}

const PATIENCE: Duration = Duration::from_secs(20);

/// A host with a key of its own. Its kernel is fake, and only holds the objects.
struct Node {
    n: u8,
    host: Host,
    kernel: FakeKernel,
    subnets: FakeSubnets,
}

impl Node {
    fn new(n: u8) -> Self {
        let kernel = FakeKernel::with_uplink("eth0");
        let subnets = FakeSubnets::with_config(&config(n));
        let address: Dual<IpAddr> = [IpAddr::from([192, 0, 2, n])].into_iter().collect();
        let uplink = ExternalInterface::new("eth0".parse().unwrap(), 1500, address)
            .with_reason("it is the only one");
        let host = Host::new(uplink, Arc::new(kernel.clone()), Arc::new(subnets.clone()));
        Self { n, host, kernel, subnets }
    }

    /// Its lease.
    async fn lease(&self) -> (Subnets, LeaseAttrs) {
        let config = self.subnets.network_config().await.unwrap();
        let join = self.host.join(&WireguardBackend, &config, JoinOptions::default());
        let lease = join.await.unwrap().network.handle().lease;
        (lease.subnets, lease.attrs)
    }

    /// Its objects with this peer.
    async fn objects(&self, subnets: Subnets, attrs: LeaseAttrs) -> ObjectSet {
        self.subnets.put_attrs(&subnets.to_string(), attrs);
        let config = self.subnets.network_config().await.unwrap();
        let join = self.host.join(&WireguardBackend, &config, JoinOptions::default());
        let network = join.await.unwrap().network;
        let mut status = network.handle().status;
        let views = self.subnets.watch_leases().await.unwrap();
        tokio::select! {
            ended = network.run(views) => panic!("{ended:?}"),
            settled = status.wait_for(|it| it.in_sync && it.peers == 1) => drop(settled.unwrap()),
            () = tokio::time::sleep(PATIENCE) => panic!("the peer is not in place"),
        }
        self.kernel.state()
    }
}

/// A running wireguard-go, in a network namespace and with a directory `/run` of its own.
struct Tunnel(Child);

impl Tunnel {
    fn start(netns: &Netns) -> Self {
        let dir = std::env::var_os("FLANNEL_QEMU").map(|dir| PathBuf::from(dir).join("usr/bin"));
        let program = dir.map_or_else(|| "wireguard-go".into(), |dir| dir.join("wireguard-go"));
        let start = "mount -t tmpfs tmpfs /run && exec \"$0\" -f flannel-wg";
        let mut command = Command::new("unshare");
        command.args(["--mount", "sh", "-c", start]).arg(program).stdin(Stdio::null());
        command.env("LOG_LEVEL", "error");
        let tunnel = Self(netns.run(|| command.spawn().unwrap()));
        eventually(PATIENCE, || tunnel.socket().exists(), || "wireguard-go makes no socket");
        tunnel
    }

    fn socket(&self) -> PathBuf {
        format!("/proc/{}/root/run/wireguard/flannel-wg.sock", self.0.id()).into()
    }

    fn ask(&self, text: &str) -> String {
        let mut stream = UnixStream::connect(self.socket()).unwrap();
        stream.write_all(format!("{text}\n").as_bytes()).unwrap();
        let mut answer = String::new();
        let mut part = [0; 4096];
        while !answer.ends_with("\n\n") {
            let len = stream.read(&mut part).unwrap();
            assert!(len > 0, "{answer}");
            answer.push_str(std::str::from_utf8(&part[..len]).unwrap());
        }
        answer
    }

    /// Sets the device and its peers as the objects say.
    fn set(&self, objects: &ObjectSet) {
        let mut text = String::from("set=1\n");
        let mut line = |name: &str, value: String| writeln!(text, "{name}={value}").unwrap();
        for object in objects.iter() {
            match object {
                Object::Link(Link { kind: LinkKind::Wireguard(device), .. }) => {
                    line("private_key", hex(device.key.expose()));
                    line("listen_port", device.port.to_string());
                }
                Object::Peer(peer) => {
                    let PeerAttributes { endpoint, allowed, psk, keepalive } = &*peer.attributes;
                    line("public_key", hex(&peer.key.0));
                    psk.iter().for_each(|psk| line("preshared_key", hex(psk.expose())));
                    line("endpoint", endpoint.to_string());
                    line("persistent_keepalive_interval", keepalive.to_string());
                    allowed.values().for_each(|subnet| line("allowed_ip", subnet.to_string()));
                }
                _ => {}
            }
        }
        assert_eq!(self.ask(&text), "errno=0\n\n");
    }
}

impl Drop for Tunnel {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Makes the device, its address and its routes ready.
fn set_up(objects: &ObjectSet) {
    for object in objects.iter() {
        match object {
            Object::Link(link) => ip(&format!("link set {} mtu {} up", link.name, link.mtu)),
            Object::Addr(addr) => {
                ip(&format!("addr add {}/{} dev {}", addr.address, addr.len, addr.link))
            }
            Object::Route(route) => ip(&object
                .to_string()
                .replace(&format!("route {}", route.dst), &format!("route add {}", route.dst))),
            _ => String::new(),
        };
    }
}

#[tokio::test]
async fn another_implementation_takes_the_keys_and_passes_packets() {
    let nodes = [Node::new(1), Node::new(2)];
    let leases = [nodes[0].lease().await, nodes[1].lease().await];
    let [first, second] = leases;
    let objects =
        [nodes[0].objects(second.0, second.1).await, nodes[1].objects(first.0, first.1).await];
    let netns = [Netns::new().unwrap(), Netns::new().unwrap()];
    let tunnels = [Tunnel::start(&netns[0]), Tunnel::start(&netns[1])];
    let far = tunnels[1].0.id();
    netns[0].run(|| ip(&format!("link add up0 type veth peer name up0 netns {far}")));
    for ((node, netns), objects) in nodes.iter().zip(&netns).zip(&objects) {
        netns.run(|| {
            ip("link set lo up");
            ip(&format!("addr add 192.0.2.{}/24 dev up0", node.n));
            ip("link set up0 up");
            set_up(objects);
        });
    }
    tunnels.iter().zip(&objects).for_each(|(tunnel, objects)| tunnel.set(objects));
    // Until three packets are answered: a handshake that is lost is repeated after five seconds.
    netns[0].run(|| run("ping", "-c 3 -i 0.2 -w 60 -q 10.1.2.0"));
    netns[1].run(|| run("ping", "-c 3 -i 0.2 -w 60 -q 10.1.1.0"));
    let shown = tunnels[0].ask("get=1\n");
    let handshake = shown.lines().find_map(|line| line.strip_prefix("last_handshake_time_sec="));
    assert!(handshake.is_some_and(|time| time != "0"), "{shown}");
}
