//! What a network's status says, as log lines. The one thing to know: one line per change of state, but of each kind only
//! so many at a time and the rest as a number, because whoever breaks things may do so a thousand times a second, and to
//! thousands of peers at once.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use flannel_core::kernel::KernelError;
use flannel_core::object::ObjectKind;
use flannel_core::status::{Damage, Failure, Status};
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};

/// In this time …
const WINDOW: Duration = Duration::from_secs(10);
/// … at most this many repairs, leases or remarks have a line each; the others share one at its end.
const LINES: usize = 5;
/// Being in sync is said at most this often.
const SYNC_GAP: Duration = Duration::from_secs(1);

/// One line per change of state: in sync or not and why, each lease that is not believed, each remark; and the repairs.
pub(crate) async fn log_status(mut status: watch::Receiver<Arc<Status>>) -> Infallible {
    let mut teller = Teller::default();
    loop {
        let now = Arc::clone(&status.borrow_and_update());
        for line in teller.lines(&now, Instant::now()) {
            match line {
                Line::Info(text) => tracing::info!("{text}"),
                Line::Warn(text) => tracing::warn!("{text}"),
            }
        }
        let changed = async {
            if status.changed().await.is_err() {
                // The network has stopped, which its own future tells.
                std::future::pending::<()>().await;
            }
        };
        let later = teller.next();
        tokio::select! {
            () = changed => {}
            () = async { sleep_until(later.unwrap_or_else(Instant::now)).await }, if later.is_some() => {}
        }
    }
}

#[derive(Debug, PartialEq, Eq)]
enum Line {
    Info(String),
    Warn(String),
}

/// What was said, and what is still to be said.
#[derive(Default)]
struct Teller {
    said: Arc<Status>,
    sync: InSync,
    refusals: Capped,
    disbelieved: Capped,
    believed: Capped,
    remarks: Capped,
    repairs: Repairs,
}

impl Teller {
    /// What is to be said now.
    fn lines(&mut self, now: &Arc<Status>, at: Instant) -> Vec<Line> {
        let mut lines = Vec::new();
        lines.extend(self.sync.line(now, at));
        let said = std::mem::replace(&mut self.said, Arc::clone(now));
        if let (Some(error), None) = (&now.kernel_error, &said.kernel_error) {
            let hint = hint(error);
            lines.push(Line::Warn(format!(
                "not in sync: the kernel cannot be read or watched: {error}{hint}"
            )));
        }
        let refused = now.failing.changes_since(&said.failing);
        let mut refused = refused.filter_map(|(_, then, now)| now.filter(|_| then.is_none()));
        let refusal = refused.next().map(|failure| (failure, refused.count()));
        let text = |(failure, others): (&Failure, usize)| {
            let (change, error) = (&failure.change, &failure.error);
            let others = if others == 0 { String::new() } else { format!(" (and {others} more)") };
            format!("not in sync: the kernel refused: {change}: {error}{}{others}", hint(error))
        };
        lines.extend(self.refusals.lines(at, refusal, text, "refusals").map(Line::Warn));
        let leases = || now.rejected.changes_since(&said.rejected);
        let (news, rest) =
            (leases().filter_map(|(lease, _, why)| Some((lease, why?))), "leases are not believed");
        let text = |(lease, why): (&_, &_)| format!("the lease {lease} is not believed: {why}");
        lines.extend(self.disbelieved.lines(at, news, text, rest).map(Line::Warn));
        let (news, rest) =
            (leases().filter(|(.., why)| why.is_none()), "leases are right now, or gone");
        let text = |(lease, ..): (&_, _, _)| {
            format!("the lease {lease}, which was not believed, is right now, or gone")
        };
        lines.extend(self.believed.lines(at, news, text, rest).map(Line::Info));
        let news = now.advisories.changes_since(&said.advisories).filter(|(.., now)| now.is_some());
        let text = |(remark, ..): (&String, _, _)| remark.clone();
        lines.extend(self.remarks.lines(at, news, text, "remarks of that kind").map(Line::Warn));
        lines.extend(self.repairs.lines(now, &said, at).into_iter().map(Line::Info));
        lines
    }

    /// When there is something to be said even if nothing happens until then.
    fn next(&self) -> Option<Instant> {
        let capped = [&self.refusals, &self.disbelieved, &self.believed, &self.remarks];
        let ends =
            capped.into_iter().filter(|capped| capped.unsaid > 0).filter_map(|capped| capped.end);
        let repairs = (self.repairs.unsaid > 0).then_some(self.repairs.end);
        ends.chain(repairs).chain(self.sync.later).min()
    }
}

/// Being in sync, again or with more or fewer peers.
#[derive(Default)]
struct InSync {
    /// With how many peers it was said; `None` if it was lost since.
    said: Option<usize>,
    /// When it was last said.
    at: Option<Instant>,
    /// When it is to be said, unless it is lost until then.
    later: Option<Instant>,
}

impl InSync {
    fn line(&mut self, now: &Status, at: Instant) -> Option<Line> {
        self.later = None;
        if !now.in_sync {
            self.said = None;
            return None;
        }
        if self.said == Some(now.peers) {
            return None;
        }
        if let Some(later) = self.at.map(|last| last + SYNC_GAP).filter(|later| at < *later) {
            self.later = Some(later);
            return None;
        }
        (self.said, self.at) = (Some(now.peers), Some(at));
        Some(Line::Info(format!("in sync peers={} objects={}", now.peers, now.objects)))
    }
}

/// Lines of one kind, of which a window has room for a few.
#[derive(Default)]
struct Capped {
    /// Of the window; `None` before the first.
    end: Option<Instant>,
    lines: usize,
    unsaid: u64,
}

impl Capped {
    /// A line for each of what is `new` for which there is room, after the number of those for which there was none; `rest`
    /// says what those are.
    fn lines<T>(
        &mut self,
        at: Instant,
        new: impl IntoIterator<Item = T>,
        text: impl Fn(T) -> String,
        rest: &str,
    ) -> std::vec::IntoIter<String> {
        let mut lines = Vec::new();
        if self.end.is_none_or(|end| at >= end) {
            if self.unsaid > 0 {
                lines.push(format!("and {} more {rest}", self.unsaid));
            }
            *self = Self { end: Some(at + WINDOW), ..Self::default() };
        }
        for line in new {
            if self.lines < LINES {
                lines.push(text(line));
                self.lines += 1;
            } else {
                self.unsaid += 1;
            }
        }
        lines.into_iter()
    }
}

/// What would help against an error.
fn hint(error: &KernelError) -> &'static str {
    match error.errno {
        // EPERM
        1 => "; flanneld needs CAP_NET_ADMIN in this network namespace",
        _ => "",
    }
}

/// The repairs that were not said yet.
struct Repairs {
    /// Of the window.
    end: Instant,
    lines: usize,
    unsaid: u64,
    /// The counts of what was said.
    counts: BTreeMap<(ObjectKind, Damage), u64>,
}

impl Default for Repairs {
    fn default() -> Self {
        Self { end: Instant::now(), lines: 0, unsaid: 0, counts: BTreeMap::new() }
    }
}

impl Repairs {
    fn lines(&mut self, now: &Status, said: &Status, at: Instant) -> Vec<String> {
        let mut lines = Vec::new();
        if at >= self.end {
            if self.unsaid > 0 {
                lines.push(format!("and {} more repairs: {}", self.unsaid, self.summary(said)));
            }
            (self.end, self.lines, self.unsaid) = (at + WINDOW, 0, 0);
            self.counts = said.repairs.clone();
        }
        let mut new = now.repaired.saturating_sub(said.repaired);
        for repair in now.repairs_since(said) {
            if self.lines == LINES {
                break;
            }
            lines.push(repair.to_string());
            *self.counts.entry((repair.object.key().kind(), repair.damage)).or_default() += 1;
            self.lines += 1;
            new -= 1;
        }
        self.unsaid += new;
        lines
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

    use flannel_core::Subnets;
    use flannel_core::network::Rejection;
    use flannel_core::object::{Neigh, Route, Via};
    use flannel_core::status::{Listing, Repair};

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
            if status.last_repairs.len() > Status::LAST_REPAIRS {
                status.last_repairs.remove(0);
            }
        }
        status
    }

    fn lease(n: u8) -> Subnets {
        format!("10.1.{n}.0-24").parse().unwrap()
    }

    #[test]
    fn thousands_of_bad_leases_and_remarks_have_few_lines_and_all_are_counted() {
        let (mut teller, start) = (Teller::default(), Instant::now());
        let no = || Rejection::Rejected("no".into());
        let mut status = Status::default();
        status.rejected = (0..200).map(|n| (lease(n), no())).collect();
        status.advisories = (0..200).map(|n| (format!("remark {n:03}"), ())).collect();
        let lines = teller.lines(&Arc::new(status.clone()), start);
        let named = (0..5).map(|n| {
            format!("the lease {} is not believed: {}", lease(n), Rejection::Rejected("no".into()))
        });
        let named = named.chain((0..5).map(|n| format!("remark {n:03}"))).map(Line::Warn);
        assert_eq!(lines, named.collect::<Vec<_>>());
        assert_eq!(teller.next(), Some(start + WINDOW));
        status.rejected = Listing::default();
        let lines = teller.lines(&Arc::new(status.clone()), start + SYNC_GAP);
        assert_eq!(lines.len(), LINES);
        let lines = teller.lines(&Arc::new(status.clone()), start + WINDOW);
        let rest = [
            Line::Warn("and 195 more leases are not believed".into()),
            Line::Info("and 195 more leases are right now, or gone".into()),
            Line::Warn("and 195 more remarks of that kind".into()),
        ];
        assert_eq!(lines, rest);
        assert_eq!(teller.next(), None);
        // After a rest there is room again.
        status.rejected = [(lease(7), no())].into_iter().collect();
        assert_eq!(teller.lines(&Arc::new(status), start + 5 * WINDOW).len(), 1);
    }

    #[test]
    fn being_in_sync_is_said_once_a_second_at_most_and_in_the_end() {
        let (mut teller, start) = (Teller::default(), Instant::now());
        let mut said = Vec::new();
        for ms in 0..10_000u64 {
            let peers = usize::try_from(ms).unwrap();
            let mut status = Status::default();
            (status.in_sync, status.peers, status.objects) = (ms % 3 != 1, peers, 4 * peers);
            said.extend(teller.lines(&Arc::new(status), start + Duration::from_millis(ms)));
        }
        assert_eq!((said.len(), &said[0]), (10, &Line::Info("in sync peers=0 objects=0".into())));
        let later = teller.next().unwrap();
        assert!(later <= start + Duration::from_secs(11));
        let last = teller.said.clone();
        assert_eq!(
            teller.lines(&last, later),
            [Line::Info("in sync peers=9999 objects=39996".into())]
        );
        assert_eq!((teller.next(), teller.lines(&last, later + SYNC_GAP)), (None, vec![]));
    }

    #[test]
    fn a_storm_has_few_lines_and_all_is_counted() {
        let (mut repairs, start) = (Repairs::default(), Instant::now());
        let mut said = Status::default();
        let mut lines = Vec::new();
        for ms in 0..9_000 {
            let now = damaged(&said, 3);
            lines.extend(repairs.lines(&now, &said, start + Duration::from_millis(ms)));
            said = now;
        }
        assert_eq!(lines.len(), LINES);
        let victim = "put back route blackhole 10.1.7.0/24, deleted by somebody that the kernel does not name";
        assert!(lines.iter().all(|line| line == victim), "{lines:?}");
        assert!(repairs.unsaid > 0, "the end of the window is waited for");
        let last = repairs.lines(&said, &said, start + WINDOW + WINDOW);
        assert_eq!(last, ["and 26995 more repairs: 26995 × route deleted"]);
        assert_eq!(repairs.lines(&said, &said, start + 4 * WINDOW), Vec::<String>::new());
    }

    #[test]
    fn the_summary_names_each_kind() {
        let (mut repairs, start) = (Repairs::default(), Instant::now());
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
        assert_eq!(last, ["and 16 more repairs: 1 × neigh changed, 15 × route deleted"]);
    }
}
