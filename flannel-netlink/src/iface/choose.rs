//! The choice of the interface: selectors are tried in a fixed order, and the first match is used.

use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::fmt;
use std::net::IpAddr;

use flannel_core::Subnet;
use flannel_core::address::{Dual, Family};
use flannel_core::backend::{AddressDoubt, ExternalInterface};
use flannel_core::kernel::KernelError;
use flannel_core::object::LinkName;
use regex_lite::Regex;

use super::selectors::Selector;
use super::{Address, DefaultRoute, Facts, Interface, NextHop, Selectors};

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

/// The MTU of an interface that leads to no other host, if the devices by which packets leave are
/// not known: the MTU of Ethernet, in bytes.
const USUAL_MTU: u32 = 1500;
/// The kinds of interfaces that lead to other hosts, and not to containers, virtual machines or
/// tunnels. Physical devices have no kind.
const UPLINKS: [&str; 7] = ["", "bond", "team", "vlan", "macvlan", "ipvlan", "veth"];

/// A matching interface, with an address of each enabled family.
struct Found<'a> {
    interface: &'a Interface,
    address: Dual<Candidate>,
    /// A user named the interface or an address of it.
    named: bool,
    reason: String,
}

/// An address that may be chosen.
#[derive(Debug, Clone, Copy)]
struct Candidate {
    address: IpAddr,
    doubt: Option<AddressDoubt>,
}

impl Candidate {
    /// An address that a user named.
    const fn named(address: IpAddr) -> Self {
        Self { address, doubt: None }
    }
}

/// The inputs of the choice.
struct Choice<'a> {
    facts: &'a Facts,
    families: Vec<Family>,
    selectors: &'a Selectors,
}

/// Chooses the external interface of a network of these families. It must have a usable address of
/// each.
///
/// [`Selectors`] has the order in which selectors are tried. An interface by whose address it is
/// selected needs a matching address in one family only, but one with matching addresses in all
/// families is preferred. The default route may have several next hops: the interface of the first
/// usable one is chosen, if possible one that both families use. If only one family has a default
/// route, that route decides. If the default route leads to no other host, the only uplink with
/// addresses is chosen instead: a physical interface, or a virtual one on top of such.
///
/// If the selector names no address, the best address of the interface is used. These rules decide,
/// in this order:
/// 1. The address with the least [`AddressDoubt`]. There is none about the source address that the
///    default route sets. The one that the kernel uses to reach the gateway does not count as
///    movable.
/// 2. A stable IPv6 address before a temporary one.
/// 3. The source address that the default route sets.
/// 4. The [previous](Selectors::previous) address of this host.
/// 5. The source address that the kernel uses for packets to the gateway of the default route.
/// 6. A primary IPv4 address before a secondary one.
/// 7. An address that does not expire.
///
/// The public address in the result comes from [`Selectors::public`], or else is the address of the
/// interface. A public IPv6 address in the selectors is kept even if IPv6 is not enabled.
///
/// The MTU of an interface that leads to no other host is that of the interfaces of the default
/// routes, if it is smaller. Without such an interface it is at most 1500 bytes.
///
/// # Errors
/// [`SelectError::NoneFits`], with the reason for each selector.
///
/// **Source**: flannel `pkg/ipmatch/match.go: LookupExtIface`, `main.go: main`. Where Go flannel
/// panics or uses an address of the wrong family, this is an error. Go flannel uses the first
/// address of the interface, and refuses a default route with several next hops.
pub fn choose(
    selectors: &Selectors,
    families: impl IntoIterator<Item = Family>,
    facts: &Facts,
) -> Result<ExternalInterface, SelectError> {
    let choice = Choice { facts, families: families.into_iter().collect(), selectors };
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
            Selector::Prescribed(text) => match text.parse::<Subnet>() {
                Ok(network) => self.by_cidr(&[network]),
                Err(_) => self.by_address_or_name(text),
            },
            Selector::Iface(text) => self.by_address_or_name(text),
            Selector::IfaceRegex(regex) => self.by_regex(regex),
            Selector::IfaceCidr(networks) => self.by_cidr(networks),
            Selector::NodeAddress => self.by_node_address(),
            Selector::CanReach(address) => self.by_reach(*address),
            Selector::Public(address) => self.by_address(*address),
            Selector::DefaultRoute => self.by_default_route(),
        }
    }

    fn by_address_or_name(&self, text: &str) -> Result<Found<'a>, String> {
        match text.parse() {
            Ok(address) => self.by_address(address),
            Err(_) => self.by_name(text),
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
        let public_v6 = self.selectors.public.v6.filter(|_| self.families.len() > 1);
        if let Some(public) = public_v6.filter(|public| !has(interface, *public)) {
            return Err(format!(
                "{} has {address} but not the public address {public}",
                interface.name
            ));
        }
        let address_of = |wanted| match public_v6 {
            _ if wanted == family => Ok(Candidate::named(address)),
            Some(public) if wanted == Family::V6 => Ok(Candidate::named(public)),
            _ => self.best(interface, wanted),
        };
        Ok(Found {
            interface,
            address: self.addresses(address_of)?,
            named: true,
            reason: format!("it has the address {address}"),
        })
    }

    fn by_name(&self, name: &str) -> Result<Found<'a>, String> {
        let interface = self.interface(name).ok_or_else(|| format!("no interface named {name}"))?;
        self.with_best(interface, true, format!("it is named {name}"))
    }

    /// The first interface with a matching address. If there is none, the first interface with a
    /// matching name.
    fn by_regex(&self, text: &str) -> Result<Found<'a>, String> {
        let regex =
            Regex::new(text).map_err(|error| format!("not a regular expression: {error}"))?;
        let matches = |address: IpAddr| regex.is_match(&address.to_string());
        if let Some(found) =
            self.by_matching(matches, |texts| format!("its address {texts} matches {text}"))
        {
            return found;
        }
        let interface = self
            .facts
            .interfaces
            .iter()
            .find(|interface| regex.is_match(interface.name.as_str()))
            .ok_or_else(|| "matches no interface's addresses and no name".to_owned())?;
        self.with_best(interface, true, format!("its name matches {text}"))
    }

    fn by_cidr(&self, networks: &[Subnet]) -> Result<Found<'a>, String> {
        let matches = |address| networks.iter().any(|network| network.contains(address));
        self.by_matching(matches, |texts| format!("its address {texts} is in one of the networks"))
            .unwrap_or_else(|| Err("no interface has a usable address there".to_owned()))
    }

    fn by_node_address(&self) -> Result<Found<'a>, String> {
        let known = self.selectors.node_addresses;
        if known.is_empty() {
            return Err("the store knows no address of this host".to_owned());
        }
        let texts = joined(known.values());
        let matches = |address| known.values().any(|known| *known == address);
        let found = self
            .by_matching(matches, |texts| format!("its address {texts} is one of the node"))
            .unwrap_or_else(|| Err(format!("no interface has the address {texts}")))?;
        // Such an address is not doubted.
        let address = found.address.map(|_, candidate| {
            let is_known = matches(candidate.address);
            if is_known { Candidate::named(candidate.address) } else { *candidate }
        });
        Ok(Found { address, ..found })
    }

    /// An interface with a usable address for which `matches` is true. One with such an address in
    /// each enabled family comes first, then one that leads to other hosts, then one that is up. In
    /// a family without a matching address, its best address is used. `None` if no address matches.
    /// `reason` gets the matching addresses.
    fn by_matching(
        &self,
        matches: impl Fn(IpAddr) -> bool,
        reason: impl Fn(&str) -> String,
    ) -> Option<Result<Found<'a>, String>> {
        // The bridge of the pods has an address too.
        let is_of_pods =
            |address| self.selectors.pod_networks.iter().any(|network| network.contains(address));
        let matches = |address| matches(address) && !is_of_pods(address);
        let matching = |interface: &Interface, family| {
            self.candidates(interface, family).into_iter().find(|found| matches(found.address))
        };
        let count = |interface: &Interface| {
            self.families.iter().filter(|family| matching(interface, **family).is_some()).count()
        };
        let unfitness = |interface: &Interface| {
            let is_uplink = UPLINKS.contains(&&*interface.kind) && !interface.isolated;
            (Reverse(count(interface)), !is_uplink, !interface.up)
        };
        let all = self.facts.interfaces.iter().filter(|interface| count(interface) > 0);
        // The first of equally fit ones.
        let interface = all.min_by_key(|interface| unfitness(interface))?;
        let address = self.addresses(|family| {
            matching(interface, family).map_or_else(|| self.best(interface, family), Ok)
        });
        let found = address.map(|address| {
            let texts = joined(address.values().map(|found| found.address).filter(|a| matches(*a)));
            Found { interface, address, named: true, reason: reason(&texts) }
        });
        Some(found)
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
            Some(source) if family == Family::V4 => Ok(Candidate::named(source)),
            _ => self.best(interface, family),
        };
        Ok(Found {
            interface,
            address: self.addresses(address_of)?,
            named: false,
            reason: format!("the route to {address} uses it"),
        })
    }

    /// In dual stack, if both families have a default route, both must be able to use the
    /// interface.
    fn by_default_route(&self) -> Result<Found<'a>, String> {
        let uplinks: Vec<_> = self
            .families
            .iter()
            .map(|family| (*family, self.uplinks(*family)))
            .filter(|(_, links)| !links.is_empty())
            .collect();
        let Some((first, links)) = uplinks.first() else {
            let families: Vec<_> = self.families.iter().map(ToString::to_string).collect();
            if families.is_empty() {
                return Err("no address family is enabled".to_owned());
            }
            let missing = format!("there is no {} default route", families.join(" or "));
            // At boot the default route may come later than addresses of other interfaces.
            return Err(match self.only_uplink() {
                Some(only) => {
                    format!("{missing}: name the interface with iface, such as {}", only.name)
                }
                None => missing,
            });
        };
        let is_of_all = |link: &LinkName| uplinks.iter().all(|(_, links)| links.contains(link));
        let Some(link) = links.iter().find(|link| is_of_all(link)) else {
            let (other, others) = &uplinks[uplinks.len() - 1];
            return Err(format!(
                "{first} leaves by {} but {other} by {}: name one with iface",
                joined(links),
                joined(others)
            ));
        };
        let interface = self.interface(link.as_str()).ok_or_else(|| format!("{link} is gone"))?;
        let all: BTreeSet<_> = uplinks.iter().flat_map(|(_, links)| links).collect();
        let others = joined(all.into_iter().filter(|other| *other != link));
        let mut reason = "it has the default route".to_owned();
        if !others.is_empty() {
            reason = format!("{reason}, which also uses {others}");
        }
        if interface.isolated {
            if let Some(only) = self.only_uplink() {
                reason = format!("the default route by {link} leads to no other host");
                return self.with_best(only, false, format!("{reason}, and it is the only uplink"));
            }
            reason = format!("{reason}, although it leads to no other host");
        }
        self.with_best(interface, false, reason)
    }

    /// The uplink with addresses of all enabled families that nothing is known against, or `None`
    /// if there are several or none.
    fn only_uplink(&self) -> Option<&'a Interface> {
        let has_address = |interface: &&Interface| {
            let mut doubts = self.families.iter().map(|family| least_doubt(interface, *family));
            let is_uplink = UPLINKS.contains(&&*interface.kind) && interface.up;
            is_uplink && !interface.isolated && doubts.all(|doubt| doubt == Some(None))
        };
        let mut uplinks = self.facts.interfaces.iter().filter(has_address);
        uplinks.next().filter(|_| uplinks.next().is_none())
    }

    /// The interfaces of the default route of a family, those that packets can use first. The list
    /// is empty without a default route. Of several default routes it is the first that leads to
    /// other hosts.
    fn uplinks(&self, family: Family) -> Vec<LinkName> {
        let is_isolated = |link: LinkName| {
            self.interface(link.as_str()).is_none_or(|interface| interface.isolated)
        };
        let unfitness = |hop: &NextHop| (is_isolated(hop.link), !hop.usable);
        let routes = self.facts.default.iter().filter(|route| route.family == family);
        let fittest = |route: &DefaultRoute| route.hops.iter().map(unfitness).min();
        // The first of equally good routes. A route without next hops is no way out.
        let route =
            routes.filter(|route| !route.hops.is_empty()).min_by_key(|route| fittest(route));
        let mut hops = route.map(|route| route.hops.clone()).unwrap_or_default();
        hops.sort_by_key(unfitness);
        let mut links = Vec::new();
        for hop in hops {
            if !links.contains(&hop.link) {
                links.push(hop.link);
            }
        }
        links
    }

    fn interface(&self, name: &str) -> Option<&'a Interface> {
        self.facts.interfaces.iter().find(|interface| interface.name.as_str() == name)
    }

    /// A match of the interface, with its best address of each enabled family.
    fn with_best(
        &self,
        interface: &'a Interface,
        named: bool,
        reason: String,
    ) -> Result<Found<'a>, String> {
        let address = self.addresses(|family| self.best(interface, family))?;
        Ok(Found { interface, address, named, reason })
    }

    /// An address for each enabled family, or the first error of `find`.
    fn addresses(
        &self,
        find: impl Fn(Family) -> Result<Candidate, String>,
    ) -> Result<Dual<Candidate>, String> {
        let mut found = Dual::default();
        for family in &self.families {
            found[*family] = Some(find(*family)?);
        }
        Ok(found)
    }

    /// The best usable address of a family, or an error that names the interface.
    fn best(&self, interface: &Interface, family: Family) -> Result<Candidate, String> {
        match self.candidates(interface, family)[..] {
            [best, ..] => Ok(best),
            [] => Err(format!("{} has no usable {family} address", interface.name)),
        }
    }

    /// The usable addresses of a family, the best one first. Equally good ones are in the kernel's
    /// order.
    fn candidates(&self, interface: &Interface, family: Family) -> Vec<Candidate> {
        let routes = self.facts.default.iter().filter(|route| route.family == family);
        let hops: Vec<(&DefaultRoute, &NextHop)> = routes
            .flat_map(|route| route.hops.iter().map(move |hop| (route, hop)))
            .filter(|(_, hop)| hop.link == interface.name)
            .collect();
        let given = hops.iter().find_map(|(route, _)| route.source);
        let usual = hops.iter().find_map(|(_, hop)| hop.source);
        let previous = self.selectors.previous[family];
        let mut usable: Vec<_> = usable(interface, family)
            .map(|a| {
                let is_given = given == Some(a.address);
                let is_usual = usual == Some(a.address);
                let doubt = doubt(interface, a).filter(|doubt| match doubt {
                    AddressDoubt::Movable => !is_given && !is_usual,
                    _ => !is_given,
                });
                let rank = (
                    doubt,
                    a.temporary && family == Family::V6,
                    !is_given,
                    previous != Some(a.address),
                    !is_usual,
                    a.temporary,
                    !a.permanent,
                );
                (rank, Candidate { address: a.address, doubt })
            })
            .collect();
        usable.sort_by_key(|(rank, _)| *rank);
        usable.into_iter().map(|(_, candidate)| candidate).collect()
    }

    /// The result for a matching interface. An MTU of 0 is an error.
    fn finish(&self, found: Found<'_>) -> Result<ExternalInterface, String> {
        let Found { interface, address: candidates, named, reason } = found;
        let leaving = mtu(interface, &self.families, self.facts);
        let mtu = leaving.unwrap_or_else(|| interface.mtu.min(USUAL_MTU));
        if mtu == 0 {
            return Err(format!("{} has the MTU 0", interface.name));
        }
        let address = candidates.map(|_, found| found.address);
        let doubts = Dual::from_fn(|family| {
            let doubt = candidates[family]?.doubt?;
            (!named || doubt != AddressDoubt::Isolated).then_some(doubt)
        });
        let public = Dual::from_fn(|family| {
            let is_published = family == Family::V6 || self.families.contains(&family);
            self.selectors.public[family].filter(|_| is_published).or(address[family])
        });
        Ok(ExternalInterface::new(interface.name, mtu, address)
            .with_public(public)
            .with_reason(reason)
            .with_doubts(doubts))
    }
}

/// `eth0 and eth1`.
fn joined(items: impl IntoIterator<Item = impl ToString>) -> String {
    items.into_iter().map(|item| item.to_string()).collect::<Vec<_>>().join(" and ")
}

/// The MTU of the packets that leave this host with the addresses of the interface, in bytes.
/// `None` if the interface leads to no other host, and the default route shows none that does.
pub(super) fn mtu(interface: &Interface, families: &[Family], facts: &Facts) -> Option<u32> {
    if !interface.isolated {
        return Some(interface.mtu);
    }
    let routes = facts.default.iter().filter(|route| families.contains(&route.family));
    let hops: Vec<&NextHop> = routes.flat_map(|route| &route.hops).collect();
    let uplinks = facts
        .interfaces
        .iter()
        .filter(|other| !other.isolated && hops.iter().any(|hop| hop.link == other.name));
    let leaving = uplinks.map(|uplink| uplink.mtu).min()?;
    Some(interface.mtu.min(leaving))
}

/// The usable addresses of a family, in the kernel's order.
fn usable(interface: &Interface, family: Family) -> impl Iterator<Item = &Address> {
    interface
        .addresses
        .iter()
        .filter(move |a| a.usable && Family::of(a.address) == family && is_unicast(a.address))
}

/// The doubt about an address that is no source address of the default route.
fn doubt(interface: &Interface, address: &Address) -> Option<AddressDoubt> {
    if is_link_local(address.address) {
        Some(AddressDoubt::LinkLocal)
    } else if interface.isolated {
        Some(AddressDoubt::Isolated)
    } else if address.permanent && address.alone {
        Some(AddressDoubt::Movable)
    } else {
        None
    }
}

/// The least doubt about the usable addresses of a family, or `None` without a usable address.
pub(super) fn least_doubt(interface: &Interface, family: Family) -> Option<Option<AddressDoubt>> {
    usable(interface, family).map(|address| doubt(interface, address)).min()
}

fn is_unicast(address: IpAddr) -> bool {
    let is_broadcast = matches!(address, IpAddr::V4(v4) if v4.is_broadcast());
    !address.is_unspecified() && !address.is_loopback() && !address.is_multicast() && !is_broadcast
}

fn is_link_local(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(v4) => v4.is_link_local(),
        IpAddr::V6(v6) => v6.is_unicast_link_local(),
    }
}

#[cfg(test)]
mod tests {
    use flannel_core::kernel::RouteAnswer;

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
            alone: false,
        };
        Interface {
            name: name.parse().unwrap(),
            kind: if name == "wg0" { "wireguard".into() } else { String::new() },
            mtu: 1500,
            up: true,
            isolated: name == "lo",
            addresses: addresses.iter().map(address).collect(),
        }
    }

    /// A host with three interfaces. The default routes use eth0.
    fn facts() -> Facts {
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
            default: Family::BOTH.map(|family| default_route(family, &["eth0"])).to_vec(),
            reach: None,
        }
    }

    /// A default route with usable next hops. A name in brackets is that of an unusable one.
    fn default_route(family: Family, links: &[&str]) -> DefaultRoute {
        let hop = |link: &&str| NextHop {
            link: link.trim_matches(['(', ')']).parse().unwrap(),
            usable: !link.starts_with('('),
            source: None,
        };
        DefaultRoute { family, source: None, hops: links.iter().map(hop).collect() }
    }

    fn selectors(iface: &[&str], regex: &[&str], public: &[&str]) -> Selectors {
        Selectors {
            iface: iface.iter().map(ToString::to_string).collect(),
            iface_regex: regex.iter().map(ToString::to_string).collect(),
            public: public.iter().map(|text| text.parse::<IpAddr>().unwrap()).collect(),
            ..Selectors::default()
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
            // Regular expressions: addresses before names; in dual stack one family is enough.
            (
                none,
                &[r"^192\.0\.2\.2$|^2001:db8:1::2"],
                none,
                "eth0 192.0.2.2 -",
                "eth1 - 2001:db8:1::2",
                "eth0 192.0.2.2 2001:db8::1",
            ),
            (
                none,
                &["^203"],
                none,
                "no external interface: iface-regex ^203: matches no interface's addresses and no \
                 name",
                "no external interface: iface-regex ^203: matches no interface's addresses and no \
                 name",
                "no external interface: iface-regex ^203: matches no interface's addresses and no \
                 name",
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
    fn the_default_route_leads_to_the_interface() {
        let v4 = |links: &[&str]| default_route(Family::V4, links);
        let v6 = |links: &[&str]| default_route(Family::V6, links);
        let eth0 = "eth0 192.0.2.1 2001:db8::1";
        let eth1 = "eth1 198.51.100.1 2001:db8:1::1";
        let none = "there is no IPv4 or IPv6 default route";
        for (default, want) in [
            (vec![v4(&["eth0"]), v6(&["eth0"])], Ok((eth0, "it has the default route"))),
            (vec![v4(&["eth0", "eth0"]), v6(&["eth0"])], Ok((eth0, "it has the default route"))),
            // Several devices.
            (
                vec![v4(&["eth1", "eth0"]), v6(&["eth1"])],
                Ok((eth1, "it has the default route, which also uses eth0")),
            ),
            (
                vec![v4(&["(eth1)", "eth0"]), v6(&["eth0", "eth1"])],
                Ok((eth0, "it has the default route, which also uses eth1")),
            ),
            (
                vec![v4(&["eth0", "eth1"]), v6(&["eth1"])],
                Ok((eth1, "it has the default route, which also uses eth0")),
            ),
            (
                vec![v4(&["eth0", "eth1"]), v6(&["wg0"])],
                Err("IPv4 leaves by eth0 and eth1 but IPv6 by wg0: name one with iface"),
            ),
            // Several routes: the kernel prefers the first one.
            (
                vec![v4(&["eth0"]), v4(&["eth1"]), v6(&["eth0"])],
                Ok((eth0, "it has the default route")),
            ),
            (
                vec![v4(&["(eth0)"]), v4(&["eth1"]), v6(&["eth1"])],
                Ok((eth1, "it has the default route")),
            ),
            // A route without next hops, and one that leads to no other host.
            (vec![v4(&[]), v4(&["lo"]), v4(&["eth1"])], Ok((eth1, "it has the default route"))),
            // One family has no default route.
            (vec![v6(&["eth1"])], Ok((eth1, "it has the default route"))),
            (vec![v4(&["eth1"])], Ok((eth1, "it has the default route"))),
            (vec![v4(&["wg0"])], Err("wg0 has no usable IPv6 address")),
            (vec![v4(&["eth0"]), v6(&["eth1"])], {
                Err("IPv4 leaves by eth0 but IPv6 by eth1: name one with iface")
            }),
            (vec![v4(&[])], Err(none)),
            (vec![], Err(none)),
        ] {
            let facts = Facts { default, ..facts() };
            let got = choose(&Selectors::default(), DUAL, &facts);
            let reason = got.as_ref().map(|got| got.reason.clone()).unwrap_or_default();
            let text = chosen(&Selectors::default(), &DUAL, &facts);
            let want = want
                .map(|(chosen, reason)| (chosen.to_owned(), reason))
                .map_err(|error| format!("no external interface: default route: {error}"))
                .unwrap_or_else(|error| (error, ""));
            assert_eq!((text, &*reason), want, "{:?}", facts.default);
        }
        assert_eq!(
            chosen(&Selectors::default(), &[], &facts()),
            "no external interface: default route: no address family is enabled"
        );
    }

    #[test]
    fn the_only_uplink_replaces_a_default_route_that_leads_nowhere() {
        let mut facts = facts();
        facts.interfaces[0] = interface("lo", &["203.0.113.254"]);
        facts.interfaces[2].up = false;
        let made_up = |facts: &Facts| {
            let default = vec![default_route(Family::V4, &["lo"])];
            choose(&Selectors::default(), V4, &Facts { default, ..facts.clone() }).unwrap()
        };
        let missing = |facts: &Facts| {
            chosen(&Selectors::default(), &V4, &Facts { default: vec![], ..facts.clone() })
        };
        let none = "no external interface: default route: there is no IPv4 default route";
        let got = made_up(&facts);
        assert_eq!((got.name.as_str(), got.doubts.v4), ("eth0", None));
        assert_eq!(
            got.reason,
            "the default route by lo leads to no other host, and it is the only uplink"
        );
        assert_eq!(missing(&facts), format!("{none}: name the interface with iface, such as eth0"));
        facts.interfaces[2].up = true;
        let got = made_up(&facts);
        assert_eq!((got.name.as_str(), got.doubts.v4), ("lo", Some(AddressDoubt::Isolated)));
        assert_eq!(missing(&facts), none);
        facts.interfaces[2].kind = "bridge".into();
        assert_eq!(made_up(&facts).name.as_str(), "eth0", "eth1 leads to containers");
    }

    #[test]
    fn networks_node_addresses_and_prescriptions_select_an_interface() {
        let cidr = |texts: &[&str]| Selectors {
            iface_cidr: texts.iter().map(|text| text.parse().unwrap()).collect(),
            ..Selectors::default()
        };
        let node = |texts: &[&str]| Selectors {
            by_node_address: true,
            node_addresses: texts.iter().map(|text| text.parse::<IpAddr>().unwrap()).collect(),
            ..Selectors::default()
        };
        let prescribed = |texts: &[&str]| Selectors {
            prescribed: texts.iter().map(ToString::to_string).collect(),
            iface: vec!["eth0".into()],
            ..Selectors::default()
        };
        let eth1 = "eth1 198.51.100.1 2001:db8:1::1";
        for (selectors, want) in [
            (cidr(&["203.0.113.0/24", "198.51.100.0/24"]), eth1),
            (cidr(&["2001:db8:1::/64"]), eth1),
            // eth0 matches in one family, eth1 in both.
            (cidr(&["0.0.0.0/0", "2001:db8:1::/64"]), eth1),
            (
                cidr(&["203.0.113.0/24"]),
                "no external interface: iface-cidr 203.0.113.0/24: no interface has a usable \
                 address there",
            ),
            (node(&["198.51.100.1", "2001:db8:1::2"]), "eth1 198.51.100.1 2001:db8:1::2"),
            (node(&["2001:db8:1::2"]), "eth1 198.51.100.1 2001:db8:1::2"),
            (
                node(&["203.0.113.1"]),
                "no external interface: iface-node-ip: no interface has the address 203.0.113.1",
            ),
            (
                node(&[]),
                "no external interface: iface-node-ip: the store knows no address of this host",
            ),
            (prescribed(&["eth7", "eth1"]), eth1),
            (prescribed(&["198.51.100.1"]), eth1),
            (prescribed(&["198.51.100.0/24"]), eth1),
            (
                prescribed(&["eth7"]),
                "no external interface: prescribed interface eth7: no interface named eth7",
            ),
        ] {
            assert_eq!(chosen(&selectors, &DUAL, &facts()), want, "{selectors:?}");
        }
    }

    #[test]
    fn an_address_never_selects_a_bridge_of_pods() {
        let mut facts = facts();
        let mut bridge = interface("cni0", &["10.244.1.1"]);
        bridge.kind = "bridge".into();
        let mut docker = interface("docker0", &["172.17.0.1"]);
        docker.kind = "bridge".into();
        facts.interfaces.splice(1..1, [bridge, docker]);
        facts.interfaces[3] = interface("bond0", &["10.0.0.5", "172.20.0.5"]);
        facts.interfaces.truncate(4);
        let select = |network: &str, pods: &[&str]| Selectors {
            iface_cidr: vec![network.parse().unwrap()],
            pod_networks: pods.iter().map(|text| text.parse().unwrap()).collect(),
            ..Selectors::default()
        };
        let pods = select("10.0.0.0/8", &["10.244.0.0/16"]);
        assert_eq!(chosen(&pods, &V4, &facts), "bond0 10.0.0.5 -");
        let docker = select("172.16.0.0/12", &[]);
        assert_eq!(chosen(&docker, &V4, &facts), "bond0 172.20.0.5 -", "the bridge is behind it");
        facts.interfaces.remove(3);
        assert!(chosen(&pods, &V4, &facts).contains("no interface has a usable address there"));
        assert_eq!(chosen(&docker, &V4, &facts), "docker0 172.17.0.1 -", "there is no other");
    }

    /// An address of a host, and how it came there.
    fn address(text: &str, origin: Origin) -> Address {
        let (address, len) = text.split_once('/').unwrap();
        let address: IpAddr = address.parse().unwrap();
        Address {
            address,
            usable: true,
            permanent: origin != Origin::Dhcp,
            temporary: matches!(origin, Origin::Secondary | Origin::Privacy),
            alone: len.parse() == Ok(Family::of(address).bits()),
        }
    }

    #[derive(Clone, Copy, PartialEq)]
    enum Origin {
        Static,
        Dhcp,
        /// Of IPv4, in the network of an earlier address.
        Secondary,
        /// Of IPv6, temporary.
        Privacy,
    }

    #[test]
    fn the_address_of_a_host_is_the_one_that_a_person_would_name() {
        use Origin::{Dhcp, Privacy, Secondary, Static};
        let none = "";
        // The addresses of eth0, its source address by the gateway and by the route, the previous
        // address, and the best address.
        for (addresses, usual, given, previous, want) in [
            // keepalived and kube-vip, with the host's own address from DHCP or static, before or
            // after it.
            (&[("192.0.2.11/24", Dhcp), ("192.0.2.250/32", Static)][..], none, none, none, 0),
            (&[("192.0.2.250/32", Static), ("192.0.2.11/24", Dhcp)], none, none, none, 1),
            (&[("192.0.2.250/32", Static), ("192.0.2.11/24", Static)], none, none, none, 1),
            // The virtual address has the length of the network.
            (
                &[("192.0.2.11/24", Dhcp), ("192.0.2.250/24", Secondary)],
                "192.0.2.11",
                none,
                none,
                0,
            ),
            // It was published by mistake before.
            (&[("192.0.2.250/32", Static), ("192.0.2.11/24", Dhcp)], none, none, "192.0.2.250", 1),
            // IPv6, from advertisements and from DHCPv6.
            (&[("2001:db8::250/128", Static), ("2001:db8::11/64", Dhcp)], none, none, none, 1),
            (&[("2001:db8::250/128", Static), ("2001:db8::11/128", Dhcp)], none, none, none, 1),
            (&[("2001:db8::77/64", Privacy), ("2001:db8::11/64", Dhcp)], none, none, none, 1),
            // Its only address is a /32: cloud providers with routed addresses.
            (&[("192.0.2.11/32", Static)], none, none, none, 0),
            (&[("192.0.2.250/32", Static), ("192.0.2.11/32", Dhcp)], none, none, none, 1),
            (&[("192.0.2.250/32", Static), ("192.0.2.11/32", Static)], none, none, "192.0.2.11", 1),
            // The host's own address is a /32 with a route to the gateway, and gets a private one.
            (&[("192.0.2.11/32", Static), ("10.0.0.5/24", Static)], "192.0.2.11", none, none, 0),
            // The route names the source address.
            (
                &[("192.0.2.11/24", Static), ("192.0.2.250/32", Static)],
                "192.0.2.11",
                "192.0.2.250",
                "192.0.2.11",
                1,
            ),
            // Two networks: the one of the gateway, except if the other was used before.
            (&[("10.0.0.1/8", Static), ("192.0.2.11/24", Dhcp)], "192.0.2.11", none, none, 1),
            (&[("10.0.0.1/8", Static), ("192.0.2.11/24", Dhcp)], "192.0.2.11", none, "10.0.0.1", 0),
            // An address that the host had before and has no longer.
            (&[("192.0.2.11/24", Dhcp), ("192.0.2.12/24", Secondary)], none, none, "192.0.2.9", 0),
            (&[("fe80::1/64", Static), ("2001:db8::250/128", Static)], none, none, none, 1),
        ] {
            let addresses: Vec<_> =
                addresses.iter().map(|(text, origin)| address(text, *origin)).collect();
            let family = Family::of(addresses[0].address);
            let mut facts = facts();
            facts.default.retain(|route| route.family == family);
            facts.default[0].source = given.parse().ok();
            facts.default[0].hops[0].source = usual.parse().ok();
            facts.interfaces[1].addresses = addresses.clone();
            let previous = previous.parse::<IpAddr>().into_iter().collect();
            for iface in [vec![], vec!["eth0".into()]] {
                let selectors = Selectors { iface, previous, ..Selectors::default() };
                let got = choose(&selectors, [family], &facts).unwrap();
                let want = addresses[want].address;
                assert_eq!(got.address[family], Some(want), "{addresses:?}");
            }
        }
    }

    #[test]
    fn doubts_say_why_an_address_may_be_unfit() {
        let mut facts = facts();
        let with = |facts: &mut Facts, text| {
            facts.interfaces[1].addresses = vec![address(text, Origin::Static)];
        };
        let doubt = |facts: &Facts, iface: &[&str]| {
            choose(&selectors(iface, &[], &[]), V4, facts).unwrap().doubts.v4
        };
        for (text, want) in [
            ("192.0.2.11/24", None),
            ("192.0.2.250/32", Some(AddressDoubt::Movable)),
            ("169.254.0.9/16", Some(AddressDoubt::LinkLocal)),
        ] {
            with(&mut facts, text);
            assert_eq!(doubt(&facts, &[]), want, "{text}");
            assert_eq!(doubt(&facts, &["eth0"]), want, "{text}");
            let address = text.split('/').next().unwrap();
            assert_eq!(doubt(&facts, &[address]), None, "{text}: a user named it");
        }
        // A made-up default route, the same on each host.
        facts.interfaces[1].isolated = true;
        facts.interfaces[2].up = false;
        with(&mut facts, "203.0.113.254/31");
        assert_eq!(doubt(&facts, &[]), Some(AddressDoubt::Isolated));
        assert_eq!(doubt(&facts, &["eth0"]), None, "a user named it");
    }

    #[test]
    fn the_mtu_of_loopback_is_that_of_the_uplinks() {
        let mut facts = facts();
        facts.interfaces[0].mtu = 65536;
        facts.interfaces[0].addresses.push(address("10.10.10.10/32", Origin::Static));
        let mtu = |facts: &Facts| choose(&selectors(&["lo"], &[], &[]), V4, facts).unwrap().mtu;
        assert_eq!(mtu(&facts), 1500);
        facts.interfaces[1].mtu = 9000;
        facts.default = vec![default_route(Family::V4, &["eth0", "eth1"])];
        assert_eq!(mtu(&facts), 1500, "the smaller of two");
        facts.interfaces[2].mtu = 8000;
        assert_eq!(mtu(&facts), 8000);
        facts.default = vec![default_route(Family::V4, &["lo"])];
        assert_eq!(mtu(&facts), 1500, "no uplink is known");
        facts.default.push(default_route(Family::V6, &["eth1"]));
        assert_eq!(mtu(&facts), 1500, "IPv6 is not enabled");
        facts.default.pop();
        facts.interfaces[0].mtu = 1400;
        assert_eq!(mtu(&facts), 1400, "its own is smaller");
    }

    #[test]
    fn the_best_address_is_used() {
        let address = |text: &str, usable, permanent, temporary| Address {
            address: text.parse().unwrap(),
            usable,
            permanent,
            temporary,
            alone: false,
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
