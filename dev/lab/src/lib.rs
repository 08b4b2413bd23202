#![doc = include_str!("../README.md")]

mod cluster;
mod error;
mod probe;
mod subnet_env;
mod system;
pub mod testing;

pub use cluster::daemon::end_with_lab;
pub use cluster::host::Host;
pub use cluster::lab::{Builder, Lab, MAX_HOSTS, default_backend};
pub use cluster::pod::Pod;
pub use cluster::switch::Switch;
pub use error::{Error, Result};
pub use nix::sys::signal::Signal;
pub use probe::echo::Unreached;
pub use probe::reach::{Matrix, Pair};
pub use subnet_env::SubnetEnv;
pub use system::interrupt::Interrupter;
pub use system::namespace::{Namespace, may_make_namespaces};
pub use system::privilege::{Privilege, enter, enter_and_exec};
