//! Pauses between attempts: growing, random, and at least as long as the server asks for.

use std::time::Duration;

use tokio::time::sleep;

use super::Failure;

const FIRST: Duration = Duration::from_millis(100);
const LONGEST: Duration = Duration::from_secs(10);
/// The longest pause that a server can request.
const MOST: Duration = Duration::from_secs(60);

#[derive(Debug)]
pub(crate) struct Pause(Duration);

impl Pause {
    pub(crate) fn new() -> Self {
        Self(FIRST)
    }

    /// The next pause is as short as the first one.
    pub(crate) fn reset(&mut self) {
        self.0 = FIRST;
    }

    /// The next pause: from half of the current length to all of it.
    pub(crate) fn next(&mut self) -> Duration {
        let whole = self.0;
        self.0 = (2 * whole).min(LONGEST);
        whole.mul_f64(0.5 + fastrand::f64() / 2.0)
    }

    /// Waits for the next attempt.
    pub(crate) async fn after(&mut self, failure: &Failure) {
        let pause = self.next();
        let asked = match failure {
            // The random part prevents nodes from retrying at the same moment.
            Failure::Busy { after: Some(after), .. } => (*after).min(MOST) + pause,
            _ => pause,
        };
        sleep(asked).await;
    }
}
