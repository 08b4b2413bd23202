//! Kernel events that wait for a round. If there are too many, they become an invalidation of
//! everything.

use std::collections::BTreeSet;

use flannel_core::kernel::Invalidation;
use flannel_core::object::LinkName;

/// If more reports than this wait, everything is invalidated.
const MOST_REPORTS: usize = 1 << 16;
/// If more links than this wait, everything is invalidated.
const MOST_LINKS: usize = 1 << 10;

/// The invalidations that wait for the engine.
#[derive(Debug, Default)]
pub(crate) struct PendingEvents {
    everything: bool,
    links: BTreeSet<LinkName>,
    /// The invalidations of objects, in the order in which they arrived. Empty after there were too
    /// many.
    objects: Vec<Invalidation>,
    /// The number of events in `objects`.
    reports: usize,
}

impl PendingEvents {
    /// Keeps an event.
    pub(crate) fn push(&mut self, invalidation: Invalidation) {
        match invalidation {
            Invalidation::Link(name) => {
                if self.links.len() < MOST_LINKS {
                    self.links.insert(name);
                } else {
                    self.everything |= !self.links.contains(&name);
                }
            }
            Invalidation::Objects(ref reports, _) => {
                self.reports = self.reports.saturating_add(reports.len());
                if self.reports > MOST_REPORTS {
                    self.everything = true;
                    self.objects = Vec::new();
                } else if self.objects.last() != Some(&invalidation) {
                    self.objects.push(invalidation);
                }
            }
            // `Everything`, or an unknown variant.
            _ => self.everything = true,
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        !self.everything && self.links.is_empty() && self.objects.is_empty()
    }

    /// Takes all events.
    pub(crate) fn take(&mut self) -> Vec<Invalidation> {
        let Self { everything, links, objects, .. } = std::mem::take(self);
        let everything = everything.then_some(Invalidation::Everything).into_iter();
        let links = links.into_iter().map(Invalidation::Link);
        everything.chain(links).chain(objects).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flannel_core::kernel::{ChangedBy, KernelEvent};
    use flannel_core::object::Key;

    fn objects(port: u32) -> Invalidation {
        let gone = KernelEvent::Deleted(Key::Nexthop(port));
        Invalidation::Objects(vec![gone], Some(ChangedBy::new(port)))
    }

    fn link(n: u32) -> Invalidation {
        Invalidation::Link(format!("cali{n}").parse().unwrap())
    }

    #[test]
    fn the_number_of_pending_events_is_bounded() {
        let mut pending = PendingEvents::default();
        for n in 0..300_000 {
            pending.push(link(n));
            pending.push(objects(n));
            pending.push(Invalidation::Everything);
            assert!(pending.links.len() <= MOST_LINKS && pending.objects.len() <= MOST_REPORTS);
        }
        let taken = pending.take();
        assert!(
            taken.len() <= 1 + MOST_LINKS && taken[0] == Invalidation::Everything,
            "{}",
            taken.len()
        );
        assert!(pending.is_empty() && pending.take().is_empty());
    }

    #[test]
    fn reports_are_kept_up_to_the_limit() {
        let mut pending = PendingEvents::default();
        let most = u32::try_from(MOST_REPORTS).unwrap();
        (0..most).for_each(|n| pending.push(objects(n)));
        assert!(!pending.everything && pending.objects.len() == MOST_REPORTS);
        pending.push(objects(most));
        assert_eq!(pending.take(), [Invalidation::Everything]);
    }

    #[test]
    fn few_events_are_kept_in_order() {
        let mut pending = PendingEvents::default();
        for n in 0..1000 {
            pending.push(link(n % 10));
            pending.push(objects(2 - n % 3));
        }
        assert!(!pending.is_empty());
        let taken = pending.take();
        assert_eq!(taken.len(), 10 + 1000);
        assert_eq!(taken[9..13], [link(9), objects(2), objects(1), objects(0)]);
    }

    #[test]
    fn too_many_links_invalidate_everything() {
        let mut pending = PendingEvents::default();
        let most = u32::try_from(MOST_LINKS).unwrap();
        (0..most).chain(0..most).for_each(|n| pending.push(link(n)));
        assert!(!pending.everything);
        pending.push(link(most));
        assert!(pending.everything && pending.take().contains(&link(7)));
    }
}
