//! Admission decides which leases of a cluster a node accepts, and which kernel objects they
//! define.
//!
//! - It is a pure function of the leases, the plans of the backends, and the kernel's answers to
//!   the questions of these plans.
//! - Every node accepts the same leases. Of two leases that clash, the one with the smaller
//!   `Lease::precedence` is accepted.
//! - The cost of a change depends on the leases that it touches, not on the size of the cluster.
//!
//! It is not an engine: it has no task, reads no kernel and writes nothing. `flannel-route` puts
//! the objects into the kernel. You need this module only to write an engine of your own.
//!
//! | item | purpose |
//! |---|---|
//! | `Admission` | the peers of a node, accepted and rejected, with their objects |
//! | `OfferPlan` | the plan for the leases of one backend type |
//! | `Answers`, `StaleLookups` | the kernel's answers to plans, and those that may have changed |
//! | `PathMtus` | the MTUs that the routes to peers get, where larger packets are lost |
//!
//! It needs no runtime. It does not block, except in a closure or kernel that you pass: `Answers`
//! asks the kernel. The example has a plan with one route for each peer. It admits one lease and
//! checks its objects:
//!
//! ```rust
//! use std::sync::Arc;
//! use flannel_route::admission::{Admission, AdmissionRules, OfferPlan};
//! use flannel_core::Lease;
//! use flannel_core::backend::Reach;
//! use flannel_core::lease::{LeaseAttrs, Offer, Revision};
//! use flannel_core::object::{Route, Via};
//!
//! let rules = AdmissionRules {
//!     networks: ["10.1.0.0/16".parse().unwrap()].into_iter().collect(),
//!     ..AdmissionRules::default()
//! };
//! let eth0 = "eth0".parse().unwrap();
//! let plan = OfferPlan::new(Some("host-gw"), Box::new(move |subnets, offer, _env, objects| {
//!     for peer in offer.endpoints(subnets) {
//!         let Some(gateway) = peer.public else { continue };
//!         let via = Via::Gateway { gateway, link: eth0, onlink: false };
//!         objects.push(Route { dst: peer.subnet, via, mtu: None }.into());
//!     }
//!     Ok(())
//! }));
//! let mut admission = Admission::new(rules, vec![plan]);
//!
//! let public = ["192.0.2.7".parse().unwrap()].into_iter().collect();
//! let lease = Arc::new(Lease {
//!     subnets: "10.1.7.0-24".parse().unwrap(),
//!     attrs: LeaseAttrs::from(Offer::new(public).with_kind("host-gw")),
//!     expires: None,
//!     since: Revision(1),
//!     revision: Revision(1),
//! });
//! let changes = [(lease.subnets, Some(&lease))].into_iter();
//! // The kernel's answers: the link of an address. This plan does not ask.
//! let changed = admission.update(changes, &|_address| Some(Reach::NotDirect));
//! let added = changed.added.iter().flat_map(|id| admission.objects_of(*id));
//! assert_eq!(
//!     added.map(ToString::to_string).collect::<Vec<_>>(),
//!     ["route 10.1.7.0/24 via 192.0.2.7 dev eth0"],
//! );
//! ```

mod admit;
mod advisories;
mod incumbents;
mod link_lookups;
mod offer_plan;
mod path_mtus;
mod peer_index;
mod stale_lookups;
mod winners;

pub use admit::{Admission, AdmissionRules, Changed, Delta};
pub use offer_plan::{Handshakes, OfferPlan};
pub use path_mtus::PathMtus;
pub use peer_index::{Id, Peer};
pub use stale_lookups::{Answers, StaleLookups};
