//! The latest changes of a store without a history of its own.

use std::collections::{BTreeSet, VecDeque};

use flannel_core::lease::Revision;

use super::{Batch, Event, Now};

/// The number of changes that are kept for late watches.
const LENGTH: usize = 16_384;

/// The keys that changed recently. The revision is the number of all changes.
#[derive(Debug, Default)]
pub(crate) struct History {
    keys: VecDeque<String>,
    /// The number of older changes, whose keys are forgotten.
    forgotten: u64,
}

impl History {
    pub(crate) fn revision(&self) -> Revision {
        Revision(self.forgotten + self.keys.len() as u64)
    }

    /// Adds a change and returns its revision.
    pub(crate) fn push(&mut self, key: &str) -> Revision {
        self.keys.push_back(key.to_owned());
        if self.keys.len() > LENGTH {
            self.keys.pop_front();
            self.forgotten += 1;
        }
        self.revision()
    }

    /// Forgets the keys of all changes so far.
    pub(crate) fn forget(&mut self) {
        self.forgotten = self.revision().0;
        self.keys = VecDeque::new();
    }

    /// The changes after `after`, with the content of each key from `now`, or `None` if they are
    /// forgotten.
    pub(crate) fn since(&self, after: Revision, now: impl Fn(&str) -> Now) -> Option<Batch> {
        let unchanged = usize::try_from(after.0.checked_sub(self.forgotten)?).ok()?;
        if unchanged > self.keys.len() {
            return None;
        }
        let keys: BTreeSet<&String> = self.keys.range(unchanged..).collect();
        Some(Batch {
            events: keys.into_iter().map(|key| Event { key: key.clone(), now: now(key) }).collect(),
            revision: self.revision(),
        })
    }
}
