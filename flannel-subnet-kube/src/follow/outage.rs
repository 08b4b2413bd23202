//! One log line when the store stops answering, and one when it answers again.

use super::Following;
use crate::api::Failure;

/// What the log has about the present outage.
#[derive(Default)]
pub(super) struct OutageLog {
    is_logged: bool,
    /// The last failure was a refusal.
    is_refused: bool,
}

impl OutageLog {
    /// Notes a failure.
    pub(super) fn begins(&mut self, following: &Following, failure: &Failure) {
        // A refusal needs an operator, so it is logged even during an outage.
        let is_refused = matches!(failure, Failure::Refused(_) | Failure::Forbidden(_));
        if !self.is_logged || (is_refused && !self.is_refused) {
            let leases = following.views.borrow().leases.len();
            let store = following.api.name();
            tracing::warn!(
                leases,
                error = %failure,
                %store,
                "store lost, the last leases stay in use"
            );
        }
        self.is_logged = true;
        self.is_refused = is_refused;
    }

    /// Notes an answer.
    pub(super) fn ends(&mut self, following: &Following) {
        if std::mem::take(self).is_logged {
            let leases = following.views.borrow().leases.len();
            tracing::info!(leases, store = following.api.name(), "the store answers");
        }
    }
}
