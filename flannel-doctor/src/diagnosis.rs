//! Derives findings from the answers of peers and of the kernel. Pure: nothing is read here.

pub(crate) mod clocks;
pub mod contest;
pub(crate) mod handshake;
pub mod mtu;
pub mod peer;
pub(crate) mod summary;
pub(crate) mod underlay;
pub mod why;
