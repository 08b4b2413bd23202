//! Problems of a daemon.

use serde::{Deserialize, Serialize};

/// A problem of the daemon. The node is ready if and only if no problem is an error.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Problem {
    /// `error`: the node is not ready. `warning`: the node may be ready.
    pub severity: String,
    /// A sentence without a full stop.
    pub text: String,
    /// A shell command that repairs the problem or shows more. Remarks for people follow `#`.
    pub hint: Option<String>,
}

impl Problem {
    /// An error without a hint.
    pub fn error(text: impl Into<String>) -> Self {
        Self { severity: "error".to_owned(), text: text.into(), hint: None }
    }

    /// A warning without a hint.
    pub fn warning(text: impl Into<String>) -> Self {
        Self { severity: "warning".to_owned(), text: text.into(), hint: None }
    }

    /// The same problem with a hint.
    pub fn with_hint(self, hint: impl Into<String>) -> Self {
        Self { hint: Some(hint.into()), ..self }
    }

    /// Whether it makes the node not ready.
    pub fn is_error(&self) -> bool {
        self.severity == "error"
    }
}
