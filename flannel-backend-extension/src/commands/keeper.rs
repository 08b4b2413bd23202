//! Runs the commands of tasks, several at a time, and remembers which are in place.

mod queue;
#[cfg(test)]
mod tests;

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use flannel_core::Subnet;
use flannel_core::kernel::{Changes, Invalidation, KernelError, Outcome, RecordKeeper};
use flannel_core::object::{Change, Key, Record};
use flannel_core::runtime::lock;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use self::queue::{EINVAL, Entry, Job, Queue, Unmade, Wanted, of_another};
use crate::commands::files::{Files, Progress, Stored};
use crate::commands::task::{Names, Of, Task};

/// The most commands at a time.
const AT_ONCE: usize = 8;
/// The longest time of the command that removes the task of this node, when the keeper stops.
const STOP: Duration = Duration::from_secs(10);

/// A record keeper whose records are [tasks](Task). Clones are handles of the same keeper.
#[derive(Clone)]
pub struct Commands(Arc<Shared>);

impl fmt::Debug for Commands {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Commands").finish_non_exhaustive()
    }
}

struct Shared {
    names: Names,
    inner: Mutex<Queue>,
    ended: Condvar,
    /// Commands that run are to end.
    stopped: AtomicBool,
    /// The stop is complete.
    has_ended: AtomicBool,
}

impl Commands {
    /// A record keeper that keeps each task in a file in `dir`, or only in memory if it is `None`.
    /// The directory is made with the first task. Its parent must exist. One keeper at a time may
    /// use it, as [`Keepers`](crate::commands::Keepers) ensures.
    pub fn new(names: Names, dir: Option<PathBuf>) -> Self {
        let inner = Mutex::new(Queue { files: Files::new(dir), ..Queue::default() });
        Self(Arc::new(Shared {
            names,
            inner,
            ended: Condvar::new(),
            stopped: AtomicBool::new(false),
            has_ended: AtomicBool::new(false),
        }))
    }

    /// Whether it was stopped, so that its directory is free for another keeper.
    pub(super) fn has_ended(&self) -> bool {
        self.0.has_ended.load(Ordering::Acquire)
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        lock(&self.0.inner)
    }

    /// The state after the files were read.
    fn open(&self) -> Result<MutexGuard<'_, Queue>, KernelError> {
        let mut inner = self.lock();
        if !inner.is_open {
            let tasks =
                inner.files.read().map_err(|error| KernelError::Other(error.to_string()))?;
            let entry = |stored| Entry { stored: Some(stored), ..Entry::default() };
            inner.entries = tasks.into_iter().map(|(key, task)| (key, entry(task))).collect();
            inner.is_open = true;
        }
        Ok(inner)
    }

    /// Begins the changes that can begin, each on a thread.
    fn begin(&self, inner: &mut Queue) {
        while !self.0.stopped.load(Ordering::Relaxed)
            && inner.running < AT_ONCE
            && let Some(job) = inner.next()
        {
            let subnet = job.subnet;
            let change = job.wanted.change.clone();
            let commands = self.clone();
            let thread = std::thread::Builder::new().name(self.0.names.keeper.into());
            inner.running += 1;
            if let Err(error) = thread.spawn(move || commands.run(job)) {
                let stored = inner.entries.get(&subnet).and_then(|entry| entry.stored.clone());
                let why = Unmade::Other(format!("a thread: {error}"));
                inner.end(subnet, &change, stored, Err(why), false);
                self.0.ended.notify_all();
            }
        }
    }

    /// Makes a change, and begins the next ones.
    fn run(&self, job: Job) {
        let Job { subnet, wanted, mut stored, gives_up, only_removes } = job;
        let task = wanted.task.as_ref().filter(|_| !only_removes);
        let made =
            catch_unwind(AssertUnwindSafe(|| self.make(subnet, task, &mut stored, gives_up)));
        let panicked = || Err(Unmade::Other("the thread of the command panicked".to_owned()));
        let result = made.unwrap_or_else(|_| panicked());
        let mut inner = self.lock();
        inner.end(subnet, &wanted.change, stored, result, only_removes);
        self.begin(&mut inner);
        self.0.ended.notify_all();
    }

    /// Puts a task in place, or removes the present one. Keeps in `stored` what is on this host.
    fn make(
        &self,
        subnet: Subnet,
        task: Option<&Task>,
        stored: &mut Option<Stored>,
        gives_up: bool,
    ) -> Result<(), Unmade> {
        let is_to_go = |old: &Stored| match task {
            // A boot has removed what an earlier task did.
            Some(task) => !old.task.adds_the_same(task) && old.state != Progress::Earlier,
            None => true,
        };
        if let Some(old) = stored.as_ref().filter(|old| is_to_go(old)).cloned() {
            let unsure = Some(Stored { state: Progress::Unsure, ..old.clone() });
            self.store(subnet, stored, unsure)?;
            if let Err(why) = old.task.remove(&self.0.names, &self.0.stopped) {
                // After a boot there is usually nothing to remove.
                let gives_up = gives_up || old.state == Progress::Earlier;
                if !gives_up || self.0.stopped.load(Ordering::Relaxed) {
                    return Err(Unmade::Removal(why));
                }
                tracing::warn!(%subnet, %why, "a command that removes a node is given up");
            }
            self.store(subnet, stored, None)?;
        }
        let Some(task) = task else { return Ok(()) };
        // If only the commands for later are others, nothing is run.
        if stored.as_ref().is_none_or(|stored| stored.state != Progress::Done) {
            let unsure = Some(Stored { task: task.clone(), state: Progress::Unsure });
            self.store(subnet, stored, unsure)?;
            task.add(&self.0.names, &self.0.stopped)?;
        }
        let done = Some(Stored { task: task.clone(), state: Progress::Done });
        Ok(self.store(subnet, stored, done)?)
    }

    fn store(
        &self,
        subnet: Subnet,
        stored: &mut Option<Stored>,
        now: Option<Stored>,
    ) -> Result<(), String> {
        let written = self.lock().files.write(subnet, now.as_ref());
        written.map_err(|error| error.to_string())?;
        *stored = now;
        Ok(())
    }
}

impl RecordKeeper for Commands {
    fn name(&self) -> &'static str {
        self.0.names.keeper
    }

    fn records(&self) -> Result<Vec<Record>, KernelError> {
        let inner = self.open()?;
        let there = inner.entries.iter().filter(|(_, entry)| entry.is_idle());
        let record = |(subnet, entry): (&Subnet, &Entry)| {
            let Stored { task, state } = entry.stored.as_ref()?;
            let in_place = *state == Progress::Done;
            Some(task.record_with(self.0.names.keeper, *subnet, in_place))
        };
        Ok(there.filter_map(record).collect())
    }

    fn apply(&self, changes: &[Change]) -> Vec<Outcome> {
        let mut inner = match self.open() {
            Ok(_) if self.0.stopped.load(Ordering::Relaxed) => {
                let error = KernelError::Other("this node stops".to_owned());
                return vec![Outcome::Failed(error); changes.len()];
            }
            Ok(inner) => inner,
            Err(error) => return vec![Outcome::Failed(error); changes.len()],
        };
        let mut outcomes = Vec::with_capacity(changes.len());
        for change in changes {
            outcomes.push(match Wanted::new(change, self.0.names.keeper) {
                Ok((subnet, wanted)) => {
                    inner.want(subnet, wanted);
                    Outcome::Started
                }
                Err(error) => Outcome::Failed(error),
            });
        }
        self.begin(&mut inner);
        outcomes
    }

    fn changes(&self) -> Result<Box<dyn Changes>, KernelError> {
        let (listener, events) = unbounded_channel();
        self.lock().listener = Some(listener);
        Ok(Box::new(Events(events)))
    }

    /// Ends the commands that run, and then removes the task of this node. Nothing begins any more.
    fn stop(&self) {
        self.0.stopped.store(true, Ordering::Relaxed);
        let mut inner = self.lock();
        while inner.running > 0 {
            inner = self.0.ended.wait(inner).unwrap_or_else(PoisonError::into_inner);
        }
        let of_node = inner.entries.iter().filter(|(_, entry)| {
            let stored = entry.stored.as_ref();
            stored.is_some_and(|s| s.task.of == Of::Node && s.state != Progress::Earlier)
        });
        let of_node: Vec<(Subnet, Option<Stored>)> =
            of_node.map(|(subnet, entry)| (*subnet, entry.stored.clone())).collect();
        drop(inner);
        for (subnet, mut stored) in of_node {
            if let Some(Stored { task, .. }) = &mut stored {
                task.timeout = task.timeout.min(STOP.as_secs());
                if let Err(error) = task.remove(&self.0.names, &AtomicBool::new(false)) {
                    tracing::warn!(%error, "a command for the stop of this node failed");
                }
            }
            if let Err(error) = self.store(subnet, &mut stored, None) {
                tracing::warn!(%error, "the stop of this node is not noted");
            }
        }
        self.0.has_ended.store(true, Ordering::Release);
    }

    fn wait(&self, key: &Key, timeout: Duration) -> Outcome {
        let Key::Record(keeper, subnet) = key else {
            return Outcome::Failed(KernelError::new(EINVAL));
        };
        if *keeper != self.0.names.keeper {
            return Outcome::Failed(of_another(keeper, self.0.names.keeper));
        }
        let end = Instant::now() + timeout;
        let mut inner = match self.open() {
            Ok(inner) => inner,
            Err(error) => return Outcome::Failed(error),
        };
        loop {
            let entry = inner.entries.get(subnet);
            if entry.is_none_or(Entry::is_idle) {
                let last = entry.and_then(|entry| entry.last.clone());
                return last.map_or(Outcome::Done, Outcome::from);
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Outcome::Started;
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
        self.0
            .recv()
            .await
            .ok_or_else(|| KernelError::Other("another stream was opened".to_owned()))
    }
}
