//! Namespaces, the privilege to make them, and interruption.

pub(crate) mod interrupt;
pub(crate) mod namespace;
pub(crate) mod parallel;
pub(crate) mod privilege;
