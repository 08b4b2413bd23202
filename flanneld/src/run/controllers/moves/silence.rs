//! The wait for the last packets to the devices of withdrawn backends.

use std::sync::Arc;
use std::time::Duration;

use flannel_core::object::LinkName;
use flannel_core::runtime::blocking;
use flannel_netlink::NetlinkKernel;
use tokio::time::Instant;

/// The time for which no lease offered a withdrawn backend before its devices are removed.
pub(in crate::run::controllers) const UNUSED: Duration = Duration::from_secs(60);
/// The time for which no packet came by these devices.
const SILENT: Duration = Duration::from_secs(10);

/// Whether peers have stopped to use the devices of withdrawn backends.
pub(super) struct Silence {
    kernel: Arc<NetlinkKernel>,
    devices: Vec<LinkName>,
    since: Instant,
    received: Option<Received>,
}

/// The packets that devices had received.
struct Received {
    count: u64,
    /// The time of the last one.
    since: Instant,
}

/// The state of a wait for silence.
pub(super) struct Heard {
    /// The event that is waited for.
    pub(super) waits_for: String,
    /// It has happened.
    pub(super) is_over: bool,
}

impl Silence {
    /// A wait for silence on these devices that begins now.
    pub(super) fn new(kernel: &Arc<NetlinkKernel>, devices: Vec<LinkName>) -> Self {
        Self { kernel: Arc::clone(kernel), devices, since: Instant::now(), received: None }
    }

    /// Begins again, because a lease offers a withdrawn backend.
    pub(super) fn interrupt(&mut self) {
        self.since = Instant::now();
        self.received = None;
    }

    /// Reads the counters.
    pub(super) async fn look(&mut self) -> Heard {
        let kernel = Arc::clone(&self.kernel);
        let devices = self.devices.clone();
        let is_over = match blocking(move || kernel.received(&devices)).await {
            Ok(count) => self.is_over(count, Instant::now()),
            Err(error) => {
                let waits_for = format!("the counters of devices: {error}");
                return Heard { waits_for, is_over: false };
            }
        };
        let devices: Vec<_> = self.devices.iter().map(ToString::to_string).collect();
        let by =
            if devices.is_empty() { String::new() } else { format!(" by {}", devices.join(", ")) };
        let unused = UNUSED.as_secs();
        let silent = SILENT.as_secs();
        let waits_for = format!("{unused} s without use, and {silent} s without a packet{by}");
        Heard { waits_for, is_over }
    }

    /// Takes in the number of packets that the devices have received.
    fn is_over(&mut self, count: u64, now: Instant) -> bool {
        let unchanged = self.received.take().filter(|received| received.count == count);
        let received = unchanged.unwrap_or(Received { count, since: now });
        let quiet = now - received.since;
        self.received = Some(received);
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
        let heard = silence.look().await;
        assert_eq!(heard.waits_for, "60 s without use, and 10 s without a packet by flannel.1");
        assert!(!heard.is_over);
    }
}
