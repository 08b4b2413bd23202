//! The MTUs of the paths to nodes, which the kernel has learned.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use crate::ends::Wire;

/// The least MTU of a path (linux `net.ipv4.route.min_pmtu`), without the headers of a tunnel.
/// Packets up to this size fit into each path.
const LEAST: usize = 552 - 48;
/// The time for which an MTU counts.
const FRESH: Duration = Duration::from_secs(5);

/// The largest packets that fit into the paths to nodes.
#[derive(Debug, Default)]
pub(crate) struct Mtus {
    known: HashMap<SocketAddr, Known>,
    /// The time at which old MTUs are forgotten.
    next_purge: Option<Instant>,
}

#[derive(Debug, Clone, Copy)]
struct Known {
    mtu: u16,
    /// When the kernel is asked again.
    until: Instant,
}

impl Mtus {
    /// The MTU for packets in the datagrams to a node, in bytes, if a packet of `len` bytes is
    /// larger. `None` if it fits, or if the MTU is not known.
    pub(crate) fn exceeded(
        &mut self,
        wire: &impl Wire,
        to: SocketAddr,
        len: usize,
        now: Instant,
    ) -> Option<u16> {
        if len <= LEAST {
            return None;
        }
        let mtu = match self.known.get(&to) {
            Some(known) if now < known.until => known.mtu,
            _ => self.look(wire, to, now),
        };
        (len > usize::from(mtu)).then_some(mtu)
    }

    /// Forgets the MTU of a path that has perhaps changed.
    pub(crate) fn forget(&mut self, to: SocketAddr) {
        self.known.remove(&to);
    }

    fn look(&mut self, wire: &impl Wire, to: SocketAddr, now: Instant) -> u16 {
        if self.next_purge.is_none_or(|at| at <= now) {
            self.known.retain(|_, known| now < known.until);
            self.next_purge = Some(now + FRESH);
        }
        let overhead = if to.is_ipv6() { 48 } else { 28 };
        let mtu = wire.path_mtu(to).map_or(u16::MAX, |mtu| mtu.saturating_sub(overhead));
        self.known.insert(to, Known { mtu, until: now + FRESH });
        mtu
    }
}
