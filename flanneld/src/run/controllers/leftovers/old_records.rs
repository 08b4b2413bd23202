//! Removes the records that another backend left in its keeper, such as commands for peers.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use flannel_core::Kernel;
use flannel_core::kernel::{Footprint, RecordKeeper};
use flannel_core::runtime::{blocking, lock};
use flannel_core::status::Status;
use flannel_route::cleanup;
use flannel_route::record_keepers::WithRecordKeepers;
use tokio::sync::watch;
use tokio::time::sleep;

use super::{is_settled, log_removal};
use crate::config::DaemonConfig;
use crate::run::backends::{ActiveBackends, BackendRecord};

/// The pause between two reads. Commands of the other backend may still run at the first one.
const PAUSE: Duration = Duration::from_secs(5);
/// The reads of records that cannot be removed. Then the next start tries again.
const ATTEMPTS: u32 = 5;
/// The reads without records after which there are none: more than a minute, the longest time of a
/// command.
const QUIET: u32 = 14;

/// The records of all backends that the network does not run.
pub(super) struct OldRecords<'a> {
    pub(super) settings: &'a DaemonConfig,
    /// The backends of the network.
    pub(super) backends: &'a ActiveBackends,
    pub(super) record: &'a BackendRecord,
}

/// A record keeper of a backend that the network does not run.
struct OldKeeper {
    backend: &'static str,
    keeper: Arc<dyn RecordKeeper>,
    reads: Reads,
}

impl OldRecords<'_> {
    /// Removes the records once the network is settled, then never returns. The records of a
    /// backend that runs commands stay if no option allows it.
    pub(super) async fn clear(
        &self,
        kernel: Arc<dyn Kernel>,
        mut status: watch::Receiver<Arc<Status>>,
    ) -> Infallible {
        let mut allowed = Vec::new();
        let mut kept = Vec::new();
        for other in self.settings.backends.iter().filter(|it| !self.backends.runs(&***it)) {
            let is_allowed = self.settings.allow_commands || !other.runs_commands();
            let record_keepers = if is_allowed { &mut allowed } else { &mut kept };
            for keeper in other.record_keepers(Some(&self.settings.state_dir)) {
                record_keepers.push(OldKeeper {
                    backend: other.kind(),
                    keeper,
                    reads: Reads::default(),
                });
            }
        }
        if status.wait_for(is_settled).await.is_ok() {
            for old in kept {
                self.report(old).await;
            }
            remove_all(allowed, &kernel).await;
        }
        std::future::pending().await
    }

    /// Logs once that the commands of a backend may stay in effect, if there are any.
    async fn report(&self, OldKeeper { backend, keeper, .. }: OldKeeper) {
        let records = match blocking(move || keeper.records()).await {
            Ok(records) => records.len(),
            Err(error) => {
                tracing::warn!(
                    %backend, %error,
                    "the records of an earlier backend cannot be read"
                );
                return;
            }
        };
        if records > 0 && lock(&self.record.kept_commands).insert(backend.to_owned()) {
            tracing::warn!(
                %backend, records,
                "an earlier backend has run commands, which may still be in effect, and those that \
                 undo them are not allowed: start the daemon with --allow-commands, or stop it and \
                 run `flannelctl cleanup`"
            );
        }
    }
}

/// Removes the records until none has appeared for a while.
async fn remove_all(mut record_keepers: Vec<OldKeeper>, kernel: &Arc<dyn Kernel>) {
    while !record_keepers.is_empty() {
        for old in &mut record_keepers {
            let removed = remove(old.backend, Arc::clone(&old.keeper), Arc::clone(kernel)).await;
            old.reads.count(removed);
        }
        record_keepers.retain(|old| old.reads.are_needed());
        sleep(PAUSE).await;
    }
}

/// The reads of the records of one keeper.
#[derive(Debug, Clone, Copy, Default)]
struct Reads {
    failures: u32,
    quiet: u32,
}

/// What happened to the records of a record keeper.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Removed {
    /// There were none.
    Nothing,
    /// All are gone.
    Records,
    /// Some may still be there.
    Failed,
}

impl Reads {
    fn count(&mut self, removed: Removed) {
        match removed {
            Removed::Nothing => self.quiet += 1,
            Removed::Records => self.quiet = 0,
            Removed::Failed => self.failures += 1,
        }
    }

    fn are_needed(&self) -> bool {
        self.failures < ATTEMPTS && self.quiet < QUIET
    }
}

/// Removes the records of a record keeper.
async fn remove(backend: &str, keeper: Arc<dyn RecordKeeper>, kernel: Arc<dyn Kernel>) -> Removed {
    let origin = format!("the earlier backend {backend}");
    blocking(move || {
        // Mostly there are none, and then the kernel need not be read, which takes long with many
        // peers.
        if keeper.records().is_ok_and(|records| records.is_empty()) {
            return Removed::Nothing;
        }
        let record_keepers = [keeper.name()].into();
        let footprint = Footprint { record_keepers, ..Footprint::default() };
        let kernel = WithRecordKeepers::new(kernel, [keeper]).waiting();
        let removed = cleanup(&kernel, &footprint, false);
        let had_records = removed.as_ref().is_ok_and(|removed| !removed.done.is_empty());
        if !log_removal(&origin, removed) {
            Removed::Failed
        } else if had_records {
            Removed::Records
        } else {
            Removed::Nothing
        }
    })
    .await
}
