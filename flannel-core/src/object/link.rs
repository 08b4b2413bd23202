//! Network devices.
//!
//! Each link kind has a module below this one. To add one, write its module with an implementation
//! of [`LinkAttributes`] and add a variant to [`LinkKind`].

mod vxlan;

use std::fmt;

pub use self::vxlan::Vxlan;
use super::{LinkName, MacAddr, ObjectValue};

/// A network device.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Link {
    /// Its name.
    pub name: LinkName,
    /// In bytes.
    pub mtu: u32,
    /// Administratively up.
    pub up: bool,
    /// Its kind, with the attributes that only this kind has.
    pub kind: LinkKind,
}

impl ObjectValue for Link {
    const NAME: &'static str = "link";

    fn device(&self) -> Option<LinkName> {
        None
    }
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

/// The kind of a device, with its attributes.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum LinkKind {
    /// A vxlan device without multicast group.
    Vxlan(Vxlan),
}

/// The attributes of one link kind. `Display` writes them as arguments of `ip link add type KIND`.
pub trait LinkAttributes: fmt::Display {
    /// The kernel's name of the kind (`IFLA_INFO_KIND`).
    fn kind(&self) -> &'static str;

    /// The MAC address; `None` for devices without link layer addresses.
    fn mac(&self) -> Option<MacAddr>;

    /// The device that outer packets leave by; `None`: the routing table decides.
    fn lower(&self) -> Option<LinkName>;

    /// The kernel can change a device like this one into one like `to`. Else it must be made anew.
    fn can_become(&self, to: &LinkKind) -> bool;
}

impl LinkKind {
    /// The attributes, as far as each kind has them.
    pub fn attributes(&self) -> &dyn LinkAttributes {
        match self {
            Self::Vxlan(vxlan) => vxlan,
        }
    }
}

impl From<Vxlan> for LinkKind {
    fn from(vxlan: Vxlan) -> Self {
        Self::Vxlan(vxlan)
    }
}
