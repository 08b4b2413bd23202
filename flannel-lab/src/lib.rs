#![doc = include_str!("../README.md")]

mod daemon;
mod echo;
mod error;
mod host;
mod interrupt;
mod lab;
mod namespace;
mod pod;
mod privilege;
mod reach;
mod subnet_env;
mod switch;
pub mod testing;

pub use daemon::end_with_lab;
pub use echo::Unreached;
pub use error::{Error, Result};
pub use host::Host;
pub use interrupt::Interrupter;
pub use lab::{Builder, Lab, MAX_HOSTS, default_backend};
pub use namespace::{Namespace, may_make_namespaces};
pub use nix::sys::signal::Signal;
pub use pod::Pod;
pub use privilege::{Privilege, enter, enter_and_exec};
pub use reach::{Matrix, Pair};
pub use subnet_env::SubnetEnv;
pub use switch::Switch;
