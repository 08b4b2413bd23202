//! The daemon on etcd: real daemons on hosts made of network namespaces, and real etcd processes on
//! the switch that joins them (`etcd` in the search path, or the program that `ETCD` names).
//!
//! The tests derive the expected objects of a host's kernel from the leases in etcd, and read the
//! actual ones with iproute2.

mod cached;
#[path = "../../../flannel-subnet-etcd/tests/etcd/certificates.rs"]
#[allow(dead_code, reason = "shared with the registry's tests, which use more of it")]
mod certificates;
mod ctl;
mod fixture;
mod outages;
mod refused;
#[path = "../../../flannel-subnet-etcd/tests/etcd/server.rs"]
#[allow(dead_code, reason = "shared with the registry's tests, which use more of it")]
mod server;
mod unit;
mod waiting;
mod witness;
