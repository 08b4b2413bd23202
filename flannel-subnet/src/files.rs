//! The files of a node: the cache of leases and `subnet.env`.

pub(crate) mod atomic;
pub(crate) mod cache;
pub(crate) mod lock;
pub(crate) mod own;
pub(crate) mod subnet_env;
