//! Tunnels with UDP headers, on a kernel that has them.

use std::fs::File;
use std::net::{Ipv4Addr, UdpSocket};
use std::os::fd::AsFd;
use std::time::Duration;

use flannel_core::kernel::{Footprint, Invalidation, Outcome};
use flannel_core::object::{
    Addr, Change, Fou, Link, LinkKind, LinkName, Object, ObjectSet, Route, Tun, Via,
};
use flannel_core::{Kernel, Subnet};
use flannel_netlink::NetlinkKernel;
use flannel_netlink::testing::{in_netns, ip, run};
use nix::kmod::{DeleteModuleFlags, delete_module};
use nix::sched::{CloneFlags, setns};
use test_support::guest::in_qemu;

const PATIENCE: Duration = Duration::from_secs(60);

fn name() -> LinkName {
    "flannel0".parse().unwrap()
}

fn footprint() -> Footprint {
    let networks = vec!["10.1.0.0/16".parse().unwrap()];
    Footprint { links: [name()].into(), networks, ..Footprint::default() }
}

/// The address of a node on the uplink.
fn uplink_address(node: u8) -> Ipv4Addr {
    [192, 0, 2, node].into()
}

/// The first address of the subnet of a node.
fn tunnel_address(node: u8) -> Ipv4Addr {
    [10, 1, node, 0].into()
}

/// The objects of a node whose only peer is the other node.
fn objects(node: u8, port: u16, one_port: bool) -> Vec<Object> {
    let peer = 3 - node;
    let local = uplink_address(node);
    let kind = Fou { local, lower: "up0".parse().ok(), port, one_port }.into();
    let dst = Subnet::new(tunnel_address(peer).into(), 24).unwrap();
    let gateway = uplink_address(peer).into();
    let via = Via::Gateway { gateway, link: name(), onlink: true };
    vec![
        Link { name: name(), mtu: 1400, up: true, kind }.into(),
        Addr { link: name(), address: tunnel_address(node).into(), len: 32 }.into(),
        Route { dst, via, mtu: None }.into(),
    ]
}

/// Runs `work` on a thread in the network namespace `far`.
fn in_far<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    let far = File::open("/run/netns/far").unwrap();
    std::thread::scope(|scope| {
        let inside = || {
            setns(far.as_fd(), CloneFlags::CLONE_NEWNET).unwrap();
            work()
        };
        scope.spawn(inside).join().unwrap()
    })
}

fn apply(kernel: &NetlinkKernel, change: Change) -> Outcome {
    kernel.apply(&footprint(), &[change]).remove(0)
}

fn delete(kernel: &NetlinkKernel, object: &Object) {
    assert_eq!(apply(kernel, Change::Delete(object.clone())), Outcome::Done);
}

/// Puts an object, which must fail. Returns the text of the error.
fn refusal(kernel: &NetlinkKernel, object: &Object) -> String {
    apply(kernel, Change::Put(object.clone())).into_result().unwrap_err().to_string()
}

fn put(kernel: &NetlinkKernel, objects: &[Object]) {
    let changes: Vec<Change> = objects.iter().cloned().map(Change::Put).collect();
    for (change, outcome) in changes.iter().zip(kernel.apply(&footprint(), &changes)) {
        assert_eq!(outcome, Outcome::Done, "{change}");
    }
}

fn assert_state(kernel: &NetlinkKernel, objects: &[Object]) {
    let want: ObjectSet = objects.iter().cloned().collect();
    let text = |state: &ObjectSet| state.iter().map(ToString::to_string).collect::<Vec<_>>();
    assert_eq!(text(&kernel.snapshot(&footprint()).unwrap()), text(&want));
}

/// Two nodes in a namespace each reach each other with one IP packet in each datagram, and damage
/// to a device or its port is repaired.
#[test]
fn datagrams_carry_packets_alone() {
    in_qemu(&["fou", "ipip", "tun", "veth"], || {
        in_netns(|| {
            ip("link set lo up");
            run("mkdir", "-p /run/netns");
            ip("netns add far");
            ip("link add up0 type veth peer name up0 netns far");
            let here = uplink_address(1);
            let there = uplink_address(2);
            let from = tunnel_address(1);
            let to = tunnel_address(2);
            ip(&format!("addr add {here}/24 dev up0"));
            ip(&format!("-n far addr add {there}/24 dev up0"));
            ip("link set up0 up");
            ip("-n far link set up0 up");

            let near = NetlinkKernel::open().unwrap();
            let far = in_far(|| NetlinkKernel::open().unwrap());
            let ours = objects(1, 8285, false);
            let theirs = objects(2, 8285, true);
            let Object::Link(device) = &ours[0] else { unreachable!() };
            near.may_change(std::slice::from_ref(device)).unwrap();
            assert!(!ip("link show").contains("flannel"), "the check makes no device");
            put(&near, &ours);
            put(&far, &theirs);
            assert_state(&near, &ours);
            assert_state(&far, &theirs);
            let ping = format!("-c 3 -i 0.2 -W 5 -I {from} {to}");
            run("ping", &ping);

            // A socket instead of the far device sees the packet, and nothing before it.
            delete(&far, &theirs[0]);
            assert_state(&far, &[]);
            let inbox = in_far(|| UdpSocket::bind((there, 8285)).expect("the port was closed"));
            let asks = UdpSocket::bind((from, 7000)).unwrap();
            asks.send_to(b"packet", (to, 9)).unwrap();
            let mut datagram = [0; 100];
            let (len, sender) = inbox.recv_from(&mut datagram).unwrap();
            assert_eq!(sender.ip(), here);
            assert_eq!(len, 20 + 8 + 6);
            assert_eq!(datagram[0], 0x45);
            assert_eq!(&datagram[len - 6..len], b"packet");
            let error = refusal(&far, &theirs[0]);
            assert!(error.contains("UDP port 8285 is in use"), "{error}");
            drop(inbox);
            put(&far, &theirs);
            run("ping", &ping);

            // Another port needs no new device.
            let index = || ip("-o link show flannel0").split(':').next().unwrap().to_owned();
            let first = index();
            for port in [9000, 8285] {
                let moved = objects(1, port, port == 9000);
                put(&near, &moved);
                assert_state(&near, &moved);
                let ports = ip("fou show");
                assert_eq!(ports.matches("port").count(), 1, "{ports}");
            }
            assert_eq!(index(), first);
            // The old port is closed also if a program has the new one.
            let taken = UdpSocket::bind((here, 9000)).unwrap();
            let moved = objects(1, 9000, false);
            refusal(&near, &moved[0]);
            assert_eq!(ip("fou show"), "");
            drop(taken);
            put(&near, &ours);
            assert_state(&near, &ours);
            let damage = [
                format!("fou del port 8285 local {here}"),
                "link set flannel0 mtu 1300".to_owned(),
                "link set flannel0 down".to_owned(),
                "link del flannel0".to_owned(),
            ];
            for damage in damage {
                ip(&damage);
                let state = near.snapshot(&footprint()).unwrap();
                let want: ObjectSet = ours.iter().cloned().collect();
                let is_seen = state != want || state.is_inexact(&ours[0].key());
                assert!(is_seen, "{damage}");
                put(&near, &ours);
                assert_state(&near, &ours);
                run("ping", &ping);
            }

            // Linux sends no message about a port.
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime.unwrap().block_on(async {
                let mut changes = near.changes().unwrap();
                ip(&format!("fou del port 8285 local {here}"));
                loop {
                    let next = tokio::time::timeout(PATIENCE, changes.next()).await;
                    if next.expect("it is not seen").unwrap() == Invalidation::Link(name()) {
                        break;
                    }
                }
            });
            // A port that receives from one host is another port.
            ip(&format!("fou add port 8285 ipproto 4 local {here} peer {there} peer_port 8285"));
            let error = refusal(&near, &ours[0]);
            assert!(error.contains("ip fou show"), "{error}");
            ip(&format!("fou del port 8285 local {here} peer {there} peer_port 8285"));
            put(&near, &ours);
            assert_state(&near, &ours);

            // Another tunnel for the same packets is named.
            delete(&near, &ours[0]);
            assert_eq!(ip("fou show"), "");
            ip(&format!("link add foreign0 type ipip local {here} dev up0"));
            let error = refusal(&near, &ours[0]);
            assert!(error.contains("foreign0"), "{error}");
            ip("link del foreign0");

            // The check makes no device either if the kernel makes none by itself.
            run("nsenter", "-t 1 --net sysctl -qw net.core.fb_tunnels_only_for_init_net=1");
            let device = device.clone();
            in_netns(move || {
                let kernel = NetlinkKernel::open().unwrap();
                kernel.may_change(&[device]).unwrap();
                assert!(!ip("link show").contains("flannel"), "the check leaves a device");
            });

            // The device that another program serves has the same name.
            let tun = Link { name: name(), mtu: 1400, up: true, kind: LinkKind::Tun(Tun) };
            assert_eq!(apply(&near, Change::Put(tun.into())), Outcome::Started);
            assert_state(&near, &[]);
            ip("tuntap add flannel0 mode tun multi_queue vnet_hdr");
            put(&near, &ours);
            assert_state(&near, &ours);
            run("ping", &ping);
            ip("netns del far");

            // Somebody removes the module. All other state is still read, and the device can be
            // deleted.
            for port in ip("fou show").lines() {
                let words: Vec<&str> = port.split_whitespace().collect();
                ip(&format!("fou del {} {} local {here}", words[0], words[1]));
            }
            delete_module(c"fou", DeleteModuleFlags::O_NONBLOCK).unwrap();
            let there = near.snapshot(&footprint()).unwrap();
            assert!(there.is_inexact(&ours[0].key()));
            delete(&near, &ours[0]);
            assert_state(&near, &[]);
        });
    });
}

/// The root of a user namespace cannot open ports of the kernel. The process moves the packets
/// then.
#[test]
fn a_user_namespace_has_no_ports() {
    const INSIDE: &str = "FLANNEL_TEST_INSIDE";
    if std::env::var_os(INSIDE).is_some() {
        let Object::Link(device) = objects(1, 8285, false).remove(0) else { unreachable!() };
        let kernel = NetlinkKernel::open().unwrap();
        let error = kernel.may_change(std::slice::from_ref(&device)).unwrap_err().to_string();
        assert!(error.contains("CAP_NET_ADMIN of the host"), "{error}");
        return;
    }
    in_qemu(&["fou", "ipip"], || {
        let mut command = std::process::Command::new("unshare");
        command.args(["--user", "--map-root-user", "--net"]).arg(std::env::current_exe().unwrap());
        command.args(["--exact", "fou::a_user_namespace_has_no_ports"]).env(INSIDE, "1");
        let output = command.output().unwrap();
        assert!(output.status.success(), "{output:?}");
        assert!(String::from_utf8_lossy(&output.stdout).contains("1 passed"), "{output:?}");
    });
}
