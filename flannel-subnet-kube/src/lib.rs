#![doc = include_str!("../README.md")]

mod annotations;
mod api;
mod condition;
mod connect;
mod follow;
mod hold;
mod manager;
mod node;
mod nodes;
mod own;
mod pause;
mod split;
#[cfg(feature = "testing")]
pub mod testing;

pub use annotations::{Prefix, PrefixError};
pub use condition::Network;
pub use connect::credential_files;
pub use manager::{KubeManager, KubeOptions, NodeIdentity};
