//! The choice of the interface: selectors are tried in a fixed order, and the first match is used.

use std::fmt;
use std::net::IpAddr;

use flannel_core::address::{Dual, Family};
use flannel_core::backend::ExternalInterface;
use flannel_core::kernel::KernelError;
use flannel_core::object::LinkName;
use regex_lite::Regex;

use super::selectors::Selector;
use super::{Facts, Interface, Selectors};

/// Why no external interface was chosen.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SelectError {
    /// No selector matches.
    #[error("no external interface: {}", list(.tried))]
    NoneFits {
        /// The selectors, in the order in which they were tried.
        tried: Vec<Attempt>,
    },
    /// The kernel state cannot be read.
    #[error("cannot read interfaces and routes: {0}")]
    Kernel(#[from] KernelError),
}

/// A selector that did not match.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attempt {
    /// The selector: the name of its option and its value, such as `iface eth7`.
    pub selector: String,
    /// Why it did not match.
    pub reason: String,
}

impl fmt::Display for Attempt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.selector, self.reason)
    }
}

fn list(tried: &[Attempt]) -> String {
    tried.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}

/// A matching interface, with an address of each enabled family.
struct Found<'a> {
    interface: &'a Interface,
    address: Dual<IpAddr>,
    reason: String,
}

/// The inputs of the choice.
struct Choice<'a> {
    facts: &'a Facts,
    families: Vec<Family>,
    public: Dual<IpAddr>,
}

/// Chooses the external interface of a network of these families. It must have a usable address of
/// each.
///
/// Selectors are tried in this order: each of [`Selectors::iface`], each of
/// [`Selectors::iface_regex`], [`Selectors::can_reach`]. Without any of these, a public address
/// (IPv4 before IPv6) must be on the interface. Without a public address, the default route
/// decides. If the selector names no address, the best address of the interface is used: global
/// before link-local, permanent before expiring, stable before temporary.
///
/// The public address in the result comes from [`Selectors::public`], or else is the address of the
/// interface. A public IPv6 address in the selectors is kept even if IPv6 is not enabled.
///
/// # Errors
/// [`SelectError::NoneFits`], with the reason for each selector.
///
/// **Source**: flannel `pkg/ipmatch/match.go: LookupExtIface`, `main.go: main`. Where Go flannel
/// panics or uses an address of the wrong family, this is an error.
pub fn choose(
    selectors: &Selectors,
    families: impl IntoIterator<Item = Family>,
    facts: &Facts,
) -> Result<ExternalInterface, SelectError> {
    let choice =
        Choice { facts, families: families.into_iter().collect(), public: selectors.public };
    let mut tried = Vec::new();
    for selector in selectors.in_order() {
        match choice.find(&selector).and_then(|found| choice.finish(found)) {
            Ok(chosen) => return Ok(chosen),
            Err(reason) => tried.push(Attempt { selector: selector.to_string(), reason }),
        }
    }
    Err(SelectError::NoneFits { tried })
}

impl<'a> Choice<'a> {
    /// The interface that matches a selector, or the reason why no interface does.
    fn find(&self, selector: &Selector<'_>) -> Result<Found<'a>, String> {
        match selector {
            Selector::Iface(text) => match text.parse() {
                Ok(address) => self.by_address(address),
                Err(_) => self.by_name(text),
            },
            Selector::IfaceRegex(regex) => self.by_regex(regex),
            Selector::CanReach(address) => self.by_reach(*address),
            Selector::Public(address) => self.by_address(*address),
            Selector::DefaultRoute => self.by_default_route(),
        }
    }

    /// The first interface with the address. In dual stack the public IPv6 address, if given, must
    /// be on the same interface.
    fn by_address(&self, address: IpAddr) -> Result<Found<'a>, String> {
        let family = Family::of(address);
        if !self.families.contains(&family) {
            return Err(format!("{family} is not enabled in the network config"));
        }
        let has =
            |interface: &Interface, wanted| interface.addresses.iter().any(|a| a.address == wanted);
        let interface = self
            .facts
            .interfaces
            .iter()
            .find(|interface| has(interface, address))
            .ok_or_else(|| format!("no interface has the address {address}"))?;
        let public_v6 = self.public.v6.filter(|_| self.families.len() > 1);
        if let Some(public) = public_v6.filter(|public| !has(interface, *public)) {
            return Err(format!(
                "{} has {address} but not the public address {public}",
                interface.name
            ));
        }
        let address_of = |wanted| match public_v6 {
            _ if wanted == family => Ok(address),
            Some(public) if wanted == Family::V6 => Ok(public),
            _ => best(interface, wanted),
        };
        Ok(Found {
            interface,
            address: self.addresses(address_of)?,
            reason: format!("it has the address {address}"),
        })
    }

    fn by_name(&self, name: &str) -> Result<Found<'a>, String> {
        let interface = self.interface(name).ok_or_else(|| format!("no interface named {name}"))?;
        self.with_best(interface, format!("it is named {name}"))
    }

    /// The first interface with a matching address in each enabled family. If there is none, the
    /// first interface with a matching name.
    fn by_regex(&self, text: &str) -> Result<Found<'a>, String> {
        let regex =
            Regex::new(text).map_err(|error| format!("not a regular expression: {error}"))?;
        for interface in &self.facts.interfaces {
            let matching = self.addresses(|family| {
                candidates(interface, family)
                    .into_iter()
                    .find(|address| regex.is_match(&address.to_string()))
                    .ok_or_else(String::new)
            });
            if let Ok(address) = matching {
                let texts: Vec<String> = address.values().map(ToString::to_string).collect();
                let reason = format!("its address {} matches {text}", texts.join(" and "));
                return Ok(Found { interface, address, reason });
            }
        }
        let interface = self
            .facts
            .interfaces
            .iter()
            .find(|interface| regex.is_match(interface.name.as_str()))
            .ok_or_else(|| "matches no interface's addresses and no name".to_owned())?;
        self.with_best(interface, format!("its name matches {text}"))
    }

    fn by_reach(&self, address: IpAddr) -> Result<Found<'a>, String> {
        let answer = self.facts.reach.ok_or("it was not looked up")?;
        if answer.local {
            return Err("it is an address of this host".to_owned());
        }
        let link = answer.link.ok_or("there is no route to it")?;
        let interface = self.interface(link.as_str()).ok_or_else(|| format!("{link} is gone"))?;
        // The kernel's source address is used for IPv4 only, as in Go flannel.
        let source = answer.source.filter(|source| source.is_ipv4() && address.is_ipv4());
        let address_of = |family| match source {
            Some(source) if family == Family::V4 => Ok(source),
            _ => best(interface, family),
        };
        Ok(Found {
            interface,
            address: self.addresses(address_of)?,
            reason: format!("the route to {address} uses it"),
        })
    }

    /// In dual stack both default routes must use the same interface.
    fn by_default_route(&self) -> Result<Found<'a>, String> {
        let mut chosen: Option<LinkName> = None;
        for family in &self.families {
            let route = self.facts.default[*family]
                .ok_or_else(|| format!("there is no {family} default route"))?;
            let link = route.link.ok_or_else(|| {
                format!("the {family} default route does not leave by a single interface")
            })?;
            match chosen {
                Some(other) if other != link => {
                    return Err(format!(
                        "IPv4 leaves by {other} but {family} by {link}: name one with iface"
                    ));
                }
                _ => chosen = Some(link),
            }
        }
        let link = chosen.ok_or("no address family is enabled")?;
        let interface = self.interface(link.as_str()).ok_or_else(|| format!("{link} is gone"))?;
        self.with_best(interface, "it has the default route".to_owned())
    }

    fn interface(&self, name: &str) -> Option<&'a Interface> {
        self.facts.interfaces.iter().find(|interface| interface.name.as_str() == name)
    }

    /// A match of the interface, with its best address of each enabled family.
    fn with_best(&self, interface: &'a Interface, reason: String) -> Result<Found<'a>, String> {
        Ok(Found { interface, address: self.addresses(|family| best(interface, family))?, reason })
    }

    /// An address for each enabled family, or the first error of `find`.
    fn addresses(
        &self,
        find: impl Fn(Family) -> Result<IpAddr, String>,
    ) -> Result<Dual<IpAddr>, String> {
        self.families.iter().map(|family| find(*family)).collect()
    }

    /// The result for a matching interface. An MTU of 0 is an error.
    fn finish(&self, found: Found<'_>) -> Result<ExternalInterface, String> {
        let Found { interface, address, reason } = found;
        if interface.mtu == 0 {
            return Err(format!("{} has the MTU 0", interface.name));
        }
        let public = Dual::from_fn(|family| {
            let is_published = family == Family::V6 || self.families.contains(&family);
            self.public[family].filter(|_| is_published).or(address[family])
        });
        Ok(ExternalInterface::new(interface.name, interface.mtu, address)
            .with_public(public)
            .with_reason(reason))
    }
}

/// The best usable address of a family, or an error that names the interface.
pub(super) fn best(interface: &Interface, family: Family) -> Result<IpAddr, String> {
    match candidates(interface, family)[..] {
        [best, ..] => Ok(best),
        [] => Err(format!("{} has no usable {family} address", interface.name)),
    }
}

/// The usable addresses of a family, the best one first. Equally good ones are in the kernel's
/// order.
fn candidates(interface: &Interface, family: Family) -> Vec<IpAddr> {
    let mut usable: Vec<_> = interface
        .addresses
        .iter()
        .filter(|a| a.usable && Family::of(a.address) == family && is_unicast(a.address))
        .collect();
    usable.sort_by_key(|a| (is_link_local(a.address), !a.permanent, a.temporary));
    usable.into_iter().map(|a| a.address).collect()
}

fn is_unicast(address: IpAddr) -> bool {
    let is_broadcast = matches!(address, IpAddr::V4(v4) if v4.is_broadcast());
    !address.is_unspecified() && !address.is_loopback() && !address.is_multicast() && !is_broadcast
}

pub(super) fn is_link_local(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(v4) => v4.is_link_local(),
        IpAddr::V6(v6) => v6.is_unicast_link_local(),
    }
}

#[cfg(test)]
mod tests {
    use flannel_core::kernel::RouteAnswer;

    use super::super::{Address, DefaultRoute};
    use super::*;

    const V4: [Family; 1] = [Family::V4];
    const V6: [Family; 1] = [Family::V6];
    const DUAL: [Family; 2] = Family::BOTH;

    fn interface(name: &str, addresses: &[&str]) -> Interface {
        let address = |text: &&str| Address {
            address: text.parse().unwrap(),
            usable: true,
            permanent: true,
            temporary: false,
        };
        Interface {
            name: name.parse().unwrap(),
            mtu: 1500,
            up: true,
            addresses: addresses.iter().map(address).collect(),
        }
    }

    /// A host with three interfaces. The default routes use eth0.
    fn facts() -> Facts {
        let default = Some(DefaultRoute { link: Some("eth0".parse().unwrap()) });
        Facts {
            interfaces: vec![
                interface("lo", &["127.0.0.1", "::1"]),
                interface(
                    "eth0",
                    &["169.254.0.9", "192.0.2.1", "192.0.2.2", "fe80::1", "2001:db8::1"],
                ),
                interface("eth1", &["198.51.100.1", "2001:db8:1::1", "2001:db8:1::2"]),
                interface("wg0", &["10.9.0.1"]),
            ],
            default: Dual { v4: default, v6: default },
            reach: None,
        }
    }

    fn selectors(iface: &[&str], regex: &[&str], public: &[&str]) -> Selectors {
        Selectors {
            iface: iface.iter().map(ToString::to_string).collect(),
            iface_regex: regex.iter().map(ToString::to_string).collect(),
            can_reach: None,
            public: public.iter().map(|text| text.parse::<IpAddr>().unwrap()).collect(),
        }
    }

    /// The choice as text, such as `eth0 192.0.2.1 - public 203.0.113.1 -`, or the error. The
    /// public addresses are left out if they are the addresses of the interface.
    fn chosen(selectors: &Selectors, families: &[Family], facts: &Facts) -> String {
        let text = |dual: &Dual<IpAddr>| {
            let one = |family: Family| {
                dual[family].map_or_else(|| "-".to_owned(), |address| address.to_string())
            };
            format!("{} {}", one(Family::V4), one(Family::V6))
        };
        match choose(selectors, families.iter().copied(), facts) {
            Ok(got) if got.public == got.address => format!("{} {}", got.name, text(&got.address)),
            Ok(got) => format!("{} {} public {}", got.name, text(&got.address), text(&got.public)),
            Err(error) => error.to_string(),
        }
    }

    #[test]
    fn each_selector_chooses_an_interface_with_all_enabled_families() {
        let none: &[&str] = &[];
        for (iface, regex, public, v4, v6, dual) in [
            (
                none,
                none,
                none,
                "eth0 192.0.2.1 -",
                "eth0 - 2001:db8::1",
                "eth0 192.0.2.1 2001:db8::1",
            ),
            // A name.
            (
                &["eth1"],
                none,
                none,
                "eth1 198.51.100.1 -",
                "eth1 - 2001:db8:1::1",
                "eth1 198.51.100.1 2001:db8:1::1",
            ),
            (
                &["wg0"],
                none,
                none,
                "wg0 10.9.0.1 -",
                "no external interface: iface wg0: wg0 has no usable IPv6 address",
                "no external interface: iface wg0: wg0 has no usable IPv6 address",
            ),
            // An address that the selector names is used, even if the interface has a better one.
            (
                &["192.0.2.2"],
                none,
                none,
                "eth0 192.0.2.2 -",
                "no external interface: iface 192.0.2.2: IPv4 is not enabled in the network config",
                "eth0 192.0.2.2 2001:db8::1",
            ),
            (
                &["2001:db8:1::2"],
                none,
                none,
                "no external interface: iface 2001:db8:1::2: IPv6 is not enabled in the network \
                 config",
                "eth1 - 2001:db8:1::2",
                "eth1 198.51.100.1 2001:db8:1::2",
            ),
            // The first match is used, and earlier failures are ignored.
            (
                &["eth7", "eth1", "eth0"],
                none,
                none,
                "eth1 198.51.100.1 -",
                "eth1 - 2001:db8:1::1",
                "eth1 198.51.100.1 2001:db8:1::1",
            ),
            (
                &["eth7"],
                &["^eth0$"],
                none,
                "eth0 192.0.2.1 -",
                "eth0 - 2001:db8::1",
                "eth0 192.0.2.1 2001:db8::1",
            ),
            // Regular expressions: addresses before names; in dual stack both families must match.
            (
                none,
                &[r"^192\.0\.2\.2$|^2001:db8:1::2"],
                none,
                "eth0 192.0.2.2 -",
                "eth1 - 2001:db8:1::2",
                "no external interface: iface-regex ^192\\.0\\.2\\.2$|^2001:db8:1::2: matches no \
                 interface's addresses and no name",
            ),
            (
                none,
                &["^198|:1::2$"],
                none,
                "eth1 198.51.100.1 -",
                "eth1 - 2001:db8:1::2",
                "eth1 198.51.100.1 2001:db8:1::2",
            ),
            (
                none,
                &["wg"],
                none,
                "wg0 10.9.0.1 -",
                "no external interface: iface-regex wg: wg0 has no usable IPv6 address",
                "no external interface: iface-regex wg: wg0 has no usable IPv6 address",
            ),
            // A public address is the selector if there is no other, and must be on an interface.
            (
                none,
                none,
                &["198.51.100.1"],
                "eth1 198.51.100.1 -",
                "no external interface: public-ip 198.51.100.1: IPv4 is not enabled in the \
                 network config",
                "eth1 198.51.100.1 2001:db8:1::1",
            ),
            (
                none,
                none,
                &["2001:db8::1"],
                "no external interface: public-ipv6 2001:db8::1: IPv6 is not enabled in the \
                 network config",
                "eth0 - 2001:db8::1",
                "eth0 192.0.2.1 2001:db8::1",
            ),
            (
                none,
                none,
                &["203.0.113.1"],
                "no external interface: public-ip 203.0.113.1: no interface has the address \
                 203.0.113.1",
                "no external interface: public-ip 203.0.113.1: IPv4 is not enabled in the network \
                 config",
                "no external interface: public-ip 203.0.113.1: no interface has the address \
                 203.0.113.1",
            ),
            // With another selector, the public address is only published to peers. A public IPv6
            // address is kept even if IPv6 is not enabled.
            (
                &["eth0"],
                none,
                &["203.0.113.1"],
                "eth0 192.0.2.1 - public 203.0.113.1 -",
                "eth0 - 2001:db8::1",
                "eth0 192.0.2.1 2001:db8::1 public 203.0.113.1 2001:db8::1",
            ),
            (
                &["eth0"],
                none,
                &["2001:db8:ffff::1"],
                "eth0 192.0.2.1 - public 192.0.2.1 2001:db8:ffff::1",
                "eth0 - 2001:db8::1 public - 2001:db8:ffff::1",
                "eth0 192.0.2.1 2001:db8::1 public 192.0.2.1 2001:db8:ffff::1",
            ),
            // With an address as selector in dual stack, a public IPv6 address must be on the same
            // interface.
            (
                &["198.51.100.1"],
                none,
                &["2001:db8:1::2"],
                "eth1 198.51.100.1 - public 198.51.100.1 2001:db8:1::2",
                "no external interface: iface 198.51.100.1: IPv4 is not enabled in the network \
                 config",
                "eth1 198.51.100.1 2001:db8:1::2",
            ),
            (
                &["198.51.100.1"],
                none,
                &["2001:db8::1"],
                "eth1 198.51.100.1 - public 198.51.100.1 2001:db8::1",
                "no external interface: iface 198.51.100.1: IPv4 is not enabled in the network \
                 config",
                "no external interface: iface 198.51.100.1: eth1 has 198.51.100.1 but not the \
                 public address 2001:db8::1",
            ),
        ] {
            let selectors = selectors(iface, regex, public);
            for (families, want) in [(&V4[..], v4), (&V6[..], v6), (&DUAL[..], dual)] {
                assert_eq!(
                    chosen(&selectors, families, &facts()),
                    want,
                    "{selectors:?} {families:?}"
                );
            }
        }
    }

    #[test]
    fn the_route_to_an_address_selects_its_interface() {
        let via = |source: &str| {
            Some(RouteAnswer::via("eth1".parse().unwrap(), None, source.parse().ok()))
        };
        let mut selectors = selectors(&["eth7"], &[], &[]);
        selectors.can_reach = Some("198.51.100.77".parse().unwrap());
        let reaching = |reach| Facts { reach, ..facts() };
        let by_v4 = reaching(via("198.51.100.9"));
        assert_eq!(
            chosen(&selectors, &V4, &by_v4),
            "eth1 198.51.100.9 -",
            "the source address that the kernel chose"
        );
        assert_eq!(chosen(&selectors, &V6, &by_v4), "eth1 - 2001:db8:1::1");
        assert_eq!(chosen(&selectors, &DUAL, &by_v4), "eth1 198.51.100.9 2001:db8:1::1");
        let both = "no external interface: iface eth7: no interface named eth7; iface-can-reach \
            198.51.100.77: ";
        let nowhere = reaching(Some(RouteAnswer::default()));
        assert_eq!(chosen(&selectors, &V4, &nowhere), format!("{both}there is no route to it"));
        let mut answer = via("198.51.100.77");
        answer.as_mut().unwrap().local = true;
        let local = reaching(answer);
        assert_eq!(chosen(&selectors, &V4, &local), format!("{both}it is an address of this host"));
        selectors.can_reach = Some("2001:db8:1::77".parse().unwrap());
        let by_v6 = reaching(via("2001:db8:1::9"));
        assert_eq!(chosen(&selectors, &DUAL, &by_v6), "eth1 198.51.100.1 2001:db8:1::1");
    }

    #[test]
    fn unusable_default_routes_are_errors() {
        let none = Selectors::default();
        let other = Facts {
            default: Dual {
                v6: Some(DefaultRoute { link: Some("eth1".parse().unwrap()) }),
                ..facts().default
            },
            ..facts()
        };
        assert_eq!(
            chosen(&none, &DUAL, &other),
            "no external interface: default route: IPv4 leaves by eth0 but IPv6 by eth1: name one \
             with iface"
        );
        assert_eq!(chosen(&none, &V6, &other), "eth1 - 2001:db8:1::1");
        let multipath =
            Facts { default: Dual { v4: Some(DefaultRoute { link: None }), v6: None }, ..facts() };
        assert_eq!(
            chosen(&none, &V4, &multipath),
            "no external interface: default route: the IPv4 default route does not leave by a \
             single interface"
        );
        assert_eq!(
            chosen(&none, &V6, &multipath),
            "no external interface: default route: there is no IPv6 default route"
        );
        assert_eq!(
            chosen(&none, &[], &facts()),
            "no external interface: default route: no address family is enabled"
        );
    }

    #[test]
    fn the_best_address_is_used() {
        let address = |text: &str, usable, permanent, temporary| Address {
            address: text.parse().unwrap(),
            usable,
            permanent,
            temporary,
        };
        let mut facts = facts();
        facts.interfaces[1].addresses = vec![
            address("fe80::1", true, true, false),
            address("2001:db8::d", false, true, false),
            address("2001:db8::7", true, false, true),
            address("2001:db8::a", true, false, false),
            address("2001:db8::f", true, true, false),
            address("2001:db8::b", true, true, false),
        ];
        let mut order = Vec::new();
        while !facts.interfaces[1].addresses.is_empty() {
            let Ok(got) = choose(&Selectors::default(), V6, &facts) else { break };
            let best = got.address.v6.unwrap();
            order.push(best.to_string());
            facts.interfaces[1].addresses.retain(|a| a.address != best);
        }
        assert_eq!(order, ["2001:db8::f", "2001:db8::b", "2001:db8::a", "2001:db8::7", "fe80::1"]);
    }

    #[test]
    fn the_result_and_the_error_have_reasons() {
        let mut facts = facts();
        let wrong = selectors(&[], &["(", "lo"], &[]);
        let text = chosen(&wrong, &V4, &facts);
        assert!(text.contains("iface-regex (: not a regular expression: "), "{text}");
        assert!(text.ends_with("iface-regex lo: lo has no usable IPv4 address"), "{text}");
        facts.interfaces[1].mtu = 0;
        assert_eq!(
            chosen(&Selectors::default(), &V4, &facts),
            "no external interface: default route: eth0 has the MTU 0"
        );
        let got = choose(&selectors(&["eth1"], &[], &[]), V4, &facts).unwrap();
        assert_eq!(got.mtu, 1500);
        assert_eq!(got.reason, "it is named eth1");
    }
}
