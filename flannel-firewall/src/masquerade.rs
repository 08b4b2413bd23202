//! The options of masquerading, and the rules that they mean.
//!
//! With the default options the rules are those of Go flannel. The options change only packets
//! from pods to addresses outside the pod network. Packets to pods of other nodes always get the
//! address of the device by which they leave, because pods answer only such an address through the
//! tunnel.
//!
//! **Source**: flannel `pkg/trafficmngr/iptables: masqRules`. Go flannel has no options about
//! exclusions, addresses, ports and devices.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::str::FromStr;

use flannel_core::Subnet;
use flannel_core::address::{Dual, Family};
use flannel_core::object::LinkName;

use crate::error::Error;
use crate::rules::{KUBE_PROXY_MARK, Nat, Protocol, Rule, Side, Verdict};

/// How packets of one family are masqueraded. The default is what Go flannel does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Masquerade {
    /// Choose a random source port for each masqueraded connection. False
    /// (`--ip-masq-fully-random-disable`) keeps the source port if it is free.
    pub fully_random: bool,
    /// Packets from pods to these networks keep their source (`--ip-masq-exclude`, `IPMasqExclude`
    /// of the network config). Networks of another family have no effect.
    pub exclude: Vec<Subnet>,
    /// Packets from pods leave with this address (`--ip-masq-source`). It must be an address to
    /// which answers come back to this host. `None` for the address of the device.
    pub source: Option<IpAddr>,
    /// The source ports of packets of TCP, UDP and SCTP (`--ip-masq-ports`). `None` for any port.
    pub ports: Option<PortRange>,
    /// Only packets that leave by one of these devices are masqueraded (`--ip-masq-interface`).
    /// Empty for all devices.
    pub devices: Vec<LinkName>,
}

impl Masquerade {
    /// What Go flannel does, with random ports or without.
    pub const fn plain(fully_random: bool) -> Self {
        Self { fully_random, exclude: Vec::new(), source: None, ports: None, devices: Vec::new() }
    }

    /// What Go flannel does, for both families.
    pub const fn both(fully_random: bool) -> Dual<Self> {
        Dual { v4: Some(Self::plain(fully_random)), v6: Some(Self::plain(fully_random)) }
    }

    /// Checks the options for a family.
    ///
    /// # Errors
    /// The source is of another family, or an exclusion is the whole address space.
    pub(crate) fn check(&self, family: Family) -> Result<(), Error> {
        if let Some(address) = self.source.filter(|source| Family::of(*source) != family) {
            return Err(Error::Source { family, address });
        }
        match self.excluded(family).find(|subnet| subnet.is_everything()) {
            Some(subnet) => Err(Error::Subnet { what: "exclusion", family, subnet }),
            None => Ok(()),
        }
    }

    /// The exclusions of a family, each once.
    fn excluded(&self, family: Family) -> impl Iterator<Item = Subnet> {
        let is_new = |n: usize| !self.exclude[..n].contains(&self.exclude[n]);
        let all = self.exclude.iter().enumerate();
        all.filter(move |(n, subnet)| subnet.family() == family && is_new(*n)).map(|(_, it)| *it)
    }

    /// The rules for pods in `network` on the node that owns `own`.
    pub(crate) fn rules(&self, network: Subnet, own: Option<Subnet>) -> Vec<Rule> {
        let plain = Nat { source: None, ports: None, fully_random: self.fully_random };
        let inside = Some(Side::In(network));
        let outside = Some(Side::NotIn(network));
        let unicast = Some(Side::NotIn(multicast(network.family())));
        // kube-proxy masquerades these packets.
        let mark = Some(KUBE_PROXY_MARK);
        let mut rules = vec![Rule { mark, ..Rule::new(None, None, Verdict::Return) }];
        if let Some(own) = own.map(Side::In) {
            rules.push(Rule::new(Some(own), inside, Verdict::Return));
            rules.push(Rule::new(inside, Some(own), Verdict::Return));
            // Pods of this node see the address of a client outside the pod network.
            rules.push(Rule::new(outside, Some(own), Verdict::Return));
        }
        for subnet in self.excluded(network.family()) {
            rules.push(Rule::new(inside, Some(Side::In(subnet)), Verdict::Return));
        }
        if self.source.is_some() || self.ports.is_some() || !self.devices.is_empty() {
            rules.push(Rule::new(inside, inside, Verdict::Masquerade(plain)));
        }
        let any = [None];
        let devices: Vec<_> = self.devices.iter().copied().map(Some).collect();
        for device in if devices.is_empty() { &any[..] } else { &devices } {
            for (protocol, ports) in self.protocols() {
                let nat = Nat { source: self.source, ports, ..plain };
                let rule = Rule::new(inside, unicast, Verdict::Masquerade(nat));
                rules.push(Rule { device: *device, protocol, ..rule });
            }
        }
        // Without this rule, pods of other nodes would not answer through this node.
        rules.push(Rule::new(outside, inside, Verdict::Masquerade(plain)));
        rules
    }

    /// The protocols that have rules of their own, with their ports, and at last all others.
    fn protocols(&self) -> impl Iterator<Item = (Option<Protocol>, Option<PortRange>)> {
        let with_ports = self.ports.into_iter().flat_map(|ports| {
            Protocol::ALL.into_iter().map(move |protocol| (Some(protocol), Some(ports)))
        });
        with_ports.chain([(None, None)])
    }
}

impl Default for Masquerade {
    fn default() -> Self {
        Self::plain(true)
    }
}

/// A range of ports, of which each is at least 1. In text it is `1024-65535`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PortRange {
    first: u16,
    last: u16,
}

impl PortRange {
    /// The ports from `first` to `last`. `None` if `first` is 0 or above `last`.
    pub fn new(first: u16, last: u16) -> Option<Self> {
        (0 < first && first <= last).then_some(Self { first, last })
    }

    /// The first port.
    pub const fn first(self) -> u16 {
        self.first
    }

    /// The last port.
    pub const fn last(self) -> u16 {
        self.last
    }
}

impl fmt::Display for PortRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.first, self.last)
    }
}

impl FromStr for PortRange {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let range = text.split_once('-').and_then(|(first, last)| {
            let port = |text: &str| text.parse().ok().filter(|_| !text.starts_with('+'));
            Self::new(port(first)?, port(last)?)
        });
        range.ok_or_else(|| "expected two ports, for example 1024-65535".to_owned())
    }
}

fn multicast(family: Family) -> Subnet {
    let all = match family {
        Family::V4 => Subnet::new(Ipv4Addr::new(224, 0, 0, 0).into(), 4),
        Family::V6 => Subnet::new(Ipv6Addr::new(0xff00, 0, 0, 0, 0, 0, 0, 0).into(), 8),
    };
    all.expect("these lengths exist")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(options: &Masquerade) -> Vec<String> {
        let rules =
            options.rules("10.1.0.0/16".parse().unwrap(), Some("10.1.7.0/24".parse().unwrap()));
        rules.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn exclusions_come_before_the_rules_that_masquerade_and_after_those_of_go() {
        let plain = text(&Masquerade::default());
        let exclude = ["172.16.0.0/12", "fd00::/8", "192.0.2.7/32", "172.16.0.0/12"];
        let exclude = exclude.map(|subnet| subnet.parse().unwrap()).to_vec();
        let rules = text(&Masquerade { exclude, ..Masquerade::default() });
        assert_eq!(rules[..4], plain[..4]);
        assert_eq!(rules[6..], plain[4..]);
        assert_eq!(
            rules[4..6],
            [
                "from 10.1.0.0/16 to 172.16.0.0/12: return",
                "from 10.1.0.0/16 to 192.0.2.7/32: return"
            ]
        );
    }

    #[test]
    fn address_ports_and_devices_concern_only_packets_that_leave_the_pod_network() {
        let options = Masquerade {
            fully_random: true,
            exclude: Vec::new(),
            source: Some("192.0.2.7".parse().unwrap()),
            ports: PortRange::new(1024, 2047),
            devices: vec!["eth1".parse().unwrap()],
        };
        let out = "from 10.1.0.0/16 to not 224.0.0.0/4 by eth1";
        let nat = "source 192.0.2.7";
        let random = "fully random";
        assert_eq!(
            text(&options)[4..],
            [
                "from 10.1.0.0/16 to 10.1.0.0/16: masquerade, fully random".to_owned(),
                format!("{out} of tcp: {nat} port 1024-2047, {random}"),
                format!("{out} of udp: {nat} port 1024-2047, {random}"),
                format!("{out} of sctp: {nat} port 1024-2047, {random}"),
                format!("{out}: {nat}, {random}"),
                "from not 10.1.0.0/16 to 10.1.0.0/16: masquerade, fully random".to_owned(),
            ]
        );
    }

    #[test]
    fn options_without_a_meaning_are_refused() {
        let other = Masquerade { source: "fd00::1".parse().ok(), ..Masquerade::default() };
        let error = other.check(Family::V4).unwrap_err().to_string();
        assert!(error.contains("fd00::1") && error.contains("IPv4"), "{error}");
        other.check(Family::V6).unwrap();
        let all = Masquerade { exclude: vec!["::/0".parse().unwrap()], ..Masquerade::default() };
        let error = all.check(Family::V6).unwrap_err().to_string();
        assert!(error.contains("exclusion ::/0"), "{error}");
        all.check(Family::V4).unwrap();
    }

    #[test]
    fn a_range_of_ports_has_two_ports_in_order() {
        assert_eq!("1-65535".parse(), Ok(PortRange { first: 1, last: 65535 }));
        assert_eq!("53-53".parse::<PortRange>().unwrap().to_string(), "53-53");
        for wrong in ["", "1", "0-5", "5-4", "1-65536", "+1-2", "1-2-3", "a-b"] {
            assert!(wrong.parse::<PortRange>().is_err(), "{wrong}");
        }
    }
}
