//! Why a data plane cannot run.

use std::io;
use std::net::SocketAddr;

use nix::errno::Errno;

use crate::ports::{self, PortOwner};

/// Why a data plane cannot run. The texts name a cure.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The tun device cannot be opened or made.
    #[error("tun device {device}: {source}{}", cure(source))]
    Device {
        /// Its name.
        device: String,
        /// The error of the kernel.
        source: io::Error,
    },
    /// Another process has the tun device.
    #[error(
        "tun device {device}: another data plane has it; end that process (pgrep -af \
         'flannel.*udp')"
    )]
    DeviceTaken {
        /// Its name.
        device: String,
    },
    /// Another program has the port of the data plane.
    #[error("UDP port {address}: {owner} has it; end that process")]
    PortTaken {
        /// The address that the socket would have.
        address: SocketAddr,
        /// The socket in the way.
        owner: PortOwner,
    },
    /// A socket cannot be opened, for example because the node has no such address.
    #[error("UDP socket with the address {address}: {source}")]
    Socket {
        /// The address, with port 0 for a socket that only sends.
        address: SocketAddr,
        /// The error of the kernel.
        source: io::Error,
    },
    /// A thread cannot be started.
    #[error("cannot start a thread: {0}")]
    Thread(io::Error),
    /// Another process has not handed over all descriptors of its data plane.
    #[error("descriptors are missing")]
    Descriptors,
}

impl Error {
    pub(crate) fn device(device: &str, source: impl Into<io::Error>) -> Self {
        Self::Device { device: device.to_owned(), source: source.into() }
    }

    /// The error of a socket with an address.
    pub(crate) fn socket(address: SocketAddr, source: io::Error) -> Self {
        if source.kind() == io::ErrorKind::AddrInUse
            && let Some(owner) = ports::owner(address)
        {
            return Self::PortTaken { address, owner };
        }
        Self::Socket { address, source }
    }
}

/// The cure of an error of a tun device.
fn cure(error: &io::Error) -> &'static str {
    match Errno::from_raw(error.raw_os_error().unwrap_or(0)) {
        Errno::ENOENT | Errno::ENODEV | Errno::ENXIO => {
            ": load the module (modprobe tun); a container needs the device /dev/net/tun"
        }
        Errno::EPERM | Errno::EACCES => {
            ": it needs CAP_NET_ADMIN, and a container the device /dev/net/tun (with Kubernetes: \
             privileged)"
        }
        Errno::EINVAL => ": a device of this name has other attributes; delete it (ip link delete)",
        Errno::EBUSY => ": another program uses it",
        _ => "",
    }
}
