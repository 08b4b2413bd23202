//! Calls all readers of messages, for the fuzz target and its corpus. No bytes may make a reader
//! panic or loop. An object that is read, written and read again must be the same object.

use flannel_core::object::{Link, LinkName, Object, Peer, Route};
use neli::consts::nl::NlmF;
use neli::consts::rtnl::Rtm;

use crate::codec::wireguard::{DeviceMessage, PeerChange};
use crate::codec::{addr, fdb, link, neigh, nexthop, route, wireguard};
use crate::transport::wire::{DONE, ERROR, Message, Messages, messages, outcome};

/// The index of each link in a written message.
const INDEX: u32 = 7;
/// A number that the kernel may give the family of WireGuard.
const FAMILY: u16 = 32;

/// Reads the messages in a datagram. Returns a text for each, in order: the object, `-` for a
/// message without a representable object, and `cut short` for a truncated message.
///
/// # Panics
/// An object that was read, written and read again is not the same.
pub fn decode(datagram: &[u8]) -> Vec<String> {
    texts(datagram, |message| {
        for kind in [ERROR, DONE] {
            let _ = outcome(&Message { kind, ..*message });
        }
        let found = object(message)?;
        assert_eq!(object_again(&found).as_ref(), Some(&found), "written and read again");
        Some(found.to_string())
    })
}

/// A text for each message in a datagram: the result of `read`, or `-` if it is `None`.
fn texts(datagram: &[u8], read: impl Fn(&Message<'_>) -> Option<String>) -> Vec<String> {
    messages(datagram)
        .map(|message| match message {
            Ok(message) => read(&message).unwrap_or_else(|| "-".to_owned()),
            Err(_) => "cut short".to_owned(),
        })
        .collect()
}

fn name() -> LinkName {
    "flannel.1".parse().expect("a name")
}

/// Reads the messages about WireGuard devices in a datagram. Returns a text for each: the device
/// and its peers, or the same texts as [`decode`]. The number of the netlink family is ignored.
///
/// # Panics
/// A peer that was read, written and read again is not the same.
pub fn decode_wireguard(datagram: &[u8]) -> Vec<String> {
    texts(datagram, |message| {
        if matches!(message.kind, ERROR | DONE) {
            let _ = outcome(message);
            return None;
        }
        let device = wireguard::read(message)?;
        let joined = DeviceMessage::join([device.clone(), device.clone()]);
        assert!(joined.is_some_and(|joined| joined.peers.len() >= device.peers.len()));
        let peers: Vec<Peer> = device.peers.iter().map(|peer| peer.object(name())).collect();
        assert_eq!(peers_again(&peers), peers, "written and read again");
        let mut text = format!("listen-port {}", device.port);
        for (peer, message) in peers.iter().zip(&device.peers) {
            let more = if message.is_exact() { "" } else { " and more" };
            text += &format!(", {peer}{more}");
        }
        Some(text)
    })
}

/// The peers, written and read again.
fn peers_again(peers: &[Peer]) -> Vec<Peer> {
    let read = |some: &[Peer]| -> Option<Vec<Peer>> {
        let changes: Vec<_> = some
            .iter()
            .map(|peer| PeerChange::Put { peer, keep_endpoint: false, had_psk: false })
            .collect();
        let mut request = wireguard::set_peers(FAMILY, INDEX, &changes);
        let bytes = request.ready(0..1, 0, NlmF::empty());
        let device = wireguard::read(&messages(bytes).next()?.ok()?)?;
        Some(device.peers.iter().map(|peer| peer.object(name())).collect())
    };
    peers.chunks(wireguard::MOST_PEERS).flat_map(|some| read(some).unwrap_or_default()).collect()
}

/// The object of a message, if it is representable.
fn object(message: &Message<'_>) -> Option<Object> {
    match Rtm::from(message.kind) {
        Rtm::Newlink | Rtm::Dellink => {
            let found = link::read(message)?;
            // `create` makes a device that is down. Another request sets it up.
            let lower = (found.lower() != 0).then(name);
            found.object(lower).map(|link| Link { up: false, name: name(), ..link }.into())
        }
        Rtm::Newaddr | Rtm::Deladdr => addr::read(message).map(|found| found.object(name()).into()),
        Rtm::Newneigh | Rtm::Delneigh => {
            let found = neigh::read(message)?;
            let object = found.object(name());
            assert!(object.is_none() || found.key(name()) == object.as_ref().map(Object::key));
            object
        }
        Rtm::Newroute | Rtm::Delroute => {
            let found = route::read(message).filter(|found| found.is_exact())?;
            found.object(|_| Some(name())).map(Object::Route)
        }
        _ if nexthop::is_event(message.kind) => {
            let _ = nexthop::group(message);
            nexthop::read(message)?.object(name()).map(Object::Nexthop)
        }
        _ => None,
    }
}

/// The object, written and read again.
fn object_again(object: &Object) -> Option<Object> {
    let mut requests = Messages::default();
    match object {
        Object::Link(link) => {
            let lower = link.kind.attributes().lower().map_or(0, |_| INDEX);
            requests = link::create(link, link::codec(&link.kind)?, lower);
        }
        Object::Addr(addr) => addr::put(&mut requests, addr, INDEX),
        Object::Neigh(neigh) => neigh::put(&mut requests, neigh, INDEX),
        Object::Fdb(fdb) => fdb::put(&mut requests, fdb, INDEX),
        Object::Nexthop(nexthop) => nexthop::put(&mut requests, nexthop, INDEX),
        Object::Route(route) => put_route(&mut requests, route),
        _ => return None,
    }
    let count = requests.len();
    let bytes = requests.ready(0..count, 0, NlmF::empty());
    self::object(&messages(bytes).next()?.ok()?)
}

fn put_route(requests: &mut Messages, route: &Route) {
    let index = if Object::Route(*route).link().is_some() { INDEX } else { 0 };
    route::put(requests, route, index, true);
}
