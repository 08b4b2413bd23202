//! Computes the input of `iptables-restore` from the output of `iptables-save` and the desired
//! rules.
//!
//! A chain is compared as a whole, in order. If it differs, it is emptied and filled again. Several
//! daemons on a host share the chains, also with Go flannel. Then the rules for other networks are
//! left out of the comparison, and stay. Go flannel checks that its own rules exist, and nothing
//! else.
//!
//! A jump to it is the last rule of the built-in chain, but comes before the first rule that no
//! packet passes. So the rules of other programs that see packets come first, such as those of
//! network policies, and flannel's own rules see packets too. A jump that sees packets stays where
//! it is.
//!
//! **Source**: flannel `pkg/trafficmngr/iptables`.

use std::fmt::Write as _;
use std::net::IpAddr;

use flannel_core::Subnet;
use flannel_core::address::Family;

use super::saved::{Saved, SavedTable, words};
use crate::ownership::Ownership;
use crate::rules::{Chain, Nat, Rule, RuleOptions, Rules, Side, Verdict};
use crate::status::{Deviation, Fault};

/// A chain of flannel, and the built-in chain that jumps to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Place {
    table: &'static str,
    chain: &'static str,
    hook: &'static str,
    comment: &'static str,
    /// The desired chain, or `None` for an empty chain that Go flannel leaves.
    content: Option<Chain>,
}

const PLACES: [Place; 4] = [
    Place {
        table: "nat",
        chain: "FLANNEL-POSTRTG",
        hook: "POSTROUTING",
        comment: "flanneld masq",
        content: Some(Chain::Postrouting),
    },
    Place {
        table: "filter",
        chain: "FLANNEL-FWD",
        hook: "FORWARD",
        comment: "flanneld forward",
        content: Some(Chain::Forward),
    },
    // Chains of other programs in this table rarely accept packets. Chains in `filter` often do.
    Place {
        table: "mangle",
        chain: "FLANNEL-ENCRYPTION",
        hook: "POSTROUTING",
        comment: "flanneld encryption",
        content: Some(Chain::Encryption),
    },
    // Go flannel's cleanup creates its filter chain in the wrong table.
    Place { table: "nat", chain: "FLANNEL-FWD", hook: "", comment: "", content: None },
];

/// A part of the chains of flannel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Scope {
    All,
    /// The chains that Go flannel neither makes nor removes.
    UnknownToGo,
}

impl Scope {
    fn places(self) -> impl Iterator<Item = &'static Place> {
        PLACES.iter().filter(move |place| match self {
            Self::All => true,
            Self::UnknownToGo => place.content == Some(Chain::Encryption),
        })
    }
}

/// Table and name of every chain of flannel in `scope`.
pub(crate) fn chains(scope: Scope) -> impl Iterator<Item = (&'static str, &'static str)> {
    scope.places().map(|place| (place.table, place.chain))
}

/// The tables with the rules that `rule_options` asks for.
pub(crate) fn tables(rule_options: &RuleOptions) -> Vec<&'static str> {
    PLACES
        .iter()
        .filter(|place| match place.content {
            Some(Chain::Postrouting) => !rule_options.masquerade.is_empty(),
            Some(Chain::Forward) => rule_options.forward,
            Some(Chain::Encryption) => rule_options.encrypted.is_some(),
            Some(Chain::Unrouted) | None => false,
        })
        .map(|place| place.table)
        .collect()
}

/// Whether a change of a chain, or of a whole table, may concern flannel's chains and the jumps to
/// them.
pub(crate) fn concerns(table: &str, chain: Option<&str>) -> bool {
    PLACES.iter().any(|place| {
        let names = [place.chain, place.hook];
        table == place.table && chain.is_none_or(|chain| names.contains(&chain))
    })
}

/// A script for `iptables-restore`.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Script {
    /// The input. Empty if nothing differs.
    pub(crate) text: String,
    /// The differences.
    pub(crate) deviations: Vec<Deviation>,
    /// Table and chain of the jumps whose place it gives as a number. The place is wrong if another
    /// program has inserted a rule meanwhile.
    pub(crate) numbered: Vec<(&'static str, &'static str)>,
}

/// The rules that a script is for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Target<'a> {
    pub(crate) family: Family,
    /// Chains outside of this scope are left alone.
    pub(crate) scope: Scope,
    /// Whether the program supports `--random-fully`.
    pub(crate) random_fully: bool,
    /// The name of the program in deviations.
    pub(crate) program: &'a str,
    /// The [`Script::numbered`] jumps of a script that was just applied. They must be directly
    /// before a rule that no packet passes, not somewhere before it.
    pub(crate) placed: &'a [(&'static str, &'static str)],
}

/// The script that turns the rules in `saved`, the output of `iptables-save`, into `rules`.
pub(crate) fn script(saved: &str, rules: &Rules, target: Target<'_>) -> Script {
    let Target { family, scope, random_fully, program, placed } = target;
    let saved = Saved::read(saved);
    let none = SavedTable::default();
    let mut script = Script::default();
    for table in ["nat", "filter", "mangle"] {
        let mut lines = String::new();
        for place in scope.places().filter(|place| place.table == table) {
            let desired: Vec<String> = match place.content {
                Some(chain) => rules
                    .of(family, chain)
                    .iter()
                    .map(|rule| line(rule, place, random_fully))
                    .collect(),
                None => Vec::new(),
            };
            let key = (place.table, place.chain);
            let placed = placed.contains(&key);
            let table_found = saved.table(table).unwrap_or(&none);
            let found = Found::read(table_found, place, rules.ownership(), placed);
            let numbered = found.repair(place, &desired, &mut lines, &mut |object: &str, fault| {
                let object = format!("{program}, table {table}, {object}");
                script.deviations.push(Deviation { object, fault });
            });
            script.numbered.extend(numbered.then_some(key));
        }
        if !lines.is_empty() {
            let _ = write!(script.text, "*{table}\n{lines}COMMIT\n");
        }
    }
    script
}

/// The actual content of a chain. Rules are lines of `iptables-save` without `-A` and the chain.
#[derive(Debug, Default)]
struct Found<'a> {
    exists: bool,
    /// The rules for networks of this daemon, and those without a network.
    rules: Vec<&'a str>,
    /// Rules for networks of other daemons are left out of `rules`.
    is_shared: bool,
    /// Jumps to the chain.
    jumps: Vec<Jump<'a>>,
    /// The number of other rules before the first jump in the hook.
    before: usize,
    /// The number of other rules before the rule of the hook that no packet passes. `None` if there
    /// is no such rule.
    end: Option<usize>,
    /// See [`Target::placed`].
    placed: bool,
}

#[derive(Debug)]
struct Jump<'a> {
    /// The chain that has the jump.
    from: &'a str,
    rule: &'a str,
}

impl<'a> Found<'a> {
    fn read(table: &SavedTable<'a>, place: &Place, owned: &Ownership, placed: bool) -> Self {
        let all = table.rules(place.chain);
        let is_others = |rule: &&str| {
            let network = network_of(rule).filter(|network| !owned.has(*network));
            network.is_some() && words(rule).iter().any(|word| *word == place.comment)
        };
        let rules: Vec<_> = all.iter().copied().filter(|rule| !is_others(rule)).collect();
        let mut found = Self {
            exists: table.chain(place.chain).is_some(),
            is_shared: rules.len() < all.len(),
            rules,
            placed,
            ..Self::default()
        };
        let hook = table.rules(place.hook);
        let is_jump = |rule: &&&str| goes_to(rule, place.chain);
        found.before = hook.iter().take_while(|rule| !is_jump(rule)).count();
        let mut others = hook.iter().filter(|rule| !is_jump(rule));
        // What the forward rules accept, no program behind them sees. So they only come before a
        // rule that decides nothing.
        found.end = others.position(|rule| match place.content {
            Some(Chain::Forward) => table.only_refuses(rule),
            _ => table.ends_all(rule),
        });
        let mut chains: Vec<_> = table.chains().filter(|(name, _)| *name != place.chain).collect();
        chains.sort_by_key(|(name, _)| *name);
        for (from, chain) in chains {
            let jumps = chain.rules.iter().filter(is_jump);
            found.jumps.extend(jumps.map(|rule| Jump { from, rule }));
        }
        found
    }

    /// Adds lines to `lines` that make the chain equal to `desired`. Reports each difference.
    /// Returns true if a line has the number of a place.
    fn repair(
        &self,
        place: &Place,
        desired: &[String],
        lines: &mut String,
        deviates: &mut impl FnMut(&str, Fault),
    ) -> bool {
        let chain = place.chain;
        let title = format!("chain {chain}");
        if self.is_shared {
            if self.repair_shared(chain, desired, lines) {
                deviates(&title, Fault::Different);
            }
            return !desired.is_empty() && self.repair_jump(place, lines, deviates);
        }
        if desired.is_empty() {
            if self.exists || !self.jumps.is_empty() {
                deviates(&title, Fault::Unwanted);
                let _ = writeln!(lines, ":{chain} - [0:0]");
                for Jump { from, rule } in &self.jumps {
                    let _ = writeln!(lines, "-D {from} {rule}");
                }
                let _ = writeln!(lines, "-X {chain}");
            }
            return false;
        }
        let is_filled = self.rules.len() == desired.len()
            && self.rules.iter().zip(desired).all(|(is, want)| meaning(is) == meaning(want));
        if !self.exists || !is_filled {
            deviates(&title, if self.exists { Fault::Different } else { Fault::Missing });
            // With `--noflush` this creates or empties the chain.
            let _ = writeln!(lines, ":{chain} - [0:0]");
            for rule in desired {
                let _ = writeln!(lines, "-A {chain} {rule}");
            }
        }
        self.repair_jump(place, lines, deviates)
    }

    /// Adds lines to `lines` that make the own rules of a shared chain equal to `desired`. Returns
    /// false if they are equal. A rule without a network, such as the one about the mark of
    /// kube-proxy, is there once for all daemons. It must come before the own rules.
    fn repair_shared(&self, chain: &str, desired: &[String], lines: &mut String) -> bool {
        let is_common = |rule: &str| network_of(rule).is_none();
        let is_wanted = |rule: &str| desired.iter().any(|want| meaning(want) == meaning(rule));
        let common: Vec<_> = desired.iter().filter(|rule| is_common(rule)).collect();
        let is_there =
            |rules: &[&str], want: &str| rules.iter().any(|rule| meaning(rule) == meaning(want));
        let first = self.rules.iter().position(|rule| !is_common(rule));
        let before = &self.rules[..first.unwrap_or(self.rules.len())];
        let own = self.rules.iter().filter(|rule| !is_common(rule)).map(|rule| meaning(rule));
        let wanted = desired.iter().filter(|rule| !is_common(rule)).map(|rule| meaning(rule));
        // Without rules of its own, a daemon leaves the common ones to others.
        let is_stray = |rule: &str| is_common(rule) && !desired.is_empty() && !is_wanted(rule);
        if own.eq(wanted)
            && common.iter().all(|want| is_there(before, want))
            && !self.rules.iter().any(|rule| is_stray(rule))
        {
            return false;
        }
        for rule in self.rules.iter().filter(|rule| !is_common(rule) || is_stray(rule)) {
            let _ = writeln!(lines, "-D {chain} {rule}");
        }
        for want in common.iter().rev().filter(|want| !is_there(&self.rules, want)) {
            let _ = writeln!(lines, "-I {chain} {want}");
        }
        for rule in desired.iter().filter(|rule| !is_common(rule)) {
            let _ = writeln!(lines, "-A {chain} {rule}");
        }
        true
    }

    /// Adds lines to `lines` after which the hook has the jump to the chain exactly once. Returns
    /// true if a line has the number of a place.
    fn repair_jump(
        &self,
        place: &Place,
        lines: &mut String,
        deviates: &mut impl FnMut(&str, Fault),
    ) -> bool {
        let Place { chain, hook, .. } = *place;
        let wanted = format!("-m comment --comment \"{}\" -j {chain}", place.comment);
        let jumps: Vec<&str> =
            self.jumps.iter().filter(|jump| jump.from == hook).map(|jump| jump.rule).collect();
        // A rule before it could accept a packet that must not leave.
        let comes_first = place.content == Some(Chain::Encryption);
        let fault = match jumps[..] {
            [only] if meaning(only) == meaning(&wanted) => match self.end {
                _ if comes_first && self.before > 0 => Fault::Misplaced,
                Some(end) if !comes_first && self.before > end => Fault::Unreached,
                Some(end) if self.placed && self.before < end => Fault::Misplaced,
                _ => return false,
            },
            [] => Fault::Missing,
            [_] => Fault::Different,
            _ => Fault::Repeated,
        };
        deviates(&format!("jump from {hook} to {chain}"), fault);
        for rule in jumps {
            let _ = writeln!(lines, "-D {hook} {rule}");
        }
        let add = match self.end {
            _ if comes_first => format!("-I {hook}"),
            Some(end) => format!("-I {hook} {}", end + 1),
            None => format!("-A {hook}"),
        };
        let _ = writeln!(lines, "{add} {wanted}");
        !comes_first && self.end.is_some()
    }
}

/// A rule in the notation of `iptables-save`.
fn line(rule: &Rule, place: &Place, random_fully: bool) -> String {
    let mut line = String::new();
    for (side, option) in [(rule.source, "-s"), (rule.destination, "-d")] {
        match side {
            None => {}
            Some(Side::In(subnet)) => _ = write!(line, "{option} {subnet} "),
            Some(Side::NotIn(subnet)) => _ = write!(line, "! {option} {subnet} "),
        }
    }
    if let Some(device) = rule.device {
        let _ = write!(line, "-o {device} ");
    }
    if let Some(mark) = rule.mark {
        let _ = write!(line, "-m mark --mark {mark:#x}/{mark:#x} ");
    }
    if let Some(protocol) = rule.protocol {
        let _ = write!(line, "-p {protocol} ");
    }
    let target = match rule.verdict {
        // No chain of iptables has such rules.
        Verdict::Count => String::new(),
        Verdict::Return => "RETURN".to_owned(),
        Verdict::Accept => "ACCEPT".to_owned(),
        Verdict::Drop => "DROP".to_owned(),
        Verdict::Masquerade(nat) => source_nat(nat, random_fully),
    };
    let _ = write!(line, "-m comment --comment \"{}\" -j {target}", place.comment);
    line
}

/// The target that replaces the source.
fn source_nat(nat: Nat, random_fully: bool) -> String {
    let mut target = match (nat.source, nat.ports) {
        (None, None) => "MASQUERADE".to_owned(),
        (None, Some(ports)) => format!("MASQUERADE --to-ports {ports}"),
        (Some(source), None) => format!("SNAT --to-source {source}"),
        (Some(source @ IpAddr::V4(_)), Some(ports)) => format!("SNAT --to-source {source}:{ports}"),
        (Some(source), Some(ports)) => format!("SNAT --to-source [{source}]:{ports}"),
    };
    if nat.fully_random && random_fully {
        target.push_str(" --random-fully");
    }
    target
}

/// The network that a rule of flannel is for: its source, or its destination if it has no source.
fn network_of(rule: &str) -> Option<Subnet> {
    let words = words(rule);
    let after = |option: &str| {
        let at = words.iter().position(|word| word == option)?;
        words.get(at + 1)?.parse().ok()
    };
    after("-s").or_else(|| after("-d"))
}

/// Whether a rule jumps to the chain.
fn goes_to(rule: &str, chain: &str) -> bool {
    // A host may have tens of thousands of rules, so a fast check comes first.
    if !rule.contains(chain) {
        return false;
    }
    // A comment may contain the text, so words are compared.
    words(rule).windows(2).any(|pair| matches!(&*pair[0], "-j" | "-g") && pair[1] == chain)
}

/// The parts of a rule, sorted because their order is irrelevant.
fn meaning(rule: &str) -> Vec<Vec<String>> {
    let mut parts: Vec<Vec<String>> = Vec::new();
    let mut negated = false;
    for word in words(rule) {
        let starts =
            matches!(&*word, "!" | "-s" | "-d" | "-i" | "-o" | "-p" | "-m" | "-j" | "-g" | "-f");
        match parts.last_mut() {
            Some(part) if !starts || negated => part.push(word.clone()),
            _ => parts.push(vec![word.clone()]),
        }
        negated = word == "!";
    }
    parts.sort();
    parts
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::masquerade::Masquerade;
    use crate::rules::RuleOptions;
    use crate::rules::tests::rules;
    use flannel_core::address::Dual;

    const ALL: RuleOptions =
        RuleOptions { masquerade: Masquerade::both(true), forward: true, encrypted: None };

    /// Go flannel's rules, as printed by `iptables-save` 1.8.9.
    const IN_PLACE: &str = concat!(
        r#"# Generated by iptables-save v1.8.9
*filter
:INPUT ACCEPT [0:0]
:FORWARD ACCEPT [0:0]
:OUTPUT ACCEPT [0:0]
:FLANNEL-FWD - [0:0]
-A FORWARD -m comment --comment "a foreign rule, -j FLANNEL-FWD" -j ACCEPT
-A FORWARD -m comment --comment "flanneld forward" -j FLANNEL-FWD
-A FLANNEL-FWD -s 10.1.0.0/16 -m comment --comment "flanneld forward" -j ACCEPT
-A FLANNEL-FWD -d 10.1.0.0/16 -m comment --comment "flanneld forward" -j ACCEPT
COMMIT
*nat
:PREROUTING ACCEPT [0:0]
:POSTROUTING ACCEPT [0:0]
:FLANNEL-POSTRTG - [0:0]
-A POSTROUTING -s 172.17.0.0/16 ! -o docker0 -j MASQUERADE
-A POSTROUTING -m comment --comment "flanneld masq" -j FLANNEL-POSTRTG
-A FLANNEL-POSTRTG -m mark --mark 0x4000/0x4000 -m comment --comment "flanneld masq" -j RETURN
-A FLANNEL-POSTRTG -s 10.1.7.0/24 -d 10.1.0.0/16 -m comment --comment "flanneld masq" -j RETURN
-A FLANNEL-POSTRTG -s 10.1.0.0/16 -d 10.1.7.0/24 -m comment --comment "flanneld masq" -j RETURN
-A FLANNEL-POSTRTG ! -s 10.1.0.0/16 -d 10.1.7.0/24 -m comment --comment "flanneld masq" -j RETURN
-A FLANNEL-POSTRTG -s 10.1.0.0/16 ! -d 224.0.0.0/4 "#,
        r#"-m comment --comment "flanneld masq" -j MASQUERADE --random-fully
-A FLANNEL-POSTRTG ! -s 10.1.0.0/16 -d 10.1.0.0/16 "#,
        r#"-m comment --comment "flanneld masq" -j MASQUERADE --random-fully
COMMIT
"#
    );

    const TARGET: Target<'_> = Target {
        family: Family::V4,
        scope: Scope::All,
        random_fully: true,
        program: "iptables",
        placed: &[],
    };

    fn v4(saved: &str, rule_options: RuleOptions) -> Script {
        script(saved, &rules(rule_options), TARGET)
    }

    fn faults(script: &Script) -> Vec<String> {
        script
            .deviations
            .iter()
            .map(|deviation| deviation.to_string().replace("iptables, table ", ""))
            .collect()
    }

    /// The script for an empty machine creates Go flannel's rules.
    #[test]
    fn an_empty_machine_gets_the_rules_of_go_flannel() {
        let script = v4("", ALL);
        let go: Vec<_> = IN_PLACE
            .lines()
            .filter(|line| line.contains("flanneld") || line.contains(":FLANNEL"))
            .map(|line| line.to_owned())
            .collect();
        for line in &go {
            assert!(
                script.text.lines().any(|ours| ours == line),
                "{line} is missing in\n{}",
                script.text
            );
        }
        assert_eq!(script.text.lines().count(), go.len() + 4, "{}", script.text);
        assert_eq!(faults(&script).len(), 4);
        let without_random =
            Target { family: Family::V6, random_fully: false, program: "ip6tables", ..TARGET };
        let plain = super::script("", &rules(ALL), without_random).text;
        assert!(
            plain.contains("-s fd00:1::/48 ! -d ff00::/8") && !plain.contains("random"),
            "{plain}"
        );
    }

    #[test]
    fn the_rules_of_go_flannel_are_adopted_unchanged() {
        assert_eq!(v4(IN_PLACE, ALL), Script::default());
        let reordered = IN_PLACE.replace(
            "-m mark --mark 0x4000/0x4000 -m comment --comment \"flanneld masq\"",
            "-m comment --comment \"flanneld masq\" -m mark --mark 0x4000/0x4000",
        );
        assert_ne!(reordered, IN_PLACE);
        assert_eq!(v4(&reordered, ALL), Script::default(), "the order of matches is irrelevant");
    }

    #[test]
    fn order_repetition_and_negation_are_relevant() {
        let lines: Vec<_> = IN_PLACE.lines().collect();
        let mut swapped = lines.clone();
        swapped.swap(18, 19);
        assert_eq!(
            faults(&v4(&swapped.join("\n"), ALL)),
            ["nat, chain FLANNEL-POSTRTG: different"]
        );
        let mut twice = lines.clone();
        twice.insert(18, lines[18]);
        assert_eq!(faults(&v4(&twice.join("\n"), ALL)), ["nat, chain FLANNEL-POSTRTG: different"]);
        let negated =
            IN_PLACE.replace("! -s 10.1.0.0/16 -d 10.1.7.0/24", "-s 10.1.0.0/16 ! -d 10.1.7.0/24");
        assert_eq!(faults(&v4(&negated, ALL)), ["nat, chain FLANNEL-POSTRTG: different"]);
    }

    #[test]
    fn a_jump_must_exist_exactly_once() {
        let jump = "-A POSTROUTING -m comment --comment \"flanneld masq\" -j FLANNEL-POSTRTG\n";
        let script = v4(&IN_PLACE.replace(jump, ""), ALL);
        assert_eq!(faults(&script), ["nat, jump from POSTROUTING to FLANNEL-POSTRTG: missing"]);
        assert_eq!(script.text, format!("*nat\n{jump}COMMIT\n"));
        let script = v4(&IN_PLACE.replace(jump, &jump.repeat(2)), ALL);
        assert_eq!(faults(&script), ["nat, jump from POSTROUTING to FLANNEL-POSTRTG: repeated"]);
        assert_eq!(
            script.text,
            format!("*nat\n{}{jump}COMMIT\n", jump.replace("-A", "-D").repeat(2))
        );
    }

    const FORWARD: RuleOptions =
        RuleOptions { masquerade: Dual { v4: None, v6: None }, forward: true, encrypted: None };

    /// The rules of the chain `FORWARD`, in order, on a host with the forward rules. `J` stands for
    /// the jump.
    fn forward(rules: &[&str]) -> String {
        const JUMP: &str = "-m comment --comment \"flanneld forward\" -j FLANNEL-FWD";
        let ours = IN_PLACE.lines().filter(|line| line.starts_with("-A FLANNEL-FWD"));
        let ours: Vec<&str> = ours.collect();
        let rules = rules
            .iter()
            .map(|rule| format!("-A FORWARD {}\n", if *rule == "J" { JUMP } else { rule }));
        let rules: String = rules.collect();
        format!(
            "*filter\n:FORWARD ACCEPT [0:0]\n:FLANNEL-FWD - [0:0]\n:UFW - [0:0]\n{rules}{}\n\
             -A UFW -p icmp -j ACCEPT\n-A UFW -j DROP\n\
             :DROPS - [0:0]\n-A DROPS -j LOG\n-A DROPS -j DROP\nCOMMIT\n",
            ours.join("\n")
        )
    }

    #[test]
    fn a_jump_is_after_all_rules_that_see_packets_and_before_one_that_no_packet_passes() {
        const POLICY: &str = "-s 10.1.0.0/16 -j MYPOLICY";
        const REJECT: &str = "-j REJECT --reject-with icmp-host-prohibited";
        for (rules, command) in [
            (&[][..], "-A FORWARD -m"),
            (&[POLICY], "-A FORWARD -m"),
            (&[REJECT], "-I FORWARD 1 -m"),
            (&[POLICY, REJECT], "-I FORWARD 2 -m"),
            (&[POLICY, POLICY, REJECT, REJECT], "-I FORWARD 3 -m"),
            // No packet reaches the policy.
            (&[REJECT, POLICY], "-I FORWARD 1 -m"),
            // These decide about packets.
            (&[POLICY, "-j UFW"], "-A FORWARD -m"),
            (&[POLICY, "-j NFQUEUE --queue-num 1"], "-A FORWARD -m"),
            (&["-j NFQUEUE --queue-num 1 --queue-bypass", REJECT], "-I FORWARD 2 -m"),
            (&[POLICY, "-j DROPS"], "-I FORWARD 2 -m"),
            (&[POLICY, "-j ACCEPT"], "-A FORWARD -m"),
            (&[POLICY, "-j RETURN"], "-I FORWARD 2 -m"),
            (&[POLICY, "-i eth0 -j UFW"], "-A FORWARD -m"),
        ] {
            let script = v4(&forward(rules), FORWARD);
            let missing = "filter, jump from FORWARD to FLANNEL-FWD: missing";
            assert_eq!(faults(&script), [missing], "{rules:?}");
            let lines: Vec<&str> = script.text.lines().collect();
            assert!(lines.len() == 3 && lines[1].starts_with(command), "{rules:?}: {script:?}");
            assert_eq!(script.numbered.is_empty(), command.starts_with("-A"), "{rules:?}");
        }
        for rules in [
            &["J"][..],
            &["J", POLICY],
            &["J", REJECT],
            &[POLICY, "J", REJECT],
            &["J", POLICY, REJECT],
            &[POLICY, "-p tcp -j DROP", "J", POLICY, "-j DROPS"],
            &[POLICY, "-j UFW", "J"],
        ] {
            assert_eq!(v4(&forward(rules), FORWARD), Script::default(), "{rules:?}: it stays");
        }
        for (rules, place) in [
            (&[REJECT, "J"][..], 1),
            (&[POLICY, "-j DROPS", POLICY, "J"], 2),
            (&[REJECT, "J", REJECT], 1),
        ] {
            let script = v4(&forward(rules), FORWARD);
            let behind =
                "filter, jump from FORWARD to FLANNEL-FWD: behind a rule that no packet passes";
            assert_eq!(faults(&script), [behind], "{rules:?}");
            let moved = [" -D FORWARD -m", &format!(" -I FORWARD {place} -m")];
            assert!(
                moved.iter().all(|part| script.text.replace('\n', " ").contains(part)),
                "{script:?}"
            );
        }
    }

    /// Another program has inserted a rule since the rules were read.
    #[test]
    fn a_jump_that_was_just_placed_has_no_other_rule_behind_it_that_sees_packets() {
        let placed = Target { placed: &[("filter", "FLANNEL-FWD")], ..TARGET };
        let look = |found: &[&str], target| script(&forward(found), &rules(FORWARD), target);
        let early = ["-s 10.9.0.0/16 -j DROP", "J", "-s 10.1.0.0/16 -j MYPOLICY", "-j DROP"];
        assert_eq!(look(&early, TARGET), Script::default());
        let again = look(&early, placed);
        assert!(again.text.contains("-I FORWARD 3 -m"), "{again:?}");
        let right = ["-s 10.1.0.0/16 -j MYPOLICY", "J", "-j DROP"];
        assert_eq!(look(&right, placed), Script::default());
    }

    #[test]
    fn only_undesired_chains_of_flannel_are_removed() {
        let script = v4(IN_PLACE, RuleOptions { forward: false, ..ALL });
        let forward = "*filter\n:FLANNEL-FWD - [0:0]\n\
                       -D FORWARD -m comment --comment \"flanneld forward\" -j FLANNEL-FWD\n\
                       -X FLANNEL-FWD\nCOMMIT\n";
        assert_eq!(script.text, forward);
        let gos_mistake = "*nat\n:FLANNEL-FWD - [0:0]\nCOMMIT\n";
        assert_eq!(
            v4(gos_mistake, RuleOptions { forward: false, ..RuleOptions::default() }).text,
            "*nat\n:FLANNEL-FWD - [0:0]\n-X FLANNEL-FWD\nCOMMIT\n"
        );
        assert_eq!(
            v4("", RuleOptions { forward: false, ..RuleOptions::default() }),
            Script::default()
        );
    }

    /// As printed by `iptables-save` 1.8.9.
    const ENCRYPTION: &str = r#"*mangle
:POSTROUTING ACCEPT [0:0]
:FLANNEL-ENCRYPTION - [0:0]
-A POSTROUTING -m comment --comment "flanneld encryption" -j FLANNEL-ENCRYPTION
-A POSTROUTING -j ACCEPT
-A FLANNEL-ENCRYPTION -d 10.1.7.0/24 -m comment --comment "flanneld encryption" -j RETURN
-A FLANNEL-ENCRYPTION -d 10.1.0.0/16 -o lo -m comment --comment "flanneld encryption" -j RETURN
-A FLANNEL-ENCRYPTION -d 10.1.0.0/16 -o wg0 -m comment --comment "flanneld encryption" -j RETURN
-A FLANNEL-ENCRYPTION -d 10.1.0.0/16 -m comment --comment "flanneld encryption" -j DROP
COMMIT
"#;

    #[test]
    fn packets_are_dropped_before_another_program_accepts_them() {
        let encrypted = Some(vec!["wg0".parse().unwrap()]);
        let only = RuleOptions { forward: false, encrypted, ..RuleOptions::default() };
        assert_eq!(v4(ENCRYPTION, only.clone()), Script::default());
        let made = v4("*mangle\n-A POSTROUTING -j ACCEPT\nCOMMIT\n", only);
        assert_eq!(
            faults(&made),
            [
                "mangle, chain FLANNEL-ENCRYPTION: missing",
                "mangle, jump from POSTROUTING to FLANNEL-ENCRYPTION: missing",
            ]
        );
        let jump = r#"-I POSTROUTING -m comment --comment "flanneld encryption" -j FLANNEL"#;
        assert!(made.text.contains(jump), "{}", made.text);
    }

    #[test]
    fn the_jump_that_drops_packets_is_the_first_rule_and_others_keep_their_place() {
        let encrypted = Some(vec!["wg0".parse().unwrap()]);
        let only = RuleOptions { forward: false, encrypted, ..RuleOptions::default() };
        let hook = "-A POSTROUTING -m comment --comment \"flanneld encryption\" -j";
        for before in ["-A POSTROUTING -j ACCEPT", "-A POSTROUTING -p tcp -j OTHER"] {
            for counters in ["", "[3:180] "] {
                let late =
                    ENCRYPTION.replace(hook, &format!("{counters}{before}\n{counters}{hook}"));
                assert_ne!(late, ENCRYPTION);
                let script = v4(&late, only.clone());
                let jump = "mangle, jump from POSTROUTING to FLANNEL-ENCRYPTION";
                assert_eq!(faults(&script), [format!("{jump}: not the first rule")]);
                let rule = &hook["-A ".len()..];
                let moved = format!(
                    "*mangle\n-D {rule} FLANNEL-ENCRYPTION\n-I {rule} FLANNEL-ENCRYPTION\nCOMMIT\n"
                );
                assert_eq!(script.text, moved);
            }
        }
        // Rules in another chain, and rules behind the jump, do not matter.
        let elsewhere = ENCRYPTION.replace(hook, &format!("-A OUTPUT -j ACCEPT\n{hook}"));
        assert_eq!(v4(&elsewhere, only), Script::default());
        assert_eq!(v4(IN_PLACE, ALL), Script::default(), "the rule of docker stays first");
    }

    #[test]
    fn only_chains_that_go_flannel_does_not_know_are_removed_for_it() {
        let saved = IN_PLACE.to_owned() + ENCRYPTION;
        let target = Target { scope: Scope::UnknownToGo, ..TARGET };
        let script = script(&saved, &Rules::default(), target);
        assert_eq!(faults(&script), ["mangle, chain FLANNEL-ENCRYPTION: not wanted"]);
        assert!(!script.text.contains("FLANNEL-FWD") && !script.text.contains("POSTRTG"));
    }

    /// The rules of another daemon, as Go flannel has them, for the network 10.2.0.0/16.
    fn with_others(saved: &str) -> String {
        let mut all = String::new();
        for line in saved.lines() {
            all += &format!("{line}\n");
            // Each line of a chain of flannel has a twin, except the common one.
            if line.starts_with("-A FLANNEL-") && line.contains("10.1.") {
                all += &format!("{}\n", line.replace("10.1.", "10.2."));
            }
        }
        all
    }

    #[test]
    fn rules_for_other_networks_stay() {
        let saved = with_others(&(IN_PLACE.to_owned() + ENCRYPTION));
        let encrypted = Some(vec!["wg0".parse().unwrap()]);
        let all = RuleOptions { encrypted, ..ALL };
        assert_eq!(v4(&saved, all.clone()), Script::default());
        // The chains are there only for the other network.
        let only_others: String = saved
            .lines()
            .filter(|line| !line.contains("10.1."))
            .map(|line| format!("{line}\n"))
            .collect();
        let script = v4(&only_others, all.clone());
        let chains = ["nat, chain FLANNEL-POSTRTG", "filter, chain FLANNEL-FWD"];
        for chain in chains {
            assert!(faults(&script).contains(&format!("{chain}: different")), "{script:?}");
        }
        assert!(!script.text.contains("10.2.") && !script.text.contains(":FLANNEL"), "{script:?}");
        assert!(!script.text.contains("0x4000"), "the rule about the mark is common: {script:?}");
        // Own rules go, and those of the other network stay with their jumps.
        let none = Rules::none_for(["10.1.0.0/16".parse().unwrap()]);
        let script = super::script(&saved, &none, TARGET);
        let removed = script.text.lines().filter(|line| line.starts_with("-D ")).count();
        assert_eq!(removed, 5 + 2 + 4, "{script:?}");
        assert!(!script.text.contains("10.2.") && !script.text.contains("-X"), "{script:?}");
        assert!(!script.text.contains("0x4000") && !script.text.contains("-D FORWARD"));
        // A former network is an own one.
        let former = rules(all).with_former(["10.2.0.0/16".parse().unwrap()]);
        let script = super::script(&saved, &former, TARGET);
        assert!(script.text.contains(":FLANNEL-POSTRTG - [0:0]"), "{script:?}");
    }

    /// Go flannel appends the rule about the mark again when it repairs its rules.
    #[test]
    fn the_common_rule_comes_before_the_own_ones() {
        let mark = IN_PLACE.lines().find(|line| line.contains("0x4000")).unwrap();
        let others =
            "-A FLANNEL-POSTRTG -s 10.2.0.0/16 -m comment --comment \"flanneld masq\" -j M";
        let late = IN_PLACE
            .replace(&format!("{mark}\n"), "")
            .replace("COMMIT\n", &format!("{mark}\n{others}\nCOMMIT\n"));
        let late = late.replacen(&format!("{mark}\n{others}\n"), "", 1);
        let script = v4(&late, ALL);
        assert_eq!(faults(&script), ["nat, chain FLANNEL-POSTRTG: different"]);
        assert_eq!(script.text.matches("-D ").count(), 5, "{}", script.text);
        assert_eq!(script.text.matches("-A ").count(), 5, "{}", script.text);
        assert!(!script.text.contains("0x4000") && !script.text.contains("-I"), "{}", script.text);
        // It is inserted if it is missing, and a stray rule goes.
        let missing = late.replace(mark, "-A FLANNEL-POSTRTG -j RETURN");
        let script = v4(&missing, ALL);
        assert!(script.text.contains("-I FLANNEL-POSTRTG -m mark"), "{}", script.text);
        assert!(script.text.contains("-D FLANNEL-POSTRTG -j RETURN"), "{}", script.text);
    }

    #[test]
    fn another_subnet_is_a_difference() {
        let moved = IN_PLACE.replace("10.1.7.0/24", "10.1.8.0/24");
        let script = v4(&moved, ALL);
        assert_eq!(faults(&script), ["nat, chain FLANNEL-POSTRTG: different"]);
        assert!(
            script.text.starts_with("*nat\n:FLANNEL-POSTRTG - [0:0]\n")
                && !script.text.contains("10.1.8.0")
        );
    }
}
