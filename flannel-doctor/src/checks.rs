//! Checks of this host.

pub mod device;
pub mod files;
pub mod host;
