//! The packets of probes that arrived through the tunnel, and their sizes.
//!
//! The nonce tells the packets of one probe from those of the probe before. The number of probes that
//! are remembered is bounded.

use std::collections::VecDeque;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::protocol::Nonce;

/// So many probes are remembered, more than are going on at once.
const MOST: usize = 256;
/// So many datagrams of a node count: those of two probes, and some.
const A_SECOND: u32 = 10;
const SECOND: Duration = Duration::from_secs(1);

/// Clones are the same.
#[derive(Debug, Clone, Default)]
pub(super) struct Heard(Arc<Mutex<VecDeque<Entry>>>);

/// Of one probe.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Entry {
    from: IpAddr,
    nonce: Nonce,
    /// Its largest packet, in bytes.
    size: u16,
    /// So many came in the second that began then.
    times: u32,
    second: Instant,
}

impl Heard {
    /// A packet of `size` bytes came from there, of this probe; returns whether it counts, which
    /// too many in a second do not.
    pub(super) fn note(&self, from: IpAddr, nonce: Nonce, size: u16) -> bool {
        let mut heard = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let lately = |heard: &&Entry| heard.from == from && heard.second.elapsed() < SECOND;
        if heard.iter().filter(lately).map(|heard| heard.times).sum::<u32>() >= A_SECOND {
            return false;
        }
        match heard.iter_mut().find(|heard| (heard.from, heard.nonce) == (from, nonce)) {
            Some(known) => {
                known.size = known.size.max(size);
                if known.second.elapsed() < SECOND {
                    known.times += 1;
                } else {
                    (known.times, known.second) = (1, Instant::now());
                }
            }
            None => {
                heard.truncate(MOST - 1);
                heard.push_front(Entry { from, nonce, size, times: 1, second: Instant::now() });
            }
        }
        true
    }

    /// The largest packet of this probe that came from there, in bytes; 0: none.
    pub(super) fn heard(&self, from: IpAddr, nonce: Nonce) -> u16 {
        let heard = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let known = heard.iter().find(|heard| (heard.from, heard.nonce) == (from, nonce));
        known.map_or(0, |heard| heard.size)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_of_one_probe_counts_and_of_the_one_before_nothing() {
        let (heard_packets, peer) = (Heard::default(), IpAddr::from([10, 1, 7, 0]));
        let nonce = |n: u64| n.to_be_bytes();
        assert_eq!(heard_packets.heard(peer, nonce(1)), 0);
        for size in [64, 1450, 64] {
            heard_packets.note(peer, nonce(1), size);
        }
        assert_eq!(heard_packets.heard(peer, nonce(1)), 1450);
        assert_eq!(heard_packets.heard(IpAddr::from([10, 1, 8, 0]), nonce(1)), 0, "another node");
        // Large ones are lost from now on.
        heard_packets.note(peer, nonce(2), 64);
        assert_eq!(heard_packets.heard(peer, nonce(2)), 64);
        assert_eq!(heard_packets.heard(peer, nonce(3)), 0);
        for n in 0..=u8::MAX {
            heard_packets.note(IpAddr::from([10, 1, 9, n]), nonce(9), 64);
            heard_packets.note(IpAddr::from([10, 1, 10, n]), nonce(9), 64);
        }
        assert_eq!(heard_packets.0.lock().unwrap().len(), MOST);
        assert_eq!(heard_packets.heard(peer, nonce(2)), 0, "forgotten");
    }

    #[test]
    fn who_sends_without_end_is_heard_ten_times_a_second() {
        let peer = IpAddr::from([10, 1, 7, 0]);
        let shift = |heard_packets: &Heard, at| {
            heard_packets.0.lock().unwrap().iter_mut().for_each(|heard| heard.second = at);
        };
        let counted = |heard_packets: &Heard, nonce: fn(u64) -> u64| {
            let counts = |n| {
                let counts = heard_packets.note(peer, nonce(n).to_be_bytes(), 64);
                // In the future, so that no slow machine matters.
                shift(heard_packets, Instant::now() + 60 * SECOND);
                counts
            };
            (0..30).filter(|n| counts(*n)).count()
        };
        for nonce in [(|n| n) as fn(u64) -> u64, |_| 7] {
            let heard_packets = Heard::default();
            assert_eq!(counted(&heard_packets, nonce), 10);
            assert!(heard_packets.note(IpAddr::from([10, 1, 8, 0]), [0; 8], 64), "of another node");
            shift(&heard_packets, Instant::now() - 2 * SECOND);
            assert!(heard_packets.note(peer, [0; 8], 64), "in the next second");
        }
    }
}
