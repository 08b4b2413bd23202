#![doc = include_str!("../README.md")]

mod annex;
mod annexes;
mod command;
mod files;
mod task;

pub use self::annex::Commands;
pub use self::annexes::Annexes;
pub use self::command::{Error, Limits, Output, Words};
pub use self::task::{Names, Of, Task};
