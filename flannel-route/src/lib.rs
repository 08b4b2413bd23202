#![doc = include_str!("../README.md")]

mod admit;
mod cleanup;
mod driver;
mod facts;
mod heard;
mod host;
mod kernel_network;
mod ledger;
mod nexthops;
mod pace;
mod reconcile;
mod remarks;
mod roster;
mod tally;

pub use cleanup::{Cleanup, cleanup, ready_for_go, remove_former, remove_go_routes};
pub use host::{Host, JoinOptions};
pub use kernel_network::KernelNetwork;
