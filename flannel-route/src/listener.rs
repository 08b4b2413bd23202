//! The listener: the stream of kernel events, and the events that the engine has not taken in yet.

use flannel_core::kernel::{Changes, Invalidation, KernelError};

use crate::pending_events::PendingEvents;
use crate::schedule::Stream;

/// After a round no more events than this are taken in before the next round begins.
const MOST_AT_ONCE: usize = 1 << 16;

enum Source {
    Unopened,
    Open(Box<dyn Changes>),
    Broken(KernelError),
}

pub(crate) struct Listener {
    source: Source,
    pending: PendingEvents,
}

impl Listener {
    pub(crate) fn new() -> Self {
        Self { source: Source::Unopened, pending: PendingEvents::default() }
    }

    pub(crate) const fn stream(&self) -> Stream {
        match self.source {
            Source::Unopened => Stream::Unopened,
            Source::Open(_) => Stream::Open,
            Source::Broken(_) => Stream::Broken,
        }
    }

    /// Why there is no stream.
    pub(crate) const fn error(&self) -> Option<&KernelError> {
        match &self.source {
            Source::Broken(error) => Some(error),
            _ => None,
        }
    }

    /// Takes the stream, or the reason why there is none.
    pub(crate) fn set(&mut self, stream: Result<Box<dyn Changes>, KernelError>) {
        self.source = match stream {
            Ok(changes) => Source::Open(changes),
            Err(error) => Source::Broken(error),
        };
    }

    /// Waits for an event and keeps it; for ever without a stream.
    pub(crate) async fn hear(&mut self) {
        let Source::Open(changes) = &mut self.source else { return std::future::pending().await };
        let event = match changes.next().await {
            Ok(event) => event,
            Err(error) => {
                self.source = Source::Broken(error);
                Invalidation::Everything
            }
        };
        self.pending.hear(event);
    }

    /// Takes in all events that the kernel has sent so far. Events of our own changes are among
    /// them where the kernel does not say whose they are. They would look like damage as soon as
    /// leases ask for something else.
    pub(crate) async fn catch_up(&mut self) {
        for _ in 0..MOST_AT_ONCE {
            tokio::select! {
                biased;
                () = self.hear() => {}
                () = std::future::ready(()) => return,
            }
        }
    }

    /// The whole kernel is to be read.
    pub(crate) fn invalidate_everything(&mut self) {
        self.pending.hear(Invalidation::Everything);
    }

    pub(crate) fn has_events(&self) -> bool {
        !self.pending.is_empty()
    }

    pub(crate) fn take(&mut self) -> Vec<Invalidation> {
        self.pending.take()
    }
}
