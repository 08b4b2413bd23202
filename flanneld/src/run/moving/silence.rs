//! The wait for the last packets to the devices of withdrawn backends.

use std::sync::Arc;
use std::time::Duration;

use flannel_core::object::LinkName;
use flannel_core::runtime::blocking;
use flannel_netlink::NetlinkKernel;
use tokio::time::Instant;

/// The time for which no lease offered a withdrawn backend before its devices are removed.
pub(super) const UNUSED: Duration = Duration::from_secs(60);
/// The time for which no packet came by these devices.
const SILENT: Duration = Duration::from_secs(10);

/// Whether peers have stopped to use the devices of withdrawn backends.
pub(super) struct Silence {
    kernel: Arc<NetlinkKernel>,
    devices: Vec<LinkName>,
    since: Instant,
    /// The packets that the devices had received, and the time since which there is no more.
    received: Option<(u64, Instant)>,
}

impl Silence {
    /// A wait for silence on these devices that begins now.
    pub(super) fn new(kernel: &Arc<NetlinkKernel>, devices: Vec<LinkName>) -> Self {
        Self { kernel: Arc::clone(kernel), devices, since: Instant::now(), received: None }
    }

    /// Begins again, because a lease offers a withdrawn backend.
    pub(super) fn interrupt(&mut self) {
        (self.since, self.received) = (Instant::now(), None);
    }

    /// Looks at the counters. Returns the event that is waited for, and whether it has happened.
    pub(super) async fn look(&mut self) -> (String, bool) {
        let (kernel, devices) = (Arc::clone(&self.kernel), self.devices.clone());
        let done = match blocking(move || kernel.received(&devices)).await {
            Ok(count) => self.is_over(count, Instant::now()),
            Err(error) => return (format!("the counters of devices: {error}"), false),
        };
        let devices: Vec<_> = self.devices.iter().map(ToString::to_string).collect();
        let by =
            if devices.is_empty() { String::new() } else { format!(" by {}", devices.join(", ")) };
        let (unused, silent) = (UNUSED.as_secs(), SILENT.as_secs());
        (format!("{unused} s without use, and {silent} s without a packet{by}"), done)
    }

    /// Takes in the number of packets that the devices have received.
    fn is_over(&mut self, count: u64, now: Instant) -> bool {
        if self.received.is_none_or(|(before, _)| before != count) {
            self.received = Some((count, now));
        }
        let quiet = self.received.map_or(Duration::ZERO, |(_, since)| now - since);
        now - self.since >= UNUSED && quiet >= SILENT
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_packet_and_a_late_lease_begin_the_wait_again() {
        let mut silence = Silence::new(&Arc::new(NetlinkKernel::open().unwrap()), Vec::new());
        let begin = Instant::now();
        let mut at = |seconds, count| silence.is_over(count, begin + Duration::from_secs(seconds));
        assert!(!at(0, 7) && !at(59, 7) && at(60, 7));
        assert!(!at(61, 8), "a packet came");
        assert!(!at(70, 8) && at(71, 8));
        tokio::time::advance(Duration::from_secs(100)).await;
        silence.interrupt();
        let mut at = |seconds| silence.is_over(8, begin + Duration::from_secs(seconds));
        assert!(!at(101) && !at(159) && at(160));
    }

    #[tokio::test]
    async fn the_event_is_described() {
        let devices = vec!["flannel.1".parse().unwrap()];
        let mut silence = Silence::new(&Arc::new(NetlinkKernel::open().unwrap()), devices);
        let (text, done) = silence.look().await;
        assert_eq!(text, "60 s without use, and 10 s without a packet by flannel.1");
        assert!(!done);
    }
}
