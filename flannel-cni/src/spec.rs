//! Types of the CNI specification: calls, versions and errors.

pub(crate) mod call;
pub(crate) mod error;
pub(crate) mod version;
