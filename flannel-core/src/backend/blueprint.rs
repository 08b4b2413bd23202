//! Networks as data.

use std::fmt;

use super::{Datapath, Env, Plan, Proof};
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
    /// The backend type ([`Offer::kind`]) of the offers that `plan` gets, or `None` if it gets all
    /// offers. A backend need not set it: `flannel_route::Host` fills in
    /// [`Backend::lease_type`](crate::Backend::lease_type), unless `any_lease_type` is set.
    pub lease_type: Option<&'static str>,
    /// Whether `plan` gets the offers of all backend types.
    pub any_lease_type: bool,
    /// The size of the largest packet that pods may send, in bytes.
    pub mtu: u32,
    /// The code that moves the packets, as text for the status. It is empty if the backend always
    /// uses the same code.
    pub path: &'static str,
    /// Whether peers are reachable only after a WireGuard handshake. A node that moves to this
    /// backend reaches a peer by the other backend until the handshake.
    pub handshakes: bool,
    /// The kernel objects that the network owns. It must own all objects of `base` and `plan`. Any
    /// other object is reported as failing, and is not put.
    pub footprint: Footprint,
    /// The objects that do not depend on peers: the device and its addresses.
    pub base: ObjectSet,
    /// The objects that each peer adds.
    pub plan: Box<Plan>,
    /// Which objects of the plan a lease proves to be its own, or `None` if leases prove nothing.
    /// Then of two leases that define an object differently, the older one has it.
    pub proof: Option<Box<Proof>>,
}

impl Blueprint {
    /// A network with only the objects that `plan` adds for each peer. Its footprint is empty, so
    /// set one with [`with_footprint`](Self::with_footprint). `mtu` is in bytes.
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
            proof: None,
        }
    }

    /// Sets [`Blueprint::lease_type`].
    #[must_use]
    pub fn with_lease_type(self, lease_type: &'static str) -> Self {
        Self { lease_type: Some(lease_type), ..self }
    }

    /// Sets [`Blueprint::any_lease_type`].
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

    /// Sets [`Blueprint::proof`].
    #[must_use]
    pub fn with_proof(
        self,
        proof: impl Fn(&Subnets, &Offer, &Object) -> bool + Send + Sync + 'static,
    ) -> Self {
        Self { proof: Some(Box::new(proof)), ..self }
    }

    /// The routes in `base` to whole pod networks.
    fn whole_network_routes(&self) -> impl Iterator<Item = Route> {
        self.base.iter().filter_map(move |object| match object {
            Object::Route(route) => self.footprint.networks.contains(&route.dst).then_some(*route),
            _ => None,
        })
    }

    /// Changes the network as `RequireEncryption` in the config demands.
    ///
    /// A blackhole for each pod network drops packets that no other route takes, so that they do
    /// not leave unencrypted by the default route. A route in `base` to a whole pod network
    /// is replaced by routes to the subnets of each peer. If no device of `datapath` encrypts, the
    /// plan rejects all leases, so that their routes are deleted.
    #[must_use]
    pub fn only_encrypted(mut self, datapath: &Datapath) -> Self {
        let whole: Vec<Route> = self.whole_network_routes().collect();
        if self.footprint.blackholes {
            for network in &self.footprint.networks {
                self.base.insert(Route { dst: *network, via: Via::Blackhole, mtu: None });
            }
        }
        if !whole.is_empty() {
            let plan = self.plan;
            self.plan = Box::new(move |subnets, offer, env, objects| {
                plan(subnets, offer, env, objects)?;
                for dst in subnets.iter() {
                    if let Some(route) = whole.iter().find(|route| route.dst.covers(&dst)) {
                        objects.push(Route { dst, ..*route }.into());
                    }
                }
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
