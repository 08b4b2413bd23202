#![doc = include_str!("../README.md")]

mod annotations;
mod api;
mod condition;
mod connect;
mod follow;
mod hold;
mod list;
mod manager;
mod node;
mod nodes;
mod options;
mod own;
mod pause;
mod shared;
mod split;
mod task;
#[cfg(feature = "testing")]
pub mod testing;

pub use annotations::{Prefix, PrefixError};
pub use connect::credential_files;
pub use manager::KubeManager;
pub use options::{KubeOptions, NodeIdentity};
