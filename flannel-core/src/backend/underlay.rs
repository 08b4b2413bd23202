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
    /// Checks that packets reach the node with these subnets at its public address. `is_direct`:
    /// they need no tunnel.
    ///
    /// # Errors
    /// The address is one of this node, or a tunnel cannot reach it.
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
