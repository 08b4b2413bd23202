//! The rules that a network needs, as values without kernel or tools.
//!
//! The first rule of a chain that matches a packet decides.
//!
//! **Source**: flannel `pkg/trafficmngr/iptables: masqRules, forwardRules`. In nftables, Go flannel
//! has another fourth rule, which makes the last rule unreachable. Here both modes have the rules
//! of iptables. Go flannel has no rules about encryption.

use std::fmt;
use std::net::IpAddr;

use flannel_core::Subnet;
use flannel_core::address::{Dual, Family};
use flannel_core::object::LinkName;

use crate::error::Error;
use crate::masquerade::{Masquerade, PortRange};
use crate::ownership::Ownership;

/// The bit that kube-proxy sets in the mark of the packets that it masquerades.
pub const KUBE_PROXY_MARK: u32 = 0x4000;

/// The rules that a network asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RuleOptions {
    /// Masquerade packets from pods to destinations outside the pod network, in the families that
    /// have a value (`--ip-masq`).
    pub masquerade: Dual<Masquerade>,
    /// Accept forwarded packets from and to pods (`--iptables-forward-rules`).
    pub forward: bool,
    /// Drop packets to the pods of other nodes, unless they leave by one of these devices, which
    /// encrypt (`RequireEncryption`). If it is `None`, they may leave by every device.
    pub encrypted: Option<Vec<LinkName>>,
}

/// The defaults of flanneld's options: accept forwarded packets, do not masquerade.
impl Default for RuleOptions {
    fn default() -> Self {
        Self { masquerade: Dual::default(), forward: true, encrypted: None }
    }
}

/// The rules of one network for each address family. The default has no rules, and a firewall with
/// it removes all rules of flannel. Otherwise a firewall removes only rules for the same pod
/// networks, and for [former](Self::with_former) ones: another daemon on the host has other
/// networks.
///
/// ```
/// use flannel_core::address::{Dual, Family};
/// use flannel_firewall::{Chain, Masquerade, Rules, RuleOptions};
///
/// let network = Dual { v4: Some("10.1.0.0/16".parse()?), v6: None };
/// let own = Dual { v4: Some("10.1.7.0/24".parse()?), v6: None };
/// let options = RuleOptions { masquerade: Masquerade::both(true), ..RuleOptions::default() };
/// let rules = Rules::new(&network, &own, &options)?;
/// let rules = rules.of(Family::V4, Chain::Postrouting);
/// let masquerade = "from 10.1.0.0/16 to not 224.0.0.0/4: masquerade, fully random";
/// assert_eq!(rules[4].to_string(), masquerade);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Rules {
    chains: Dual<[Vec<Rule>; Chain::ALL.len()]>,
    ownership: Ownership,
}

impl Rules {
    /// The rules for pods in `networks` on the node that owns `subnets`.
    ///
    /// A family without a network gets no rules. A family without a subnet gets the rules that do
    /// not need it.
    ///
    /// # Errors
    /// A network or subnet is of the wrong family, or is the whole address space. Or the options of
    /// masquerading do not fit a family that has a network.
    pub fn new(
        networks: &Dual<Subnet>,
        subnets: &Dual<Subnet>,
        rule_options: &RuleOptions,
    ) -> Result<Self, Error> {
        for (what, dual) in [("pod network", networks), ("own subnet", subnets)] {
            for (family, subnet) in dual.iter() {
                if subnet.family() != family || subnet.is_everything() {
                    return Err(Error::Subnet { what, family, subnet: *subnet });
                }
            }
        }
        for (family, options) in rule_options.masquerade.iter() {
            if networks[family].is_some() {
                options.check(family)?;
            }
        }
        let rules = networks.map(|family, network| {
            let options = rule_options.masquerade[family].as_ref();
            let masquerade = options.map(|options| options.rules(*network, subnets[family]));
            let forward = rule_options.forward.then(|| forward(*network));
            let encrypted = rule_options.encrypted.as_deref();
            let encryption = encrypted.map(|by| encryption(*network, subnets[family], by));
            let unrouted = encrypted.map(|_| unrouted(*network, subnets[family]));
            [masquerade, forward, encryption, unrouted].map(Option::unwrap_or_default)
        });
        let ownership = Ownership::Networks(networks.values().copied().collect());
        Ok(Self { chains: rules, ownership })
    }

    /// These rules, and none for the pod networks that this daemon had earlier.
    #[must_use]
    pub fn with_former(mut self, networks: impl IntoIterator<Item = Subnet>) -> Self {
        if let Ownership::Networks(all) = &mut self.ownership {
            for network in networks {
                if !all.contains(&network) {
                    all.push(network);
                }
            }
        }
        self
    }

    /// No rules for these pod networks. Rules for other ones may exist.
    pub fn none_for(networks: impl IntoIterator<Item = Subnet>) -> Self {
        let ownership = Ownership::Networks(Vec::new());
        Self { chains: Dual::default(), ownership }.with_former(networks)
    }

    /// The networks whose rules these replace, also former ones.
    pub(crate) fn networks(&self) -> &[Subnet] {
        match &self.ownership {
            Ownership::Everything => &[],
            Ownership::Networks(networks) => networks,
        }
    }

    /// No rules, with the same networks.
    pub(crate) fn cleared(&self) -> Self {
        Self { chains: Dual::default(), ownership: self.ownership.clone() }
    }

    /// The rules that a firewall may change.
    pub(crate) fn ownership(&self) -> &Ownership {
        &self.ownership
    }

    /// These rules without the chain [`Chain::Unrouted`].
    pub(crate) fn without_unrouted(&self) -> Self {
        let mut rules = self.clone();
        for family in Family::BOTH {
            if let Some(chains) = &mut rules.chains[family] {
                chains[Chain::Unrouted as usize].clear();
            }
        }
        rules
    }

    /// The rules of a chain in order. Empty if the chain is not desired.
    pub fn of(&self, family: Family, chain: Chain) -> &[Rule] {
        self.chains[family].as_ref().map_or(&[], |chains| &chains[chain as usize])
    }

    /// Whether the family has rules.
    pub fn has(&self, family: Family) -> bool {
        Chain::ALL.iter().any(|chain| !self.of(family, *chain).is_empty())
    }
}

/// A chain of flannel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Chain {
    /// For packets that leave the host: masquerading.
    Postrouting,
    /// For forwarded packets.
    Forward,
    /// For packets that leave the host: drops packets that must be encrypted. It is in the hook
    /// `postrouting`, which sees forwarded packets and packets of the host with the device by which
    /// they leave. The hook `output` sees the device before address translation, which is the
    /// wrong device for a packet to a Kubernetes service that is translated there.
    Encryption,
    /// For packets that arrive: counts packets to pods of other nodes without a route. With
    /// `RequireEncryption` a blackhole route drops them, which the kernel does not count, and
    /// [`Self::Encryption`] does not see them. Only in nftables mode, and if the kernel can look
    /// for routes in rules.
    Unrouted,
}

impl Chain {
    /// All chains, in the order in which they are written.
    pub(crate) const ALL: [Self; 4] =
        [Self::Postrouting, Self::Forward, Self::Encryption, Self::Unrouted];
}

/// A verdict for packets that match all conditions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Rule {
    /// All these bits are set in the packet's mark. `None` matches any mark.
    pub mark: Option<u32>,
    /// The source address. `None` matches any address.
    pub source: Option<Side>,
    /// The destination address. `None` matches any address.
    pub destination: Option<Side>,
    /// The device by which the packet leaves. `None` matches any device.
    pub device: Option<LinkName>,
    /// The protocol of the packet. `None` matches any protocol.
    pub protocol: Option<Protocol>,
    /// Whether the rule matches only packets whose destination has no route, or a route that drops
    /// them.
    pub unrouted: bool,
    /// The verdict.
    pub verdict: Verdict,
}

impl Rule {
    /// A rule about packets from and to these addresses, of any mark, device and protocol.
    pub(crate) const fn new(
        source: Option<Side>,
        destination: Option<Side>,
        verdict: Verdict,
    ) -> Self {
        let mark = None;
        let device = None;
        let protocol = None;
        Self { mark, source, destination, device, protocol, unrouted: false, verdict }
    }
}

/// A condition on an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Side {
    /// It is in the subnet.
    In(Subnet),
    /// It is not in the subnet.
    NotIn(Subnet),
}

/// The verdict about a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Verdict {
    /// Ends the chain without a verdict. Later rules of the chain do not see the packet.
    Return,
    /// Accepts the packet.
    Accept,
    /// Drops the packet, and counts it.
    Drop,
    /// Counts the packet, and goes on with the next rule.
    Count,
    /// Replaces the source address.
    Masquerade(Nat),
}

/// The new source of a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Nat {
    /// The address. `None` for the address of the device by which the packet leaves.
    pub source: Option<IpAddr>,
    /// The ports of which one is chosen. `None` for all ports.
    pub ports: Option<PortRange>,
    /// Choose a random source port. False keeps the source port if it is free.
    pub fully_random: bool,
}

/// A protocol with ports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Protocol {
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
    /// SCTP.
    Sctp,
}

impl Protocol {
    /// All protocols.
    pub(crate) const ALL: [Self; 3] = [Self::Tcp, Self::Udp, Self::Sctp];

    /// Its number in packets.
    pub(crate) fn number(self) -> u8 {
        match self {
            Self::Tcp => 6,
            Self::Udp => 17,
            Self::Sctp => 132,
        }
    }
}

/// The name that the tools use.
impl fmt::Display for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Tcp => "tcp",
            Self::Udp => "udp",
            Self::Sctp => "sctp",
        })
    }
}

impl fmt::Display for Nat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.source {
            Some(source) => write!(f, "source {source}")?,
            None => f.write_str("masquerade")?,
        }
        if let Some(ports) = self.ports {
            write!(f, " port {ports}")?;
        }
        f.write_str(if self.fully_random { ", fully random" } else { "" })
    }
}

impl fmt::Display for Side {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::In(subnet) => write!(f, "{subnet}"),
            Self::NotIn(subnet) => write!(f, "not {subnet}"),
        }
    }
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut conditions = Vec::new();
        conditions.extend(self.mark.map(|mark| format!("mark {mark:#x}/{mark:#x}")));
        conditions.extend(self.source.map(|side| format!("from {side}")));
        conditions.extend(self.destination.map(|side| format!("to {side}")));
        conditions.extend(self.device.map(|device| format!("by {device}")));
        conditions.extend(self.protocol.map(|protocol| format!("of {protocol}")));
        if self.unrouted {
            conditions.push("without a route".to_owned());
        }
        if conditions.is_empty() {
            conditions.push("all".to_owned());
        }
        write!(f, "{}: ", conditions.join(" "))?;
        match self.verdict {
            Verdict::Return => f.write_str("return"),
            Verdict::Accept => f.write_str("accept"),
            Verdict::Drop => f.write_str("drop"),
            Verdict::Count => f.write_str("count"),
            Verdict::Masquerade(nat) => nat.fmt(f),
        }
    }
}

fn forward(network: Subnet) -> Vec<Rule> {
    let inside = Some(Side::In(network));
    vec![Rule::new(inside, None, Verdict::Accept), Rule::new(None, inside, Verdict::Accept)]
}

/// Only destinations decide, because a source may be translated. Packets to this node's own pods,
/// and packets by `lo`, do not leave the host.
fn encryption(network: Subnet, own: Option<Subnet>, devices: &[LinkName]) -> Vec<Rule> {
    let to_pods = Some(Side::In(network));
    let own = own.map(|own| Rule::new(None, Some(Side::In(own)), Verdict::Return));
    let mut rules: Vec<Rule> = own.into_iter().collect();
    let loopback = "lo".parse().expect("a valid name");
    for device in [loopback].iter().chain(devices) {
        rules.push(Rule { device: Some(*device), ..Rule::new(None, to_pods, Verdict::Return) });
    }
    rules.push(Rule::new(None, to_pods, Verdict::Drop));
    rules
}

fn unrouted(network: Subnet, own: Option<Subnet>) -> Vec<Rule> {
    let mut rules = vec![Rule::new(None, Some(Side::NotIn(network)), Verdict::Return)];
    rules.extend(own.map(|own| Rule::new(None, Some(Side::In(own)), Verdict::Return)));
    rules.push(Rule { unrouted: true, ..Rule::new(None, None, Verdict::Count) });
    rules
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn dual(v4: &str, v6: &str) -> Dual<Subnet> {
        let some = |text: &str| (!text.is_empty()).then(|| text.parse().unwrap());
        Dual { v4: some(v4), v6: some(v6) }
    }

    #[allow(clippy::needless_pass_by_value, reason = "the callers are shorter")]
    pub(crate) fn rules(rule_options: RuleOptions) -> Rules {
        let networks = dual("10.1.0.0/16", "fd00:1::/48");
        Rules::new(&networks, &dual("10.1.7.0/24", "fd00:1:0:7::/64"), &rule_options).unwrap()
    }

    fn text(rules: &[Rule]) -> Vec<String> {
        rules.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn the_rules_are_those_of_go_flannel() {
        let rules =
            rules(RuleOptions { masquerade: Masquerade::both(true), ..RuleOptions::default() });
        for (family, network, own, multicast) in [
            (Family::V4, "10.1.0.0/16", "10.1.7.0/24", "224.0.0.0/4"),
            (Family::V6, "fd00:1::/48", "fd00:1:0:7::/64", "ff00::/8"),
        ] {
            assert_eq!(
                text(rules.of(family, Chain::Postrouting)),
                [
                    "mark 0x4000/0x4000: return".to_owned(),
                    format!("from {own} to {network}: return"),
                    format!("from {network} to {own}: return"),
                    format!("from not {network} to {own}: return"),
                    format!("from {network} to not {multicast}: masquerade, fully random"),
                    format!("from not {network} to {network}: masquerade, fully random"),
                ]
            );
            let forward = [format!("from {network}: accept"), format!("to {network}: accept")];
            assert_eq!(text(rules.of(family, Chain::Forward)), forward);
        }
    }

    #[test]
    fn only_the_rules_of_enabled_options_exist() {
        let default = rules(RuleOptions::default());
        assert!(default.of(Family::V4, Chain::Postrouting).is_empty());
        assert_eq!(default.of(Family::V6, Chain::Forward).len(), 2);
        let plain = rules(RuleOptions {
            masquerade: Masquerade::both(false),
            forward: false,
            encrypted: None,
        });
        assert!(plain.of(Family::V6, Chain::Forward).is_empty());
        assert!(text(plain.of(Family::V6, Chain::Postrouting))[5].ends_with(": masquerade"));
        assert!(!Rules::default().has(Family::V4));
    }

    #[test]
    fn each_family_is_masqueraded_by_its_own_options() {
        let masquerade = Dual { v4: Some(Masquerade::default()), v6: None };
        let only_v4 = rules(RuleOptions { masquerade, ..RuleOptions::default() });
        assert_eq!(only_v4.of(Family::V4, Chain::Postrouting).len(), 6);
        assert!(only_v4.of(Family::V6, Chain::Postrouting).is_empty());
        assert_eq!(only_v4.of(Family::V6, Chain::Forward).len(), 2);
    }

    #[test]
    fn encryption_is_required_of_packets_that_leave_for_other_pods() {
        let by = |devices: &[&str]| {
            let encrypted = devices.iter().map(|device| device.parse().unwrap()).collect();
            rules(RuleOptions { forward: false, encrypted: Some(encrypted), ..Default::default() })
        };
        for (family, network, own) in [
            (Family::V4, "10.1.0.0/16", "10.1.7.0/24"),
            (Family::V6, "fd00:1::/48", "fd00:1:0:7::/64"),
        ] {
            let of = |rules: &Rules| text(rules.of(family, Chain::Encryption));
            let first = [format!("to {own}: return"), format!("to {network} by lo: return")];
            let by_wg = |n| format!("to {network} by wg{n}: return");
            let drop = format!("to {network}: drop");
            let with = |more: &[&str]| {
                [&first[..], &more.iter().map(ToString::to_string).collect::<Vec<_>>()].concat()
            };
            assert_eq!(of(&by(&["wg0", "wg1"])), with(&[&by_wg(0), &by_wg(1), &drop]));
            assert_eq!(of(&by(&[])), with(&[&drop]), "no device encrypts");
            assert_eq!(
                text(by(&[]).of(family, Chain::Unrouted)),
                [
                    format!("to not {network}: return"),
                    format!("to {own}: return"),
                    "without a route: count".to_owned()
                ]
            );
            assert_eq!(of(&rules(RuleOptions::default())), [""; 0]);
        }
        assert!(by(&[]).has(Family::V4) && by(&[]).of(Family::V4, Chain::Forward).is_empty());
        // On a kernel that cannot look for routes.
        let without = by(&[]).without_unrouted();
        assert!(without.of(Family::V4, Chain::Unrouted).is_empty());
        assert_eq!(
            without.of(Family::V6, Chain::Encryption),
            by(&[]).of(Family::V6, Chain::Encryption)
        );
    }

    #[test]
    fn a_family_without_a_network_has_no_rules_and_one_without_a_subnet_has_fewer() {
        let rule_options =
            RuleOptions { masquerade: Masquerade::both(true), ..RuleOptions::default() };
        let rules =
            Rules::new(&dual("10.1.0.0/16", ""), &dual("", "fd00:1:0:7::/64"), &rule_options)
                .unwrap();
        assert!(!rules.has(Family::V6));
        assert_eq!(
            text(rules.of(Family::V4, Chain::Postrouting)),
            [
                "mark 0x4000/0x4000: return",
                "from 10.1.0.0/16 to not 224.0.0.0/4: masquerade, fully random",
                "from not 10.1.0.0/16 to 10.1.0.0/16: masquerade, fully random",
            ]
        );
    }

    #[test]
    fn impossible_subnets_are_refused() {
        let swapped = Dual { v4: Some("fd00::/48".parse().unwrap()), v6: None };
        let error = Rules::new(&swapped, &Dual::default(), &RuleOptions::default()).unwrap_err();
        assert!(error.to_string().contains("IPv4 pod network fd00::/48"), "{error}");
        let error =
            Rules::new(&dual("10.0.0.0/8", ""), &dual("0.0.0.0/0", ""), &RuleOptions::default())
                .unwrap_err();
        assert!(error.to_string().contains("own subnet 0.0.0.0/0"), "{error}");
    }
}
