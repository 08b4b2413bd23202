//! Several daemons on a host, each with a network of its own, also beside Go flannel.

use std::fmt::Write as _;
use std::time::Duration;

use flannel_core::address::Family;
use flannel_firewall::{Options, RuleOptions, Rules, cleanup, cleanup_networks};

use crate::fixture::tools::nft;
use crate::fixture::{
    ALL, Fixture, Kind, Place, Running, rules_of, rules_of_second, second_network,
};

in_every_mode!(
    two_daemons_do_not_repair_each_others_rules,
    a_daemon_removes_only_its_own_rules,
    a_daemon_lives_beside_go_flannel,
);

/// So short that a daemon which looks at the rules of another one would repair them many times.
const RESYNC: Duration = Duration::from_millis(20);
/// The number of checks after which two daemons have seen each other's rules.
const CHECKS: u64 = 8;

fn encrypted() -> RuleOptions {
    RuleOptions { encrypted: Some(vec!["to1".parse().unwrap()]), ..ALL }
}

/// Waits for some checks of each daemon.
async fn check_again<const N: usize>(daemons: [&mut Running; N]) {
    let before = daemons.iter().map(|daemon| daemon.status.borrow().checks).collect::<Vec<_>>();
    for (daemon, before) in daemons.into_iter().zip(before) {
        daemon.until(|status| status.checks >= before + CHECKS && status.in_place).await;
    }
}

async fn two_daemons_do_not_repair_each_others_rules(fixture: Fixture, kind: Kind) {
    for options in [ALL, encrypted()] {
        let first = rules_of(Place::Pod, options.clone());
        let mut one = Running::start(&fixture, kind, first.clone(), RESYNC).await;
        let second = rules_of_second(options);
        let mut two = Running::start(&fixture, kind, second.clone(), RESYNC).await;
        check_again([&mut one, &mut two]).await;
        for family in Family::BOTH {
            fixture.assert_masqueraded(family);
        }
        one.assert_writes(1, 0);
        two.assert_writes(1, 0);
        // Each one follows other rules, and starts again, without a trace in the other one.
        two.want(rules_of_second(RuleOptions { forward: false, ..ALL })).await;
        two.want(second.clone()).await;
        two.stop().await;
        let mut two = Running::start(&fixture, kind, second, RESYNC).await;
        two.assert_writes(0, 0);
        one.stop().await;
        let mut one = Running::start(&fixture, kind, first, RESYNC).await;
        check_again([&mut one, &mut two]).await;
        one.assert_writes(0, 0);
        two.assert_writes(0, 0);
        // What another program breaks comes back, in one repair of each one at most.
        match kind {
            Kind::Nftables => _ = nft("flush ruleset"),
            _ => _ = fixture.tools.iptables(kind, Family::V4, "-t nat -F"),
        }
        one.until(|status| status.repairs > 0 && status.in_place).await;
        two.until(|status| status.repairs > 0 && status.in_place).await;
        check_again([&mut one, &mut two]).await;
        let repairs = [&one, &two].map(|it| it.status.borrow().repairs);
        check_again([&mut one, &mut two]).await;
        assert_eq!([&one, &two].map(|it| it.status.borrow().repairs), repairs);
        assert!(repairs.iter().all(|repairs| *repairs <= 3), "{repairs:?}");
        fixture.assert_masqueraded(Family::V4);
        one.stop().await;
        two.stop().await;
        cleanup(&fixture.tools.programs()).await;
    }
}

async fn a_daemon_removes_only_its_own_rules(fixture: Fixture, kind: Kind) {
    let mut one = Running::start(&fixture, kind, rules_of(Place::Pod, ALL), RESYNC).await;
    one.until(|status| status.old_rules_gone).await;
    let alone = fixture.tools.ours_seen();
    // The second daemon may use the other mode, and tidies it up. The host has one `iptables`.
    let is_possible = |other: &Kind| [kind, Kind::Nftables].contains(other);
    for other in Kind::ALL.into_iter().filter(|it| kind == Kind::Nftables || is_possible(it)) {
        if kind == Kind::Nftables {
            fixture.tools.host_uses(other);
        }
        let options = Options { resync: RESYNC, programs: fixture.tools.programs() };
        let mut two = Running::with(other, rules_of_second(encrypted()), options).await;
        two.until(|status| status.old_rules_gone).await;
        let networks = Family::BOTH.map(|family| second_network(family)[0]);
        // A network that is named twice is one network.
        let networks = [networks, networks].concat();
        two.want(Rules::none_for(networks.clone())).await;
        assert_eq!(fixture.tools.ours_seen(), alone, "{other:?}");
        two.want(rules_of_second(encrypted())).await;
        two.stop().await;
        let programs = fixture.tools.programs();
        let would = cleanup_networks(&programs, &networks, true).await;
        let did = cleanup_networks(&programs, &networks, false).await;
        assert_eq!(would.found, did.found);
        assert!(!did.found.is_empty() && did.failed.is_empty(), "{did:?}");
        assert_eq!(fixture.tools.ours_seen(), alone, "{other:?}");
        let again = cleanup_networks(&programs, &networks, false).await;
        assert!(again.found.is_empty(), "{again:?}");
    }
    check_again([&mut one]).await;
    one.assert_writes(1, 0);
    // A network that the daemon had earlier is an own one.
    let former = Family::BOTH.map(|family| second_network(family)[0]);
    let two = Running::start(&fixture, kind, rules_of_second(encrypted()), RESYNC).await;
    two.stop().await;
    one.want(rules_of(Place::Pod, ALL).with_former(former)).await;
    assert_eq!(fixture.tools.ours_seen(), alone);
    one.stop().await;
}

/// Go flannel, as far as its rules go.
///
/// **Source**: flannel `pkg/trafficmngr/iptables: masqRules, forwardRules, CreateIP4Chain,
/// ipTablesCleanAndBuild, ensureIPTables`, `pkg/trafficmngr/nftables`.
struct GoFlannel<'a> {
    fixture: &'a Fixture,
    kind: Kind,
}

impl GoFlannel<'_> {
    /// Table, chain and rule, for each rule.
    fn rules(family: Family) -> [Vec<[String; 3]>; 2] {
        let [net, own] = second_network(family);
        let multicast = if family == Family::V4 { "224.0.0.0/4" } else { "ff00::/8" };
        let masq = [
            ("POSTROUTING", String::new(), "FLANNEL-POSTRTG"),
            ("", "-m mark --mark 0x4000/0x4000 ".to_owned(), "RETURN"),
            ("", format!("-s {own} -d {net} "), "RETURN"),
            ("", format!("-s {net} -d {own} "), "RETURN"),
            ("", format!("! -s {net} -d {own} "), "RETURN"),
            ("", format!("-s {net} ! -d {multicast} "), "MASQUERADE --random-fully"),
            ("", format!("! -s {net} -d {net} "), "MASQUERADE --random-fully"),
        ];
        let forward = [
            ("FORWARD", String::new(), "FLANNEL-FWD"),
            ("", format!("-s {net} "), "ACCEPT"),
            ("", format!("-d {net} "), "ACCEPT"),
        ];
        let rules = |table: &str, own: &str, comment: &str, list: &[(&str, String, &str)]| {
            let rule = |(chain, matches, target): &(&str, String, &str)| {
                let chain = if chain.is_empty() { own } else { chain };
                let rule = format!("{matches}-m comment --comment \"flanneld {comment}\"");
                [table.to_owned(), chain.to_owned(), format!("{rule} -j {target}")]
            };
            list.iter().map(rule).collect::<Vec<_>>()
        };
        [
            rules("nat", "FLANNEL-POSTRTG", "masq", &masq),
            rules("filter", "FLANNEL-FWD", "forward", &forward),
        ]
    }

    fn exists(&self, family: Family, [table, chain, rule]: &[String; 3]) -> bool {
        let quoted = rule.replace("\"flanneld masq\"", "flanneld\0masq");
        let quoted = quoted.replace("\"flanneld forward\"", "flanneld\0forward");
        let words: Vec<_> = quoted.split_whitespace().map(|word| word.replace('\0', " ")).collect();
        let mut args = vec!["-t", table, "-C", chain];
        args.extend(words.iter().map(String::as_str));
        self.fixture.tools.succeeds(self.kind, family, &args)
    }

    /// Creates or empties its chains, and adds its rules.
    fn start(&self) {
        if self.kind == Kind::Nftables {
            return self.start_in_nftables();
        }
        for family in Family::BOTH {
            for rules in Self::rules(family) {
                let [table, chain, _] = &rules[1];
                let tools = &self.fixture.tools;
                if !tools.succeeds(self.kind, family, &["-t", table, "-N", chain]) {
                    tools.iptables(self.kind, family, &format!("-t {table} -F {chain}"));
                }
                self.write(family, &rules);
            }
        }
    }

    /// Deletes the rules that exist, and appends all.
    fn write(&self, family: Family, rules: &[[String; 3]]) {
        let mut script = format!("*{}\n", rules[0][0]);
        for rule in rules {
            let [_, chain, text] = rule;
            if self.exists(family, rule) {
                let _ = writeln!(script, "-D {chain} {text}");
            }
            let _ = writeln!(script, "-A {chain} {text}");
        }
        self.fixture.tools.restore_beside(self.kind, family, &(script + "COMMIT\n"));
    }

    /// Its periodic check. Returns the number of rule sets that it wrote again. It checks nothing
    /// in nftables.
    fn ensure(&self) -> usize {
        let mut repairs = 0;
        for family in Family::BOTH.into_iter().filter(|_| self.kind != Kind::Nftables) {
            for rules in Self::rules(family) {
                if !rules.iter().all(|rule| self.exists(family, rule)) {
                    self.write(family, &rules);
                    repairs += 1;
                }
            }
        }
        repairs
    }

    fn start_in_nftables(&self) {
        for (family, keyword, table, multicast) in [
            (Family::V4, "ip", "ip flannel-ipv4", "224.0.0.0/4"),
            (Family::V6, "ip6", "ip6 flannel-ipv6", "ff00::/8"),
        ] {
            let [net, own] = second_network(family);
            let (saddr, daddr) = (format!("{keyword} saddr"), format!("{keyword} daddr"));
            nft(&format!(
                "add table {table}
                 add chain {table} postrtg {{ type nat hook postrouting priority srcnat; }}
                 flush chain {table} postrtg
                 add rule {table} postrtg meta mark 0x4000 return
                 add rule {table} postrtg {saddr} {own} {daddr} {net} return
                 add rule {table} postrtg {saddr} {net} {daddr} {own} return
                 add rule {table} postrtg {saddr} != {own} {daddr} {net} return
                 add rule {table} postrtg {saddr} {net} {daddr} != {multicast} masquerade
                 add rule {table} postrtg {saddr} != {net} {daddr} {net} masquerade
                 add chain {table} forward {{ type filter hook forward priority filter; }}
                 flush chain {table} forward
                 add rule {table} forward {saddr} {net} accept
                 add rule {table} forward {daddr} {net} accept\n"
            ));
        }
    }
}

async fn a_daemon_lives_beside_go_flannel(fixture: Fixture, kind: Kind) {
    let go = GoFlannel { fixture: &fixture, kind };
    let rules = rules_of(Place::Pod, ALL);
    // Go flannel was there before.
    go.start();
    let mut ours = Running::start(&fixture, kind, rules.clone(), RESYNC).await;
    ours.until(|status| status.old_rules_gone).await;
    for _ in 0..3 {
        assert_eq!(go.ensure(), 0, "Go flannel repairs nothing");
        check_again([&mut ours]).await;
    }
    ours.assert_writes(1, 0);
    // Go flannel starts, and empties the chains that both use.
    for _ in 0..2 {
        go.start();
        check_again([&mut ours]).await;
        go.ensure();
        check_again([&mut ours]).await;
        let repairs = ours.status.borrow().repairs;
        // With nftables each one has tables of its own by now.
        let expected = if kind == Kind::Nftables { 0..=0 } else { 1..=8 };
        assert!(expected.contains(&repairs), "{repairs}");
        for _ in 0..3 {
            assert_eq!(go.ensure(), 0, "Go flannel repairs nothing");
            check_again([&mut ours]).await;
        }
        assert_eq!(ours.status.borrow().repairs, repairs, "{:?}", ours.status.borrow());
        for family in Family::BOTH {
            fixture.assert_masqueraded(family);
        }
    }
    // Go flannel repairs its rules, and appends the rule about the mark of kube-proxy anew.
    if kind != Kind::Nftables {
        let [net, own] = second_network(Family::V4);
        let rule = format!("-s {own} -d {net} -m comment --comment");
        let chain = ["-t", "nat", "-D", "FLANNEL-POSTRTG"];
        let mut args: Vec<_> = chain.into_iter().chain(rule.split(' ')).collect();
        args.extend(["flanneld masq", "-j", "RETURN"]);
        assert!(fixture.tools.succeeds(kind, Family::V4, &args));
        assert_eq!(go.ensure(), 1);
        check_again([&mut ours]).await;
        let repairs = ours.status.borrow().repairs;
        assert_eq!(go.ensure(), 0);
        check_again([&mut ours]).await;
        assert_eq!(ours.status.borrow().repairs, repairs);
    }
    ours.stop().await;
    // Go flannel comes later, and takes the tables of nftables.
    cleanup(&fixture.tools.programs()).await;
    let mut ours = Running::start(&fixture, kind, rules, RESYNC).await;
    go.start();
    ours.until(|status| status.repairs > 0 && status.in_place).await;
    go.ensure();
    check_again([&mut ours]).await;
    let repairs = ours.status.borrow().repairs;
    assert_eq!(go.ensure(), 0);
    check_again([&mut ours]).await;
    assert_eq!(ours.status.borrow().repairs, repairs);
    for family in Family::BOTH {
        fixture.assert_masqueraded(family);
    }
    ours.stop().await;
}
