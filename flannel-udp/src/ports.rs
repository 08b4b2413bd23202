//! The sockets of this network namespace that have a UDP port, and the processes that own them.

use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::Path;

/// A socket that has a UDP port, and its owner.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PortOwner {
    /// The number of the socket.
    pub(crate) inode: u64,
    /// The id of the user who opened the socket.
    pub uid: u32,
    /// The process. `None` if this process may not see it, or if it has ended.
    pub process: Option<PortProcess>,
}

/// A process that has a UDP port.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PortProcess {
    /// The id of the process.
    pub pid: u32,
    /// The name of its program.
    pub name: String,
}

impl fmt::Display for PortOwner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.process {
            Some(PortProcess { pid, name }) => write!(f, "the process {name:?} ({pid})")?,
            None => write!(f, "a process that cannot be seen from here")?,
        }
        write!(f, " of the user {}", self.uid)
    }
}

/// The first socket that has the port of an address, or of all addresses. `None` if there is no
/// such socket, or if the list of sockets cannot be read.
pub(crate) fn owner(address: SocketAddr) -> Option<PortOwner> {
    let mut owner = sockets(address).ok()?.into_iter().next()?;
    owner.process = process(owner.inode);
    Some(owner)
}

/// The sockets that have the port of an address, or of all addresses, without their processes.
///
/// # Errors
/// The kernel's list cannot be read.
pub(crate) fn sockets(address: SocketAddr) -> io::Result<Vec<PortOwner>> {
    let mut found = Vec::new();
    for (file, is_v6) in [("udp", false), ("udp6", true)] {
        match std::fs::read_to_string(format!("/proc/thread-self/net/{file}")) {
            Ok(list) => found.extend(list.lines().filter_map(|line| read(line, address))),
            // A kernel without IPv6.
            Err(error) if is_v6 && error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
    Ok(found)
}

/// The socket of a line of `/proc/net/udp` or `udp6`, if it has the address.
///
/// **Source**: linux `net/ipv4/udp.c: udp4_format_sock`, `net/ipv6/datagram.c:
/// __ip6_dgram_sock_seq_show`.
fn read(line: &str, address: SocketAddr) -> Option<PortOwner> {
    let mut words = line.split_whitespace();
    let (local, port) = words.nth(1)?.split_once(':')?;
    if u16::from_str_radix(port, 16).ok()? != address.port() {
        return None;
    }
    let local = read_address(local)?.to_canonical();
    if !local.is_unspecified() && local != address.ip().to_canonical() {
        return None;
    }
    let uid = words.nth(5)?.parse().ok()?;
    let inode = words.nth(1)?.parse().ok()?;
    Some(PortOwner { inode, uid, process: None })
}

/// The kernel writes each 32 bits of an address as a number of the host.
fn read_address(text: &str) -> Option<IpAddr> {
    let part = |at: usize| Some(u32::from_str_radix(text.get(at..at + 8)?, 16).ok()?.to_ne_bytes());
    if text.len() == 8 {
        return Some(Ipv4Addr::from(part(0)?).into());
    }
    let parts = [part(0)?, part(8)?, part(16)?, part(24)?];
    let bytes: [u8; 16] = parts.as_flattened().try_into().ok()?;
    Some(Ipv6Addr::from(bytes).into())
}

/// The process that has a socket.
fn process(inode: u64) -> Option<PortProcess> {
    let link = format!("socket:[{inode}]");
    let pid = std::fs::read_dir("/proc")
        .ok()?
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .find(|pid: &u32| has_link(*pid, &link))?;
    let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    Some(PortProcess { pid, name: name.trim_end().to_owned() })
}

fn has_link(pid: u32, link: &str) -> bool {
    let Ok(mut entries) = std::fs::read_dir(format!("/proc/{pid}/fd")) else { return false };
    entries.any(|entry| {
        let target = entry.and_then(|entry| std::fs::read_link(entry.path()));
        target.is_ok_and(|target| target == Path::new(link))
    })
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;

    use super::*;

    #[test]
    fn the_owner_of_a_port_is_named() {
        for (bound, asked) in [
            ("127.0.0.1:0", Ipv4Addr::LOCALHOST.into()),
            ("0.0.0.0:0", Ipv4Addr::LOCALHOST.into()),
            ("[::1]:0", IpAddr::from(Ipv6Addr::LOCALHOST)),
            ("[::]:0", Ipv4Addr::LOCALHOST.into()),
            ("[::ffff:127.0.0.1]:0", Ipv4Addr::LOCALHOST.into()),
        ] {
            let socket = UdpSocket::bind(bound).unwrap();
            let port = socket.local_addr().unwrap().port();
            let owner = owner((asked, port).into()).unwrap_or_else(|| panic!("{bound}"));
            let process = owner.process.clone().unwrap();
            assert_eq!(process.pid, std::process::id(), "{bound}");
            assert!(owner.to_string().contains(&process.pid.to_string()), "{owner}");
            drop(socket);
        }
    }

    #[test]
    fn a_socket_with_another_address_or_port_is_not_meant() {
        let socket = UdpSocket::bind("127.0.0.2:0").unwrap();
        let port = socket.local_addr().unwrap().port();
        assert_eq!(owner(([127, 0, 0, 3], port).into()), None);
        assert_eq!(read("garbage", ([127, 0, 0, 3], port).into()), None);
    }
}
