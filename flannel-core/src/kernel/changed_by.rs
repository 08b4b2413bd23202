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
    /// The process that has the socket, if it still lived when [`ProcessNames`] looked for it.
    pub process: Option<Arc<str>>,
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
            Some(process) => f.write_str(process)?,
            None => write!(f, "the netlink socket with port id {}", self.port)?,
        }
        self.protocol.map_or(Ok(()), |protocol| write!(f, " with route protocol {protocol}"))
    }
}

/// Names the processes that own netlink sockets.
///
/// Implementations: `flannel_netlink::NetlinkKernel`, and `testing::FakeKernel` (feature
/// `testing`).
pub trait ProcessNames: fmt::Debug + Send + Sync {
    /// The process that has the netlink socket with this port id, for a message: `ip (process
    /// 4711)`, or `probably ip (process 4711)` if it may be another process. `None`: no single
    /// process could be identified, or too many were looked up of late.
    ///
    /// Blocks while it reads files. Ask soon after the change: a process that has ended has no
    /// name.
    fn name(&self, port: u32) -> Option<String>;
}
