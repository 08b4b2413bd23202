//! The driver: the task of a kernel network.
//!
//! Work is done in rounds, one at a time, on a thread that may block. Questions are answered on
//! such a thread too, because the kernel may be slow. The [listener](crate::event_listener) has its
//! own thread.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep_until};

use crate::admission::{Handshakes, PathMtus};
use crate::engine::{Engine, Inputs};
use crate::event_listener::EventListener;
use crate::gated_kernel::GatedKernel;
use crate::kernel_network::{EngineOptions, KernelNetwork};
use crate::schedule::{Permits, RoundSummary, Schedule};
use flannel_core::kernel::{Invalidation, ProcessNames};
use flannel_core::lease::View;
use flannel_core::network::{Ended, Question};
use flannel_core::runtime::blocking;
use flannel_core::status::Status;
use flannel_core::{Kernel, Result};

/// The loop that owns the engine.
pub(crate) struct Driver {
    kernel: Arc<GatedKernel>,
    names: Option<Arc<dyn ProcessNames>>,
    /// `None` while a round has the engine.
    engine: Option<Box<Engine>>,
    status: watch::Sender<Arc<Status>>,
    views: watch::Receiver<View>,
    mtus: watch::Receiver<PathMtus>,
    handshakes: watch::Receiver<Handshakes>,
    /// The arrival of the first input that was not taken in yet, or `None` if all were.
    arrived: Option<Instant>,
    questions: mpsc::Receiver<Question>,
    /// The questions that the next round answers first.
    asked: Vec<Question>,
    listener: Arc<EventListener>,
    schedule: Schedule,
}

/// The work of a round.
struct Round {
    /// The questions that are answered first.
    questions: Vec<Question>,
    inputs: Option<NewInputs>,
    events: Vec<Invalidation>,
    permits: Permits,
}

/// Inputs that the engine has not taken in yet.
struct NewInputs {
    inputs: Inputs,
    arrived: Instant,
}

/// What a round returns.
struct FinishedRound {
    engine: Box<Engine>,
    /// The time that the lookups of plans took, or `None` if none was repeated.
    rechecked: Option<Duration>,
}

impl Round {
    /// Does the work. Blocks.
    fn work(
        self,
        mut engine: Box<Engine>,
        gated: &GatedKernel,
        listener: &EventListener,
        names: Option<&dyn ProcessNames>,
    ) -> FinishedRound {
        let kernel = &*gated.kernel;
        // The state changes after the answers. So a status that is read after an answer is not
        // older than the answer.
        answer(self.questions, &engine, kernel);
        // Listen first, then read: changes in between become events.
        if self.permits.listen {
            listener.open(kernel.changes());
            engine.invalidate(&Invalidation::Everything, names);
        }
        self.events.iter().for_each(|event| engine.invalidate(event, names));
        let urgent = self.permits.recheck_urgent && engine.stale_lookups.is_urgent();
        let recheck = urgent || self.permits.recheck && engine.stale_lookups.is_any();
        let rechecked = recheck.then(|| {
            let started = Instant::now();
            engine.recheck_lookups(kernel);
            started.elapsed()
        });
        if let Some(NewInputs { inputs, arrived }) = self.inputs {
            engine.view(&inputs, arrived, kernel);
        }
        if self.permits.retry {
            engine.table.retry();
        }
        // A closed gate means that the driver was dropped.
        let _ = engine.settle(gated, self.permits.read);
        listener.end_round();
        FinishedRound { engine, rechecked }
    }
}

/// Answers questions. Blocks.
fn answer(questions: Vec<Question>, engine: &Engine, kernel: &dyn Kernel) {
    for question in questions {
        match question {
            Question::Explain(address, reply) => reply.send(engine.explain(address, kernel)),
            Question::Waiting(reply) => reply.send(engine.waiting()),
            // An unknown question is dropped, so that nobody waits for an answer.
            _ => {}
        }
    }
}

impl Drop for Driver {
    /// Waits for the batch that is being applied. Nothing is written afterwards.
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
        let finished = self
            .on_a_thread(move || round.work(engine, &kernel, &listener, names.as_deref()))
            .await;
        let FinishedRound { mut engine, rechecked } = finished;
        let newly_failing = std::mem::take(&mut engine.table.newly_failing);
        let summary = RoundSummary { started, repairs, rechecked, newly_failing };
        self.schedule.note(Instant::now(), &summary, &engine, &self.listener);
        self.publish(&engine);
        self.engine = Some(engine);
    }

    /// Answers the questions, although no round is due.
    async fn answer(&mut self) {
        let Some(engine) = self.engine.take() else { return };
        let questions = std::mem::take(&mut self.asked);
        let kernel = Arc::clone(&self.kernel);
        let engine = self
            .on_a_thread(move || {
                answer(questions, &engine, &*kernel.kernel);
                engine
            })
            .await;
        self.engine = Some(engine);
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
        // The last view counts, even if the channel is closed.
        let inputs = self.arrived.take().map(|arrived| {
            let view = self.views.borrow_and_update().clone();
            let mtus = self.mtus.borrow_and_update().clone();
            let handshakes = self.handshakes.borrow_and_update().clone();
            NewInputs { inputs: Inputs { view, mtus, handshakes }, arrived }
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

    /// Waits until there is something to do. Returns false if there will be no more views.
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
                // An error means that the sender was dropped, and that nothing more will come.
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
