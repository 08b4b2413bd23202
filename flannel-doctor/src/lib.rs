#![doc = include_str!("../README.md")]

pub mod checks;
pub mod commands;
pub mod diagnosis;
mod examine;
#[cfg(test)]
mod fixture;
pub mod inputs;
pub mod path_probe;
pub mod paths;
pub mod token;

pub use examine::{
    Examination, FamilyReport, Layer, PathExamination, PeerReport, ProbeOptions, examine,
    examine_path, peer_report,
};
pub use inputs::network::Network;
