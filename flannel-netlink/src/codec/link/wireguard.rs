//! WireGuard devices. Their attributes are not in messages about links, but in those of another
//! netlink family ([`codec::wireguard`](crate::codec::wireguard)).

use flannel_core::object::{LinkKind, Secret, Wireguard};

use super::{KindMessage, LinkCodec, LinkMessage};
use crate::codec::wireguard::DeviceMessage;
use crate::transport::wire::Messages;

/// What is known of a WireGuard device.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct WireguardMessage {
    /// Its attributes; `None` if they were not read.
    device: Option<(Wireguard, bool)>,
}

impl WireguardMessage {
    /// Whether [`WireguardMessage::object`] represents all attributes.
    pub(super) fn is_exact(&self) -> bool {
        self.device.as_ref().is_none_or(|(_, is_exact)| *is_exact)
    }

    /// The attributes. If they were not read, they are those of a new device.
    pub(super) fn object(&self) -> LinkKind {
        let new = || Wireguard { key: Secret::new([0; 32]), port: 0 };
        self.device.as_ref().map_or_else(new, |(device, _)| device.clone()).into()
    }
}

impl LinkMessage {
    /// Whether it is a WireGuard device, so that its attributes have to be read and
    /// [added](Self::add_wireguard).
    pub(crate) const fn is_wireguard(&self) -> bool {
        matches!(self.kind, KindMessage::Wireguard(_))
    }

    /// Adds the attributes of a WireGuard device.
    pub(crate) fn add_wireguard(&mut self, device: &DeviceMessage) {
        let attributes = Wireguard { key: device.key.clone(), port: device.port };
        let device = Some((attributes, device.fwmark == 0));
        self.kind = KindMessage::Wireguard(WireguardMessage { device });
    }
}

/// Messages about links have no attributes of the device. So these functions add none, and another
/// request sets them.
impl LinkCodec for Wireguard {
    fn create(&self, _: &mut Messages, _: u32) {}

    fn change(&self, _: &LinkMessage, _: &mut Messages, _: u32) {}

    /// There can be several WireGuard devices. Ours has its name.
    fn is_same_network(&self, is: &LinkMessage) -> bool {
        is.is_wireguard()
    }

    fn excludes(&self, _: &LinkMessage) -> bool {
        false
    }

    fn exclusive(&self) -> String {
        "its name".to_owned()
    }
}
