#![doc = include_str!("../README.md")]

mod admission;
mod advisories;
mod incumbents;
mod link_lookups;
mod offer_plan;
mod path_mtus;
mod peer_index;
mod stale_lookups;
mod view_filter;
mod winners;

pub use admission::{Admission, AdmissionRules, Changed, Delta};
pub use offer_plan::{Handshakes, OfferPlan};
pub use path_mtus::PathMtus;
pub use peer_index::{Id, Peer};
pub use stale_lookups::{Answers, StaleLookups};
pub use view_filter::ViewFilter;
