#![doc = include_str!("../README.md")]

mod blocking;
mod config;
mod control;
mod daemon;
mod error;
mod http;
mod metrics;
mod observe;
mod options;
mod process;
mod report;
mod run;
mod store;

pub use config::{
    ControlConfig, ControlSocket, DaemonConfig, FirewallConfig, MasqueradedFamilies,
    NexthopObjects, StoreConfig,
};
pub use daemon::Daemon;
pub use error::Error;
#[cfg(feature = "etcd")]
pub use flannel_options::EtcdFlags;
pub use flannel_options::{InterfaceFlags, RegistryUrl};
pub use options::{
    Capabilities, ControlFlags, FirewallFlags, KubeFlags, LeaseFlags, LogFlags, LogFormat, Options,
    RouteFlags,
};
pub use process::main_with;
