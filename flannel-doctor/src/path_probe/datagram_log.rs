//! The largest datagram of each probe that arrived through the tunnel.
//!
//! A nonce identifies the datagrams of one probe. The number of probes in the log is bounded.

use std::collections::VecDeque;
use std::net::IpAddr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use flannel_core::runtime::lock;

use super::protocol::Nonce;

/// The maximum number of probes in the log. Fewer run at the same time.
const MAX_PROBES: usize = 256;
/// The maximum number of datagrams of one node that are recorded in a second. Two probes send
/// fewer.
const MAX_PER_SECOND: u32 = 10;
const SECOND: Duration = Duration::from_secs(1);

/// Clones share one log.
#[derive(Debug, Clone, Default)]
pub(super) struct DatagramLog(Arc<Mutex<VecDeque<Entry>>>);

/// The datagrams of one probe.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Entry {
    from: IpAddr,
    nonce: Nonce,
    /// The size of the largest packet, in bytes.
    size: u16,
    /// Datagrams in the second that began at `second`.
    times: u32,
    second: Instant,
}

impl DatagramLog {
    /// Records a packet of `size` bytes. Returns false if the node has sent too many in this
    /// second; the packet is then ignored.
    pub(super) fn record(&self, from: IpAddr, nonce: Nonce, size: u16) -> bool {
        let mut entries = lock(&self.0);
        let recent = entries
            .iter()
            .filter(|entry| entry.from == from && entry.second.elapsed() < SECOND)
            .map(|entry| entry.times)
            .sum::<u32>();
        if recent >= MAX_PER_SECOND {
            return false;
        }
        match entries.iter_mut().find(|entry| (entry.from, entry.nonce) == (from, nonce)) {
            Some(known) => {
                known.size = known.size.max(size);
                if known.second.elapsed() < SECOND {
                    known.times += 1;
                } else {
                    known.times = 1;
                    known.second = Instant::now();
                }
            }
            None => {
                entries.truncate(MAX_PROBES - 1);
                entries.push_front(Entry { from, nonce, size, times: 1, second: Instant::now() });
            }
        }
        true
    }

    /// The size of the largest packet of a probe, in bytes, or 0 if none arrived.
    pub(super) fn largest(&self, from: IpAddr, nonce: Nonce) -> u16 {
        let entries = lock(&self.0);
        let known = entries.iter().find(|entry| (entry.from, entry.nonce) == (from, nonce));
        known.map_or(0, |entry| entry.size)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_packet_is_kept_for_each_probe() {
        let log = DatagramLog::default();
        let peer = IpAddr::from([10, 1, 7, 0]);
        let nonce = |n: u64| n.to_be_bytes();
        assert_eq!(log.largest(peer, nonce(1)), 0);
        for size in [64, 1450, 64] {
            log.record(peer, nonce(1), size);
        }
        assert_eq!(log.largest(peer, nonce(1)), 1450);
        assert_eq!(log.largest(IpAddr::from([10, 1, 8, 0]), nonce(1)), 0, "another node");
        // From now on large packets are lost.
        log.record(peer, nonce(2), 64);
        assert_eq!(log.largest(peer, nonce(2)), 64);
        assert_eq!(log.largest(peer, nonce(3)), 0);
        for n in 0..=u8::MAX {
            log.record(IpAddr::from([10, 1, 9, n]), nonce(9), 64);
            log.record(IpAddr::from([10, 1, 10, n]), nonce(9), 64);
        }
        assert_eq!(log.0.lock().unwrap().len(), MAX_PROBES);
        assert_eq!(log.largest(peer, nonce(2)), 0, "forgotten");
    }

    #[test]
    fn datagrams_of_a_node_are_limited_to_ten_a_second() {
        let peer = IpAddr::from([10, 1, 7, 0]);
        let shift = |log: &DatagramLog, at| {
            log.0.lock().unwrap().iter_mut().for_each(|entry| entry.second = at);
        };
        let counted = |log: &DatagramLog, nonce: fn(u64) -> u64| {
            let counts = |n| {
                let counts = log.record(peer, nonce(n).to_be_bytes(), 64);
                // In the future, so that the test passes on a slow machine.
                shift(log, Instant::now() + 60 * SECOND);
                counts
            };
            (0..30).filter(|n| counts(*n)).count()
        };
        for nonce in [(|n| n) as fn(u64) -> u64, |_| 7] {
            let log = DatagramLog::default();
            assert_eq!(counted(&log, nonce), 10);
            assert!(log.record(IpAddr::from([10, 1, 8, 0]), [0; 8], 64), "of another node");
            shift(&log, Instant::now() - 2 * SECOND);
            assert!(log.record(peer, [0; 8], 64), "in the next second");
        }
    }
}
