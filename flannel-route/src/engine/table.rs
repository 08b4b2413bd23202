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
    /// Leases that arrived at this time. The time is `None` if a lookup of a plan has another
    /// result, or if an earlier run left the object.
    Lease(Option<Instant>),
    /// Another process seems to have done this to the object.
    Repair(Damage),
}

/// The object in the kernel.
#[derive(Debug)]
pub(super) enum Actual {
    /// It is not known. The desired object is put over it.
    Unknown,
    /// It is this object, which is not desired. It is to be deleted.
    Present(Object),
    /// It may have to be deleted. Only a snapshot shows whether it is ours.
    Suspected,
}

/// The progress of a change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Progress {
    /// It is to be applied.
    Due,
    /// The kernel refused it. It is not tried again until [`Table::retry`].
    Refused,
    /// A record keeper has started it, and reports its end as an event.
    Started,
}

/// An object that is not known to be as desired.
#[derive(Debug)]
pub(super) struct Row {
    pub(super) actual: Actual,
    pub(super) cause: Cause,
    progress: Progress,
    /// The author of the last change by another process, as far as an event has named one.
    pub(super) changed_by: Option<Box<ChangedBy>>,
}

impl Row {
    pub(super) const fn new(actual: Actual, cause: Cause) -> Self {
        Self { actual, cause, progress: Progress::Due, changed_by: None }
    }

    /// A row that replaces `before`. It keeps the cause and the author of that row, if there was
    /// one.
    pub(super) fn after(before: Option<&mut Self>, actual: Actual, cause: Cause) -> Self {
        let mut row = Self::new(actual, before.as_ref().map_or(cause, |row| row.cause));
        row.changed_by = before.and_then(|row| row.changed_by.take());
        row
    }

    /// Makes the change of the row due again.
    pub(super) fn due(self) -> Self {
        Self { progress: Progress::Due, ..self }
    }

    /// Whether the desired object is to be put.
    pub(super) fn is_put(&self) -> bool {
        self.progress == Progress::Due && matches!(self.actual, Actual::Unknown)
    }

    /// The object that is to be deleted, or `None` if no deletion is due.
    pub(super) fn deletion(&self) -> Option<&Object> {
        match &self.actual {
            Actual::Present(object) if self.progress == Progress::Due => Some(object),
            _ => None,
        }
    }

    /// Whether the kernel refused the change.
    pub(super) fn is_refused(&self) -> bool {
        self.progress == Progress::Refused
    }

    /// Whether the desired object is to be put, or its put was started.
    pub(super) fn is_pending(&self) -> bool {
        self.progress != Progress::Refused && matches!(self.actual, Actual::Unknown)
    }

    /// Whether the change was started.
    pub(super) fn is_started(&self) -> bool {
        self.progress == Progress::Started
    }
}

/// An object that is to be deleted.
pub(super) struct Deletion<'a> {
    pub(super) object: &'a Object,
    pub(super) cause: Cause,
}

/// The numbers of rows in each state that a loop asks for.
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

/// The rows in the order of creation, and the failures of their changes. An object without a row is
/// as desired, by all that the kernel has reported.
#[derive(Debug, Default)]
pub(crate) struct Table {
    rows: BTreeMap<Key, Row>,
    counts: Counts,
    /// The failures of refused changes, also while they are tried again. A failure is not a part of
    /// the row, because each status gets a copy of all failures: a copy of this map costs nothing,
    /// and two copies are compared at the cost of their differences. A failure also stays after a
    /// link was put and has no row, until a snapshot shows the link ([`Table::keep_failure`]).
    failures: SortedMap<Key, Failure>,
    /// Whether an object has failed that did not fail when this was last reset.
    pub(crate) newly_failing: bool,
}

impl Table {
    /// The failures of refused changes, also while they are tried again.
    pub(super) fn failures(&self) -> &SortedMap<Key, Failure> {
        &self.failures
    }

    /// Whether the kernel refused the last change of this object. It may be due again.
    pub(super) fn is_failing(&self, key: &Key) -> bool {
        self.failures.contains_key(key)
    }

    pub(super) fn has_puts(&self) -> bool {
        self.counts.puts > 0
    }

    pub(super) fn has_deletions(&self) -> bool {
        self.counts.deletions > 0
    }

    pub(super) fn has_started(&self) -> bool {
        self.counts.started > 0
    }

    /// Whether there are fewer than `most` rows whose change is not due. Most such rows are
    /// suspected additions.
    pub(super) fn has_room(&self, most: usize) -> bool {
        self.rows.len() < most + self.counts.puts + self.counts.deletions
    }

    pub(super) fn get(&self, key: &Key) -> Option<&Row> {
        self.rows.get(key)
    }

    /// Whether the desired object with this key is to be put.
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
    ) -> impl Iterator<Item = Deletion<'_>> {
        let rows = self.has_deletions().then(|| self.rows.range(range).rev());
        let rows = rows.into_iter().flatten();
        rows.filter_map(|(_, row)| Some(Deletion { object: row.deletion()?, cause: row.cause }))
    }

    /// Inserts a row, or replaces it. A failure stays.
    pub(super) fn insert(&mut self, key: Key, row: Row) {
        self.remove(&key);
        self.counts.add(&row);
        self.rows.insert(key, row);
    }

    /// Removes a row. A failure stays.
    pub(super) fn remove(&mut self, key: &Key) -> Option<Row> {
        let row = self.rows.remove(key)?;
        self.counts.remove(&row);
        Some(row)
    }

    /// Removes a row together with its failure.
    pub(super) fn forget(&mut self, key: &Key) -> Option<Row> {
        self.forget_failure(key);
        self.remove(key)
    }

    /// Forgets the failure of an object whose change has succeeded or is not wanted any more.
    pub(super) fn forget_failure(&mut self, key: &Key) {
        self.failures.remove(key);
    }

    /// Takes all rows. The failures stay until [`Table::forget_failures_without_row`].
    pub(super) fn take_rows(&mut self) -> BTreeMap<Key, Row> {
        self.counts = Counts::default();
        std::mem::take(&mut self.rows)
    }

    /// Fills the table after [`Table::take_rows`]. If two rows have one key, the later one stays.
    pub(super) fn fill(&mut self, rows: impl Iterator<Item = (Key, Row)>) {
        self.rows = rows.collect();
        self.counts = Counts::default();
        self.rows.values().for_each(|row| self.counts.add(row));
    }

    pub(super) fn rows(&self) -> &BTreeMap<Key, Row> {
        &self.rows
    }

    /// Makes the changes due again that the kernel refused.
    pub(crate) fn retry(&mut self) {
        for row in self.rows.values_mut().filter(|row| row.is_refused()) {
            self.counts.remove(row);
            row.progress = Progress::Due;
            self.counts.add(row);
        }
    }

    /// Marks the desired object with this key for a put, because another process may have damaged
    /// it.
    pub(super) fn invalidate(&mut self, key: Key, damage: Damage, by: Option<ChangedBy>) {
        let mut row = Row::new(Actual::Unknown, Cause::Repair(damage));
        if let Some(before) = self.remove(&key) {
            // The earlier cause of a put stays.
            if before.is_refused() || before.is_pending() {
                row.cause = before.cause;
            }
            row.changed_by = before.changed_by;
        }
        if let Some(by) = by {
            row.changed_by = Some(Box::new(by));
        }
        self.insert(key, row);
    }

    /// Notes the author of an object that may have to be deleted.
    pub(super) fn suspect_addition(&mut self, key: Key, by: ChangedBy) {
        let before = self.remove(&key);
        let mut row =
            before.unwrap_or_else(|| Row::new(Actual::Suspected, Cause::Repair(Damage::Addition)));
        row.changed_by = Some(Box::new(by));
        self.insert(key, row);
    }

    /// Notes that the kernel refused a change that was due because of `cause`.
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
        match self.failures.get(&key) {
            Some(before) => {
                failure.since = before.since;
                failure.tries = before.tries.saturating_add(1);
            }
            None => {
                self.newly_failing = true;
                tracing::debug!(%change, error = %failure.error, "the kernel refused");
            }
        }
        self.failures.insert(key, failure);
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

    /// Keeps a failure although the kernel has accepted the change: only a snapshot shows whether
    /// it made the change.
    pub(super) fn keep_failure(&mut self, key: Key, failure: Failure) {
        self.failures.insert(key, failure);
    }

    /// Forgets the failures of objects that a snapshot shows as desired.
    pub(super) fn forget_failures_without_row(&mut self) {
        let rows = &self.rows;
        self.failures.retain(|key| rows.contains_key(key));
    }
}
