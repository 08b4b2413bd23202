//! The latest results of all paths.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use flannel_api::{PathReport, PathsSummary, rounded, seconds};
use flannel_core::status::Histogram;
use tokio::time::Instant;

use crate::agenda::Outcome;
use crate::record::{Change, Details, PathId, Record};
use crate::verdict::{Answers, Fault};

/// If no node replies for this time, the fault is this host's underlay and not a node.
const NO_REPLY: Duration = Duration::from_secs(5);
/// The time after which a path that still fails is examined again.
const EXAMINE_AGAIN: Duration = Duration::from_secs(300);
const OK: &str = "ok";
const UNKNOWN: &str = "unknown";

/// The latest results of all paths. Clones share them.
#[derive(Debug, Clone)]
pub struct Paths(Arc<Mutex<Table>>);

#[derive(Debug)]
struct Table {
    interval: Duration,
    records: BTreeMap<PathId, Record>,
    failing: BTreeSet<PathId>,
    round_trips: Histogram,
    /// When a node replied last.
    replied: Option<Instant>,
    error: Option<String>,
}

impl Paths {
    /// No results. Each path is probed within `interval`.
    pub fn new(interval: Duration) -> Self {
        let (records, failing, round_trips, replied, error) = Default::default();
        Self(Arc::new(Mutex::new(Table {
            interval,
            records,
            failing,
            round_trips,
            replied,
            error,
        })))
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The numbers of paths. Takes O(n) for n paths.
    pub fn summary(&self) -> PathsSummary {
        let table = self.table();
        let all = [OK, UNKNOWN].into_iter().chain(Fault::NAMES);
        let mut states: BTreeMap<String, u64> = all.map(|state| (state.to_owned(), 0)).collect();
        let mut oldest = Some(Duration::ZERO);
        for record in table.records.values() {
            *states.entry(table.state(record).to_owned()).or_default() += 1;
            oldest = oldest.zip(record.probed).map(|(oldest, at)| oldest.max(at.elapsed()));
        }
        PathsSummary {
            interval: rounded(table.interval),
            states,
            failing: table.failing.len() as u64,
            oldest: oldest.map(rounded),
            error: table.error.clone(),
        }
    }

    /// One report for each path: failing paths first, then the longest round trips.
    pub fn report(&self) -> Vec<PathReport> {
        let (now, table) = (SystemTime::now(), self.table());
        let mut records: Vec<_> = table.records.iter().collect();
        records.sort_by(|(_, a), (_, b)| {
            let works = |record: &Record| record.fault.is_none();
            works(a).cmp(&works(b)).then(b.round_trip.cmp(&a.round_trip))
        });
        records.into_iter().map(|(id, record)| table.path(id, record, now)).collect()
    }

    /// The round trips of all small echoes so far.
    pub fn round_trips(&self) -> Histogram {
        self.table().round_trips
    }

    pub(crate) fn fails_to_probe(&self, error: String) {
        self.table().error = Some(error);
    }

    /// Adds a path. Returns whether it is new.
    pub(crate) fn add(&self, id: PathId) -> bool {
        let mut table = self.table();
        let before = table.records.len();
        table.records.entry(id).or_default();
        table.records.len() > before
    }

    /// Forgets the results of a path, which is unknown now.
    pub(crate) fn reset(&self, id: &PathId, now: Instant) {
        let mut table = self.table();
        table.failing.remove(id);
        if let Some(record) = table.records.get_mut(id) {
            *record = Record { probed: Some(now), ..Record::default() };
        }
    }

    pub(crate) fn contains(&self, id: &PathId) -> bool {
        self.table().records.contains_key(id)
    }

    pub(crate) fn remove(&self, id: &PathId) {
        let mut table = self.table();
        table.records.remove(id);
        table.failing.remove(id);
    }

    pub(crate) fn len(&self) -> usize {
        self.table().records.len()
    }

    /// When a path was probed last.
    pub(crate) fn probed(&self, id: &PathId) -> Option<Instant> {
        self.table().records.get(id)?.probed
    }

    pub(crate) fn begin(&self, id: &PathId, now: Instant) {
        if let Some(record) = self.table().records.get_mut(id) {
            record.probed = Some(now);
        }
    }

    /// Takes in the answers to a probe. `None`: the path is gone.
    pub(crate) fn record(
        &self,
        id: &PathId,
        answers: &Answers,
        now: Instant,
    ) -> Option<(Outcome, Option<Change>)> {
        let mut table = self.table();
        let (outcome, change) = table.records.get_mut(id)?.record(answers);
        if let Some(took) = answers.round_trip() {
            table.round_trips.record(took);
        }
        if answers.has_reply() {
            table.replied = Some(now);
        }
        match change {
            Some(Change::Fails) => _ = table.failing.insert(*id),
            Some(Change::Works) => _ = table.failing.remove(id),
            None => {}
        }
        Some((outcome, change))
    }

    /// The failing path to examine next: one that was never examined, or the longest ago.
    pub(crate) fn to_examine(&self, now: Instant) -> Option<PathId> {
        let mut table = self.table();
        let examined = |id: &PathId| Some((table.records.get(id)?.fault.as_ref()?.examined, *id));
        // `None` is the least.
        let (at, id) = table.failing.iter().filter_map(examined).min()?;
        if at.is_some_and(|at| now - at < EXAMINE_AGAIN) {
            return None;
        }
        table.records.get_mut(&id)?.fault.as_mut()?.examined = Some(now);
        Some(id)
    }

    /// Takes in the result of an examination. `one_way`: packets through the tunnel arrive there.
    pub(crate) fn examined(&self, id: &PathId, one_way: bool, details: Details) {
        let mut table = self.table();
        // It may work again.
        let Some(failing) = table.records.get_mut(id).and_then(|record| record.fault.as_mut())
        else {
            return;
        };
        match failing.fault {
            Fault::TunnelBlocked if one_way => failing.fault = Fault::OneWay,
            Fault::OneWay if !one_way => failing.fault = Fault::TunnelBlocked,
            _ => {}
        }
        failing.details = Some(details);
    }

    /// The state of a path.
    pub(crate) fn state(&self, id: &PathId) -> &'static str {
        let table = self.table();
        table.records.get(id).map_or(UNKNOWN, |record| table.state(record))
    }
}

impl Table {
    fn state(&self, record: &Record) -> &'static str {
        match &record.fault {
            Some(failing) => failing.fault.name(self.any_reply()),
            None if record.has_replied => OK,
            None => UNKNOWN,
        }
    }

    /// Whether a node replies, or there is only one, whose silence tells nothing about others.
    fn any_reply(&self) -> bool {
        let mut peers = self.records.keys().map(|id| id.peer);
        let first = peers.next();
        let single = !peers.any(|peer| Some(peer) != first);
        single || self.replied.is_some_and(|at| at.elapsed() < NO_REPLY)
    }

    fn path(&self, id: &PathId, record: &Record, now: SystemTime) -> PathReport {
        let failing = record.fault.as_deref();
        let details = failing.and_then(|failing| failing.details.as_ref());
        let finding = details.and_then(|details| details.finding.as_ref());
        PathReport {
            key: id.peer.to_string(),
            family: id.family.to_string(),
            state: self.state(record).to_owned(),
            since: failing.map(|failing| seconds(failing.since)),
            probed: record.probed.and_then(|at| now.checked_sub(at.elapsed())).map(seconds),
            round_trip: record.round_trip.map(|took| (took.as_secs_f64() * 1e6).round() / 1e6),
            passes: details.and_then(|details| details.passes),
            text: finding.map(|finding| finding.text.clone()),
            repair: finding.and_then(|finding| finding.repair.clone()),
        }
    }
}
