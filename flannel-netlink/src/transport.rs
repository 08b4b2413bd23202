//! Netlink sockets, netlink messages, and the network namespaces that sockets belong to.

pub(crate) mod generic;
pub(crate) mod multicast;
pub(crate) mod namespace;
pub(crate) mod socket;
pub(crate) mod wire;
