#![doc = include_str!("../README.md")]

mod annex;
mod command;
mod files;
mod task;

pub use self::annex::Commands;
pub use self::command::{Error, Limits, Output, Words};
pub use self::task::{Names, Of, Task};
