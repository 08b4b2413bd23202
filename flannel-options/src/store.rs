//! The options of the store of leases.

#[cfg(feature = "etcd")]
pub(crate) mod etcd;
pub(crate) mod registry;
