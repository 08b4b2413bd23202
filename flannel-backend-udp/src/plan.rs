//! The objects of a peer for each subnet: an entry in the table of the process, or a route.

use flannel_core::Subnets;
use flannel_core::address::Dual;
use flannel_core::backend::{Env, LocalEnd};
use flannel_core::lease::{Endpoint, Offer};
use flannel_core::object::{LinkName, Object, Route, Via};
use flannel_core::status::Rejection;

use crate::keeper::peer_record;

/// Plans the objects of a peer.
#[derive(Debug, Clone)]
pub(crate) struct UdpPlan {
    /// The enabled families.
    pub(crate) families: Dual<()>,
    pub(crate) local: LocalEnd,
    pub(crate) mover: Mover,
}

/// The code that moves the packets of this node.
#[derive(Debug, Clone)]
pub(crate) enum Mover {
    /// The process sends them to this UDP port of all nodes.
    Process { port: u16 },
    /// A device of the kernel sends them.
    Kernel { device: LinkName },
}

impl UdpPlan {
    pub(crate) fn objects(
        &self,
        subnets: &Subnets,
        offer: &Offer,
        env: &Env<'_>,
        out: &mut Vec<Object>,
    ) -> Result<(), Rejection> {
        // The plan also runs for this node's own lease, which is not a peer.
        if *subnets == self.local.subnets {
            return Ok(());
        }
        let unused = "it has no public address for any enabled family";
        env.plan_each(offer.endpoints(subnets), out, unused, |end, out| {
            let Endpoint { subnet, public, .. } = end;
            // A family that is disabled here, or not published, leaves the other one.
            let is_enabled = self.families[subnet.family()].is_some();
            let Some(public) = public.filter(|_| is_enabled) else { return Ok(()) };
            self.local.check(public, subnets, false)?;
            out.push(match &self.mover {
                Mover::Process { port } => peer_record(subnet, (public, *port).into()).into(),
                Mover::Kernel { device: link } => {
                    let via = Via::Gateway { gateway: public, link: *link, onlink: true };
                    Route { dst: subnet, via, mtu: None }.into()
                }
            });
            Ok(())
        })
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use super::*;

    const PEER: &str = "10.1.8.0-24&fd00:1:0:8::-64";

    fn run(families: Dual<()>, subnets: &str, public: [Option<&str>; 2]) -> (Vec<String>, String) {
        run_with(Mover::Process { port: 8285 }, families, subnets, public)
    }

    fn run_with(
        mover: Mover,
        families: Dual<()>,
        subnets: &str,
        public: [Option<&str>; 2],
    ) -> (Vec<String>, String) {
        let address = |text: &str| text.parse::<IpAddr>().unwrap();
        let own = "10.1.7.0-24&fd00:1:0:7::-64".parse().unwrap();
        let addresses = ["192.0.2.7", "2001:db8::7"].map(address).into_iter().collect();
        let local = LocalEnd { addresses, subnets: own };
        let public = public.into_iter().flatten().map(address).collect();
        let offer = Offer::new(public);
        let env = Env::new(&|_| None);
        let plan = UdpPlan { families, local, mover };
        let mut objects = Vec::new();
        let result = plan.objects(&subnets.parse().unwrap(), &offer, &env, &mut objects);
        let why = result.err().map(|why| why.to_string()).unwrap_or_default();
        (objects.iter().map(ToString::to_string).collect(), why)
    }

    #[test]
    fn a_peer_is_an_entry_for_each_family() {
        let both = Dual { v4: Some(()), v6: Some(()) };
        let v4 = "record udp 10.1.8.0/24 to 192.0.2.8:8285".to_owned();
        let v6 = "record udp fd00:1:0:8::/64 to [2001:db8::8]:8285".to_owned();
        let public = [Some("192.0.2.8"), Some("2001:db8::8")];
        assert_eq!(run(both, PEER, public).0, [v4.clone(), v6]);
        // Go flannel publishes no IPv6 address.
        assert_eq!(run(both, PEER, [public[0], None]).0[..], [&*v4]);
        assert_eq!(run(Dual { v4: Some(()), v6: None }, PEER, public).0, [v4]);
        let only_v4 = Dual { v4: Some(()), v6: None };
        let mover = Mover::Kernel { device: "flannel0".parse().unwrap() };
        let by_kernel = run_with(mover, only_v4, PEER, public).0;
        let route = "route 10.1.8.0/24 via 192.0.2.8 dev flannel0 onlink".to_owned();
        assert_eq!(by_kernel, [route]);
        let own = run(both, "10.1.7.0-24&fd00:1:0:7::-64", [Some("192.0.2.7"), None]);
        assert_eq!(own, (Vec::new(), String::new()), "this node is no peer");
    }

    #[test]
    fn unusable_leases_are_rejected_with_the_reason() {
        let both = Dual { v4: Some(()), v6: Some(()) };
        for (public, why) in [
            ([None, None], "no public address"),
            ([Some("192.0.2.7"), None], "this node's own"),
            ([None, Some("fe80::8")], "link-local"),
        ] {
            let (objects, found) = run(both, PEER, public);
            assert!(objects.is_empty() && found.contains(why), "{found}");
        }
    }
}
