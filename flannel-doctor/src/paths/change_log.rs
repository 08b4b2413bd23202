//! Logs changed paths, all at once every minute at most.

use std::collections::BTreeMap;
use std::time::Duration;

use flannel_api::PathState;
use tokio::time::Instant;

use crate::paths::record::{Change, PathId};

/// The pause between log lines about changed paths.
const PAUSE: Duration = Duration::from_secs(60);
/// The maximum number of changed paths that get a log line each.
const LINES: usize = 5;

/// The changes that are not logged yet.
#[derive(Debug, Default)]
pub(crate) struct ChangeLog {
    /// The last change of each path, and its state.
    changed: BTreeMap<PathId, (Change, PathState)>,
    written: Option<Instant>,
}

impl ChangeLog {
    pub(crate) fn note(&mut self, id: PathId, change: Change, state: PathState) {
        self.changed.insert(id, (change, state));
    }

    pub(crate) fn write(&mut self, now: Instant) {
        let waits = self.written.is_some_and(|at| now.duration_since(at) < PAUSE);
        if self.changed.is_empty() || waits {
            return;
        }
        self.written = Some(now);
        let changed = std::mem::take(&mut self.changed);
        let of = |wanted| changed.iter().filter(move |(_, (change, _))| *change == wanted);
        for (PathId { peer, family }, (_, state)) in of(Change::Fails).take(LINES) {
            tracing::warn!(%peer, %family, %state, "the path to a peer fails");
        }
        for (PathId { peer, family }, _) in of(Change::Lowered).take(LINES) {
            tracing::warn!(%peer, %family, "large packets are lost: a route gets a new MTU");
        }
        for (PathId { peer, family }, _) in of(Change::Works).take(LINES) {
            tracing::info!(%peer, %family, "the path to a peer works again");
        }
        let more = |change| of(change).count().checked_sub(LINES).filter(|more| *more > 0);
        if let Some(paths) = more(Change::Fails) {
            tracing::warn!(paths, "more paths to peers fail");
        }
        if let Some(paths) = more(Change::Lowered) {
            tracing::warn!(paths, "more routes to peers get a new MTU");
        }
        if let Some(paths) = more(Change::Works) {
            tracing::info!(paths, "more paths to peers work again");
        }
    }
}

#[cfg(test)]
mod tests {
    use flannel_core::address::Family;
    use test_support::Logged;

    use super::*;

    fn id(n: u8) -> PathId {
        PathId { peer: format!("10.1.{n}.0-24").parse().unwrap(), family: Family::V4 }
    }

    #[test]
    fn the_last_change_of_each_path_is_logged_and_many_share_a_line() {
        let (logged, _guard) = Logged::collect();
        let mut log = ChangeLog::default();
        let start = Instant::now();
        log.note(id(1), Change::Fails, PathState::OneWay);
        log.write(start);
        assert_eq!(logged.count("the path to a peer fails"), 1);
        (2..=10).for_each(|n| log.note(id(n), Change::Fails, PathState::NodeDown));
        log.note(id(1), Change::Works, PathState::Ok);
        log.note(id(1), Change::Fails, PathState::OneWay);
        log.write(start + PAUSE / 2);
        assert_eq!(logged.count("the path to a peer fails"), 1, "later");
        log.note(id(2), Change::Lowered, PathState::MtuLowered);
        log.write(start + PAUSE);
        assert_eq!(logged.count("the path to a peer fails"), 1 + LINES);
        assert_eq!(logged.count("a route gets a new MTU"), 1);
        assert_eq!(logged.count("more paths to peers fail"), 1);
        assert_eq!(logged.count("works again"), 0, "it fails again: {:?}", logged.warnings());
    }
}
