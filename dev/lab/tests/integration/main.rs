//! The tests of the lab, in one program, which is faster to build than one for each file.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

mod attacks;
mod binary;
mod cluster;
mod confined;
mod doctor;
mod extension;
mod hosts;
mod moving;
mod skew;
mod static_routes;
mod traffic;
mod udp;
