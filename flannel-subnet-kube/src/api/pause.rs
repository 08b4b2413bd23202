//! Pauses between attempts: growing, random, and at least as long as the server asks for.

use std::time::Duration;

use tokio::time::sleep;

use super::Failure;

const FIRST: Duration = Duration::from_millis(100);
const LONGEST: Duration = Duration::from_secs(10);
/// The longest pause that a server can request.
const MOST: Duration = Duration::from_secs(60);

#[derive(Debug)]
pub(crate) struct Pause {
    first: Duration,
    longest: Duration,
    current: Duration,
    /// The last pause was one after a failure.
    failed: bool,
}

impl Pause {
    pub(crate) fn new() -> Self {
        Self::within(FIRST, LONGEST)
    }

    /// The first pause is at most `first`. Later ones grow up to `longest`.
    pub(crate) fn within(first: Duration, longest: Duration) -> Self {
        Self { first, longest, current: first, failed: false }
    }

    /// The next pause is as short as the first one.
    pub(crate) fn reset(&mut self) {
        self.current = self.first;
    }

    /// The server answers. Pauses that grew because of failures begin again.
    pub(crate) fn answered(&mut self) {
        if std::mem::take(&mut self.failed) {
            self.reset();
        }
    }

    /// The next pause: from half of the current length to all of it.
    pub(crate) fn next(&mut self) -> Duration {
        let whole = self.current;
        self.current = (2 * whole).min(self.longest);
        whole.mul_f64(0.5 + fastrand::f64() / 2.0)
    }

    /// Waits for the next attempt.
    pub(crate) async fn after(&mut self, failure: &Failure) {
        let pause = self.next();
        self.failed = true;
        let asked = match failure {
            // The random part prevents nodes from retrying at the same moment.
            Failure::Busy { after: Some(after), .. } => (*after).min(MOST) + pause,
            _ => pause,
        };
        sleep(asked).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_up_to_a_limit() {
        let mut pause = Pause::within(Duration::from_secs(1), Duration::from_secs(5));
        for longest in [1, 2, 4, 5, 5].map(Duration::from_secs) {
            let next = pause.next();
            assert!(next <= longest && 2 * next >= longest, "{next:?} of {longest:?}");
        }
        pause.answered();
        assert!(pause.next() > Duration::from_secs(1), "there was no failure");
        pause.reset();
        assert!(pause.next() <= Duration::from_secs(1));
    }

    #[tokio::test(start_paused = true)]
    async fn pauses_that_grew_because_of_failures_begin_again_with_an_answer() {
        let mut pause = Pause::within(Duration::from_secs(1), Duration::from_secs(5));
        for _ in 0..3 {
            pause.after(&Failure::Gone).await;
        }
        pause.answered();
        assert!(pause.next() <= Duration::from_secs(1));
        pause.answered();
        assert!(pause.next() > Duration::from_secs(1) / 2, "the answer counted already");
    }
}
