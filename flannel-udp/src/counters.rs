//! Counts of packets and of the reasons for which they were dropped.

use std::sync::atomic::{AtomicU64, Ordering};

use serde::{Deserialize, Serialize};

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// The counters of a data plane.
        #[derive(Debug, Default)]
        pub(crate) struct Counters {
            $(pub(crate) $name: AtomicU64,)*
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
    /// Packets of pods to an address that no peer has.
    no_peer,
    /// Packets whose lifetime ended.
    expired,
    /// Packets of pods that are not valid IP packets.
    bad_packet,
    /// Packets that the kernel refused to send.
    send_failed,
    /// Packets that the kernel refused to receive.
    write_failed,
    /// Datagrams without a valid IP packet.
    bad_datagram,
    /// Datagrams with a source address that no peer has.
    foreign_source,
    /// Datagrams of a host that is not the node of the source address.
    foreign_node,
    /// Packets received from a node behind NAT, from an address that it has proved to have.
    learned_node,
    /// Requests to nodes to prove such an address.
    proofs_requested,
}

pub(crate) fn add(counter: &AtomicU64, n: u64) {
    counter.fetch_add(n, Ordering::Relaxed);
}
