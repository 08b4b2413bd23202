//! Network devices.
//!
//! Each link kind has a module below this one. To add one, write its module with an implementation
//! of [`LinkAttributes`] and add it to the table of link kinds.

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
        kind.mac().map_or(Ok(()), |mac| write!(f, " address {mac}"))?;
        write!(f, " type {} {kind}", kind.name())
    }
}

/// The attributes of one link kind. `Display` writes them as the arguments of `ip link add … type
/// KIND`.
trait LinkAttributes: fmt::Display {
    /// The kernel's name of the kind (`IFLA_INFO_KIND`).
    const NAME: &'static str;

    /// The MAC address; `None` for devices without link layer addresses.
    fn mac(&self) -> Option<MacAddr>;

    /// The device that outer packets leave by.
    fn lower(&self) -> Option<LinkName>;

    /// Removes the lower device, as the kernel does when that is deleted.
    fn clear_lower(&mut self);

    /// The kernel can change a device like `self` into one like `to`. Else it must be made anew.
    fn can_become(&self, to: &Self) -> bool;
}

/// Defines [`LinkKind`]. A row is a link kind with its documentation.
macro_rules! link_kinds {
    ($($(#[$doc:meta])* $kind:ident;)+) => {
        /// The kind of a device, with its attributes.
        #[derive(Debug, Clone, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum LinkKind {
            $($(#[$doc])* $kind($kind),)+
        }

        impl LinkKind {
            /// The kernel's name of the kind (`ip link show type NAME`).
            pub fn name(&self) -> &'static str {
                match self {
                    $(Self::$kind(_) => $kind::NAME,)+
                }
            }

            /// The MAC address; `None` for devices without link layer addresses.
            pub fn mac(&self) -> Option<MacAddr> {
                match self {
                    $(Self::$kind(attributes) => attributes.mac(),)+
                }
            }

            /// The device that outer packets leave by; `None`: the routing table decides.
            pub fn lower(&self) -> Option<LinkName> {
                match self {
                    $(Self::$kind(attributes) => attributes.lower(),)+
                }
            }

            /// Removes the lower device, as the kernel does when that is deleted.
            pub fn clear_lower(&mut self) {
                match self {
                    $(Self::$kind(attributes) => attributes.clear_lower(),)+
                }
            }

            /// The kernel can change a device like `self` into one like `to`. Else it must be made
            /// anew.
            pub fn can_become(&self, to: &Self) -> bool {
                match (self, to) {
                    $((Self::$kind(from), Self::$kind(to)) => from.can_become(to),)+
                    #[allow(unreachable_patterns, reason = "as long as there is one kind")]
                    _ => false,
                }
            }
        }

        impl fmt::Display for LinkKind {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                match self {
                    $(Self::$kind(attributes) => fmt::Display::fmt(attributes, f),)+
                }
            }
        }

        $(
            impl From<$kind> for LinkKind {
                fn from(attributes: $kind) -> Self {
                    Self::$kind(attributes)
                }
            }
        )+
    };
}

link_kinds! {
    /// A vxlan device without multicast group.
    Vxlan;
}
