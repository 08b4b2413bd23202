//! The conformance suite for registries, faults of a [`MemoryRegistry`](crate::MemoryRegistry), and
//! a clock for tests.

mod faults;
mod suite;

use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use tokio::time::Instant;

use crate::clock::Clock;
pub use suite::{Fixture, registry_suite};

/// Tokio's time as boot time and wall time. If a test pauses it, days can pass at once.
#[derive(Debug, Clone)]
pub struct TokioClock {
    start: Instant,
    wall: SystemTime,
}

impl TokioClock {
    /// Starts at the present time, with a machine that was started a day ago.
    pub fn new() -> Self {
        Self { start: Instant::now(), wall: SystemTime::now() }
    }

    fn since_boot() -> Duration {
        Duration::from_secs(86_400)
    }
}

impl Default for TokioClock {
    fn default() -> Self {
        Self::new()
    }
}

#[async_trait]
impl Clock for TokioClock {
    fn boottime(&self) -> Duration {
        Self::since_boot() + self.start.elapsed()
    }

    fn wall(&self) -> SystemTime {
        self.wall + self.start.elapsed()
    }

    async fn sleep_until(&self, boottime: Duration) {
        tokio::time::sleep_until(self.start + boottime.saturating_sub(Self::since_boot())).await;
    }

    async fn sleep_until_wall(&self, wall: SystemTime) {
        tokio::time::sleep_until(self.start + wall.duration_since(self.wall).unwrap_or_default())
            .await;
    }
}
