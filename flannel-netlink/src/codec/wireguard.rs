//! WireGuard devices and their peers, as messages of generic netlink.
//!
//! **Source**: linux `include/uapi/linux/wireguard.h`, `drivers/net/wireguard/netlink.c`.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::{Duration, SystemTime};

use flannel_core::Subnet;
use flannel_core::address::{Dual, Family};
use flannel_core::object::{LinkName, Peer, PeerAttributes, PublicKey, Secret, Wireguard};
use neli::consts::nl::NlmF;

use crate::codec::af;
use crate::transport::wire::{Attributes, Message, Messages, ip_of, u16_of, u32_of};

/// The name of the netlink family.
pub(crate) const FAMILY: &str = "wireguard";
/// The largest number of peers in one message, as in wgctrl: one attribute has all peers, and at
/// most 64 KiB.
pub(crate) const MOST_PEERS: usize = 32;

/// `struct genlmsghdr`: a command, a version, and two unused bytes.
const HEADER: usize = 4;
const VERSION: u8 = 1;
/// `WG_CMD_…`.
const GET_DEVICE: u8 = 0;
const SET_DEVICE: u8 = 1;

/// `WGDEVICE_A_…`.
mod device {
    pub(super) const INDEX: u16 = 1;
    pub(super) const PRIVATE_KEY: u16 = 3;
    pub(super) const PUBLIC_KEY: u16 = 4;
    pub(super) const LISTEN_PORT: u16 = 6;
    pub(super) const FWMARK: u16 = 7;
    pub(super) const PEERS: u16 = 8;
}

/// `WGPEER_A_…`, and the bits of `FLAGS`.
mod peer {
    pub(super) const PUBLIC_KEY: u16 = 1;
    pub(super) const PRESHARED_KEY: u16 = 2;
    pub(super) const FLAGS: u16 = 3;
    pub(super) const ENDPOINT: u16 = 4;
    pub(super) const KEEPALIVE: u16 = 5;
    pub(super) const LAST_HANDSHAKE: u16 = 6;
    pub(super) const RX_BYTES: u16 = 7;
    pub(super) const TX_BYTES: u16 = 8;
    pub(super) const ALLOWED_IPS: u16 = 9;

    pub(super) const REMOVE: u32 = 1;
    pub(super) const REPLACE_ALLOWED_IPS: u32 = 2;
}

/// `WGALLOWEDIP_A_…`.
mod allowed {
    pub(super) const FAMILY: u16 = 1;
    pub(super) const ADDRESS: u16 = 2;
    pub(super) const LEN: u16 = 3;
}

/// A WireGuard device. A dump has one or more messages about it, each with some of the peers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct DeviceMessage {
    /// The private key; all zero if the device has none.
    pub(crate) key: Secret,
    /// The public key; all zero if the device has none.
    pub(crate) public: PublicKey,
    pub(crate) port: u16,
    /// The mark of outer packets, or 0 if they have no mark.
    pub(crate) fwmark: u32,
    pub(crate) peers: Vec<PeerMessage>,
}

/// A peer of a WireGuard device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PeerMessage {
    pub(crate) key: PublicKey,
    pub(crate) psk: Option<Secret>,
    /// The address to which the kernel sends, or `None` if it knows no address.
    pub(crate) endpoint: Option<SocketAddr>,
    pub(crate) keepalive: u16,
    /// The time of the last completed handshake, or `None` if there was no handshake.
    pub(crate) handshake: Option<SystemTime>,
    /// Received bytes, with headers of WireGuard.
    pub(crate) received: u64,
    /// Sent bytes, with headers of WireGuard.
    pub(crate) sent: u64,
    /// The first subnet of each family.
    pub(crate) allowed: Dual<Subnet>,
    /// The peer has further subnets.
    more_allowed: bool,
}

/// Reads one message of a dump. `None` for other messages.
pub(crate) fn read(message: &Message<'_>) -> Option<DeviceMessage> {
    let (_, attributes) = message.split::<HEADER>()?;
    let mut read = DeviceMessage {
        key: Secret::new([0; 32]),
        public: PublicKey([0; 32]),
        port: 0,
        fwmark: 0,
        peers: Vec::new(),
    };
    for (id, value) in attributes {
        match id {
            device::PRIVATE_KEY => read.key = Secret::new(key_of(value)?),
            device::PUBLIC_KEY => read.public = PublicKey(key_of(value)?),
            device::LISTEN_PORT => read.port = u16_of(value)?,
            device::FWMARK => read.fwmark = u32_of(value)?,
            device::PEERS => {
                for (_, peer) in Attributes(value) {
                    read.peers.push(read_peer(peer)?);
                }
            }
            _ => {}
        }
    }
    Some(read)
}

fn key_of(value: &[u8]) -> Option<[u8; 32]> {
    value.try_into().ok()
}

fn read_peer(attributes: &[u8]) -> Option<PeerMessage> {
    let mut read = PeerMessage {
        key: PublicKey([0; 32]),
        psk: None,
        endpoint: None,
        keepalive: 0,
        handshake: None,
        received: 0,
        sent: 0,
        allowed: Dual::default(),
        more_allowed: false,
    };
    for (id, value) in Attributes(attributes) {
        match id {
            peer::PUBLIC_KEY => read.key = PublicKey(key_of(value)?),
            // The kernel sends zeros if the peer has no preshared key.
            peer::PRESHARED_KEY => {
                read.psk = Some(key_of(value)?).filter(|key| *key != [0; 32]).map(Secret::new);
            }
            peer::ENDPOINT => read.endpoint = endpoint_of(value),
            peer::KEEPALIVE => read.keepalive = u16_of(value)?,
            peer::LAST_HANDSHAKE => read.handshake = time_at(duration_of(value)?),
            peer::RX_BYTES => read.received = u64_of(value)?,
            peer::TX_BYTES => read.sent = u64_of(value)?,
            peer::ALLOWED_IPS => {
                for (_, subnet) in Attributes(value) {
                    let subnet = read_allowed(subnet)?;
                    let first = &mut read.allowed[subnet.family()];
                    read.more_allowed |= first.replace(first.unwrap_or(subnet)).is_some();
                }
            }
            _ => {}
        }
    }
    Some(read)
}

fn read_allowed(attributes: &[u8]) -> Option<Subnet> {
    let find = |wanted| Attributes(attributes).find(|(id, _)| *id == wanted).map(|(_, v)| v);
    let len = find(allowed::LEN)?.first()?;
    Subnet::new(ip_of(find(allowed::ADDRESS)?)?, *len)
}

/// `struct sockaddr_in` or `struct sockaddr_in6`. The scope is left out: it is 0 for addresses that
/// are not link-local.
fn endpoint_of(value: &[u8]) -> Option<SocketAddr> {
    let port = u16::from_be_bytes(*value.get(2..)?.first_chunk()?);
    let family = u16_of(value)?;
    let address = if family == u16::from(u8::from(af(Family::V4))) {
        IpAddr::from(*value.get(4..)?.first_chunk::<4>()?)
    } else {
        IpAddr::from(*value.get(8..)?.first_chunk::<16>()?)
    };
    Some((address, port).into())
}

/// Reads `struct __kernel_timespec`. `None` if the value is cut short.
fn duration_of(value: &[u8]) -> Option<Duration> {
    let seconds = u64_of(value)?;
    let nanoseconds = u64_of(value.get(8..)?)?;
    let nanoseconds = u32::try_from(nanoseconds).unwrap_or(0).min(999_999_999);
    Some(Duration::new(seconds, nanoseconds))
}

/// The time at this duration after the epoch. `None` for zero, which means never,
/// and for a time that cannot be represented.
fn time_at(since_epoch: Duration) -> Option<SystemTime> {
    if since_epoch.is_zero() {
        return None;
    }
    SystemTime::UNIX_EPOCH.checked_add(since_epoch)
}

fn u64_of(value: &[u8]) -> Option<u64> {
    Some(u64::from_ne_bytes(*value.first_chunk()?))
}

impl DeviceMessage {
    /// Joins the messages of a dump. The kernel repeats a peer if its subnets did not fit into one
    /// message. `None` without messages.
    pub(crate) fn join(messages: impl IntoIterator<Item = Self>) -> Option<Self> {
        let mut messages = messages.into_iter();
        let mut all = messages.next()?;
        for peer in messages.flat_map(|message| message.peers) {
            match all.peers.last_mut().filter(|last| last.key == peer.key) {
                Some(last) => last.add_allowed(&peer),
                None => all.peers.push(peer),
            }
        }
        Some(all)
    }
}

impl PeerMessage {
    fn add_allowed(&mut self, rest: &Self) {
        for (family, subnet) in rest.allowed.iter() {
            let first = &mut self.allowed[family];
            self.more_allowed |= first.replace(first.unwrap_or(*subnet)).is_some();
        }
        self.more_allowed |= rest.more_allowed;
    }

    /// Whether [`PeerMessage::object`] represents all attributes.
    pub(crate) const fn is_exact(&self) -> bool {
        !self.more_allowed
    }

    /// The object. If the kernel knows no address of the peer, its endpoint is 0.0.0.0:0.
    pub(crate) fn object(&self, link: LinkName) -> Peer {
        let Self { key, ref psk, endpoint, keepalive, allowed, .. } = *self;
        let endpoint = endpoint.unwrap_or_else(|| (Ipv4Addr::UNSPECIFIED, 0).into());
        let attributes = PeerAttributes { endpoint, allowed, psk: psk.clone(), keepalive };
        Peer { link, key, attributes: Box::new(attributes) }
    }
}

fn header(command: u8) -> [u8; HEADER] {
    [command, VERSION, 0, 0]
}

/// Requests the device with this index and its peers. `family` is the number of the netlink family.
pub(crate) fn get(family: u16, index: u32) -> Messages {
    let mut request = Messages::one(family, NlmF::empty(), &header(GET_DEVICE));
    request.u32(device::INDEX, index);
    request
}

/// Sets the attributes of a device.
pub(crate) fn set(family: u16, index: u32, wanted: &Wireguard) -> Messages {
    let mut request = Messages::one(family, NlmF::empty(), &header(SET_DEVICE));
    request
        .u32(device::INDEX, index)
        .attr(device::PRIVATE_KEY, wanted.key.expose())
        .attr(device::LISTEN_PORT, &wanted.port.to_ne_bytes())
        .u32(device::FWMARK, 0);
    request
}

/// A change of a peer.
#[derive(Debug, Clone, Copy)]
pub(crate) enum PeerChange<'a> {
    /// Creates or changes it.
    Put {
        peer: &'a Peer,
        /// Whether its endpoint stays as it is.
        keep_endpoint: bool,
        /// Whether it may have a preshared key, which is removed if `peer` has no key.
        had_psk: bool,
    },
    /// Deletes it, if it exists.
    Delete(PublicKey),
}

/// Changes at most [`MOST_PEERS`] peers of a device.
pub(crate) fn set_peers(family: u16, index: u32, changes: &[PeerChange<'_>]) -> Messages {
    let mut request = Messages::one(family, NlmF::empty(), &header(SET_DEVICE));
    request.u32(device::INDEX, index).nest(device::PEERS, |peers| {
        for change in changes {
            peers.nest(0_u16, |attributes| match change {
                PeerChange::Put { peer, keep_endpoint, had_psk } => {
                    put(attributes, peer, *keep_endpoint, *had_psk);
                }
                PeerChange::Delete(key) => {
                    attributes.attr(peer::PUBLIC_KEY, &key.0).u32(peer::FLAGS, peer::REMOVE);
                }
            });
        }
    });
    request
}

fn put(attributes: &mut Messages, wanted: &Peer, keep_endpoint: bool, had_psk: bool) {
    let PeerAttributes { endpoint, allowed, psk, keepalive } = &*wanted.attributes;
    attributes.attr(peer::PUBLIC_KEY, &wanted.key.0).u32(peer::FLAGS, peer::REPLACE_ALLOWED_IPS);
    match psk {
        Some(psk) => _ = attributes.attr(peer::PRESHARED_KEY, psk.expose()),
        None if had_psk => _ = attributes.attr(peer::PRESHARED_KEY, &[0; 32]),
        None => {}
    }
    if !keep_endpoint {
        attributes.attr(peer::ENDPOINT, &sockaddr(*endpoint));
    }
    attributes.attr(peer::KEEPALIVE, &keepalive.to_ne_bytes());
    attributes.nest(peer::ALLOWED_IPS, |list| {
        for subnet in allowed.values() {
            list.nest(0_u16, |one| {
                let family = u16::from(u8::from(af(subnet.family())));
                one.attr(allowed::FAMILY, &family.to_ne_bytes())
                    .ip(allowed::ADDRESS, subnet.base())
                    .attr(allowed::LEN, &[subnet.len()]);
            });
        }
    });
}

/// `struct sockaddr_in` or `struct sockaddr_in6`.
fn sockaddr(endpoint: SocketAddr) -> Vec<u8> {
    let family = u16::from(u8::from(af(Family::of(endpoint.ip()))));
    let mut bytes = family.to_ne_bytes().to_vec();
    bytes.extend(endpoint.port().to_be_bytes());
    match endpoint.ip() {
        IpAddr::V4(address) => {
            bytes.extend(address.octets());
            bytes.resize(16, 0);
        }
        IpAddr::V6(address) => {
            bytes.extend([0; 4]);
            bytes.extend(address.octets());
            bytes.resize(28, 0);
        }
    }
    bytes
}

#[cfg(test)]
pub(crate) mod tests {
    use std::net::Ipv6Addr;

    use super::*;
    use crate::transport::wire::messages;
    use proptest::prelude::*;

    pub(crate) fn any_peer() -> impl Strategy<Value = Peer> {
        let address = prop_oneof![
            any::<[u8; 4]>().prop_map(IpAddr::from),
            // Linux has no link-local addresses without a scope.
            any::<[u8; 14]>().prop_map(|rest| {
                let mut bytes = [0x20; 16];
                bytes[2..].copy_from_slice(&rest);
                Ipv6Addr::from(bytes).into()
            }),
        ];
        let v4 = prop::option::of((any::<[u8; 4]>(), 1..=32u8));
        let v6 = prop::option::of((any::<[u8; 16]>(), 1..=128u8));
        let psk = prop::option::of(prop::array::uniform32(1..255u8));
        (any::<[u8; 32]>(), address, any::<u16>(), v4, v6, psk, any::<u16>()).prop_map(
            |(key, address, port, v4, v6, psk, keepalive)| {
                let allowed = Dual {
                    v4: v4.and_then(|(base, len)| Subnet::new(base.into(), len)),
                    v6: v6.and_then(|(base, len)| Subnet::new(base.into(), len)),
                };
                let endpoint = (address, port).into();
                let psk = psk.map(Secret::new);
                let attributes = PeerAttributes { endpoint, allowed, psk, keepalive };
                let link = "flannel-wg".parse().unwrap();
                Peer { link, key: PublicKey(key), attributes: Box::new(attributes) }
            },
        )
    }

    fn put(peer: &Peer) -> PeerChange<'_> {
        PeerChange::Put { peer, keep_endpoint: false, had_psk: false }
    }

    fn bytes(mut request: Messages) -> Vec<u8> {
        let count = request.len();
        request.ready(0..count, 7, NlmF::ACK).to_vec()
    }

    fn reread(request: Messages) -> DeviceMessage {
        let bytes = bytes(request);
        read(&messages(&bytes).next().unwrap().unwrap()).unwrap()
    }

    fn peer() -> Peer {
        let attributes = PeerAttributes {
            endpoint: "192.0.2.2:51820".parse().unwrap(),
            allowed: Dual { v4: "10.1.8.0/24".parse().ok(), v6: None },
            psk: Some(Secret::new([9; 32])),
            keepalive: 25,
        };
        let link = "flannel-wg".parse().unwrap();
        Peer { link, key: PublicKey([8; 32]), attributes: Box::new(attributes) }
    }

    /// The Go library wgctrl, which Go flannel uses, has set this peer.
    #[test]
    fn a_peer_is_written_as_by_wgctrl() {
        let theirs =
            include_bytes!("../../../dev/fuzz/corpus/wireguard_message/set-peer-v4.request");
        let find = |bytes: &[u8]| {
            let message = messages(bytes).next().unwrap().unwrap();
            let (_, mut attributes) = message.split::<HEADER>().unwrap();
            let (_, peers) = attributes.find(|(id, _)| *id == device::PEERS).unwrap();
            Attributes(peers).next().unwrap().1.to_vec()
        };
        let attributes = PeerAttributes {
            endpoint: "192.0.2.2:51820".parse().unwrap(),
            allowed: Dual { v4: "10.1.8.0/24".parse().ok(), v6: "fd00:1:8::/64".parse().ok() },
            psk: Some(Secret::new([0x31; 32])),
            keepalive: 25,
        };
        let key = PublicKey([0x21; 32]);
        let peer = Peer { key, attributes: Box::new(attributes), ..peer() };
        // The numbers of list elements, which the kernel ignores, differ.
        let without_numbers = |mut bytes: Vec<u8>| {
            let second = bytes.len() - 40 + 2;
            bytes[second] = 0;
            bytes
        };
        let ours = find(&bytes(set_peers(30, 7, &[put(&peer)])));
        assert_eq!(without_numbers(ours), without_numbers(find(theirs)));
    }

    #[test]
    fn joined_messages_have_every_peer_and_subnet_once() {
        let mut first = reread(set_peers(30, 7, &[put(&peer())]));
        first.port = 51820;
        let mut rest = first.clone();
        let all = DeviceMessage::join([first.clone(), rest.clone()]).unwrap();
        assert_eq!(all.port, 51820);
        assert_eq!(all.peers.len(), 1);
        assert!(!all.peers[0].is_exact());
        rest.peers[0].allowed = Dual { v4: None, v6: "fd00::/64".parse().ok() };
        let all = DeviceMessage::join([first.clone(), rest.clone()]).unwrap();
        let both = Dual { v4: "10.1.8.0/24".parse().ok(), v6: "fd00::/64".parse().ok() };
        assert_eq!(all.peers[0].allowed, both);
        assert!(all.peers[0].is_exact());
        rest.peers[0].key = PublicKey([1; 32]);
        let all = DeviceMessage::join([first, rest]).unwrap();
        assert_eq!(all.peers.len(), 2);
        assert!(all.peers[0].is_exact());
        assert_eq!(DeviceMessage::join([]), None);
    }

    #[test]
    fn a_key_is_removed_only_if_there_may_be_one() {
        let mut peer = peer();
        peer.attributes.psk = None;
        let size = |had_psk| {
            let change = PeerChange::Put { peer: &peer, keep_endpoint: true, had_psk };
            set_peers(30, 7, &[change]).size()
        };
        assert_eq!(size(true) - size(false), 36);
    }

    proptest! {
        #[test]
        fn peers_round_trip(peers in prop::collection::vec(any_peer(), 0..4)) {
            let changes: Vec<_> = peers.iter().map(put).collect();
            let device = reread(set_peers(30, 7, &changes));
            let got: Vec<Peer> = device.peers.iter().map(|p| p.object(peer().link)).collect();
            prop_assert_eq!(got, peers);
        }

        #[test]
        fn devices_round_trip(key: [u8; 32], port: u16) {
            let wanted = Wireguard { key: Secret::new(key), port };
            let got = reread(set(30, 7, &wanted));
            prop_assert_eq!(got.key, wanted.key);
            prop_assert_eq!(got.port, port);
            prop_assert_eq!(got.fwmark, 0);
        }
    }
}
