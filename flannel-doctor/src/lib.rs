#![doc = include_str!("../README.md")]

pub mod checks;
pub mod diagnosis;
mod examine;
pub mod finding;
#[cfg(test)]
mod fixture;
pub mod inputs;
pub mod path_probe;
pub mod paths;
pub mod remedy;
pub mod store;
pub mod token;

pub use examine::{
    Examination, FamilyReport, Layer, LayerState, PathExamination, PeerReport, ProbeOptions,
    examine, examine_path, peer_report,
};
pub use finding::Finding;
pub use inputs::network::Network;
