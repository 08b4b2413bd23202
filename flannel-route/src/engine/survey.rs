//! The survey: reads a snapshot of the kernel and rebuilds the table from it.

use std::collections::BTreeSet;
use std::time::Duration;

use libc::EAGAIN;
use tokio::time::Instant;

use super::desired::is_put_last;
use super::table::{Actual, Row};
use super::{Cause, Engine};
use crate::admission::Answers;
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
    /// Including failed reads, but not reads that only found a wrong link (it may be in deletion).
    pub(crate) tries: u32,
    /// The time of the last one.
    pub(crate) took: Duration,
}

/// The result of the last snapshot, and the need for another one.
#[derive(Debug, Default)]
pub(crate) struct Survey {
    unread: Unread,
    /// Desired links that are absent: no object can be put on them.
    pub(super) missing_links: BTreeSet<LinkName>,
    /// The links that were put since the last snapshot.
    pub(super) links_tried: BTreeSet<Key>,
    pub(crate) reads: Reads,
    /// Why the kernel could not be read.
    pub(crate) error: Option<KernelError>,
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

    /// Reads the kernel; `None` if it could not be read.
    fn snapshot(&mut self, kernel: &dyn Kernel) -> Option<ObjectSet> {
        let started = Instant::now();
        let actual = self.choose_ids(kernel).and_then(|()| kernel.snapshot(&self.footprint));
        let survey = &mut self.survey;
        survey.reads.took = started.elapsed();
        survey.error = actual.as_ref().err().cloned();
        if survey.error.is_some() {
            survey.reads.tries += 1;
            // The next attempt chooses them again, from the objects that then exist.
            if survey.reads.done == 0 {
                self.desired.ids = None;
            }
        }
        actual.ok()
    }

    /// Reads the kernel and rebuilds the table; false if it could not be read. If a link is not as
    /// desired, only such links get rows: once they are put, the kernel is to be read again.
    pub(super) fn read(&mut self, kernel: &dyn Kernel) -> bool {
        let Some(actual) = self.snapshot(kernel) else { return false };
        // Objects that exist before the first change are those of an earlier run.
        let first = self.survey.reads.done == 0;
        let tried = std::mem::take(&mut self.survey.links_tried);
        let cause = |is: Option<&Object>| match is {
            _ if first => Cause::Lease(None),
            Some(_) => Cause::Repair(Damage::Modification),
            None => Cause::Repair(Damage::Deletion),
        };
        if self.finds_wrong_links(&actual, &tried, cause) {
            self.survey.invalidate_everything();
            return true;
        }
        self.survey.unread = Unread::Nothing;
        self.survey.reads.done += 1;
        self.survey.reads.tries += 1;
        self.desired.adopt_ids(&actual, first);
        let (mut wrong, mut unwanted) = self.compare(&actual);
        if self.has_queue() && !unwanted.is_empty() {
            // An object that no peer defines may be one that a lease in the queue will define.
            self.plan_queue(kernel, &actual);
            (wrong, unwanted) = self.compare(&actual);
        }
        let mut before = self.table.take_rows();
        let mut rows = Vec::with_capacity(wrong.len() + unwanted.len());
        for object in unwanted {
            let addition = if first { cause(None) } else { Cause::Repair(Damage::Addition) };
            let (key, is) = (object.key(), Actual::Present(object.clone()));
            rows.push((key, Row::after(before.get_mut(&key), is, addition)));
        }
        for (want, is) in wrong {
            let key = want.key();
            // A link that was put, and is not as desired, already has a row.
            if tried.contains(&key) {
                rows.extend(before.remove_entry(&key));
                continue;
            }
            let because = cause(is.as_ref());
            let is_stale = (first || !self.live) && is.as_ref().is_some_and(is_put_last);
            let actual = match is {
                Some(is) if is_stale && is != want => Actual::Present(is),
                _ => Actual::Unknown,
            };
            rows.push((key, Row::after(before.get_mut(&key), actual, because)));
        }
        // A record whose deletion is under way is in no snapshot. Neither is one whose deletion has
        // ended, and the event may be lost. So it is deleted again, which begins nothing twice.
        before.retain(|_, row| row.is_started() && matches!(row.actual, Actual::Present(_)));
        let again = |(key, row): (Key, Row)| (key, row.due());
        self.table.fill(before.into_iter().map(again).chain(rows));
        // Usually each id is that of a desired nexthop object.
        let nexthops = self.desired.counts.get(&ObjectKind::Nexthop).copied().unwrap_or(0);
        if self.desired.ids.as_ref().is_some_and(|ids| ids.len() != nexthops) {
            self.desired.release_ids(self.table.rows());
        }
        self.table.keep_failing();
        true
    }

    /// Gives rows to the links that are not as desired; true if one was not `tried`. A link that
    /// the kernel accepted, and did not make, fails.
    fn finds_wrong_links(
        &mut self,
        actual: &ObjectSet,
        tried: &BTreeSet<Key>,
        cause: impl Fn(Option<&Object>) -> Cause,
    ) -> bool {
        let (mut found, table) = (false, &mut self.table);
        self.survey.missing_links.clear();
        for want in self.desired.base.iter() {
            let Object::Link(link) = want else { continue };
            let (key, is) = (want.key(), actual.get(&want.key()));
            if is.is_none() {
                self.survey.missing_links.insert(link.name);
            }
            if is == Some(want) && !actual.is_inexact(&key) {
                continue;
            }
            if !tried.contains(&key) {
                let mut before = table.remove(&key);
                table.insert(key, Row::after(before.as_mut(), Actual::Unknown, cause(is)));
                found = true;
            } else if table.get(&key).is_none() {
                let now = is.map_or_else(|| "absent".into(), |is| is.to_string());
                let detail = format!("the kernel did not take it over: it is now {now}");
                let error = KernelError::explained(EAGAIN, detail);
                table.refuse(&Change::Put(want.clone()), cause(is), None, None, error);
            }
        }
        found
    }

    /// Plans all leases in the queue. Their objects that `actual` lacks get rows.
    fn plan_queue(&mut self, kernel: &dyn Kernel, actual: &ObjectSet) {
        let answers = Answers::new(kernel);
        while let Some((changed, arrived)) = self.plan_slice(&answers) {
            self.take_all(changed, Some(arrived), |key, object| {
                actual.get(key) == Some(object) && !actual.is_inexact(key)
            });
        }
        self.lookups.note(answers);
    }

    /// Compares all desired objects with `actual`: those that are wrong, with the objects in their
    /// place, and the objects that are not desired.
    fn compare<'a>(
        &self,
        actual: &'a ObjectSet,
    ) -> (Vec<(Object, Option<Object>)>, Vec<&'a Object>) {
        let (mut wrong, mut is_wanted) = (Vec::new(), vec![false; actual.len()]);
        // Objects of one kind are desired in nearly the order in which they are read.
        let mut next = [0; ObjectKind::ALL.len()];
        self.desired.each(|want| {
            let near = &mut next[want.kind() as usize];
            let found = actual.find_near(&want, *near);
            *near = found.map_or(*near, |(n, _)| n + 1);
            match found {
                Some((n, None)) if !actual.is_inexact(&want.key()) => is_wanted[n] = true,
                Some((n, is)) => {
                    is_wanted[n] = true;
                    wrong.push((want.clone(), Some(is.cloned().unwrap_or(want))));
                }
                None => wrong.push((want, None)),
            }
        });
        let unwanted = actual.iter().zip(is_wanted).filter(|(_, is_wanted)| !is_wanted);
        (wrong, unwanted.map(|(object, _)| object).collect())
    }
}
