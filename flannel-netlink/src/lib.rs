#![doc = include_str!("../README.md")]

mod apply;
mod ask;
mod changed_by;
mod changes;
mod codec;
mod event_decoder;
mod foreign_routes;
pub mod iface;
mod kernel;
mod multicast;
mod namespace;
pub mod netfilter;
mod snapshot;
mod socket;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
mod wire;

pub use kernel::NetlinkKernel;
