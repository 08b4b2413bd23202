//! Network devices.
//!
//! To add a kind of device, implement [`LinkAttributes`], and add a variant to [`LinkKind`].

mod fou;
mod ipip;
mod tun;
mod vxlan;
mod wireguard;

use std::fmt;

pub use self::fou::Fou;
pub use self::ipip::Ipip;
pub use self::tun::Tun;
pub use self::vxlan::Vxlan;
pub use self::wireguard::Wireguard;
use super::{LinkName, MacAddr};

/// A network device.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Link {
    /// The name of the device.
    pub name: LinkName,
    /// The MTU of the device, in bytes.
    pub mtu: u32,
    /// Whether the device is administratively up.
    pub up: bool,
    /// The kind of the device, with the attributes of this kind.
    pub kind: LinkKind,
}

impl fmt::Display for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, mtu, up, kind } = self;
        write!(f, "link {name} mtu {mtu} {}", if *up { "up" } else { "down" })?;
        let attributes = kind.attributes();
        attributes.mac().map_or(Ok(()), |mac| write!(f, " address {mac}"))?;
        write!(f, " type {} {attributes}", attributes.kind())
    }
}

/// The kind of a device, with its attributes. Large attributes are boxed, because most objects are
/// not devices.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum LinkKind {
    /// A tunnel device whose packets travel in UDP datagrams.
    Fou(Box<Fou>),
    /// An ipip device without a remote address.
    Ipip(Ipip),
    /// A tun device, which another program creates.
    Tun(Tun),
    /// A vxlan device without a multicast group.
    Vxlan(Box<Vxlan>),
    /// A WireGuard device.
    Wireguard(Box<Wireguard>),
}

/// The attributes of a kind of device. `Display` writes them as the arguments of `ip link add type
/// KIND`.
#[doc = include_str!("../../docs/link_attributes.md")]
pub trait LinkAttributes: fmt::Display {
    /// The kernel's name of the kind (`IFLA_INFO_KIND`).
    fn kind(&self) -> &'static str;

    /// The MAC address. `None`, the default, for a kind without MAC addresses.
    fn mac(&self) -> Option<MacAddr> {
        None
    }

    /// The device by which outer packets leave. `None`, the default, if the routing table decides.
    fn lower(&self) -> Option<LinkName> {
        None
    }

    /// Whether the kernel can change a device with these attributes into `to` in place. If not, the
    /// device is deleted and created again.
    fn can_become(&self, to: &LinkKind) -> bool;
}

impl LinkKind {
    /// The attributes of the kind, as a trait object.
    pub fn attributes(&self) -> &dyn LinkAttributes {
        match self {
            Self::Fou(fou) => &**fou,
            Self::Ipip(ipip) => ipip,
            Self::Tun(tun) => tun,
            Self::Vxlan(vxlan) => &**vxlan,
            Self::Wireguard(wireguard) => &**wireguard,
        }
    }
}

impl From<Fou> for LinkKind {
    fn from(fou: Fou) -> Self {
        Self::Fou(Box::new(fou))
    }
}

impl From<Vxlan> for LinkKind {
    fn from(vxlan: Vxlan) -> Self {
        Self::Vxlan(Box::new(vxlan))
    }
}

impl From<Wireguard> for LinkKind {
    fn from(wireguard: Wireguard) -> Self {
        Self::Wireguard(Box::new(wireguard))
    }
}
