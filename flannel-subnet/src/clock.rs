//! The clocks for leases.
//!
//! Ownership of a subnet is measured in boot time, which includes suspended time and cannot be set.
//! Wall time is for files and messages.

use std::os::fd::OwnedFd;
use std::time::{Duration, SystemTime};
use std::{fmt, io};

use async_trait::async_trait;
use nix::sys::time::TimeSpec;
use nix::sys::timerfd::{
    ClockId as TimerClock, Expiration, TimerFd, TimerFlags, TimerSetTimeFlags,
};
use nix::time::{ClockId, clock_gettime};
use tokio::io::unix::AsyncFd;

use crate::runtime::readable;

/// A source of time that can be waited for. Tests replace it.
#[doc = include_str!("../docs/clock.md")]
#[async_trait]
pub trait Clock: fmt::Debug + Send + Sync {
    /// The time since the machine was started, including suspended time.
    fn boottime(&self) -> Duration;

    /// Identifies the start of the machine that [`Clock::boottime`] counts from. Boot times with
    /// one identifier can be compared, also by two processes. Returns `None` if the identifier is
    /// not known, as by default.
    fn boot(&self) -> Option<String> {
        None
    }

    /// The time of day.
    fn wall(&self) -> SystemTime;

    /// Waits until [`Clock::boottime`] has reached `boottime`. May return early.
    async fn sleep_until(&self, boottime: Duration);

    /// Waits until [`Clock::wall`] has reached `wall`, or the clock was set. May return early.
    async fn sleep_until_wall(&self, wall: SystemTime);
}

/// The random identifier of this start of the kernel.
const BOOT: &str = "/proc/sys/kernel/random/boot_id";

/// The clocks of Linux. Waiting needs a tokio runtime with I/O and time enabled.
#[derive(Debug, Clone, Copy, Default)]
pub struct SystemClock;

impl SystemClock {
    /// Waits on a timer of the kernel, because tokio's does not count suspended time.
    async fn sleep(self, clock: TimerClock, until: Duration, flags: TimerSetTimeFlags) {
        match start_timer(clock, until, flags) {
            Ok(timer) => drop(timer.readable().await),
            // No file descriptor is free. Returning early is allowed.
            Err(_) => tokio::time::sleep(Duration::from_secs(1)).await,
        }
    }
}

/// A timer of the kernel. It becomes readable when `clock` reaches `until`.
fn start_timer(
    clock: TimerClock,
    until: Duration,
    flags: TimerSetTimeFlags,
) -> io::Result<AsyncFd<OwnedFd>> {
    let timer = TimerFd::new(clock, TimerFlags::TFD_NONBLOCK | TimerFlags::TFD_CLOEXEC)?;
    // A time of 0 would disarm the timer.
    let until = until.max(Duration::from_nanos(1));
    timer.set(Expiration::OneShot(TimeSpec::from_duration(until)), flags)?;
    readable(timer.into())
}

#[async_trait]
impl Clock for SystemClock {
    fn boottime(&self) -> Duration {
        let now =
            clock_gettime(ClockId::CLOCK_BOOTTIME).expect("Linux has CLOCK_BOOTTIME since 2.6.39");
        now.into()
    }

    fn boot(&self) -> Option<String> {
        std::fs::read_to_string(BOOT).ok().map(|id| id.trim().to_owned())
    }

    fn wall(&self) -> SystemTime {
        SystemTime::now()
    }

    async fn sleep_until(&self, boottime: Duration) {
        self.sleep(TimerClock::CLOCK_BOOTTIME, boottime, TimerSetTimeFlags::TFD_TIMER_ABSTIME)
            .await;
    }

    async fn sleep_until_wall(&self, wall: SystemTime) {
        let until = wall.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let flags =
            TimerSetTimeFlags::TFD_TIMER_ABSTIME | TimerSetTimeFlags::TFD_TIMER_CANCEL_ON_SET;
        self.sleep(TimerClock::CLOCK_REALTIME, until, flags).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn sleep_waits_for_the_kernel_timer() {
        let clock = SystemClock;
        let boottime = clock.boottime();
        let wall = clock.wall();
        let pause = Duration::from_millis(20);
        clock.sleep_until(boottime + pause).await;
        assert!(clock.boottime() >= boottime + pause);
        clock.sleep_until_wall(wall + 2 * pause).await;
        assert!(clock.wall() >= wall + 2 * pause);
        clock.sleep_until(Duration::ZERO).await;
    }

    #[test]
    fn all_clocks_of_a_boot_have_one_identifier() {
        let boot = SystemClock.boot().unwrap();
        assert!(boot.len() == 36 && SystemClock.boot() == Some(boot.clone()), "{boot:?}");
    }
}
