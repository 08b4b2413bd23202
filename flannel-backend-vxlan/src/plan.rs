//! What each peer adds: a neighbour, a forwarding entry and a route; or with DirectRouting a route
//! alone.
//!
//! The gateway of every route is the peer's subnet base, an address that exists only as the
//! permanent neighbour whose MAC address the forwarding entry leads to the peer's VTEP.
//!
//! **Source**: flannel `pkg/backend/vxlan/vxlan_network.go: handleSubnetEvents`.

use flannel_core::Subnets;
use flannel_core::address::Dual;
use flannel_core::backend::{Env, Rejected};
use flannel_core::json::{FieldError, Fields};
use flannel_core::lease::{Endpoint, Offer};
use flannel_core::object::{Fdb, LinkName, MacAddr, Neigh, Object, Route, Via};

/// The backend type in leases.
pub(crate) const TYPE: &str = "vxlan";

#[derive(Debug, Clone, Copy)]
pub(crate) struct Plan {
    /// The tunnel device of each enabled family.
    pub(crate) devices: Dual<LinkName>,
    /// Peers on this link are reached without a tunnel.
    pub(crate) direct: Option<LinkName>,
}

impl Plan {
    pub(crate) fn objects(
        &self,
        subnets: &Subnets,
        offer: &Offer,
        env: &Env<'_>,
        out: &mut Vec<Object>,
    ) -> Result<(), Rejected> {
        let mut bad = None;
        for peer in offer.endpoints(subnets) {
            let Some(device) = self.devices[peer.subnet.family()] else { continue };
            // What one family lacks is no reason to lose the other.
            if let Err(error) = self.endpoint(device, &peer, env, out) {
                env.advise(error.0.clone());
                bad = Some(error);
            }
        }
        if out.is_empty() {
            let nothing = || {
                Rejected("it has no public address with backend data for any enabled family".into())
            };
            return Err(bad.unwrap_or_else(nothing));
        }
        Ok(())
    }

    fn endpoint(
        &self,
        link: LinkName,
        peer: &Endpoint<'_>,
        env: &Env<'_>,
        out: &mut Vec<Object>,
    ) -> Result<(), Rejected> {
        // A node that published nothing for a family cannot be reached by it, but by the other one.
        let (Some(public), Some(data)) = (peer.public, peer.data) else { return Ok(()) };
        let mac = vtep_mac(data)?;
        let dst = peer.subnet;
        let direct = self.direct.filter(|uplink| env.on_link(public) == Some(*uplink));
        if let Some(uplink) = direct {
            let via = Via::Gateway { gateway: public, link: uplink, onlink: false };
            out.push(Route { dst, via, mtu: None }.into());
            return Ok(());
        }
        let gateway = dst.base();
        out.push(Neigh { link, address: gateway, mac }.into());
        out.push(Fdb { link, mac, dst: public }.into());
        out.push(
            Route { dst, via: Via::Gateway { gateway, link, onlink: true }, mtu: None }.into(),
        );
        Ok(())
    }
}

/// Reads the VTEP's MAC address; the VNI in the data is not looked at, as in Go flannel.
pub(crate) fn vtep_mac(data: &str) -> Result<MacAddr, FieldError> {
    let expected = "the MAC address of the node's tunnel device, such as \"0a:1b:2c:3d:4e:5f\"";
    let fields = Fields::parse(data, "BackendData")?;
    let mac: Option<MacAddr> = fields.parsed("VtepMAC", expected)?;
    let mac = mac.ok_or_else(|| fields.error("VtepMAC", &"nothing", expected))?;
    if mac.is_unicast() { Ok(mac) } else { Err(fields.error("VtepMAC", &mac, expected)) }
}

/// The backend data that peers read: field order and form as Go flannel writes and, by text
/// surgery, reads it.
pub(crate) fn backend_data(vni: u32, mac: MacAddr) -> String {
    format!(r#"{{"VNI":{vni},"VtepMAC":"{mac}"}}"#)
}
