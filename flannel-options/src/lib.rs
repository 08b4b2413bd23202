#![doc = include_str!("../README.md")]

mod command_line;
pub mod control;
pub mod environment;
mod error;
#[cfg(feature = "etcd")]
mod etcd;
pub mod go_flags;
mod registry;
mod secrets;
pub mod state_dir;

pub use command_line::CommandLine;
pub use error::Error;
#[cfg(feature = "etcd")]
pub use etcd::EtcdFlags;
#[cfg(feature = "etcd")]
pub use registry::open_etcd;
pub use registry::{RegistryUrl, open_directory};
pub use secrets::FileSecrets;
