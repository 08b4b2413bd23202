//! Logs the status of a network: a line for each of a few changes of a kind in a window of time,
//! and one line with the number of the others.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use flannel_core::Subnets;
use flannel_core::object::ObjectKind;
use flannel_core::runtime::or_never;
use flannel_core::status::{Damage, Repair, Status};
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};
use tracing::field::display;
use tracing::{info, warn};

use super::Ended;

/// The window in which at most [`LINES`] changes of a kind have a line each. While that is too few,
/// each window is six times as long as the last one, up to [`LONGEST`].
const WINDOW: Duration = Duration::from_secs(10);
const LONGEST: Duration = Duration::from_secs(3600);
/// The largest number of lines of a kind in a window. The other changes share a line at its end.
const LINES: usize = 5;
/// The shortest time between two lines about being in sync.
const SYNC_GAP: Duration = Duration::from_secs(1);

/// Logs syncs, refusals of the kernel, rejected leases, advisories and repairs.
pub(crate) struct StatusLogController {
    pub(crate) status: watch::Receiver<Arc<Status>>,
}

impl StatusLogController {
    /// Runs until it is dropped.
    pub(crate) async fn run(mut self) -> Ended {
        let mut log = StatusLog::default();
        loop {
            let now = Arc::clone(&self.status.borrow_and_update());
            for line in log.lines(&now, Instant::now()) {
                line.log();
            }
            tokio::select! {
                // If the network has stopped, its own controller reports that.
                Ok(()) = self.status.changed() => {}
                () = or_never(log.next().map(sleep_until)) => {}
            }
        }
    }
}

/// A line of the log.
#[derive(Debug, PartialEq, Eq)]
enum Line {
    InSync {
        peers: usize,
        objects: usize,
    },
    Unreadable {
        error: String,
    },
    /// `more` is the number of further refusals.
    Refused {
        change: String,
        error: String,
        more: usize,
    },
    Rejected {
        lease: Subnets,
        reason: String,
    },
    Accepted {
        lease: Subnets,
    },
    Advisory {
        warning: String,
    },
    Repaired(Box<Repair>),
    /// The changes of a kind that had no line of their own.
    More {
        count: u64,
        kinds: String,
        are_warnings: bool,
    },
}

/// A kind of changes whose lines are limited.
#[derive(Clone, Copy)]
struct ChangeKind {
    /// The name of several changes.
    names: &'static str,
    are_warnings: bool,
}

const REFUSALS: ChangeKind = ChangeKind { names: "refusals", are_warnings: true };
const REJECTED: ChangeKind = ChangeKind { names: "rejected leases", are_warnings: true };
const ACCEPTED: ChangeKind = ChangeKind { names: "leases accepted or gone", are_warnings: false };
const ADVISORIES: ChangeKind = ChangeKind { names: "warnings", are_warnings: true };

impl Line {
    fn log(&self) {
        const REFUSED: &str = "not in sync: the kernel refused a change";
        match self {
            Self::InSync { peers, objects } => info!(peers, objects, "in sync"),
            Self::Unreadable { error } => warn!(%error, "the kernel cannot be read or watched"),
            Self::Refused { change, error, more } => warn!(%change, %error, more, "{REFUSED}"),
            Self::Rejected { lease, reason } => warn!(%lease, %reason, "a lease is rejected"),
            Self::Accepted { lease } => info!(%lease, "a lease is no longer rejected, or gone"),
            Self::Advisory { warning } => warn!(%warning, "the network has a warning"),
            Self::Repaired(repair) => {
                let Repair { damage, object, peer, changed_by, .. } = &**repair;
                let lease = peer.map(display);
                let by = changed_by.as_ref().map(display);
                info!(%object, lease, %damage, by, "an object was repaired");
            }
            Self::More { count, kinds, are_warnings: true } => {
                warn!(count, %kinds, "more changes have no lines of their own");
            }
            Self::More { count, kinds, are_warnings: false } => {
                info!(count, %kinds, "more changes have no lines of their own");
            }
        }
    }
}

/// The lines that are to be logged.
#[derive(Default)]
struct StatusLog {
    /// The last status.
    logged: Arc<Status>,
    sync: InSync,
    refusals: Capped,
    rejected: Capped,
    accepted: Capped,
    advisories: Capped,
    repairs: Repairs,
}

impl StatusLog {
    /// The lines for a new status.
    fn lines(&mut self, now: &Arc<Status>, at: Instant) -> Vec<Line> {
        let logged = std::mem::replace(&mut self.logged, Arc::clone(now));
        let mut lines = Vec::new();
        lines.extend(self.sync.line(now, at));
        if let Some(error) = &now.kernel_error
            && logged.kernel_error.is_none()
        {
            lines.push(Line::Unreadable { error: error.to_string() });
        }
        let mut new = now
            .failing
            .changes_since(&logged.failing)
            .filter_map(|(_, then, now)| now.filter(|_| then.is_none()));
        let refused = new.next().map(|failure| Line::Refused {
            change: failure.change.to_string(),
            error: failure.error.to_string(),
            more: new.count(),
        });
        lines.extend(self.refusals.lines(at, REFUSALS, refused));
        let rejected =
            now.rejected.changes_since(&logged.rejected).filter_map(|(lease, _, why)| {
                Some(Line::Rejected { lease: *lease, reason: why?.to_string() })
            });
        lines.extend(self.rejected.lines(at, REJECTED, rejected));
        let accepted = now
            .rejected
            .changes_since(&logged.rejected)
            .filter(|(.., why)| why.is_none())
            .map(|(lease, ..)| Line::Accepted { lease: *lease });
        lines.extend(self.accepted.lines(at, ACCEPTED, accepted));
        let advisories = now
            .advisories
            .changes_since(&logged.advisories)
            .filter(|(.., now)| now.is_some())
            .map(|(warning, ..)| Line::Advisory { warning: warning.to_string() });
        lines.extend(self.advisories.lines(at, ADVISORIES, advisories));
        lines.extend(self.repairs.lines(now, &logged, at));
        lines
    }

    /// The time of the next line, if the status does not change until then.
    fn next(&self) -> Option<Instant> {
        let Self { refusals, rejected, accepted, advisories, repairs, .. } = self;
        let capped = [refusals, rejected, accepted, advisories, &repairs.capped];
        let ends = capped.into_iter().filter(|capped| capped.unlogged > 0);
        ends.filter_map(|capped| capped.end).chain(self.sync.later).min()
    }
}

/// The line about being in sync, again or with another number of peers.
#[derive(Default)]
struct InSync {
    /// The number of peers in the last line; `None` if the network has been out of sync after it.
    logged: Option<usize>,
    /// The time of the last line.
    at: Option<Instant>,
    /// The time of the next line, if the network is still in sync then.
    later: Option<Instant>,
}

impl InSync {
    fn line(&mut self, now: &Status, at: Instant) -> Option<Line> {
        self.later = None;
        if !now.in_sync {
            self.logged = None;
            return None;
        }
        if self.logged == Some(now.peers) {
            return None;
        }
        if let Some(later) = self.at.map(|last| last + SYNC_GAP).filter(|later| at < *later) {
            self.later = Some(later);
            return None;
        }
        self.logged = Some(now.peers);
        self.at = Some(at);
        Some(Line::InSync { peers: now.peers, objects: now.objects })
    }
}

/// Lines of one kind. A window has room for a few.
#[derive(Default)]
struct Capped {
    /// The end of the window; `None` before the first.
    end: Option<Instant>,
    length: Duration,
    lines: usize,
    unlogged: u64,
}

impl Capped {
    /// Begins a new window if the last one is over. Returns the number of changes without a line in
    /// the last one.
    fn turn(&mut self, at: Instant) -> Option<u64> {
        if self.end.is_some_and(|end| at < end) {
            return None;
        }
        let Self { length, unlogged, .. } = *self;
        let length = if unlogged > 0 { (6 * length).min(LONGEST) } else { WINDOW };
        *self = Self { end: Some(at + length), length, ..Self::default() };
        Some(unlogged)
    }

    /// Whether there is room for one more line, which is used.
    fn take(&mut self) -> bool {
        let room = self.lines < LINES;
        if room {
            self.lines += 1;
        } else {
            self.unlogged += 1;
        }
        room
    }

    /// The `new` lines that have room in the window. Before them, if changes of the last window had
    /// no line, a line with their number.
    fn lines(
        &mut self,
        at: Instant,
        kind: ChangeKind,
        new: impl IntoIterator<Item = Line>,
    ) -> Vec<Line> {
        let mut lines = Vec::new();
        if let Some(count @ 1..) = self.turn(at) {
            let ChangeKind { names, are_warnings } = kind;
            lines.push(Line::More { count, kinds: names.to_owned(), are_warnings });
        }
        lines.extend(new.into_iter().filter(|_| self.take()));
        lines
    }
}

/// Lines about repairs.
#[derive(Default)]
struct Repairs {
    capped: Capped,
    /// The numbers of repairs with a line, from the network's start.
    counts: BTreeMap<(ObjectKind, Damage), u64>,
}

impl Repairs {
    fn lines(&mut self, now: &Status, logged: &Status, at: Instant) -> Vec<Line> {
        let mut rest = None;
        if let Some(unlogged) = self.capped.turn(at) {
            if unlogged > 0 {
                let kinds = self.summary(logged);
                rest = Some(Line::More { count: unlogged, kinds, are_warnings: false });
            }
            self.counts = logged.repairs.clone();
        }
        let new = now.repaired.saturating_sub(logged.repaired);
        // A status lists the last repairs only.
        let listed = now.last_repairs.iter().filter(|repair| repair.number > logged.repaired);
        let mut lines = Vec::new();
        for repair in listed.take(LINES - self.capped.lines) {
            lines.push(Line::Repaired(Box::new(Repair::clone(repair))));
            *self.counts.entry((repair.object.key().kind(), repair.damage)).or_default() += 1;
        }
        self.capped.lines += lines.len();
        self.capped.unlogged += new - lines.len() as u64;
        rest.into_iter().chain(lines).collect()
    }

    /// `512 × route deleted, 3 × fdb changed`.
    fn summary(&self, now: &Status) -> String {
        let more = now.repairs.iter().filter_map(|(what, count)| {
            let more = count - self.counts.get(what).copied().unwrap_or(0);
            (more > 0).then(|| format!("{more} × {} {}", what.0, what.1))
        });
        more.collect::<Vec<_>>().join(", ")
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use flannel_core::object::{Neigh, Route, Via};
    use flannel_core::status::{Advisory, Rejection, Repair, SortedMap};

    use super::*;

    /// A status with `more` repairs than `before`, as a network would publish it.
    fn damaged(before: &Status, more: u64) -> Status {
        let mut status = before.clone();
        for _ in 0..more {
            status.repaired += 1;
            let route =
                Route { dst: "10.1.7.0/24".parse().unwrap(), via: Via::Blackhole, mtu: None };
            *status.repairs.entry((ObjectKind::Route, Damage::Deletion)).or_default() += 1;
            status.last_repairs.push(Arc::new(Repair::new(
                status.repaired,
                Damage::Deletion,
                route,
            )));
            if status.last_repairs.len() > Status::NEWEST_REPAIRS {
                status.last_repairs.remove(0);
            }
        }
        status
    }

    fn in_sync(peers: usize, objects: usize) -> Line {
        Line::InSync { peers, objects }
    }

    fn more(count: u64, kinds: &str, are_warnings: bool) -> Line {
        Line::More { count, kinds: kinds.to_owned(), are_warnings }
    }

    fn lease(n: u8) -> Subnets {
        format!("10.1.{n}.0-24").parse().unwrap()
    }

    #[test]
    fn many_rejections_and_advisories_are_logged_in_few_lines_and_counted() {
        let mut log = StatusLog::default();
        let start = Instant::now();
        let no = || Rejection::Rejected("no".into());
        let advisory = |n: u8| Advisory::OfLease { subnets: lease(n), advice: "x".into() };
        let mut status = Status::default();
        status.rejected = (0..200).map(|n| (lease(n), no())).collect();
        status.advisories = (0..200).map(|n| (advisory(n), ())).collect();
        let lines = log.lines(&Arc::new(status.clone()), start);
        let named = (0..5).map(|n| Line::Rejected { lease: lease(n), reason: no().to_string() });
        let advisories = (0..5).map(|n| Line::Advisory { warning: advisory(n).to_string() });
        assert_eq!(lines, named.chain(advisories).collect::<Vec<_>>());
        assert_eq!(log.next(), Some(start + WINDOW));
        status.rejected = SortedMap::default();
        let lines = log.lines(&Arc::new(status.clone()), start + SYNC_GAP);
        assert_eq!(lines.len(), LINES);
        let lines = log.lines(&Arc::new(status.clone()), start + WINDOW);
        let rest = [
            more(195, "rejected leases", true),
            more(195, "leases accepted or gone", false),
            more(195, "warnings", true),
        ];
        assert_eq!(lines, rest);
        assert_eq!(log.next(), None);
        // In the next window there is room again.
        status.rejected = [(lease(7), no())].into_iter().collect();
        assert_eq!(log.lines(&Arc::new(status), start + 5 * WINDOW).len(), 1);
    }

    #[test]
    fn being_in_sync_is_logged_at_most_once_a_second_and_after_the_last_change() {
        let mut log = StatusLog::default();
        let start = Instant::now();
        let mut logged = Vec::new();
        for ms in 0..10_000u64 {
            let peers = usize::try_from(ms).unwrap();
            let mut status = Status::default();
            status.in_sync = ms % 3 != 1;
            status.peers = peers;
            status.objects = 4 * peers;
            logged.extend(log.lines(&Arc::new(status), start + Duration::from_millis(ms)));
        }
        assert_eq!((logged.len(), &logged[0]), (10, &in_sync(0, 0)));
        let later = log.next().unwrap();
        assert!(later <= start + Duration::from_secs(11));
        let last = log.logged.clone();
        assert_eq!(log.lines(&last, later), [in_sync(9_999, 39_996)]);
        assert_eq!((log.next(), log.lines(&last, later + SYNC_GAP)), (None, vec![]));
    }

    #[test]
    fn many_repairs_are_logged_in_few_lines_and_counted() {
        let mut repairs = Repairs::default();
        let start = Instant::now();
        let mut logged = Status::default();
        let mut lines = Vec::new();
        for ms in 0..9_000 {
            let now = damaged(&logged, 3);
            lines.extend(repairs.lines(&now, &logged, start + Duration::from_millis(ms)));
            logged = now;
        }
        assert_eq!(lines.len(), LINES);
        let expected = "restored route blackhole 10.1.7.0/24, deleted by somebody that the kernel \
                        does not name";
        assert!(
            lines.iter().all(
                |line| matches!(line, Line::Repaired(repair) if repair.to_string() == expected)
            ),
            "{lines:?}"
        );
        assert!(repairs.capped.unlogged > 0, "the rest is logged at the end of the window");
        let last = repairs.lines(&logged, &logged, start + WINDOW + WINDOW);
        assert_eq!(last, [more(26995, "26995 × route deleted", false)]);
        assert_eq!(repairs.lines(&logged, &logged, start + 4 * WINDOW), []);
    }

    #[test]
    fn repairs_without_end_have_ever_fewer_lines() {
        let mut repairs = Repairs::default();
        let start = Instant::now();
        let mut logged = Status::default();
        let mut hours = [0; 3];
        for second in 0..3 * 3600u64 {
            let now = damaged(&logged, 1);
            let lines = repairs.lines(&now, &logged, start + Duration::from_secs(second));
            hours[second as usize / 3600] += lines.len();
            logged = now;
        }
        assert!(hours[0] <= 30 && hours[2] <= LINES + 1, "{hours:?}");
        // After a window without changes that had no line, it is as at first.
        let end = repairs.capped.end.unwrap();
        assert_eq!(repairs.lines(&logged, &logged, end).len(), 1);
        repairs.lines(&logged, &logged, end + LONGEST);
        assert_eq!(repairs.capped.end, Some(end + LONGEST + WINDOW));
    }

    #[test]
    fn the_summary_names_each_kind() {
        let mut repairs = Repairs::default();
        let start = Instant::now();
        let none = Status::default();
        let mut now = damaged(&none, 20);
        let mac = flannel_core::object::MacAddr::local([1; 6]);
        let neigh =
            Neigh { link: "flannel.1".parse().unwrap(), address: [10, 1, 7, 0].into(), mac };
        now.repaired += 1;
        now.repairs.insert((ObjectKind::Neigh, Damage::Modification), 1);
        now.last_repairs.push(Arc::new(Repair::new(now.repaired, Damage::Modification, neigh)));
        assert_eq!(repairs.lines(&now, &none, start).len(), LINES);
        let last = repairs.lines(&now, &now, start + WINDOW);
        assert_eq!(last, [more(16, "1 × neigh changed, 15 × route deleted", false)]);
    }
}
