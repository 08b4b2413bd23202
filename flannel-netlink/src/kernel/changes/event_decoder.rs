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

use crate::codec::fou::Open;
use crate::codec::link::LinkMessage;
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
    /// The proxy entries at the last look: the index of the link, and the address.
    proxies: BTreeSet<(u32, IpAddr)>,
    /// The indices of the links whose UDP ports were closed at the last look.
    closed: BTreeSet<u32>,
    /// The queue of invalidations.
    pending: VecDeque<Invalidation>,
}

/// An event, and the route protocol of the changed object; `None` for a kind without protocols, and
/// for a deletion.
type Decoded = (KernelEvent, Option<u8>);

impl EventDecoder {
    /// Reads the names of all links. Changes by the socket with the port id `port` are our own.
    /// `requests` is a socket in the same namespace, for queries only.
    pub(crate) fn new(
        requests: Socket,
        port: u32,
        foreign: ForeignRoutes,
    ) -> Result<Self, KernelError> {
        let (links, proxies, closed, pending) = Default::default();
        let mut events = Self { requests, port, foreign, links, proxies, closed, pending };
        events.learn_names()?;
        events.proxies = events.read_proxies()?;
        Ok(events)
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

    fn read_proxies(&mut self) -> Result<BTreeSet<(u32, IpAddr)>, KernelError> {
        Ok(self.requests.dump(neigh::proxies(), neigh::read_proxy)?.into_iter().collect())
    }

    /// Reads the proxy entries. Queues an invalidation for each that is new.
    pub(crate) fn look_for_proxies(&mut self) -> Result<(), KernelError> {
        for deleted in self.foreign.take_deleted_proxies() {
            self.proxies.remove(&deleted);
        }
        let now = self.read_proxies()?;
        let new: Vec<(u32, IpAddr)> = now.difference(&self.proxies).copied().collect();
        self.proxies = now;
        // An entry without a device is for another network.
        for (index, address) in new.into_iter().filter(|(index, _)| *index != 0) {
            if let Some(link) = self.name(index)? {
                // As a snapshot shows it.
                let entry = Neigh { link, address, mac: MacAddr([0; 6]) };
                self.add(KernelEvent::Duplicate(entry.into()), None);
            }
        }
        Ok(())
    }

    /// Whether there are tunnels with UDP ports.
    pub(crate) fn has_fou_links(&self) -> bool {
        self.links.values().any(|link| link.fou_port().is_some())
    }

    /// Queues an invalidation of each tunnel whose UDP port is closed, and was open at the last
    /// look.
    pub(crate) fn look_for_closed_ports(&mut self, open: &[Open]) {
        let is_closed = |link: &&LinkMessage| {
            let receives = |port| open.iter().any(|open| open.receives_for(port));
            link.fou_port().is_some_and(|port| !receives(port))
        };
        let closed = self.links.values().filter(is_closed).map(|link| (link.index, link.name));
        let closed: Vec<(u32, LinkName)> = closed.collect();
        let before = std::mem::replace(&mut self.closed, closed.iter().map(|(n, _)| *n).collect());
        for (_, name) in closed.into_iter().filter(|(index, _)| !before.contains(index)) {
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
                let found = neigh::read(message).filter(|found| !found.is_echo());
                found.iter().for_each(|found| self.foreign.note_entry(found));
                self.decode(message, found)?
            }
            Rtm::Newroute | Rtm::Delroute => {
                let found = route::read(message);
                found.iter().for_each(|found| self.foreign.note_route(found));
                self.decode(message, found)?
            }
            Rtm::Newrule | Rtm::Delrule => rule(message),
            _ if nexthop::is_event(message.kind) => self.decode(message, nexthop::read(message))?,
            _ => None,
        };
        let Some((event, protocol)) = decoded else { return Ok(()) };
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
        let (Some(found), is_deletion) = (found, message.is_deletion()) else { return Ok(None) };
        let link = match found.event_index(is_deletion) {
            0 => None,
            index => self.name(index)?,
        };
        let event = found.event(link, is_deletion, message.flags);
        Ok(event.map(|event| (event, found.protocol().filter(|_| !is_deletion))))
    }

    fn take_link(&mut self, link: &LinkMessage, deleted: bool) {
        let before = match (link.whole, deleted) {
            (true, true) => self.links.remove(&link.index),
            (true, false) => self.links.insert(link.index, link.clone()),
            (false, _) => None,
        };
        // Only values changed that `LinkMessage` does not have: counters, promiscuous mode or the
        // operational state.
        if !deleted && link.whole && before.as_ref() == Some(link) {
            return;
        }
        let renamed = before.map(|before| before.name).filter(|before| *before != link.name);
        for name in renamed.into_iter().chain([link.name]) {
            self.invalidate_link(name);
        }
    }

    /// The name of a link; `None` if it cannot be known. If the link was deleted before its name
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

/// The author of a change: the socket with this port id; `None` if it is 0, which stands for the
/// kernel itself and for unknown sockets. `protocol` is the route protocol of the changed object.
fn changed_by(port: u32, protocol: Option<u8>) -> Option<ChangedBy> {
    let mut changed_by = ChangedBy::new(port);
    changed_by.protocol = protocol;
    (port != 0).then_some(changed_by)
}

/// The event for a message about a routing rule (`ip rule`). A rule can redirect any packet of its
/// family, as a default route in another table can.
fn rule(message: &Message<'_>) -> Option<Decoded> {
    // `struct fib_rule_hdr` begins with the family.
    let family = family_of(RtAddrFamily::from(*message.payload.first()?))?;
    Some((KernelEvent::Related(Key::Route(Subnet::everything(family))), None))
}
