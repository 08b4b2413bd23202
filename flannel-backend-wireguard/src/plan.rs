//! The objects of a peer: one peer of each tunnel device. The route to all peers is in the base.
//!
//! **Source**: flannel `pkg/backend/wireguard/wireguard_network.go: handleSubnetEvents`.

use std::net::IpAddr;

use flannel_core::Subnets;
use flannel_core::address::Dual;
use flannel_core::backend::{Env, LocalEnd};
use flannel_core::json::{FieldError, Fields};
use flannel_core::lease::{Endpoint, Offer};
use flannel_core::object::{LinkName, Object, Peer, PeerAttributes, PublicKey, Secret};
use flannel_core::status::Rejection;

use crate::options::Mode;
use crate::signature;

/// The backend type in leases.
pub(crate) const TYPE: &str = "wireguard";

/// Plans the WireGuard peers for a node.
#[derive(Debug, Clone)]
pub(crate) struct TunnelPlan {
    pub(crate) mode: Mode,
    /// The tunnel device of each enabled family.
    pub(crate) devices: Dual<LinkName>,
    /// The UDP ports of nodes that do not publish their ports.
    pub(crate) ports: Dual<u16>,
    pub(crate) psk: Option<Secret>,
    pub(crate) keepalive: u16,
    pub(crate) local: LocalEnd,
    /// The addresses that this node publishes.
    pub(crate) public: Dual<IpAddr>,
}

/// The backend data of a family.
struct Data {
    key: PublicKey,
    /// `None` if the node does not publish it.
    port: Option<u16>,
}

impl TunnelPlan {
    pub(crate) fn objects(
        &self,
        subnets: &Subnets,
        offer: &Offer,
        env: &Env<'_>,
        out: &mut Vec<Object>,
    ) -> Result<(), Rejection> {
        let ends: Vec<Endpoint<'_>> = offer
            .endpoints(subnets)
            .filter(|end| self.devices[end.subnet.family()].is_some())
            .collect();
        // The only tunnel carries all families.
        let of_tunnel = if self.mode == Mode::Separate { 1 } else { ends.len().max(1) };
        let unused = "it has no public address with backend data for any enabled family";
        env.plan_each(ends.chunks(of_tunnel), out, unused, |ends, out| {
            out.extend(self.peer(ends, subnets, &offer.public)?.map(Object::from));
            Ok(())
        })
    }

    /// The peer at the other end of one tunnel, or `None` if the node does not publish it. `ends`
    /// are the endpoints of the families that the tunnel carries.
    fn peer(
        &self,
        ends: &[Endpoint<'_>],
        subnets: &Subnets,
        public: &Dual<IpAddr>,
    ) -> Result<Option<Peer>, Rejection> {
        let family = ends[0].subnet.family();
        let separate = self.mode == Mode::Separate;
        let address = if separate { ends[0].public } else { self.choose(public) };
        let mut data = Vec::new();
        for text in ends.iter().filter_map(|end| end.data) {
            data.push(read(text)?);
        }
        // Go flannel publishes the port of its only tunnel with the data of IPv4.
        let port = data.iter().find_map(|data| data.port).or(self.ports[family]);
        let Some(Data { key, .. }) = data.last() else { return Ok(None) };
        let Some(link) = self.devices[family] else { return Ok(None) };
        let Some(address) = address else { return Ok(None) };
        self.local.check(address, subnets, false)?;
        let attributes = Box::new(PeerAttributes {
            endpoint: (address, port.unwrap_or_default()).into(),
            allowed: ends.iter().map(|end| end.subnet).collect(),
            psk: self.psk.clone(),
            keepalive: self.keepalive,
        });
        Ok(Some(Peer { link, key: *key, attributes }))
    }

    /// The address for the only tunnel to a peer with these public addresses.
    ///
    /// **Source**: `selectPublicEndpoint` for [`Mode::Auto`].
    fn choose(&self, of_peer: &Dual<IpAddr>) -> Option<IpAddr> {
        match (self.mode, of_peer.v4, of_peer.v6) {
            (Mode::Ipv4, v4, _) => v4,
            (Mode::Ipv6, _, v6) => v6,
            (_, Some(v4), Some(v6)) => {
                let to_v4 = !is_private(v4) && self.public.v4.is_some();
                let to_v6 = !is_private(v6) && self.public.v6.is_some_and(|own| !is_private(own));
                Some(if !to_v4 && to_v6 { v6 } else { v4 })
            }
            (_, v4, v6) => v4.or(v6),
        }
    }
}

/// Whether an address is private by RFC 1918 or RFC 4193.
fn is_private(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => address.is_private(),
        IpAddr::V6(address) => address.is_unique_local(),
    }
}

fn read(data: &str) -> Result<Data, FieldError> {
    let fields = Fields::parse(data, "BackendData")?;
    let expected = "the public key of the node, 32 bytes as base64";
    let key = fields
        .parsed::<PublicKey>("PublicKey", expected)?
        .filter(|key| key.0 != [0; 32])
        .ok_or_else(|| fields.error("PublicKey", &"nothing", expected))?;
    let port: Option<u16> = fields.take("Port", "a UDP port")?;
    Ok(Data { key, port: port.filter(|port| *port != 0) })
}

/// The backend data, byte for byte as Go flannel writes it, and the signature, which Go flannel
/// ignores. It is absent as long as the subnet of the lease is not known.
pub(crate) fn backend_data(key: PublicKey, port: u16, signature: Option<&str>) -> Box<str> {
    let signature = signature.map(|text| format!(r#","Signature":"{text}""#)).unwrap_or_default();
    format!(r#"{{"PublicKey":"{key}","Port":{port}{signature}}}"#).into()
}

/// Whether a lease proves that a WireGuard peer is its own, by a signature with the peer's key.
pub(crate) fn is_proven(subnets: &Subnets, offer: &Offer, object: &Object) -> bool {
    let Object::Peer(Peer { key, .. }) = object else { return false };
    let is_signed = |end: Endpoint<'_>| {
        end.data.is_some_and(|data| signature::is_signed(data, key, end.subnet))
    };
    offer.endpoints(subnets).any(is_signed)
}

#[cfg(test)]
mod tests {
    use flannel_core::backend::Advice;

    use super::*;

    fn address(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    fn plan(mode: Mode) -> TunnelPlan {
        let name = |text: &str| text.parse::<LinkName>().unwrap();
        let v6 = if mode == Mode::Separate { "flannel-wg-v6" } else { "flannel-wg" };
        TunnelPlan {
            mode,
            devices: Dual { v4: Some(name("flannel-wg")), v6: Some(name(v6)) },
            ports: Dual { v4: Some(51820), v6: Some(51821) },
            psk: None,
            keepalive: 0,
            local: LocalEnd {
                addresses: Dual { v4: Some(address("10.0.0.9")), v6: Some(address("fd00::9")) },
                subnets: "10.1.9.0-24&fd00:1:0:9::-64".parse().unwrap(),
            },
            public: Dual { v4: Some(address("10.0.0.9")), v6: Some(address("fd00::9")) },
        }
    }

    fn run(plan: &TunnelPlan, subnets: &str, offer: &Offer) -> Result<Vec<String>, String> {
        advised(plan, subnets, offer).0
    }

    /// The objects, and the advice.
    fn advised(
        plan: &TunnelPlan,
        subnets: &str,
        offer: &Offer,
    ) -> (Result<Vec<String>, String>, Vec<Advice>) {
        let env = Env::new(&|_| None);
        let mut objects = Vec::new();
        let planned = plan.objects(&subnets.parse().unwrap(), offer, &env, &mut objects);
        let objects = objects.iter().map(ToString::to_string).collect();
        let planned = planned.map(|()| objects).map_err(|rejected| rejected.to_string());
        (planned, env.into_parts().1)
    }

    const PEER: &str = "10.1.7.0-24&fd00:1:0:7::-64";

    fn offer(v4: Option<&str>, v6: Option<&str>) -> Offer {
        let data = |port: &str| format!(r#"{{"PublicKey":"{}"{port}}}"#, PublicKey([7; 32])).into();
        Offer::new(Dual { v4: v4.map(address), v6: v6.map(address) }).with_kind(TYPE).with_data(
            Dual { v4: Some(data(r#","Port":1004"#)), v6: Some(data(r#","Port":1006"#)) },
        )
    }

    #[test]
    fn separate_tunnels_have_a_peer_each() {
        let key = PublicKey([7; 32]);
        let both = offer(Some("192.0.2.7"), Some("2001:db8::7"));
        let plan = plan(Mode::Separate);
        let v4 =
            format!("peer {key} endpoint 192.0.2.7:1004 allowed-ips 10.1.7.0/24 dev flannel-wg");
        let v6 = format!(
            "peer {key} endpoint [2001:db8::7]:1006 allowed-ips fd00:1:0:7::/64 dev flannel-wg-v6"
        );
        assert_eq!(run(&plan, PEER, &both), Ok(vec![v4.clone(), v6.clone()]));
        // A node of an older Go flannel publishes no port.
        let mut old = both.clone();
        old.data.v4 = Some(format!(r#"{{"publickey":"{key}","Port":0}}"#).into());
        let [own_port, _] = &run(&plan, PEER, &old).unwrap()[..] else { panic!() };
        assert_eq!(*own_port, v4.replace("1004", "51820"));
        assert_eq!(run(&plan, PEER, &offer(Some("192.0.2.7"), None)), Ok(vec![v4.clone()]));
        let mut bad = both.clone();
        bad.data.v6 = Some("{}".into());
        let (planned, advisories) = advised(&plan, PEER, &bad);
        assert_eq!(planned, Ok(vec![v4]), "the other family is still used");
        assert!(
            matches!(&advisories[..], [one] if one.to_string().contains("PublicKey")),
            "{advisories:?}"
        );
        bad.data.v4 = bad.data.v6.clone();
        let (planned, advisories) = advised(&plan, PEER, &bad);
        assert!(planned.is_err() && advisories.is_empty(), "a rejected lease has one reason");
        let without = run(&plan, PEER, &both.with_data(Dual::default()));
        assert!(without.unwrap_err().contains("no public address with backend data"));
    }

    #[test]
    fn one_tunnel_carries_both_families() {
        let key = PublicKey([7; 32]);
        let expected = |endpoint: &str| {
            let allowed = "allowed-ips 10.1.7.0/24,fd00:1:0:7::/64 dev flannel-wg";
            Ok(vec![format!("peer {key} endpoint {endpoint} {allowed}")])
        };
        // The addresses of the peer, the addresses of this node, and the endpoint for `auto`.
        for (v4, v6, own, auto) in [
            ("192.0.2.7", "2001:db8::7", ["10.0.0.9", "2001:db8::9"], "192.0.2.7:1004"),
            ("10.0.0.7", "2001:db8::7", ["10.0.0.9", "2001:db8::9"], "[2001:db8::7]:1004"),
            ("10.0.0.7", "2001:db8::7", ["10.0.0.9", "fd00::9"], "10.0.0.7:1004"),
            ("10.0.0.7", "fd00::7", ["10.0.0.9", "2001:db8::9"], "10.0.0.7:1004"),
        ] {
            let [own_v4, own_v6] = own.map(|text| Some(address(text)));
            let public = Dual { v4: own_v4, v6: own_v6 };
            let plan = |mode| TunnelPlan { public, ..plan(mode) };
            let both = offer(Some(v4), Some(v6));
            assert_eq!(run(&plan(Mode::Auto), PEER, &both), expected(auto), "{v4} {v6} {own:?}");
            assert_eq!(run(&plan(Mode::Ipv4), PEER, &both), expected(&format!("{v4}:1004")));
            assert_eq!(run(&plan(Mode::Ipv6), PEER, &both), expected(&format!("[{v6}]:1004")));
        }
        let plan = plan(Mode::Auto);
        let only_v6 = offer(None, Some("2001:db8::7"));
        assert_eq!(run(&plan, PEER, &only_v6), expected("[2001:db8::7]:1004"));
        assert!(run(&plan, PEER, &offer(None, None)).is_err());
    }

    #[test]
    fn unusable_leases_are_rejected_with_the_reason() {
        for mode in [Mode::Separate, Mode::Auto] {
            let plan = plan(mode);
            for (data, reason) in [
                ("{}", "PublicKey"),
                (r#"{"PublicKey":"AAAA"}"#, "PublicKey"),
                (
                    r#"{"PublicKey":"AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA="}"#,
                    "PublicKey: nothing is not valid",
                ),
                (r#"{"PublicKey":7}"#, "PublicKey"),
                (
                    r#"{"PublicKey":"BwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwc=","Port":70000}"#,
                    "Port",
                ),
                ("[]", "BackendData"),
            ] {
                let mut bad = offer(Some("192.0.2.7"), None);
                bad.data = Dual { v4: Some(data.into()), v6: Some(data.into()) };
                let error = run(&plan, PEER, &bad).unwrap_err();
                assert!(error.contains(reason), "{mode:?} {data}: {error}");
            }
            let ours = offer(Some("10.0.0.9"), None);
            assert!(run(&plan, PEER, &ours).unwrap_err().contains("10.0.0.9"));
            let own = "10.1.9.0-24&fd00:1:0:9::-64";
            assert!(run(&plan, own, &ours).is_ok(), "this node's own lease");
            let link_local = offer(None, Some("fe80::7"));
            assert!(run(&plan, PEER, &link_local).unwrap_err().contains("link-local"));
        }
    }
}
