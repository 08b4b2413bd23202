#![doc = include_str!("../README.md")]

mod checksum;
mod control;
mod counters;
mod device_lock;
mod ending;
mod ends;
mod error;
#[cfg(any(test, feature = "testing"))]
mod fakes;
mod forwarder;
mod handle;
mod icmp;
mod in_use;
mod join;
mod learned;
mod limit;
mod mtus;
mod options;
mod packet;
mod ports;
mod receive;
mod saved_counters;
mod send;
mod server;
mod socket_group;
mod split;
mod started;
mod table;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
mod vnet;

pub use self::control::{Client, Peers, Prefix, Process, Request, Response, Status, VERSION};
pub use self::counters::{Counts, Foreign};
pub use self::ending::Ended;
pub use self::error::Error;
pub use self::forwarder::Forwarder;
pub use self::handle::DataPlane;
pub use self::options::Options;
pub use self::ports::{PortOwner, PortProcess};
pub use self::server::serve;
pub use self::started::{Program, Started, ThisProgram, run, run_if_started};
pub use self::table::Peer;

/// The version of this crate, which is the version of a program that calls [`run`] or
/// [`run_if_started`].
pub const PROGRAM_VERSION: &str = env!("CARGO_PKG_VERSION");

/// Writes a line to standard error, which may be closed: the process outlives its parent.
fn report(line: &str) {
    use std::io::Write;
    let _ = writeln!(std::io::stderr(), "flannel-udp: {line}");
}
