#![doc = include_str!("../README.md")]

mod agenda;
mod change_log;
mod flights;
mod pinger;
mod prober;
mod record;
mod results;
mod verdict;

pub use prober::{ProbeSettings, probe};
pub use results::Paths;
