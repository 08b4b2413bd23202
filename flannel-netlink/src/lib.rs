#![doc = include_str!("../README.md")]

mod codec;
pub mod foreign;
pub mod iface;
mod kernel;
pub mod netfilter;
pub mod nftables;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
mod transport;

pub use kernel::{NetlinkKernel, STALE, Session, Shadow, Taken, Tunnel};
