//! The commands, one module each.

pub(crate) mod cleanup;
pub(crate) mod config;
pub(crate) mod docker_opts;
pub(crate) mod doctor;
pub(crate) mod lease;
pub(crate) mod paths;
pub(crate) mod status;
pub(crate) mod watch;
pub(crate) mod why;
