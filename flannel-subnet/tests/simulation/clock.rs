//! A node's clocks: a boot time that is slightly fast or slow, and a wall clock that operators set.

use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use flannel_subnet::Clock;
use tokio::time::Instant;

/// The largest drift: of a quartz, and of the kernel's slewing.
const DRIFT: f64 = 0.000_9;

#[derive(Debug)]
pub(crate) struct NodeClock {
    start: Instant,
    boot: Duration,
    rate: f64,
    wall: Mutex<SystemTime>,
}

impl NodeClock {
    /// A machine that has been up for some time.
    pub(crate) fn random() -> Self {
        let boot = Duration::from_secs(fastrand::u64(5..100_000));
        let rate = 1.0 + DRIFT * (2.0 * fastrand::f64() - 1.0);
        let wall = SystemTime::UNIX_EPOCH + Duration::from_secs(1_800_000_000);
        Self { start: Instant::now(), boot, rate, wall: Mutex::new(wall) }
    }

    fn elapsed(&self) -> Duration {
        self.start.elapsed().mul_f64(self.rate)
    }

    fn offset(&self) -> MutexGuard<'_, SystemTime> {
        self.wall.lock().unwrap()
    }

    /// Sets the wall clock.
    pub(crate) fn jump(&self, forward: bool, by: Duration) {
        let mut wall = self.offset();
        *wall = if forward { *wall + by } else { *wall - by };
    }
}

#[async_trait]
impl Clock for NodeClock {
    fn boottime(&self) -> Duration {
        self.boot + self.elapsed()
    }

    fn wall(&self) -> SystemTime {
        *self.offset() + self.elapsed()
    }

    async fn sleep_until(&self, boottime: Duration) {
        tokio::time::sleep(boottime.saturating_sub(self.boottime()).div_f64(self.rate)).await;
    }

    async fn sleep_until_wall(&self, wall: SystemTime) {
        tokio::time::sleep(wall.duration_since(self.wall()).unwrap_or_default()).await;
    }
}
