//! Invalidation: the effect of kernel events on the table.

use std::cell::OnceCell;

use super::Engine;
use flannel_core::kernel::{ChangedBy, Invalidation, KernelEvent, ProcessNames, ROUTE_PROTOCOL};
use flannel_core::object::{Key, Object, Route, Via};
use flannel_core::status::Damage;

/// The authors of this many undesired objects are kept. The number of desired objects is bounded.
const MOST_SUSPECTS: usize = 1024;

/// The author of an event. The name of its process costs reading files, so it is read only if the
/// event concerns an object of ours.
struct Suspect<'a> {
    author: Option<&'a ChangedBy>,
    names: Option<&'a dyn ProcessNames>,
    named: OnceCell<ChangedBy>,
}

impl Suspect<'_> {
    fn named(&self) -> Option<ChangedBy> {
        let author = self.author?;
        let named = || {
            let mut named = author.clone();
            named.process = self.names.and_then(|names| names.name(author.port)).map(Into::into);
            named
        };
        Some(self.named.get_or_init(named).clone())
    }
}

impl Engine {
    /// Takes in an event. `names` names its author.
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
                self.lookups.invalidate_link(*name, carries_routes);
            }
            Invalidation::Objects(reports, by) => {
                let by = Suspect { author: by.as_ref(), names, named: OnceCell::new() };
                reports.iter().for_each(|report| self.invalidate_object(report, &by));
            }
            // `Everything`, or an unknown variant.
            _ => {
                self.survey.invalidate_everything();
                self.lookups.invalidate_all();
            }
        }
    }

    fn invalidate_object(&mut self, report: &KernelEvent, by: &Suspect<'_>) {
        if self.end_started(report).is_some() {
            return;
        }
        let key = report.key();
        let concerned = self.footprint.concerns(&key);
        if let Key::Route(dst) = key
            && !concerned
            && self.desired.peers.asked_about(dst)
        {
            self.lookups.invalidate_under(dst);
        }
        let protocol = by.author.and_then(|by| by.protocol);
        // The protocol is not ours, even if the object is as desired.
        let disowned = protocol.is_some_and(|protocol| protocol != ROUTE_PROTOCOL);
        match (self.desired.object(&key), report) {
            (_, KernelEvent::Related(_) | KernelEvent::Failed(..)) => {}
            // An event that reports the desired object is ignored; an invalid object stays invalid.
            (Some(want), KernelEvent::Present(object)) if want == *object && !disowned => {}
            // Another program's route may take precedence over a route of last resort.
            (Some(Object::Route(Route { via: Via::LastResort, .. })), report) => {
                if matches!(report, KernelEvent::Deleted(_)) {
                    self.survey.invalidate_everything();
                }
            }
            (Some(_), KernelEvent::Deleted(_)) => {
                // The kernel deletes its routes with it, without an event for each.
                if let Key::Nexthop(id) = key {
                    let route = self.desired.route_by(id).map(|route| vec![route]);
                    // A plan that defines a nexthop object also defines its routes.
                    match route.or_else(|| self.desired.peers.routes_by(&key)) {
                        Some(routes) => routes
                            .into_iter()
                            .for_each(|route| self.suspect(route, Damage::Deletion, by)),
                        None => self.survey.invalidate_everything(),
                    }
                }
                self.suspect(key, Damage::Deletion, by);
            }
            (Some(_), KernelEvent::Duplicate(object)) => {
                // Of two IPv6 routes the kernel replaces the one that is more like ours, maybe the
                // second one.
                let in_doubt = matches!(key, Key::Route(dst) if dst.base().is_ipv6());
                if in_doubt || self.footprint.may_own(object, protocol) {
                    self.survey.invalidate_additions();
                    self.suspect(key, Damage::Modification, by);
                }
            }
            (Some(_), _) => self.suspect(key, Damage::Modification, by),
            // To be deleted, if a snapshot shows it as ours.
            (
                None,
                KernelEvent::Present(object)
                | KernelEvent::Inexact(object)
                | KernelEvent::Duplicate(object),
            ) if self.footprint.may_own(object, protocol) => {
                self.survey.invalidate_additions();
                if self.table.has_room(MOST_SUSPECTS)
                    && let Some(by) = by.named()
                {
                    self.table.suspect_addition(key, by);
                }
            }
            (None, _) => {}
        }
    }

    /// A desired object may have been damaged.
    fn suspect(&mut self, key: Key, damage: Damage, by: &Suspect<'_>) {
        self.table.invalidate(key, damage, by.named());
    }
}
