#![doc = include_str!("../README.md")]

pub mod admission;
pub mod annex;
mod apply_stats;
mod cleanup;
mod driver;
mod engine;
mod gated_kernel;
mod host;
mod host_network;
mod kernel_network;
mod listener;
pub mod moving;
mod nexthops;
mod outcomes;
mod pending_events;
mod rate_limiter;
mod schedule;

pub use cleanup::{Cleanup, cleanup, ready_for_go, remove_former, remove_go_routes};
pub use host::{Host, JoinOptions, PreparedMember};
pub use host_network::{CustomNetwork, HostNetwork};
pub use kernel_network::KernelNetwork;
