//! The tests of flannel-firewall, in one program, because a program for each file takes longer to
//! build.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

#[macro_use]
mod fixture;
mod drops;
mod encryption;
mod guard;
mod leaving;
mod neighbours;
mod packets;
mod repair;
