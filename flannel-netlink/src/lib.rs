#![doc = include_str!("../README.md")]

mod apply;
mod ask;
mod changes;
mod codec;
mod culprit;
#[cfg(any(test, feature = "testing"))]
mod decode;
pub mod iface;
mod kernel;
mod multicast;
mod namespace;
pub mod netfilter;
mod news;
mod seen;
mod snapshot;
mod socket;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
mod wire;

pub use kernel::NetlinkKernel;
