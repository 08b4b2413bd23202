//! One log line when the store stops answering, and one when it answers again.

use super::Following;
use crate::api::Failure;

/// The state of an outage in the log.
#[derive(Default)]
pub(super) struct OutageLog {
    logged: bool,
    refused: bool,
}

impl OutageLog {
    pub(super) fn begins(&mut self, following: &Following, failure: &Failure) {
        // A refusal needs an operator, so it is logged even during an outage.
        let refused = matches!(failure, Failure::Refused(_) | Failure::Forbidden(_));
        if !self.logged || (refused && !self.refused) {
            let leases = following.views.borrow().leases.len();
            let store = following.api.name();
            tracing::warn!(
                leases,
                error = %failure,
                %store,
                "store lost, the last leases stay in use"
            );
        }
        (self.logged, self.refused) = (true, refused);
    }

    pub(super) fn ends(&mut self, following: &Following) {
        if std::mem::take(self).logged {
            let leases = following.views.borrow().leases.len();
            tracing::info!(leases, store = following.api.name(), "the store answers");
        }
    }
}
