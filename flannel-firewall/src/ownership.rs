//! Which rules of flannel a firewall may change: the rules for its own pod networks.
//!
//! Several daemons may run on a host, each with a network, also Go flannel. All of them use the
//! same names of tables and chains. A rule belongs to the network of its first address: all rules
//! of flannel begin with the addresses of their own network, also those of Go flannel. With
//! iptables the daemons share chains, as those of Go flannel do. With nftables each daemon has
//! tables of its own, because a table is replaced as a whole.

use flannel_core::Subnet;

/// The rules that a firewall may change.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) enum Ownership {
    /// All rules of flannel.
    #[default]
    Everything,
    /// The rules for these networks, and for networks that overlap one of them: two networks of one
    /// host do not overlap. Rules without an address belong to everybody.
    Networks(Vec<Subnet>),
}

impl Ownership {
    /// Whether rules for this network may be changed.
    pub(crate) fn has(&self, network: Subnet) -> bool {
        match self {
            Self::Everything => true,
            Self::Networks(networks) => networks.iter().any(|own| own.overlaps(&network)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_network_owns_what_overlaps_it() {
        let own = Ownership::Networks(vec!["10.1.0.0/16".parse().unwrap()]);
        for (network, is_own) in [
            ("10.1.0.0/16", true),
            ("10.1.7.0/24", true),
            ("10.0.0.0/8", true),
            ("10.2.0.0/16", false),
            ("fd00::/8", false),
        ] {
            assert_eq!(own.has(network.parse().unwrap()), is_own, "{network}");
            assert!(Ownership::Everything.has(network.parse().unwrap()));
        }
    }
}
