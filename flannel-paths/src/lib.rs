#![doc = include_str!("../README.md")]

mod agenda;
mod pinger;
mod prober;
mod record;
mod results;
mod verdict;

pub use prober::{ProbeSettings, probe};
pub use results::Paths;
