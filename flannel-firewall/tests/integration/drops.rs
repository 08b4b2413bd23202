//! `stopped_packets` finds the rules that stop packets of pods, and no others.

use std::time::{Duration, Instant};

use crate::fixture::tools::{Tools, nft};
use crate::fixture::{ALL, Fixture, Kind, Place, Running, rules_of};
use flannel_core::address::{Dual, Family};
use flannel_core::backend::Transport;
use flannel_firewall::{LegacyMemory, PodPackets, Stop, TunnelPackets, stopped_packets};
use flannel_netlink::testing::{in_netns_async, ip};

in_every_mode!(a_policy_of_iptables_is_found_and_rules_that_accept_pods_are_followed);

/// The pods of [`Place::Pod`], with these devices.
fn pods(bridge: &str, tunnel: &str, uplink: &str) -> Dual<PodPackets> {
    let of = |[network, own, peer]: [&str; 3], [from, to]: [&str; 2]| PodPackets {
        network: network.parse().unwrap(),
        own: own.parse().unwrap(),
        peer: peer.parse().ok(),
        bridge: bridge.parse().ok(),
        to_peers: vec![tunnel.parse().unwrap()],
        uplink: uplink.parse().ok(),
        node: to.parse().ok(),
        tunnel: Some(TunnelPackets {
            from: from.parse().unwrap(),
            to: to.parse().unwrap(),
            transports: vec![Transport::Udp(8472)],
        }),
    };
    Dual {
        v4: Some(of(["10.1.0.0/16", "10.1.7.0/24", "10.1.8.0/24"], ["192.0.2.8", "192.0.2.7"])),
        v6: Some(of(
            ["fd00:1::/48", "fd00:1:0:7::/64", "fd00:1:0:8::/64"],
            ["2a01:4f8::8", "2a01:4f8::7"],
        )),
    }
}

async fn stops(tools: &Tools) -> Vec<Stop> {
    let pods = pods("cni0", "flannel.1", "eth0");
    let stops = stopped_packets(&tools.programs(), &pods, &LegacyMemory::default()).await;
    assert!(stops.unread.is_empty(), "{:?}", stops.unread);
    stops.found
}

/// For example `IPv4 Drop rule … FromPod,ToPod`.
fn texts(stops: &[Stop]) -> Vec<String> {
    let text = |stop: &Stop| {
        let flows: Vec<String> = stop.flows.iter().map(|flow| format!("{flow:?}")).collect();
        let pods: Vec<String> = stop.pods.iter().map(|pod| format!(" {pod}")).collect();
        let Stop { family, effect, .. } = stop;
        format!("{family} {effect:?} {stop}: {}{}", flows.join(","), pods.concat())
    };
    stops.iter().map(text).collect()
}

/// A base chain of a hook, with rules.
fn chain(family: &str, hook: &str, rules: &str) -> String {
    let kind = if rules.contains("nat") || rules.contains("masquerade") { "nat" } else { "filter" };
    format!(
        "table {family} guard {{ chain gate {{ type {kind} hook {hook} priority 5; {rules} }}; }}"
    )
}

/// The flows of pods that pass a hook.
const FORWARDED: &str = "FromPod,ToPod,Outside";

#[test]
fn a_rule_is_found_in_each_hook_and_family() {
    in_netns_async(|| async {
        let tools = Tools::install();
        ip("link add cni0 type bridge");
        ip("link add flannel.1 type bridge");
        let reads = async |script: &str| {
            nft(&format!("flush ruleset; {script}"));
            texts(&stops(&tools).await)
        };
        assert!(reads("").await.is_empty());
        for family in Family::BOTH {
            let (own, of) = if family == Family::V4 { ("ip", "IPv4") } else { ("ip6", "IPv6") };
            let network = if family == Family::V4 { "10.1.0.0/16" } else { "fd00:1::/48" };
            for table in [own, "inet"] {
                for (hook, flows) in [
                    ("prerouting", FORWARDED),
                    ("forward", FORWARDED),
                    ("output", "FromHost"),
                    ("postrouting", "FromPod,ToPod,Outside,FromHost"),
                ] {
                    let rule = format!("{own} saddr {network} drop;");
                    let found = reads(&chain(table, hook, &rule)).await;
                    let expected = format!(
                        "{of} Drop rule `{own} saddr {network} drop` of chain gate of table \
                         {table} guard (hook {hook}): {flows}"
                    );
                    assert_eq!(found, [expected], "{rule}");
                }
            }
        }
        for (family, hook, flows) in [
            ("bridge", "prerouting", "FromPod,Outside"),
            ("bridge", "input", "FromPod,Outside"),
            ("bridge", "output", "ToPod"),
            ("bridge", "postrouting", "ToPod"),
            ("netdev", "ingress device cni0", "FromPod,Outside"),
            ("netdev", "ingress device flannel.1", "ToPod"),
            ("inet", "ingress device cni0", "FromPod,Outside"),
        ] {
            let found = reads(&chain(family, hook, "ip saddr 10.1.0.0/16 counter drop;")).await;
            let hook = hook.split(' ').next().unwrap();
            let expected = format!("(hook {hook}): {flows}");
            assert!(
                found.len() == 1 && found[0].ends_with(&expected),
                "{family} {hook}: {found:?}"
            );
        }
    });
}

#[test]
fn packets_of_the_tunnel_are_followed_to_this_host() {
    in_netns_async(|| async {
        let tools = Tools::install();
        ip("link add eth0 type bridge");
        let both = ["IPv4", "IPv6"];
        for (hook, rules, found) in [
            ("input", "udp dport 8472 drop;", &both[..]),
            ("prerouting", "iifname eth0 udp dport 8000-9000 drop;", &both),
            ("input", "policy drop; ct state established,related accept;", &both),
            ("input", "policy drop; ip saddr 192.0.2.0/24 accept;", &["IPv6"]),
            ("input", "ip saddr 192.0.2.8 reject;", &["IPv4"]),
            ("input", "fib daddr type local drop;", &both),
            ("input", "fib daddr type != local drop;", &[]),
            ("input", "policy drop; udp dport { 53, 8472 } accept;", &[]),
            ("input", "iifname eth1 drop; udp dport 8473 drop; tcp dport 8472 drop;", &[]),
            ("forward", "udp dport 8472 drop;", &[]),
            ("output", "udp dport 8472 drop;", &both),
            ("postrouting", "oifname eth0 udp dport 8472 drop;", &both),
            ("output", "fib saddr type != local drop;", &[]),
        ] {
            nft(&format!("flush ruleset; {}", chain("inet", hook, rules)));
            let stops = texts(&stops(&tools).await);
            let is_sent = matches!(hook, "output" | "postrouting");
            let end = if is_sent { ": TunnelOut(Udp(8472))" } else { ": Tunnel(Udp(8472))" };
            let expected = |family: &&str| {
                stops.iter().any(|stop| stop.starts_with(*family) && stop.ends_with(end))
            };
            assert!(found.iter().all(expected) && stops.len() == found.len(), "{rules} {stops:?}");
        }
    });
}

#[test]
fn a_rule_is_found_only_if_a_packet_surely_reaches_and_matches_it() {
    in_netns_async(|| async {
        let tools = Tools::install();
        for device in ["cni0", "flannel.1", "eth0"] {
            ip(&format!("link add {device} type bridge"));
        }
        let forward = |rules: &str| chain("inet", "forward", rules);
        for (rules, found) in [
            ("drop;", true),
            ("reject with icmpx admin-prohibited;", true),
            ("policy drop;", true),
            ("ct state established,related accept; iifname lo accept; reject;", true),
            ("ct state vmap { established : accept, invalid : drop }; drop;", true),
            ("ct state new drop;", true),
            ("iifname flannel.1 oifname cni0 reject;", true),
            ("iifname \"cni*\" drop;", true),
            ("iif lo accept; drop;", true),
            ("iifname != { lo, eth0 } drop;", true),
            ("oifname { cni0, docker0 } drop;", true),
            ("ip saddr 10.0.0.0/8 ip daddr 10.1.8.0/24 drop;", true),
            ("ip daddr != { 192.0.2.0/24, 198.51.100.0/24 } drop;", true),
            ("ip saddr . oifname { 10.1.7.254 . flannel.1 } drop;", true),
            ("iifname vmap { cni0 : drop, lo : accept };", true),
            ("tcp dport 22 accept; ip saddr 192.0.2.1 accept; drop;", true),
            ("tcp flags & (fin|syn|rst|ack) == syn drop;", true),
            ("meta l4proto udp drop;", true),
            ("fib daddr type unicast drop;", true),
            ("limit rate 3/minute log; drop;", true),
            ("meta mark & 0x1 == 0 drop;", true),
            ("tcp dport { 80, 443 } drop;", false),
            ("ct state invalid drop;", false),
            ("iifname eth1 drop;", false),
            ("ip saddr 10.2.0.0/16 drop;", false),
            (
                "ip saddr 10.1.0.0/16 accept; ip daddr 10.1.0.0/16 accept; meta nfproto ipv4 drop;",
                false,
            ),
            ("fib daddr type local drop;", false),
            ("meta mark 0x1 drop;", false),
            ("limit rate over 100/second drop;", false),
            ("meta nfproto ipv6 fib saddr . mark . iif oif missing drop;", false),
            ("meta skuid 5 accept; drop;", false),
            ("accept; drop;", false),
            ("return; drop;", false),
            ("jump { accept; }; drop;", false),
            ("meta cpu 1 jump { accept; }; drop;", false),
            ("meta cpu 1 jump { counter; }; drop;", true),
            ("jump { return; drop; };", false),
            ("jump { meta cpu 1 return; drop; };", false),
            ("jump { ip saddr 10.1.0.0/16 drop; };", true),
            ("goto { counter; }; drop;", false),
            ("policy drop; goto { counter; };", true),
            ("meta mark set 0x7; meta mark 0x7 accept; policy drop;", false),
            // The packets do not come to the rule behind it.
            ("tcp dport 54321 synproxy mss 1460 wscale 7; meta l4proto tcp drop;", false),
            // What is behind the header of the transport is not known.
            ("@ih,0,8 178 drop;", false),
        ] {
            nft(&format!("flush ruleset; {}", forward(rules)));
            let stops = stops(&tools).await;
            assert_eq!(!stops.is_empty(), found, "{rules}: {:?}", texts(&stops));
        }
    });
}

#[test]
fn large_sets_are_asked_and_not_read() {
    in_netns_async(|| async {
        let tools = Tools::install();
        let table = |more: &str, rule: &str| {
            let many: Vec<String> =
                (0..5000).map(|n| format!("172.16.{}.{}", n / 250, n % 250)).collect();
            let many = many.join(", ");
            nft(&format!(
                "flush ruleset; table ip big {{ set many {{ type ipv4_addr; flags interval; \
                 elements = {{ {more}{many} }}; }}; map ways {{ type ipv4_addr : verdict; \
                 elements = \
                 {{ 10.1.7.254 : goto no, 172.16.9.9 : accept }}; }}; chain no {{ drop; }}; \
                 chain gate {{ type filter hook forward priority 0; {rule} }}; }}"
            ));
        };
        table("", "ip saddr @many drop;");
        assert_eq!(texts(&stops(&tools).await), Vec::<String>::new());
        table("10.1.7.0/24, ", "ip saddr @many drop;");
        let found = texts(&stops(&tools).await);
        assert!(found.len() == 1 && found[0].contains("`ip saddr @many drop`"), "{found:?}");
        table("", "ip saddr vmap @ways;");
        let found = texts(&stops(&tools).await);
        assert!(found.len() == 1 && found[0].contains("`drop` of chain no"), "{found:?}");
    });
}

#[test]
fn a_rule_about_a_single_pod_or_subnet_is_found() {
    in_netns_async(|| async {
        let tools = Tools::install();
        // Docker 28 has such rules for containers with published ports.
        nft("table ip raw { chain PREROUTING { type filter hook prerouting priority raw; \
             ip daddr 10.1.7.9 iifname != cni0 counter drop; \
             ip daddr 172.17.0.2 iifname != docker0 counter drop; }; }");
        let rule =
            "`ip daddr 10.1.7.9 iifname != \"cni0\" drop` of chain PREROUTING of table ip raw";
        let found = texts(&stops(&tools).await);
        assert_eq!(found, [format!("IPv4 Drop rule {rule} (hook prerouting): ToPod 10.1.7.9")]);
        // Docker 28.0 has one for each port.
        nft("flush chain ip raw PREROUTING");
        for kind in [Kind::IptablesNft, Kind::IptablesLegacy] {
            let rule = "PREROUTING -d 10.1.7.9/32 ! -i cni0 -p tcp -m tcp --dport 80 -j DROP";
            tools.iptables(kind, Family::V4, &format!("-t raw -A {rule}"));
            let found = texts(&stops(&tools).await);
            assert!(found.len() == 1 && found[0].ends_with("ToPod 10.1.7.9"), "{found:?}");
            tools.iptables(kind, Family::V4, &format!("-t raw -D {rule}"));
        }
        nft("add rule ip raw PREROUTING ip daddr 10.1.7.9 iifname != cni0 drop");
        nft("insert rule ip raw PREROUTING iifname flannel.1 accept");
        assert_eq!(texts(&stops(&tools).await), Vec::<String>::new());
        nft(
            "flush ruleset; table ip raw { chain PREROUTING { type filter hook prerouting priority \
             raw; ip saddr 10.1.99.0/24 drop; }; }",
        );
        let found = texts(&stops(&tools).await);
        assert!(found.len() == 1 && found[0].ends_with("ToPod 10.1.99.254"), "{found:?}");
        // What a network policy does with a pod is wanted.
        nft(
            "flush ruleset; table ip filter { chain KUBE-POD-FW-X { drop; }; chain FORWARD { type \
             filter hook forward priority 0; ip daddr 10.1.7.9 jump KUBE-POD-FW-X; }; }",
        );
        assert_eq!(texts(&stops(&tools).await), Vec::<String>::new());
    });
}

#[test]
fn a_translation_between_pods_is_found_and_flannels_own_is_not() {
    in_netns_async(|| async {
        let tools = Tools::install();
        for (rule, effect) in [
            ("ip saddr 10.1.0.0/16 masquerade;", "Translate(Masquerade)"),
            ("oifname flannel.1 snat to 192.0.2.1;", "Translate(Source)"),
        ] {
            nft(&format!(
                "flush ruleset; {}",
                chain("ip", "postrouting", rule).replace("filter", "nat")
            ));
            let found = texts(&stops(&tools).await);
            assert!(found.len() == 1 && found[0].contains(effect), "{rule}: {found:?}");
        }
        nft("flush ruleset; table ip x { chain c { type nat hook postrouting priority srcnat; \
             ip saddr 10.1.0.0/16 ip daddr != 10.1.0.0/16 masquerade; }; }");
        assert_eq!(texts(&stops(&tools).await), Vec::<String>::new());
        // The kernel translates a connection once.
        nft("flush ruleset; table ip flannel-ipv4 { chain c { type nat hook postrouting priority \
             srcnat; ip saddr 10.1.0.0/16 masquerade; }; }");
        assert_eq!(texts(&stops(&tools).await), Vec::<String>::new());
    });
}

#[test]
fn a_dormant_table_has_no_effect() {
    in_netns_async(|| async {
        let tools = Tools::install();
        nft("table inet guard { flags dormant; chain gate { type filter hook forward priority 0; \
             drop; }; }");
        assert_eq!(texts(&stops(&tools).await), Vec::<String>::new());
    });
}

/// The matches of iptables, in nf_tables and in the legacy tables.
#[test]
fn conditions_of_iptables_are_understood() {
    in_netns_async(|| async {
        let tools = Tools::install();
        for kind in [Kind::IptablesNft, Kind::IptablesLegacy] {
            for (rules, found) in [
                (&["-j REJECT --reject-with icmp-host-prohibited"][..], true),
                (&["-m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT", "-j DROP"], true),
                (&["-m state --state NEW -j DROP"], true),
                (&["-m conntrack --ctstate INVALID -j DROP"], false),
                (&["-m conntrack ! --ctstate RELATED,ESTABLISHED -j DROP"], true),
                (&["-p tcp -m multiport --dports 22,80,443 -j ACCEPT", "-j REJECT"], true),
                (
                    &["-p tcp -m multiport --dports 22,80:60000 -j ACCEPT", "-p tcp -j REJECT"],
                    false,
                ),
                (&["-p tcp -m tcp --dport 22 -j ACCEPT", "-p icmp -j ACCEPT", "-j REJECT"], true),
                (&["-p udp -m udp --dport 1:53 -j DROP"], false),
                (&["-p tcp -m tcp --syn -j DROP"], true),
                (&["-m mark --mark 0x10000/0x10000 -j ACCEPT", "-j DROP"], true),
                (&["-m mark ! --mark 0x4000/0x4000 -j DROP"], true),
                (
                    &["-j MARK --set-xmark 0x1/0x1", "-m mark --mark 0x1/0x1 -j ACCEPT", "-j DROP"],
                    false,
                ),
                (&["-m physdev --physdev-is-bridged -j ACCEPT", "-j DROP"], true),
                (&["-m addrtype --dst-type LOCAL -j DROP"], false),
                (&["-m addrtype ! --dst-type LOCAL -j DROP"], true),
                (&["-m statistic --mode random --probability 0.5 -j ACCEPT", "-j DROP"], false),
                (&["-m limit --limit 5/min -j LOG", "-j DROP"], true),
                (&["-i cni+ -m comment --comment drop -j DROP"], true),
                (&["! -i cni+ ! -o cni+ -j DROP"], false),
                (&["-s 10.1.7.0/24 -d 10.1.0.0/16 -o flannel.1 -j DROP"], true),
                (&["-s 10.1.0.0/16 -j ACCEPT", "-d 10.1.0.0/16 -j ACCEPT", "-j DROP"], false),
                (&["-j NFQUEUE --queue-num 7 --queue-bypass", "-j DROP"], false),
            ] {
                for rule in rules {
                    tools.iptables(kind, Family::V4, &format!("-A FORWARD {rule}"));
                }
                let stops = stops(&tools).await;
                assert_eq!(!stops.is_empty(), found, "{kind:?} {rules:?}: {:?}", texts(&stops));
                tools.iptables(kind, Family::V4, "-F FORWARD");
            }
        }
    });
}

/// Tables of iptables without rules.
const EMPTY: &str = "*filter\n:FORWARD ACCEPT\nCOMMIT\n*nat\nCOMMIT\n*raw\nCOMMIT\n";

/// The rules of firewalld 1.3, with the external interface in the zone `public`, by which all may
/// leave.
#[test]
fn firewalld_stops_pods_until_it_trusts_their_network() {
    in_netns_async(|| async {
        let tools = Tools::install();
        nft(include_str!("../rulesets/firewalld.nft"));
        let of = |hook: &str, way: &str| {
            Family::BOTH.map(|family| {
                format!(
                    "{family} Reject rule `reject` of chain filter_{way} of table inet firewalld \
                     (hook {hook})"
                )
            })
        };
        let forward = of("forward", "FWD_public").map(|text| text + ": FromPod,ToPod");
        let tunnel = of("input", "IN_public").map(|text| text + ": Tunnel(Udp(8472))");
        let mut both = [forward, tunnel.clone()].concat();
        both.sort();
        assert_eq!(texts(&stops(&tools).await), both);
        nft(concat!("flush ruleset\n", include_str!("../rulesets/firewalld-trusts-pods.nft")));
        assert_eq!(texts(&stops(&tools).await), tunnel);
        nft("add rule inet firewalld filter_IN_public_allow udp dport 8472 accept");
        assert_eq!(texts(&stops(&tools).await), Vec::<String>::new());
    });
}

/// A healthy node: Docker 27 and 28, kube-proxy and Calico, in nf_tables and in the legacy tables,
/// each with the policy DROP and flannel's rules.
#[test]
fn nothing_is_found_on_a_healthy_node() {
    in_netns_async(|| async {
        let tools = Tools::install();
        for kind in [Kind::IptablesNft, Kind::IptablesLegacy] {
            for (family, rules) in [
                (Family::V4, include_str!("../rulesets/docker-27.iptables")),
                (Family::V4, include_str!("../rulesets/docker-28.iptables")),
                (Family::V4, include_str!("../rulesets/kubernetes.iptables")),
                (Family::V4, include_str!("../rulesets/calico.iptables")),
            ] {
                tools.restore(kind, family, rules);
                assert_eq!(texts(&stops(&tools).await), Vec::<String>::new(), "{kind:?} {rules}");
            }
            tools.restore(kind, Family::V4, EMPTY);
        }
        for rules in
            [include_str!("../rulesets/kube-proxy.nft"), include_str!("../rulesets/others.nft")]
        {
            nft(&format!("flush ruleset\n{rules}"));
            assert_eq!(texts(&stops(&tools).await), Vec::<String>::new());
        }
    });
}

/// Without flannel's rules, the policy is found in each of these tables.
#[test]
fn the_policy_is_found_behind_the_rules_of_other_programs() {
    in_netns_async(|| async {
        let tools = Tools::install();
        for kind in [Kind::IptablesNft, Kind::IptablesLegacy] {
            for rules in [
                include_str!("../rulesets/docker-27.iptables"),
                include_str!("../rulesets/docker-28.iptables"),
                include_str!("../rulesets/kubernetes.iptables"),
            ] {
                let without: String = rules
                    .lines()
                    .filter(|line| !line.contains("FLANNEL-FWD"))
                    .map(|line| format!("{line}\n"))
                    .collect();
                tools.restore(kind, Family::V4, &without);
                let found = texts(&stops(&tools).await);
                let is_policy = |text: &String| text.contains("the policy of chain FORWARD");
                assert!(found.len() == 1 && is_policy(&found[0]), "{kind:?} {found:?}");
            }
            tools.restore(kind, Family::V4, EMPTY);
        }
    });
}

async fn a_policy_of_iptables_is_found_and_rules_that_accept_pods_are_followed(
    fixture: Fixture,
    kind: Kind,
) {
    let seen = async || {
        let pods = pods("to0", "to1", "to2");
        let memory = LegacyMemory::default();
        texts(&stopped_packets(&fixture.tools.programs(), &pods, &memory).await.found)
    };
    assert_eq!(seen().await, Vec::<String>::new());
    let variant = if kind == Kind::Nftables { Kind::IptablesNft } else { kind };
    for family in Family::BOTH {
        fixture.tools.iptables(variant, family, "-P FORWARD DROP");
    }
    let suffix = if kind == Kind::IptablesLegacy { ", iptables-legacy" } else { "" };
    let expected = [("IPv4", "ip"), ("IPv6", "ip6")].map(|(family, table)| {
        format!(
            "{family} Drop the policy of chain FORWARD of table {table} filter (hook \
             forward{suffix}): {FORWARDED}"
        )
    });
    assert_eq!(seen().await, expected);
    caches_the_output_of_a_process(&fixture, variant).await;
    let running =
        Running::start(&fixture, kind, rules_of(Place::Pod, ALL), Duration::from_secs(3600)).await;
    // Rules in a separate table do not override the policy of another table.
    let left = if kind == Kind::Nftables { &expected[..] } else { &[] };
    assert_eq!(seen().await, left);
    running.stop().await;
}

#[test]
fn readable_tables_are_reported_even_if_others_are_unreadable() {
    in_netns_async(|| async {
        let tools = Tools::install();
        for kind in [Kind::IptablesNft, Kind::IptablesLegacy] {
            tools.iptables(kind, Family::V4, "-P FORWARD DROP");
        }
        std::fs::remove_file(tools.path("iptables-legacy-save")).unwrap();
        let only_v4 = Dual { v6: None, ..pods("cni0", "flannel.1", "eth0") };
        let seen = stopped_packets(&tools.programs(), &only_v4, &LegacyMemory::default()).await;
        assert_eq!(seen.found.len(), 1, "{seen:?}");
        assert!(!seen.found[0].legacy, "{seen:?}");
        let unread: Vec<_> = seen.unread.iter().map(ToString::to_string).collect();
        assert!(
            unread.len() == 1 && unread[0].starts_with("iptables-legacy-save is not in"),
            "{unread:?}"
        );
    });
}

/// The output of a program is cached. The policies of all chains are DROP, before and after.
async fn caches_the_output_of_a_process(fixture: &Fixture, kind: Kind) {
    let policy = |word: &str| {
        for family in Family::BOTH {
            fixture.tools.iptables(kind, family, &format!("-P FORWARD {word}"));
        }
    };
    let memory = LegacyMemory::new(Duration::from_secs(3600));
    let programs = fixture.tools.programs();
    let pods = pods("to0", "to1", "to2");
    let stops = async || stopped_packets(&programs, &pods, &memory).await.found;
    let first = stops().await;
    assert!(first.len() == 2 && first.iter().all(|stop| stop.age == Duration::ZERO), "{first:?}");
    policy("ACCEPT");
    let legacy = kind == Kind::IptablesLegacy;
    let second = stops().await;
    assert_eq!(second.len(), if legacy { 2 } else { 0 }, "only the output of a process is cached");
    assert!(second.iter().all(|stop| stop.age > Duration::ZERO));
    if legacy {
        let mut old = second[0].clone();
        old.age = Duration::from_secs(8);
        let text = "the policy of chain FORWARD of table ip filter (hook forward, iptables-legacy, \
                    8 s ago)";
        assert_eq!(old.to_string(), text);
    }
    // `forget` does not drop output younger than a second.
    let start = Instant::now();
    while !stops().await.is_empty() {
        assert!(start.elapsed() < Duration::from_secs(30));
        memory.forget().await;
    }
    policy("DROP");
    assert_eq!(stops().await.len(), if legacy { 0 } else { 2 });
}
