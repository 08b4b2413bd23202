//! When to do what: the clock and the task of a kernel network.
//!
//! The one thing to know: work is done in rounds, one at a time on a thread that may block, while this task goes on
//! listening. What is rare is done at once; what never ends is slowed down ([`RateLimiter`]), except for leases.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep_until};

use crate::engine::{Engine, Gate, Reads};
use crate::pending_events::PendingEvents;
use crate::rate_limiter::RateLimiter;
use flannel_core::Kernel;
use flannel_core::Result;
use flannel_core::kernel::{Changes, Invalidation, KernelError};
use flannel_core::lease::View;
use flannel_core::network::{Ended, Question};
use flannel_core::status::Status;

/// With everything in order, the kernel is read once in this time, in case a message was never sent.
const RESYNC: Duration = Duration::from_secs(300);
/// After a failure, the kernel is read again: first after this time, then after twice that, and so on.
const RETRY_FIRST: Duration = Duration::from_millis(100);
const RETRY_LONGEST: Duration = Duration::from_secs(30);
/// However much others do, the kernel is read at most this often, and no more than a fifth of the time, …
const READ_GAP: Duration = Duration::from_millis(100);
/// … but after this long a rest as often as fits into it without waiting.
const READ_REST: Duration = Duration::from_secs(1);
/// Single objects are put back at most this often, and no more than half of the time, but after a rest as often as fits into half of it:
/// whoever damages a nexthop object makes the kernel work for milliseconds where there are 50,000 routes, and us wait.
const REPAIR_GAP: Duration = Duration::from_millis(1);
const REPAIR_REST: Duration = Duration::from_millis(100);
/// Answers to plans' questions are asked for again at most this often, and no more than a fifth of the time, …
const RECHECK: Duration = Duration::from_secs(1);
/// … unless the link that routes are on changed: then this often.
const HURRY: Duration = Duration::from_millis(100);

/// During a round what the kernel tells is pending this often: nothing would be done about it before the end, and the
/// kernel works faster if it wakes nobody with every message.
const HEAR: Duration = Duration::from_millis(4);
/// After a round no more invalidations than this are taken in before the next one begins.
const MOST_AT_ONCE: usize = 1 << 16;

/// Nothing is written once this is dropped.
struct CloseOnDrop(Arc<Gate>);

impl Drop for CloseOnDrop {
    fn drop(&mut self) {
        self.0.close();
    }
}

/// The ear on the kernel, or why there is none.
enum Listener {
    Unopened,
    Open(Box<dyn Changes>),
    Closed(KernelError),
}

impl Listener {
    /// Waits for news; for ever if there is no ear.
    async fn next(&mut self) -> Invalidation {
        let Self::Open(changes) = self else { return std::future::pending().await };
        match changes.next().await {
            Ok(invalidation) => invalidation,
            Err(error) => {
                *self = Self::Closed(error);
                Invalidation::Everything
            }
        }
    }
}

/// The one loop that owns the engine.
pub(crate) struct Driver {
    kernel: Arc<dyn Kernel>,
    /// Away while a blocking job has it.
    engine: Option<Box<Engine>>,
    status: watch::Sender<Arc<Status>>,
    views: watch::Receiver<View>,
    /// Since when there is a view that was not taken in; `None` if there is none.
    arrived: Option<Instant>,
    questions: mpsc::Receiver<Question>,
    listener: Listener,
    pending: PendingEvents,
    reads: Reads,
    /// When to make sure that all is well.
    resync_next: Instant,
    /// When to do something about what fails; `None` if nothing does.
    retry_next: Option<Instant>,
    read_limiter: RateLimiter,
    repair_limiter: RateLimiter,
    /// What failed is put again and, every other time, the kernel is read again.
    retry_by_reading: bool,
    retry_after: Duration,
    recheck_next: Instant,
    hurry_next: Instant,
}

/// What a round of work is about, apart from what the engine knows.
struct Round {
    view: Option<(View, Instant)>,
    invalidation: Vec<Invalidation>,
    listen: bool,
    retry: bool,
    may_read: bool,
    may_recheck: bool,
    may_hurry: bool,
}

/// What came of it.
struct Outcome {
    engine: Box<Engine>,
    /// How long it took to ask again what plans had asked; `None` if that was not done.
    rechecked: Option<Duration>,
    listener: Option<std::result::Result<Box<dyn Changes>, KernelError>>,
}

impl Round {
    /// Does the work. Blocks.
    fn work(self, mut engine: Box<Engine>, kernel: &dyn Kernel, gate: &Gate) -> Outcome {
        // Listen first, then read: what changes in between is pending.
        let listener = self.listen.then(|| kernel.changes());
        if self.listen {
            engine.invalidate(&Invalidation::Everything, kernel);
        }
        self.invalidation.iter().for_each(|invalidation| engine.invalidate(invalidation, kernel));
        let urgent = self.may_hurry && engine.has_urgent_lookups();
        let recheck = urgent || self.may_recheck && engine.has_stale_lookups();
        let rechecked = recheck.then(|| {
            let started = Instant::now();
            engine.recheck_lookups(kernel);
            started.elapsed()
        });
        if let Some((view, arrived)) = self.view {
            engine.view(&view, arrived, kernel);
        }
        if self.retry {
            engine.retry();
        }
        // Closed: the driver is gone, and nobody asks.
        let _ = engine.settle(kernel, gate, self.may_read);
        Outcome { engine, rechecked, listener }
    }
}

impl Driver {
    pub(crate) fn new(
        kernel: Arc<dyn Kernel>,
        engine: Box<Engine>,
        status: watch::Sender<Arc<Status>>,
        views: watch::Receiver<View>,
        questions: mpsc::Receiver<Question>,
    ) -> Self {
        Self {
            kernel,
            engine: Some(engine),
            status,
            views,
            arrived: Some(Instant::now()),
            questions,
            listener: Listener::Unopened,
            pending: PendingEvents::default(),
            reads: Reads::default(),
            resync_next: Instant::now() + RESYNC,
            retry_next: None,
            read_limiter: RateLimiter::new(READ_GAP, READ_REST),
            repair_limiter: RateLimiter::new(REPAIR_GAP, REPAIR_REST),
            retry_by_reading: false,
            retry_after: RETRY_FIRST,
            recheck_next: Instant::now(),
            hurry_next: Instant::now(),
        }
    }

    /// Works until there will be no more views.
    pub(crate) async fn run(mut self) -> Result<Ended> {
        let gate = CloseOnDrop(Arc::default());
        loop {
            self.work(&gate.0).await;
            if !self.wait().await {
                return Ok(Ended::ViewsClosed);
            }
        }
    }

    /// Does all there is to do, listening meanwhile so that the kernel's messages do not pile up.
    async fn work(&mut self, gate: &Arc<Gate>) {
        let round = self.round();
        let started = Instant::now();
        let repairs = !round.invalidation.is_empty();
        // The invariant: only this function takes the engine, and it puts it back before it returns.
        let Some(engine) = self.engine.take() else { return };
        let (kernel, gate) = (Arc::clone(&self.kernel), Arc::clone(gate));
        let mut job = tokio::task::spawn_blocking(move || round.work(engine, &*kernel, &gate));
        let Outcome { mut engine, rechecked, listener } = loop {
            tokio::select! {
                done = &mut job => match done {
                    Ok(done) => break done,
                    Err(panic) => std::panic::resume_unwind(panic.into_panic()),
                },
                () = tokio::time::sleep(HEAR) => self.catch_up().await,
                // A view that comes meanwhile has to wait; that counts.
                Ok(()) = self.views.changed(), if self.arrived.is_none() => self.arrived = Some(Instant::now()),
            }
        };
        match listener {
            Some(Ok(changes)) => self.listener = Listener::Open(changes),
            Some(Err(error)) => self.listener = Listener::Closed(error),
            None => {}
        }
        let now = Instant::now();
        if let Some(took) = rechecked {
            let after = |gap: Duration| now + gap.max(4 * took);
            (self.recheck_next, self.hurry_next) = (after(RECHECK), after(HURRY));
        }
        let reads = engine.reads();
        if reads.tries != self.reads.tries {
            self.read_limiter.pass(now, 4 * (reads.took - self.reads.took));
        } else if repairs {
            // Most of what takes longer was no repair.
            self.repair_limiter.pass_after(now, (now - started).min(REPAIR_REST));
        }
        if engine.take_newly_failing() {
            (self.retry_after, self.retry_by_reading) = (RETRY_FIRST, false);
        }
        self.schedule(&engine);
        self.publish(&engine);
        self.engine = Some(engine);
        self.catch_up().await;
    }

    /// Hears all that the kernel has told so far: of our own changes too where it does not say whose they are, and those
    /// look like damage as soon as leases want something else.
    async fn catch_up(&mut self) {
        for _ in 0..MOST_AT_ONCE {
            tokio::select! {
                biased;
                invalidation = self.listener.next() => self.pending.hear(invalidation),
                () = std::future::ready(()) => return,
            }
        }
    }

    /// What is to be done now.
    fn round(&mut self) -> Round {
        let now = Instant::now();
        let resync = now >= self.resync_next;
        if resync {
            self.resync_next = now + RESYNC;
        }
        let due = resync || self.retry_next.is_some_and(|next| now >= next);
        // A stream that broke is opened again at the pace of all that failed.
        let listen = match self.listener {
            Listener::Unopened => true,
            Listener::Open(_) => false,
            Listener::Closed(_) => due,
        };
        let refused = self.engine.as_ref().is_some_and(|r| r.is_failing() && !r.is_unreadable());
        let retry = due && !resync && !listen && refused && !self.retry_by_reading;
        if due {
            self.retry_by_reading = retry;
        }
        if due && !retry {
            self.pending.hear(Invalidation::Everything);
        }
        // When nobody will send more, the last view still counts.
        let view =
            self.arrived.take().map(|arrived| (self.views.borrow_and_update().clone(), arrived));
        Round {
            view,
            invalidation: self.pending.take(),
            listen,
            retry,
            may_read: due || listen || self.read_limiter.is_ready(now),
            may_recheck: now >= self.recheck_next,
            may_hurry: now >= self.hurry_next,
        }
    }

    fn publish(&self, engine: &Engine) {
        let mut status = engine.status();
        if let Listener::Closed(error) = &self.listener {
            status.in_sync = false;
            status.kernel_error.get_or_insert_with(|| error.clone());
        }
        self.status.send_if_modified(|old| {
            let changed = **old != status;
            if changed {
                *old = Arc::new(status);
            }
            changed
        });
    }

    /// Decides when to read the kernel next: soon after a failure, else rarely.
    fn schedule(&mut self, engine: &Engine) {
        let now = Instant::now();
        let read = engine.reads().done != self.reads.done;
        self.reads = engine.reads();
        if read {
            self.resync_next = now + RESYNC;
        }
        if !engine.is_failing() && matches!(self.listener, Listener::Open(_)) {
            (self.retry_after, self.retry_next) = (RETRY_FIRST, None);
            return;
        }
        let next = now + self.retry_after;
        if read || self.retry_next.is_none_or(|next| now >= next) {
            self.retry_next = Some(next);
            self.retry_after = (self.retry_after * 2).min(RETRY_LONGEST);
        } else {
            self.retry_next = self.retry_next.map(|before| before.min(next));
        }
    }

    /// Waits until there is something to do; false if there will be no more views.
    async fn wait(&mut self) -> bool {
        if self.engine.as_ref().is_some_and(|engine| engine.is_unfinished()) {
            while let Ok(question) = self.questions.try_recv() {
                self.answer(question);
            }
            return true;
        }
        while self.arrived.is_none() {
            let deadline = self.deadline();
            if deadline <= Instant::now() {
                // The clock counts whole milliseconds, in which a peer would be unreachable.
                self.catch_up().await;
                break;
            }
            tokio::select! {
                changed = self.views.changed() => match changed {
                    Ok(()) => self.arrived = Some(Instant::now()),
                    Err(_) => return false,
                },
                Some(question) = self.questions.recv() => self.answer(question),
                invalidation = self.listener.next() => self.pending.hear(invalidation),
                () = sleep_until(deadline) => break,
            }
        }
        true
    }

    /// When there is something to do if nothing happens meanwhile.
    fn deadline(&self) -> Instant {
        let now = Instant::now();
        let mut deadline =
            self.retry_next.map_or(self.resync_next, |next| next.min(self.resync_next));
        if !self.pending.is_empty() {
            deadline = deadline.min(self.repair_limiter.next(now));
        }
        let Some(engine) = &self.engine else { return deadline };
        if engine.is_unread() && !engine.is_unreadable() {
            deadline = deadline.min(self.read_limiter.next(now));
        }
        if engine.has_urgent_lookups() {
            deadline = deadline.min(self.hurry_next);
        }
        if engine.has_stale_lookups() {
            deadline = deadline.min(self.recheck_next);
        }
        deadline
    }

    fn answer(&self, question: Question) {
        let Some(engine) = &self.engine else { return };
        // Whoever asked may have gone.
        match question {
            Question::Explain(address, answer) => {
                drop(answer.send(engine.explain(address, &*self.kernel)));
            }
            Question::Waiting(answer) => drop(answer.send(engine.waiting())),
        }
    }
}
