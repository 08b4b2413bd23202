//! Findings with their remedies, before a program shows them.

use flannel_api::{Deployment, Severity};
use flannel_core::Remedy;
use flannel_core::remedy::Trouble;

use crate::remedy::render;

/// A condition of a host or of a path because of which packets of pods are lost.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// The name of the check, one word.
    pub check: String,
    /// Whether packets are lost, or some packets may be lost.
    pub severity: Severity,
    /// A sentence without a full stop.
    pub text: String,
    /// What repairs it; `None` if no remedy is known.
    pub remedy: Option<Remedy>,
}

impl Finding {
    /// A finding without a remedy.
    pub fn new(check: &str, severity: Severity, text: impl Into<String>) -> Self {
        Self { check: check.to_owned(), severity, text: text.into(), remedy: None }
    }

    /// An error without a remedy.
    pub fn error(check: &str, text: impl Into<String>) -> Self {
        Self::new(check, Severity::Error, text)
    }

    /// A warning without a remedy.
    pub fn warning(check: &str, text: impl Into<String>) -> Self {
        Self::new(check, Severity::Warning, text)
    }

    /// A warning about something that a backend reports.
    pub fn of_trouble(check: &str, trouble: Trouble) -> Self {
        Self::warning(check, trouble.text).with_remedy(trouble.remedy)
    }

    /// The finding with its remedy.
    pub fn with_remedy(self, remedy: Remedy) -> Self {
        Self { remedy: Some(remedy), ..self }
    }

    /// The finding with a shell command of the host that repairs it.
    pub fn with_command(self, command: impl Into<String>) -> Self {
        self.with_remedy(Remedy::run(command))
    }

    /// Whether packets are lost.
    pub fn is_error(&self) -> bool {
        self.severity == Severity::Error
    }

    /// The report, with the command for a deployment.
    pub fn report(&self, deployment: Deployment) -> flannel_api::Finding {
        flannel_api::Finding {
            check: self.check.clone(),
            severity: self.severity,
            text: self.text.clone(),
            repair: self.remedy.as_ref().map(|remedy| render(remedy, deployment)),
        }
    }

    /// The command for a systemd unit.
    #[cfg(test)]
    pub(crate) fn repair(&self) -> Option<String> {
        self.report(Deployment::Systemd).repair
    }
}

/// A finding that a daemon reported. Its command is the one for the daemon's deployment.
impl From<flannel_api::Finding> for Finding {
    fn from(finding: flannel_api::Finding) -> Self {
        let flannel_api::Finding { check, severity, text, repair } = finding;
        Self { check, severity, text, remedy: repair.map(Remedy::Run) }
    }
}

/// The reports of findings, with the commands for a deployment.
pub fn reports(findings: &[Finding], deployment: Deployment) -> Vec<flannel_api::Finding> {
    findings.iter().map(|finding| finding.report(deployment)).collect()
}
