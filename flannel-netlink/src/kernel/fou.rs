//! UDP ports whose datagrams the kernel unpacks. A tunnel device sends them, and has no part in
//! their arrival. Linux sends no messages about them, so they are read in each snapshot.

use flannel_core::kernel::KernelError;

use crate::codec::fou::{self, FAMILY, Port};
use crate::transport::generic;
use crate::transport::namespace::Namespace;
use crate::transport::socket::Socket;

const ENOENT: i32 = 2;
const EADDRINUSE: i32 = 98;
const EALREADY: i32 = 114;

/// Opens a socket. Returns it with the number of the netlink family.
pub(super) fn open() -> Result<(Socket, u16), KernelError> {
    generic::open(FAMILY).map_err(|error| {
        let detail = "this kernel has no UDP tunnels (FOU): run modprobe fou";
        if error.errno == ENOENT { KernelError::explained(ENOENT, detail) } else { error }
    })
}

/// The ports at which the kernel takes IP packets.
pub(super) fn ports(namespace: &Namespace) -> Result<Vec<Port>, KernelError> {
    let (mut socket, family) = namespace.run(open)??;
    socket.dump(fou::all(family), fou::read)
}

/// Opens a port if it is not open.
pub(super) fn add(namespace: &Namespace, port: Port) -> Result<(), KernelError> {
    let (mut socket, family) = namespace.run(open)??;
    let there = socket.dump(fou::all(family), fou::read)?;
    if there.iter().any(|there| there.receives_for(port)) {
        return Ok(());
    }
    socket.send_one(fou::add(family, port)).map_err(|error| match error.errno {
        EADDRINUSE | EALREADY => {
            let at = port.port;
            let detail = format!("UDP port {at} is in use: stop its program, or set another Port");
            KernelError::explained(error.errno, detail)
        }
        _ => error,
    })
}

/// Closes a port. One that is not open is no error.
pub(super) fn delete(namespace: &Namespace, port: Port) -> Result<(), KernelError> {
    let (mut socket, family) = namespace.run(open)??;
    if !socket.dump(fou::all(family), fou::read)?.contains(&port) {
        return Ok(());
    }
    socket.send_one(fou::delete(family, port))
}
