//! The objects of a peer: a neighbour, a forwarding entry and a route, or with DirectRouting a
//! route alone.
//!
//! The gateway of the route is the first address of the peer's subnet. The neighbour maps it to the
//! MAC address of the peer's VTEP. The forwarding entry maps the MAC address to the peer's public
//! address.
//!
//! **Source**: flannel `pkg/backend/vxlan/vxlan_network.go: handleSubnetEvents`.

use flannel_core::Subnets;
use flannel_core::address::Dual;
use flannel_core::backend::{Advice, Env, LocalEnd};
use flannel_core::json::{FieldError, Fields};
use flannel_core::lease::{Endpoint, Offer};
use flannel_core::object::{Fdb, LinkName, MacAddr, Neigh, Object, Route, Via};
use flannel_core::status::Rejection;

/// The backend type in leases.
pub(crate) const TYPE: &str = "vxlan";

/// Plans the objects of a peer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct VxlanPlan {
    /// The tunnel device of each enabled family.
    pub(crate) devices: Dual<LinkName>,
    /// Peers on this link are reached without a tunnel.
    pub(crate) direct: Option<LinkName>,
    pub(crate) local: LocalEnd,
    /// The VNI of this node's tunnels.
    pub(crate) vni: u32,
}

impl VxlanPlan {
    pub(crate) fn objects(
        &self,
        subnets: &Subnets,
        offer: &Offer,
        env: &Env<'_>,
        out: &mut Vec<Object>,
    ) -> Result<(), Rejection> {
        let unused = "it has no public address with backend data for any enabled family";
        env.plan_each(offer.endpoints(subnets), out, unused, |end, out| {
            let Endpoint { subnet: dst, public, data } = end;
            // A family that is disabled here, or not published, leaves the other one.
            let device = self.devices[dst.family()];
            let (Some(link), Some(public), Some(data)) = (device, public, data) else {
                return Ok(());
            };
            let direct = self.direct.filter(|uplink| env.on_link(public) == Some(*uplink));
            self.local.check(public, subnets, direct.is_some())?;
            let Vtep { mac, vni } = Vtep::parse(data)?;
            let via = match direct {
                Some(link) => Via::Gateway { gateway: public, link, onlink: false },
                None => {
                    if let Some(theirs) = vni.filter(|theirs| *theirs != self.vni) {
                        env.advise(Advice::OtherVni { theirs, ours: self.vni });
                    }
                    let gateway = dst.base();
                    out.push(Neigh { link, address: gateway, mac }.into());
                    out.push(Fdb { link, mac, dst: public }.into());
                    Via::Gateway { gateway, link, onlink: true }
                }
            };
            out.push(Route { dst, via, mtu: None }.into());
            Ok(())
        })
    }
}

/// The tunnel device of a node, as of its backend data.
pub(crate) struct Vtep {
    pub(crate) mac: MacAddr,
    /// `None` if it is missing, as in leases of old versions of flannel, or is no number. Such a
    /// lease is accepted, as is one with another VNI.
    vni: Option<u32>,
}

impl Vtep {
    /// Reads backend data.
    ///
    /// # Errors
    /// It has no unicast MAC address.
    pub(crate) fn parse(data: &str) -> Result<Self, FieldError> {
        let expected = "the MAC address of the node's tunnel device, such as \"0a:1b:2c:3d:4e:5f\"";
        let fields = Fields::parse(data, "BackendData")?;
        let vni = fields.take::<u32>("VNI", "a number").ok().flatten();
        match fields.parsed::<MacAddr>("VtepMAC", expected)? {
            None => Err(fields.error("VtepMAC", &"nothing", expected)),
            Some(mac) if !mac.is_unicast() => Err(fields.error("VtepMAC", &mac, expected)),
            Some(mac) => Ok(Self { mac, vni }),
        }
    }
}

/// The backend data, byte for byte as Go flannel writes it.
pub(crate) fn backend_data(vni: u32, mac: MacAddr) -> String {
    format!(r#"{{"VNI":{vni},"VtepMAC":"{mac}"}}"#)
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use flannel_core::backend::Reach;

    use super::*;

    fn own() -> Subnets {
        "10.1.9.0-24&fd00:1:0:9::-64".parse().unwrap()
    }

    fn nowhere() -> LocalEnd {
        LocalEnd { addresses: Dual::default(), subnets: own() }
    }

    #[test]
    fn no_tunnel_leads_to_this_node_itself() {
        let [v4, v6] = ["flannel.1", "flannel-v6.1"].map(|name| name.parse().unwrap());
        let address = |text: &str| text.parse::<IpAddr>().unwrap();
        let addresses = ["192.0.2.9", "2001:db8::9"].map(address).into_iter().collect();
        let devices = Dual { v4: Some(v4), v6: Some(v6) };
        let local = LocalEnd { addresses, subnets: own() };
        let plan = VxlanPlan { devices, direct: None, local, vni: 1 };
        let data: Box<str> = r#"{"VtepMAC":"0a:00:00:00:00:07"}"#.into();
        let plan_of = |subnets: Subnets, public: [&str; 2]| {
            let public = public.map(address).into_iter().collect();
            let data = Dual { v4: Some(data.clone()), v6: Some(data.clone()) };
            let offer = Offer::new(public).with_kind(TYPE).with_data(data);
            let mut objects = Vec::new();
            let env = Env::new(&|_| None);
            let result = plan.objects(&subnets, &offer, &env, &mut objects);
            Planned { objects: objects.len(), result, advisories: env.into_parts().1 }
        };
        let peer = "10.1.7.0-24&fd00:1:0:7::-64".parse().unwrap();
        let own_v6 = Rejection::OwnAddress(address("2001:db8::9"));
        let planned = plan_of(peer, ["192.0.2.9", "2001:db8::9"]);
        let expected = Planned { objects: 0, result: Err(own_v6.clone()), advisories: vec![] };
        assert_eq!(planned, expected);
        let planned = plan_of(peer, ["192.0.2.7", "2001:db8::9"]);
        let advisories = vec![Advice::from(&own_v6)];
        assert_eq!(planned, Planned { objects: 3, result: Ok(()), advisories });
        // For its own lease a node reserves these objects.
        let planned = plan_of(own(), ["192.0.2.9", "2001:db8::9"]);
        assert_eq!(planned.objects, 6);
        assert_eq!(planned.result, Ok(()));
    }

    #[test]
    fn another_vni_is_advice_unless_packets_need_no_tunnel() {
        let [v4, v6, eth0] =
            ["flannel.1", "flannel-v6.1", "eth0"].map(|name| name.parse::<LinkName>().unwrap());
        let devices = Dual { v4: Some(v4), v6: Some(v6) };
        let subnets = "10.1.7.0-24&fd00:1:0:7::-64".parse().unwrap();
        let advice = |vni: [&str; 2], direct: Option<LinkName>| {
            let public = ["192.0.2.7", "2001:db8::7"].map(|text| text.parse::<IpAddr>().unwrap());
            let [of_v4, of_v6] = vni.map(|vni| {
                Some(format!(r#"{{{vni}"VtepMAC":"0a:00:00:00:00:07"}}"#).into_boxed_str())
            });
            let offer = Offer::new(public.into_iter().collect())
                .with_kind(TYPE)
                .with_data(Dual { v4: of_v4, v6: of_v6 });
            let plan = VxlanPlan { devices, direct, local: nowhere(), vni: 1 };
            let answer = |_: IpAddr| direct.map(Reach::Direct);
            let env = Env::new(&answer);
            let mut objects = Vec::new();
            plan.objects(&subnets, &offer, &env, &mut objects).unwrap();
            env.into_parts().1
        };
        let other = r#""VNI":4096,"#;
        for one in [[other, ""], ["", other]] {
            assert_eq!(advice(one, None), [Advice::OtherVni { theirs: 4096, ours: 1 }]);
        }
        for same in [r#""VNI":1,"#, r#""VNI":null,"#, r#""VNI":"x","#, ""] {
            assert_eq!(advice([same, same], None), [], "{same}");
        }
        assert_eq!(advice([other, other], Some(eth0)), []);
    }

    #[derive(Debug, PartialEq)]
    struct Planned {
        /// The number of objects.
        objects: usize,
        result: Result<(), Rejection>,
        advisories: Vec<Advice>,
    }

    #[test]
    fn an_offer_without_data_is_rejected_whatever_other_plans_added() {
        let link: LinkName = "flannel.1".parse().unwrap();
        let devices = Dual { v4: Some(link), v6: None };
        let plan = VxlanPlan { devices, direct: None, local: nowhere(), vni: 1 };
        let other = Neigh { link, address: [10, 1, 8, 0].into(), mac: MacAddr::local([1; 6]) };
        let mut objects = vec![other.into()];
        let subnets = "10.1.7.0-24".parse().unwrap();
        let env = Env::new(&|_| None);
        let rejected = plan.objects(&subnets, &Offer::default(), &env, &mut objects);
        assert!(rejected.is_err() && objects.len() == 1, "{rejected:?} {objects:?}");
    }

    #[test]
    fn a_vtep_has_a_unicast_mac_and_a_public_address_that_needs_no_link() {
        let [device, eth0]: [LinkName; 2] =
            ["flannel-v6.1", "eth0"].map(|name| name.parse().unwrap());
        let verdict_of = |public: &str, mac: &str, direct: Option<LinkName>, is_on_link: bool| {
            let devices = Dual { v4: None, v6: Some(device) };
            let plan = VxlanPlan { devices, direct, local: nowhere(), vni: 1 };
            let offer = Offer::new([public.parse::<IpAddr>().unwrap()].into_iter().collect())
                .with_kind(TYPE)
                .with_data(Dual { v4: None, v6: Some(format!(r#"{{"VtepMAC":"{mac}"}}"#).into()) });
            let subnets = "0.0.0.0-0&fd00:1:0:7::-64".parse().unwrap();
            let reach = direct.filter(|_| is_on_link).map_or(Reach::NotDirect, Reach::Direct);
            let answer = |_: IpAddr| Some(reach);
            let mut objects = Vec::new();
            let rejected = plan.objects(&subnets, &offer, &Env::new(&answer), &mut objects);
            (objects.len(), rejected.err().map(|why| why.to_string()).unwrap_or_default())
        };
        let verdict = |public: &str, mac: &str, direct| verdict_of(public, mac, direct, true);
        let global = "2001:db8::7";
        let mac = "0a:00:00:00:00:07";
        assert_eq!(verdict(global, mac, None), (3, String::new()));
        for bad in
            ["ff:ff:ff:ff:ff:ff", "01:00:5e:00:00:01", "33:33:00:00:00:01", "00:00:00:00:00:00"]
        {
            let (objects, why) = verdict(global, bad, None);
            let names = format!("field BackendData.VtepMAC: {bad} is not valid");
            assert!(objects == 0 && why.starts_with(&names), "{objects}: {why}");
        }
        let why = "its public address fe80::7 is link-local, which a tunnel cannot reach";
        assert_eq!(verdict("fe80::7", mac, None), (0, why.into()));
        assert_eq!(verdict_of("fe80::7", mac, Some(eth0), false), (0, why.into()));
        assert_eq!(verdict("fe80::7", mac, Some(eth0)), (1, String::new()), "a gateway on eth0");
    }
}
