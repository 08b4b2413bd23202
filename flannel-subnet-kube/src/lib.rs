#![doc = include_str!("../README.md")]

mod api;
mod follow;
mod manager;
mod node;
mod options;
#[cfg(feature = "testing")]
pub mod testing;

pub use api::kubeconfig::credential_files;
pub use manager::KubeManager;
pub use node::prefix::{Prefix, PrefixError};
pub use options::{KubeOptions, NodeIdentity};
