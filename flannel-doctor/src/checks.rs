//! Checks of this host.

pub mod device;
pub mod host;
