//! Measures which packets pass between two nodes, and in which direction.
//!
//! A lost echo does not show in which direction it was lost. So the doctor of one node probes the
//! daemon of another. It sends a few datagrams, and the daemon acknowledges each outside the
//! tunnel, from public address to public address. Then it opens a TCP connection, both ends send
//! segments of full size, and the daemon reports the bytes that arrived.
//!
//! ```text
//! doctor ══"flannel?" port nonce, small and of full size, UDP══▶ daemon     ══ through the tunnel
//!        ◀─────────────"flannel!" nonce size, UDP, to that port─            ── outside
//! doctor ══"flannel 1 8388 NONCE\n", 8388 bytes, TCP═══════════▶ daemon
//!        ◀═{"version":1,"received":8388,"mtu":1450,"heard":1450,"bytes":5592,…}\n, 5592 bytes
//! ```
//!
//! The doctor sends small segments first, then segments of full size. The daemon sends only
//! segments of full size. The doctor also asks for the daemon's end of an encrypted tunnel, outside
//! the tunnel, because no packet passes without a handshake:
//!
//! ```text
//! doctor ──"flannel tunnel 1 IPv4\n", TCP──────────────────────▶ daemon
//!        ◀─{"version":1,"key":…,"port":51820,"time":…,"peer":{"key":…,"received":…,…}}\n
//!        ◀═a datagram, so that the daemon's node begins a handshake if there is none
//! ```
//!
//! A node that is reached without a tunnel is probed at its public address,
//! by TCP only. A Go node refuses the connection or does not answer, and so does a node whose port
//! is closed. Then the directions stay unknown. Probes do not use the store.

pub mod client;
mod datagram_log;
mod nodes;
mod protocol;
pub mod server;
pub mod tunnel;

pub use protocol::{FarEnd, FarPeer};
