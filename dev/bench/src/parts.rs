//! The parts of measurements: clusters, daemons, stores, raw netlink writers, and output.

pub(crate) mod cluster;
pub(crate) mod daemon;
pub(crate) mod damage;
pub(crate) mod engine;
pub(crate) mod etcd;
pub(crate) mod faults;
pub(crate) mod fixture;
pub(crate) mod floor;
pub(crate) mod growth;
pub(crate) mod plant;
pub(crate) mod process;
pub(crate) mod prompted;
pub(crate) mod raw;
pub(crate) mod report;
pub(crate) mod site;
pub(crate) mod store;
pub(crate) mod timed;
pub(crate) mod witness;
