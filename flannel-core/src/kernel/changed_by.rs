//! The author of a change in the kernel.

use std::fmt;
use std::sync::Arc;

/// The author of a change, as far as the kernel names it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ChangedBy {
    /// The port id of the netlink socket that asked for the change; not 0. Mostly the id of the
    /// process, but not always.
    pub port: u32,
    /// The protocol of the route or nexthop that was put there; `None` for other objects and for
    /// deletions.
    pub protocol: Option<u8>,
    /// The process that has the socket, if it still lived when it was looked up
    /// ([`Kernel::process`](super::Kernel::process)).
    pub process: Option<Process>,
}

/// The process that owns a netlink socket.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Process {
    /// Its name, as it sets it.
    pub name: Arc<str>,
    /// Its id.
    pub id: u32,
    /// It has the very socket open. Else it is only known to live and to have the port id of the
    /// socket for its id, as a process has that of its first socket; its open files cannot be
    /// read. It may be a process that has this id in another pid namespace.
    pub is_certain: bool,
}

impl Process {
    /// A process that has the very socket open.
    pub const fn new(name: Arc<str>, id: u32) -> Self {
        Self { name, id, is_certain: true }
    }
}

/// `ip (process 4711)`, or `probably ip (process 4711)`.
impl fmt::Display for Process {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, id, is_certain } = self;
        write!(f, "{}{name} (process {id})", if *is_certain { "" } else { "probably " })
    }
}

impl ChangedBy {
    /// An author of whom only the port is known.
    pub const fn new(port: u32) -> Self {
        Self { port, protocol: None, process: None }
    }
}

/// `ip (process 4711) with route protocol 3`, `probably ip (process 4711)`, or `the netlink socket
/// with port id 4711`.
impl fmt::Display for ChangedBy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.process {
            Some(process) => process.fmt(f)?,
            None => write!(f, "the netlink socket with port id {}", self.port)?,
        }
        self.protocol.map_or(Ok(()), |protocol| write!(f, " with route protocol {protocol}"))
    }
}
