//! Invalidation: the effect of kernel events on the table.

use std::cell::OnceCell;

use super::Engine;
use flannel_core::kernel::{ChangedBy, Invalidation, KernelEvent, ProcessNames, ROUTE_PROTOCOL};
use flannel_core::object::{Key, Object, Route, Via};
use flannel_core::status::Damage;

/// The table keeps the authors of at most this many undesired objects, because their number is not
/// bounded.
const MOST_SUSPECTS: usize = 1024;

/// The author of an event. The name of its process is read from files, and only if the event
/// concerns an object of ours.
struct Author<'a> {
    unnamed: Option<&'a ChangedBy>,
    names: Option<&'a dyn ProcessNames>,
    named: OnceCell<ChangedBy>,
}

impl Author<'_> {
    /// The author with the name of the process, or `None` if the event has no author.
    fn named(&self) -> Option<ChangedBy> {
        let unnamed = self.unnamed?;
        let named = self.named.get_or_init(|| {
            let mut named = unnamed.clone();
            named.process = self.names.and_then(|names| names.name(unnamed.port)).map(Into::into);
            named
        });
        Some(named.clone())
    }

    /// The route protocol, or `None` if the event has none.
    fn protocol(&self) -> Option<u8> {
        self.unnamed?.protocol
    }
}

impl Engine {
    /// Takes in an event. `names` finds the name of its author.
    pub(crate) fn invalidate(
        &mut self,
        invalidation: &Invalidation,
        names: Option<&dyn ProcessNames>,
    ) {
        match invalidation {
            Invalidation::Link(name) => {
                let carries_routes = self.footprint.routes_on.contains(name);
                if carries_routes || self.footprint.links.contains(name) {
                    self.survey.invalidate_everything();
                }
                self.stale_lookups.invalidate_link(*name, carries_routes);
            }
            Invalidation::Objects(events, by) => {
                let author = Author { unnamed: by.as_ref(), names, named: OnceCell::new() };
                events.iter().for_each(|event| self.invalidate_object(event, &author));
            }
            // `Everything`, or an unknown variant.
            _ => {
                self.survey.invalidate_everything();
                self.stale_lookups.invalidate_all();
            }
        }
    }

    fn invalidate_object(&mut self, event: &KernelEvent, by: &Author<'_>) {
        if self.end_started(event).is_some() {
            return;
        }
        let key = event.key();
        if let Key::Route(dst) = key
            && !self.footprint.concerns(&key)
            && self.desired.peers.has_lookup_under(dst)
        {
            self.stale_lookups.invalidate_under(dst);
        }
        if matches!(event, KernelEvent::Related(_) | KernelEvent::Failed(..)) {
            return;
        }
        match self.desired.object(&key) {
            Some(desired) => self.invalidate_desired(&desired, event, by),
            None => self.suspect_addition(event, by),
        }
    }

    /// Takes in an event about a desired object.
    fn invalidate_desired(&mut self, desired: &Object, event: &KernelEvent, by: &Author<'_>) {
        let key = desired.key();
        // An object with another protocol is not ours, even if it is otherwise as desired.
        let is_foreign = by.protocol().is_some_and(|protocol| protocol != ROUTE_PROTOCOL);
        let is_last_resort = matches!(desired, Object::Route(Route { via: Via::LastResort, .. }));
        match event {
            // The object is as desired. If it is invalid, it stays invalid.
            KernelEvent::Present(object) if object == desired && !is_foreign => {}
            KernelEvent::Deleted(_) if is_last_resort => self.survey.invalidate_everything(),
            // The route of another program may take precedence over a route of last resort.
            _ if is_last_resort => {}
            KernelEvent::Deleted(_) => {
                if let Key::Nexthop(id) = key {
                    self.suspect_routes_by(id, by);
                }
                self.suspect(key, Damage::Deletion, by);
            }
            KernelEvent::Duplicate(object) => {
                // If there are two IPv6 routes, a put replaces the one that is more like ours,
                // which may be the second one.
                let in_doubt = matches!(key, Key::Route(dst) if dst.base().is_ipv6());
                if in_doubt || self.footprint.may_own(object, by.protocol()) {
                    self.survey.invalidate_additions();
                    self.suspect(key, Damage::Modification, by);
                }
            }
            _ => self.suspect(key, Damage::Modification, by),
        }
    }

    /// Invalidates the routes that use a deleted nexthop object: the kernel deletes them too,
    /// without an event for each.
    fn suspect_routes_by(&mut self, id: u32, by: &Author<'_>) {
        let route = self.desired.route_by(id).map(|route| vec![route]);
        // A plan that defines a nexthop object also defines its routes.
        match route.or_else(|| self.desired.peers.routes_by(&Key::Nexthop(id))) {
            Some(routes) => {
                for route in routes {
                    self.suspect(route, Damage::Deletion, by);
                }
            }
            None => self.survey.invalidate_everything(),
        }
    }

    /// Takes in an event about an object that is not desired. If a snapshot shows it as ours, it is
    /// deleted.
    fn suspect_addition(&mut self, event: &KernelEvent, by: &Author<'_>) {
        let (KernelEvent::Present(object)
        | KernelEvent::Inexact(object)
        | KernelEvent::Duplicate(object)) = event
        else {
            return;
        };
        if !self.footprint.may_own(object, by.protocol()) {
            return;
        }
        self.survey.invalidate_additions();
        if self.table.has_room(MOST_SUSPECTS)
            && let Some(by) = by.named()
        {
            self.table.suspect_addition(event.key(), by);
        }
    }

    /// Marks a desired object for a put, because it may have been damaged.
    fn suspect(&mut self, key: Key, damage: Damage, by: &Author<'_>) {
        self.table.invalidate(key, damage, by.named());
    }
}
