//! The MTUs of paths that do not pass all packets that a device takes.

use std::collections::BTreeMap;
use std::sync::Arc;

use flannel_core::object::{Object, Via};
use flannel_core::{Subnet, Subnets};

/// The MTUs of paths on which larger packets are lost, in bytes, by the subnet of the peer. The
/// route to the subnet gets the MTU.
pub type PathMtus = Arc<BTreeMap<Subnet, u16>>;

/// Gives the routes to these subnets the MTUs of their paths, unless their own MTU is smaller.
pub(crate) fn lower(objects: &mut [Object], subnets: &Subnets, mtus: &PathMtus) {
    for object in objects {
        if let Object::Route(route) = object
            && !matches!(route.via, Via::Blackhole | Via::LastResort)
            && let Some(subnet) = subnets.iter().find(|subnet| subnet.covers(&route.dst))
            && let Some(mtu) = mtus.get(&subnet)
        {
            route.mtu = Some(route.mtu.map_or(*mtu, |own| own.min(*mtu)));
        }
    }
}

#[cfg(test)]
mod tests {
    use flannel_core::Lease;
    use flannel_core::backend::{Env, Reach};
    use flannel_core::lease::{LeaseAttrs, Offer, Revision};
    use flannel_core::object::{Key, LinkName, Route};
    use flannel_core::status::Rejection;

    use super::*;
    use crate::admission::{Admission, AdmissionRules, BackendPlan};

    /// A plan with a route to each subnet, and an MTU of its own for IPv6.
    fn plan(
        subnets: &Subnets,
        _: &Offer,
        _: &Env<'_>,
        out: &mut Vec<Object>,
    ) -> Result<(), Rejection> {
        let link: LinkName = "flannel.1".parse().unwrap();
        let own = |dst: &Subnet| dst.base().is_ipv6().then_some(1400);
        let route = |dst: Subnet| Route { dst, via: Via::Link(link), mtu: own(&dst) };
        out.extend(subnets.iter().map(|dst| Object::from(route(dst))));
        Ok(())
    }

    fn admission() -> Admission {
        let networks = ["10.1.0.0/16", "fd00:1::/48"].map(subnet).into_iter().collect();
        let rules = AdmissionRules { networks, ..AdmissionRules::default() };
        Admission::new(rules, vec![BackendPlan::new(None, Box::new(plan))])
    }

    fn subnet(text: &str) -> Subnet {
        text.parse().unwrap()
    }

    fn lease(key: &str, since: u64) -> Arc<Lease> {
        Arc::new(Lease {
            subnets: key.parse().unwrap(),
            attrs: LeaseAttrs::default(),
            expires: None,
            since: Revision(since),
            revision: Revision(since),
        })
    }

    /// Takes in MTUs, as an engine does. Returns the changed routes, with their MTUs.
    fn set(
        peers: &mut Admission,
        leases: &[Arc<Lease>],
        mtus: &[(&str, u16)],
    ) -> Vec<(String, Option<u16>)> {
        let mtus = mtus.iter().map(|(dst, mtu)| (subnet(dst), *mtu)).collect();
        let again = peers.set_path_mtus(&Arc::new(mtus));
        let changes =
            again.iter().map(|key| (*key, leases.iter().find(|lease| lease.subnets == *key)));
        let changed = peers.update(changes, &|_| Some(Reach::NotDirect));
        assert!(changed.added.is_empty(), "no peer is new");
        let mut routes = Vec::new();
        for delta in changed.deltas {
            let Some(Object::Route(route)) = delta.after else { panic!("{delta:?}") };
            routes.push((route.dst.to_string(), route.mtu));
        }
        routes
    }

    #[test]
    fn a_route_has_the_mtu_of_its_path_while_there_is_one() {
        let mut peers = admission();
        let both = lease("10.1.7.0-24&fd00:1:0:7::-64", 1);
        let leases = [both, lease("10.1.8.0-24", 2)];
        peers.update(leases.iter().map(|lease| (lease.subnets, Some(lease))), &|_| {
            Some(Reach::NotDirect)
        });
        let four = "10.1.7.0/24";
        let six = "fd00:1:0:7::/64";
        let mut set = |mtus: &[(&str, u16)]| set(&mut peers, &leases, mtus);
        let route = |dst: &str, mtu| (dst.to_owned(), mtu);
        assert_eq!(set(&[(four, 1350)]), [route(four, Some(1350))], "that family alone");
        assert_eq!(set(&[(four, 1350), (six, 1330)]), [route(six, Some(1330))]);
        assert!(set(&[(four, 1350), (six, 1330)]).is_empty(), "nothing changed");
        assert_eq!(
            set(&[(four, 1300), (six, 1420)]),
            [route(four, Some(1300)), route(six, Some(1400))]
        );
        assert_eq!(set(&[("10.1.99.0/24", 1300)]), [route(four, None)], "nobody has that subnet");
        assert!(set(&[]).is_empty());
    }

    #[test]
    fn a_peer_that_is_accepted_later_has_the_mtu() {
        let mut peers = admission();
        let early = lease("10.1.7.0-24&fd00:1:0:7::-64", 1);
        let late = lease("10.1.7.0-24", 2);
        let leases = [early, late];
        peers.update(leases.iter().map(|lease| (lease.subnets, Some(lease))), &|_| {
            Some(Reach::NotDirect)
        });
        let four = "10.1.7.0/24";
        assert_eq!(set(&mut peers, &leases, &[(four, 1350)]), [(four.to_owned(), Some(1350))]);
        peers.update([(leases[0].subnets, None)].into_iter(), &|_| Some(Reach::NotDirect));
        let object = peers.object(&Key::Route(subnet(four)));
        assert!(matches!(object, Some(Object::Route(Route { mtu: Some(1350), .. }))), "{object:?}");
        // A lease that comes after the MTU.
        peers.set_path_mtus(&Arc::new([(subnet("10.1.9.0/24"), 1300)].into()));
        let new = lease("10.1.9.0-24", 3);
        let changed =
            peers.update([(new.subnets, Some(&new))].into_iter(), &|_| Some(Reach::NotDirect));
        let object = &peers.objects_of(changed.added[0])[0];
        assert!(matches!(object, Object::Route(Route { mtu: Some(1300), .. })), "{object:?}");
    }

    #[test]
    fn a_blackhole_has_no_mtu() {
        let dst = subnet("10.1.7.0/24");
        let own = "10.1.7.0-24".parse().unwrap();
        let mut objects = [Route { dst, via: Via::Blackhole, mtu: None }.into()];
        let before = objects.clone();
        lower(&mut objects, &own, &Arc::new([(dst, 1300)].into()));
        assert_eq!(objects, before);
    }
}
