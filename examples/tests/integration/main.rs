//! The examples, and a backend and registries that no other crate knows.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

mod backend;
mod embed;
mod encryption;
mod registry;
mod run;
