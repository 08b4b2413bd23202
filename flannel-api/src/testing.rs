//! Answers with a value in every field, for tests of programs that show them.

use crate::{More, ObjectReport, ObjectState, StatusReport, WhyReport};

/// The status of a node that has problems.
pub fn status_report() -> StatusReport {
    serde_json::from_str(include_str!("status_sample.json")).unwrap_or_else(|error| {
        unreachable!("the sample is checked by this crate's tests: {error}")
    })
}

/// The report on an address of a peer whose route is not in place yet.
pub fn why_report() -> WhyReport {
    WhyReport {
        version: crate::VERSION,
        address: "10.1.7.9".into(),
        ok: false,
        verdict: "it is so".into(),
        hint: None,
        network: None,
        lease: None,
        node: None,
        rejection: None,
        objects: vec![ObjectReport { object: "route".into(), state: ObjectState::Pending }],
        kernel: "nowhere".into(),
        tunnel: None,
        stale: None,
        more: More::new(),
    }
}
