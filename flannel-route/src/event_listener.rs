//! The event listener: a thread that reads the kernel's events, and the events that wait for a
//! round.
//!
//! Reading may block. For example, a stream asks the kernel for the name of a device, and the
//! kernel answers after another program has released the lock of all devices. The runtime must go
//! on meanwhile, because the daemon renews its lease and answers health checks there.
//!
//! The events wait in a bounded queue ([`PendingEvents`]). If there are too many, they become an
//! invalidation of everything.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, mpsc};
use std::thread;
use std::time::Duration;

use flannel_core::kernel::{Changes, Invalidation, KernelError};
use flannel_core::runtime::lock;
use tokio::sync::Notify;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::task::unconstrained;

use crate::pending_events::PendingEvents;

/// The time between two reads during a round. No event is handled before the end of the round, and
/// the kernel is faster if messages do not wake a listener.
const PAUSE: Duration = Duration::from_millis(4);
/// The largest number of events that are read at the end of a round.
const MOST_AT_ONCE: usize = 1 << 16;

/// The events of the kernel.
#[derive(Default)]
pub(crate) struct EventListener {
    events: Arc<Events>,
    /// Asks the thread to read all events, or `None` if no stream was opened yet. The thread ends
    /// when this is dropped.
    requests: Mutex<Option<UnboundedSender<ReadAll>>>,
}

/// What the thread shares with the driver.
#[derive(Default)]
struct Events {
    state: Mutex<State>,
    /// Notified when an event has arrived.
    arrived: Notify,
    /// Whether a round is under way.
    in_round: AtomicBool,
}

#[derive(Default)]
struct State {
    pending: PendingEvents,
    stream: Stream,
}

/// The state of the stream of events.
#[derive(Debug, Clone, Default)]
enum Stream {
    /// The stream was not opened yet.
    #[default]
    Unopened,
    Open,
    /// The stream is broken, or could not be opened.
    Broken(KernelError),
}

/// A request to read all events that the kernel has sent so far, with the place for the answer.
struct ReadAll(mpsc::SyncSender<()>);

impl EventListener {
    pub(crate) fn is_open(&self) -> bool {
        matches!(self.state().stream, Stream::Open)
    }

    /// Why the stream broke, or `None` if it works or was not opened yet.
    pub(crate) fn error(&self) -> Option<KernelError> {
        match &self.state().stream {
            Stream::Broken(error) => Some(error.clone()),
            Stream::Unopened | Stream::Open => None,
        }
    }

    /// Reads this stream on a thread of its own from now on. If it could not be opened or the
    /// thread cannot be started, [`EventListener::error`] returns the reason.
    pub(crate) fn open(&self, stream: Result<Box<dyn Changes>, KernelError>) {
        let (sender, requests) = unbounded_channel();
        let opened = stream.and_then(|stream| {
            self.state().stream = Stream::Open;
            let reader = Reader { events: Arc::clone(&self.events), error: None };
            thread::Builder::new()
                .name("kernel-events".to_owned())
                .spawn(move || reader.run(stream, requests))?;
            Ok(())
        });
        if let Err(error) = opened {
            self.state().stream = Stream::Broken(error);
        }
        *lock(&self.requests) = Some(sender);
    }

    /// Waits until an event has arrived. May also return without an event.
    pub(crate) async fn heard(&self) {
        self.events.arrived.notified().await;
    }

    /// Whether events wait for a round.
    pub(crate) fn has_events(&self) -> bool {
        !self.state().pending.is_empty()
    }

    /// Invalidates everything, as if the kernel had reported that.
    pub(crate) fn invalidate_everything(&self) {
        self.state().pending.push(Invalidation::Everything);
    }

    /// Takes the events that wait. For the begin of a round.
    pub(crate) fn begin_round(&self) -> Vec<Invalidation> {
        self.events.in_round.store(true, Ordering::Relaxed);
        self.state().pending.take()
    }

    /// Waits until the thread has read all events that the kernel has sent so far. For the end of a
    /// round: events without an author may report our own changes, and would look like damage if
    /// they were taken in after new leases. Blocks.
    pub(crate) fn end_round(&self) {
        let (done, read) = mpsc::sync_channel(1);
        let requests = lock(&self.requests).clone();
        self.events.in_round.store(false, Ordering::Relaxed);
        if let Some(requests) = requests
            && requests.send(ReadAll(done)).is_ok()
        {
            // An error means that the stream broke, so the thread has ended.
            let _: Result<(), mpsc::RecvError> = read.recv();
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.events.state()
    }
}

impl Events {
    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    fn push(&self, event: Invalidation) {
        self.state().pending.push(event);
        self.arrived.notify_one();
    }
}

/// The reader of a stream. When it is dropped, the stream counts as broken.
struct Reader {
    events: Arc<Events>,
    /// Why the stream is broken, or `None` if the thread panics.
    error: Option<KernelError>,
}

impl Drop for Reader {
    fn drop(&mut self) {
        let error = self.error.take();
        let error =
            error.unwrap_or_else(|| KernelError::explained(libc::EIO, "the listener has ended"));
        self.events.state().stream = Stream::Broken(error);
        // A snapshot finds the changes whose events were not read.
        self.events.push(Invalidation::Everything);
    }
}

impl Reader {
    /// Reads until the stream breaks, or until no more requests can come.
    fn run(mut self, stream: Box<dyn Changes>, requests: UnboundedReceiver<ReadAll>) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let ended = match runtime {
            // The reader is the only task, so it does not have to leave time to others.
            Ok(runtime) => runtime.block_on(unconstrained(self.read(stream, requests))),
            Err(error) => Err(error.into()),
        };
        self.error = ended.err();
    }

    async fn read(
        &self,
        mut stream: Box<dyn Changes>,
        mut requests: UnboundedReceiver<ReadAll>,
    ) -> Result<(), KernelError> {
        loop {
            let in_round = self.events.in_round.load(Ordering::Relaxed);
            tokio::select! {
                biased;
                request = requests.recv() => {
                    let Some(ReadAll(done)) = request else { return Ok(()) };
                    self.read_all(&mut *stream).await?;
                    // The round may have been given up.
                    let _: Result<(), mpsc::SendError<()>> = done.send(());
                }
                () = tokio::time::sleep(PAUSE), if in_round => self.read_all(&mut *stream).await?,
                event = stream.next(), if !in_round => self.events.push(event?),
            }
        }
    }

    /// Reads all events that the kernel has sent so far.
    async fn read_all(&self, stream: &mut dyn Changes) -> Result<(), KernelError> {
        for _ in 0..MOST_AT_ONCE {
            tokio::select! {
                biased;
                event = stream.next() => self.events.push(event?),
                () = std::future::ready(()) => break,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use flannel_core::Kernel;
    use flannel_core::kernel::ROUTE_PROTOCOL;
    use flannel_core::object::{Route, Via};
    use flannel_core::testing::FakeKernel;

    use super::*;

    fn put(kernel: &FakeKernel, n: u8) {
        let dst = format!("10.1.{n}.0/24").parse().unwrap();
        kernel.foreign_put(Route { dst, via: Via::Blackhole, mtu: None }, ROUTE_PROTOCOL);
    }

    #[tokio::test]
    async fn events_arrive_and_the_end_of_a_round_waits_for_those_of_the_round() {
        let kernel = FakeKernel::with_uplink("eth0");
        let listener = EventListener::default();
        assert!(!listener.is_open() && listener.error().is_none());
        listener.open(kernel.changes());
        listener.end_round();
        assert!(listener.is_open() && !listener.has_events());
        put(&kernel, 7);
        listener.heard().await;
        assert_eq!(listener.begin_round().len(), 1);
        // Events of other programs in a round.
        (8..40).for_each(|n| put(&kernel, n));
        listener.end_round();
        assert_eq!(listener.begin_round().len(), 32);
    }

    #[tokio::test]
    async fn a_broken_stream_is_reported_once_and_can_be_opened_again() {
        let kernel = FakeKernel::with_uplink("eth0");
        let listener = EventListener::default();
        listener.open(kernel.changes());
        listener.end_round();
        kernel.break_listeners();
        listener.heard().await;
        assert!(!listener.is_open() && listener.error().is_some());
        assert_eq!(listener.begin_round(), [Invalidation::Everything]);
        // The thread has ended.
        listener.end_round();
        listener.open(Err(KernelError::new(libc::ENOBUFS)));
        assert!(!listener.is_open());
        listener.open(kernel.changes());
        listener.end_round();
        put(&kernel, 7);
        listener.heard().await;
        assert!(listener.is_open() && listener.has_events());
    }

    #[derive(Debug)]
    struct Panics;

    #[async_trait::async_trait]
    impl Changes for Panics {
        async fn next(&mut self) -> Result<Invalidation, KernelError> {
            panic!("a stream of a test panics");
        }
    }

    #[tokio::test]
    async fn a_stream_that_panics_counts_as_broken() {
        let listener = EventListener::default();
        listener.open(Ok(Box::new(Panics)));
        listener.heard().await;
        assert!(!listener.is_open() && listener.error().is_some());
        listener.end_round();
    }
}
