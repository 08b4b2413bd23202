//! The table: one row for each object that is not known to be as desired.

use std::collections::BTreeMap;
use std::ops::RangeBounds;

use tokio::time::Instant;

use flannel_core::Subnets;
use flannel_core::kernel::{ChangedBy, KernelError};
use flannel_core::object::{Change, Key, Object};
use flannel_core::status::{Damage, Failure, SortedMap};

/// Why an object is put or deleted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Cause {
    /// Leases, with their arrival. `None`: a new answer to a lookup of a plan, or an earlier run.
    Lease(Option<Instant>),
    /// Another process seems to have done this to the object.
    Repair(Damage),
}

/// The object in the kernel.
#[derive(Debug)]
pub(super) enum Actual {
    /// Not known. The desired object is put over it.
    Unknown,
    /// This object, which is not desired: it is deleted.
    Present(Object),
    /// An object that may have to be deleted. Only a snapshot shows whether it is ours.
    Suspected,
}

/// The progress of a change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Progress {
    /// It is to be applied.
    Due,
    /// The kernel refused it. It is not tried again until [`Table::retry`].
    Refused,
    /// It was only started. Its end is an event.
    Started,
}

/// An object that is not known to be as desired.
#[derive(Debug)]
pub(super) struct Row {
    pub(super) actual: Actual,
    pub(super) cause: Cause,
    progress: Progress,
    /// The author in the last event about the object that named one.
    pub(super) changed_by: Option<Box<ChangedBy>>,
}

impl Row {
    pub(super) const fn new(actual: Actual, cause: Cause) -> Self {
        Self { actual, cause, progress: Progress::Due, changed_by: None }
    }

    /// The row that takes the place of `before`, if there is one: the first cause stays.
    pub(super) fn after(before: Option<&mut Self>, actual: Actual, cause: Cause) -> Self {
        let mut row = Self::new(actual, before.as_ref().map_or(cause, |row| row.cause));
        row.changed_by = before.and_then(|row| row.changed_by.take());
        row
    }

    /// The same row, with a change that is to be applied.
    pub(super) fn due(self) -> Self {
        Self { progress: Progress::Due, ..self }
    }

    /// The desired object is to be put.
    pub(super) fn is_put(&self) -> bool {
        self.progress == Progress::Due && matches!(self.actual, Actual::Unknown)
    }

    /// The object that is to be deleted.
    pub(super) fn deletion(&self) -> Option<&Object> {
        match &self.actual {
            Actual::Present(object) if self.progress == Progress::Due => Some(object),
            _ => None,
        }
    }

    pub(super) fn is_refused(&self) -> bool {
        self.progress == Progress::Refused
    }

    /// The desired object is to be put, or its put was started.
    pub(super) fn is_pending(&self) -> bool {
        self.progress != Progress::Refused && matches!(self.actual, Actual::Unknown)
    }

    /// The change was started.
    pub(super) fn is_started(&self) -> bool {
        self.progress == Progress::Started
    }
}

/// The numbers of rows by what they wait for.
#[derive(Debug, Clone, Copy, Default)]
struct Counts {
    puts: usize,
    deletions: usize,
    started: usize,
}

impl Counts {
    /// The counts of one row.
    fn of(row: &Row) -> Self {
        Self {
            puts: usize::from(row.is_put()),
            deletions: usize::from(row.deletion().is_some()),
            started: usize::from(row.is_started()),
        }
    }

    fn add(&mut self, row: &Row) {
        let Self { puts, deletions, started } = Self::of(row);
        self.puts += puts;
        self.deletions += deletions;
        self.started += started;
    }

    fn remove(&mut self, row: &Row) {
        let Self { puts, deletions, started } = Self::of(row);
        self.puts -= puts;
        self.deletions -= deletions;
        self.started -= started;
    }
}

/// The rows in the order of creation, and the errors of the kernel. An object without a row is as
/// desired, by all that the kernel has reported.
#[derive(Debug, Default)]
pub(crate) struct Table {
    rows: BTreeMap<Key, Row>,
    counts: Counts,
    /// Objects that fail, also while they are tried again.
    pub(super) failing: SortedMap<Key, Failure>,
    /// An object failed that did not fail when this was last reset.
    pub(crate) newly_failing: bool,
}

impl Table {
    pub(super) fn has_puts(&self) -> bool {
        self.counts.puts > 0
    }

    pub(super) fn has_deletions(&self) -> bool {
        self.counts.deletions > 0
    }

    pub(super) fn has_started(&self) -> bool {
        self.counts.started > 0
    }

    /// There are fewer than `most` rows whose change is not due: suspected additions, mostly.
    pub(super) fn has_room(&self, most: usize) -> bool {
        self.rows.len() < most + self.counts.puts + self.counts.deletions
    }

    pub(super) fn get(&self, key: &Key) -> Option<&Row> {
        self.rows.get(key)
    }

    /// The desired object with this key is to be put.
    pub(super) fn is_put(&self, key: &Key) -> bool {
        self.get(key).is_some_and(Row::is_put)
    }

    /// The objects that are to be put, in the order of creation.
    pub(super) fn puts(&self, range: impl RangeBounds<Key>) -> impl Iterator<Item = (&Key, &Row)> {
        let rows = self.has_puts().then(|| self.rows.range(range));
        rows.into_iter().flatten().filter(|(_, row)| row.is_put())
    }

    /// The objects that are to be deleted, in the order of deletion.
    pub(super) fn deletions(
        &self,
        range: impl RangeBounds<Key>,
    ) -> impl Iterator<Item = (&Key, &Object, Cause)> {
        let rows = self.has_deletions().then(|| self.rows.range(range).rev());
        let rows = rows.into_iter().flatten();
        rows.filter_map(|(key, row)| Some((key, row.deletion()?, row.cause)))
    }

    pub(super) fn insert(&mut self, key: Key, row: Row) {
        self.remove(&key);
        self.counts.add(&row);
        self.rows.insert(key, row);
    }

    pub(super) fn remove(&mut self, key: &Key) -> Option<Row> {
        let row = self.rows.remove(key)?;
        self.counts.remove(&row);
        Some(row)
    }

    /// Takes all rows. The failures stay until [`Table::keep_failing`].
    pub(super) fn take_rows(&mut self) -> BTreeMap<Key, Row> {
        self.counts = Counts::default();
        std::mem::take(&mut self.rows)
    }

    /// Fills the table after [`Table::take_rows`]. Of two rows with one key, the later one stays.
    pub(super) fn fill(&mut self, rows: impl Iterator<Item = (Key, Row)>) {
        self.rows = rows.collect();
        self.counts = Counts::default();
        self.rows.values().for_each(|row| self.counts.add(row));
    }

    pub(super) fn rows(&self) -> &BTreeMap<Key, Row> {
        &self.rows
    }

    /// Changes that the kernel refused are due again.
    pub(crate) fn retry(&mut self) {
        for row in self.rows.values_mut().filter(|row| row.is_refused()) {
            self.counts.remove(row);
            row.progress = Progress::Due;
            self.counts.add(row);
        }
    }

    /// The desired object with this key may have been damaged.
    pub(super) fn invalidate(&mut self, key: Key, damage: Damage, by: Option<ChangedBy>) {
        let before = self.remove(&key);
        let is_known = |row: &Row| row.is_refused() || row.is_pending();
        let cause = before.as_ref().filter(|row| is_known(row)).map(|row| row.cause);
        let mut row = Row::new(Actual::Unknown, cause.unwrap_or(Cause::Repair(damage)));
        row.changed_by = by.map(Box::new).or_else(|| before?.changed_by);
        self.insert(key, row);
    }

    /// Notes the author of an object that may have to be deleted.
    pub(super) fn suspect_addition(&mut self, key: Key, by: ChangedBy) {
        let addition = || Row::new(Actual::Suspected, Cause::Repair(Damage::Addition));
        let mut row = self.remove(&key).unwrap_or_else(addition);
        row.changed_by = Some(Box::new(by));
        self.insert(key, row);
    }

    /// The kernel refused a change that was due because of `cause`.
    pub(super) fn refuse(
        &mut self,
        change: &Change,
        cause: Cause,
        changed_by: Option<Box<ChangedBy>>,
        peer: Option<Subnets>,
        error: KernelError,
    ) {
        let key = change.object().key();
        let mut failure = Failure::new(change, peer, error);
        match self.failing.get(&key) {
            Some(before) => {
                failure.since = before.since;
                failure.tries = before.tries.saturating_add(1);
            }
            None => {
                self.newly_failing = true;
                tracing::debug!(%change, error = %failure.error, "the kernel refused");
            }
        }
        self.failing.insert(key, failure);
        self.hold(change, cause, changed_by, Progress::Refused);
    }

    /// Inserts the row of a change that is not due.
    pub(super) fn hold(
        &mut self,
        change: &Change,
        cause: Cause,
        changed_by: Option<Box<ChangedBy>>,
        progress: Progress,
    ) {
        let actual = match change {
            Change::Put(_) => Actual::Unknown,
            Change::Delete(object) => Actual::Present(object.clone()),
        };
        self.insert(change.object().key(), Row { actual, cause, progress, changed_by });
    }

    /// Forgets the failures of objects that are as desired.
    pub(super) fn keep_failing(&mut self) {
        let rows = &self.rows;
        self.failing.retain(|key| rows.contains_key(key));
    }
}
