//! Devices whose drivers receive UDP packets on a port of the host. No process has their sockets.

use std::fmt;

use flannel_core::kernel::KernelError;
use flannel_core::object::{Link, LinkName};

use super::NetlinkKernel;
use super::wireguard::WireguardDevices;
use crate::codec::link;
use crate::transport::namespace::Namespace;
use crate::transport::socket::Socket;

/// A device that is up and has a UDP port. `Display` is `cilium_vxlan (vxlan)`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PortHolder {
    /// The device.
    pub link: LinkName,
    /// Its kind as of `ip -d link`, such as `vxlan`, `geneve` or `wireguard`.
    pub kind: String,
    /// The port.
    pub port: u16,
}

impl fmt::Display for PortHolder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.link, self.kind)
    }
}

impl NetlinkKernel {
    /// The devices that have this UDP port of the host, without `own` and without those that share
    /// it with a device of `own`, as a vxlan device with the same flags does. Devices of the kinds
    /// vxlan, geneve and wireguard are found.
    ///
    /// # Errors
    /// The devices cannot be read.
    ///
    /// # Blocking
    /// Reads all devices.
    pub fn port_holders(&self, port: u16, own: &[Link]) -> Result<Vec<PortHolder>, KernelError> {
        let place = &self.place;
        holders(&mut self.lock(), &place.namespace, &place.wireguard, port, own)
    }
}

/// See [`NetlinkKernel::port_holders`].
pub(super) fn holders(
    socket: &mut Socket,
    namespace: &Namespace,
    wireguard: &WireguardDevices,
    port: u16,
    own: &[Link],
) -> Result<Vec<PortHolder>, KernelError> {
    let mut found = Vec::new();
    for mut is in socket.dump(link::all(), link::read)? {
        let is_own = own.iter().any(|own| own.name == is.name || is.shares_port(own));
        if is_own {
            continue;
        }
        if is.up && is.is_wireguard() {
            wireguard.add_to(namespace, &mut is)?;
        }
        if is.udp_port() == Some(port) {
            found.push(PortHolder { link: is.name, kind: is.kind_name, port });
        }
    }
    Ok(found)
}
