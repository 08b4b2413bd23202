//! Findings about a host.

use serde::{Deserialize, Serialize};

use crate::Severity;

/// A condition of a host because of which packets of pods are lost. Neither the start of the daemon
/// nor its readiness depends on it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Finding {
    /// The name of the check, one word.
    pub check: String,
    /// `error`: packets are lost. `warning`: some packets may be lost.
    pub severity: Severity,
    /// A sentence without a full stop.
    pub text: String,
    /// A shell command that repairs it. Remarks for people follow `#`.
    pub repair: Option<String>,
}

impl Finding {
    /// Whether packets are lost.
    pub fn is_error(&self) -> bool {
        self.severity == Severity::Error
    }
}
