#![doc = include_str!("../README.md")]

mod command_line;
pub mod control;
mod error;
mod interface;
mod nearest;
pub mod printable;
mod secrets;
pub mod state_dir;
/// The options of the store of leases.
mod store {
    #[cfg(feature = "etcd")]
    pub(crate) mod etcd;
    pub(crate) mod registry;
}

pub use command_line::{CommandLine, EmptyOption, environment, go_flags, with_plain_usage};
pub use error::Error;
pub use interface::InterfaceFlags;
pub use nearest::nearest;
pub use secrets::FileSecrets;
#[cfg(feature = "etcd")]
pub use store::etcd::EtcdFlags;
#[cfg(feature = "etcd")]
pub use store::registry::open_etcd;
pub use store::registry::{RegistryUrl, open_directory};
