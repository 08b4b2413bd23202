#![doc = include_str!("../README.md")]

mod annex;
mod table;

pub use self::annex::SourceCheck;
pub use self::table::TunnelEnd;
