//! The routes that Go flannel left. Only a migration needs them.

use std::collections::BTreeSet;

use super::{GO_ROUTE_PROTOCOL, KernelError, Outcome};
use crate::address::{Dual, Subnet};
use crate::object::{LinkName, Route, Via};

/// Describes the routes that Go flannel leaves on a host with the backend host-gw, or with vxlan
/// and `DirectRouting`.
///
/// These routes have [its protocol](GO_ROUTE_PROTOCOL), which routes of scripts have too. So a
/// route is only one of them if it is in the main table with the default metric and no TOS, leads
/// to a gateway on one of `links`, and has no attribute that [`Route`] does not express. Its
/// destination must be inside `networks`, and must have the prefix length of a lease.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct GoRoutes {
    /// The devices of the gateways.
    pub links: BTreeSet<LinkName>,
    /// The pod networks.
    pub networks: Vec<Subnet>,
    /// The prefix lengths of leases, in bits.
    pub lens: Dual<u8>,
}

impl GoRoutes {
    /// Whether a route that was read from the kernel, with this protocol, was left by Go flannel.
    pub fn include(&self, route: &Route, protocol: u8) -> bool {
        let by_gateway =
            matches!(route.via, Via::Gateway { link, .. } if self.links.contains(&link));
        let is_of_lease = self.lens[route.dst.family()] == Some(route.dst.len());
        let is_inside = self.networks.iter().any(|network| network.covers(&route.dst));
        protocol == GO_ROUTE_PROTOCOL && by_gateway && is_of_lease && is_inside
    }
}

/// A kernel where Go flannel may have left routes. `flannel_route::remove_go_routes` removes them.
/// All methods block.
#[doc = include_str!("../../docs/go_routes.md")]
pub trait GoRouteKernel: Send + Sync {
    /// The routes that Go flannel left.
    ///
    /// # Errors
    /// The kernel could not be read.
    fn go_routes(&self, which: &GoRoutes) -> Result<Vec<Route>, KernelError>;

    /// Deletes routes that [`Self::go_routes`] returned. A route of another protocol that has
    /// replaced such a route stays. Returns one outcome for each route, in the same order. If a
    /// route does not exist, its outcome is [`Outcome::Done`].
    fn delete_go_routes(&self, routes: &[Route]) -> Vec<Outcome>;
}
