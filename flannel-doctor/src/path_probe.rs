//! What passes between two nodes, and in which direction.
//!
//! An echo that does not come back does not say which way it was lost. So the doctor of one node
//! probes the daemon of another. It sends a few datagrams, and the daemon acknowledges each outside
//! the tunnel, from public address to public address. It opens a TCP connection, on which both send
//! segments of full size, and the daemon says what arrived.
//!
//! ```text
//! doctor ══"flannel?" port nonce, small and of full size, UDP══▶ daemon          ══ through the tunnel
//!        ◀─────────────"flannel!" nonce size, UDP, to that port─                 ── outside
//! doctor ══"flannel 1 8388 NONCE\n", 8388 bytes, TCP═══════════▶ daemon
//!        ◀═{"version":1,"received":8388,"mtu":1450,"heard":1450,"bytes":5592}\n, 5592 bytes
//! ```
//!
//! The doctor begins with small segments and goes on with segments of full size. The daemon sends
//! back only the latter. A node that is reached without a tunnel is asked at its public address,
//! without datagrams. A Go node, or a node whose port is closed, refuses or does not answer; then
//! nothing is known of directions. Nothing of this is in the store.

pub mod client;
mod heard;
mod nodes;
mod protocol;
pub mod server;
