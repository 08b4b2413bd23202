//! What a network's status says, as log lines. The one thing to know: one line per change of state, and repairs only so
//! many at a time, because whoever breaks things may do so a thousand times a second.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use flannel_core::{Damage, KernelError, ObjectKind, Status};
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};

/// In this time …
const WINDOW: Duration = Duration::from_secs(10);
/// … at most this many repairs have a line each; the others share one at its end.
const LINES: usize = 5;

/// One line per change of state: in sync or not and why, each lease that is not believed, each remark; and the repairs.
pub(crate) async fn log_status(mut status: watch::Receiver<Arc<Status>>) -> Infallible {
    let mut said = Arc::new(Status::default());
    let mut repairs = Repairs::default();
    loop {
        let now = Arc::clone(&status.borrow_and_update());
        say(&now, &said);
        for line in repairs.lines(&now, &said, Instant::now()) {
            tracing::info!("{line}");
        }
        said = now;
        let changed = async {
            if status.changed().await.is_err() {
                // The network has stopped, which its own future tells.
                std::future::pending::<()>().await;
            }
        };
        tokio::select! {
            () = changed => {}
            () = sleep_until(repairs.end), if repairs.unsaid > 0 => {}
        }
    }
}

fn say(now: &Status, said: &Status) {
    if now.in_sync && (!said.in_sync || now.peers != said.peers) {
        tracing::info!("in sync peers={} objects={}", now.peers, now.objects);
    }
    if let (Some(error), None) = (&now.kernel_error, &said.kernel_error) {
        tracing::warn!("not in sync: the kernel cannot be read or watched: {error}{}", hint(error));
    }
    let mut new =
        now.failing.changes_since(&said.failing).filter_map(|(_, then, now)| now.filter(|_| then.is_none()));
    if let Some(failure) = new.next() {
        let others = match new.count() {
            0 => String::new(),
            more => format!(" (and {more} more)"),
        };
        let error = &failure.error;
        tracing::warn!("not in sync: the kernel refused: {}: {error}{}{others}", failure.change, hint(error));
    }
    for (subnets, _, why) in now.disbelieved.changes_since(&said.disbelieved) {
        match why {
            Some(why) => tracing::warn!("the lease {subnets} is not believed: {why}"),
            None => tracing::info!("the lease {subnets}, which was not believed, is right now, or gone"),
        }
    }
    for (remark, _, now) in now.remarks.changes_since(&said.remarks) {
        if now.is_some() {
            tracing::warn!("{remark}");
        }
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

    use flannel_core::{Neigh, Repair, Route, Via};

    use super::*;

    /// A status with `more` repairs than `before`, as a network would publish it.
    fn damaged(before: &Status, more: u64) -> Status {
        let mut status = before.clone();
        for _ in 0..more {
            status.repaired += 1;
            let route = Route { dst: "10.1.7.0/24".parse().unwrap(), via: Via::Blackhole, mtu: None };
            *status.repairs.entry((ObjectKind::Route, Damage::Deletion)).or_default() += 1;
            status.last_repairs.push(Arc::new(Repair::new(status.repaired, Damage::Deletion, route)));
            if status.last_repairs.len() > Status::LAST_REPAIRS {
                status.last_repairs.remove(0);
            }
        }
        status
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
        let victim =
            "put back route blackhole 10.1.7.0/24, deleted by somebody that the kernel does not name";
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
        let mac = flannel_core::MacAddr::local([1; 6]);
        let neigh = Neigh { link: "flannel.1".parse().unwrap(), address: [10, 1, 7, 0].into(), mac };
        now.repaired += 1;
        now.repairs.insert((ObjectKind::Neigh, Damage::Modification), 1);
        now.last_repairs.push(Arc::new(Repair::new(now.repaired, Damage::Modification, neigh)));
        assert_eq!(repairs.lines(&now, &none, start).len(), LINES);
        let last = repairs.lines(&now, &now, start + WINDOW);
        assert_eq!(last, ["and 16 more repairs: 1 × neigh changed, 15 × route deleted"]);
    }
}
