//! A limit on the rate of errors that are sent.

use std::time::{Duration, Instant};

/// The most errors in a period of one thread.
const MOST: u32 = 100;
const PERIOD: Duration = Duration::from_millis(100);

#[derive(Debug, Default)]
pub(crate) struct Limit {
    begin: Option<Instant>,
    count: u32,
}

impl Limit {
    pub(crate) fn allows(&mut self) -> bool {
        let now = Instant::now();
        if self.begin.is_none_or(|begin| now - begin >= PERIOD) {
            (self.begin, self.count) = (Some(now), 0);
        }
        self.count += 1;
        self.count <= MOST
    }
}
