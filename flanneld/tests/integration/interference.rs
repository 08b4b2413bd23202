//! Foreign changes of the kernel are repaired, without events from peers.
//!
//! Real kernel, real backends. iproute2 makes the changes and reads the result.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use flannel_backend_hostgw::HostGw;
use flannel_backend_vxlan::VxlanBackend;
use flannel_core::address::{Dual, Family};
use flannel_core::backend::ExternalInterface;
use flannel_core::lease::{LeaseAttrs, Offer};
use flannel_core::status::Status;
use flannel_core::testing::FakeSubnets;
use flannel_core::{Backend, SubnetManager};
use flannel_netlink::NetlinkKernel;
use flannel_netlink::testing::{bridge, in_netns_async, ip, run};
use flannel_route::{Host, JoinOptions};
use serde_json::Value;
use tokio::sync::watch;

fn config(backend: &str) -> String {
    format!(
        r#"{{"Network":"10.1.0.0/16","EnableIPv6":true,"IPv6Network":"fd00:1::/48",
            "Backend":{{"Type":"{backend}"}}}}"#
    )
}

/// The id of a foreign nexthop object.
const FOREIGN_NEXTHOP: u32 = 77;

/// A host with an uplink, and one peer on it.
async fn start(backend: &'static dyn Backend) -> Witness {
    ip("link add eth0 type veth peer name wire");
    ip("link set wire up");
    ip("address add 192.0.2.1/24 dev eth0");
    ip("address add 2001:db8::1/64 dev eth0 nodad");
    ip("link set eth0 up");
    let address: Dual<IpAddr> =
        ["192.0.2.1", "2001:db8::1"].iter().map(|a| a.parse::<IpAddr>().unwrap()).collect();
    let subnets = FakeSubnets::with_config(&config(backend.kind()));
    let data = |mac| Some(format!(r#"{{"VNI":1,"VtepMAC":"{mac}"}}"#).into());
    let peer = LeaseAttrs::from(
        Offer::new(
            ["192.0.2.7", "2001:db8::7"].iter().map(|a| a.parse::<IpAddr>().unwrap()).collect(),
        )
        .with_kind(backend.lease_type())
        .with_data(Dual { v4: data("0a:00:00:00:04:07"), v6: data("0a:00:00:00:06:07") }),
    );
    subnets.put_attrs("10.1.7.0-24&fd00:1:0:7::-64", peer);
    let host = Host::new(
        ExternalInterface::new("eth0".parse().unwrap(), 1500, address)
            .with_reason("it is the only one"),
        Arc::new(NetlinkKernel::open().unwrap()),
        Arc::new(subnets.clone()),
    )
    .with_machine_id("test");
    let config = subnets.network_config().await.unwrap();
    let network = host.join(backend, &config, JoinOptions::default()).await.unwrap().network;
    let mut status = network.handle().status;
    let views = subnets.watch_leases().await.unwrap();
    tokio::spawn(async move {
        let ended = network.run(views).await;
        panic!("the network ended: {ended:?}, {subnets:?}");
    });
    let settled = async { drop(status.wait_for(|status| status.in_sync).await.unwrap()) };
    if tokio::time::timeout(Duration::from_secs(60), settled).await.is_err() {
        panic!("never in sync: {:#?}", status.borrow());
    }
    Witness::new(backend.kind() == "vxlan", status)
}

/// The healthy state in iproute2.
struct Witness {
    vxlan: bool,
    status: watch::Receiver<Arc<Status>>,
    healthy: BTreeSet<String>,
}

impl Witness {
    fn new(vxlan: bool, status: watch::Receiver<Arc<Status>>) -> Self {
        let witness = Self { vxlan, status, healthy: BTreeSet::new() };
        let healthy = witness.see();
        assert!(healthy.len() >= if vxlan { 10 } else { 2 }, "{healthy:#?}");
        Self { healthy, ..witness }
    }

    fn see(&self) -> BTreeSet<String> {
        let mut seen = BTreeSet::new();
        let mut rows = |what: &str, text: String, columns: &[&str]| {
            let rows: Vec<Value> =
                if text.trim().is_empty() { vec![] } else { serde_json::from_str(&text).unwrap() };
            for row in rows {
                let values: Vec<String> = columns
                    .iter()
                    .map(|c| row.pointer(c).unwrap_or(&Value::Null).to_string())
                    .collect();
                seen.insert(format!("{what} {}", values.join(" ")));
            }
        };
        for inet in ["-4", "-6"] {
            let routes = ip(&format!("-j {inet} route show"));
            let columns = [
                "/dst",
                "/type",
                "/tos",
                "/gateway",
                "/dev",
                "/protocol",
                "/metric",
                "/flags",
                "/metrics",
                "/nhid",
            ];
            // Without routes of the kernel: our addresses are in the table `local`.
            let made_by_us = |row: &Value| row["protocol"] != "kernel" && row["dst"].is_string();
            let mut routes: Vec<Value> = serde_json::from_str(&routes).unwrap();
            routes.retain(made_by_us);
            // Some versions of iproute2 also show the gateway of a nexthop object. Only its id is
            // compared.
            for route in &mut routes {
                if route["nhid"].is_number() {
                    let by = ["gateway", "dev", "flags"];
                    by.iter()
                        .for_each(|column| drop(route.as_object_mut().unwrap().remove(*column)));
                }
            }
            rows("route", Value::from(routes).to_string(), &columns);
        }
        let nexthops = ["/id", "/gateway", "/dev", "/protocol", "/flags"];
        let shown = ip("-j nexthop show");
        let mut shown: Vec<Value> =
            if shown.trim().is_empty() { vec![] } else { serde_json::from_str(&shown).unwrap() };
        shown.retain(|nexthop| nexthop["id"] != FOREIGN_NEXTHOP);
        rows("nexthop", Value::from(shown).to_string(), &nexthops);
        if !self.vxlan {
            return seen;
        }
        for dev in ["flannel.1", "flannel-v6.1"] {
            let shown =
                std::process::Command::new("ip").args(["link", "show", dev]).output().unwrap();
            if !shown.status.success() {
                rows("link", format!(r#"["{dev} is not there"]"#), &[""]);
                continue;
            }
            let link = ["/ifname", "/mtu", "/address", "/master", "/flags", "/linkinfo/info_data"];
            rows("link", ip(&format!("-d -j link show {dev}")), &link);
            let addresses: Vec<Value> =
                serde_json::from_str(&ip(&format!("-j address show {dev}"))).unwrap();
            for address in addresses[0]["addr_info"].as_array().unwrap() {
                if address["scope"] == "global" {
                    rows("address", format!("[{address}]"), &["/local", "/prefixlen"]);
                }
            }
            // As text, because the values of flags are null in JSON.
            let neighbours = ip(&format!("neigh show dev {dev} nud permanent"));
            let entries = bridge(&format!("fdb show dev {dev}"));
            let proxies = ip(&format!("neigh show proxy dev {dev}"));
            for (kind, text) in [("neigh", neighbours), ("fdb", entries), ("proxy", proxies)] {
                let lines: Vec<&str> = text.lines().map(str::trim_end).collect();
                rows(&format!("{kind} {dev}"), Value::from(lines).to_string(), &[""]);
            }
        }
        seen
    }

    /// Does damage and waits until it is repaired, and until the status counts a repair. Otherwise
    /// there was no damage.
    async fn survives(&self, damage: &str, commands: &[String]) {
        // The earlier damage is counted already.
        let in_sync = async {
            while !self.status.borrow().in_sync {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(20), in_sync)
            .await
            .expect("the network is in sync");
        let before = self.status.borrow().repaired;
        for command in commands {
            let (program, args) = command.split_once(' ').unwrap();
            run(program, args);
        }
        // The repair may be faster than reading the damage, so only its end is checked.
        let repaired = async {
            while self.see() != self.healthy {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        };
        if tokio::time::timeout(Duration::from_secs(20), repaired).await.is_err() {
            let seen = self.see();
            let missing: Vec<_> = self.healthy.difference(&seen).collect();
            let added: Vec<_> = seen.difference(&self.healthy).collect();
            panic!("{damage}: not repaired\nmissing: {missing:#?}\ntoo much: {added:#?}");
        }
        // Whether damage to the uplink reaches our objects depends on the backend, and on when the
        // kernel notices the lost carrier.
        if damage.contains("uplink") {
            return;
        }
        let mut status = self.status.clone();
        let counted =
            async { drop(status.wait_for(|status| status.repaired > before).await.unwrap()) };
        let in_time = tokio::time::timeout(Duration::from_secs(20), counted).await;
        assert!(in_time.is_ok(), "{damage}: no repair was counted");
    }
}

/// The kinds of damage to one family of vxlan: a name and the commands.
fn damages(family: Family) -> Vec<(&'static str, Vec<String>)> {
    let v4 = family == Family::V4;
    let (dev, inet) = if v4 { ("flannel.1", "-4") } else { ("flannel-v6.1", "-6") };
    let (dst, gateway, other) = if v4 {
        ("10.1.7.0/24", "10.1.7.0", "10.1.8.0")
    } else {
        ("fd00:1:0:7::/64", "fd00:1:0:7::", "fd00:1:0:8::")
    };
    let (unwanted, base) =
        if v4 { ("10.1.9.0/24", "10.1.1.0/32") } else { ("fd00:1:0:9::/64", "fd00:1:0:1::/128") };
    let (mac, public) =
        if v4 { ("0a:00:00:00:04:07", "192.0.2.8") } else { ("0a:00:00:00:06:07", "2001:db8::8") };
    let far = if v4 { "192.0.2.7" } else { "2001:db8::7" };
    let ends = if v4 { "local 192.0.2.1 dev eth0" } else { "local 2001:db8::1 dev eth0" };
    let (bridge, outside) = if v4 { ("br4", "10.9.0.0/24") } else { ("br6", "fd09::/64") };
    let one = |text: String| vec![text];
    let neighbour = |mark: &str| {
        format!("ip neigh replace {gateway} lladdr {mac} dev {dev} nud permanent {mark}")
    };
    let mut damages = vec![
        ("device deleted", one(format!("ip link del {dev}"))),
        ("device down", one(format!("ip link set {dev} down"))),
        (
            "device down and up",
            vec![format!("ip link set {dev} down"), format!("ip link set {dev} up")],
        ),
        ("MTU changed", one(format!("ip link set {dev} mtu 1300"))),
        ("MAC changed", one(format!("ip link set {dev} address 0a:99:99:99:99:99"))),
        ("learning switched on", one(format!("ip link set {dev} type vxlan id 1 learning"))),
        ("TTL set", one(format!("ip link set {dev} type vxlan id 1 ttl 3"))),
        ("TOS set", one(format!("ip link set {dev} type vxlan id 1 tos 4"))),
        ("DF set", one(format!("ip link set {dev} type vxlan id 1 df set"))),
        ("ageing changed", one(format!("ip link set {dev} type vxlan id 1 ageing 60"))),
        (
            // The kernel changes these attributes of a new device only.
            "device replaced by one that answers, reports misses and computes checksums",
            vec![
                format!("ip link del {dev}"),
                format!(
                    "ip link add {dev} type vxlan id 1 {ends} dstport 8472 nolearning proxy \
                     l2miss l3miss udpcsum udp6zerocsumtx udp6zerocsumrx"
                ),
            ],
        ),
        ("ARP switched off", one(format!("ip link set {dev} arp off"))),
        ("transmit queue lengthened", one(format!("ip link set {dev} txqueuelen 1000"))),
        ("carrier switched off", one(format!("ip link set {dev} protodown on"))),
        (
            "device in a bridge",
            vec![
                format!("ip link add name {bridge} type bridge"),
                format!("ip link set {dev} master {bridge}"),
            ],
        ),
        ("neighbours flushed", one(format!("ip {inet} neigh flush dev {dev} nud permanent"))),
        ("neighbour deleted", one(format!("ip neigh del {gateway} dev {dev}"))),
        (
            "neighbour changed",
            one(format!(
                "ip neigh replace {gateway} lladdr 0a:88:88:88:88:88 dev {dev} nud permanent"
            )),
        ),
        ("neighbour of a router", one(neighbour("router"))),
        ("neighbour learned", one(neighbour("extern_learn"))),
        (
            "neighbour added",
            one(format!("ip neigh add {other} lladdr 0a:88:88:88:88:88 dev {dev} nud permanent")),
        ),
        ("FDB entry deleted", one(format!("bridge fdb del {mac} dev {dev}"))),
        (
            "FDB entry changed",
            one(format!("bridge fdb replace {mac} dev {dev} dst {public} self permanent")),
        ),
        (
            // The kernel sends no message about them.
            "proxy entries added",
            vec![
                format!("ip neigh add proxy {gateway} dev {dev}"),
                format!("ip neigh add proxy {other} dev {dev}"),
            ],
        ),
        (
            "the same proxy entries added again at once",
            vec![
                format!("ip neigh add proxy {gateway} dev {dev}"),
                format!("ip neigh add proxy {other} dev {dev}"),
            ],
        ),
        (
            "FDB entry of a router",
            one(format!("bridge fdb replace {mac} dev {dev} dst {far} self permanent router")),
        ),
        (
            "learned FDB entry added",
            one(format!(
                "bridge fdb add 0a:77:77:77:77:78 dev {dev} dst {public} self permanent \
                 extern_learn"
            )),
        ),
        (
            "FDB entry added",
            one(format!("bridge fdb add 0a:77:77:77:77:77 dev {dev} dst {public} self permanent")),
        ),
        ("route deleted", one(format!("ip {inet} route del {dst}"))),
        (
            "route to another gateway",
            one(format!("ip {inet} route replace {dst} via {other} dev {dev} onlink")),
        ),
        (
            "route with an MTU",
            one(format!("ip {inet} route replace {dst} via {gateway} dev {dev} onlink mtu 1300")),
        ),
        ("route by another device", one(format!("ip {inet} route replace {dst} dev eth0"))),
        ("route to nowhere", one(format!("ip {inet} route replace blackhole {dst}"))),
        (
            "route added",
            one(format!("ip {inet} route add {unwanted} via {gateway} dev {dev} onlink")),
        ),
        ("route outside added", one(format!("ip {inet} route add {outside} dev {dev}"))),
        ("routes flushed", one(flush(inet, dev))),
        ("address flushed", one(format!("ip {inet} address flush dev {dev} scope global"))),
        ("address deleted", one(format!("ip address del {base} dev {dev}"))),
        ("address added", one(format!("ip address add {unwanted} dev {dev}"))),
        ("uplink down and up", vec!["ip link set eth0 down".into(), "ip link set eth0 up".into()]),
        (
            "uplink without carrier",
            vec!["ip link set wire down".into(), "ip link set wire up".into()],
        ),
    ];
    // IPv6 routes have no TOS, and merge a second gateway into a multipath route.
    if v4 {
        let second = format!("via {other} dev {dev} onlink");
        damages.extend([
            ("second route appended", one(format!("ip route append {dst} {second}"))),
            ("second route prepended", one(format!("ip route prepend {dst} {second}"))),
            ("route with a TOS", one(format!("ip route add {dst} tos 4 {second}"))),
            ("added route with a TOS", one(format!("ip route add {unwanted} tos 4 dev {dev}"))),
        ]);
    } else {
        let label = format!("ip link set {dev} type vxlan id 1 flowlabel 7");
        damages.push(("flow label set", one(label)));
        let off = format!("sysctl -w net/ipv6/conf/{dev}/disable_ipv6=1");
        damages.push(("IPv6 switched off", one(off)));
    }
    if let Some(id) = nexthop_of(dst) {
        damages.extend(nexthop_damages(id, &format!("via {other} dev {dev} onlink"), unwanted));
    }
    damages
}

/// The command that deletes all our routes on a device. iproute2 6.1 cannot flush routes by nexthop
/// object: it also sends the gateway, which the kernel refuses. So the IPv4 command flushes the
/// nexthop objects, and the kernel deletes their routes.
fn flush(inet: &str, dev: &str) -> String {
    match inet {
        "-4" => format!("ip nexthop flush dev {dev}"),
        _ => format!("ip {inet} route flush root fd00:1::/48 dev {dev}"),
    }
}

/// The id of the nexthop object that the route to `dst` goes by; IPv6 routes have none.
fn nexthop_of(dst: &str) -> Option<u64> {
    let family = if dst.contains(':') { "-6" } else { "-4" };
    let routes: Value =
        serde_json::from_str(&ip(&format!("-j {family} route show {dst}"))).unwrap();
    routes[0]["nhid"].as_u64()
}

/// The kinds of damage to a nexthop object.
fn nexthop_damages(id: u64, elsewhere: &str, unwanted: &str) -> Vec<(&'static str, Vec<String>)> {
    let stray = id + 4000;
    vec![
        ("nexthop deleted", vec![format!("ip nexthop del id {id}")]),
        (
            "nexthop to another gateway",
            vec![format!("ip nexthop replace id {id} {elsewhere} protocol 241")],
        ),
        ("nexthop to nowhere", vec![format!("ip nexthop replace id {id} blackhole")]),
        (
            "nexthop made a group",
            vec![
                format!("ip nexthop del id {id}"),
                format!("ip nexthop replace id {FOREIGN_NEXTHOP} {elsewhere}"),
                // The kernel deletes a group with its last nexthop, so that nexthop stays.
                format!("ip nexthop replace id {id} group {FOREIGN_NEXTHOP}"),
            ],
        ),
        ("nexthop added", vec![format!("ip nexthop add id {stray} {elsewhere} protocol 241")]),
        (
            "route added by a nexthop",
            vec![format!("ip route add {unwanted} nhid {id} protocol 241")],
        ),
        ("nexthops flushed", vec!["ip nexthop flush protocol 241".into()]),
    ]
}

#[test]
fn foreign_changes_of_vxlan_objects_are_repaired() {
    in_netns_async(|| async {
        let witness = start(&VxlanBackend).await;
        for family in Family::BOTH {
            for (damage, commands) in damages(family) {
                // IPv6 addresses are removed with the link. The uplink's owner restores them.
                let commands = keep_uplink_addresses(commands);
                witness.survives(&format!("{family}: {damage}"), &commands).await;
            }
        }
    });
}

#[test]
fn foreign_changes_of_host_gw_objects_are_repaired() {
    in_netns_async(|| async {
        let witness = start(&HostGw).await;
        for (damage, commands) in nexthop_damages(
            nexthop_of("10.1.7.0/24").unwrap(),
            "via 192.0.2.9 dev eth0",
            "10.1.9.0/24",
        ) {
            witness.survives(damage, &commands).await;
        }
        for (inet, dst, gateway, other) in [
            ("-4", "10.1.7.0/24", "192.0.2.7", "192.0.2.8"),
            ("-6", "fd00:1:0:7::/64", "2001:db8::7", "2001:db8::8"),
        ] {
            for (damage, commands) in [
                ("route deleted", vec![format!("ip {inet} route del {dst}")]),
                (
                    "route to another gateway",
                    vec![format!("ip {inet} route replace {dst} via {other} dev eth0")],
                ),
                (
                    "route with an MTU",
                    vec![format!("ip {inet} route replace {dst} via {gateway} dev eth0 mtu 1300")],
                ),
                ("route to nowhere", vec![format!("ip {inet} route replace blackhole {dst}")]),
                ("routes flushed", vec![flush(inet, "eth0")]),
                (
                    "uplink down and up",
                    vec!["ip link set eth0 down".into(), "ip link set eth0 up".into()],
                ),
                (
                    "uplink without carrier",
                    vec!["ip link set wire down".into(), "ip link set wire up".into()],
                ),
            ] {
                let commands = keep_uplink_addresses(commands);
                witness.survives(&format!("{inet}: {damage}"), &commands).await;
            }
        }
    });
}

/// The kernel removes an uplink's IPv6 addresses when it goes down. Its owner restores them.
fn keep_uplink_addresses(mut commands: Vec<String>) -> Vec<String> {
    if commands.last().is_some_and(|command| command == "ip link set eth0 up") {
        commands.push("ip address replace 2001:db8::1/64 dev eth0 nodad".into());
    }
    commands
}
