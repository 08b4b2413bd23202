//! The survey reads a snapshot of the kernel and rebuilds the table from it.

use std::collections::BTreeSet;
use std::time::Duration;

use libc::EAGAIN;
use tokio::time::Instant;

use super::desired::is_put_last;
use super::new_peers::PlannedSlice;
use super::table::{Actual, Row};
use super::{Cause, Engine};
use crate::admission::RouteLookups;
use crate::nexthops::Ids;
use flannel_core::Kernel;
use flannel_core::kernel::{KernelError, NexthopBlock};
use flannel_core::object::{Change, Key, LinkName, Object, ObjectKind, ObjectSet};
use flannel_core::status::Damage;

/// The part of the kernel that only a snapshot can show.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
enum Unread {
    Nothing,
    /// There may be objects that are not desired. The desired objects are known.
    Additions,
    #[default]
    Everything,
}

/// The snapshots that were read so far.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Reads {
    pub(crate) done: u64,
    /// The number of reads, including failed reads. A read that only found a wrong link does not
    /// count, because the kernel may be deleting that link.
    pub(crate) tries: u32,
    /// The duration of the last read.
    pub(crate) took: Duration,
}

/// The result of the last snapshot, and the need for another one.
#[derive(Debug, Default)]
pub(crate) struct Survey {
    unread: Unread,
    /// The desired links that are absent. Objects cannot be put on them.
    pub(super) missing_links: BTreeSet<LinkName>,
    /// The links that were put since the last snapshot.
    pub(super) links_tried: BTreeSet<Key>,
    pub(crate) reads: Reads,
    /// Why the last read failed, or `None` if it succeeded.
    pub(crate) error: Option<KernelError>,
}

/// An object that is not as desired.
struct Wrong {
    desired: Object,
    /// The object in its place.
    actual: Option<Object>,
}

/// The differences between the desired objects and a snapshot.
struct Comparison<'a> {
    wrong: Vec<Wrong>,
    /// The objects that are not desired.
    unwanted: Vec<&'a Object>,
}

impl Survey {
    pub(crate) fn is_unread(&self) -> bool {
        self.unread > Unread::Nothing
    }

    pub(super) fn is_everything_unread(&self) -> bool {
        self.unread == Unread::Everything
    }

    pub(super) fn invalidate_additions(&mut self) {
        self.unread = self.unread.max(Unread::Additions);
    }

    pub(super) fn invalidate_everything(&mut self) {
        self.unread = Unread::Everything;
    }
}

impl Engine {
    /// Chooses the ids of nexthop objects, once: before the first snapshot, which depends on them.
    fn choose_ids(&mut self, kernel: &dyn Kernel) -> Result<(), KernelError> {
        if self.survey.reads.done > 0 {
            return Ok(());
        }
        let (block, there) = NexthopBlock::choose(kernel, &self.footprint)?;
        self.footprint.nexthops = block;
        self.desired.ids = block.filter(|_| there.usable).map(Ids::new);
        Ok(())
    }

    /// Reads the kernel. Returns `None` if it could not be read.
    fn snapshot(&mut self, kernel: &dyn Kernel) -> Option<ObjectSet> {
        let started = Instant::now();
        let actual = self.choose_ids(kernel).and_then(|()| kernel.snapshot(&self.footprint));
        let survey = &mut self.survey;
        survey.reads.took = started.elapsed();
        survey.error = actual.as_ref().err().cloned();
        if survey.error.is_some() {
            survey.reads.tries += 1;
            // The next attempt chooses the ids again, from the objects that then exist.
            if survey.reads.done == 0 {
                self.desired.ids = None;
            }
        }
        actual.ok()
    }

    /// Reads the kernel and rebuilds the table. Returns false if the kernel could not be read. If a
    /// link is not as desired, only such links get rows: once they are put, the kernel is to be
    /// read again.
    pub(super) fn read(&mut self, kernel: &dyn Kernel) -> bool {
        let Some(actual) = self.snapshot(kernel) else { return false };
        let first = self.survey.reads.done == 0;
        let tried = std::mem::take(&mut self.survey.links_tried);
        if self.finds_wrong_links(&actual, &tried, first) {
            self.survey.invalidate_everything();
            return true;
        }
        self.survey.unread = Unread::Nothing;
        self.survey.reads.done += 1;
        self.survey.reads.tries += 1;
        self.desired.adopt_ids(&actual, first);
        let mut comparison = self.compare(&actual);
        if self.has_queue() && !comparison.unwanted.is_empty() {
            // An object that no peer defines may be one that a lease in the queue will define.
            self.plan_queue(kernel, &actual);
            comparison = self.compare(&actual);
        }
        self.rebuild_table(comparison, &tried, first);
        // Usually each id belongs to a desired nexthop object.
        let nexthops = self.desired.counts.get(&ObjectKind::Nexthop).copied().unwrap_or(0);
        if self.desired.ids.as_ref().is_some_and(|ids| ids.len() != nexthops) {
            self.desired.release_ids(self.table.rows());
        }
        self.table.forget_failures_without_row();
        true
    }

    /// Gives rows to the objects that differ, and only to them. `tried` are the links that were put
    /// before the snapshot.
    fn rebuild_table(&mut self, comparison: Comparison<'_>, tried: &BTreeSet<Key>, first: bool) {
        let Comparison { wrong, unwanted } = comparison;
        let mut before = self.table.take_rows();
        let mut rows = Vec::with_capacity(wrong.len() + unwanted.len());
        for object in unwanted {
            let cause = if first { Cause::Lease(None) } else { Cause::Repair(Damage::Addition) };
            let key = object.key();
            let actual = Actual::Present(object.clone());
            rows.push((key, Row::after(before.get_mut(&key), actual, cause)));
        }
        for Wrong { desired, actual } in wrong {
            let key = desired.key();
            // A link that was put, and is not as desired, already has a row.
            if tried.contains(&key) {
                rows.extend(before.remove_entry(&key));
                continue;
            }
            let cause = cause_of_difference(actual.as_ref(), first);
            let is_stale = (first || !self.live) && actual.as_ref().is_some_and(is_put_last);
            let actual = match actual {
                Some(object) if is_stale && object != desired => Actual::Present(object),
                _ => Actual::Unknown,
            };
            rows.push((key, Row::after(before.get_mut(&key), actual, cause)));
        }
        // A snapshot has no record whose deletion was started, whether or not the deletion has
        // ended. The event about its end may be lost. So the record is deleted again, which starts
        // nothing twice.
        before.retain(|_, row| row.is_started() && matches!(row.actual, Actual::Present(_)));
        let again = before.into_iter().map(|(key, row)| (key, row.due()));
        self.table.fill(again.chain(rows));
    }

    /// Gives rows to the links that are not as desired. Returns true if one of them is not in
    /// `tried`. A link that the kernel accepted, and did not make, fails.
    fn finds_wrong_links(
        &mut self,
        actual: &ObjectSet,
        tried: &BTreeSet<Key>,
        first: bool,
    ) -> bool {
        let mut found = false;
        let table = &mut self.table;
        self.survey.missing_links.clear();
        for desired in self.desired.base.iter() {
            let Object::Link(link) = desired else { continue };
            let key = desired.key();
            let actual_link = actual.get(&key);
            if actual_link.is_none() {
                self.survey.missing_links.insert(link.name);
            }
            if actual_link == Some(desired) && !actual.is_inexact(&key) {
                continue;
            }
            let cause = cause_of_difference(actual_link, first);
            if !tried.contains(&key) {
                let mut before = table.remove(&key);
                table.insert(key, Row::after(before.as_mut(), Actual::Unknown, cause));
                found = true;
            } else if table.get(&key).is_none() {
                let now = actual_link.map_or_else(|| "absent".into(), ToString::to_string);
                let detail = format!("the kernel did not take it over: it is now {now}");
                let error = KernelError::explained(EAGAIN, detail);
                table.refuse(&Change::Put(desired.clone()), cause, None, None, error);
            }
        }
        found
    }

    /// Plans all leases in the queue. Their objects that `actual` lacks get rows.
    fn plan_queue(&mut self, kernel: &dyn Kernel, actual: &ObjectSet) {
        let lookups = RouteLookups::new(kernel);
        while let Some(PlannedSlice { changed, arrived }) = self.plan_slice(&lookups) {
            self.take_all(changed, Some(arrived), |key, object| {
                actual.get(key) == Some(object) && !actual.is_inexact(key)
            });
        }
        self.stale_lookups.note(lookups);
    }

    /// Compares all desired objects with a snapshot.
    fn compare<'a>(&self, actual: &'a ObjectSet) -> Comparison<'a> {
        let mut wrong = Vec::new();
        let mut is_wanted = vec![false; actual.len()];
        // The desired objects of one kind come in nearly the order of the snapshot. So the search
        // for one begins after the last one that was found.
        let mut next = [0; ObjectKind::ALL.len()];
        self.desired.each(|desired| {
            let near = &mut next[desired.kind() as usize];
            let found = actual.find_near(&desired, *near);
            *near = found.map_or(*near, |(n, _)| n + 1);
            match found {
                Some((n, None)) if !actual.is_inexact(&desired.key()) => is_wanted[n] = true,
                Some((n, other)) => {
                    is_wanted[n] = true;
                    // An inexact object is equal to the desired one, as far as it is represented.
                    let actual = Some(other.cloned().unwrap_or_else(|| desired.clone()));
                    wrong.push(Wrong { desired, actual });
                }
                None => wrong.push(Wrong { desired, actual: None }),
            }
        });
        let unwanted = actual.iter().zip(is_wanted).filter(|(_, is_wanted)| !is_wanted);
        Comparison { wrong, unwanted: unwanted.map(|(object, _)| object).collect() }
    }
}

/// The cause of a put of an object that is not as desired. `actual` is the object in its place. In
/// the `first` snapshot, which precedes all changes, the objects were left by an earlier run.
fn cause_of_difference(actual: Option<&Object>, first: bool) -> Cause {
    match actual {
        _ if first => Cause::Lease(None),
        Some(_) => Cause::Repair(Damage::Modification),
        None => Cause::Repair(Damage::Deletion),
    }
}
