//! Tun devices. Programs make them with `/dev/net/tun`. rtnetlink cannot make them.
//!
//! **Source**: linux `drivers/net/tun.c: tun_validate, tun_fill_info`.

use flannel_core::object::Tun;

use super::{KindMessage, LinkCodec, LinkMessage};
use crate::transport::wire::{Attributes, Messages};

/// `IFLA_TUN_…` (linux `include/uapi/linux/if_link.h`).
mod attr {
    pub(super) const TYPE: u16 = 3;
    pub(super) const VNET_HDR: u16 = 5;
    pub(super) const MULTI_QUEUE: u16 = 7;
}

/// `IFF_TUN`, not `IFF_TAP`.
const TUN: u8 = 1;

/// `IFLA_INFO_DATA` of a tun device.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct TunMessage {
    is_tun: bool,
    has_vnet_header: bool,
    has_queues: bool,
}

/// Reads `IFLA_INFO_DATA`.
pub(super) fn read(data: &[u8]) -> TunMessage {
    let mut read = TunMessage::default();
    for (id, value) in Attributes(data) {
        match id {
            attr::TYPE => read.is_tun = *value == [TUN],
            attr::VNET_HDR => read.has_vnet_header = *value == [1],
            attr::MULTI_QUEUE => read.has_queues = *value == [1],
            _ => {}
        }
    }
    read
}

impl TunMessage {
    /// Whether it is a device as [`Tun`] describes it. If not, its program has to make another one.
    pub(super) const fn is_ours(&self) -> bool {
        self.is_tun && self.has_vnet_header && self.has_queues
    }
}

impl LinkCodec for Tun {
    fn create(&self, _: &mut Messages, _: u32) {}

    fn change(&self, _: &LinkMessage, _: &mut Messages, _: u32) {}

    fn made_by_others(&self) -> bool {
        true
    }

    /// The ipip device with UDP headers, which the kernel serves, has the same name and purpose.
    fn replaces(&self, is: &LinkMessage) -> bool {
        is.fou_port().is_some()
    }

    fn is_same_network(&self, is: &LinkMessage) -> bool {
        matches!(is.kind, KindMessage::Tun(_))
    }

    fn excludes(&self, _: &LinkMessage) -> bool {
        false
    }

    fn exclusive(&self) -> String {
        "its name".to_owned()
    }
}
