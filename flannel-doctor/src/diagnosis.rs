//! Derives findings from the answers of peers and of the kernel. Pure: nothing is read here.

pub mod mtu;
pub mod peer;
pub(crate) mod summary;
pub mod why;
