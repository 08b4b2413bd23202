//! The tests of flannel-subnet, in one program, because one program for each file takes longer to
//! build.

#![allow(clippy::unwrap_used, reason = "test helpers are test code")]

mod cache;
mod corpus;
mod dir;
mod fences;
mod manager;
mod reflect;
mod registries;
mod requests;
