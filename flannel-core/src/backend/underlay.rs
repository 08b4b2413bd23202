//! The network between the nodes, below the tunnels.

use std::net::IpAddr;

use super::ExternalInterface;
use crate::address::{Dual, Family};
use crate::lease::Subnets;
use crate::status::Rejection;

impl ExternalInterface {
    /// Its address of a family that the network needs.
    ///
    /// # Errors
    /// It has none. The text names the interface.
    pub fn needed(&self, family: Family) -> Result<IpAddr, String> {
        let missing = || format!("{} has no {family} address, which the network needs", self.name);
        self.address[family].ok_or_else(missing)
    }
}

/// The end of tunnels on this node, with which a plan checks the ends on peers.
#[derive(Debug, Clone, Copy)]
pub struct LocalEnd {
    /// The addresses of the external interface.
    pub addresses: Dual<IpAddr>,
    /// The subnets of this node. A plan also runs for its own lease.
    pub subnets: Subnets,
}

impl LocalEnd {
    /// Checks the public address of the node with these subnets against this node's addresses. A
    /// link-local address is only good for a peer without a tunnel (`is_direct`). Whether packets
    /// reach the address is not checked.
    ///
    /// # Errors
    /// The address is one of this node, unless the subnets are this node's. Or it is link-local
    /// and not `is_direct`.
    pub fn check(
        &self,
        public: IpAddr,
        subnets: &Subnets,
        is_direct: bool,
    ) -> Result<(), Rejection> {
        if self.addresses[Family::of(public)] == Some(public) && !self.subnets.overlaps(subnets) {
            return Err(Rejection::OwnAddress(public));
        }
        // A gateway has a link. The remote address of a tunnel has none.
        match public {
            IpAddr::V6(address) if address.is_unicast_link_local() && !is_direct => {
                let reason = "is link-local, which a tunnel cannot reach";
                Err(Rejection::Rejected(format!("its public address {public} {reason}")))
            }
            _ => Ok(()),
        }
    }
}

/// The MTU of the network between the nodes, in bytes: `given` in the config (`Backend.MTU`), else
/// that of the external interface. `None` if neither is known. `overhead` is the size of the
/// headers that the tunnel of each enabled family adds.
///
/// # Errors
/// It is larger than that of the interface, or too small for a tunnel. The text says by how much.
pub fn underlay_mtu(
    given: Option<u32>,
    uplink: Option<&ExternalInterface>,
    overhead: &Dual<u32>,
) -> Result<Option<u32>, String> {
    let (field, underlay) = match (given, uplink) {
        (Some(mtu), Some(uplink)) if mtu > uplink.mtu => {
            let (most, name) = (uplink.mtu, uplink.name);
            return Err(format!("Backend.MTU {mtu}: at most {most}, the MTU of {name}"));
        }
        (Some(mtu), _) => ("Backend.MTU", mtu),
        (None, Some(uplink)) => ("the interface's MTU", uplink.mtu),
        (None, None) => return Ok(None),
    };
    let least = |family: Family, overhead: u32| family.least_mtu() + overhead;
    let neediest = overhead.iter().max_by_key(|(family, overhead)| least(*family, **overhead));
    let too_small = neediest.filter(|(family, overhead)| underlay < least(*family, **overhead));
    let Some((family, overhead)) = too_small else { return Ok(Some(underlay)) };
    let (least, own) = (least(family, *overhead), family.least_mtu());
    let needs = format!("at least {least}, its own {own} and {overhead} for the tunnel");
    Err(format!("{field} {underlay} is too small for {family}: {needs}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[test]
    fn an_address_of_this_node_and_a_link_local_one_are_no_ends_of_a_tunnel() {
        let own: Subnets = "10.1.9.0-24&fd00:1:0:9::-64".parse().unwrap();
        let peer: Subnets = "10.1.7.0-24&fd00:1:0:7::-64".parse().unwrap();
        let addresses = ["192.0.2.9", "fe80::9"].map(address).into_iter().collect();
        let local = LocalEnd { addresses, subnets: own };
        let check = |public: &str, subnets, is_direct| {
            let checked = local.check(address(public), subnets, is_direct);
            checked.map_err(|rejected| rejected.to_string())
        };
        for direct in [false, true] {
            for good in ["192.0.2.7", "2001:db8::7", "169.254.0.7"] {
                assert_eq!(check(good, &peer, direct), Ok(()), "{good}");
            }
            let error = check("192.0.2.9", &peer, direct).unwrap_err();
            assert_eq!(error, Rejection::OwnAddress(address("192.0.2.9")).to_string());
            assert_eq!(check("192.0.2.9", &own, direct), Ok(()), "its own lease");
        }
        let error = check("fe80::7", &peer, false).unwrap_err();
        assert!(error.contains("fe80::7 is link-local"), "{error}");
        assert_eq!(check("fe80::7", &peer, true), Ok(()));
        assert!(check("fe80::9", &peer, true).is_err(), "it is this node's");
    }

    #[test]
    fn an_address_that_is_needed_and_missing_is_an_error_with_the_interface() {
        let uplink = ExternalInterface {
            name: "eth7".parse().unwrap(),
            mtu: 1500,
            address: Dual { v4: Some(address("192.0.2.9")), v6: None },
            public: Dual { v4: None, v6: Some(address("2001:db8::9")) },
            reason: "the test says so".into(),
        };
        assert_eq!(uplink.needed(Family::V4), Ok(address("192.0.2.9")));
        let error = uplink.needed(Family::V6).unwrap_err();
        assert_eq!(error, "eth7 has no IPv6 address, which the network needs");
    }
}
