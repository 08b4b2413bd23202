//! The skipped keys of a store, and their lines in the log. Other parties write these keys, so
//! their number and the number of lines are bounded.

use std::collections::BTreeMap;
use std::time::Duration;

use flannel_core::subnet::SkippedEntry;

use super::{Batch, LeaseList, MOST_SKIPPED, Now};

/// The largest number of newly skipped keys that have a line each in the log. It limits the lines
/// of one list, and the lines of all changes within a [`PERIOD`]. The other keys share a line.
const LINES: usize = 5;
const PERIOD: Duration = Duration::from_secs(60);

/// The skipped keys with their reasons.
#[derive(Debug, Default)]
pub(super) struct SkippedKeys {
    reasons: BTreeMap<String, String>,
    /// Not all skipped keys are in `reasons`.
    is_full: bool,
    lines: Lines,
}

/// The log lines about changes in the present period.
#[derive(Debug, Default)]
struct Lines {
    /// The number of keys with a line of their own.
    written: usize,
    /// The shared line is written.
    is_shared_written: bool,
    /// The number of skipped keys after the shared line.
    more: usize,
    /// The end of the period.
    until: Duration,
}

impl SkippedKeys {
    /// The keys and reasons.
    pub(super) fn all(&self) -> Vec<SkippedEntry> {
        let mut all: Vec<SkippedEntry> = self
            .reasons
            .iter()
            .map(|(key, reason)| SkippedEntry::new(key.as_str(), reason.as_str()))
            .collect();
        if self.is_full {
            all.push(SkippedEntry::new("(more keys)", "not even their names are kept"));
        }
        all
    }

    /// Replaces the keys, and logs the new ones.
    pub(super) fn replace(&mut self, store: &str, listing: &LeaseList) {
        let skipped = listing.skipped.iter().map(|s| (s.key.clone(), s.reason.to_string()));
        let known = std::mem::replace(&mut self.reasons, skipped.collect());
        self.is_full = false;
        let mut new = self.reasons.iter().filter(|(key, reason)| known.get(*key) != Some(*reason));
        new.by_ref().take(LINES).for_each(|(key, reason)| log(store, key, reason));
        log_more(store, new.count());
    }

    /// Adds and removes keys, and logs the new ones. `now` is the time by any monotonic clock.
    pub(super) fn change(&mut self, store: &str, batch: &Batch, now: Duration) {
        if now >= self.lines.until {
            let lines = Lines { until: now + PERIOD, ..Lines::default() };
            log_more(store, std::mem::replace(&mut self.lines, lines).more);
        }
        let mut more = 0;
        for event in &batch.events {
            let Now::Unreadable(reason) = &event.now else {
                self.reasons.remove(&event.key);
                continue;
            };
            let reason = reason.to_string();
            if !self.put(&event.key, &reason) {
                continue;
            }
            if self.lines.written < LINES {
                self.lines.written += 1;
                log(store, &event.key, &reason);
            } else {
                more += 1;
            }
        }
        if self.lines.is_shared_written {
            self.lines.more += more;
        } else {
            self.lines.is_shared_written = more > 0;
            log_more(store, more);
        }
    }

    /// Adds a key. Returns whether the key or its reason is new.
    fn put(&mut self, key: &str, reason: &str) -> bool {
        let is_full = self.reasons.len() >= MOST_SKIPPED;
        match self.reasons.get_mut(key) {
            Some(known) if known == reason => return false,
            Some(known) => reason.clone_into(known),
            None if is_full => self.is_full = true,
            None => drop(self.reasons.insert(key.to_owned(), reason.to_owned())),
        }
        true
    }
}

fn log(store: &str, key: &str, reason: &str) {
    tracing::warn!(%store, %key, %reason, "a key of the store is skipped");
}

fn log_more(store: &str, more: usize) {
    if more > 0 {
        tracing::warn!(more, %store, "more keys of the store are skipped");
    }
}

#[cfg(test)]
mod tests {
    use flannel_core::lease::Revision;
    use test_support::Logged;

    use super::*;
    use crate::registry::{Event, SkipReason, Skipped};

    fn unreadable(key: &str) -> Event {
        Event { key: key.to_owned(), now: Now::Unreadable(SkipReason::unreadable(&"no lease")) }
    }

    fn gone(key: &str) -> Event {
        Event { key: key.to_owned(), now: Now::Gone }
    }

    fn batch(events: impl IntoIterator<Item = Event>) -> Batch {
        Batch { events: events.into_iter().collect(), revision: Revision(1) }
    }

    fn listing(keys: impl IntoIterator<Item = String>) -> LeaseList {
        let reason = SkipReason::unreadable(&"no lease");
        let skipped = keys
            .into_iter()
            .map(|key| Skipped { key, reason: reason.clone(), revision: Revision(1) })
            .collect();
        LeaseList { skipped, ..LeaseList::default() }
    }

    #[test]
    fn a_writer_of_new_keys_fills_neither_the_memory_nor_the_log() {
        let (logged, _guard) = Logged::collect();
        let mut keys = SkippedKeys::default();
        // A minute, with two changes in each millisecond: a new key, and one that alternates.
        for millis in 0..60_000 {
            let last = unreadable(&format!("lock-{millis}"));
            let now = Duration::from_millis(millis);
            keys.change("etcd", &batch([unreadable("a"), last]), now);
            keys.change("etcd", &batch([gone("a"), unreadable(&format!("b-{millis}"))]), now);
        }
        let all = keys.all();
        assert_eq!(all.len(), MOST_SKIPPED + 1);
        assert!(all.iter().any(|entry| entry.key == "(more keys)"));
        assert_eq!(logged.warnings().len(), LINES + 1, "{:?}", logged.warnings());
        // The next minute has a line for those that it counted.
        keys.change("etcd", &batch([unreadable("c")]), PERIOD);
        assert_eq!(logged.warnings().len(), LINES + 3, "{:?}", logged.warnings());
        keys.replace("etcd", &listing(["a".to_owned()]));
        assert_eq!(keys.all(), [SkippedEntry::new("a", "no lease")]);
    }

    #[test]
    fn a_key_is_known_with_its_latest_reason_until_it_is_gone() {
        let (logged, _guard) = Logged::collect();
        let mut keys = SkippedKeys::default();
        keys.replace("etcd", &listing(["a".to_owned(), "b".to_owned()]));
        keys.change("etcd", &batch([unreadable("a"), gone("b")]), Duration::ZERO);
        assert_eq!(keys.all(), [SkippedEntry::new("a", "no lease")]);
        let other = Now::Unreadable(SkipReason::unreadable(&"other"));
        keys.change("etcd", &batch([Event { key: "a".into(), now: other }]), Duration::ZERO);
        assert_eq!(keys.all(), [SkippedEntry::new("a", "other")]);
        assert_eq!(logged.warnings().len(), 3, "a known reason is not logged again");
    }

    #[test]
    fn each_change_of_many_keys_is_cheap() {
        let keys = (0..MOST_SKIPPED).map(|n| format!("lock-{n}"));
        let mut skipped = SkippedKeys::default();
        skipped.replace("etcd", &listing(keys.clone()));
        // With a copy or a search of all keys per change, these are four billion steps.
        let all = batch(keys.flat_map(|key| [gone(&key), unreadable(&key)]));
        skipped.change("etcd", &all, Duration::ZERO);
        assert_eq!(skipped.all().len(), MOST_SKIPPED);
    }
}
