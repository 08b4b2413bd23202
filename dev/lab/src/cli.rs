//! The command line of `lab`, and its output.

pub(crate) mod options;
pub(crate) mod outcome;
pub(crate) mod table;
