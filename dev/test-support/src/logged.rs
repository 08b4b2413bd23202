//! The log of a test.

use std::fmt::Debug;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

use tracing::field::Field;
use tracing::{Dispatch, Event, Level, Metadata, Subscriber, span};

/// Collects the log messages with their fields, while it is the subscriber of a thread
/// (`tracing::subscriber::set_default`). Clones share the messages.
#[derive(Debug, Clone, Default)]
pub struct Logged(Arc<Mutex<Vec<(Level, String)>>>);

/// Collects messages until it is dropped.
#[derive(Debug)]
pub struct Collecting {
    _default: tracing::subscriber::DefaultGuard,
}

/// Subscribers that last as long as the process, and get no message.
///
/// The first thread that reaches a message decides whether anybody wants it. If there is no
/// subscriber at that moment, or only one and it is of another thread, the message is switched off,
/// also for a thread that gets its subscriber at the same time.
static LASTING: LazyLock<[Dispatch; 2]> =
    LazyLock::new(|| [Dispatch::new(Logged::default()), Dispatch::new(Logged::default())]);

impl Logged {
    /// The messages of this thread, until the guard is dropped.
    pub fn collect() -> (Self, Collecting) {
        LazyLock::force(&LASTING);
        let logged = Self::default();
        let _default = tracing::subscriber::set_default(logged.clone());
        (logged, Collecting { _default })
    }

    fn lines(&self) -> MutexGuard<'_, Vec<(Level, String)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The warnings and errors.
    pub fn warnings(&self) -> Vec<String> {
        let lines = self.lines();
        let warnings = lines.iter().filter(|(level, _)| *level <= Level::WARN);
        warnings.map(|(_, text)| text.clone()).collect()
    }

    /// The number of lines that contain this text.
    pub fn count(&self, text: &str) -> usize {
        self.lines().iter().filter(|(_, line)| line.contains(text)).count()
    }
}

impl Subscriber for Logged {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= Level::INFO
    }
    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }
    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}
    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}
    fn event(&self, event: &Event<'_>) {
        let mut text = String::new();
        event.record(&mut |field: &Field, value: &dyn Debug| {
            text += &format!("{field}={value:?} ");
        });
        self.lines().push((*event.metadata().level(), text));
    }
    fn enter(&self, _: &span::Id) {}
    fn exit(&self, _: &span::Id) {}
}
