//! The driver: the task of a kernel network.
//!
//! Work is done in rounds, one at a time, on a thread that may block. Meanwhile this task listens.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep_until};

use crate::admission::{Handshakes, PathMtus};
use crate::engine::{Engine, Inputs};
use crate::gated_kernel::GatedKernel;
use crate::kernel_network::{EngineOptions, KernelNetwork};
use crate::listener::Listener;
use crate::schedule::{Done, Permits, Schedule};
use flannel_core::Result;
use flannel_core::kernel::{Changes, Invalidation, KernelError, ProcessNames};
use flannel_core::lease::View;
use flannel_core::network::{Ended, Question};
use flannel_core::runtime::blocking;
use flannel_core::status::Status;

/// The time between two looks at the kernel's events during a round. No event is handled before the
/// end of the round, and the kernel is faster if messages do not wake a listener.
const LISTEN: Duration = Duration::from_millis(4);

/// The one loop that owns the engine.
pub(crate) struct Driver {
    kernel: Arc<GatedKernel>,
    names: Option<Arc<dyn ProcessNames>>,
    /// `None` while a round has it.
    engine: Option<Box<Engine>>,
    status: watch::Sender<Arc<Status>>,
    views: watch::Receiver<View>,
    mtus: watch::Receiver<PathMtus>,
    handshakes: watch::Receiver<Handshakes>,
    /// The arrival of an input that was not taken in yet.
    arrived: Option<Instant>,
    questions: mpsc::Receiver<Question>,
    listener: Listener,
    schedule: Schedule,
}

/// The work of a round, besides the engine's own.
struct Round {
    inputs: Option<(Inputs, Instant)>,
    events: Vec<Invalidation>,
    permits: Permits,
}

struct Outcome {
    engine: Box<Engine>,
    /// The time that the questions of plans took; `None` if they were not asked.
    rechecked: Option<Duration>,
    stream: Option<std::result::Result<Box<dyn Changes>, KernelError>>,
}

impl Round {
    /// Does the work. Blocks.
    fn work(
        self,
        mut engine: Box<Engine>,
        gated: &GatedKernel,
        names: Option<&dyn ProcessNames>,
    ) -> Outcome {
        let kernel = &*gated.kernel;
        // Listen first, then read: changes in between become events.
        let stream = self.permits.listen.then(|| kernel.changes());
        if self.permits.listen {
            engine.invalidate(&Invalidation::Everything, names);
        }
        self.events.iter().for_each(|event| engine.invalidate(event, names));
        let urgent = self.permits.recheck_urgent && engine.lookups.is_urgent();
        let recheck = urgent || self.permits.recheck && engine.lookups.is_any();
        let rechecked = recheck.then(|| {
            let started = Instant::now();
            engine.recheck_lookups(kernel);
            started.elapsed()
        });
        if let Some((inputs, arrived)) = self.inputs {
            engine.view(&inputs, arrived, kernel);
        }
        if self.permits.retry {
            engine.table.retry();
        }
        // A closed gate means that the driver was dropped.
        let _ = engine.settle(gated, self.permits.read);
        Outcome { engine, rechecked, stream }
    }
}

/// Nothing is written after this is dropped.
impl Drop for Driver {
    fn drop(&mut self) {
        self.kernel.close();
    }
}

impl Driver {
    pub(crate) fn new(network: KernelNetwork, views: watch::Receiver<View>) -> Self {
        let KernelNetwork { kernel, engine, status, questions, options, .. } = network;
        let EngineOptions { resync, path_mtus, handshakes, process_names, .. } = options;
        let now = Instant::now();
        Self {
            kernel: Arc::new(GatedKernel::new(kernel)),
            names: process_names,
            engine: Some(engine),
            status,
            views,
            mtus: path_mtus.unwrap_or_else(|| watch::channel(PathMtus::default()).1),
            handshakes: handshakes.unwrap_or_else(|| watch::channel(Handshakes::default()).1),
            arrived: Some(now),
            questions,
            listener: Listener::default(),
            schedule: Schedule::new(now, resync),
        }
    }

    /// Works until there will be no more views.
    pub(crate) async fn run(mut self) -> Result<Ended> {
        loop {
            self.work().await;
            if !self.wait().await {
                return Ok(Ended::ViewsClosed);
            }
        }
    }

    /// Does one round, and takes in the kernel's events meanwhile, so that they do not pile up.
    async fn work(&mut self) {
        // Only this function takes the engine, and it puts it back before it returns.
        let Some(engine) = self.engine.take() else { return };
        let started = Instant::now();
        let round = self.round(started, &engine);
        let repairs = !round.events.is_empty();
        let (kernel, names) = (Arc::clone(&self.kernel), self.names.clone());
        let work = move || round.work(engine, &kernel, names.as_deref());
        let mut job = pin!(blocking(work));
        let Outcome { mut engine, rechecked, stream } = loop {
            tokio::select! {
                done = &mut job => break done,
                () = tokio::time::sleep(LISTEN) => self.listener.catch_up().await,
                // The latency of a view includes its wait for the end of this round.
                Ok(()) = self.views.changed(), if self.arrived.is_none() => {
                    self.arrived = Some(Instant::now());
                }
            }
        };
        if let Some(stream) = stream {
            self.listener.set(stream);
        }
        let newly_failing = std::mem::take(&mut engine.table.newly_failing);
        let done = Done { started, repairs, rechecked, newly_failing };
        self.schedule.note(Instant::now(), &done, &engine, &self.listener);
        self.publish(&engine);
        self.engine = Some(engine);
        self.listener.catch_up().await;
    }

    /// The work that is due now.
    fn round(&mut self, now: Instant, engine: &Engine) -> Round {
        let permits = self.schedule.permits(now, engine, &self.listener);
        if permits.resync {
            self.listener.pending.push(Invalidation::Everything);
        }
        // The last view counts, even if there will be no more.
        let inputs = self.arrived.take().map(|arrived| {
            let view = self.views.borrow_and_update().clone();
            let mtus = self.mtus.borrow_and_update().clone();
            let handshakes = self.handshakes.borrow_and_update().clone();
            (Inputs { view, mtus, handshakes }, arrived)
        });
        Round { inputs, events: self.listener.pending.take(), permits }
    }

    fn publish(&self, engine: &Engine) {
        let mut status = engine.status();
        if let Some(error) = &self.listener.error {
            status.in_sync = false;
            status.kernel_error.get_or_insert_with(|| error.clone());
        }
        self.status.send_if_modified(|old| {
            let changed = **old != status;
            *old = Arc::new(status);
            changed
        });
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
            let now = Instant::now();
            let Some(engine) = &self.engine else { return true };
            let deadline = self.schedule.deadline(now, engine, !self.listener.pending.is_empty());
            if deadline <= now {
                // The runtime's clock counts whole milliseconds, too long for a repair to wait.
                self.listener.catch_up().await;
                break;
            }
            tokio::select! {
                changed = self.views.changed() => match changed {
                    Ok(()) => self.arrived = Some(Instant::now()),
                    Err(_) => return false,
                },
                // Without a sender there are no more.
                Ok(()) = self.mtus.changed() => self.arrived = Some(Instant::now()),
                Ok(()) = self.handshakes.changed() => self.arrived = Some(Instant::now()),
                Some(question) = self.questions.recv() => self.answer(question),
                () = self.listener.hear() => {}
                () = sleep_until(deadline) => break,
            }
        }
        true
    }

    fn answer(&self, question: Question) {
        let Some(engine) = &self.engine else { return };
        match question {
            Question::Explain(address, reply) => {
                reply.send(engine.explain(address, &*self.kernel.kernel));
            }
            Question::Waiting(reply) => reply.send(engine.waiting()),
            // Dropped, so that nobody waits for the answer.
            _ => {}
        }
    }
}
