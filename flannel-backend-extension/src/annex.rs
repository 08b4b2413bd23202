//! Runs the commands of tasks, several at a time, and remembers which are in place.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use flannel_core::Subnet;
use flannel_core::kernel::{Annex, Changes, Invalidation, KernelError, KernelEvent};
use flannel_core::object::{Change, Key, Object, Record};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use crate::NAME;
use crate::journal::{Journal, State, Stored};
use crate::task::{Of, Task};

/// The most commands at a time.
const AT_ONCE: usize = 8;
/// A command that removes a node is tried this often. Then the node is forgotten, because it may
/// have no trace on this host any more.
const REMOVALS: u32 = 5;
/// `EREMOTEIO`, which the route engine does not take for an object that is already gone.
const EREMOTEIO: i32 = 121;
const EINVAL: i32 = 22;
/// The prefix of the data of a record that has to be put in place again.
const OUTDATED: &str = "outdated: ";

/// The commands of one state directory. Clones are handles of the same.
#[derive(Debug, Clone)]
pub(crate) struct Commands(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    inner: Mutex<Inner>,
    ended: Condvar,
}

#[derive(Debug)]
struct Inner {
    /// The file with the tasks; `None`: they are kept in memory.
    path: Option<PathBuf>,
    /// `None` before the first use.
    journal: Option<Journal>,
    entries: BTreeMap<Subnet, Entry>,
    /// The entries with a change to begin.
    ready: VecDeque<Subnet>,
    /// The commands for this node are in place.
    node_is_done: bool,
    workers: usize,
    listener: Option<UnboundedSender<Invalidation>>,
}

/// The task of one subnet.
#[derive(Debug, Default)]
struct Entry {
    /// As it is on this host.
    stored: Option<Stored>,
    /// The last change that was requested and has not ended.
    wanted: Option<Wanted>,
    /// A command runs.
    runs: bool,
    /// The number of failed removals.
    removals: u32,
    /// The result of the last change that ended.
    last: Option<Result<(), KernelError>>,
}

/// A change that was requested.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Wanted {
    change: Change,
    /// The task to put in place; `None` for a deletion.
    task: Option<Task>,
}

impl Wanted {
    /// # Errors
    /// The object is no task.
    fn new(change: &Change) -> Result<(Subnet, Self), KernelError> {
        let Object::Record(record) = change.object() else { return Err(KernelError::new(EINVAL)) };
        let wrong = |why| KernelError::explained(EINVAL, format!("{record} is no task: {why}"));
        let task = match change {
            Change::Put(_) => Some(Task::parse(record.data()).map_err(wrong)?),
            Change::Delete(_) => None,
        };
        Ok((record.subnet, Self { change: change.clone(), task }))
    }
}

impl Commands {
    pub(crate) fn new(path: Option<PathBuf>) -> Self {
        let (journal, entries, ready, listener) = Default::default();
        let (node_is_done, workers) = (false, 0);
        let inner = Inner { path, journal, entries, ready, node_is_done, workers, listener };
        Self(Arc::new(Shared { inner: Mutex::new(inner), ended: Condvar::new() }))
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The state after the file was read.
    fn open(&self) -> Result<MutexGuard<'_, Inner>, KernelError> {
        let mut inner = self.lock();
        if inner.journal.is_none() {
            let (journal, tasks) =
                Journal::open(inner.path.as_deref()).map_err(|error| failed(error.to_string()))?;
            let entry = |stored| Entry { stored: Some(stored), ..Entry::default() };
            inner.entries = tasks.into_iter().map(|(key, task)| (key, entry(task))).collect();
            inner.journal = Some(journal);
        }
        Ok(inner)
    }

    /// Starts threads for the changes that can begin.
    fn spawn(&self, inner: &mut Inner) {
        while inner.workers < AT_ONCE && inner.workers < inner.ready.len() {
            let commands = self.clone();
            let worker = std::thread::Builder::new().name("extension".into());
            match worker.spawn(move || commands.work()) {
                Ok(_) => inner.workers += 1,
                // Those that run go on with the queue.
                Err(error) => {
                    tracing::warn!(%error, "no thread for a command can be started");
                    return;
                }
            }
        }
    }

    /// Makes changes until none can begin.
    fn work(&self) {
        let mut inner = self.lock();
        while let Some((subnet, wanted, stored)) = inner.begin() {
            drop(inner);
            let (stored, result) = self.make(subnet, wanted.task.as_ref(), stored);
            inner = self.lock();
            inner.end(subnet, &wanted.change, stored, result.map_err(failed));
            self.0.ended.notify_all();
            // Others may have waited for the commands of this node.
            self.spawn(&mut inner);
        }
        inner.workers -= 1;
    }

    /// Puts a task in place, or removes the present one. Returns the task on this host, and the
    /// result.
    fn make(
        &self,
        subnet: Subnet,
        task: Option<&Task>,
        mut stored: Option<Stored>,
    ) -> (Option<Stored>, Result<(), String>) {
        let result = (|| {
            let is_to_go = |old: &Stored| match task {
                // A boot has removed what an earlier task did.
                Some(task) => !old.task.adds_the_same(task) && old.state != State::Earlier,
                None => true,
            };
            if let Some(old) = stored.as_ref().filter(|old| is_to_go(old)) {
                old.task.remove()?;
                self.note(|journal| journal.gone(subnet))?;
                stored = None;
            }
            let Some(task) = task else { return Ok(()) };
            // Only what is done later changes.
            let is_done = stored.as_ref().is_some_and(|stored| stored.state == State::Done);
            self.note(|journal| journal.begun(subnet, task))?;
            stored = Some(Stored { task: task.clone(), state: State::Begun });
            if !is_done {
                task.add()?;
            }
            self.note(|journal| journal.done(subnet))?;
            stored = Some(Stored { task: task.clone(), state: State::Done });
            Ok(())
        })();
        (stored, result)
    }

    fn note(&self, line: impl FnOnce(&mut Journal) -> io::Result<()>) -> Result<(), String> {
        let mut inner = self.lock();
        inner.journal.as_mut().map_or(Ok(()), line).map_err(|error| error.to_string())
    }
}

impl Inner {
    /// The next change that can begin.
    fn begin(&mut self) -> Option<(Subnet, Wanted, Option<Stored>)> {
        let may_begin = |subnet: &Subnet| {
            let task =
                self.entries.get(subnet).and_then(|entry| entry.wanted.as_ref()?.task.as_ref());
            self.node_is_done || !task.is_some_and(|task| task.waits)
        };
        let place = self.ready.iter().position(may_begin)?;
        let subnet = self.ready.remove(place)?;
        let entry = self.entries.get_mut(&subnet)?;
        entry.runs = true;
        Some((subnet, entry.wanted.clone()?, entry.stored.clone()))
    }

    /// Takes in the end of a change, and reports it, unless another one was requested meanwhile.
    fn end(
        &mut self,
        subnet: Subnet,
        change: &Change,
        stored: Option<Stored>,
        mut result: Result<(), KernelError>,
    ) {
        let Some(entry) = self.entries.get_mut(&subnet) else { return };
        let before = std::mem::replace(&mut entry.stored, stored);
        if [&before, &entry.stored].into_iter().flatten().any(|s| s.task.of == Of::Node) {
            let is_done = |stored: &Stored| stored.state == State::Done;
            self.node_is_done = entry.stored.as_ref().is_some_and(is_done);
        }
        entry.runs = false;
        if let (Change::Delete(_), Err(error)) = (change, &result) {
            entry.removals += 1;
            if entry.removals >= REMOVALS {
                tracing::warn!(%subnet, %error, "a node that is gone is forgotten");
                entry.stored = None;
                let noted = self.journal.as_mut().map_or(Ok(()), |journal| journal.gone(subnet));
                result = noted.map_err(|error| failed(error.to_string()));
            }
        }
        if result.is_ok() {
            entry.removals = 0;
        }
        if entry.wanted.as_ref().is_some_and(|wanted| wanted.change != *change) {
            self.ready.push_back(subnet);
            return;
        }
        (entry.wanted, entry.last) = (None, Some(result.clone()));
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

impl Annex for Commands {
    fn name(&self) -> &'static str {
        NAME
    }

    fn records(&self) -> Result<Vec<Record>, KernelError> {
        let inner = self.open()?;
        let there = inner.entries.iter().filter(|(_, entry)| entry.wanted.is_none());
        let record = |(subnet, entry): (&Subnet, &Entry)| {
            let Stored { task, state } = entry.stored.as_ref()?;
            let text = task.text();
            let data = if *state == State::Done { text } else { format!("{OUTDATED}{text}") };
            Some(Record::new(NAME, *subnet, data))
        };
        Ok(there.filter_map(record).collect())
    }

    fn apply(&self, changes: &[Change]) -> Vec<Result<(), KernelError>> {
        let mut inner = match self.open() {
            Ok(inner) => inner,
            Err(error) => return vec![Err(error); changes.len()],
        };
        let started = changes.iter().map(|change| {
            let (subnet, wanted) = Wanted::new(change)?;
            let entry = inner.entries.entry(subnet).or_default();
            // One that waits or runs is followed by the new one.
            if entry.wanted.replace(wanted).is_none() && !entry.runs {
                inner.ready.push_back(subnet);
            }
            Err(KernelError::started())
        });
        let started = started.collect();
        self.spawn(&mut inner);
        started
    }

    fn changes(&self) -> Result<Box<dyn Changes>, KernelError> {
        let (listener, events) = unbounded_channel();
        self.open()?.listener = Some(listener);
        Ok(Box::new(Events(events)))
    }

    fn stop(&self) {
        let of_node: Vec<Subnet> = {
            let inner = self.lock();
            let is_done = |entry: &Entry| {
                let stored = entry.stored.as_ref();
                stored.is_some_and(|s| s.task.of == Of::Node && s.state == State::Done)
            };
            let entries = inner.entries.iter().filter(|(_, entry)| is_done(entry));
            entries.map(|(subnet, _)| *subnet).collect()
        };
        for subnet in of_node {
            let stored = self.lock().entries.remove(&subnet).and_then(|entry| entry.stored);
            if let (_, Err(error)) = self.make(subnet, None, stored) {
                tracing::warn!(%error, "a command for the stop of this node failed");
            }
        }
    }

    fn wait(&self, key: &Key, timeout: Duration) -> Result<(), KernelError> {
        let Key::Record(_, subnet) = key else { return Err(KernelError::new(EINVAL)) };
        let end = Instant::now() + timeout;
        let mut inner = self.open()?;
        loop {
            let entry = inner.entries.get(subnet);
            if entry.is_none_or(|entry| entry.wanted.is_none()) {
                return entry.and_then(|entry| entry.last.clone()).unwrap_or(Ok(()));
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(KernelError::timed_out());
            }
            let waited = self.0.ended.wait_timeout(inner, left);
            inner = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

/// The ends of changes.
struct Events(UnboundedReceiver<Invalidation>);

#[async_trait]
impl Changes for Events {
    async fn next(&mut self) -> Result<Invalidation, KernelError> {
        // The sender is dropped when another stream is opened.
        self.0.recv().await.ok_or_else(|| failed("another stream was opened".to_owned()))
    }
}

fn failed(why: String) -> KernelError {
    KernelError::explained(EREMOTEIO, why)
}
