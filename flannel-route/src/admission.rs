//! Admission decides which leases of a cluster a node accepts, and which kernel objects they
//! define.
//!
//! - It is a pure function of the leases, the plans of the backends, and the results of the route
//!   lookups that these plans make.
//! - Every node accepts the same leases. Of two leases that clash, the one with the smaller
//!   `Lease::precedence` is accepted.
//! - The cost of a change depends on the leases that it touches, not on the size of the cluster.
//!
//! It has no task and writes nothing. The route engine of this crate puts the objects into the
//! kernel. You need this module only to write an engine of your own.
//!
//! | item | purpose |
//! |---|---|
//! | `Admission` | the peers of a node, accepted and rejected, with their objects |
//! | `BackendPlan` | the plan for the leases of one backend type |
//! | `RouteLookups` | looks up routes in a kernel for plans |
//! | `StaleLookups` | the lookups whose results may have changed |
//! | `PathMtus` | the MTUs of the routes to peers, where larger packets are lost |
//!
//! It needs no runtime. It blocks only in a closure or kernel that you pass: `RouteLookups` calls
//! `Kernel::lookup`. The example has a plan with one route for each peer. It admits one lease and
//! checks its objects:
//!
//! ```rust
//! use std::sync::Arc;
//! use flannel_route::admission::{Admission, AdmissionRules, BackendPlan};
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
//! let plan = BackendPlan::new(Some("host-gw"), Box::new(move |subnets, offer, _env, objects| {
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
//! // The closure looks up how packets reach an address. This plan makes no lookups.
//! let changed = admission.update(changes, &|_address| Some(Reach::NotDirect));
//! let added = changed.added.iter().flat_map(|id| admission.objects_of(*id));
//! assert_eq!(
//!     added.map(ToString::to_string).collect::<Vec<_>>(),
//!     ["route 10.1.7.0/24 via 192.0.2.7 dev eth0"],
//! );
//! ```

mod admit;
mod advisories;
mod backend_plan;
mod incumbents;
mod lookup_results;
mod path_mtus;
mod peer_index;
mod route_lookups;
mod stale_lookups;
mod winners;

pub use admit::{Admission, AdmissionRules, Changed, Delta};
pub use backend_plan::{BackendPlan, Handshakes};
pub use path_mtus::PathMtus;
pub use peer_index::{PeerEntry, PeerId};
pub use route_lookups::RouteLookups;
pub use stale_lookups::{LookupScope, StaleLookups};
