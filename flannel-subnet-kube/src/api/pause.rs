//! Pauses between attempts: growing, random, and at least as long as the server asks for.
//!
//! Pauses after failures are longer than other pauses and grow separately. See [`FailurePauses`].

use std::time::Duration;

use flannel_core::backoff::{Backoff, FailurePauses};
use tokio::time::sleep;

use super::Failure;

const FIRST: Duration = Duration::from_millis(100);
const LONGEST: Duration = Duration::from_secs(10);
/// The longest pause that a server can request.
const MOST: Duration = Duration::from_secs(60);

#[derive(Debug)]
pub(crate) struct Pause {
    steps: Backoff,
    failures: FailurePauses,
}

impl Pause {
    pub(crate) fn new() -> Self {
        Self::within(FIRST, LONGEST)
    }

    /// The first pause is at most `first`. Later ones grow up to `longest`.
    pub(crate) fn within(first: Duration, longest: Duration) -> Self {
        let steps = Backoff::new(first, longest);
        Self { steps, failures: FailurePauses::of_shared_server() }
    }

    /// The next pause is as short as the first one. Pauses after failures do not change.
    pub(crate) fn reset(&mut self) {
        self.steps.reset();
    }

    /// The next pause, if nothing has failed: from half of the current length to all of it.
    pub(crate) fn next(&mut self) -> Duration {
        self.steps.pause()
    }

    /// The next pause after a failure: from half of the current length to all of it.
    pub(crate) fn failed(&mut self) -> Duration {
        self.failures.pause()
    }

    /// Waits for the next attempt after a failure.
    pub(crate) async fn after(&mut self, failure: &Failure) {
        let asked = match failure {
            Failure::Busy { after: Some(after), .. } => (*after).min(MOST),
            _ => Duration::ZERO,
        };
        // The random part prevents nodes from retrying at the same moment.
        sleep(asked + self.failed()).await;
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_server_can_ask_for_a_longer_pause() {
        for (asks, seconds) in [(5, 5), (3_600, 60)] {
            let begin = Instant::now();
            let after = Some(Duration::from_secs(asks));
            let busy = Failure::Busy { after, reason: String::new() };
            Pause::new().after(&busy).await;
            let least = Duration::from_secs(seconds);
            assert!(begin.elapsed() > least && begin.elapsed() < least + Duration::from_secs(3));
        }
    }
}
