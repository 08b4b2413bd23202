//! Removes the records that another backend left in its annex, such as commands for peers.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use flannel_core::kernel::{Annex, Footprint};
use flannel_core::runtime::{blocking, lock};
use flannel_core::status::Status;
use flannel_core::{Backend, Kernel};
use flannel_route::annex::WithAnnexes;
use flannel_route::cleanup;
use tokio::sync::watch;
use tokio::time::sleep;

use super::{is_settled, log_removal};
use crate::config::DaemonConfig;
use crate::run::moving::{Moving, Team};

/// The pause between two looks. Commands of the other backend may still run at the first one.
const PAUSE: Duration = Duration::from_secs(5);
/// The looks at records that cannot be removed. Then the next start tries again.
const ATTEMPTS: u32 = 5;
/// The looks without records after which there are none: more than a minute, the longest time of a
/// command.
const QUIET: u32 = 14;

/// Removes the records of all backends that `used` does not run once the network is settled, then
/// never returns. Those of a backend that runs commands stay if no option allows it.
pub(crate) async fn clear(
    kernel: Arc<dyn Kernel>,
    (settings, used, moving): (&DaemonConfig, &Team, &Moving),
    mut status: watch::Receiver<Arc<Status>>,
) -> Infallible {
    let others = settings.backends.iter().filter(|backend| !used.runs(&***backend));
    let of = |other: &Arc<dyn Backend>| {
        let (kind, allowed) = (other.kind(), settings.allow_commands || !other.runs_commands());
        let annexes = other.annexes(Some(&settings.state_dir)).into_iter();
        annexes.map(move |annex| (kind, annex, allowed))
    };
    let (mut allowed, kept): (Vec<_>, Vec<_>) =
        others.flat_map(of).partition(|(_, _, allowed)| *allowed);
    if status.wait_for(is_settled).await.is_ok() {
        for (backend, annex, _) in kept {
            report(backend, annex, moving).await;
        }
        let mut looks = vec![Looks::default(); allowed.len()];
        while !allowed.is_empty() {
            for ((backend, annex, _), looks) in allowed.iter().zip(&mut looks) {
                looks.count(remove(backend, Arc::clone(annex), Arc::clone(&kernel)).await);
            }
            let mut more = looks.iter().map(Looks::are_needed);
            allowed.retain(|_| more.next().unwrap_or_default());
            looks.retain(Looks::are_needed);
            sleep(PAUSE).await;
        }
    }
    std::future::pending().await
}

/// The looks at the records of one annex.
#[derive(Debug, Clone, Copy, Default)]
struct Looks {
    failures: u32,
    quiet: u32,
}

impl Looks {
    fn count(&mut self, (succeeded, had_records): (bool, bool)) {
        match (succeeded, had_records) {
            (true, false) => self.quiet += 1,
            (true, true) => self.quiet = 0,
            (false, _) => self.failures += 1,
        }
    }

    fn are_needed(&self) -> bool {
        self.failures < ATTEMPTS && self.quiet < QUIET
    }
}

/// Removes the records of an annex. Returns whether this succeeded, and whether there were any.
async fn remove(backend: &str, annex: Arc<dyn Annex>, kernel: Arc<dyn Kernel>) -> (bool, bool) {
    let origin = format!("the earlier backend {backend}");
    let removal = move || {
        let annexes = [annex.name()].into();
        let footprint = Footprint { annexes, ..Footprint::default() };
        let kernel = WithAnnexes::new(kernel, [annex]).waiting();
        let removed = cleanup(&kernel, &footprint, false);
        let had_records = removed.as_ref().is_ok_and(|removed| !removed.done.is_empty());
        (log_removal(&origin, removed), had_records)
    };
    blocking(removal).await
}

/// Logs once that the commands of a backend may stay in effect, if there are any.
async fn report(backend: &str, annex: Arc<dyn Annex>, moving: &Moving) {
    let records = match blocking(move || annex.records()).await {
        Ok(records) => records.len(),
        Err(error) => {
            tracing::warn!(%backend, %error, "the records of an earlier backend cannot be read");
            return;
        }
    };
    let is_new = || {
        let mut kept = lock(&moving.kept_commands);
        kept.insert(backend.to_owned())
    };
    if records > 0 && is_new() {
        tracing::warn!(
            %backend, records,
            "an earlier backend has run commands, which may still be in effect, and those that \
             undo them are not allowed: start the daemon with --allow-commands, or stop it and run \
             `flannelctl cleanup`"
        );
    }
}
