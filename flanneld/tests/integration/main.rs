//! The tests of flanneld, in one program: a program of its own for each file takes longer to build.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

mod adopt;
mod calls;
mod control;
mod daemon;
mod documents;
mod doors;
mod embedded;
mod environment;
#[cfg(feature = "etcd")]
mod etcd;
mod interference;
#[cfg(feature = "kube")]
mod kube;
mod masquerade;
mod networks;
mod options;
mod processes;
mod programs;
mod reader;
mod running;
mod storm;
