#![doc = include_str!("../README.md")]

mod attempts;
mod connections;
mod failure;
mod grants;
mod keys;
mod options;
mod registry;
mod store;
mod transaction;
mod watch;

pub use options::{EtcdOptions, EtcdOptionsError};
pub use registry::EtcdRegistry;
