//! Requests to etcd over connections that are made and repaired as needed.

pub(crate) mod attempts;
pub(crate) mod connections;
pub(crate) mod failure;
