use std::collections::BTreeSet;

use flannel_core::backend::Transport;
use flannel_firewall::{Effect, Flow, Stop, StoppingRule};
use flannel_netlink::Taken;
use flannel_netlink::foreign::{RuleAction, Share};
use flannel_netlink::nftables::program::Translation;

use super::*;

fn healthy() -> HostFacts {
    let link = |name: &str| name.parse::<LinkName>().unwrap();
    HostFacts {
        pod_networks: ["10.1.0.0/16", "fd00:1::/48"]
            .map(|n| n.parse::<Subnet>().unwrap())
            .into_iter()
            .collect(),
        own: ["10.1.5.0/24", "fd00:1:0:5::/64"]
            .map(|n| n.parse::<Subnet>().unwrap())
            .into_iter()
            .collect(),
        tunnels: vec![link("flannel.1"), link("flannel-v6.1")],
        uplink: Some(link("eth0")),
        kubernetes: true,
        forwarding: Dual { v4: Some(true), v6: Some(true) },
        device_forwarding: [(link("flannel.1"), true), (link("eth0"), true)].into(),
        rp_filter: [(link("flannel.1"), 0), (link("flannel-v6.1"), 2)].into(),
        arp_ignore: Some(1),
        arp_filter: Some(false),
        elsewhere: None,
        rules: Family::BOTH.into_iter().flat_map(usual_rules).collect(),
        tables: BTreeMap::new(),
        attached: [(link("flannel.1"), queue("noqueue")), (link("flannel-v6.1"), queue("fq"))]
            .into(),
        bridge_calls: Dual { v4: Some(true), v6: Some(true) },
        has_entry_per_peer: false,
        max_neighbours: Dual { v4: Some(1024), v6: Some(1024) },
        tracked: Some(Tracked { now: 9_499, most: 10_000 }),
        stops: Vec::new(),
        addresses: [("eth0", "192.0.2.1"), ("flannel.1", "10.1.5.0"), ("cni0", "10.1.5.1")]
            .map(|(device, address)| (link(device), address.parse().unwrap()))
            .into(),
        public: Dual { v4: Some("192.0.2.1".parse().unwrap()), v6: None },
        on_link: vec!["192.0.2.0/24".parse().unwrap()],
        shadows: Vec::new(),
        peers: vec![peer("10.1.7.0-24", "192.0.2.7")],
        mtu: Some(1430),
        pods: vec![1430, 1400],
        shared: Vec::new(),
        superseded: None,
        expiring: None,
        ipv6_off: None,
        unread: Vec::new(),
    }
}

/// A subnet with two bridges, which have these numbers of ports.
fn shared(ports: usize, name: &str, others: usize, other: &str) -> SharedSubnet {
    let device = |ports, name: &str| bridges::PodDevice { ports, name: name.parse().unwrap() };
    let devices = [device(ports, name), device(others, other)].into();
    SharedSubnet { subnet: "10.1.5.0/24".parse().unwrap(), devices }
}

fn shadow(route: &str, protocol: u8, takes: Taken) -> Shadow {
    let dst = route.split(' ').next().unwrap().parse().unwrap();
    Shadow { dst, route: route.to_owned(), protocol, takes }
}

fn rule(family: Family, priority: u32, action: RuleAction) -> Rule {
    Rule {
        family,
        priority,
        inverted: false,
        src: None,
        dst: None,
        iif: None,
        rest: Share::All,
        suppressed: None,
        action,
    }
}

fn usual_rules(family: Family) -> [Rule; 3] {
    [(0, 255), (32766, 254), (32767, 253)]
        .map(|(priority, table)| rule(family, priority, RuleAction::Table(table)))
}

/// A rule that rejects forwarded packets. The table and the chains that packets enter before it are
/// the last arguments.
fn stop(flows: &[Flow], table: &str, entered: &[&str]) -> Stop {
    let mut stop = Stop::new(Effect::Reject, Family::V4, table, entered[entered.len() - 1]);
    stop.hook = "forward".to_owned();
    stop.flows = flows.iter().copied().collect();
    stop.entered = entered.iter().map(|chain| (*chain).to_owned()).collect();
    stop.rule = Some(StoppingRule::new("reject", 3, Some(17)));
    stop
}

/// The finding about a rule, after a change of it.
fn only_stop(mut stop: Stop, change: impl FnOnce(&mut Stop)) -> String {
    change(&mut stop);
    only(|facts| facts.stops.push(stop))
}

#[test]
fn a_rule_that_stops_packets_is_named_with_the_command_of_its_program() {
    const FORWARDED: [Flow; 3] = [Flow::FromPod, Flow::ToPod, Flow::Outside];
    const PODS: [Flow; 1] = [Flow::ToPod];
    let tunnel =
        |transport, table: &str, entered: &[&str]| stop(&[Flow::Tunnel(transport)], table, entered);
    let udp = Transport::Udp(8472);
    let of = |table: &str, entered: &[&str]| stop(&FORWARDED, table, entered);
    let pod = || -> BTreeSet<IpAddr> { ["10.1.5.9".parse().unwrap()].into() };
    for (finding, parts) in [
        (
            only_stop(of("inet firewalld", &["filter_FORWARD"]), |_| {}),
            [
                "forward-drop warning | rule `reject` of chain filter_FORWARD of table inet \
                 firewalld (hook forward) rejects IPv4 packets from pods of this node to pods of \
                 other nodes, and from pods of other nodes to pods of this node, and from pods",
                "| firewall-cmd --permanent --zone=trusted --add-source=10.1.0.0/16 && \
                 firewall-cmd --reload",
            ],
        ),
        (
            only_stop(tunnel(udp, "inet firewalld", &["filter_INPUT"]), |_| {}),
            [
                "rejects IPv4 packets of the tunnel (UDP port 8472) from other nodes to this node",
                "| firewall-cmd --permanent --zone=$(firewall-cmd --get-zone-of-interface=eth0) \
                 --add-port=8472/udp && firewall-cmd --reload",
            ],
        ),
        (
            only_stop(tunnel(udp, "inet firewalld", &["filter_INPUT", "filter_IN_dmz"]), |_| {}),
            ["filter_IN_dmz", "| firewall-cmd --permanent --zone=dmz --add-port=8472/udp &&"],
        ),
        (
            only_stop(tunnel(udp, "inet firewalld", &["filter_IN_a_b_deny"]), |_| {}),
            ["filter_IN_a_b_deny", "--zone=a_b --add-port"],
        ),
        (
            only_stop(stop(&[Flow::TunnelOut(udp)], "ip filter", &["OUTPUT"]), |_| {}),
            [
                "packets of the tunnel (UDP port 8472) from this node to other nodes",
                "| iptables -I OUTPUT 3 -p udp --dport 8472 -j ACCEPT # also put it",
            ],
        ),
        (
            only_stop(stop(&[Flow::ToPod, Flow::Tunnel(udp)], "inet guard", &["gate"]), |_| {}),
            [
                "nft insert rule inet guard gate handle 17 udp dport 8472 accept",
                "nft insert rule inet guard gate handle 17 ip saddr 10.1.0.0/16 ip daddr \
                 10.1.0.0/16 accept",
            ],
        ),
        (
            only_stop(
                tunnel(Transport::Protocol(4), "ip6 filter", &["ufw6-input", "ufw-x"]),
                |stop| {
                    stop.family = Family::V6;
                    stop.legacy = true;
                },
            ),
            ["ufw-x", "| ip6tables-legacy -I INPUT -p 4 -j ACCEPT # also put it"],
        ),
        (
            only_stop(tunnel(udp, "ip filter", &["INPUT", "ufw-reject-input"]), |_| {}),
            ["ufw-reject-input", "| ufw allow 8472/udp"],
        ),
        (
            only_stop(tunnel(Transport::Protocol(4), "ip filter", &["INPUT"]), |_| {}),
            ["IP protocol 4", "| iptables -I INPUT 3 -p 4 -j ACCEPT # also put it"],
        ),
        (
            only_stop(of("ip filter", &["FORWARD", "ufw-reject-forward"]), |_| {}),
            ["ufw-reject-forward", "| ufw route allow from 10.1.0.0/16 && ufw route allow to 10."],
        ),
        (
            only_stop(of("ip filter", &["FORWARD"]), |_| {}),
            [
                "chain FORWARD of table ip filter",
                "| iptables -I FORWARD 3 -s 10.1.0.0/16 -j ACCEPT; iptables -I FORWARD 3 -d \
                 10.1.0.0/16 -j ACCEPT # also put it",
            ],
        ),
        (
            only_stop(of("ip filter", &["FORWARD"]), |stop| stop.legacy = true),
            [
                "iptables-legacy) rejects",
                "| iptables-legacy -I FORWARD 3 -s 10.1.0.0/16 -j ACCEPT;",
            ],
        ),
        (
            only_stop(of("ip filter", &["FORWARD"]), |stop| stop.rule = None),
            ["the policy of chain FORWARD", "| iptables -A FORWARD -s 10.1.0.0/16 -j ACCEPT; ipt"],
        ),
        (
            only_stop(of("inet guard", &["gate"]), |stop| stop.rule = None),
            [": no rule before accepts", "| nft add rule inet guard gate ip saddr 10.1.0.0/16 acc"],
        ),
        (
            only_stop(of("inet guard", &["gate", "sub"]), |_| {}),
            [
                "chain sub of table inet guard",
                "| nft insert rule inet guard sub handle 17 ip saddr 10.1.0.0/16 accept; nft \
                 insert rule inet guard sub handle 17 ip daddr 10.1.0.0/16 accept",
            ],
        ),
        (
            only_stop(stop(&PODS, "ip raw", &["PREROUTING"]), |stop| stop.pods = pod()),
            [
                "to pods of this node: those of 10.1.5.9 |",
                "| iptables -t raw -I PREROUTING 3 -s 10.1.0.0/16 -d 10.1.0.0/16 -j ACCEPT # that \
                 lasts until Docker starts again: start dockerd with --allow-direct-routing \
                 (Docker 28.2 and later), or make its network with -o \
                 com.docker.network.bridge.trusted_host_interfaces=flannel.1",
            ],
        ),
        (
            only_stop(stop(&[Flow::FromPod], "ip nat", &["POSTROUTING"]), |stop| {
                stop.effect = Effect::Translate(Translation::Masquerade);
                let text = "oifname != \"docker0\" ip saddr 10.1.5.0/24 -j MASQUERADE";
                stop.rule = Some(StoppingRule::new(text, 1, Some(4)));
            }),
            [
                "gives other addresses to IPv4 packets from pods of this node to pods of other",
                "| iptables -t nat -I POSTROUTING 1 -s 10.1.0.0/16 -d 10.1.0.0/16 -j ACCEPT # \
                 that lasts until Docker starts again: start dockerd with --ip-masq=false",
            ],
        ),
        (
            only_stop(stop(&PODS, "ip6 mangle", &["FORWARD"]), |stop| stop.family = Family::V6),
            ["rejects IPv6", "| ip6tables -t mangle -I FORWARD 3 -s fd00:1::/48 -d fd00:1::/48 -j"],
        ),
    ] {
        for part in parts {
            assert!(finding.contains(part), "{part}\nis not in\n{finding}");
        }
    }
    let mut facts = healthy();
    facts.stops = vec![stop(&PODS, "ip raw", &["PREROUTING"])];
    facts.stops[0].pods = pod();
    for (address, is_stopped) in
        [("10.1.5.9", true), ("10.1.5.8", false), ("10.1.7.9", false), ("fd00:1:0:5::9", false)]
    {
        let found = stops::on_the_way(&facts, address.parse().unwrap());
        assert_eq!(found.is_some(), is_stopped, "{address}: {found:?}");
    }
    facts.stops = vec![of("ip filter", &["FORWARD"])];
    for address in ["10.1.5.9", "10.1.7.9"] {
        assert!(stops::on_the_way(&facts, address.parse().unwrap()).is_some(), "{address}");
    }
    let mut facts = healthy();
    facts.stops = (0..9).map(|n| of("ip filter", &[&format!("C{n}")])).collect();
    let found = check(&facts);
    assert!(found.len() == 5 && found[4].text.ends_with("4 more rules stop packets of pods too"));
}

/// Without --ip-masq, the plugin makes a chain for each pod.
#[test]
fn the_masquerading_of_the_bridge_plugin_is_one_finding() {
    let mut facts = healthy();
    for n in 1..=9 {
        let mut chain = stop(&[Flow::FromPod], "ip nat", &["POSTROUTING", &format!("CNI-{n}")]);
        chain.effect = Effect::Translate(Translation::Masquerade);
        chain.pods = [format!("10.1.5.{n}").parse().unwrap()].into();
        facts.stops.push(chain);
    }
    let found = check(&facts);
    let [finding] = &found[..] else { panic!("{found:?}") };
    assert!(finding.text.contains("the CNI plugin bridge gives the address of this node"));
    assert!(finding.text.ends_with(": those of 10.1.5.1, 10.1.5.2, 10.1.5.3 and 6 more"));
    let remedy = format!("{:?}", finding.remedy);
    assert!(remedy.contains("--ip-masq") && remedy.contains("ipMasq"), "{remedy}");
    // Others change packets, and do not stop them.
    facts.stops.iter_mut().for_each(|stop| stop.chain = "OTHER".to_owned());
    let found = check(&facts);
    assert!(found[4].text.ends_with("4 more rules stop or change packets of pods too"));
}

fn queue(kind: &str) -> Attached {
    Attached { queue: Some(kind.into()), ..Attached::default() }
}

fn peer(key: &str, public: &str) -> (Subnets, Dual<IpAddr>) {
    (key.parse().unwrap(), [public.parse::<IpAddr>().unwrap()].into_iter().collect())
}

/// The only finding after a change, as `check severity | text | repair`.
fn only(change: impl FnOnce(&mut HostFacts)) -> String {
    let mut facts = healthy();
    change(&mut facts);
    match check(&facts).as_slice() {
        [found] => {
            let check = &found.check;
            assert!(CHECKS.contains(check) || *check == Check::DuplicateAddress, "{check}");
            format!(
                "{} {} | {} | {}",
                found.check,
                found.severity,
                found.text,
                found.repair().as_deref().unwrap_or("nothing")
            )
        }
        found => panic!("{found:#?}"),
    }
}

#[test]
fn a_healthy_host_and_an_unreadable_one_have_no_findings() {
    assert_eq!(check(&healthy()), []);
    assert_eq!(
        check(&HostFacts { pod_networks: healthy().pod_networks, ..HostFacts::default() }),
        []
    );
    // The lease may be this node's own.
    let peers = vec![peer("10.1.5.0-24", "192.0.2.1")];
    let facts = HostFacts { own: Dual::default(), public: Dual::default(), peers, ..healthy() };
    assert_eq!(check(&facts), []);
}

#[test]
fn each_fault_is_one_finding_with_its_repair() {
    let device = |name: &str| name.parse::<LinkName>().unwrap();
    for (found, parts) in [
        (
            only(|f| f.forwarding.v4 = Some(false)),
            ["forwarding error", "forwards no IPv4 packets", "sysctl -w net.ipv4.ip_forward=1"],
        ),
        (
            only(|f| f.forwarding.v6 = Some(false)),
            ["forwarding error", "no IPv6 packets", "sysctl -w net.ipv6.conf.all.forwarding=1"],
        ),
        (
            only(|f| _ = f.device_forwarding.insert(device("flannel.1"), false)),
            [
                "forwarding error",
                "arrive on flannel.1",
                "sysctl -w net.ipv4.conf.flannel/1.forwarding=1",
            ],
        ),
        (
            only(|f| _ = f.device_forwarding.insert(device("eth0"), false)),
            ["forwarding warning", "arrive on eth0", "sysctl -w net.ipv4.conf.eth0.forwarding=1"],
        ),
        (
            only(|f| _ = f.rp_filter.insert(device("flannel.1"), 1)),
            [
                "rp-filter warning",
                "rp_filter of flannel.1 is strict",
                "sysctl -w net.ipv4.conf.flannel/1.rp_filter=2",
            ],
        ),
        (
            only(|f| _ = f.device_forwarding.insert(device("cni0"), false)),
            ["forwarding error", "arrive on cni0", "sysctl -w net.ipv4.conf.cni0.forwarding=1"],
        ),
        (
            only(|f| {
                f.rp_filter.insert(device("eth0"), 1);
                f.elsewhere = Some(("192.0.2.7".parse().unwrap(), device("eth1")));
            }),
            [
                "rp-filter warning",
                "as those to 192.0.2.7 do through eth1",
                "sysctl -w net.ipv4.conf.eth0.rp_filter=2",
            ],
        ),
        (
            only(|f| f.arp_ignore = Some(8)),
            [
                "arp error",
                "arp_ignore of eth0 is 8",
                "sysctl -w net.ipv4.conf.all.arp_ignore=0 net.ipv4.conf.eth0.arp_ignore=0",
            ],
        ),
        (
            only(|f| f.addresses[0].0 = device("eth1")),
            ["arp error", "for 192.0.2.1, which another device has", "eth0.arp_ignore=0"],
        ),
        (
            only(|f| {
                f.arp_filter = Some(true);
                f.elsewhere = Some(("192.0.2.7".parse().unwrap(), device("eth1")));
            }),
            ["arp error", "of 192.0.2.7, because packets to it leave through", "arp_filter=0"],
        ),
        (
            only(|f| f.expiring = Some(Expiring::DefaultRoute)),
            [
                "sysctl warning | net.ipv6.conf.eth0.accept_ra is 1",
                "the IPv6 default route of eth0 expires",
                "sysctl -w net.ipv6.conf.eth0.accept_ra=2",
            ],
        ),
        (
            only(|f| f.expiring = Some(Expiring::Address("2001:db8::5".parse().unwrap()))),
            [
                "sysctl warning",
                "the address 2001:db8::5 of eth0 expires",
                "sysctl -w net.ipv6.conf.eth0.accept_ra=2",
            ],
        ),
        (
            only(|f| f.ipv6_off = Some(Off::Bridge(device("cni0")))),
            [
                "sysctl error | net.ipv6.conf.cni0.disable_ipv6 is 1",
                "the bridge of pods: new pods get no network",
                "sysctl -w net.ipv6.conf.cni0.disable_ipv6=0",
            ],
        ),
        (
            only(|f| f.ipv6_off = Some(Off::NewDevices)),
            [
                "sysctl error",
                "IPv6 is off on new devices",
                "sysctl -w net.ipv6.conf.default.disable_ipv6=0",
            ],
        ),
        (
            only(|f| f.rules.insert(0, rule(Family::V6, 9, RuleAction::Discard("prohibit")))),
            [
                "ip-rule error",
                "by the rule of priority 9, packets to fd00:1:0:5::/64 are discarded (prohibit)",
                "| ip -6 rule del pref 9 prohibit",
            ],
        ),
        (
            only(|f| f.rules.retain(|rule| *rule != usual_rules(Family::V4)[1])),
            ["ip-rule error", "no rule leads", "| ip rule add pref 32766 lookup main"],
        ),
        (
            only(|f| f.attached.get_mut(&device("flannel.1")).unwrap().xdp = vec![7]),
            ["xdp warning", "(id 7) on flannel.1", "ip link set dev flannel.1 xdp off"],
        ),
        (
            only(|f| {
                let filters = ["bpf", "u32"].map(str::to_owned).into();
                f.attached.get_mut(&device("flannel.1")).unwrap().filters = filters;
            }),
            [
                "tc-filter warning",
                "(bpf, u32) on flannel.1",
                "tc filter delete dev flannel.1 ingress; tc filter delete dev flannel.1 egress",
            ],
        ),
        (
            only(|f| _ = f.attached.insert(device("flannel.1"), queue("tbf"))),
            [
                "qdisc warning",
                "flannel.1 wait in a queue (tbf)",
                "tc qdisc delete dev flannel.1 root",
            ],
        ),
        (
            only(|f| f.addresses.push((device("cni0"), "10.1.3.1".parse().unwrap()))),
            ["clash error", "not in this node's subnet 10.1.5.0/24", "ip link delete cni0"],
        ),
        (
            only(|f| f.addresses.push((device("eth1"), "10.1.3.1".parse().unwrap()))),
            [
                "clash warning",
                "10.1.0.0/16 contains 10.1.3.1, an address of eth1",
                "flannelctl config set FILE # with",
            ],
        ),
        (
            only(|f| f.shared.push(shared(0, "docker0", 2, "cni0"))),
            [
                "clash error | docker0 and cni0 have addresses of this node's subnet 10.1.5.0/24",
                "ip link delete docker0",
                "and give dockerd another --bip",
            ],
        ),
        (
            only(|f| f.shared.push(shared(3, "docker0", 0, "cni0"))),
            ["clash error | cni0 and docker0", "| ip link delete cni0", "no pod is on it"],
        ),
        (
            only(|f| f.shared.push(shared(3, "docker0", 2, "cni0"))),
            ["clash error", "| ip link delete cni0", "after its 2 pods were moved"],
        ),
        (
            only(|f| {
                let used = "/etc/cni/net.d/05-cilium.conflist".into();
                let flannel = "/etc/cni/net.d/10-flannel.conflist".into();
                f.superseded = Some(Superseded { used, flannel });
            }),
            [
                "cni warning | /etc/cni/net.d/05-cilium.conflist comes before",
                "new pods get no network of flannel",
                "mv /etc/cni/net.d/05-cilium.conflist /etc/cni/net.d/05-cilium.conflist.unused",
            ],
        ),
        (
            only(|f| f.pods.extend([1450, 1450, 1440])),
            [
                "pod-mtu warning",
                "3 pods have an MTU of up to 1450, and the network carries 1430 bytes",
                "a new pod has the right MTU",
            ],
        ),
        (
            only(|f| f.peers.push(peer("10.1.8.0-24", "10.1.200.1"))),
            [
                "clash error",
                "the public address of 10.1.8.0-24: tunnel",
                "flannelctl config set FILE # with",
            ],
        ),
        (
            only(|f| f.peers.extend((1..=9).map(|n| peer("10.1.8.0-24", &format!("10.1.9.{n}"))))),
            [
                "clash error",
                "contains 10.1.9.1, the public address of 10.1.8.0-24, and those of 8 more leases",
                "flannelctl config set FILE # with",
            ],
        ),
        (
            only(|f| f.peers.push(peer("10.1.8.0-24", "192.0.2.1"))),
            [
                "duplicate-address error",
                "this node's public address 192.0.2.1",
                "flannelctl lease release --force '10.1.8.0-24' # if",
            ],
        ),
        (
            only(|f| {
                f.addresses.push((device("eth1"), "198.51.100.8".parse().unwrap()));
                f.peers.push(peer("10.1.8.0-24", "198.51.100.8"));
            }),
            [
                "clash error",
                "10.1.8.0-24 is the lease of another node with the public address 198.51.100.8, \
                 which eth1 of this host has: packets to that node come back",
                "flannelctl lease release --force '10.1.8.0-24' # if",
            ],
        ),
        (
            only(|f| f.max_neighbours.v4 = Some(1)),
            [
                "neighbours warning",
                "1 peers are on this host's own link",
                "sysctl -w net.ipv4.neigh.default.gc_thresh3=4",
            ],
        ),
        (
            only(|f| f.tracked = Some(Tracked { now: 10_000, most: 10_000 })),
            [
                "conntrack error | 10000 connections are tracked",
                "nf_conntrack_max is 10000: the kernel drops packets of new ones",
                "sysctl -w net.netfilter.nf_conntrack_max=32768",
            ],
        ),
        (
            only(|f| f.tracked = Some(Tracked { now: 9_500, most: 10_000 })),
            ["conntrack warning", "will soon drop", "nf_conntrack_max=32768"],
        ),
        (
            only(|f| {
                let route = "fd00:1:0:7::/64 via 2001:db8::9 dev eth0 proto 12 metric 32";
                f.shadows.push(shadow(route, 12, Taken::All));
            }),
            [
                "route error | bird has the route fd00:1:0:7::/64 via 2001:db8::9 dev eth0",
                "packets to fd00:1:0:7::/64 take it",
                "ip -6 route del fd00:1:0:7::/64 via 2001:db8::9 dev eth0 proto 12 metric 32",
            ],
        ),
        (
            only(|f| {
                let route = "10.1.7.0/24 tos 0x04 via 192.0.2.9 dev eth0 proto 4";
                f.shadows.push(shadow(route, 4, Taken::WithTos(4)));
            }),
            [
                "route warning | the administrator (static) has the route 10.1.7.0/24 tos 0x04",
                "packets to 10.1.7.0/24 with TOS 4 take it",
                "ip route del 10.1.7.0/24 tos 0x04 via 192.0.2.9 dev eth0 proto 4",
            ],
        ),
        (
            only(|f| {
                let route = "10.1.7.0/24 via 192.0.2.9 dev eth0 proto 99";
                f.shadows.push(shadow(route, 99, Taken::None));
            }),
            [
                "route warning | a program with the route protocol 99 has the route",
                "behind flannel's: packets to 10.1.7.0/24 take it while flannel's is absent",
                "ip route del 10.1.7.0/24 via 192.0.2.9 dev eth0 proto 99",
            ],
        ),
        (
            only(|f| f.bridge_calls.v6 = Some(false)),
            [
                "bridge-netfilter warning",
                "bridge-nf-call-ip6tables is not 1",
                "modprobe br_netfilter; sysctl",
            ],
        ),
    ] {
        assert!(parts.iter().all(|part| found.contains(part)), "{found}\n{parts:?}");
    }
}

#[test]
fn irrelevant_settings_cause_no_finding() {
    let device = |name: &str| name.parse::<LinkName>().unwrap();
    let mut facts = healthy();
    facts.kubernetes = false;
    facts.bridge_calls = Dual { v4: Some(false), v6: Some(false) };
    facts.own = Dual::default();
    facts.addresses.push((device("eth1"), "10.1.3.1".parse().unwrap()));
    facts.pod_networks.v6 = None;
    facts.forwarding.v6 = Some(false);
    facts.expiring = Some(Expiring::DefaultRoute);
    facts.ipv6_off = Some(Off::NewDevices);
    assert_eq!(check(&facts), []);
    facts.attached.insert(device("flannel.1"), queue("noop"));
    facts.mtu = None;
    facts.tracked = Some(Tracked { now: 9_500, most: 0 });
    facts.pods.push(9000);
    facts.rules.push(rule(Family::V6, 9, RuleAction::Discard("prohibit")));
    facts.pod_networks.v4 = None;
    facts.arp_ignore = Some(8);
    facts.rules.push(rule(Family::V4, 9, RuleAction::Discard("prohibit")));
    facts.rp_filter.insert(device("flannel.1"), 1);
    facts.forwarding.v4 = Some(false);
    assert_eq!(check(&facts), []);
}

/// A rule is a finding if a packet to a pod would take its route, and not flannel's.
#[test]
fn rules_are_findings_if_their_routes_win() {
    let subnet = |text: &str| Some(text.parse::<Subnet>().unwrap());
    let device = |name: &str| Some(name.parse::<LinkName>().unwrap());
    let lookup = |table| rule(Family::V4, 100, RuleAction::Table(table));
    let route = |dst, link| TableRoute { dst, link, gateway: None, throw: false };
    let default = route(Subnet::everything(Family::V4), device("eth1"));
    let from_pods = Rule { src: subnet("10.1.0.0/16"), ..lookup(7) };
    let to_main = Rule { dst: subnet("10.1.0.0/16"), priority: 90, ..lookup(254) };
    let not_small = Rule { suppressed: Some(0), priority: 90, ..lookup(254) };
    let unmarked = Rule { inverted: true, rest: Share::None, ..lookup(7) };
    let wins = "ip-rule error by the rule of priority 100, packets to 10.1.7.0/24 take the route \
                0.0.0.0/0 dev eth1 of table 7";
    let public = "192.0.2.7".parse().ok();
    for (rules, routes, expected) in [
        (vec![from_pods.clone()], vec![default], wins),
        (vec![from_pods.clone()], vec![], ""),
        (vec![from_pods.clone()], vec![TableRoute { throw: true, ..default }], ""),
        (vec![Rule { suppressed: Some(0), ..from_pods.clone() }], vec![default], ""),
        (vec![to_main.clone(), from_pods.clone()], vec![default], ""),
        (vec![Rule { src: subnet("10.1.5.0/24"), ..to_main }, lookup(7)], vec![default], wins),
        // As WireGuard's `wg-quick` does.
        (vec![not_small, unmarked.clone()], vec![default], ""),
        (vec![unmarked], vec![default], wins),
        (vec![Rule { rest: Share::None, ..lookup(7) }], vec![default], ""),
        (vec![Rule { src: subnet("192.0.2.1/32"), ..lookup(7) }], vec![default], ""),
        (vec![Rule { iif: Some("eth1".into()), ..lookup(7) }], vec![default], ""),
        (vec![Rule { iif: Some("cni0".into()), ..lookup(7) }], vec![default], wins),
        (vec![Rule { iif: Some("flannel.1".into()), ..lookup(7) }], vec![default], wins),
        (
            vec![Rule { rest: Share::Some, ..lookup(7) }],
            vec![default],
            "ip-rule warning by the rule of priority 100",
        ),
        // A copy of flannel's routes.
        (
            vec![from_pods.clone()],
            vec![
                default,
                route("10.1.0.0/16".parse().unwrap(), device("flannel.1")),
                route("10.1.5.0/24".parse().unwrap(), device("cni0")),
            ],
            "",
        ),
        (
            vec![Rule { dst: subnet("10.1.7.0/24"), ..lookup(7) }],
            vec![TableRoute { gateway: public, ..default }],
            "",
        ),
        (
            vec![from_pods.clone()],
            vec![route("10.1.7.64/26".parse().unwrap(), device("eth1"))],
            "ip-rule error by the rule of priority 100, packets to 10.1.7.0/24 take the route \
             10.1.7.64/26 dev eth1 of table 7",
        ),
        (vec![Rule { priority: 32766, ..from_pods }], vec![default], ""),
    ] {
        let mut facts = healthy();
        facts.rules.extend(rules.clone());
        facts.rules.sort_by_key(|rule| rule.priority);
        facts.tables = [((7, Family::V4), routes)].into();
        let found: Vec<String> = check(&facts)
            .into_iter()
            .map(|found| format!("{} {} {}", found.check, found.severity, found.text))
            .collect();
        match expected {
            "" => assert_eq!(found, [""; 0], "{rules:?}"),
            _ => assert!(found.len() == 1 && found[0].starts_with(expected), "{rules:?} {found:?}"),
        }
    }
}

/// The kernel goes on with the rule that a `goto` names, if there is one.
#[test]
fn a_jump_skips_the_rules_before_its_target() {
    let discard = |priority| rule(Family::V4, priority, RuleAction::Discard("prohibit"));
    let goto = |target| rule(Family::V4, 10, RuleAction::Goto(target));
    let some = |target| Rule { rest: Share::Some, ..goto(target) };
    let none = |target| Rule { rest: Share::None, ..goto(target) };
    for (jump, expected) in [
        (goto(32766), ""),
        (goto(21), "by the rule of priority 30,"),
        (goto(30), "by the rule of priority 30,"),
        (goto(32767), "no rule leads packets to 10.1.7.0/24 to the main table"),
        (some(32766), "by the rule of priority 20,"),
        (none(32766), "by the rule of priority 20,"),
        (goto(25), "by the rule of priority 20,"),
    ] {
        let mut facts = healthy();
        let skipped = Rule { dst: "10.1.0.0/16".parse().ok(), ..discard(20) };
        facts.rules.push(jump.clone());
        facts.rules.push(skipped);
        if expected.contains("30") {
            facts.rules.extend([rule(Family::V4, 21, RuleAction::Other), discard(30)]);
        }
        facts.rules.sort_by_key(|rule| rule.priority);
        let found = check(&facts);
        match expected {
            "" => assert_eq!(found, [], "{jump}"),
            _ => assert!(found.len() == 1 && found[0].text.starts_with(expected), "{found:#?}"),
        }
    }
}

#[test]
fn a_rule_is_deleted_by_its_text_only_if_it_is_certain() {
    let prohibit = rule(Family::V4, 9, RuleAction::Discard("prohibit"));
    let show = "ip rule show pref 9 # then delete the right one";
    for (wrong, other, expected) in [
        (prohibit.clone(), 8, "ip rule del pref 9 prohibit"),
        (prohibit.clone(), 9, show),
        (Rule { rest: Share::Some, ..prohibit }, 8, show),
    ] {
        let mut facts = healthy();
        facts.rules.splice(0..0, [rule(Family::V4, other, RuleAction::Other), wrong]);
        let found = check(&facts);
        assert!(found.len() == 1 && found[0].repair().as_deref() == Some(expected), "{found:#?}");
    }
}

#[test]
fn many_rules_have_few_findings() {
    let mut facts = healthy();
    let some = |priority| Rule {
        rest: Share::Some,
        ..rule(Family::V4, priority, RuleAction::Discard("prohibit"))
    };
    let all = rule(Family::V4, 300, RuleAction::Discard("blackhole"));
    facts.rules.splice(1..1, (100..300).map(some).chain([all]));
    let found = check(&facts);
    assert!(found.len() == 6 && found[0].text.contains("priority 300"), "{found:#?}");
    assert!(found[5].text.contains("196 more rules"), "{found:#?}");
}

/// A thousand peers behind a router share its entry, and the tunnel's own entries are permanent.
#[test]
fn only_neighbours_on_the_own_link_are_counted() {
    let mut facts = healthy();
    facts.max_neighbours.v4 = Some(128);
    facts.peers = (0..1000)
        .map(|n| peer("10.1.7.0-24", &format!("198.51.{}.{}", n / 250, n % 250)))
        .collect();
    assert_eq!(check(&facts), []);
    facts.has_entry_per_peer = true;
    let found = check(&facts);
    assert!(
        found.len() == 1
            && found[0].text.contains("peers need 1000 neighbours, because the tunnel"),
        "{found:?}"
    );
    facts.has_entry_per_peer = false;
    facts.on_link.push("198.51.0.0/16".parse().unwrap());
    let found = check(&facts);
    assert!(
        found.len() == 1 && found[0].text.contains("1000 peers are on this host's own link"),
        "{found:?}"
    );
}

#[test]
fn many_routes_of_other_programs_have_few_findings() {
    let mut facts = healthy();
    let route = |n: u8, takes| shadow(&format!("10.1.{n}.0/24 dev eth0 proto 4"), 4, takes);
    facts.shadows = (0..200).map(|n| route(n, Taken::None)).collect();
    facts.shadows.push(route(201, Taken::All));
    let found = check(&facts);
    assert!(found.len() == 6 && found[0].text.contains("10.1.201.0/24"), "{found:#?}");
    assert!(found[5].text.contains("196 more routes"), "{found:#?}");
}

#[test]
fn errors_are_sorted_before_warnings() {
    let mut facts = healthy();
    facts.rp_filter.insert("flannel.1".parse().unwrap(), 1);
    facts.max_neighbours.v4 = Some(0);
    facts.peers.push(peer("10.1.8.0-24", "192.0.2.1"));
    let severities: Vec<String> =
        check(&facts).into_iter().map(|finding| finding.severity.to_string()).collect();
    assert_eq!(severities, ["error", "warning", "warning"]);
}
