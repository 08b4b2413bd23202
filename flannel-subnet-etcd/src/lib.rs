#![doc = include_str!("../README.md")]

/// Requests to etcd over connections that are made and repaired as needed.
mod client {
    pub(crate) mod attempts;
    pub(crate) mod connections;
    pub(crate) mod failure;
    pub(crate) mod tls;
}
mod options;
mod registry;

pub use options::{EtcdOptions, EtcdOptionsError};
pub use registry::EtcdRegistry;
