//! Single queries: a link by name, a name by index, a route by destination.

use std::net::IpAddr;

use flannel_core::kernel::{KernelError, RouteAnswer};
use flannel_core::object::LinkName;
pub(crate) use libc::ENODEV;
use libc::{EACCES, EHOSTUNREACH, EINVAL, ENETUNREACH};
use neli::consts::rtnl::Rtn;

use crate::codec::link::LinkMessage;
use crate::codec::{link, route};
use crate::transport::socket::Socket;

/// The link with this name, or `None` if the link does not exist. Alternative names (`altname` of
/// `ip link`) are not compared.
pub(crate) fn find_link(
    socket: &mut Socket,
    name: LinkName,
) -> Result<Option<LinkMessage>, KernelError> {
    match socket.ask(link::by_name(name), link::read) {
        Ok(link) => Ok(Some(link).filter(|link| link.name == name)),
        Err(error) if error.is(ENODEV) => Ok(None),
        Err(error) => Err(error),
    }
}

/// The link with this name. The error is `ENODEV` if the link does not exist.
pub(crate) fn get_link(socket: &mut Socket, name: LinkName) -> Result<LinkMessage, KernelError> {
    find_link(socket, name)?
        .ok_or_else(|| KernelError::explained(ENODEV, format!("no interface named {name}")))
}

/// The name of the link with this index. The error is `ENODEV` if the link does not exist, and
/// [`KernelError::Unreadable`] if its name is not UTF-8.
pub(crate) fn ask_name(socket: &mut Socket, index: u32) -> Result<LinkName, KernelError> {
    socket.ask(link::by_index(index), link::read).map(|link| link.name)
}

/// The name of the link with this index, or `None` if the link does not exist or its name is not
/// UTF-8.
pub(crate) fn name_of(socket: &mut Socket, index: u32) -> Result<Option<LinkName>, KernelError> {
    match ask_name(socket, index) {
        Ok(name) => Ok(Some(name)),
        Err(error) if error.is(ENODEV) || error.is_unreadable() => Ok(None),
        Err(error) => Err(error),
    }
}

/// Whether the kernel has no route for a packet, or one of type prohibit, blackhole or unreachable.
fn is_no_way(error: &KernelError) -> bool {
    matches!(error.errno(), Some(EACCES | EINVAL | ENETUNREACH | EHOSTUNREACH))
}

/// The route that the kernel would choose for a packet to `dst`.
pub(crate) fn lookup(socket: &mut Socket, dst: IpAddr) -> Result<RouteAnswer, KernelError> {
    let answer = match socket.ask(route::lookup(dst), route::read) {
        Ok(answer) => answer,
        Err(error) if is_no_way(&error) => {
            return Ok(RouteAnswer::default());
        }
        Err(error) => return Err(error),
    };
    // Other types, such as blackhole and broadcast, lead to no single host.
    if !matches!(answer.kind, Rtn::Unicast | Rtn::Local) || answer.index == 0 {
        return Ok(RouteAnswer::default());
    }
    // The link may have been deleted since the first query.
    let Some(link) = name_of(socket, answer.index)? else { return Ok(RouteAnswer::default()) };
    let mut route = RouteAnswer::via(link, answer.gateway, answer.source);
    route.local = answer.kind == Rtn::Local;
    Ok(route)
}
