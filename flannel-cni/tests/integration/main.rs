//! The tests of the CNI plugin, in one program, which is faster to build than one for each file.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

mod install;
mod real;
mod runtime;
mod strict;
