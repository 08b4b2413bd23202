#![doc = include_str!("../README.md")]

mod client;
mod options;
mod registry;

pub use options::{EtcdOptions, EtcdOptionsError};
pub use registry::EtcdRegistry;
