//! A thousand foreign changes a second, of all kinds. Afterwards all objects are restored, foreign
//! objects are untouched, and a peer that arrives meanwhile is installed at once.
//!
//! Real kernel, real backend. iproute2 makes the changes and reads the result.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::net::IpAddr;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime};

use flannel_backend_hostgw::HostGw;
use flannel_backend_vxlan::VxlanBackend;
use flannel_core::address::{Dual, Family};
use flannel_core::backend::ExternalInterface;
use flannel_core::kernel::{
    Changes, Footprint, Invalidation, KernelError, NexthopIds, Outcome, RouteAnswer,
};
use flannel_core::lease::{LeaseAttrs, Offer};
use flannel_core::object::{Change, MacAddr, Neigh, ObjectKind, ObjectSet};
use flannel_core::status::{Damage, Status};
use flannel_core::testing::FakeSubnets;
use flannel_core::{Backend, Kernel, SubnetManager};
use flannel_netlink::NetlinkKernel;
use flannel_netlink::testing::{bridge, in_netns_async, ip};
use flannel_route::{Host, JoinOptions};
use serde_json::Value;
use tokio::sync::watch;
use tokio::time::MissedTickBehavior;

const PEERS: u8 = 200;
const LATE: u8 = 250;
/// The last peer on the link. With [`Setup::direct`] the later ones are behind a router.
const LAST_ON_LINK: u8 = 100;
/// The timeout for a slow machine.
const PATIENCE: Duration = Duration::from_secs(120);
const DEVICES: [&str; 2] = ["flannel.1", "flannel-v6.1"];

/// xorshift. The seed determines the sequence.
struct Random(u64);

impl Random {
    /// The seed of the environment, or of the clock.
    fn new() -> Self {
        let clock =
            SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_nanos() as u64;
        let given =
            std::env::var("FLANNEL_STORM_SEED").ok().map(|seed| seed.parse().expect("a number"));
        let seed = given.unwrap_or(clock).max(1);
        println!("FLANNEL_STORM_SEED={seed}");
        Self(seed)
    }

    fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % end
    }
}

/// A process of iproute2 that reads commands.
struct Tool {
    command: [&'static str; 2],
    child: Child,
    stdin: ChildStdin,
    /// The number of commands that it got.
    lines: usize,
    /// Its predecessors, which may still have commands.
    former: Vec<Child>,
}

impl Tool {
    /// The last one is for groups of nexthop objects, which have no family.
    const ALL: [[&'static str; 2]; 4] =
        [["ip", "-4"], ["ip", "-6"], ["bridge", "-statistics"], ["ip", "-oneline"]];
    /// The number of commands for one process.
    const LINES: usize = 50;
    /// The number of predecessors that may still run.
    const FORMER: usize = 2;

    /// `-force`: deleting a missing object does not end it.
    fn new(command: [&'static str; 2]) -> Self {
        let [program, option] = command;
        let mut process = Command::new(program);
        process.args([option, "-force", "-batch", "-"]);
        process.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        let mut child = process
            .spawn()
            .unwrap_or_else(|error| panic!("`{program}` of iproute2 is needed: {error}"));
        let stdin = child.stdin.take().unwrap();
        Self { command, child, stdin, lines: 0, former: Vec::new() }
    }

    /// Runs commands in a process of their own, so quickly that nothing is repaired meanwhile.
    /// Returns whether all were accepted.
    fn run_alone([program, option]: [&str; 2], text: &str) -> bool {
        let mut process = Command::new(program);
        process
            .args([option, "-batch", "-"])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        let mut child = process.spawn().unwrap();
        child.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
        // A flush fails if the table is filled again as quickly.
        child.wait().unwrap().success() || text.contains(" flush ")
    }

    /// Sends a command. The process is replaced if a missing device ended it, and after some
    /// commands, because it caches the indexes of devices and would never hit a recreated one.
    fn run(&mut self, line: &str) {
        while self.lines == Self::LINES || writeln!(self.stdin, "{line}").is_err() {
            let Self { child, stdin, former, .. } =
                std::mem::replace(self, Self::new(self.command));
            drop(stdin);
            self.former = former;
            self.former.push(child);
            // The storm is as fast as the machine allows.
            if self.former.len() > Self::FORMER {
                end(self.command, self.former.remove(0));
            }
        }
        self.lines += 1;
    }

    /// Waits until all commands ran.
    fn finish(self) {
        let Self { command, child, stdin, mut former, .. } = self;
        drop(stdin);
        former.push(child);
        former.into_iter().for_each(|child| end(command, child));
    }
}

/// Waits until its commands ran.
fn end(command: [&str; 2], mut child: Child) {
    let deadline = Instant::now() + PATIENCE;
    while child.try_wait().unwrap().is_none() {
        if Instant::now() > deadline {
            child.kill().unwrap();
            panic!("{command:?} does not end");
        }
        std::thread::park_timeout(Duration::from_millis(5));
    }
}

fn public(n: u8) -> Dual<IpAddr> {
    [format!("192.0.2.{n}"), format!("2001:db8::{n:x}")]
        .iter()
        .map(|a| a.parse::<IpAddr>().unwrap())
        .collect()
}

/// The public address of a peer. Some are behind a router.
fn peer_public(n: u8) -> Dual<IpAddr> {
    if n <= LAST_ON_LINK {
        return public(n);
    }
    [format!("198.51.100.{n}"), format!("2001:db8:7::{n:x}")]
        .iter()
        .map(|a| a.parse::<IpAddr>().unwrap())
        .collect()
}

fn mac(family: Family, n: u8) -> String {
    format!("0a:00:00:00:0{}:{n:02x}", if family == Family::V4 { 4 } else { 6 })
}

/// A configuration of the host.
#[derive(Clone, Copy)]
struct Setup {
    backend: &'static dyn Backend,
    /// IPv4 routes go by nexthop objects.
    nexthops: bool,
    /// Some peers are behind a router, and the others are reached without a tunnel.
    direct: bool,
}

const VXLAN: Setup = Setup { backend: &VxlanBackend, nexthops: true, direct: false };
const HOST_GW: Setup = Setup { backend: &HostGw, nexthops: true, direct: false };

impl Setup {
    fn put_peer(self, subnets: &FakeSubnets, n: u8) {
        let data = |family| Some(format!(r#"{{"VNI":1,"VtepMAC":"{}"}}"#, mac(family, n)).into());
        let attrs = LeaseAttrs::from(
            Offer::new(if self.direct { peer_public(n) } else { public(n) })
                .with_kind(self.backend.kind())
                .with_data(Dual::from_fn(data)),
        );
        subnets.put_attrs(&format!("10.1.{n}.0-24&fd00:1:0:{n:x}::-64"), attrs);
    }

    /// A host with many peers, and foreign objects.
    async fn start(self) -> (FakeSubnets, watch::Receiver<Arc<Status>>) {
        self.start_on(|kernel| Arc::new(kernel)).await
    }

    /// Starts the host on a kernel that stands for the kernel of Linux.
    async fn start_on(
        self,
        stand_in: impl FnOnce(NetlinkKernel) -> Arc<dyn Kernel>,
    ) -> (FakeSubnets, watch::Receiver<Arc<Status>>) {
        for command in [
            "link add eth0 type veth peer name wire",
            "link set wire up",
            "address add 192.0.2.1/24 dev eth0",
            "address add 2001:db8::1/64 dev eth0 nodad",
            "link set eth0 up",
            "route add default via 192.0.2.254",
            "-6 route add default via 2001:db8::fe",
            // Foreign objects.
            "link add cali1 type veth peer name pod1",
            "link set cali1 up",
            "link add br0 mtu 1500 address 0a:22:22:22:22:22 type bridge",
            "address add 10.9.9.9/32 dev cali1",
            "route add 172.16.1.0/24 via 192.0.2.9 dev eth0",
            "-6 route add fd77::/64 via 2001:db8::9 dev eth0",
            "route add 10.1.240.0/24 via 192.0.2.9 dev eth0 metric 70",
            "route add 10.1.241.0/24 via 192.0.2.9 dev eth0",
            "-6 route add fd00:1:0:f1::/64 via 2001:db8::9 dev eth0",
            "neigh add 192.0.2.253 lladdr 0a:11:11:11:11:11 dev eth0 nud permanent",
            "nexthop add id 77 via 192.0.2.9 dev eth0",
            "route add 172.16.2.0/24 nhid 77",
            "nexthop add id 78 via 192.0.2.9 fdb",
            "nexthop add id 79 group 78 fdb",
            "nexthop add id 80 via 2001:db8::9 fdb",
            "nexthop add id 81 group 80 fdb",
        ] {
            ip(command);
        }
        let kind = self.backend.kind();
        let direct = self.direct;
        let config = format!(
            r#"{{"Network":"10.1.0.0/16","EnableIPv6":true,"IPv6Network":"fd00:1::/48",
                "Backend":{{"Type":"{kind}","DirectRouting":{direct}}}}}"#
        );
        let subnets = FakeSubnets::with_config(&config);
        (2..2 + PEERS).for_each(|n| self.put_peer(&subnets, n));
        let kernel = NetlinkKernel::open().unwrap();
        let host = Host::new(
            ExternalInterface::new("eth0".parse().unwrap(), 1500, public(1))
                .with_reason("it is the only one"),
            stand_in(if self.nexthops { kernel } else { kernel.without_nexthops() }),
            Arc::new(subnets.clone()),
        )
        .with_machine_id("test");
        let network = host
            .join(self.backend, &subnets.network_config().await.unwrap(), JoinOptions::default())
            .await
            .unwrap()
            .network;
        let status = network.handle().status;
        let views = subnets.watch_leases().await.unwrap();
        tokio::spawn(async move {
            let ended = network.run(views).await;
            panic!("the network ended: {ended:?}");
        });
        in_sync(&mut status.clone(), PEERS.into()).await;
        (subnets, status)
    }

    /// The id of a peer's nexthop object is this plus the number of the peer.
    fn first_nexthop(self) -> Option<u64> {
        let routes: Value = serde_json::from_str(&ip("-j route show 10.1.2.0/24")).unwrap();
        let id = routes[0]["nhid"].as_u64();
        assert_eq!(id.is_some(), self.nexthops);
        id.map(|id| id - 2)
    }
}

async fn in_sync(status: &mut watch::Receiver<Arc<Status>>, peers: usize) {
    let settled = async {
        drop(status.wait_for(|status| status.in_sync && status.peers == peers).await.unwrap());
    };
    if tokio::time::timeout(PATIENCE, settled).await.is_err() {
        panic!("never in sync: {:#?}", status.borrow());
    }
}

/// Our objects and foreign ones, as iproute2 shows them, without the kernel's own routes, the
/// bridge (its state depends on its ports), and the indexes of devices.
fn see() -> BTreeSet<String> {
    let texts = [
        ip("-4 route show table main"),
        ip("-6 route show table main"),
        ip("nexthop show"),
        ip("neigh show nud permanent"),
        ip("-o -d link show"),
        ip("-o address show scope global"),
        // It fails if the device is deleted at this moment.
        bridge("fdb show")
            .lines()
            .filter(|line| line.contains(" dev flannel"))
            .collect::<Vec<_>>()
            .join("\n"),
    ];
    let line = |line: &str| {
        let line = line
            .split_once(": ")
            .filter(|(index, _)| index.parse::<u32>().is_ok())
            .map_or(line, |(_, l)| l);
        // The kernel shows this only sometimes, and shows a tunnel as up after a change of its
        // carrier.
        line.replace(" used 0/0/0", "")
            .replace(" state UP ", " state UNKNOWN ")
            .split_whitespace()
            .collect::<Vec<_>>()
            .join(" ")
    };
    let lines =
        texts.iter().flat_map(|text| text.lines()).filter(|line| !line.contains(" proto kernel "));
    lines.map(line).filter(|line| !line.starts_with("br0: ")).collect()
}

/// The number of rare kinds of damage.
const RARE: u64 = 28;
/// The number of frequent kinds of damage.
const OFTEN: u64 = 36;

/// The number of kinds on the uplink.
const ON_LINK: u64 = 21;

/// The storm's knowledge of the host, and its changes.
struct Storm {
    setup: Setup,
    random: Random,
    /// The id of a peer's nexthop object is this plus the number of the peer.
    first: Option<u64>,
    /// The addresses of the devices.
    own: [String; 2],
    tools: [Tool; 4],
    began: Instant,
    done: usize,
}

impl Storm {
    fn new(setup: Setup) -> Self {
        let address = |device| {
            ip(&format!("-br address show dev {device} scope global"))
                .split_whitespace()
                .nth(2)
                .unwrap()
                .to_owned()
        };
        Self {
            setup,
            random: Random::new(),
            first: setup.first_nexthop(),
            own: if setup.backend.kind() == "vxlan" {
                DEVICES.map(address)
            } else {
                Default::default()
            },
            tools: Tool::ALL.map(Tool::new),
            began: Instant::now(),
            done: 0,
        }
    }

    /// Makes ten more changes, also of whole devices if `devices`.
    fn blow(&mut self, devices: bool) {
        let enough = self.done + 10;
        while self.done < enough {
            let on_uplink = match self.setup {
                Setup { direct: true, .. } => self.random.below(4) == 0,
                setup => setup.backend.kind() == "host-gw",
            };
            let (tool, text) = if on_uplink {
                // A flush of all nexthop objects is rare.
                let kind = Some(self.random.below(ON_LINK)).filter(|kind| *kind != 14);
                let rare = if self.random.below(20) == 0 { 14 } else { 0 };
                self.damage_on_uplink(kind.unwrap_or(rare))
            } else {
                let kind =
                    if devices { self.random.below(1_000) } else { 16 + self.random.below(984) };
                self.damage(kind)
            };
            // Without nexthop objects of its own, flannel ignores foreign ones.
            if self.first.is_none()
                && text.split_whitespace().any(|word| ["nexthop", "nhid"].contains(&word))
            {
                continue;
            }
            self.done += text.lines().count();
            self.tools[tool].run(&text);
        }
    }

    fn damage(&mut self, kind: u64) -> (usize, String) {
        damage(kind, &mut self.random, self.first.unwrap_or_default(), &self.own)
    }

    fn damage_on_uplink(&mut self, kind: u64) -> (usize, String) {
        damage_on_uplink(kind, &mut self.random, self.first.unwrap_or_default())
    }

    /// Waits until all commands ran.
    fn end(self) {
        self.tools.into_iter().for_each(Tool::finish);
        println!("{} changes in {:.1} s", self.done, self.began.elapsed().as_secs_f64());
    }
}

/// Damage to a peer's objects, or to a device: the index of the tool in [`Tool::ALL`], and its
/// commands. The id of a peer's nexthop object is `first` plus the number of the peer. Kinds below
/// 16 hit whole devices. Kinds from [`RARE`] on repeat after [`OFTEN`].
fn damage(
    kind: u64,
    random: &mut Random,
    first: u64,
    own_addresses: &[String; 2],
) -> (usize, String) {
    let family = Family::BOTH[random.below(2) as usize];
    let v4 = family == Family::V4;
    let device = DEVICES[usize::from(!v4)];
    let subnet = |n: u64| if v4 { format!("10.1.{n}.0") } else { format!("fd00:1:0:{n:x}::") };
    let n = 2 + random.below(PEERS.into());
    // Another peer, because a correct value does not damage anything.
    let other = 2 + (n - 1 + random.below(u64::from(PEERS) - 1)) % u64::from(PEERS);
    let gateway = subnet(n);
    let other = subnet(other);
    let dst = format!("{gateway}/{}", if v4 { 24 } else { 64 });
    let unwanted = subnet(220 + random.below(10));
    let mac = mac(family, n as u8);
    let alien = format!("0a:99:00:00:00:{:02x}", random.below(256));
    let far = public(100 + ((n + 1 + random.below(99)) % 100) as u8)[family].unwrap();
    let right = public(n as u8)[family].unwrap();
    let own_address = &own_addresses[usize::from(!v4)];
    let by_ip = |text: String| (usize::from(!v4), text);
    let by_bridge = |text: String| (2, text);
    let id = first + n;
    let elsewhere = format!("via {other} dev {device} onlink");
    let [own, wrong] = [1, 99].map(|n| public(n)[family].unwrap());
    let by_nexthop = v4 && random.below(2) == 0;
    let via = if by_nexthop {
        format!("nhid {id}")
    } else {
        format!("via {gateway} dev {device} onlink")
    };
    match kind {
        // A deleted device deletes all objects on it.
        0 => by_ip(format!("link delete {device}")),
        1 => by_ip(format!("link set {device} down")),
        2 => by_ip(format!("link set {device} address {alien}")),
        3 => by_ip(format!("link set {device} mtu 1300")),
        4 => by_ip(format!(
            "link set {device} {}",
            [
                "type vxlan id 1 learning",
                "type vxlan id 1 ttl 1",
                "type vxlan id 1 tos 4 df set",
                "type vxlan id 1 ageing 60",
                "arp off",
                "master br0",
                "protodown on",
            ][random.below(7) as usize]
        )),
        5 => by_ip(format!("address flush dev {device} scope global")),
        // iproute2 cannot do it with nexthop objects.
        6 if first > 0 => (1, format!("route flush dev {}", DEVICES[1])),
        6 => by_ip(format!("route flush dev {device}")),
        7 => by_ip(format!("neigh flush dev {device} nud permanent")),
        // IPv6 has no nexthop objects.
        8 => (0, "nexthop flush proto 241".into()),
        9 => by_ip(format!("link set {device} down\nlink set {device} up")),
        10 => by_ip(format!("link set {device} type vxlan id 1 local {wrong}")),
        11 => by_ip(format!("link set {device} type vxlan id 1 dev cali1")),
        12 => by_ip(format!("link set {device} type vxlan id 1 dev cali1 local {wrong} learning")),
        // A change that needs a new device.
        13..16 => {
            let kind = [
                "id 1 dstport 4789",
                "id 2 dstport 8472",
                "id 1 dstport 8472 gbp",
                "id 1 dstport 8472 proxy",
                "id 1 dstport 8472 noudpcsum",
                "id 1 dstport 8472 udp6zerocsumtx",
                "id 1 dstport 8472 remcsumtx",
            ][random.below(7) as usize];
            by_ip(format!(
                "link delete {device}\n\
                 link add {device} type vxlan {kind} dev eth0 local {own} nolearning"
            ))
        }
        16..19 => by_ip(format!(
            "address add {unwanted}/{} dev {device} nodad",
            if v4 { 32 } else { 128 }
        )),
        19..22 => by_ip(format!(
            "address add {unwanted} peer {gateway}/{} dev {device} nodad",
            if v4 { 32 } else { 128 }
        )),
        22..25 => by_ip(format!(
            "address {} {own_address} dev {device} {}",
            if v4 { "change" } else { "replace" },
            ["valid_lft 3600 preferred_lft 1800", "valid_lft 3600 preferred_lft 0"]
                [random.below(2) as usize]
        )),
        25..28 => by_ip(format!(
            "address del {own_address} dev {device}\n\
             address add {own_address} dev {device} scope link nodad"
        )),
        kind => match kind % OFTEN {
            0 | 1 => by_ip(format!("route del {dst}")),
            2 => by_ip(format!("route replace {dst} via {other} dev {device} onlink")),
            3 => by_ip(format!("route replace {dst} via {gateway} dev {device} onlink mtu 1300")),
            4 => by_ip(format!("route replace {dst} dev eth0")),
            5 => by_ip(format!("route replace blackhole {dst}")),
            6 => by_ip(format!(
                "route add {unwanted}/{} via {gateway} dev {device} onlink",
                if v4 { 24 } else { 64 }
            )),
            7 => by_ip(format!("neigh del {gateway} dev {device}")),
            8 => {
                by_ip(format!("neigh replace {gateway} lladdr {alien} dev {device} nud permanent"))
            }
            9 => by_ip(format!("neigh replace {gateway} lladdr {mac} dev {device} nud stale")),
            10 => {
                by_ip(format!("neigh replace {unwanted} lladdr {alien} dev {device} nud permanent"))
            }
            11 | 12 => by_bridge(format!("fdb del {mac} dev {device}")),
            13 => by_bridge(format!("fdb replace {mac} dev {device} dst {far} self permanent")),
            14 => by_bridge(format!(
                "fdb replace {mac} dev {device} dst {far} port 999 vni 7 self permanent"
            )),
            15 => by_bridge(format!("fdb replace {alien} dev {device} dst {far} self permanent")),
            16 => by_ip(format!("nexthop del id {id}")),
            17 => by_ip(format!("nexthop replace id {id} {elsewhere} protocol 4")),
            18 => by_ip(format!(
                "nexthop replace id {id} blackhole\nroute add {unwanted}/24 nhid {id} proto 241"
            )),
            // Only a deleted nexthop object can become a group.
            19 => (3, format!("nexthop del id {id}\nnexthop replace id {id} group 77")),
            // The route with another attribute.
            20 => by_ip(format!("route replace {dst} {via} proto 241 src {own}")),
            21 => by_ip(format!("route replace {dst} {via} proto 4")),
            22 => by_ip(format!("route replace {dst} {via} proto 241 mtu 1300")),
            // An unwanted route by the same nexthop object may have the attribute too.
            23 => by_ip(format!(
                "route replace {dst} {via} proto 241 {}",
                if v4 { "advmss 1000" } else { "expires 60" }
            )),
            24 => by_ip(format!("route append {dst} via {other} dev {device} onlink")),
            25 => by_ip(format!(
                "neigh replace {gateway} lladdr {mac} dev {device} nud permanent {}",
                ["router", "extern_learn"][random.below(2) as usize]
            )),
            // Only a deleted fdb entry can be replaced by one with nexthop objects.
            26 => by_bridge(format!(
                "fdb del {mac} dev {device}\nfdb add {mac} dev {device} nhid {} self permanent",
                if v4 { 79 } else { 81 }
            )),
            27 => by_bridge(format!(
                "fdb replace {mac} dev {device} dst {right} via cali1 self permanent"
            )),
            // An entry with `extern_learn` does not replace one of another program.
            28 => by_bridge(match random.below(2) {
                0 => format!("fdb replace {mac} dev {device} dst {right} self permanent sticky"),
                _ => format!(
                    "fdb del {mac} dev {device}\n\
                     fdb add {mac} dev {device} dst {right} self permanent extern_learn"
                ),
            }),
            29 => by_bridge(format!("fdb replace {mac} dev {device} dst {right} self static")),
            30 => by_ip(format!("neigh replace {gateway} lladdr {mac} dev {device} nud noarp")),
            31 => by_ip(format!(
                "route replace {} {dst}",
                ["unreachable", "prohibit", "throw"][random.below(3) as usize]
            )),
            32 => by_ip(format!("route replace {dst} dev {device} proto 241")),
            33 => by_ip(format!(
                "route replace {dst} proto 241 nexthop {elsewhere} nexthop via {gateway} \
                 dev {device} onlink"
            )),
            34 => by_ip(format!(
                "route replace {dst} {via} proto 241 {}",
                if v4 {
                    ["initcwnd 20", "scope site"][random.below(2) as usize]
                } else {
                    "pref high"
                }
            )),
            _ => by_ip(format!("nexthop replace id {} {elsewhere} protocol 241", id + 4000)),
        },
    }
}

/// Damage to objects on the uplink, without a device of ours.
fn damage_on_uplink(kind: u64, random: &mut Random, first: u64) -> (usize, String) {
    let family = Family::BOTH[random.below(2) as usize];
    let v4 = family == Family::V4;
    let subnet =
        |n: u64| if v4 { format!("10.1.{n}.0/24") } else { format!("fd00:1:0:{n:x}::/64") };
    let n = 2 + random.below(PEERS.into());
    let other = 2 + (n - 1 + random.below(u64::from(PEERS) - 1)) % u64::from(PEERS);
    let [gateway, other] = [n, other].map(|n| public(n as u8)[family].unwrap());
    let dst = subnet(n);
    let unwanted = subnet(220 + random.below(10));
    let id = first + n;
    let stray = id + 4000;
    let own = public(1)[family].unwrap();
    let by_nexthop = v4 && random.below(2) == 0;
    let via = if by_nexthop { format!("nhid {id}") } else { format!("via {gateway} dev eth0") };
    let text = match kind {
        0 | 1 => format!("route del {dst}"),
        2 => format!("route replace {dst} via {other} dev eth0"),
        3 => format!("route replace {dst} via {gateway} dev eth0 mtu 1300"),
        4 => format!("route replace {dst} dev cali1"),
        5 => format!("route replace blackhole {dst}"),
        6 => format!("route replace {dst} via {gateway} dev eth0 proto 4"),
        7 => format!("route add {unwanted} via {gateway} dev eth0 proto 241"),
        8 => format!("route add {unwanted} dev cali1 proto 241"),
        9 => format!("nexthop del id {id}"),
        10 => format!("nexthop replace id {id} via {other} dev eth0 protocol 241"),
        11 => format!("nexthop replace id {id} via {gateway} dev eth0 protocol 4"),
        12 => {
            format!("nexthop replace id {id} blackhole\nroute add {unwanted} nhid {id} proto 241")
        }
        13 => return (3, format!("nexthop del id {id}\nnexthop replace id {id} group 77")),
        // IPv6 has no nexthop objects.
        14 => return (0, "nexthop flush proto 241".into()),
        15 => format!("route replace {dst} {via} proto 241 src {own}"),
        16 => format!("route replace {dst} {via} proto 4"),
        17 => format!("route replace {dst} {via} proto 241 mtu 1300"),
        18 => format!(
            "route replace {dst} {via} proto 241 {}",
            if v4 {
                ["advmss 1000", "scope site"][random.below(2) as usize]
            } else {
                "advmss 1000"
            }
        ),
        19 => format!("route append {dst} via {other} dev eth0 proto 241"),
        _ => format!("nexthop replace id {stray} via {other} dev eth0 protocol 241"),
    };
    (usize::from(!v4), text)
}

/// The kinds of damage to objects on the uplink.
const ON_UPLINK: [(ObjectKind, Damage); 6] = [
    (ObjectKind::Nexthop, Damage::Deletion),
    (ObjectKind::Nexthop, Damage::Modification),
    (ObjectKind::Nexthop, Damage::Addition),
    (ObjectKind::Route, Damage::Deletion),
    (ObjectKind::Route, Damage::Modification),
    (ObjectKind::Route, Damage::Addition),
];

/// The kinds of damage to routes.
const ROUTES: &[(ObjectKind, Damage)] = ON_UPLINK.split_at(3).1;

/// The kinds of damage to our devices.
const DEVICES_THEMSELVES: [(ObjectKind, Damage); 3] = [
    (ObjectKind::Link, Damage::Deletion),
    (ObjectKind::Link, Damage::Modification),
    (ObjectKind::Addr, Damage::Deletion),
];

/// The kinds of damage to other objects on our devices.
const ON_DEVICES: [(ObjectKind, Damage); 7] = [
    (ObjectKind::Addr, Damage::Addition),
    (ObjectKind::Neigh, Damage::Deletion),
    (ObjectKind::Neigh, Damage::Modification),
    (ObjectKind::Neigh, Damage::Addition),
    (ObjectKind::Fdb, Damage::Deletion),
    (ObjectKind::Fdb, Damage::Modification),
    (ObjectKind::Fdb, Damage::Addition),
];

/// Whether damage of all these kinds was repaired at least so many times. The kernel may refuse the
/// commands of iproute2, and then there was no storm.
fn hit(status: &Status, ways: &[(ObjectKind, Damage)], times: u64) -> bool {
    ways.iter().all(|way| status.repairs.get(way).is_some_and(|repairs| *repairs >= times))
}

async fn restored(healthy: &BTreeSet<String>, what: &str) {
    let restored = async {
        while see() != *healthy {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    if tokio::time::timeout(PATIENCE, restored).await.is_err() {
        let seen = see();
        let missing: Vec<_> = healthy.difference(&seen).collect();
        let added: Vec<_> = seen.difference(healthy).collect();
        panic!("{what}: not restored\nmissing: {missing:#?}\ntoo much: {added:#?}");
    }
}

/// Waits until `ip` shows the route to a peer.
async fn arrival(subnet: &str) {
    let since = Instant::now();
    while ip(&format!("route show {subnet}")).is_empty() {
        assert!(since.elapsed() < PATIENCE, "{subnet} never came");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// A storm until damage of all kinds in `ways` was repaired.
async fn storm_on_devices(setup: Setup, least: usize, ways: &'static [(ObjectKind, Damage)]) {
    let ways = [ways, &ON_DEVICES].concat();
    let (subnets, mut status) = setup.start().await;
    let healthy = see();
    assert!(healthy.len() > least * usize::from(PEERS), "{}", healthy.len());
    let mut storm = Storm::new(setup);
    let mut beat = tokio::time::interval(Duration::from_millis(10));
    beat.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut late: Option<tokio::task::JoinHandle<()>> = None;
    // The late peer has its own timeout.
    let deadline = Instant::now() + 2 * PATIENCE;
    for beats in 0.. {
        // With a device its damaged objects are deleted too. On a slow machine these may be all
        // damaged objects. So whole devices are hit for a while only.
        let devices = beats < 400 || !hit(&status.borrow(), &DEVICES_THEMSELVES, 1);
        // A peer that arrives in the storm does not wait for its end.
        let came = late.as_ref().is_some_and(|late| late.is_finished());
        if !devices && came && hit(&status.borrow(), &ways, 1) {
            break;
        }
        assert!(
            Instant::now() < deadline,
            "peer {came}, not all was hit: {:?}",
            status.borrow().repairs
        );
        beat.tick().await;
        storm.blow(devices);
        if beats == 200 {
            setup.put_peer(&subnets, LATE);
            late = Some(tokio::spawn(arrival("10.1.250.0/24")));
        }
    }
    late.unwrap().await.unwrap();
    storm.end();
    subnets.delete(&format!("10.1.{LATE}.0-24&fd00:1:0:{LATE:x}::-64"));
    all_is_well(&mut status, &healthy).await;
}

async fn storm_on_uplink(setup: Setup, ways: &'static [(ObjectKind, Damage)]) {
    let (_subnets, mut status) = setup.start().await;
    let healthy = see();
    assert!(healthy.len() > 2 * usize::from(PEERS), "{}", healthy.len());
    let mut storm = Storm::new(setup);
    let mut beat = tokio::time::interval(Duration::from_millis(10));
    beat.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let deadline = Instant::now() + PATIENCE;
    for beats in 0.. {
        if beats >= 300 && hit(&status.borrow(), ways, 10) {
            break;
        }
        assert!(Instant::now() < deadline, "not all was hit: {:?}", status.borrow().repairs);
        beat.tick().await;
        storm.blow(false);
    }
    storm.end();
    all_is_well(&mut status, &healthy).await;
}

async fn all_is_well(status: &mut watch::Receiver<Arc<Status>>, healthy: &BTreeSet<String>) {
    restored(healthy, "after the storm").await;
    in_sync(status, PEERS.into()).await;
    let status = status.borrow().clone();
    println!("{} repairs: {:?}", status.repaired, status.repairs);
    assert_eq!(status.repairs.values().sum::<u64>(), status.repaired);
}

/// iproute2 makes each kind of change, and each is repaired. Otherwise a storm would test less.
async fn each_kind(
    setup: Setup,
    kinds: impl Iterator<Item = u64> + Send + 'static,
    damage: fn(&mut Storm, u64) -> (usize, String),
) {
    let (_subnets, mut status) = setup.start().await;
    let healthy = see();
    let mut storm = Storm::new(setup);
    for kind in kinds {
        // Several times, because the family and some values are random. The kernel refuses some
        // commands in one of the families.
        let mut made = 0;
        let mut tried = 0;
        while made < 4 {
            let before = status.borrow().repaired;
            let (tool, text) = damage(&mut storm, kind);
            if Tool::run_alone(Tool::ALL[tool], &text) {
                let repaired = status.wait_for(|status| status.repaired > before);
                let in_time = tokio::time::timeout(PATIENCE, repaired).await;
                assert!(in_time.is_ok(), "{kind}: {text} is no damage");
                made += 1;
            }
            restored(&healthy, &text).await;
            tried += 1;
            assert!(tried < 100, "{kind}, such as {text}, is refused");
        }
    }
    in_sync(&mut status, PEERS.into()).await;
}

#[test]
fn each_kind_of_change_is_made_and_repaired() {
    in_netns_async(|| each_kind(VXLAN, (0..RARE).chain(OFTEN..2 * OFTEN), Storm::damage));
}

#[test]
fn each_kind_of_change_on_the_uplink_is_made_and_repaired() {
    in_netns_async(|| each_kind(HOST_GW, 0..ON_LINK, Storm::damage_on_uplink));
}

#[test]
fn a_storm_of_foreign_changes_is_repaired() {
    in_netns_async(|| storm_on_devices(VXLAN, 6, &ON_UPLINK));
}

#[test]
fn a_storm_of_foreign_changes_is_repaired_with_plain_routes() {
    in_netns_async(|| storm_on_devices(Setup { nexthops: false, ..VXLAN }, 6, ROUTES));
}

#[test]
fn a_storm_of_foreign_changes_is_repaired_with_direct_routing() {
    in_netns_async(|| storm_on_devices(Setup { direct: true, ..VXLAN }, 4, &ON_UPLINK));
}

#[test]
fn a_storm_of_foreign_changes_on_the_uplink_is_repaired() {
    in_netns_async(|| storm_on_uplink(HOST_GW, &ON_UPLINK));
}

#[test]
fn a_storm_of_foreign_changes_on_the_uplink_is_repaired_with_plain_routes() {
    in_netns_async(|| storm_on_uplink(Setup { nexthops: false, ..HOST_GW }, ROUTES));
}

#[test]
fn damage_in_lost_events_is_repaired() {
    in_netns_async(|| flood(VXLAN, 1));
}

#[test]
fn damage_in_lost_events_is_repaired_with_plain_routes() {
    in_netns_async(|| flood(Setup { nexthops: false, ..VXLAN }, 0));
}

/// The number of messages that overflowed sockets in this network namespace.
fn messages_lost() -> u64 {
    let sockets = std::fs::read_to_string("/proc/thread-self/net/netlink").unwrap();
    let drops = sockets.lines().skip(1).map(|line| line.split_whitespace().nth(8).unwrap());
    drops.map(|drops| drops.parse::<u64>().unwrap()).sum()
}

/// A kernel whose events are not read while its pause is held.
#[derive(Debug)]
struct Unread {
    kernel: NetlinkKernel,
    pause: Arc<Mutex<()>>,
}

impl Kernel for Unread {
    fn snapshot(&self, footprint: &Footprint) -> Result<ObjectSet, KernelError> {
        self.kernel.snapshot(footprint)
    }

    fn nexthop_ids(&self, footprint: &Footprint) -> Result<NexthopIds, KernelError> {
        self.kernel.nexthop_ids(footprint)
    }

    fn nexthop_users(&self, there: &ObjectSet) -> Result<BTreeMap<u32, String>, KernelError> {
        self.kernel.nexthop_users(there)
    }

    fn apply(&self, footprint: &Footprint, changes: &[Change]) -> Vec<Outcome> {
        self.kernel.apply(footprint, changes)
    }

    fn lookup(&self, dst: IpAddr) -> Result<RouteAnswer, KernelError> {
        self.kernel.lookup(dst)
    }

    fn changes(&self) -> Result<Box<dyn Changes>, KernelError> {
        let changes = self.kernel.changes()?;
        Ok(Box::new(UnreadChanges { changes, pause: Arc::clone(&self.pause) }))
    }
}

struct UnreadChanges {
    changes: Box<dyn Changes>,
    pause: Arc<Mutex<()>>,
}

#[async_trait::async_trait]
impl Changes for UnreadChanges {
    async fn next(&mut self) -> Result<Invalidation, KernelError> {
        drop(self.pause.lock().unwrap());
        self.changes.next().await
    }
}

/// Overflows the buffer of the network's socket. `nexthops`: the nexthop objects of each peer.
async fn flood(setup: Setup, nexthops: usize) {
    let pause = Arc::new(Mutex::new(()));
    let shared = Arc::clone(&pause);
    let (subnets, mut status) = setup
        .start_on(|kernel| Arc::new(Unread { kernel, pause: shared }) as Arc<dyn Kernel>)
        .await;
    let healthy = see();
    let by_nexthop = healthy.iter().filter(|line| line.contains(" nhid ")).count();
    // One more is foreign.
    assert_eq!(by_nexthop, nexthops * usize::from(PEERS) + 1);
    let other = NetlinkKernel::open().unwrap();
    let neigh = |n: u32| {
        let address = IpAddr::from((0x0a63_0000 + n).to_be_bytes());
        Change::Put(
            Neigh { link: "cali1".parse().unwrap(), address, mac: MacAddr::local([7; 6]) }.into(),
        )
    };
    let lost_before = messages_lost();
    for round in 0..3 {
        // While nobody reads, the buffer overflows.
        let unread = pause.lock().unwrap();
        let flood: Vec<Change> = (0..60_000).map(|n| neigh(n + 60_000 * round)).collect();
        assert!(other.apply(&Footprint::default(), &flood[..20_000]).iter().all(Outcome::is_done));
        // In the middle of the flood, where its event is lost.
        let victim = 7 + round as u8;
        ip(&format!("route del 10.1.{victim}.0/24"));
        ip(&format!("-6 route del fd00:1:0:{victim:x}::/64"));
        ip(&format!("route add 10.1.22{round}.0/24 dev flannel.1 src 192.0.2.1"));
        bridge(&format!("fdb del {} dev flannel.1", mac(Family::V4, victim)));
        assert!(other.apply(&Footprint::default(), &flood[20_000..]).iter().all(Outcome::is_done));
        drop(unread);
        setup.put_peer(&subnets, LATE + round as u8);
        arrival(&format!("10.1.{}.0/24", u32::from(LATE) + round)).await;
    }
    assert!(messages_lost() > lost_before, "there was no flood");
    ip("neigh flush dev cali1 nud permanent");
    (LATE..LATE + 3).for_each(|n| subnets.delete(&format!("10.1.{n}.0-24&fd00:1:0:{n:x}::-64")));
    restored(&healthy, "after the flood").await;
    in_sync(&mut status, PEERS.into()).await;
    assert!(status.borrow().repaired >= 12);
}

/// The kernel does not say who changed a forwarding entry.
#[test]
fn changes_because_of_leases_are_not_counted_as_repairs() {
    in_netns_async(|| async {
        let (subnets, mut status) = VXLAN.start().await;
        let healthy = see();
        let first = 2 + PEERS / 2;
        let beat = || tokio::time::sleep(Duration::from_micros(500));
        let deadline = Instant::now() + Duration::from_secs(5);
        while Instant::now() < deadline {
            for n in first..2 + PEERS {
                subnets.delete(&format!("10.1.{n}.0-24&fd00:1:0:{n:x}::-64"));
            }
            beat().await;
            (first..2 + PEERS).for_each(|n| VXLAN.put_peer(&subnets, n));
            beat().await;
        }
        restored(&healthy, "after leases came and went").await;
        in_sync(&mut status, PEERS.into()).await;
        assert_eq!(status.borrow().repairs, BTreeMap::default());
    });
}
