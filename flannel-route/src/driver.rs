//! The driver: the task of a kernel network.
//!
//! Work is done in rounds, one at a time, on a thread that may block. Questions are answered on such
//! a thread too, because the kernel may be slow. The [listener](crate::listener) has its own thread.

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
use flannel_core::kernel::{Invalidation, ProcessNames};
use flannel_core::lease::View;
use flannel_core::network::{Ended, Question};
use flannel_core::runtime::blocking;
use flannel_core::status::Status;
use flannel_core::{Kernel, Result};

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
    /// The questions that the next round answers first.
    asked: Vec<Question>,
    listener: Arc<Listener>,
    schedule: Schedule,
}

/// The work of a round, besides the engine's own.
struct Round {
    questions: Vec<Question>,
    inputs: Option<(Inputs, Instant)>,
    events: Vec<Invalidation>,
    permits: Permits,
}

struct Outcome {
    engine: Box<Engine>,
    /// The time that the questions of plans took; `None` if they were not asked.
    rechecked: Option<Duration>,
}

impl Round {
    /// Does the work. Blocks.
    fn work(
        self,
        mut engine: Box<Engine>,
        gated: &GatedKernel,
        listener: &Listener,
        names: Option<&dyn ProcessNames>,
    ) -> Outcome {
        let kernel = &*gated.kernel;
        // Before the state changes. So a status that is read after an answer is as new as that.
        answer(self.questions, &engine, kernel);
        // Listen first, then read: changes in between become events.
        if self.permits.listen {
            listener.open(kernel.changes());
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
        listener.end_round();
        Outcome { engine, rechecked }
    }
}

/// Answers questions. Blocks.
fn answer(questions: Vec<Question>, engine: &Engine, kernel: &dyn Kernel) {
    for question in questions {
        match question {
            Question::Explain(address, reply) => reply.send(engine.explain(address, kernel)),
            Question::Waiting(reply) => reply.send(engine.waiting()),
            // Dropped, so that nobody waits for the answer.
            _ => {}
        }
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
            asked: Vec::new(),
            listener: Arc::default(),
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

    /// Does one round.
    async fn work(&mut self) {
        // Only this function and `answer` take the engine, and they put it back before they return.
        let Some(engine) = self.engine.take() else { return };
        let started = Instant::now();
        let round = self.round(started, &engine);
        let repairs = !round.events.is_empty();
        let kernel = Arc::clone(&self.kernel);
        let listener = Arc::clone(&self.listener);
        let names = self.names.clone();
        let work = move || round.work(engine, &kernel, &listener, names.as_deref());
        let Outcome { mut engine, rechecked } = self.on_a_thread(work).await;
        let newly_failing = std::mem::take(&mut engine.table.newly_failing);
        let done = Done { started, repairs, rechecked, newly_failing };
        self.schedule.note(Instant::now(), &done, &engine, &self.listener);
        self.publish(&engine);
        self.engine = Some(engine);
    }

    /// Answers the questions, although no round is due.
    async fn answer(&mut self) {
        let Some(engine) = self.engine.take() else { return };
        let questions = std::mem::take(&mut self.asked);
        let kernel = Arc::clone(&self.kernel);
        let work = move || {
            answer(questions, &engine, &*kernel.kernel);
            engine
        };
        self.engine = Some(self.on_a_thread(work).await);
    }

    /// Does work on a thread that may block, and notes the arrival of inputs meanwhile.
    async fn on_a_thread<T: Send + 'static>(
        &mut self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> T {
        let mut job = pin!(blocking(work));
        loop {
            tokio::select! {
                done = &mut job => return done,
                // The latency of a view includes its wait for the end of this round.
                Ok(()) = self.views.changed(), if self.arrived.is_none() => {
                    self.arrived = Some(Instant::now());
                }
            }
        }
    }

    /// The work that is due now.
    fn round(&mut self, now: Instant, engine: &Engine) -> Round {
        let permits = self.schedule.permits(now, engine, &self.listener);
        if permits.resync {
            self.listener.invalidate_everything();
        }
        // The last view counts, even if there will be no more.
        let inputs = self.arrived.take().map(|arrived| {
            let view = self.views.borrow_and_update().clone();
            let mtus = self.mtus.borrow_and_update().clone();
            let handshakes = self.handshakes.borrow_and_update().clone();
            (Inputs { view, mtus, handshakes }, arrived)
        });
        let questions = std::mem::take(&mut self.asked);
        Round { questions, inputs, events: self.listener.begin_round(), permits }
    }

    fn publish(&self, engine: &Engine) {
        let mut status = engine.status();
        if let Some(error) = self.listener.error() {
            status.in_sync = false;
            status.kernel_error.get_or_insert(error);
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
                self.asked.push(question);
            }
            return true;
        }
        while self.arrived.is_none() {
            let now = Instant::now();
            let Some(engine) = &self.engine else { return true };
            let deadline = self.schedule.deadline(now, engine, self.listener.has_events());
            // The runtime's clock counts whole milliseconds, too long for a repair to wait.
            if deadline <= now {
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
                Some(question) = self.questions.recv() => {
                    self.asked.push(question);
                    self.answer().await;
                }
                () = self.listener.heard() => {}
                () = sleep_until(deadline) => break,
            }
        }
        true
    }
}
