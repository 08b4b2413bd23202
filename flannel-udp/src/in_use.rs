//! Whether a process has a queue of a tun device.

use std::io;
use std::os::fd::AsRawFd;

use nix::errno::Errno;
use nix::net::if_::if_nametoindex;
use nix::sys::socket::{
    AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, recv, sendto, socket,
};

// linux `include/uapi/linux/netlink.h`, `rtnetlink.h` and `if_link.h`.
const RTM_NEWLINK: u16 = 16;
const RTM_GETLINK: u16 = 18;
const NLM_F_REQUEST: u16 = 1;
const IFLA_LINKINFO: u16 = 18;
const IFLA_INFO_KIND: u16 = 1;
const IFLA_CARRIER: u16 = 33;
/// The length of the header of a message, and of the header of a device behind it.
const HEADER: usize = 16;
const LINK: usize = 16;

/// Whether a process has a queue of the tun device with this name. A tun device has a carrier
/// exactly then (linux `drivers/net/tun.c: __tun_detach`), also while it is down.
///
/// # Errors
/// The kernel does not answer.
pub(crate) fn is_in_use(device: &str) -> io::Result<bool> {
    let Ok(index) = if_nametoindex(device) else { return Ok(false) };
    let mut request = [0; HEADER + LINK];
    request[..4].copy_from_slice(&(HEADER as u32 + LINK as u32).to_ne_bytes());
    request[4..6].copy_from_slice(&RTM_GETLINK.to_ne_bytes());
    request[6..8].copy_from_slice(&NLM_F_REQUEST.to_ne_bytes());
    request[HEADER + 4..HEADER + 8].copy_from_slice(&index.to_ne_bytes());
    let socket = socket(
        AddressFamily::Netlink,
        SockType::Raw,
        SockFlag::SOCK_CLOEXEC,
        SockProtocol::NetlinkRoute,
    )?;
    let kernel = NetlinkAddr::new(0, 0);
    sendto(socket.as_raw_fd(), &request, &kernel, MsgFlags::empty())?;
    let mut answer = vec![0; 1 << 16];
    let length = loop {
        match recv(socket.as_raw_fd(), &mut answer, MsgFlags::empty()) {
            Err(Errno::EINTR) => {}
            length => break length?,
        }
    };
    Ok(is_tun_with_carrier(&answer[..length]))
}

/// Whether a message describes a tun device that has a carrier. It does not if the device is gone.
fn is_tun_with_carrier(message: &[u8]) -> bool {
    let Some((header, link)) = message.split_at_checked(HEADER) else { return false };
    if header[4..6] != RTM_NEWLINK.to_ne_bytes() {
        return false;
    }
    let Some(attributes) = link.get(LINK..) else { return false };
    let kind =
        attribute(attributes, IFLA_LINKINFO).and_then(|info| attribute(info, IFLA_INFO_KIND));
    let carrier = attribute(attributes, IFLA_CARRIER).and_then(<[u8]>::first);
    kind.is_some_and(|kind| kind.starts_with(b"tun\0")) && carrier == Some(&1)
}

/// The value of the first attribute of a type.
fn attribute(mut attributes: &[u8], of_type: u16) -> Option<&[u8]> {
    loop {
        let header = attributes.first_chunk::<4>()?;
        let length = usize::from(u16::from_ne_bytes([header[0], header[1]]));
        // The upper bits are flags.
        let found = u16::from_ne_bytes([header[2], header[3]]) & 0x3fff;
        let value = attributes.get(4..length)?;
        if found == of_type {
            return Some(value);
        }
        attributes = attributes.get(length.next_multiple_of(4)..)?;
    }
}
