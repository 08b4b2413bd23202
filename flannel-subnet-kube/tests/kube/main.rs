//! The manager against a strict API server: what it publishes, what it reads, and what it does when
//! things go wrong.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

mod certificates;
mod condition;
mod faults;
mod fixture;
mod lease;
mod strict;
mod view;
mod witness;
mod wrong;
