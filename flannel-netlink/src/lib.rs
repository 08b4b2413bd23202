#![doc = include_str!("../README.md")]

mod codec;
pub mod foreign;
pub mod iface;
mod kernel;
pub mod netfilter;
pub mod nftables;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
/// Netlink sockets, netlink messages, and the network namespaces that sockets belong to.
mod transport {
    pub(crate) mod generic;
    pub(crate) mod multicast;
    pub(crate) mod namespace;
    pub(crate) mod socket;
    pub(crate) mod wire;
}

pub use kernel::{NetlinkKernel, PortHolder, STALE, Session, Shadow, Taken, Tunnel};
