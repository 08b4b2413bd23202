//! The listener: the stream of kernel events, and the events that wait for a round.

use flannel_core::kernel::{Changes, Invalidation, KernelError};

use crate::pending_events::PendingEvents;

/// After a round no more events than this are taken in before the next round begins.
const MOST_AT_ONCE: usize = 1 << 16;

/// Without a stream and without an error, the stream was not opened yet.
#[derive(Default)]
pub(crate) struct Listener {
    stream: Option<Box<dyn Changes>>,
    /// Why there is no stream.
    pub(crate) error: Option<KernelError>,
    /// The events that no round has taken yet.
    pub(crate) pending: PendingEvents,
}

impl Listener {
    pub(crate) fn is_open(&self) -> bool {
        self.stream.is_some()
    }

    /// Takes the stream, or the reason why there is none.
    pub(crate) fn set(&mut self, stream: Result<Box<dyn Changes>, KernelError>) {
        (self.stream, self.error) = match stream {
            Ok(stream) => (Some(stream), None),
            Err(error) => (None, Some(error)),
        };
    }

    /// Waits for an event and keeps it. Without a stream it waits forever.
    pub(crate) async fn hear(&mut self) {
        let Some(stream) = &mut self.stream else { return std::future::pending().await };
        let event = stream.next().await.unwrap_or_else(|error| {
            self.set(Err(error));
            Invalidation::Everything
        });
        self.pending.push(event);
    }

    /// Takes in all events that the kernel has sent so far. Events without an author may report our
    /// own changes. If they were taken in after new leases, they would look like damage.
    pub(crate) async fn catch_up(&mut self) {
        for _ in 0..MOST_AT_ONCE {
            tokio::select! {
                biased;
                () = self.hear() => {}
                () = std::future::ready(()) => return,
            }
        }
    }
}
