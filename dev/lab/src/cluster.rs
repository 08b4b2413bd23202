//! The cluster: hosts with daemons and pods, and the switch between them.

pub(crate) mod addressing;
pub(crate) mod daemon;
pub(crate) mod host;
pub(crate) mod lab;
pub(crate) mod pod;
pub(crate) mod switch;
