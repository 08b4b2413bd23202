#![doc = include_str!("../README.md")]

pub mod commands;
pub mod device;
pub mod diagnosis;
pub mod echo;
mod examine;
#[cfg(test)]
mod fixture;
pub mod host;
pub mod inputs;
pub mod mtu;
pub mod path_probe;
pub mod peers;
mod summary;
pub mod why;

pub use examine::{
    Examination, FamilyReport, Layer, Network, PeerReport, ProbeOptions, examine, peer_report,
};
