//! UDP ports whose datagrams the kernel unpacks. A tunnel device sends them, and has no part in
//! their arrival. Linux sends no messages about them, so they are read in each snapshot.

use std::net::Ipv4Addr;

use flannel_core::kernel::KernelError;
use libc::{EINVAL, ENOENT, EPERM};

use crate::codec::fou::{self, FAMILY, OpenPort, Port};
use crate::transport::generic;
use crate::transport::namespace::Namespace;
use crate::transport::socket::Socket;

/// Opens a socket. Returns it with the number of the netlink family.
pub(super) fn open() -> Result<(Socket, u16), KernelError> {
    generic::open(FAMILY).map_err(|error| {
        let detail = "this kernel has no UDP tunnels (FOU): run modprobe fou";
        if error.is(ENOENT) { KernelError::explained(ENOENT, detail) } else { error }
    })
}

/// The ports at which the kernel unpacks datagrams. Empty if the module is not loaded.
pub(super) fn ports(namespace: &Namespace) -> Result<Vec<OpenPort>, KernelError> {
    match namespace.run(open)? {
        Ok((mut socket, family)) => socket.dump(fou::all(family), fou::read),
        Err(error) if error.is(ENOENT) => Ok(Vec::new()),
        Err(error) => Err(error),
    }
}

/// Checks that this process may open ports. It requests to close a port that cannot be open, which
/// the kernel refuses after it has checked the capability.
pub(super) fn may_add() -> Result<(), KernelError> {
    let (mut socket, family) = open()?;
    let none = Port { local: Ipv4Addr::UNSPECIFIED, port: 0 };
    match socket.send_one(fou::delete(family, none)) {
        Err(error) if error.is_denied() => {
            let detail = "UDP ports of the kernel (FOU) need CAP_NET_ADMIN of the host: this user \
                          namespace has its own";
            Err(KernelError::explained(EPERM, detail))
        }
        Err(error) if !error.is(EINVAL) => Err(error),
        _ => Ok(()),
    }
}

/// Opens a port if it is not open.
pub(super) fn add(namespace: &Namespace, port: Port) -> Result<(), KernelError> {
    let (mut socket, family) = namespace.run(open)??;
    let there = socket.dump(fou::all(family), fou::read)?;
    if there.iter().any(|there| there.receives_for(port)) {
        return Ok(());
    }
    socket.send_one(fou::add(family, port))
}

/// Closes a port, if it is open.
pub(super) fn delete(namespace: &Namespace, port: Port) -> Result<(), KernelError> {
    if !ports(namespace)?.iter().any(|open| open.is(port)) {
        return Ok(());
    }
    let (mut socket, family) = namespace.run(open)??;
    socket.send_one(fou::delete(family, port))
}
