//! Decodes notifications into invalidations.
//!
//! A notification identifies a link by its index, an invalidation by its name. The decoder learns
//! the names from notifications about links, which arrive in order with all others.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::net::IpAddr;

use flannel_core::Subnet;
use flannel_core::kernel::{ChangedBy, Invalidation, KernelError, KernelEvent};
use flannel_core::object::{Key, LinkName, MacAddr, Neigh};
use neli::consts::rtnl::{RtAddrFamily, Rtm};

use crate::codec::fou::OpenPort;
use crate::codec::link::LinkMessage;
use crate::codec::neigh::ProxyEntry;
use crate::codec::{EventMessage, addr, family_of, link, neigh, nexthop, route};
use crate::kernel::foreign_routes::ForeignRoutes;
use crate::kernel::query::{ENODEV, ask_name};
use crate::transport::socket::Socket;
use crate::transport::wire::{Message, messages};

/// Decodes messages and queues the invalidations.
pub(crate) struct EventDecoder {
    /// Looks up names of links that no message has given.
    requests: Socket,
    /// The port id of our own changes.
    port: u32,
    foreign: ForeignRoutes,
    /// The last message about each link, by index.
    links: HashMap<u32, LinkMessage>,
    /// The proxy entries at the last scan.
    proxies: BTreeSet<ProxyEntry>,
    /// The indices of the links whose UDP ports were closed at the last scan.
    closed: BTreeSet<u32>,
    /// The queue of invalidations.
    pending: VecDeque<Invalidation>,
}

/// The content of a message about an object that is not a link.
struct Decoded {
    event: KernelEvent,
    /// The route protocol of the changed object. `None` for a kind without protocols, and for a
    /// deletion.
    protocol: Option<u8>,
}

impl EventDecoder {
    /// Reads the names of all links. Changes by the socket with the port id `port` are our own.
    /// `requests` is a socket in the same namespace, for queries only.
    pub(crate) fn new(
        requests: Socket,
        port: u32,
        foreign: ForeignRoutes,
    ) -> Result<Self, KernelError> {
        let mut decoder = Self {
            requests,
            port,
            foreign,
            links: HashMap::new(),
            proxies: BTreeSet::new(),
            closed: BTreeSet::new(),
            pending: VecDeque::new(),
        };
        decoder.learn_names()?;
        decoder.proxies = decoder.read_proxies()?;
        Ok(decoder)
    }

    /// The next invalidation, in the order of the messages.
    pub(crate) fn pop(&mut self) -> Option<Invalidation> {
        self.pending.pop_front()
    }

    /// Queues invalidations from another source.
    pub(crate) fn extend(&mut self, more: Vec<Invalidation>) {
        self.pending.extend(more);
    }

    /// Whether no invalidation is queued.
    pub(crate) fn is_empty(&self) -> bool {
        self.pending.is_empty()
    }

    /// Reads the names of all links.
    fn learn_names(&mut self) -> Result<(), KernelError> {
        let links = self.requests.dump(link::all(), link::read)?;
        self.links = links.into_iter().map(|link| (link.index, link)).collect();
        Ok(())
    }

    fn read_proxies(&mut self) -> Result<BTreeSet<ProxyEntry>, KernelError> {
        Ok(self.requests.dump(neigh::proxies(), neigh::read_proxy)?.into_iter().collect())
    }

    /// Reads the proxy entries. Queues an invalidation for each that is new.
    pub(crate) fn scan_proxies(&mut self) -> Result<(), KernelError> {
        for deleted in self.foreign.take_deleted_proxies() {
            self.proxies.remove(&deleted);
        }
        let now = self.read_proxies()?;
        let new: Vec<ProxyEntry> = now.difference(&self.proxies).copied().collect();
        self.proxies = now;
        for ProxyEntry { index, address } in new {
            // An entry without a device is for another network.
            if index == 0 {
                continue;
            }
            if let Some(link) = self.name(index)? {
                // A snapshot shows a proxy entry as a neighbour with this MAC address.
                let entry = Neigh { link, address, mac: MacAddr([0; 6]) };
                self.add(KernelEvent::Duplicate(entry.into()), None);
            }
        }
        Ok(())
    }

    /// Whether there are tunnels with UDP headers.
    pub(crate) fn has_fou_links(&self) -> bool {
        self.links.values().any(|link| link.fou_port().is_some())
    }

    /// Queues an invalidation of each tunnel whose UDP port is not among the open ports, but was at
    /// the last scan.
    pub(crate) fn note_open_ports(&mut self, open: &[OpenPort]) {
        let mut closed = BTreeSet::new();
        let mut newly_closed = Vec::new();
        for link in self.links.values() {
            let Some(port) = link.fou_port() else { continue };
            if open.iter().any(|open| open.receives_for(port)) {
                continue;
            }
            closed.insert(link.index);
            if !self.closed.contains(&link.index) {
                newly_closed.push(link.name);
            }
        }
        self.closed = closed;
        for name in newly_closed {
            self.invalidate_link(name);
        }
    }

    /// Decodes one datagram. A message that cannot be decoded invalidates everything.
    pub(crate) fn take_datagram(&mut self, datagram: &[u8]) {
        for message in messages(datagram) {
            if let Err(error) = message.and_then(|message| self.take(&message)) {
                tracing::debug!(%error, "a message from the kernel cannot be decoded");
                self.everything();
            }
        }
    }

    /// Handles a loss of messages. Everything is invalid, and names may be outdated because some of
    /// the messages may have been about links.
    pub(crate) fn lost(&mut self) -> Result<(), KernelError> {
        self.everything();
        self.learn_names()
    }

    fn take(&mut self, message: &Message<'_>) -> Result<(), KernelError> {
        if let Some(link) = link::read(message) {
            self.take_link(&link, message.is_deletion());
            return Ok(());
        }
        if message.port == self.port {
            return Ok(());
        }
        let decoded = match Rtm::from(message.kind) {
            Rtm::Newaddr | Rtm::Deladdr => self.decode(message, addr::read(message))?,
            Rtm::Newneigh | Rtm::Delneigh => {
                let entry = neigh::read(message).filter(|entry| !entry.is_echo());
                if let Some(entry) = &entry {
                    self.foreign.note_entry(entry);
                }
                self.decode(message, entry)?
            }
            Rtm::Newroute | Rtm::Delroute => {
                let route = route::read(message);
                if let Some(route) = &route {
                    self.foreign.note_route(route);
                }
                self.decode(message, route)?
            }
            Rtm::Newrule | Rtm::Delrule => rule(message),
            _ if nexthop::is_event(message.kind) => self.decode(message, nexthop::read(message))?,
            _ => None,
        };
        let Some(Decoded { event, protocol }) = decoded else { return Ok(()) };
        // With the last IPv4 address of a device the kernel also deletes its IPv4 neighbours, and
        // its IPv4 routes unless they use a nexthop object (`fib_disable_ip`). It sends no message
        // about most of these routes.
        if let KernelEvent::Deleted(Key::Addr(link, IpAddr::V4(_))) = event {
            self.invalidate_link(link);
        }
        self.add(event, changed_by(message.port, protocol));
        Ok(())
    }

    fn decode(
        &mut self,
        message: &Message<'_>,
        found: Option<impl EventMessage>,
    ) -> Result<Option<Decoded>, KernelError> {
        let Some(found) = found else { return Ok(None) };
        let is_deletion = message.is_deletion();
        let link = match found.event_index(is_deletion) {
            0 => None,
            index => self.name(index)?,
        };
        let Some(event) = found.event(link, is_deletion, message.flags) else { return Ok(None) };
        let protocol = if is_deletion { None } else { found.protocol() };
        Ok(Some(Decoded { event, protocol }))
    }

    fn take_link(&mut self, link: &LinkMessage, deleted: bool) {
        let before = if !link.whole {
            None
        } else if deleted {
            self.links.remove(&link.index)
        } else {
            self.links.insert(link.index, link.clone())
        };
        // Only values changed that `LinkMessage` does not have: counters, promiscuous mode or the
        // operational state.
        if !deleted && before.as_ref() == Some(link) {
            return;
        }
        if let Some(before) = before
            && before.name != link.name
        {
            self.invalidate_link(before.name);
        }
        self.invalidate_link(link.name);
    }

    /// The name of a link, or `None` if it cannot be known. If the link was deleted before its name
    /// was read, everything becomes invalid, because the message may concern any link. A link
    /// whose name is not UTF-8 is foreign.
    fn name(&mut self, index: u32) -> Result<Option<LinkName>, KernelError> {
        if let Some(link) = self.links.get(&index) {
            return Ok(Some(link.name));
        }
        match ask_name(&mut self.requests, index) {
            Ok(name) => return Ok(Some(name)),
            Err(error) if error.is(ENODEV) => self.everything(),
            Err(error) if error.is_unreadable() => {}
            Err(error) => return Err(error),
        }
        Ok(None)
    }

    /// Queues an event, together with the last one if both have the same author.
    fn add(&mut self, event: KernelEvent, changed_by: Option<ChangedBy>) {
        match self.pending.back_mut() {
            Some(Invalidation::Objects(events, last)) if *last == changed_by => events.push(event),
            _ => self.pending.push_back(Invalidation::Objects(vec![event], changed_by)),
        }
    }

    fn invalidate_link(&mut self, name: LinkName) {
        let invalidation = Invalidation::Link(name);
        if self.pending.back() != Some(&invalidation) {
            self.pending.push_back(invalidation);
        }
    }

    /// An invalidation of everything replaces all others.
    fn everything(&mut self) {
        self.pending.clear();
        self.pending.push_back(Invalidation::Everything);
    }
}

/// The author of a change: the socket with this port id. `None` if the port id is 0, which stands
/// for the kernel itself and for unknown sockets. `protocol` is the route protocol of the changed
/// object.
fn changed_by(port: u32, protocol: Option<u8>) -> Option<ChangedBy> {
    if port == 0 {
        return None;
    }
    let mut changed_by = ChangedBy::new(port);
    changed_by.protocol = protocol;
    Some(changed_by)
}

/// The event for a message about a routing rule (`ip rule`). A rule can redirect any packet of its
/// family, so the event is the same as for a default route in another table.
fn rule(message: &Message<'_>) -> Option<Decoded> {
    // `struct fib_rule_hdr` begins with the family.
    let family = family_of(RtAddrFamily::from(*message.payload.first()?))?;
    let event = KernelEvent::Related(Key::Route(Subnet::everything(family)));
    Some(Decoded { event, protocol: None })
}
