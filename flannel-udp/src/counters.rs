//! Counts of packets and of the reasons for which they were dropped.

use std::net::IpAddr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use serde::{Deserialize, Serialize};

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// The counters of a data plane.
        #[derive(Debug, Default)]
        pub(crate) struct Counters {
            $(pub(crate) $name: AtomicU64,)*
            pub(crate) last_foreign: Mutex<Option<Foreign>>,
        }

        /// Counts since the first start of a data plane. They continue when its process is killed.
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
        #[serde(default)]
        #[non_exhaustive]
        pub struct Counts {
            $($(#[$doc])* pub $name: u64,)*
        }

        impl Counters {
            pub(crate) fn read(&self) -> Counts {
                Counts { $($name: self.$name.load(Ordering::Relaxed),)* }
            }

            pub(crate) fn add_all(&self, counts: &Counts) {
                $(add(&self.$name, counts.$name);)*
            }

            /// Sets each counter that is lower to the count.
            pub(crate) fn raise(&self, counts: &Counts) {
                $(self.$name.fetch_max(counts.$name, Ordering::Relaxed);)*
            }
        }
    };
}

counters! {
    /// Packets sent to peers.
    sent_packets,
    /// Bytes of these packets.
    sent_bytes,
    /// Packets received from peers.
    received_packets,
    /// Bytes of these packets.
    received_bytes,
    /// Packets of pods to an address outside the subnets of all peers.
    no_peer,
    /// Packets whose TTL or hop limit ended.
    expired,
    /// Packets of pods that are not valid IP packets.
    bad_packet,
    /// Packets of pods that would be split into more and smaller segments than any kernel makes.
    tiny_segments,
    /// Packets of pods that the kernel refused to send to a node.
    send_failed,
    /// Packets of nodes that the kernel refused to take from the device.
    write_failed,
    /// Failed reads of the device or of a socket.
    read_failed,
    /// Datagrams without a valid IP packet.
    bad_datagram,
    /// Datagrams whose packet has a source address outside the subnets of all peers.
    foreign_source,
    /// Datagrams of a host that is not the node of the packet's source address.
    foreign_node,
    /// Packets received from a node behind NAT, from an address that it has proved to have.
    learned_node,
    /// Requests to nodes behind NAT to prove an address.
    proofs_requested,
}

/// A datagram of a host that is not the node of the packet's source address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Foreign {
    /// The source address of the packet in it.
    pub source: IpAddr,
    /// The host that sent it.
    pub host: IpAddr,
    /// The node that has the source address.
    pub node: IpAddr,
}

impl Counters {
    /// Counts a packet with an address of `node` that another host has sent.
    pub(crate) fn add_foreign(&self, source: IpAddr, host: IpAddr, node: IpAddr) {
        add(&self.foreign_node, 1);
        // One example is enough, and no thread waits for another one.
        if let Ok(mut last) = self.last_foreign.try_lock() {
            *last = Some(Foreign { source, host, node });
        }
    }

    /// The last of these packets.
    pub(crate) fn last_foreign(&self) -> Option<Foreign> {
        self.last_foreign.lock().map_or(None, |last| *last)
    }
}

pub(crate) fn add(counter: &AtomicU64, n: u64) {
    counter.fetch_add(n, Ordering::Relaxed);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_foreign_packet_is_kept_and_all_are_counted() {
        let counters = Counters::default();
        let at = |n: u8| IpAddr::from([192, 0, 2, n]);
        assert_eq!(counters.last_foreign(), None);
        for n in [1, 2] {
            counters.add_foreign(at(7), at(n), at(8));
        }
        assert_eq!(counters.read().foreign_node, 2);
        let expected = Foreign { source: at(7), host: at(2), node: at(8) };
        assert_eq!(counters.last_foreign(), Some(expected));
    }
}
