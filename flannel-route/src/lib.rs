#![doc = include_str!("../README.md")]

mod admission;
mod advisories;
mod apply_stats;
mod cleanup;
mod driver;
mod engine;
mod host;
mod host_network;
mod kernel_network;
mod link_lookups;
mod listener;
mod nexthops;
mod object_counts;
mod offer_plan;
mod peer_index;
mod pending_events;
mod rate_limiter;
mod schedule;

pub use cleanup::{Cleanup, cleanup, ready_for_go, remove_former, remove_go_routes};
pub use host::{Host, JoinOptions};
pub use host_network::{CustomNetwork, HostNetwork};
pub use kernel_network::KernelNetwork;
