//! Doubting: what the kernel says has changed, and what that may mean for us.

use std::cell::OnceCell;

use super::{Cause, Engine, Unread};
use flannel_core::Kernel;
use flannel_core::kernel::{ChangedBy, Invalidation, KernelEvent, ROUTE_PROTOCOL};
use flannel_core::object::{Key, Object, Route, Via};
use flannel_core::status::Damage;

/// Whom to suspect of additions is remembered for so many of them; the wanted objects bound the rest.
const MOST_SUSPECTS: usize = 1024;

/// Who is said to have done something. Which process that is costs reading files, so only victims of ours make us ask.
struct Suspect<'a> {
    said: Option<&'a ChangedBy>,
    kernel: &'a dyn Kernel,
    named: OnceCell<ChangedBy>,
}

impl Suspect<'_> {
    fn named(&self) -> Option<ChangedBy> {
        let said = self.said?;
        let named = || {
            let mut named = said.clone();
            named.process = named.process.or_else(|| self.kernel.process(said.port));
            named
        };
        Some(self.named.get_or_init(named).clone())
    }
}

impl Engine {
    pub(crate) fn has_urgent_lookups(&self) -> bool {
        self.stale_lookups.urgent
    }

    pub(crate) fn has_stale_lookups(&self) -> bool {
        self.stale_lookups.all || !self.stale_lookups.under.is_empty()
    }

    /// Takes in news from the kernel, and asks it who that was where it matters.
    pub(crate) fn invalidate(&mut self, invalidation: &Invalidation, kernel: &dyn Kernel) {
        match invalidation {
            Invalidation::Everything => {
                self.unread = Unread::Everything;
                self.stale_lookups.all = true;
            }
            Invalidation::Link(name) => {
                if self.footprint.links.contains(name) || self.footprint.routes_on.contains(name) {
                    self.unread = Unread::Everything;
                }
                self.stale_lookups.urgent |= self.footprint.routes_on.contains(name);
                self.stale_lookups.all |=
                    self.stale_lookups.urgent || self.answer_links.contains(name);
            }
            Invalidation::Objects(reports, by) => {
                let by = Suspect { said: by.as_ref(), kernel, named: OnceCell::new() };
                reports.iter().for_each(|report| self.invalidate_object(report, &by));
            }
        }
    }

    fn invalidate_object(&mut self, report: &KernelEvent, by: &Suspect<'_>) {
        let key = match report {
            KernelEvent::Present(object)
            | KernelEvent::Inexact(object)
            | KernelEvent::Duplicate(object) => object.key(),
            KernelEvent::Unrepresentable(key)
            | KernelEvent::Related(key)
            | KernelEvent::Deleted(key) => *key,
        };
        let concerned = self.footprint.concerns(&key);
        if let Key::Route(dst) = key
            && !concerned
            && self.peers.lookups().are_under(dst)
        {
            self.stale_lookups.under.insert(dst);
        }
        let protocol = by.said.and_then(|by| by.protocol);
        // As we want it, but of a protocol that is not ours.
        let disowned = protocol.is_some_and(|protocol| protocol != ROUTE_PROTOCOL);
        match (self.want(&key), report) {
            (_, KernelEvent::Related(_)) => {}
            // Says what we want to hear: no reason for doubt (and none for trust: a doubt stays one).
            (Some(want), KernelEvent::Present(object)) if want == *object && !disowned => {}
            // A route of somebody else stands before it, or no longer does: so it shall be.
            (Some(Object::Route(Route { via: Via::LastResort, .. })), report) => {
                if matches!(report, KernelEvent::Deleted(_)) {
                    self.unread = Unread::Everything;
                }
            }
            (Some(_), KernelEvent::Deleted(_)) => {
                // Its routes went with it, without a word about each.
                if let Key::Nexthop(id) = key {
                    let dst = self.ids.as_ref().and_then(|ids| ids.dst(id));
                    // One that a plan defined has routes that the plan defined too.
                    let routes =
                        dst.map(|dst| vec![Key::Route(dst)]).or_else(|| self.peers.routes_by(&key));
                    if routes.is_none() {
                        self.unread = Unread::Everything;
                    }
                    for route in routes.into_iter().flatten() {
                        self.suspect(route, Damage::Deletion, by);
                    }
                }
                self.suspect(key, Damage::Deletion, by);
            }
            (Some(_), KernelEvent::Duplicate(object)) => {
                // Of two IPv6 routes the kernel replaces that which is the more like ours, which may be the second.
                let in_doubt = matches!(key, Key::Route(dst) if dst.base().is_ipv6());
                if in_doubt || self.footprint.may_own(object, protocol) {
                    self.unread = self.unread.max(Unread::Additions);
                }
                self.suspect(key, Damage::Modification, by);
            }
            (Some(_), _) => self.suspect(key, Damage::Modification, by),
            // Ours to remove, if it is one that a snapshot shows as ours.
            (
                None,
                KernelEvent::Present(object)
                | KernelEvent::Inexact(object)
                | KernelEvent::Duplicate(object),
            ) if concerned && self.footprint.may_own(object, protocol) => {
                self.unread = self.unread.max(Unread::Additions);
                if self.suspects.len() < MOST_SUSPECTS + self.put.len()
                    && let Some(by) = by.named()
                {
                    self.suspects.insert(key, by);
                }
            }
            (None, _) => {}
        }
    }

    /// A wanted object is in doubt.
    fn suspect(&mut self, key: Key, damage: Damage, by: &Suspect<'_>) {
        let known = self.failed.remove(&key).map(|failed| failed.cause);
        self.put.entry(key).or_insert_with(|| known.unwrap_or(Cause::Repair(damage)));
        if let Some(by) = by.named() {
            self.suspects.insert(key, by);
        }
    }
}
