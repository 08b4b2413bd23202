//! The output of `iptables-save` as tables and chains.

use std::collections::HashMap;

/// The deepest nesting of jumps that is followed. The kernel allows 16.
const DEEPEST: usize = 16;

/// The tables in the output of `iptables-save`.
#[derive(Debug, Default)]
pub(crate) struct Saved<'a>(HashMap<&'a str, SavedTable<'a>>);

/// A table.
#[derive(Debug, Default)]
pub(crate) struct SavedTable<'a>(HashMap<&'a str, SavedChain<'a>>);

/// A chain.
#[derive(Debug, Default)]
pub(crate) struct SavedChain<'a> {
    /// What happens at its end. `None` for a chain that only jumps reach.
    pub(crate) policy: Option<&'a str>,
    /// Its rules, without `-A` and the name of the chain.
    pub(crate) rules: Vec<&'a str>,
}

impl<'a> Saved<'a> {
    pub(crate) fn read(saved: &'a str) -> Self {
        let mut tables = Self::default();
        let mut name = "";
        for line in saved.lines() {
            if let Some(table) = line.strip_prefix('*') {
                name = table.trim();
            }
            let table = tables.0.entry(name).or_default();
            if let Some(head) = line.strip_prefix(':') {
                let mut words = head.split(' ');
                let chain = table.0.entry(words.next().unwrap_or_default()).or_default();
                chain.policy = words.next().filter(|policy| *policy != "-");
            } else if let Some((chain, rule)) = chain_and_rule(line) {
                table.0.entry(chain).or_default().rules.push(rule);
            }
        }
        tables
    }

    /// A table. `None` if it has no chains.
    pub(crate) fn table(&self, name: &str) -> Option<&SavedTable<'a>> {
        self.0.get(name)
    }
}

impl<'a> SavedTable<'a> {
    /// A chain. `None` if it does not exist.
    pub(crate) fn chain(&self, name: &str) -> Option<&SavedChain<'a>> {
        self.0.get(name)
    }

    /// The rules of a chain. A chain that does not exist has none.
    pub(crate) fn rules(&self, chain: &str) -> &[&'a str] {
        self.chain(chain).map_or(&[], |chain| &chain.rules)
    }

    /// All chains with their rules, in no order.
    pub(crate) fn chains(&self) -> impl Iterator<Item = (&'a str, &SavedChain<'a>)> {
        self.0.iter().map(|(name, chain)| (*name, chain))
    }

    /// Whether no packet gets past the rule: it has no condition, and a verdict or a chain that
    /// lets no packet back.
    pub(crate) fn ends_all(&self, rule: &str) -> bool {
        self.ends(rule, DEEPEST)
    }

    /// Whether a rule of a built-in chain only refuses packets: it has no condition, and drops or
    /// rejects all packets, or leaves them to the policy. A program that decides about packets,
    /// such as one that reads a queue or fills a chain with rules, must see them before.
    pub(crate) fn only_refuses(&self, rule: &str) -> bool {
        matches!(unconditional(rule), Some(Way::Return)) || self.refuses(rule, DEEPEST)
    }

    fn refuses(&self, rule: &str, depth: usize) -> bool {
        match unconditional(rule) {
            Some(Way::Refuse) => true,
            Some(Way::Jump(chain) | Way::Goto(chain)) if depth > 0 => {
                let mut rules = self.rules(&chain).iter().skip_while(|rule| only_notes(rule));
                rules.next().is_some_and(|rule| self.refuses(rule, depth - 1))
            }
            _ => false,
        }
    }

    fn ends(&self, rule: &str, depth: usize) -> bool {
        match unconditional(rule) {
            None | Some(Way::On) => false,
            // The packet gets the policy of the built-in chain, or what follows the outermost jump.
            Some(Way::Return | Way::Refuse | Way::Verdict | Way::Goto(_)) => true,
            Some(Way::Jump(chain)) => depth > 0 && self.keeps_all(&chain, depth - 1),
        }
    }

    /// Whether a chain lets no packet back to the chain that jumped to it.
    fn keeps_all(&self, chain: &str, depth: usize) -> bool {
        for rule in self.rules(chain) {
            match unconditional(rule) {
                Some(Way::Return | Way::Goto(_)) => return false,
                Some(Way::Refuse | Way::Verdict | Way::Jump(_)) if self.ends(rule, depth) => {
                    return true;
                }
                Some(_) => {}
                // A rule with a condition may let packets back.
                None if words(rule).iter().any(|word| word == "RETURN" || word == "-g") => {
                    return false;
                }
                None => {}
            }
        }
        false
    }
}

/// Where a rule without a condition leads all packets.
enum Way {
    /// To the next rule.
    On,
    Return,
    /// They are dropped or rejected.
    Refuse,
    /// Out of the table, or to a program that decides.
    Verdict,
    Goto(String),
    Jump(String),
}

/// Whether a rule at most counts or logs packets.
fn only_notes(rule: &str) -> bool {
    let words = words(rule);
    let mut target = words.windows(2).filter(|pair| matches!(&*pair[0], "-j" | "-g"));
    target.all(|pair| matches!(&*pair[1], "LOG" | "NFLOG"))
}

/// Where a rule leads all packets. `None` if it has a condition.
fn unconditional(rule: &str) -> Option<Way> {
    // A host may have tens of thousands of rules, so a fast check comes first.
    if rule.starts_with("-s ") || rule.starts_with("-d ") {
        return None;
    }
    let mut words = words(rule).into_iter();
    while let Some(word) = words.next() {
        let value = words.next()?;
        match (&*word, &*value) {
            ("-m", "comment") | ("--comment", _) => {}
            ("-g", _) => return Some(Way::Goto(value)),
            ("-j", "RETURN") => return Some(Way::Return),
            ("-j", "DROP" | "REJECT") => return Some(Way::Refuse),
            // A translation is the verdict of the table `nat`, which alone has these targets.
            ("-j", "ACCEPT" | "QUEUE" | "NFQUEUE" | "MASQUERADE" | "SNAT" | "NETMAP") => {
                return Some(Way::Verdict);
            }
            // A target that continues is not the name of a chain, so it has no rules.
            ("-j", _) => return Some(Way::Jump(value)),
            _ => return None,
        }
    }
    Some(Way::On)
}

/// The chain and the rest of a line that adds a rule. `None` for other lines.
fn chain_and_rule(line: &str) -> Option<(&str, &str)> {
    // Old versions and `--counters` print counters before `-A`.
    let at = line.find("-A ")?;
    if at != 0 && !line.starts_with('[') {
        return None;
    }
    let rule = &line[at + "-A ".len()..];
    Some(rule.split_once(' ').unwrap_or((rule, "")))
}

/// The words of a rule. Double quotes enclose a word, and a backslash escapes a character.
pub(crate) fn words(rule: &str) -> Vec<String> {
    let mut words = Vec::new();
    let mut word: Option<String> = None;
    let mut quoted = false;
    let mut chars = rule.chars();
    while let Some(char) = chars.next() {
        match char {
            '"' => {
                quoted = !quoted;
                word.get_or_insert_default();
            }
            '\\' => word.get_or_insert_default().extend(chars.next()),
            ' ' if !quoted => words.extend(word.take()),
            _ => word.get_or_insert_default().push(char),
        }
    }
    words.extend(word);
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_split_like_in_a_shell() {
        assert_eq!(
            words(r#"-m comment --comment "a \"b\" c" -j X"#),
            ["-m", "comment", "--comment", "a \"b\" c", "-j", "X"]
        );
        assert_eq!(words(r#"--comment """#), ["--comment", ""]);
    }

    #[test]
    fn only_a_rule_without_a_condition_ends_a_chain() {
        let saved = Saved::read(
            "*filter\n:FORWARD ACCEPT [0:0]\n\
             :DROPS - [0:0]\n-A DROPS -p tcp -j ACCEPT\n-A DROPS -j LOG\n-A DROPS -j DROP\n\
             :NESTED - [0:0]\n-A NESTED -m comment --comment x -j DROPS\n\
             :RETURNS - [0:0]\n-A RETURNS -s 10.0.0.0/8 -j RETURN\n-A RETURNS -j DROP\n\
             :GOES - [0:0]\n-A GOES -j RETURNS\n-A GOES -i lo -g DROPS\n-A GOES -j DROP\n\
             :USER - [0:0]\n-A USER -j RETURN\n:EMPTY - [0:0]\n\
             :LOOP - [0:0]\n-A LOOP -j LOOP\nCOMMIT\n",
        );
        let filter = saved.table("filter").unwrap();
        for (rule, ends) in [
            ("-j REJECT --reject-with icmp-host-prohibited", true),
            ("-m comment --comment \"no more\" -j DROP", true),
            ("-j ACCEPT", true),
            ("-j RETURN", true),
            ("-j NFQUEUE --queue-num 1 --queue-bypass", true),
            ("-j MASQUERADE --random-fully", true),
            ("-j SNAT --to-source 192.0.2.1", true),
            ("-s 10.1.0.0/16 -j MASQUERADE", false),
            ("-g EMPTY", true),
            ("-j DROPS", true),
            ("-j NESTED", true),
            ("-i eth0 -j DROP", false),
            ("-s 10.1.0.0/16 -j DROP", false),
            ("! -d 10.1.0.0/16 -j DROP", false),
            ("-p tcp -j REJECT", false),
            ("-m conntrack --ctstate INVALID -j DROP", false),
            ("-m comment --comment \"-j DROP\" -j LOG", false),
            ("-i eth0 -j DROPS", false),
            ("-j RETURNS", false),
            ("-j GOES", false),
            ("-j USER", false),
            ("-j EMPTY", false),
            ("-j LOOP", false),
            ("-m comment --comment DROP", false),
            ("", false),
        ] {
            assert_eq!(filter.ends_all(rule), ends, "{rule}");
        }
    }

    #[test]
    fn a_chain_that_decides_about_packets_does_not_only_refuse_them() {
        let saved = Saved::read(
            "*filter\n:FORWARD ACCEPT [0:0]\n\
             :DROPS - [0:0]\n-A DROPS -m limit --limit 3/min -j LOG\n-A DROPS -j DROP\n\
             :NESTED - [0:0]\n-A NESTED -m comment --comment x\n-A NESTED -j DROPS\n\
             :SELECTS - [0:0]\n-A SELECTS -s 10.9.0.0/16 -j DROP\n-A SELECTS -j ACCEPT\n\
             :POLICY - [0:0]\n-A POLICY -p icmp -j ACCEPT\n-A POLICY -j DROP\n\
             :QUEUES - [0:0]\n-A QUEUES -j NFQUEUE --queue-num 1\n\
             :USER - [0:0]\n-A USER -j RETURN\n:EMPTY - [0:0]\n\
             :LOOP - [0:0]\n-A LOOP -j LOOP\nCOMMIT\n",
        );
        let filter = saved.table("filter").unwrap();
        for (rule, refuses) in [
            ("-j REJECT --reject-with icmp-host-prohibited", true),
            ("-m comment --comment \"no more\" -j DROP", true),
            ("-j RETURN", true),
            ("-j DROPS", true),
            ("-g DROPS", true),
            ("-j NESTED", true),
            ("-j QUEUE", false),
            ("-j NFQUEUE --queue-num 1", false),
            ("-j NFQUEUE --queue-num 1 --queue-bypass", false),
            ("-j ACCEPT", false),
            ("-j SELECTS", false),
            ("-j POLICY", false),
            ("-j QUEUES", false),
            ("-i eth0 -j DROP", false),
            ("-j USER", false),
            ("-j EMPTY", false),
            ("-j LOOP", false),
        ] {
            assert_eq!(filter.only_refuses(rule), refuses, "{rule}");
        }
    }
}
