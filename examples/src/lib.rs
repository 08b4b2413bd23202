//! See the examples in this crate.
