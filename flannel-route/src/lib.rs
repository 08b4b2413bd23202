#![doc = include_str!("../README.md")]

mod admission;
mod advisories;
mod apply_stats;
mod cleanup;
mod driver;
mod engine;
mod host;
mod kernel_network;
mod link_lookups;
mod nexthops;
mod object_counts;
mod peer_index;
mod pending_events;
mod rate_limiter;

pub use cleanup::{Cleanup, cleanup, ready_for_go, remove_former, remove_go_routes};
pub use host::{Host, JoinOptions};
pub use kernel_network::KernelNetwork;
