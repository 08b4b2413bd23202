//! A node's clocks: a boot time that is slightly fast or slow, and a wall clock that is sometimes
//! wrong.

use std::sync::Mutex;
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use flannel_subnet::Clock;
use tokio::sync::Notify;
use tokio::time::Instant;

/// The largest drift: of a quartz, and of the kernel's slewing.
const DRIFT: f64 = 0.000_9;

/// The clocks of a machine from its start to its end.
#[derive(Debug)]
pub(crate) struct NodeClock {
    id: String,
    start: Instant,
    boot: Duration,
    rate: f64,
    /// Wall time minus true time, in milliseconds.
    error: Mutex<i64>,
    set: Notify,
}

/// The true time of day at an instant of the simulation, in milliseconds since 1970.
fn true_millis(world: Instant, now: Instant) -> i64 {
    1_800_000_000_000 + i64::try_from(now.duration_since(world).as_millis()).unwrap()
}

pub(crate) fn millis(time: SystemTime) -> i64 {
    let since = time.duration_since(SystemTime::UNIX_EPOCH).unwrap();
    i64::try_from(since.as_millis()).unwrap()
}

thread_local! {
    /// The begin of the simulation on this thread.
    static WORLD: std::cell::Cell<Option<Instant>> = const { std::cell::Cell::new(None) };
}

/// Begins the time of a simulation.
pub(crate) fn begin() {
    WORLD.set(Some(Instant::now()));
}

fn true_now() -> i64 {
    true_millis(WORLD.get().unwrap(), Instant::now())
}

impl NodeClock {
    /// The clocks of a machine that has been up for some time. Its wall clock is right.
    pub(crate) fn random() -> Self {
        let boot = Duration::from_secs(fastrand::u64(5..100_000));
        let rate = 1.0 + DRIFT * (2.0 * fastrand::f64() - 1.0);
        let id = format!("{:016x}", fastrand::u64(..));
        let error = Mutex::new(0);
        Self { id, start: Instant::now(), boot, rate, error, set: Notify::new() }
    }

    fn elapsed(&self) -> Duration {
        self.start.elapsed().mul_f64(self.rate)
    }

    /// Wall time minus true time, in milliseconds.
    pub(crate) fn error(&self) -> i64 {
        *self.error.lock().unwrap()
    }

    /// Makes the wall clock wrong by this many milliseconds. 0 makes it right.
    pub(crate) fn set_error(&self, error: i64) {
        *self.error.lock().unwrap() = error;
        self.set.notify_waiters();
    }

    /// Sets the wall clock.
    pub(crate) fn jump(&self, forward: bool, by: Duration) {
        let by = i64::try_from(by.as_millis()).unwrap();
        self.set_error(if forward { self.error() + by } else { self.error() - by });
    }

    /// Sets the wall clock to this time, as a machine without a hardware clock does when it starts.
    pub(crate) fn restore(&self, wall: SystemTime) {
        self.set_error(millis(wall) - true_now());
    }

    /// The error of the wall clock when it showed `wall`, as far as a boot time tells it that was
    /// `left` later and that this clock reaches at `boottime`.
    pub(crate) fn error_at(&self, wall: SystemTime, left: Duration, boottime: Duration) -> i64 {
        let then = boottime.saturating_sub(left).saturating_sub(self.boot).div_f64(self.rate);
        millis(wall) - true_millis(WORLD.get().unwrap(), self.start + then)
    }

    pub(crate) fn id(&self) -> &str {
        &self.id
    }
}

#[async_trait]
impl Clock for NodeClock {
    fn boottime(&self) -> Duration {
        self.boot + self.elapsed()
    }

    fn boot(&self) -> Option<String> {
        Some(self.id.clone())
    }

    fn wall(&self) -> SystemTime {
        let millis = u64::try_from(true_now() + self.error()).unwrap();
        SystemTime::UNIX_EPOCH + Duration::from_millis(millis)
    }

    async fn sleep_until(&self, boottime: Duration) {
        tokio::time::sleep(boottime.saturating_sub(self.boottime()).div_f64(self.rate)).await;
    }

    async fn sleep_until_wall(&self, wall: SystemTime) {
        let left = wall.duration_since(self.wall()).unwrap_or_default();
        tokio::select! {
            () = tokio::time::sleep(left) => (),
            () = self.set.notified() => (),
        }
    }
}
