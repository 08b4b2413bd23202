//! The tests of flannel-route, in one program, because one program for each file takes longer to
//! build.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

mod clashes;
mod cleanup;
mod custom;
mod hostile;
mod kernel_network;
mod nexthops;
mod record_keepers;
mod scale;
mod tun;
