#![doc = include_str!("../README.md")]

pub mod admission;
mod apply_stats;
mod cleanup;
mod driver;
mod engine;
mod event_listener;
mod filtered_network;
mod gated_kernel;
mod host;
mod join;
mod kernel_network;
pub mod moving;
mod nexthops;
mod outcomes;
mod pending_events;
mod rate_limiter;
pub mod record_keepers;
mod schedule;

pub use cleanup::{Cleanup, cleanup, ready_for_go, remove_former, remove_go_routes};
pub use host::Host;
pub use join::{BackendInUse, JoinOptions, Joined, PreparedBackend};
pub use kernel_network::{EngineOptions, KernelNetwork};
