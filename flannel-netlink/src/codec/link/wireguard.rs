//! WireGuard devices. Messages about links do not have their attributes. They are in messages of
//! another netlink family ([`codec::wireguard`](crate::codec::wireguard)).

use flannel_core::object::{LinkKind, Secret, Wireguard};

use super::{KindMessage, LinkCodec, LinkMessage};
use crate::codec::wireguard::DeviceMessage;
use crate::transport::wire::Messages;

/// What is known of a WireGuard device.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct WireguardMessage {
    /// Its attributes, or `None` if they were not read.
    device: Option<Wireguard>,
    /// It marks outer packets, which [`Wireguard`] does not represent.
    has_fwmark: bool,
}

impl WireguardMessage {
    /// Whether [`WireguardMessage::object`] represents all attributes.
    pub(super) fn is_exact(&self) -> bool {
        !self.has_fwmark
    }

    /// The UDP port, or `None` if it was not read.
    pub(super) fn port(&self) -> Option<u16> {
        self.device.as_ref().map(|device| device.port)
    }

    /// The attributes, or the attributes of a new device if they were not read.
    pub(super) fn object(&self) -> LinkKind {
        match &self.device {
            Some(device) => device.clone().into(),
            None => Wireguard { key: Secret::new([0; 32]), port: 0 }.into(),
        }
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
        self.kind = KindMessage::Wireguard(WireguardMessage {
            device: Some(Wireguard { key: device.key.clone(), port: device.port }),
            has_fwmark: device.fwmark != 0,
        });
    }
}

/// `create` and `change` add no attributes, because another request sets them.
impl LinkCodec for Wireguard {
    fn create(&self, _: &mut Messages, _: u32) {}

    fn change(&self, _: &LinkMessage, _: &mut Messages, _: u32) {}

    /// There can be several WireGuard devices. The name tells which one is ours.
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
