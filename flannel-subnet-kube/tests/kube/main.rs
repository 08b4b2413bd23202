//! The manager on a strict API server: what it publishes and reads, and its behaviour under faults.

#![allow(clippy::unwrap_used, reason = "test helpers are test code")]

mod certificates;
mod condition;
mod faults;
mod fixture;
mod lease;
mod plugin;
mod proxy;
mod strict;
mod view;
mod witness;
mod wrong;
