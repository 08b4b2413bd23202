#![doc = include_str!("../README.md")]

pub mod address;
pub mod backend;
pub mod backoff;
pub mod config;
mod credential;
pub mod error;
pub mod json;
pub mod kernel;
pub mod lease;
pub mod logging;
pub mod network;
pub mod object;
pub mod process;
pub mod remedy;
pub mod runtime;
pub mod status;
pub mod subnet;
mod subnet_env;
#[cfg(feature = "testing")]
pub mod testing;
pub mod text;

pub use address::Subnet;
pub use backend::Backend;
pub use config::Config;
pub use credential::Credential;
pub use error::{Error, Result};
pub use kernel::Kernel;
pub use lease::{Lease, Subnets};
pub use network::Network;
pub use remedy::Remedy;
pub use subnet::SubnetManager;
pub use subnet_env::{SubnetEnv, SubnetEnvError};
