//! The authors of changes.

use std::fmt;
use std::sync::Arc;

/// The author of a change in the kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ChangedBy {
    /// The port id of the netlink socket, not 0. It is usually the process id.
    pub port: u32,
    /// The protocol of the route or nexthop object that was put. `None` for other objects, and for
    /// deletions.
    pub protocol: Option<u8>,
    /// The process that owns the socket, as [`ProcessNames`] found it, or `None` if it was not
    /// found.
    pub process: Option<Arc<Process>>,
}

/// A process that owns a netlink socket. `Display` writes `ip (process 4711)`, or `probably ip
/// (process 4711)` if the process is not certain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Process {
    /// The name of the program. The kernel shortens it to 15 bytes.
    pub name: String,
    /// The process id.
    pub pid: u32,
    /// Whether the process certainly owns the socket. If not, another process may own it.
    pub is_certain: bool,
}

impl fmt::Display for Process {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, pid, is_certain } = self;
        f.write_str(if *is_certain { "" } else { "probably " })?;
        write!(f, "{name} (process {pid})")
    }
}

impl ChangedBy {
    /// An author of which only the port id is known.
    pub const fn new(port: u32) -> Self {
        Self { port, protocol: None, process: None }
    }
}

/// `ip (process 4711) with route protocol 3`, or `the netlink socket with port id 4711`.
impl fmt::Display for ChangedBy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.process {
            Some(process) => process.fmt(f)?,
            None => write!(f, "the netlink socket with port id {}", self.port)?,
        }
        self.protocol.map_or(Ok(()), |protocol| write!(f, " with route protocol {protocol}"))
    }
}

/// Finds the processes that own netlink sockets.
#[doc = include_str!("../../docs/process_names.md")]
pub trait ProcessNames: fmt::Debug + Send + Sync {
    /// The process that owns the netlink socket with this port id. `None` if the process was not
    /// found, for example because it has ended, because several processes own the socket, or
    /// because lookups are rate-limited. Blocks.
    fn name(&self, port: u32) -> Option<Process>;
}
