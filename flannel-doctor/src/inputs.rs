//! The inputs of a diagnosis: the network, this host's devices, and the answers of peers.

pub mod devices;
pub mod echo;
pub mod echo_socket;
pub mod handshakes;
pub mod network;
pub mod peers;
pub mod query;
pub mod tunnels;
