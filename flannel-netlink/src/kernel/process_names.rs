//! Finds the process that changed an object.
//!
//! The kernel reports the port id of the socket that requested the change. The first netlink socket
//! of a process usually has the process id as its port id, and further sockets have random ones.
//! The process id is the id in the pid namespace of that process. In the pid namespace of this
//! program, another process may have the id. So a process is named only if it has the socket open.
//! A daemon with few capabilities cannot read the open files of processes of root. It names such a
//! process as probable.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read, Seek};
use std::time::{Duration, Instant};

use flannel_core::kernel::Process;

/// The time for which answers are cached.
const FRESH: Duration = Duration::from_secs(1);
/// The largest number of lookups within [`FRESH`]. Each lookup reads several files.
const MOST: usize = 20;
/// No lookup begins after lookups have taken this time within [`FRESH`], as on a host with very
/// many sockets.
const BUDGET: Duration = Duration::from_millis(50);
/// The largest number of open files of a process that a lookup reads.
const MOST_FILES: usize = 10_000;

/// The processes behind the port ids of one network namespace.
pub(crate) struct Processes {
    /// `/proc/net/netlink` of the network namespace. `None` if it cannot be opened.
    sockets: Option<File>,
    /// The start of the current period of [`FRESH`].
    since: Instant,
    /// The time that lookups have taken in this period.
    spent: Duration,
    /// The answers of this period, by port id.
    known: HashMap<u32, Option<Process>>,
}

impl Processes {
    /// The processes in the network namespace of the calling thread.
    pub(crate) fn here() -> Self {
        let sockets = File::open("/proc/thread-self/net/netlink")
            .inspect_err(|error| tracing::debug!(%error, "processes cannot be named"))
            .ok();
        Self { sockets, since: Instant::now(), spent: Duration::ZERO, known: HashMap::new() }
    }

    /// See [`ProcessNames::name`](flannel_core::kernel::ProcessNames::name).
    pub(crate) fn name(&mut self, port: u32) -> Option<Process> {
        let now = Instant::now();
        if now - self.since > FRESH {
            self.since = now;
            self.spent = Duration::ZERO;
            self.known.clear();
        }
        if let Some(name) = self.known.get(&port) {
            return name.clone();
        }
        if self.known.len() == MOST || self.spent > BUDGET {
            return None;
        }
        let name = self.find(port);
        self.spent += now.elapsed();
        self.known.insert(port, name.clone());
        name
    }

    /// Looks up the process with the id `port`. `None` if it does not have the socket open.
    fn find(&mut self, port: u32) -> Option<Process> {
        let mut table = String::new();
        let sockets = self.sockets.as_mut()?;
        sockets.rewind().ok()?;
        sockets.read_to_string(&mut table).ok()?;
        let socket = format!("socket:[{}]", inode(&table, port)?);
        let is_certain = match has_open(port, &socket) {
            Ok(true) => true,
            Ok(false) => return None,
            Err(error) => {
                tracing::debug!(%error, port, "the open files of the process cannot be read");
                // The process is more likely the first process of a container, in another pid
                // namespace.
                if port == 1 {
                    return None;
                }
                false
            }
        };
        // This fails if the process has ended.
        let name = std::fs::read_to_string(format!("/proc/{port}/comm")).ok()?;
        Some(Process { name: name.trim_end().to_owned(), pid: port, is_certain })
    }
}

/// The inode of the rtnetlink socket with this port id, in the text of `/proc/net/netlink`.
fn inode(table: &str, port: u32) -> Option<&str> {
    table.lines().find_map(|line| {
        let mut columns = line.split_whitespace();
        let protocol = columns.nth(1)?;
        let id = columns.next()?;
        if protocol != "0" || id.parse() != Ok(port) {
            return None;
        }
        columns.next_back()
    })
}

/// Whether the process has this file open. An error if its open files cannot be read.
fn has_open(process: u32, file: &str) -> io::Result<bool> {
    for entry in std::fs::read_dir(format!("/proc/{process}/fd"))?.take(MOST_FILES) {
        match std::fs::read_link(entry?.path()) {
            Ok(target) if target.as_os_str() == file => return Ok(true),
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => return Err(error),
            // It is another file, or was closed after the directory was read.
            _ => {}
        }
    }
    Ok(false)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_socket_is_found_by_protocol_and_port() {
        let table = "\
sk               Eth Pid        Groups   Rmem     Wmem     Dump  Locks    Drops    Inode\n\
0000000000000000 15  4711       00000001 0        0        0     2        0        11      \n\
0000000000000000 0   2995735113 00000000 0        0        0     2        0        22      \n\
0000000000000000 0   4711       00000440 0        0        0     2        0        33      \n";
        assert_eq!(inode(table, 4711), Some("33"));
        assert_eq!(inode(table, 2_995_735_113), Some("22"));
        assert_eq!(inode(table, 1), None);
    }

    #[test]
    fn many_ports_cause_few_lookups() {
        let mut processes = Processes::here();
        for port in 1..10_000 {
            processes.name(port);
        }
        assert!(processes.known.len() <= MOST);
    }

    #[test]
    fn slow_lookups_are_few() {
        let mut processes = Processes::here();
        processes.name(1);
        processes.spent = 2 * BUDGET;
        let known = processes.known.len();
        (2..1_000).for_each(|port| assert_eq!(processes.name(port), None));
        assert_eq!(processes.known.len(), known);
        processes.since -= 2 * FRESH;
        processes.name(2);
        assert!(processes.known.contains_key(&2) && processes.spent <= BUDGET);
    }
}
