//! What there is to know about the firewall. Repairs are counted, because somebody else who keeps
//! changing our rules is a finding.

use std::fmt;
use std::sync::Arc;
use std::time::SystemTime;

use crate::error::Error;

/// How the firewall is.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct Status {
    /// The rules that are wanted now were in place when last checked.
    pub in_place: bool,
    /// How often the rules were checked. Counting alone wakes nobody.
    pub checks: u64,
    /// How often rules were written because others were wanted.
    pub changes: u64,
    /// How often rules were written because somebody else had changed them.
    pub repairs: u64,
    /// The last time that somebody else had changed them.
    pub last_repair: Option<Repair>,
    /// Why the rules are not in place; `None` while they are.
    pub failure: Option<Failure>,
    /// What an earlier flannel had left in another mode is gone; false until that was looked for, which is done when
    /// the rules are in place.
    pub alone: bool,
    /// Why what an earlier flannel may have left in another mode is not removed; tried again, ever more rarely.
    pub leftovers: Vec<Arc<Error>>,
}

/// Rules were put back.
#[derive(Debug, Clone)]
pub struct Repair {
    /// When.
    pub at: SystemTime,
    /// What was wrong.
    pub found: Vec<Deviation>,
}

/// Rules could not be put in place.
#[derive(Debug, Clone)]
pub struct Failure {
    /// Since when.
    pub since: SystemTime,
    /// How often it was tried since then.
    pub times: u64,
    /// What went wrong the last time, at least one.
    pub errors: Vec<Arc<Error>>,
}

/// Something that is not as it should be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Deviation {
    /// Table, chain or jump, as the tools write it.
    pub object: String,
    /// What is wrong with it.
    pub fault: Fault,
}

/// What is wrong with something.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fault {
    /// It is not there.
    Missing,
    /// It is there and should not be.
    Unwanted,
    /// Its content or the order of it is another.
    Different,
    /// It is there more than once.
    Repeated,
}

impl fmt::Display for Deviation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let fault = match self.fault {
            Fault::Missing => "missing",
            Fault::Unwanted => "not wanted",
            Fault::Different => "different",
            Fault::Repeated => "repeated",
        };
        write!(f, "{}: {fault}", self.object)
    }
}
