//! Networks as data.

use std::fmt;

use super::{Datapath, Env, Plan};
use crate::address::Subnet;
use crate::kernel::Footprint;
use crate::lease::{Offer, Subnets};
use crate::object::{Object, ObjectSet, Route, Via};
use crate::status::Rejection;

/// The description of a network of kernel objects, for the route engine.
///
/// ```
/// use flannel_core::backend::Blueprint;
/// use flannel_core::kernel::Footprint;
/// use flannel_core::object::{LinkName, Route, Via};
///
/// let eth0: LinkName = "eth0".parse().unwrap();
/// let mut footprint = Footprint::default();
/// footprint.networks = vec!["10.1.0.0/16".parse().unwrap()];
/// footprint.routes_on = [eth0].into();
/// let blueprint = Blueprint::new(1500, move |subnets, offer, _env, objects| {
///     for peer in offer.endpoints(subnets) {
///         let Some(gateway) = peer.public else { continue };
///         let via = Via::Gateway { gateway, link: eth0, onlink: false };
///         objects.push(Route { dst: peer.subnet, via, mtu: None }.into());
///     }
///     Ok(())
/// })
/// .with_footprint(footprint);
/// assert_eq!(blueprint.mtu, 1500);
/// ```
#[non_exhaustive]
pub struct Blueprint {
    /// The [`Offer::kind`] of the offers that `plan` gets; `None` for all offers. A backend leaves
    /// it `None`: `flannel_route::Host` fills in
    /// [`Backend::lease_type`](crate::Backend::lease_type), except with `any_lease_type`.
    pub lease_type: Option<&'static str>,
    /// Whether a backend's `plan` gets the offers of all backend types.
    pub any_lease_type: bool,
    /// The size of the largest packet that pods may send, in bytes.
    pub mtu: u32,
    /// The code that moves the packets, as text for the status; empty for backends with one way.
    pub path: &'static str,
    /// Peers are reachable only after a WireGuard handshake. While a node moves to this backend, it
    /// reaches a peer by the other backend until then.
    pub handshakes: bool,
    /// The kernel objects that the network owns. It must own all objects of `base` and `plan`: the
    /// others are reported as failing, and are not put.
    pub footprint: Footprint,
    /// The objects that do not depend on peers: the device and its addresses.
    pub base: ObjectSet,
    /// The objects that each peer adds.
    pub plan: Box<Plan>,
}

impl Blueprint {
    /// A network with only the objects that `plan` adds for each peer. Its footprint is empty: set
    /// it [`with_footprint`](Self::with_footprint). `mtu` is in bytes.
    pub fn new(
        mtu: u32,
        plan: impl Fn(&Subnets, &Offer, &Env<'_>, &mut Vec<Object>) -> Result<(), Rejection>
        + Send
        + Sync
        + 'static,
    ) -> Self {
        Self {
            lease_type: None,
            any_lease_type: false,
            mtu,
            path: "",
            handshakes: false,
            footprint: Footprint::default(),
            base: ObjectSet::default(),
            plan: Box::new(plan),
        }
    }

    /// Gives the plan the offers of all backend types.
    #[must_use]
    pub fn with_any_lease_type(self) -> Self {
        Self { any_lease_type: true, ..self }
    }

    /// Sets [`Blueprint::path`].
    #[must_use]
    pub fn with_path(self, path: &'static str) -> Self {
        Self { path, ..self }
    }

    /// Sets [`Blueprint::handshakes`].
    #[must_use]
    pub fn with_handshakes(self) -> Self {
        Self { handshakes: true, ..self }
    }

    /// Sets [`Blueprint::footprint`].
    #[must_use]
    pub fn with_footprint(self, footprint: Footprint) -> Self {
        Self { footprint, ..self }
    }

    /// Sets [`Blueprint::base`].
    #[must_use]
    pub fn with_base(self, base: ObjectSet) -> Self {
        Self { base, ..self }
    }

    /// Adapts the network to a config with `RequireEncryption`. With [`Footprint::blackholes`], a
    /// blackhole route for each pod network drops packets that no other route takes, so that they
    /// do not leave by the default route. Each peer gets its own copy of a route of `base` to a
    /// whole pod network, because the blackhole route replaces that route. If no device of
    /// `datapath` encrypts, the plan rejects every lease, and the engine removes the routes to
    /// peers.
    #[must_use]
    pub fn only_encrypted(mut self, datapath: &Datapath) -> Self {
        let is_whole = |object: &Object| match object {
            Object::Route(route) => self.footprint.networks.contains(&route.dst).then_some(*route),
            _ => None,
        };
        let whole: Vec<Route> = self.base.iter().filter_map(is_whole).collect();
        if self.footprint.blackholes {
            let route = |dst: &Subnet| Route { dst: *dst, via: Via::Blackhole, mtu: None };
            self.base.extend(self.footprint.networks.iter().map(route));
        }
        if !whole.is_empty() {
            let plan = self.plan;
            self.plan = Box::new(move |subnets, offer, env, objects| {
                plan(subnets, offer, env, objects)?;
                let of_peer = |dst| {
                    whole
                        .iter()
                        .find(|route| route.dst.covers(&dst))
                        .map(|route| Route { dst, ..*route })
                };
                objects.extend(subnets.iter().filter_map(of_peer).map(Object::from));
                Ok(())
            });
        }
        if datapath.encrypted.is_empty() {
            self.plan = Box::new(|_, offer, _, _| {
                let why = "the network config has RequireEncryption, and the backend type";
                Err(Rejection::Rejected(format!("{why} {:?} does not encrypt", offer.kind)))
            });
        }
        self
    }
}

impl fmt::Debug for Blueprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Blueprint")
            .field("lease_type", &self.lease_type)
            .field("mtu", &self.mtu)
            .field("handshakes", &self.handshakes)
            .field("footprint", &self.footprint)
            .field("base", &self.base)
            .finish_non_exhaustive()
    }
}
