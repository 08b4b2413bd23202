//! From multicast messages to invalidations: a message names a link by its index, and names are
//! learned from messages about links, which come in the same order as everything else.

use std::collections::{HashMap, VecDeque};

use flannel_core::Subnet;
use flannel_core::kernel::{ChangedBy, Invalidation, KernelError, KernelEvent};
use flannel_core::object::{Key, LinkName, Object};
use neli::consts::nl::NlmF;
use neli::consts::rtnl::{RtAddrFamily, Rtm, Rtprot};

use crate::ask::{ENODEV, ask_name};
use crate::codec::link::LinkMessage;
use crate::codec::{addr, family_of, link, neigh, nexthop, route};
use crate::foreign_routes::ForeignRoutes;
use crate::socket::Socket;
use crate::wire::{EBADMSG, Message, messages};

/// What was heard and not yet told.
pub(crate) struct EventDecoder {
    /// For the names of links that no message told.
    requests: Socket,
    /// Whose changes are our own.
    port: u32,
    foreign: ForeignRoutes,
    links: HashMap<u32, LinkMessage>,
    pending: VecDeque<Invalidation>,
}

impl EventDecoder {
    /// Changes by the socket with `port` are our own; `requests` is another one, in the calling thread's namespace.
    pub(crate) fn new(
        requests: Socket,
        port: u32,
        foreign: ForeignRoutes,
    ) -> Result<Self, KernelError> {
        let mut events =
            Self { requests, port, foreign, links: HashMap::new(), pending: VecDeque::new() };
        events.learn_names()?;
        Ok(events)
    }

    /// The next doubt, in the order of messages.
    pub(crate) fn pop(&mut self) -> Option<Invalidation> {
        self.pending.pop_front()
    }

    /// Nothing waits to be told.
    pub(crate) fn is_empty(&self) -> bool {
        self.pending.is_empty()
    }

    fn learn_names(&mut self) -> Result<(), KernelError> {
        let links = self.requests.dump(link::all(), link::read)?;
        self.links = links.into_iter().map(|link| (link.index, link)).collect();
        Ok(())
    }

    /// Takes in one datagram; `None` is one that did not fit.
    pub(crate) fn take_datagram(&mut self, datagram: Option<&[u8]>) {
        // What does not fit or is malformed is lost, which is reason for doubt about everything.
        let Some(datagram) = datagram else { return self.everything() };
        for message in messages(datagram) {
            if let Err(error) = message.and_then(|message| self.take(&message)) {
                tracing::debug!(%error, "a message from the kernel was lost");
                self.everything();
            }
        }
    }

    /// Drops what was not yet told; [`EventDecoder::lost`] follows.
    pub(crate) fn forget(&mut self) {
        self.pending.clear();
    }

    /// Messages were lost, among them perhaps some about links.
    pub(crate) fn lost(&mut self) -> Result<(), KernelError> {
        self.everything();
        self.learn_names()
    }

    fn take(&mut self, message: &Message<'_>) -> Result<(), KernelError> {
        let kind = Rtm::from(message.kind);
        if let Some(link) = link::read(message) {
            self.take_link(&link, kind == Rtm::Dellink);
            return Ok(());
        }
        if message.port == self.port {
            return Ok(());
        }
        let (report, protocol) = match kind {
            Rtm::Newaddr | Rtm::Deladdr => (self.addr(message, kind == Rtm::Deladdr)?, None),
            Rtm::Newneigh | Rtm::Delneigh => (self.neigh(message, kind == Rtm::Delneigh)?, None),
            Rtm::Newroute => {
                (self.route(message, false)?, route::read(message).map(|found| found.protocol))
            }
            Rtm::Delroute => (self.route(message, true)?, None),
            _ if message.kind == nexthop::NEW => {
                (self.nexthop(message, false)?, nexthop::read(message).map(|found| found.protocol))
            }
            _ if message.kind == nexthop::DELETE => (self.nexthop(message, true)?, None),
            Rtm::Newrule | Rtm::Delrule => (rule(message), None),
            _ => (None, None),
        };
        if let Some(report) = report {
            self.report(report, changed_by(message.port, protocol));
        }
        Ok(())
    }

    fn take_link(&mut self, link: &LinkMessage, deleted: bool) {
        let before = match (link.whole, deleted) {
            (true, true) => self.links.remove(&link.index),
            (true, false) => self.links.insert(link.index, link.clone()),
            (false, _) => None,
        };
        // Counters, promiscuous mode, operational state …: nothing that anybody here looks at.
        if !deleted && link.whole && before.as_ref() == Some(link) {
            return;
        }
        let renamed = before.map(|before| before.name).filter(|before| *before != link.name);
        for name in renamed.into_iter().chain([link.name]) {
            self.link(name);
        }
    }

    fn addr(
        &mut self,
        message: &Message<'_>,
        deleted: bool,
    ) -> Result<Option<KernelEvent>, KernelError> {
        let Some(found) = addr::read(message) else { return Ok(None) };
        let Some(link) = self.name(found.index)? else { return Ok(None) };
        let object = Object::Addr(found.object(link));
        if deleted && found.address.is_ipv4() {
            // With the last IPv4 address of a device all IPv4 routes on it go, without a message about each.
            self.link(link);
        }
        Ok(Some(match deleted {
            true => KernelEvent::Deleted(object.key()),
            false => exact(KernelEvent::Present(object), found.is_exact()),
        }))
    }

    fn neigh(
        &mut self,
        message: &Message<'_>,
        deleted: bool,
    ) -> Result<Option<KernelEvent>, KernelError> {
        let Some(found) = neigh::read(message) else { return Ok(None) };
        let Some(link) = self.name(found.index)? else { return Ok(None) };
        self.foreign.see_entry(&found);
        let told = |key| report(key, found.object(link), deleted || found.failed);
        Ok(found.key(link).map(|key| exact(told(key), found.is_exact())))
    }

    fn nexthop(
        &mut self,
        message: &Message<'_>,
        deleted: bool,
    ) -> Result<Option<KernelEvent>, KernelError> {
        let Some(found) = nexthop::read(message) else { return Ok(None) };
        let link = if deleted || found.index == 0 { None } else { self.name(found.index)? };
        let object = link.and_then(|link| found.object(link)).map(Object::Nexthop);
        Ok(Some(report(Key::Nexthop(found.id), object, deleted)))
    }

    fn route(
        &mut self,
        message: &Message<'_>,
        deleted: bool,
    ) -> Result<Option<KernelEvent>, KernelError> {
        let Some(found) = route::read(message) else { return Ok(None) };
        let key = Key::Route(found.dst);
        // A route with another metric or in another table is another entry, but it may change where packets go.
        if found.main {
            self.foreign.see(&found);
        }
        if !found.main || !found.default_metric {
            return Ok(Some(KernelEvent::Related(key)));
        }
        let link = if deleted || found.index == 0 { None } else { self.name(found.index)? };
        // The kernel's own, which it makes with a source address, are nobody's to remove.
        let told = found.is_exact() || found.protocol != u8::from(Rtprot::Kernel);
        let object = found.object(|_| link).filter(|_| told).map(Object::Route);
        // The kernel says which one was put, which one is the only one, and which one took another's place.
        let is_double = message.flags.contains(NlmF::CREATE)
            && !message.flags.intersects(NlmF::EXCL | NlmF::REPLACE);
        Ok(Some(match exact(report(key, object, deleted), found.is_exact()) {
            KernelEvent::Present(object) | KernelEvent::Inexact(object) if is_double => {
                KernelEvent::Duplicate(object)
            }
            report => report,
        }))
    }

    /// The name of a link. If it is gone before its name could be learned, everything is in doubt.
    fn name(&mut self, index: u32) -> Result<Option<LinkName>, KernelError> {
        if let Some(link) = self.links.get(&index) {
            return Ok(Some(link.name));
        }
        match ask_name(&mut self.requests, index) {
            Ok(name) => return Ok(Some(name)),
            Err(error) if error.errno == ENODEV => self.everything(),
            Err(error) if error.errno == EBADMSG => {}
            Err(error) => return Err(error),
        }
        Ok(None)
    }

    fn report(&mut self, report: KernelEvent, changed_by: Option<ChangedBy>) {
        match self.pending.back_mut() {
            Some(Invalidation::Objects(reports, last)) if *last == changed_by => {
                reports.push(report);
            }
            _ => self.pending.push_back(Invalidation::Objects(vec![report], changed_by)),
        }
    }

    fn link(&mut self, name: LinkName) {
        let doubt = Invalidation::Link(name);
        if self.pending.back() != Some(&doubt) {
            self.pending.push_back(doubt);
        }
    }

    /// An invalidation of everything replaces all that came before it.
    fn everything(&mut self) {
        self.pending.clear();
        self.pending.push_back(Invalidation::Everything);
    }
}

/// Whoever has the socket with this port; `None` if it is 0, which stands for the kernel and for nobody knows. `protocol` is
/// that of what was put there.
fn changed_by(port: u32, protocol: Option<u8>) -> Option<ChangedBy> {
    let mut changed_by = ChangedBy::new(port);
    changed_by.protocol = protocol;
    (port != 0).then_some(changed_by)
}

/// A rule may lead any packet of its family elsewhere, as a default route in another table would.
fn rule(message: &Message<'_>) -> Option<KernelEvent> {
    // `struct fib_rule_hdr` begins with the family, as others do.
    let family = family_of(RtAddrFamily::from(*message.payload.first()?))?;
    Some(KernelEvent::Related(Key::Route(Subnet::everything(family))))
}

/// An object that says not all of what there is.
fn exact(report: KernelEvent, is_exact: bool) -> KernelEvent {
    match report {
        KernelEvent::Present(object) if !is_exact => KernelEvent::Inexact(object),
        report => report,
    }
}

fn report(key: Key, object: Option<Object>, deleted: bool) -> KernelEvent {
    match object {
        _ if deleted => KernelEvent::Deleted(key),
        Some(object) => KernelEvent::Present(object),
        None => KernelEvent::Unrepresentable(key),
    }
}
