//! The latest results of all paths.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, SystemTime};

use flannel_api::{Deployment, More, PathReport, PathState, PathsSummary, rounded, seconds};
use flannel_core::runtime::lock;
use flannel_core::status::Histogram;
use flannel_core::{Remedy, Subnet};
use tokio::sync::watch;
use tokio::time::Instant;

use crate::finding::{Check, Finding};
use crate::paths::agenda::Outcome;
use crate::paths::record::{Change, Details, PathId, Record};
use crate::paths::verdict::EchoReplies;
use crate::remedy::render;

/// If no node replies for this time, the fault is this host's underlay and not a node.
const NO_REPLY: Duration = Duration::from_secs(5);
/// The time after which a path that still fails is examined again.
const EXAMINE_AGAIN: Duration = Duration::from_secs(300);
/// The time after which a path is examined again that became narrower than its route.
const EXAMINE_NARROWER: Duration = Duration::from_secs(30);
/// The maximum number of lowered MTUs that a summary explains.
const MOST_LOWERED: usize = 5;

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
    /// The MTUs of all records that have one, as they were published.
    mtus: watch::Sender<Arc<BTreeMap<Subnet, u16>>>,
    /// Whether an MTU may have changed since.
    is_stale: bool,
}

impl Paths {
    /// No results. Each path is probed within `interval`.
    pub fn new(interval: Duration) -> Self {
        Self(Arc::new(Mutex::new(Table {
            interval,
            records: BTreeMap::new(),
            failing: BTreeSet::new(),
            round_trips: Histogram::default(),
            replied: None,
            error: None,
            mtus: watch::channel(Arc::default()).0,
            is_stale: false,
        })))
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        lock(&self.0)
    }

    /// The MTUs, in bytes, that routes to subnets of peers must have: larger packets are lost on
    /// the path. While a receiver exists, such a path is `mtu lowered`, and does not fail.
    pub fn mtus(&self) -> watch::Receiver<Arc<BTreeMap<Subnet, u16>>> {
        self.table().mtus.subscribe()
    }

    /// The numbers of paths. Takes O(n) for n paths.
    pub fn summary(&self) -> PathsSummary {
        let table = self.table();
        let mut states: BTreeMap<PathState, u64> = PathState::ALL.map(|state| (state, 0)).into();
        let mut oldest = Some(Duration::ZERO);
        for record in table.records.values() {
            *states.entry(table.state(record)).or_default() += 1;
            oldest = oldest.zip(record.probed).map(|(oldest, at)| oldest.max(at.elapsed()));
        }
        let lowered = states[&PathState::MtuLowered];
        PathsSummary {
            interval: rounded(table.interval),
            states,
            failing: (table.failing.len() as u64).saturating_sub(lowered),
            lowered: table
                .failing
                .iter()
                .filter_map(|id| table.lowered(id))
                .take(MOST_LOWERED)
                .collect(),
            oldest: oldest.map(rounded),
            error: table.error.clone(),
            more: More::new(),
        }
    }

    /// One report for each path: failing paths first, then those with lowered MTUs, then the
    /// longest round trips. Repairs are commands for the deployment.
    pub fn report(&self, deployment: Deployment) -> Vec<PathReport> {
        let now = SystemTime::now();
        let table = self.table();
        let mut records: Vec<_> = table.records.iter().collect();
        records.sort_by(|(_, a), (_, b)| {
            let works = |record: &Record| (record.fault.is_none(), record.is_lowered());
            works(a).cmp(&works(b)).then(b.round_trip.cmp(&a.round_trip))
        });
        records.into_iter().map(|(id, record)| table.path(id, record, now, deployment)).collect()
    }

    /// The round trips of all small echoes so far.
    pub fn round_trips(&self) -> Histogram {
        self.table().round_trips
    }

    pub(crate) fn fails_to_probe(&self, error: String) {
        self.table().error = Some(error);
    }

    /// Adds new paths.
    pub(crate) fn add(&self, ids: &[PathId]) {
        let new = ids.iter().map(|id| (*id, Record::default()));
        let mut table = self.table();
        if table.records.is_empty() {
            // A map that is built at once takes a third less memory.
            table.records = new.collect();
        } else {
            table.records.extend(new);
        }
    }

    /// The path after this one, and after the last one the first. `None` without paths.
    pub(crate) fn after(&self, id: Option<PathId>) -> Option<PathId> {
        let table = self.table();
        let rest = id.map(|id| table.records.range((Bound::Excluded(id), Bound::Unbounded)));
        let next = rest.and_then(|mut rest| rest.next());
        next.or_else(|| table.records.first_key_value()).map(|(id, _)| *id)
    }

    /// Forgets the results of a path, which is unknown now.
    pub(crate) fn reset(&self, id: &PathId, now: Instant) {
        let mut table = self.table();
        table.failing.remove(id);
        if let Some(record) = table.records.get_mut(id) {
            let new = Record { probed: Some(now), ..Record::default() };
            let before = std::mem::replace(record, new);
            table.is_stale |= before.mtu.is_some();
        }
    }

    pub(crate) fn contains(&self, id: &PathId) -> bool {
        self.table().records.contains_key(id)
    }

    pub(crate) fn remove(&self, id: &PathId) {
        let mut table = self.table();
        let before = table.records.remove(id);
        table.failing.remove(id);
        table.is_stale |= before.is_some_and(|record| record.mtu.is_some());
    }

    pub(crate) fn len(&self) -> usize {
        self.table().records.len()
    }

    /// When a path was probed last.
    pub(crate) fn probed(&self, id: &PathId) -> Option<Instant> {
        self.table().records.get(id)?.probed
    }

    /// A probe begins. Returns the lowered MTU of the route, if it has one.
    pub(crate) fn begin(&self, id: &PathId, now: Instant) -> Option<u16> {
        let mut table = self.table();
        let record = table.records.get_mut(id)?;
        record.probed = Some(now);
        record.mtu
    }

    /// Takes in the answers to a probe. `None` if the path is gone.
    pub(crate) fn record(
        &self,
        id: &PathId,
        answers: &EchoReplies,
        now: Instant,
    ) -> Option<(Outcome, Option<Change>)> {
        let mut table = self.table();
        let record = table.records.get_mut(id)?;
        let before = record.mtu;
        let (outcome, change) = record.record(answers);
        let is_other = record.mtu != before;
        table.is_stale |= is_other;
        if let Some(took) = answers.round_trip() {
            table.round_trips.record(took);
        }
        if answers.has_reply() {
            table.replied = Some(now);
        }
        match change {
            Some(Change::Fails) => _ = table.failing.insert(*id),
            Some(Change::Works) => _ = table.failing.remove(id),
            Some(Change::Lowered) | None => {}
        }
        Some((outcome, change))
    }

    /// The failing path to examine next: of those that are due, one that was never examined, or the
    /// longest ago.
    pub(crate) fn to_examine(&self, now: Instant) -> Option<PathId> {
        let mut table = self.table();
        // `None` is the least.
        let (_, id) = table
            .failing
            .iter()
            .filter_map(|id| {
                let record = table.records.get(id)?;
                let examined = record.fault.as_ref()?.examined;
                let pause = if record.is_narrower() { EXAMINE_NARROWER } else { EXAMINE_AGAIN };
                let is_due = examined.is_none_or(|at| now.duration_since(at) >= pause);
                is_due.then_some((examined, *id))
            })
            .min()?;
        table.records.get_mut(&id)?.fault.as_mut()?.examined = Some(now);
        Some(id)
    }

    /// Takes in the result of an examination. `one_way`: packets through the tunnel arrive there.
    pub(crate) fn examined(&self, id: &PathId, one_way: bool, details: Details) -> Option<Change> {
        let mut table = self.table();
        let lowers = table.mtus.receiver_count() > 0;
        let record = table.records.get_mut(id)?;
        let change = record.examined(id.family, one_way, details, lowers);
        // It may also have lost its MTU.
        table.is_stale |= lowers;
        change
    }

    /// Publishes the MTUs of routes, after many paths may have changed.
    pub(crate) fn publish(&self) {
        self.table().publish();
    }

    /// The state of a path.
    pub(crate) fn state(&self, id: &PathId) -> PathState {
        let table = self.table();
        table.records.get(id).map_or(PathState::Unknown, |record| table.state(record))
    }
}

impl Table {
    fn state(&self, record: &Record) -> PathState {
        match &record.fault {
            Some(_) if record.is_lowered() => PathState::MtuLowered,
            Some(failing) => failing.fault.state(self.any_reply()),
            None if record.has_replied => PathState::Ok,
            None => PathState::Unknown,
        }
    }

    /// Whether a node replies, or there is only one, whose silence tells nothing about others.
    fn any_reply(&self) -> bool {
        let mut peers = self.records.keys().map(|id| id.peer);
        let first = peers.next();
        let single = !peers.any(|peer| Some(peer) != first);
        single || self.replied.is_some_and(|at| at.elapsed() < NO_REPLY)
    }

    /// Publishes the MTUs of routes, if one may have changed. Takes O(n) for n paths then.
    fn publish(&mut self) {
        if !std::mem::take(&mut self.is_stale) {
            return;
        }
        let mtus: BTreeMap<Subnet, u16> = self
            .records
            .iter()
            .filter_map(|(id, record)| Some((id.peer.family(id.family)?, record.mtu?)))
            .collect();
        self.mtus.send_if_modified(|before| {
            let differs = **before != mtus;
            *before = Arc::new(mtus);
            differs
        });
    }

    /// Why the route of a path has an MTU. `None` if its MTU is not lowered, or if the path fails.
    fn lowered(&self, id: &PathId) -> Option<String> {
        let record = self.records.get(id).filter(|record| record.is_lowered())?;
        let mtu = record.mtu?;
        let subnet = id.peer.family(id.family)?;
        Some(format!(
            "packets of more than {mtu} bytes are lost on the path to {subnet}: its route has mtu \
             {mtu}"
        ))
    }

    fn path(
        &self,
        id: &PathId,
        record: &Record,
        now: SystemTime,
        deployment: Deployment,
    ) -> PathReport {
        let failing = record.fault.as_deref();
        let details = failing.and_then(|failing| failing.details.as_ref());
        let state = self.state(record);
        let (text, remedy) = match self.lowered(id) {
            Some(text) => (Some(text), None),
            None => {
                let finding = details.and_then(|details| details.finding.as_ref());
                explanation(finding, state).unzip()
            }
        };
        PathReport {
            key: id.peer.to_string(),
            family: id.family.to_string(),
            state,
            since: failing.map(|failing| seconds(failing.since)),
            probed: record.probed.and_then(|at| now.checked_sub(at.elapsed())).map(seconds),
            round_trip: record.round_trip.map(|micros| f64::from(micros.get()) / 1e6),
            passes: record.mtu.or_else(|| details.and_then(|details| details.passes)),
            mtu: record.mtu,
            text,
            repair: remedy.flatten().map(|remedy| render(&remedy, deployment)),
            more: More::new(),
        }
    }
}

/// The text about a failing path by the finding of its examination, and the remedy.
fn explanation(finding: Option<&Finding>, state: PathState) -> Option<(String, Option<Remedy>)> {
    let finding = finding?;
    // The examination of one path does not know that no other node replies either.
    if finding.check == Check::Peer && state == PathState::UnderlayDown {
        let text = "no node replies: the network of this host may be broken";
        return Some((text.to_owned(), Some(Remedy::ExamineNode)));
    }
    Some((finding.text.clone(), finding.remedy.clone()))
}

#[cfg(test)]
mod tests {
    use crate::inputs::echo::EchoResult;
    use flannel_core::address::Family;

    use super::*;

    const FOUR: &str = "10.1.7.0/24";

    fn id(family: Family) -> PathId {
        PathId { peer: "10.1.7.0-24&fd00:1:0:7::-64".parse().unwrap(), family }
    }

    fn probe(paths: &Paths, family: Family, full: bool) {
        let reply = || EchoResult::Reply(Duration::from_millis(1));
        let full = if full { reply() } else { EchoResult::Nothing };
        let answers = EchoReplies { small: reply(), full, public: None, lowered: None };
        paths.record(&id(family), &answers, Instant::now()).unwrap();
    }

    /// The paths to a peer, which lose packets of full size.
    fn lossy() -> Paths {
        let paths = Paths::new(Duration::from_secs(300));
        for family in Family::BOTH {
            paths.add(&[id(family)]);
            (0..3).for_each(|_| probe(&paths, family, false));
        }
        paths
    }

    fn examine(paths: &Paths, family: Family, passes: Option<u16>) -> Option<Change> {
        paths.examined(&id(family), false, Details { passes, finding: None })
    }

    fn states(paths: &Paths) -> Vec<(PathState, Option<u16>)> {
        paths.report(Deployment::Systemd).into_iter().map(|path| (path.state, path.mtu)).collect()
    }

    #[test]
    fn the_mtu_that_passes_is_published_and_the_path_does_not_fail() {
        let paths = lossy();
        examine(&paths, Family::V4, Some(1350));
        let lost = || (PathState::FullSizeLost, None);
        assert_eq!(states(&paths), [lost(), lost()], "nobody lowers the MTUs of routes");
        let mut mtus = paths.mtus();
        let mut published = || {
            paths.publish();
            let changed = mtus.has_changed().unwrap();
            let mtus = mtus.borrow_and_update();
            let text: Vec<_> = mtus.iter().map(|(dst, mtu)| format!("{dst} {mtu}")).collect();
            (changed, text.join(", "))
        };
        assert_eq!(examine(&paths, Family::V4, Some(1350)), Some(Change::Lowered));
        assert_eq!(published(), (true, format!("{FOUR} 1350")));
        assert_eq!(states(&paths), [lost(), (PathState::MtuLowered, Some(1350))]);
        let summary = paths.summary();
        assert_eq!((summary.failing, summary.states[&PathState::MtuLowered]), (1, 1));
        let why = format!(
            "packets of more than 1350 bytes are lost on the path to {FOUR}: its route has mtu 1350"
        );
        assert_eq!(summary.lowered, std::slice::from_ref(&why));
        let report = &paths.report(Deployment::Systemd)[1];
        assert_eq!((report.text.as_ref(), report.passes), (Some(&why), Some(1350)));
        // Another size, and an examination that did not find one.
        assert_eq!(examine(&paths, Family::V4, Some(1400)), Some(Change::Lowered));
        assert_eq!(examine(&paths, Family::V4, None), None);
        assert_eq!(published(), (true, format!("{FOUR} 1400")));
        assert_eq!(examine(&paths, Family::V4, Some(1400)), None);
        assert_eq!(published(), (false, format!("{FOUR} 1400")));
        // Too few bytes for the family.
        assert_eq!(examine(&paths, Family::V6, Some(1279)), None);
        assert_eq!(examine(&paths, Family::V4, Some(575)), Some(Change::Fails));
        assert_eq!((published(), states(&paths)), ((true, String::new()), vec![lost(), lost()]));
        examine(&paths, Family::V6, Some(1280));
        examine(&paths, Family::V4, Some(576));
        assert_eq!(published(), (true, format!("{FOUR} 576, fd00:1:0:7::/64 1280")));
        // Full size passes again.
        (0..3).for_each(|_| probe(&paths, Family::V4, true));
        assert_eq!(published(), (true, "fd00:1:0:7::/64 1280".to_owned()));
        paths.reset(&id(Family::V6), Instant::now());
        assert_eq!(published(), (true, String::new()), "another node may have the lease");
        assert_eq!(paths.summary().failing, 0);
    }

    #[test]
    fn turns_go_round_whichever_paths_are_removed() {
        let paths = Paths::new(Duration::from_secs(300));
        assert_eq!(paths.after(None), None);
        let ids = [3, 1, 2, 4].map(|n| PathId {
            peer: format!("10.1.{n}.0-24").parse().unwrap(),
            family: Family::V4,
        });
        paths.add(&ids);
        let [three, one, two, four] = ids;
        let round = |first| std::iter::successors(paths.after(first), |id| paths.after(Some(*id)));
        assert!(round(None).take(5).eq([one, two, three, four, one]));
        paths.remove(&two);
        paths.remove(&four);
        assert!(round(Some(two)).take(3).eq([three, one, three]));
        assert_eq!(paths.after(Some(four)), Some(one));
    }

    #[test]
    fn a_path_that_is_gone_has_no_mtu() {
        let paths = lossy();
        let family = Family::V4;
        let mtus = paths.mtus();
        examine(&paths, family, Some(1350));
        paths.publish();
        assert_eq!(mtus.borrow().len(), 1);
        paths.remove(&id(family));
        paths.publish();
        assert_eq!(mtus.borrow().len(), 0);
    }
}
