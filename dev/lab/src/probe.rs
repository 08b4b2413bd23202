//! Probes between pods.

pub(crate) mod echo;
pub(crate) mod reach;
