//! The tests of flannel-core, in one program, because one program for each file takes longer to
//! build.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

mod fake_kernel;
mod footprint;
mod node;
