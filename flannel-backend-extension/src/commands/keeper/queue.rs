//! The changes of tasks that were requested: which can begin, and what their ends mean.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use flannel_core::Subnet;
use flannel_core::kernel::{Invalidation, KernelError, KernelEvent};
use flannel_core::object::{Change, Object};
pub(super) use libc::EINVAL;
use tokio::sync::mpsc::UnboundedSender;

use crate::commands::files::{Files, Progress, Stored};
use crate::commands::task::{Of, Task};

/// A command that removes something is tried so often, and for so long. Then it is taken for
/// removed, because it may have no trace on this host any more.
const REMOVALS: u32 = 5;
const REMOVING: Duration = Duration::from_secs(10);

/// All changes, and the tasks of this host.
#[derive(Debug, Default)]
pub(super) struct Queue {
    pub(super) files: Files,
    /// The files were read.
    pub(super) is_open: bool,
    pub(super) entries: BTreeMap<Subnet, Entry>,
    /// The entries with a change to begin.
    pub(super) ready: VecDeque<Subnet>,
    /// The number of commands that run.
    pub(super) running: usize,
    pub(super) listener: Option<UnboundedSender<Invalidation>>,
}

/// The task of one subnet.
#[derive(Debug, Default)]
pub(super) struct Entry {
    /// As it is on this host.
    pub(super) stored: Option<Stored>,
    /// The last change that was requested and has not ended.
    pub(super) wanted: Option<Wanted>,
    /// A command runs.
    pub(super) runs: bool,
    /// The number of failed removals, and the time of the first one.
    pub(super) removals: Option<(u32, Instant)>,
    /// The result of the last change that ended.
    pub(super) last: Option<Result<(), KernelError>>,
}

/// A change that was requested.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Wanted {
    pub(super) change: Change,
    /// The task to put in place, or `None` for a deletion.
    pub(super) task: Option<Task>,
}

/// A change that begins.
pub(super) struct Job {
    pub(super) subnet: Subnet,
    pub(super) wanted: Wanted,
    pub(super) stored: Option<Stored>,
    /// A removal that fails is the last one.
    pub(super) gives_up: bool,
    /// Only the present task is removed. The rest of the change waits.
    pub(super) only_removes: bool,
}

/// Why a change was not made.
pub(super) enum Unmade {
    /// The present task could not be removed.
    Removal(String),
    Other(String),
}

impl From<String> for Unmade {
    fn from(why: String) -> Self {
        Self::Other(why)
    }
}

impl Wanted {
    /// # Errors
    /// The object is not a task of this keeper.
    pub(super) fn new(change: &Change, keeper: &str) -> Result<(Subnet, Self), KernelError> {
        let Object::Record(record) = change.object() else { return Err(KernelError::new(EINVAL)) };
        if record.keeper != keeper {
            return Err(of_another(record.keeper, keeper));
        }
        let wrong = |why| KernelError::Other(format!("{record} is no task: {why}"));
        let task = match change {
            Change::Put(_) => Some(Task::of_record(record).map_err(wrong)?),
            Change::Delete(_) => None,
        };
        Ok((record.subnet, Self { change: change.clone(), task }))
    }
}

impl Entry {
    fn is_of_node(&self) -> bool {
        let wanted = self.wanted.as_ref().and_then(|wanted| wanted.task.as_ref());
        self.stores_node() || wanted.is_some_and(|task| task.of == Of::Node)
    }

    fn stores_node(&self) -> bool {
        self.stored.as_ref().is_some_and(|stored| stored.task.of == Of::Node)
    }

    pub(super) fn is_idle(&self) -> bool {
        self.wanted.is_none() && !self.runs
    }
}

impl Queue {
    /// Takes in a change. If another one of this subnet waits or runs, this one follows it.
    pub(super) fn want(&mut self, subnet: Subnet, wanted: Wanted) {
        let entry = self.entries.entry(subnet).or_default();
        if entry.wanted.replace(wanted).is_none() && !entry.runs {
            self.ready.push_back(subnet);
        }
    }

    /// The next change that can begin, which then runs.
    pub(super) fn next(&mut self) -> Option<Job> {
        let of_node = || self.entries.iter().filter(|(_, entry)| entry.is_of_node());
        let is_done = |entry: &Entry| {
            entry.stored.as_ref().is_some_and(|stored| stored.state == Progress::Done)
        };
        // A peer has the earlier lease of this node.
        let was_of_node =
            |subnet: &Subnet| self.entries.get(subnet).is_some_and(Entry::stores_node);
        let node_is_done = of_node().all(|(_, entry)| entry.is_idle())
            && of_node().any(|(_, entry)| is_done(entry));
        let may_begin = |subnet: &Subnet| {
            let wanted = self.entries.get(subnet).and_then(|entry| entry.wanted.as_ref());
            match wanted.and_then(|wanted| wanted.task.as_ref()) {
                Some(task) if task.waits => node_is_done || was_of_node(subnet),
                // Those for an earlier lease of this node are removed first.
                Some(task) if task.of == Of::Node => {
                    let mut others = self.entries.iter().filter(|(other, _)| *other != subnet);
                    others.all(|(_, entry)| !entry.stores_node())
                }
                _ => true,
            }
        };
        let place = self.ready.iter().position(may_begin)?;
        let subnet = self.ready.remove(place)?;
        let entry = self.entries.get_mut(&subnet)?;
        let wanted = entry.wanted.clone()?;
        let stored = entry.stored.clone();
        entry.runs = true;
        let of_peer = wanted.task.as_ref().is_some_and(|task| task.of == Of::Peer);
        let only_removes = of_peer && entry.stores_node();
        let is_last =
            |(count, since): (u32, Instant)| count + 1 >= REMOVALS && since.elapsed() >= REMOVING;
        let gives_up = entry.removals.is_some_and(is_last);
        Some(Job { subnet, wanted, stored, gives_up, only_removes })
    }

    /// Takes in the end of a change, and reports it, unless another one was requested meanwhile.
    pub(super) fn end(
        &mut self,
        subnet: Subnet,
        change: &Change,
        stored: Option<Stored>,
        result: Result<(), Unmade>,
        only_removes: bool,
    ) {
        self.running -= 1;
        let Some(entry) = self.entries.get_mut(&subnet) else { return };
        entry.runs = false;
        entry.stored = stored;
        entry.removals = match &result {
            Err(Unmade::Removal(_)) => {
                let (count, since) = entry.removals.unwrap_or_else(|| (0, Instant::now()));
                Some((count + 1, since))
            }
            _ => None,
        };
        let is_other = entry.wanted.as_ref().is_some_and(|wanted| wanted.change != *change);
        if is_other || (only_removes && result.is_ok()) {
            self.ready.push_back(subnet);
            return;
        }
        let result =
            result.map_err(|(Unmade::Removal(why) | Unmade::Other(why))| KernelError::Other(why));
        entry.wanted = None;
        entry.last = Some(result.clone());
        if result.is_ok() && entry.stored.is_none() {
            self.entries.remove(&subnet);
        }
        let event = match (result, change) {
            (Err(error), _) => KernelEvent::Failed(change.object().key(), error),
            (Ok(()), Change::Put(object)) => KernelEvent::Present(object.clone()),
            (Ok(()), Change::Delete(object)) => KernelEvent::Deleted(object.key()),
        };
        if let Some(listener) = &self.listener {
            // Without a listener, a snapshot shows the record.
            let _ = listener.send(Invalidation::Objects(vec![event], None));
        }
    }
}

/// The error for a record of another keeper.
pub(super) fn of_another(other: &str, keeper: &str) -> KernelError {
    let why = format!("the record is of the keeper {other}, expected one of {keeper}");
    KernelError::explained(EINVAL, why)
}
