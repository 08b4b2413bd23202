//! The options that select the external interface.

use std::fmt;
use std::net::IpAddr;

use flannel_core::address::{Dual, Family};

/// The options that select the external interface. If `iface`, `iface_regex` and `can_reach` are
/// empty, the public address selects it: it must be an address of the interface. Without
/// any selector, the default route selects it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Selectors {
    /// Names or addresses of interfaces (`--iface`), tried first, in this order.
    pub iface: Vec<String>,
    /// Regular expressions for addresses, then for names (`--iface-regex`), tried next.
    pub iface_regex: Vec<String>,
    /// An address to which the kernel sends packets through the interface (`--iface-can-reach`),
    /// tried last.
    pub can_reach: Option<IpAddr>,
    /// The addresses at which peers reach this host (`--public-ip`, `--public-ipv6`). `None` for
    /// the address of the interface.
    pub public: Dual<IpAddr>,
}

/// One way to select the external interface.
pub(super) enum Selector<'a> {
    /// A name or an address of an interface.
    Iface(&'a str),
    /// A regular expression.
    IfaceRegex(&'a str),
    /// An address to which the interface leads.
    CanReach(IpAddr),
    /// The public address of this host.
    Public(IpAddr),
    DefaultRoute,
}

impl Selectors {
    /// The selectors in the order in which they are tried.
    pub(super) fn in_order(&self) -> Vec<Selector<'_>> {
        let mut given = Vec::new();
        given.extend(self.iface.iter().map(|text| Selector::Iface(text)));
        given.extend(self.iface_regex.iter().map(|regex| Selector::IfaceRegex(regex)));
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
            Self::Iface(text) => write!(f, "iface {text}"),
            Self::IfaceRegex(regex) => write!(f, "iface-regex {regex}"),
            Self::CanReach(address) => write!(f, "iface-can-reach {address}"),
            Self::Public(address) => match Family::of(*address) {
                Family::V4 => write!(f, "public-ip {address}"),
                Family::V6 => write!(f, "public-ipv6 {address}"),
            },
            Self::DefaultRoute => f.write_str("default route"),
        }
    }
}
