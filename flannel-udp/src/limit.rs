//! A limit on the rate of errors that are sent.

use std::time::{Duration, Instant};

/// The most errors of one thread in a period.
const MOST: u32 = 100;
const PERIOD: Duration = Duration::from_millis(100);

#[derive(Debug, Default)]
pub(crate) struct RateLimit {
    begin: Option<Instant>,
    /// The errors since then.
    count: u32,
}

impl RateLimit {
    /// Counts an error, and returns whether it may be sent.
    pub(crate) fn allows(&mut self) -> bool {
        let now = Instant::now();
        if self.begin.is_none_or(|begin| now - begin >= PERIOD) {
            self.begin = Some(now);
            self.count = 0;
        }
        self.count += 1;
        self.count <= MOST
    }
}
