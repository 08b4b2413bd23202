//! Checks of settings of other programs that lead packets of pods elsewhere, or that see them
//! first: routing rules, and what is attached to tunnel devices.

use std::collections::BTreeSet;
use std::net::IpAddr;

use flannel_api::Severity;
use flannel_core::address::Family;
use flannel_core::{Remedy, Subnet};
use flannel_netlink::foreign::{Attached, Rule, RuleAction, Share, TableRoute};

use super::HostFacts;
use crate::finding::{Check, Finding};

/// `RT_TABLE_DEFAULT`.
const DEFAULT: u32 = 253;
/// `RT_TABLE_MAIN`, which has flannel's routes.
pub(super) const MAIN: u32 = 254;
/// `RT_TABLE_LOCAL`.
const LOCAL: u32 = 255;
/// Queueing disciplines that neither delay nor drop packets unless the device is congested, as no
/// tunnel device is. A device that is down, or has no carrier yet, has `noop`.
const HARMLESS: [&str; 6] = ["noop", "noqueue", "pfifo_fast", "fq_codel", "fq", "mq"];
/// The largest number of rules that have a finding each.
const MOST_RULES: usize = 5;

/// What a rule does with packets to a subnet.
enum Way {
    /// The next rule decides.
    Undecided,
    /// They take flannel's route, or one like it.
    Right,
    /// They do not. The words follow "packets to a subnet".
    Wrong(String),
}

impl HostFacts {
    /// The tables besides the usual ones in which rules look up packets to pods, each with the pod
    /// network that its routes matter for.
    pub(super) fn foreign_tables(&self) -> BTreeSet<(u32, Subnet)> {
        let table = |network: &Subnet, rule: &Rule| match rule.action {
            RuleAction::Table(DEFAULT | MAIN | LOCAL) => None,
            RuleAction::Table(table) => {
                let share = self.share(rule, network, network);
                (share != Share::None).then_some((table, *network))
            }
            _ => None,
        };
        let of = |network: Subnet| self.rules.iter().filter_map(move |rule| table(&network, rule));
        self.pod_networks.values().flat_map(|network| of(*network)).collect()
    }

    /// The share of pods' packets to a subnet of their network that a rule applies to.
    fn share(&self, rule: &Rule, network: &Subnet, to: &Subnet) -> Share {
        if rule.family != network.family() {
            return Share::None;
        }
        let is_uplink = |device: &str| self.uplink.is_some_and(|uplink| uplink.as_str() == device);
        applies(rule, network, to, |device| {
            self.has_pods(device) || (self.tunnels.is_empty() && is_uplink(device))
        })
    }

    /// Whether packets from or to pods of this node pass the device: it is a tunnel or a bridge.
    pub(super) fn has_pods(&self, device: &str) -> bool {
        self.tunnels.iter().any(|tunnel| tunnel.as_str() == device)
            || self.addresses.iter().any(|(name, address)| {
                let own = self.own[Family::of(*address)];
                name.as_str() == device && own.is_some_and(|own| own.contains(*address))
            })
    }

    /// What a rule does with the packets to a subnet, whose node has this public address.
    fn way(&self, rule: &Rule, to: &Subnet, public: Option<IpAddr>) -> Way {
        let is_used = |dst: &Subnet| rule.suppressed.is_none_or(|len| dst.len() > len);
        let table = match rule.action {
            RuleAction::Table(MAIN) if is_used(to) => return Way::Right,
            RuleAction::Table(DEFAULT | MAIN | LOCAL) | RuleAction::Goto(_) | RuleAction::Other => {
                return Way::Undecided;
            }
            RuleAction::Table(table) => table,
            RuleAction::Discard(kind) => return Way::Wrong(format!("are discarded ({kind})")),
        };
        let is_like_ours = |route: &TableRoute| {
            route.link.is_some_and(|link| self.has_pods(link.as_str()))
                || (route.gateway.is_some() && route.gateway == public)
        };
        let routes = self.tables.get(&(table, rule.family)).into_iter().flatten();
        let matching = routes.filter(|route| route.dst.overlaps(to) && is_used(&route.dst));
        match matching.max_by_key(|route| route.dst.len()) {
            None => Way::Undecided,
            Some(route) if route.throw => Way::Undecided,
            Some(route) if is_like_ours(route) => Way::Right,
            Some(route) => Way::Wrong(format!("take the route {route} of table {table}")),
        }
    }
}

/// Checks that no rule leads packets past flannel's routes, which are in the main table.
pub(super) fn rules(facts: &HostFacts) -> Vec<Finding> {
    let mut misled = Vec::new();
    let mut undecided = Vec::new();
    for (family, network) in facts.pod_networks.iter() {
        let checked = FamilyRules::new(facts, family, network);
        let unled = checked.check(&mut misled);
        // The kernel always has rules, so an empty list could not be read.
        if let Some(to) = unled.filter(|_| !checked.rules.is_empty()) {
            let text = format!(
                "no rule leads packets to {to} to the main table, which has flannel's routes"
            );
            let repair = format!("{} rule add pref 32766 lookup main", ip_command(family));
            undecided.push(Finding::error(Check::IpRule, text).with_command(repair));
        }
    }
    misled.sort_by_key(|finding: &Finding| finding.severity);
    let more = misled.len().saturating_sub(MOST_RULES);
    misled.truncate(MOST_RULES);
    if more > 0 {
        let text = format!("{more} more rules lead packets of pods past flannel's routes");
        let remedy =
            Remedy::run("ip rule show; ip -6 rule show").remark("then delete the wrong ones");
        misled.push(Finding::warning(Check::IpRule, text).with_remedy(remedy));
    }
    misled.extend(undecided);
    misled
}

/// The command `ip` for a family.
fn ip_command(family: Family) -> &'static str {
    match family {
        Family::V4 => "ip",
        Family::V6 => "ip -6",
    }
}

/// The routing rules of one family.
struct FamilyRules<'a> {
    facts: &'a HostFacts,
    family: Family,
    network: &'a Subnet,
    rules: Vec<&'a Rule>,
}

impl<'a> FamilyRules<'a> {
    fn new(facts: &'a HostFacts, family: Family, network: &'a Subnet) -> Self {
        let rules = facts.rules.iter().filter(|rule| rule.family == family).collect();
        Self { facts, family, network, rules }
    }

    /// Adds the wrong rules to `misled`. Returns the first subnet to which no rule leads packets.
    fn check(&self, misled: &mut Vec<Finding>) -> Option<Subnet> {
        let mut wrong = BTreeSet::new();
        let mut undecided = None;
        for destination in self.destinations() {
            if !self.follow(&destination, &mut wrong, misled) {
                undecided = undecided.or(Some(destination.subnet));
            }
        }
        undecided
    }

    /// The subnets of all nodes in the network.
    fn destinations(&self) -> impl Iterator<Item = Destination> {
        let peers = self.facts.peers.iter().filter_map(|(subnets, public)| {
            let subnet = subnets.family(self.family)?;
            Some(Destination { subnet, public: public[self.family] })
        });
        let own = self.facts.own[self.family].map(|subnet| Destination { subnet, public: None });
        peers.chain(own).filter(|to| self.network.covers(&to.subnet))
    }

    /// Asks one rule after the other, as the kernel does. Adds rules that are not in `wrong` yet to
    /// `misled`. Returns whether a rule decides for all packets.
    fn follow(
        &self,
        to: &Destination,
        wrong: &mut BTreeSet<String>,
        misled: &mut Vec<Finding>,
    ) -> bool {
        let mut next = 0;
        for rule in &self.rules {
            // Packets to the subnet of a node do not come from there.
            let is_between = rule.inverted || rule.src.is_none_or(|src| !to.subnet.covers(&src));
            let share = self.facts.share(rule, self.network, &to.subnet);
            if !is_between || share == Share::None || rule.priority < next {
                continue;
            }
            if let RuleAction::Goto(target) = rule.action {
                // Without a rule of that priority, the kernel asks the next rule.
                if share == Share::All && self.rules.iter().any(|rule| rule.priority == target) {
                    next = target;
                }
                continue;
            }
            match self.facts.way(rule, &to.subnet, to.public) {
                Way::Undecided => continue,
                Way::Right => {}
                Way::Wrong(way) => {
                    if wrong.insert(rule.to_string()) {
                        misled.push(self.finding(rule, &to.subnet, &way));
                    }
                }
            }
            if share == Share::All {
                return true;
            }
        }
        false
    }

    /// The finding on a rule that leads packets to a subnet another way.
    fn finding(&self, rule: &Rule, to: &Subnet, way: &str) -> Finding {
        let severity = if rule.rest == Share::Some { Severity::Warning } else { Severity::Error };
        let text = format!("by the rule of priority {}, packets to {to} {way}", rule.priority);
        let remedy = deletion(ip_command(self.family), rule, &self.rules);
        Finding::new(Check::IpRule, severity, text).with_remedy(remedy)
    }
}

/// The subnet of a node.
struct Destination {
    subnet: Subnet,
    /// The public address of the node; `None` for this node.
    public: Option<IpAddr>,
}

/// The remedy that deletes one of `rules`. The text of a rule lacks some selectors, so another rule
/// with the same priority may have the same text.
fn deletion(ip: &str, rule: &Rule, rules: &[&Rule]) -> Remedy {
    let priority = rule.priority;
    let is_only = rules.iter().filter(|other| other.priority == priority).count() == 1;
    if rule.rest == Share::All && is_only {
        Remedy::run(format!("{ip} rule del {rule}"))
    } else {
        Remedy::run(format!("{ip} rule show pref {priority}")).remark("then delete the right one")
    }
}

/// Checks that no program, filter or queue is attached to a tunnel device.
pub(super) fn attached(facts: &HostFacts) -> Vec<Finding> {
    let mut found = Vec::new();
    for (device, Attached { xdp, filters, queue }) in &facts.attached {
        if !xdp.is_empty() {
            let ids: Vec<String> = xdp.iter().map(ToString::to_string).collect();
            let text = format!(
                "an XDP program (id {}) on {device} gets packets of pods first, and may drop them",
                ids.join(", ")
            );
            let repair = format!("ip link set dev {device} xdp off");
            found.push(Finding::warning(Check::Xdp, text).with_command(repair));
        }
        if !filters.is_empty() {
            let kinds: Vec<&str> = filters.iter().map(String::as_str).collect();
            let text = format!(
                "tc filters ({}) on {device} get packets of pods first, and may drop or change \
                 them",
                kinds.join(", ")
            );
            let repair =
                ["ingress", "egress"].map(|way| format!("tc filter delete dev {device} {way}"));
            found.push(Finding::warning(Check::TcFilter, text).with_command(repair.join("; ")));
        }
        if let Some(queue) = queue.as_ref().filter(|queue| !HARMLESS.contains(&queue.as_str())) {
            let text = format!(
                "packets that leave through {device} wait in a queue ({queue}), which may delay or \
                 drop them"
            );
            let repair = format!("tc qdisc delete dev {device} root");
            found.push(Finding::warning(Check::Qdisc, text).with_command(repair));
        }
    }
    found
}

/// The share of the packets from addresses in `src` to all addresses in `dst` that a rule applies
/// to. `arrive_on` returns whether such packets may arrive on a device.
fn applies(rule: &Rule, src: &Subnet, dst: &Subnet, arrive_on: impl Fn(&str) -> bool) -> Share {
    let of = |selector: &Option<Subnet>, all: &Subnet| match selector {
        Some(selected) if !selected.overlaps(all) => Share::None,
        Some(selected) if !selected.covers(all) => Share::Some,
        _ => Share::All,
    };
    let iif = match &rule.iif {
        Some(device) if !arrive_on(device) => Share::None,
        Some(_) => Share::Some,
        None => Share::All,
    };
    let selected = rule.rest.max(iif).max(of(&rule.src, src)).max(of(&rule.dst, dst));
    match (rule.inverted, selected) {
        (true, Share::All) => Share::None,
        (true, Share::None) => Share::All,
        (_, share) => share,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rule_applies_to_the_packets_that_all_selectors_match() {
        let subnet = |text: &str| text.parse::<Subnet>().unwrap();
        let pods = subnet("10.1.0.0/16");
        let peer = subnet("10.1.7.0/24");
        let any = Rule {
            family: Family::V4,
            priority: 100,
            inverted: false,
            src: None,
            dst: None,
            iif: None,
            rest: Share::All,
            suppressed: None,
            action: RuleAction::Table(7),
        };
        let found = |rule: &Rule| applies(rule, &pods, &peer, |device| device == "cni0");
        for (src, dst, iif, rest, share) in [
            (None, None, None, Share::All, Share::All),
            (Some("10.0.0.0/8"), None, None, Share::All, Share::All),
            (Some("10.1.5.0/24"), None, None, Share::All, Share::Some),
            (Some("192.0.2.1/32"), None, None, Share::All, Share::None),
            (None, Some("10.1.0.0/16"), None, Share::All, Share::All),
            (None, Some("10.1.7.9/32"), None, Share::All, Share::Some),
            (None, Some("10.1.8.0/24"), None, Share::All, Share::None),
            (None, None, Some("cni0"), Share::All, Share::Some),
            (None, None, Some("eth1"), Share::All, Share::None),
            (None, Some("10.1.0.0/16"), None, Share::None, Share::None),
        ] {
            let src = src.map(subnet);
            let dst = dst.map(subnet);
            let iif = iif.map(str::to_owned);
            let mut rule = Rule { src, dst, iif, rest, ..any.clone() };
            assert_eq!(found(&rule), share, "{rule}");
            rule.inverted = true;
            let rest = match share {
                Share::All => Share::None,
                Share::Some => Share::Some,
                Share::None => Share::All,
            };
            assert_eq!(found(&rule), rest, "{rule}");
        }
    }
}
