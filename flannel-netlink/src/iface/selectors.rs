//! The options that select the external interface.

use std::fmt;
use std::net::IpAddr;

use flannel_core::Subnet;
use flannel_core::address::{Dual, Family};

/// The options that select the external interface, and what the store says about the host. The
/// selectors are tried in the order of the fields. If all are empty, the public address selects the
/// interface: it must be an address of the interface. Without any selector, the default route
/// selects it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Selectors {
    /// Names, addresses or networks that the store prescribes for this host
    /// ([`Hints::interface`](flannel_core::subnet::Hints::interface)). If there is one, the other
    /// selectors are not tried.
    pub prescribed: Vec<String>,
    /// Names or addresses of interfaces (`--iface`), tried first, in this order.
    pub iface: Vec<String>,
    /// Regular expressions for addresses, then for names (`--iface-regex`), tried next.
    pub iface_regex: Vec<String>,
    /// Networks in one of which the interface has an address (`--iface-cidr`), tried next.
    pub iface_cidr: Vec<Subnet>,
    /// The interface has an address that the store knows as one of this host
    /// (`--iface-node-ip`), tried next.
    pub by_node_address: bool,
    /// An address to which the kernel sends packets through the interface (`--iface-can-reach`),
    /// tried last.
    pub can_reach: Option<IpAddr>,
    /// The addresses at which peers reach this host (`--public-ip`, `--public-ipv6`). `None` for
    /// the address of the interface.
    pub public: Dual<IpAddr>,
    /// The addresses of this host in the store, such as those of a Kubernetes node
    /// ([`Hints::node_addresses`](flannel_core::subnet::Hints::node_addresses)), for
    /// [`Selectors::by_node_address`].
    pub node_addresses: Dual<IpAddr>,
    /// The networks of pods. An address in them is not selected by
    /// [`Selectors::iface_regex`], [`Selectors::iface_cidr`] and [`Selectors::by_node_address`].
    pub pod_networks: Vec<Subnet>,
    /// The addresses that this host had before. If the chosen interface has one, it is preferred to
    /// other addresses that are as fit.
    pub previous: Dual<IpAddr>,
}

/// One way to select the external interface.
pub(super) enum Selector<'a> {
    /// A name, an address or a network that the store prescribes.
    Prescribed(&'a str),
    /// A name or an address of an interface.
    Iface(&'a str),
    /// A regular expression.
    IfaceRegex(&'a str),
    /// Networks of addresses.
    IfaceCidr(&'a [Subnet]),
    /// The addresses of this host in the store.
    NodeAddress,
    /// An address to which the interface leads.
    CanReach(IpAddr),
    /// The public address of this host.
    Public(IpAddr),
    DefaultRoute,
}

impl Selectors {
    /// The selectors in the order in which they are tried.
    pub(super) fn in_order(&self) -> Vec<Selector<'_>> {
        if !self.prescribed.is_empty() {
            return self.prescribed.iter().map(|text| Selector::Prescribed(text)).collect();
        }
        let mut given = Vec::new();
        given.extend(self.iface.iter().map(|text| Selector::Iface(text)));
        given.extend(self.iface_regex.iter().map(|regex| Selector::IfaceRegex(regex)));
        if !self.iface_cidr.is_empty() {
            given.push(Selector::IfaceCidr(&self.iface_cidr));
        }
        if self.by_node_address {
            given.push(Selector::NodeAddress);
        }
        given.extend(self.can_reach.map(Selector::CanReach));
        if given.is_empty() {
            given.push(match self.public.values().next() {
                Some(address) => Selector::Public(*address),
                None => Selector::DefaultRoute,
            });
        }
        given
    }

    /// Whether the default route is the selector.
    pub(crate) fn by_default_route(&self) -> bool {
        matches!(self.in_order()[..], [Selector::DefaultRoute])
    }
}

/// The name of the option and its value.
impl fmt::Display for Selector<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Prescribed(text) => write!(f, "prescribed interface {text}"),
            Self::Iface(text) => write!(f, "iface {text}"),
            Self::IfaceRegex(regex) => write!(f, "iface-regex {regex}"),
            Self::IfaceCidr(networks) => {
                let texts: Vec<String> = networks.iter().map(ToString::to_string).collect();
                write!(f, "iface-cidr {}", texts.join(", "))
            }
            Self::NodeAddress => f.write_str("iface-node-ip"),
            Self::CanReach(address) => write!(f, "iface-can-reach {address}"),
            Self::Public(address) => match Family::of(*address) {
                Family::V4 => write!(f, "public-ip {address}"),
                Family::V6 => write!(f, "public-ipv6 {address}"),
            },
            Self::DefaultRoute => f.write_str("default route"),
        }
    }
}
