//! The network between the nodes, below the tunnels.

use std::net::IpAddr;

use super::ExternalInterface;
use crate::address::{Dual, Family};
use crate::lease::Subnets;
use crate::status::Rejection;

impl ExternalInterface {
    /// The address of the interface for a family that the network needs.
    ///
    /// # Errors
    /// The interface has no such address. The text names the interface.
    pub fn needed(&self, family: Family) -> Result<IpAddr, String> {
        self.address[family].ok_or_else(|| {
            format!("{} has no {family} address, which the network needs", self.name)
        })
    }
}

/// This node's end of a tunnel. A plan compares the ends of peers with it.
#[derive(Debug, Clone, Copy)]
pub struct LocalEnd {
    /// The addresses of the external interface.
    pub addresses: Dual<IpAddr>,
    /// The subnets of this node. They show that a plan runs for this node's own lease.
    pub subnets: Subnets,
}

impl LocalEnd {
    /// Checks the public address of the node that has these subnets. `is_direct` says that packets
    /// to the node do not use the tunnel. Whether packets reach the address is not checked.
    ///
    /// # Errors
    /// The address belongs to this node, although the subnets belong to another node. Or it is a
    /// link-local address, and packets use the tunnel.
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

/// The MTU of the network between the nodes, in bytes: the smaller of the value in the config
/// (`Backend.MTU`), which is `given`, and the MTU of the external interface. `None` if neither is
/// known. `overhead` is the size of the headers that the tunnel of each enabled family adds, in
/// bytes.
///
/// One config serves all nodes, and some of them may have interfaces with a smaller MTU. So a node
/// whose interface carries less than the config says uses what it carries
/// ([`Datapath::mtu_above`](super::Datapath::mtu_above)).
///
/// # Errors
/// The MTU is too small for the tunnel. The text has the limit.
pub fn underlay_mtu(
    given: Option<u32>,
    uplink: Option<&ExternalInterface>,
    overhead: &Dual<u32>,
) -> Result<Option<u32>, String> {
    let (field, underlay) = match (given, uplink) {
        (Some(mtu), uplink) if uplink.is_none_or(|uplink| mtu <= uplink.mtu) => {
            ("Backend.MTU", mtu)
        }
        (_, Some(uplink)) => ("the interface's MTU", uplink.mtu),
        (_, None) => return Ok(None),
    };
    let least = |family: Family, overhead: u32| family.least_mtu() + overhead;
    let neediest = overhead.iter().max_by_key(|(family, overhead)| least(*family, **overhead));
    let too_small = neediest.filter(|(family, overhead)| underlay < least(*family, **overhead));
    let Some((family, overhead)) = too_small else { return Ok(Some(underlay)) };
    let least = least(family, *overhead);
    let own = family.least_mtu();
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
        let uplink = ExternalInterface::new(
            "eth7".parse().unwrap(),
            1500,
            Dual { v4: Some(address("192.0.2.9")), v6: None },
        )
        .with_public(Dual { v4: None, v6: Some(address("2001:db8::9")) })
        .with_reason("the test says so");
        assert_eq!(uplink.needed(Family::V4), Ok(address("192.0.2.9")));
        let error = uplink.needed(Family::V6).unwrap_err();
        assert_eq!(error, "eth7 has no IPv6 address, which the network needs");
    }
}
