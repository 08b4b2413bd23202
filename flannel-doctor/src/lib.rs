#![doc = include_str!("../README.md")]

/// Checks of this host.
pub mod checks {
    pub mod device;
    pub mod files;
    pub mod host;
}
/// Derives findings from the answers of peers and of the kernel. Pure: nothing is read here.
pub mod diagnosis {
    pub(crate) mod clocks;
    pub mod contest;
    pub(crate) mod handshake;
    pub mod mtu;
    pub mod peer;
    pub(crate) mod summary;
    pub(crate) mod underlay;
    pub mod why;
}
mod examine;
pub mod finding;
#[cfg(test)]
mod fixture;
/// The inputs of a diagnosis: the network, this host's devices, and the answers of peers.
pub mod inputs {
    pub mod devices;
    pub mod echo;
    pub mod echo_socket;
    pub mod handshakes;
    pub mod network;
    pub mod peers;
    pub mod query;
    pub mod tunnels;
}
pub mod path_probe;
pub mod paths;
pub mod remedy;
pub mod store;
mod token;

pub use examine::{
    Examination, FamilyReport, Layer, LayerState, PathExamination, PeerReport, ProbeOptions,
    examine, examine_path, peer_report,
};
pub use finding::Finding;
pub use inputs::network::Network;
