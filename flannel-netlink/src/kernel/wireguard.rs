//! WireGuard devices, which rtnetlink knows by name only.
//!
//! Linux sends no messages about changes of a device's key, port and peers. They are read every
//! half minute.
//!
//! The kernel sends to the address from which the last packet of a peer came. Behind a NAT this
//! address differs from the address in the peer's lease. While handshakes succeed, the address of
//! the kernel is left alone, and snapshots show the address that was put. When the last handshake
//! is too old, a snapshot shows the address of the kernel. The route engine then puts the address
//! of the lease again.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, SystemTime};

use flannel_core::Subnet;
use flannel_core::address::Dual;
use flannel_core::kernel::{Invalidation, KernelError, KernelEvent};
use flannel_core::object::{Change, Key, LinkName, Object, Peer, PublicKey, Secret, Wireguard};
use flannel_core::runtime::lock;
use libc::{ENOENT, EPERM};

use super::NetlinkKernel;
use super::query::{ENODEV, get_link};
use crate::codec::link::LinkMessage;
use crate::codec::wireguard::{DeviceMessage, FAMILY, PeerChange, PeerMessage};
use crate::codec::wireguard::{get, read, set, set_peers};
use crate::transport::generic;
use crate::transport::namespace::Namespace;
use crate::transport::socket::Socket;

/// The age from which a handshake is stale: the keys that it made are no longer used
/// (`REJECT_AFTER_TIME` of the WireGuard protocol).
pub const STALE: Duration = Duration::from_secs(180);

/// The WireGuard devices of a network namespace, with what was put and read last. Clones share
/// them.
#[derive(Clone, Default)]
pub(crate) struct WireguardDevices(Arc<Mutex<Inner>>);

#[derive(Default)]
struct Inner {
    /// The socket, and the number of the netlink family. `None` until there is a device.
    socket: Option<(Socket, u16)>,
    devices: HashMap<LinkName, Device>,
    hasher: RandomState,
}

struct Device {
    index: u32,
    /// The digest of the attributes of the device, without its peers.
    digest: u64,
    peers: HashMap<PublicKey, KnownPeer>,
}

/// What is remembered of a peer in the kernel.
#[derive(Clone, Copy)]
struct KnownPeer {
    /// The endpoint that was put, or `None` if an earlier run put it.
    put: Option<SocketAddr>,
    /// The endpoint that the kernel uses.
    used: Option<SocketAddr>,
    handshake: Option<SystemTime>,
    has_psk: bool,
    /// The digest of the object that a snapshot shows.
    digest: u64,
}

/// A device as a snapshot shows it.
pub(crate) struct DeviceSnapshot {
    pub(crate) device: DeviceMessage,
    pub(crate) peers: Vec<Peer>,
    /// The keys of the peers that the objects represent only in part.
    pub(crate) inexact: Vec<Key>,
}

impl KnownPeer {
    /// Whether a put of this endpoint leaves the one in use alone.
    fn keeps(&self, endpoint: SocketAddr) -> bool {
        self.used.is_some()
            && is_fresh(self.handshake)
            && self.put.is_none_or(|put| put == endpoint)
    }
}

/// Whether the last handshake is not stale. A handshake in the future is fresh: the clock was set
/// back.
fn is_fresh(handshake: Option<SystemTime>) -> bool {
    handshake.is_some_and(|at| at.elapsed().map_or(true, |age| age < STALE))
}

/// A WireGuard device, without its private key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tunnel {
    /// Its public key, which is all zero if the device has no key.
    pub key: PublicKey,
    /// The UDP port to which peers send.
    pub port: u16,
    /// The state of the tunnel to each peer, in the kernel's order.
    pub sessions: Vec<Session>,
}

/// The state of the tunnel to a peer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Session {
    /// The public key of the peer.
    pub key: PublicKey,
    /// Its pod addresses: the first subnet of each family.
    pub allowed: Dual<Subnet>,
    /// The preshared key, or `None` without one.
    pub psk: Option<Secret>,
    /// The address that this [`NetlinkKernel`] put last, or `None` if it put no address.
    pub put: Option<SocketAddr>,
    /// The address to which the kernel sends, or `None` if it knows no address.
    pub endpoint: Option<SocketAddr>,
    /// The time of the last completed handshake, or `None` if there was no handshake since the peer
    /// was added.
    pub handshake: Option<SystemTime>,
    /// Received bytes, with the headers of WireGuard and the packets of handshakes.
    pub received: u64,
    /// Sent bytes, with the headers of WireGuard and the packets of handshakes.
    pub sent: u64,
}

impl Session {
    /// Whether the last handshake is younger than [`STALE`]. A handshake in the future counts as
    /// young, because the clock was set back.
    pub fn is_fresh(&self) -> bool {
        is_fresh(self.handshake)
    }
}

impl NetlinkKernel {
    /// Reads a WireGuard device, with the state of its tunnels.
    ///
    /// # Errors
    /// The device does not exist, it is not a WireGuard device, or the process lacks
    /// `CAP_NET_ADMIN`.
    ///
    /// # Blocking
    /// Some microseconds for each peer.
    pub fn tunnel(&self, link: LinkName) -> Result<Tunnel, KernelError> {
        let index = get_link(&mut self.lock(), link)?.index;
        let mut inner = self.place.wireguard.lock();
        let device = inner.read(&self.place.namespace, index)?;
        let known = inner.devices.get(&link).filter(|known| known.index == index);
        let mut sessions = Vec::new();
        for peer in device.peers {
            let PeerMessage { key, psk, allowed, endpoint, handshake, received, sent, .. } = peer;
            let put = known.and_then(|known| known.peers.get(&key)?.put);
            sessions.push(Session { key, allowed, psk, put, endpoint, handshake, received, sent });
        }
        Ok(Tunnel { key: device.public, port: device.port, sessions })
    }
}

/// Opens a socket. Returns it with the number of the netlink family.
fn open() -> Result<(Socket, u16), KernelError> {
    generic::open(FAMILY).map_err(|error| {
        let detail = "this kernel has no wireguard devices: run modprobe wireguard";
        if error.is(ENOENT) { KernelError::explained(ENOENT, detail) } else { error }
    })
}

/// Checks that the kernel has WireGuard devices. It loads the module.
pub(super) fn exists() -> Result<(), KernelError> {
    open().map(drop)
}

impl std::fmt::Debug for WireguardDevices {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("WireguardDevices").finish_non_exhaustive()
    }
}

impl WireguardDevices {
    /// Reads a device for a snapshot: its attributes and its peers.
    pub(crate) fn snapshot(
        &self,
        namespace: &Namespace,
        link: LinkName,
        index: u32,
    ) -> Result<DeviceSnapshot, KernelError> {
        let mut inner = self.lock();
        let device = inner.read(namespace, index)?;
        let Inner { devices, hasher, .. } = &mut *inner;
        let before = devices.remove(&link).filter(|before| before.index == index);
        let is_known = before.is_some();
        // The old digests stay, so that the next scan still reports a change since the last one:
        // this snapshot may be for another network.
        let digest = before.as_ref().map_or_else(|| digest_of(&device, hasher), |it| it.digest);
        let mut known_peers = before.map(|before| before.peers).unwrap_or_default();
        for known in known_peers.values_mut() {
            known.used = None;
            known.has_psk = false;
        }
        let mut peers = Vec::with_capacity(device.peers.len());
        let mut inexact = Vec::new();
        for message in &device.peers {
            let before = known_peers.get(&message.key);
            let (peer, mut known) = KnownPeer::of(message, link, before, hasher);
            known.digest = match before {
                Some(before) => before.digest,
                // A new peer of a known device is a change. The scan finds another digest.
                None if is_known => !known.digest,
                None => known.digest,
            };
            known_peers.insert(message.key, known);
            if !message.is_exact() {
                inexact.push(Key::Peer(link, message.key));
            }
            peers.push(peer);
        }
        devices.insert(link, Device { index, digest, peers: known_peers });
        Ok(DeviceSnapshot { device, peers, inexact })
    }

    /// Reads all devices that a snapshot has shown. Returns their changes by other programs.
    pub(crate) fn scan(&self) -> Vec<Invalidation> {
        let mut inner = self.lock();
        let mut found = Vec::new();
        let links: Vec<(LinkName, u32)> =
            inner.devices.iter().map(|(link, device)| (*link, device.index)).collect();
        for (link, index) in links {
            match inner.read_known(index) {
                Ok(message) => inner.compare(link, &message, &mut found),
                // A message about the link reports it.
                Err(error) if error.is(ENODEV) => _ = inner.devices.remove(&link),
                Err(error) => tracing::debug!(%link, %error, "the peers cannot be read"),
            }
        }
        found
    }

    /// Adds the attributes of a WireGuard device to a message about it.
    pub(crate) fn add_to(
        &self,
        namespace: &Namespace,
        message: &mut LinkMessage,
    ) -> Result<(), KernelError> {
        let device = self.lock().read(namespace, message.index)?;
        message.add_wireguard(&device);
        Ok(())
    }

    /// Sets the attributes of a device.
    pub(crate) fn configure(
        &self,
        namespace: &Namespace,
        (link, index): (LinkName, u32),
        wanted: &Wireguard,
    ) -> Result<(), KernelError> {
        let mut inner = self.lock();
        let (socket, family) = inner.socket(namespace)?;
        socket.send_one(set(*family, index, wanted))?;
        let digest = inner.hasher.hash_one((&wanted.key, wanted.port, 0_u32));
        inner.device(link, index).digest = digest;
        Ok(())
    }

    /// Changes peers of one device. Returns a result for each change.
    pub(crate) fn change_peers(
        &self,
        namespace: &Namespace,
        (link, index): (LinkName, u32),
        changes: &[&Change],
    ) -> Vec<Result<(), KernelError>> {
        let mut inner = self.lock();
        let hasher = inner.hasher.clone();
        let device = inner.device(link, index);
        let to_send = |(n, change)| Some((n, device.change(change, &hasher)?));
        let all: Vec<_> = changes.iter().copied().enumerate().filter_map(to_send).collect();
        let mut results = vec![Ok(()); changes.len()];
        let mut send = |part: &[(usize, PeerChange<'_>)]| {
            let part: Vec<_> = part.iter().map(|(_, change)| *change).collect();
            let (socket, family) = inner.socket(namespace)?;
            socket.send_one(set_peers(*family, index, &part))
        };
        // The answer does not say which of several peers was refused.
        if !all.is_empty() && send(&all).is_err() {
            for one in &all {
                results[one.0] = send(std::slice::from_ref(one));
            }
        }
        let device = inner.device(link, index);
        for (change, result) in changes.iter().zip(&results) {
            if result.is_ok() {
                device.note(change, &hasher);
            }
        }
        results
    }

    /// Delays each use of the devices until the result is dropped.
    #[cfg(test)]
    pub(super) fn busy(&self) -> impl Drop + '_ {
        self.lock()
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        lock(&self.0)
    }
}

impl Inner {
    fn socket(&mut self, namespace: &Namespace) -> Result<&mut (Socket, u16), KernelError> {
        if self.socket.is_none() {
            self.socket = Some(namespace.run(open)??);
        }
        Ok(self.socket.as_mut().expect("it was opened above"))
    }

    /// The device with this name. It is empty if the device is new or was created again.
    fn device(&mut self, link: LinkName, index: u32) -> &mut Device {
        let new = || Device { index, digest: 0, peers: HashMap::new() };
        let device = self.devices.entry(link).or_insert_with(new);
        if device.index != index {
            *device = new();
        }
        device
    }

    fn read(&mut self, namespace: &Namespace, index: u32) -> Result<DeviceMessage, KernelError> {
        self.socket(namespace)?;
        self.read_known(index)
    }

    /// Reads a device after the socket was opened.
    fn read_known(&mut self, index: u32) -> Result<DeviceMessage, KernelError> {
        let Some((socket, family)) = &mut self.socket else {
            return Err(KernelError::new(ENODEV));
        };
        let messages = socket.dump(get(*family, index), read).map_err(|error| {
            let detail = "reading a WireGuard device needs CAP_NET_ADMIN";
            if error.is_denied() { KernelError::explained(EPERM, detail) } else { error }
        })?;
        DeviceMessage::join(messages).ok_or_else(|| KernelError::new(ENODEV))
    }

    /// Compares a device with what is remembered of it, and remembers the new state.
    fn compare(&mut self, link: LinkName, message: &DeviceMessage, found: &mut Vec<Invalidation>) {
        let Self { devices, hasher, .. } = self;
        let Some(device) = devices.get_mut(&link) else { return };
        let digest = digest_of(message, hasher);
        if std::mem::replace(&mut device.digest, digest) != digest {
            found.push(Invalidation::Link(link));
        }
        let mut events = Vec::new();
        let mut gone = std::mem::take(&mut device.peers);
        for message in &message.peers {
            let before = gone.remove(&message.key);
            let (peer, known) = KnownPeer::of(message, link, before.as_ref(), hasher);
            if before.is_none_or(|before| before.digest != known.digest) {
                events.push(if message.is_exact() {
                    KernelEvent::Present(peer.into())
                } else {
                    KernelEvent::Inexact(peer.into())
                });
            }
            device.peers.insert(message.key, known);
        }
        events.extend(gone.into_keys().map(|key| KernelEvent::Deleted(Key::Peer(link, key))));
        if !events.is_empty() {
            found.push(Invalidation::Objects(events, None));
        }
    }
}

impl Device {
    /// The change for the kernel, or `None` if it would change nothing.
    fn change<'a>(&self, change: &'a Change, hasher: &RandomState) -> Option<PeerChange<'a>> {
        let Object::Peer(peer) = change.object() else { return None };
        if matches!(change, Change::Delete(_)) {
            return Some(PeerChange::Delete(peer.key));
        }
        let known = self.peers.get(&peer.key);
        let keep_endpoint = known.is_some_and(|known| known.keeps(peer.attributes.endpoint));
        // An earlier run has put the peer, and only its address has changed.
        if let Some(KnownPeer { put: None, used: Some(used), digest, .. }) = known
            && keep_endpoint
            && hasher.hash_one(with_endpoint(peer, *used)) == *digest
        {
            return None;
        }
        let had_psk = known.is_some_and(|known| known.has_psk);
        Some(PeerChange::Put { peer, keep_endpoint, had_psk })
    }

    /// Remembers a change that was made.
    fn note(&mut self, change: &Change, hasher: &RandomState) {
        let Object::Peer(peer) = change.object() else { return };
        if matches!(change, Change::Delete(_)) {
            self.peers.remove(&peer.key);
            return;
        }
        let endpoint = peer.attributes.endpoint;
        let before = self.peers.get(&peer.key);
        let kept = before.filter(|known| known.keeps(endpoint));
        let known = KnownPeer {
            put: Some(endpoint),
            used: kept.map_or(Some(endpoint), |known| known.used),
            handshake: before.and_then(|known| known.handshake),
            has_psk: peer.attributes.psk.is_some(),
            digest: hasher.hash_one(peer),
        };
        self.peers.insert(peer.key, known);
    }
}

impl KnownPeer {
    /// The object of a peer that was read, and what is remembered of it.
    fn of(
        message: &PeerMessage,
        link: LinkName,
        before: Option<&Self>,
        hasher: &RandomState,
    ) -> (Peer, Self) {
        let put = before.and_then(|before| before.put);
        let mut peer = message.object(link);
        if let Some(put) = put
            && is_fresh(message.handshake)
        {
            peer.attributes.endpoint = put;
        }
        let known = Self {
            put,
            used: message.endpoint,
            handshake: message.handshake,
            has_psk: message.psk.is_some(),
            // A peer that is not exact differs from any that was put.
            digest: hasher.hash_one(&peer) ^ u64::from(!message.is_exact()),
        };
        (peer, known)
    }
}

fn with_endpoint(peer: &Peer, endpoint: SocketAddr) -> Peer {
    let mut peer = peer.clone();
    peer.attributes.endpoint = endpoint;
    peer
}

fn digest_of(device: &DeviceMessage, hasher: &RandomState) -> u64 {
    hasher.hash_one((&device.key, device.port, device.fwmark))
}
