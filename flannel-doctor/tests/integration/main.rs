//! The tests of flannel-doctor, in one program, because one program for each file takes longer to
//! build.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

mod handshakes;
mod paths;
