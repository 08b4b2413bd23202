//! Findings on this host, such as a sysctl that drops packets of pods.

use std::time::Duration;

use flannel_doctor::checks::host::log_changes;
use tokio::sync::watch;
use tokio::time::{sleep, timeout};

use super::{Ended, RULES};
use crate::observe::Observer;
use crate::report::host;

/// The pause between two checks of this host.
const PAUSE: Duration = Duration::from_secs(300);

/// Checks this host, and logs changes of the findings.
pub(crate) struct HostFindingsController<'a> {
    pub(crate) observer: &'a Observer,
    /// Whether the firewall rules are in place.
    pub(crate) rules: watch::Receiver<bool>,
}

impl HostFindingsController<'_> {
    /// Runs until it is dropped. The first check is made when the firewall rules are in place, or
    /// cannot be.
    pub(crate) async fn run(mut self) -> Ended {
        drop(timeout(RULES, self.rules.wait_for(|settled| *settled)).await);
        loop {
            let snapshot = self.observer.snapshot().with_traffic().await;
            let findings = host::look(&snapshot, self.observer.legacy()).await.findings;
            log_changes(&snapshot.facts.findings, &findings, snapshot.deployment());
            self.observer.note(|facts| facts.findings = findings);
            sleep(PAUSE).await;
        }
    }
}
