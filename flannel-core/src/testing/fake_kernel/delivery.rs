//! The delivery of events to a reader on another thread.
//!
//! A test with a paused clock would otherwise go on for seconds of virtual time before that thread
//! runs.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, ThreadId};
use std::time::Duration;

use crate::runtime::lock;

/// If a reader does not take an event for this time, nothing waits for it any longer.
const PATIENCE: Duration = Duration::from_secs(5);

/// The events of one stream.
#[derive(Default)]
pub(super) struct Delivery {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    sent: u64,
    /// The events that the reader got.
    returned: u64,
    /// The events that the reader got before it asked for the next one, so it has handled them.
    handled: u64,
    reader: Option<ThreadId>,
    has_ended: bool,
}

impl State {
    /// Whether another thread reads the stream.
    fn is_read_elsewhere(&self) -> bool {
        !self.has_ended && self.reader.is_some_and(|reader| reader != thread::current().id())
    }
}

impl Delivery {
    /// Counts an event that is about to be sent.
    pub(super) fn send(&self) {
        self.lock().sent += 1;
    }

    /// The reader asks for the next event.
    pub(super) fn begin_read(&self) {
        let mut state = self.lock();
        state.handled = state.returned;
        state.reader = Some(thread::current().id());
        self.changed.notify_all();
    }

    /// The reader gets an event, or the end of the stream.
    pub(super) fn end_read(&self) {
        self.lock().returned += 1;
    }

    /// The stream was dropped.
    pub(super) fn end(&self) {
        self.lock().has_ended = true;
        self.changed.notify_all();
    }

    /// Waits until a reader on another thread has handled all events.
    pub(super) fn wait(&self) {
        self.wait_while(|state| state.is_read_elsewhere() && state.handled < state.sent);
    }

    /// Waits until a reader on another thread has dropped the stream.
    pub(super) fn wait_for_end(&self) {
        self.wait_while(|state| state.is_read_elsewhere());
    }

    fn wait_while(&self, goes_on: impl Fn(&State) -> bool) {
        let waited = self.changed.wait_timeout_while(self.lock(), PATIENCE, |state| goes_on(state));
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }
}
