//! The daemon on etcd: real daemons on hosts out of network namespaces, real etcd processes beside
//! the switch that joins them (`etcd` in the search path, or the program that `ETCD` names).
//!
//! What the kernel of a host must hold is worked out here from what etcd holds, and read with
//! iproute2.

#![cfg(feature = "etcd")]
#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

mod cached;
#[path = "../calls/mod.rs"]
mod calls;
#[path = "../../../flannel-subnet-etcd/tests/etcd/certificates.rs"]
#[allow(dead_code, reason = "shared with the registry's tests, which use more of it")]
mod certificates;
mod ctl;
mod fixture;
mod outages;
#[path = "../programs/mod.rs"]
mod programs;
mod refused;
#[path = "../../../flannel-subnet-etcd/tests/etcd/server.rs"]
#[allow(dead_code, reason = "shared with the registry's tests, which use more of it")]
mod server;
mod unit;
mod waiting;
mod witness;
