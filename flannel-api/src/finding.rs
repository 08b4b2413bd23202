//! Findings about a host.

use serde::{Deserialize, Serialize};

/// A condition of a host because of which packets of pods are lost. Neither the start of the daemon
/// nor its readiness depends on it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Finding {
    /// The name of the check, one word.
    pub check: String,
    /// `error`: packets are lost. `warning`: some packets may be lost.
    pub severity: String,
    /// A sentence without a full stop.
    pub text: String,
    /// A shell command that repairs it. Remarks for people follow `#`.
    pub repair: Option<String>,
}

impl Finding {
    /// An error without a command.
    pub fn error(check: &str, text: impl Into<String>) -> Self {
        Self { check: check.into(), severity: "error".into(), text: text.into(), repair: None }
    }

    /// A warning without a command.
    pub fn warning(check: &str, text: impl Into<String>) -> Self {
        Self { severity: "warning".into(), ..Self::error(check, text) }
    }

    /// The same finding with the command that repairs it.
    pub fn with_command(self, command: impl Into<String>) -> Self {
        Self { repair: Some(command.into()), ..self }
    }

    /// Whether packets are lost.
    pub fn is_error(&self) -> bool {
        self.severity == "error"
    }
}
