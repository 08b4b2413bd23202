//! What is due for a held lease, and what its log already says.

use std::time::Duration;

use flannel_core::backoff::Backoff;
use flannel_core::lease::{LeaseSet, Revision};
use flannel_core::{Error, Subnets};

/// A difference between our key in the view and the held lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Difference {
    /// The store had no such key at this revision of the store. It may have had one between two
    /// revisions, so each is evaluated.
    Gone(Revision),
    /// The key has this revision.
    At(Revision),
}

/// Work on the held lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Work {
    /// Renew the lease, or check it if it is a reservation. It is also the next attempt after a
    /// failure.
    Renew,
    /// Read our key and evaluate it.
    Check,
    /// Delete the other leases of this node.
    Sweep,
}

/// What one call of `LocalManager::hold` knows about the work on its lease.
pub(super) struct Progress {
    /// The lease comes from the cache, and the store has not answered since.
    pub(super) is_cached: bool,
    /// The difference that was evaluated last.
    pub(super) evaluated: Option<Difference>,
    /// The time of the next attempt after a failure, in boot time. All work waits for it.
    pub(super) next_attempt: Option<Duration>,
    pub(super) backoff: Backoff,
    /// The log has a line that the lease was not renewed in time.
    is_lapse_logged: bool,
    /// The log has a line that the store refuses the renewal.
    is_refusal_logged: bool,
    /// The leases that were searched for other leases of this node.
    pub(super) searched: LeaseSet,
    /// This node may have another lease.
    pub(super) may_have_stray: bool,
}

impl Progress {
    pub(super) fn new(is_cached: bool) -> Self {
        Self {
            is_cached,
            evaluated: None,
            next_attempt: None,
            backoff: Backoff::new(Duration::from_secs(1), Duration::from_secs(60)),
            is_lapse_logged: false,
            is_refusal_logged: false,
            searched: LeaseSet::default(),
            may_have_stray: false,
        }
    }

    /// The work to do at the boot time `now`, or `None` to wait.
    pub(super) fn work(
        &self,
        difference: Option<Difference>,
        renewal: Option<Duration>,
        now: Duration,
    ) -> Option<Work> {
        if self.next_attempt.or(renewal).is_some_and(|time| time <= now) {
            Some(Work::Renew)
        } else if self.next_attempt.is_some() {
            None
        } else if difference.is_some() && difference != self.evaluated {
            Some(Work::Check)
        } else if self.may_have_stray {
            Some(Work::Sweep)
        } else {
            None
        }
    }

    /// Notes work that succeeded.
    pub(super) fn note_success(&mut self, subnets: Subnets, evaluated: Option<Difference>) {
        self.evaluated = evaluated;
        self.next_attempt = None;
        self.is_refusal_logged = false;
        self.backoff.reset();
        if std::mem::take(&mut self.is_lapse_logged) {
            tracing::info!(
                %subnets,
                "the store confirms that this node owns the subnets again"
            );
        }
    }

    /// Logs work that failed. The reflector logs an outage.
    pub(super) fn log_failure(&mut self, subnets: Subnets, error: &Error, has_lapsed: bool) {
        tracing::debug!(%subnets, %error, "the lease cannot be renewed or checked yet");
        if matches!(error, Error::Refused { .. })
            && !std::mem::replace(&mut self.is_refusal_logged, true)
        {
            tracing::warn!(
                %subnets, %error,
                "the lease cannot be renewed, retrying"
            );
        }
        if has_lapsed && !std::mem::replace(&mut self.is_lapse_logged, true) {
            tracing::warn!(
                %subnets, %error,
                "the lease was not renewed in time, this node no longer owns the subnets"
            );
        }
    }
}
