#![doc = include_str!("../README.md")]

mod checksum;
mod claim;
mod control;
mod counters;
mod ends;
mod error;
#[cfg(any(test, feature = "testing"))]
mod fakes;
mod group;
mod handle;
mod icmp;
mod in_use;
mod join;
mod learned;
mod ledger;
mod limit;
mod mtus;
mod options;
mod packet;
mod plane;
mod ports;
mod receive;
mod send;
mod server;
mod split;
mod started;
mod table;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
mod vnet;

pub use self::control::{Answer, Client, Peers, Prefix, Process, Request, Status, VERSION};
pub use self::counters::{Counts, Foreign};
pub use self::error::Error;
pub use self::handle::DataPlane;
pub use self::options::Options;
pub use self::plane::Plane;
pub use self::ports::{PortOwner, PortProcess};
pub use self::server::serve;
pub use self::started::{command, run, run_if_started};
pub use self::table::Peer;

/// The version of this crate: the one of a program that calls [`run`] or [`run_if_started`].
pub const PROGRAM_VERSION: &str = env!("CARGO_PKG_VERSION");

/// Writes a line to standard error, which may be closed: the process outlives its parent.
fn report(line: &str) {
    use std::io::Write;
    let _ = writeln!(std::io::stderr(), "flannel-udp: {line}");
}
