//! The network between the nodes, below the tunnels.

use super::ExternalInterface;
use crate::address::{Dual, Family};

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
