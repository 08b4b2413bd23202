//! The tests of flannel-subnet, in one program: a program of its own for each file takes longer to build.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

mod cache;
mod corpus;
mod dir;
mod fences;
mod manager;
mod reflect;
mod registries;
mod requests;
