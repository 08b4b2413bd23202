//! Backends of the list on the fake kernel.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

mod alloc;
mod guard;
mod moving;
