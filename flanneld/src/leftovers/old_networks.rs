//! Starting with another pod network than before: routes to the old subnets of peers stay on the
//! external interface.
//!
//! A route is ours if it has our protocol and lies inside our pod networks. So the pod networks are
//! recorded as a network starts, and forgotten when nothing of them is left. An error of the record does
//! not end a network that runs.

use std::convert::Infallible;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use flannel_core::kernel::Footprint;
use flannel_core::status::Status;
use flannel_core::{Config, Kernel, Subnet};
use flannel_options::state_dir;
use flannel_route::remove_former;
use tokio::sync::watch;

use super::is_settled;
use crate::disk::run_blocking_in_order;

/// Knows which pod networks this host has had of which something may be left.
#[derive(Debug)]
pub(crate) struct OldNetworks {
    record: PathBuf,
}

/// The pod networks in the record.
#[derive(Debug)]
pub(crate) struct Recorded {
    former: Vec<Subnet>,
    /// The config's.
    current: Vec<Subnet>,
}

impl OldNetworks {
    pub(crate) fn new(state_dir: &Path) -> Self {
        Self { record: state_dir::networks(state_dir) }
    }

    /// Notes which networks there are, before anything is put for the config's.
    pub(crate) async fn record(&self, config: &Config) -> Recorded {
        let recorded =
            Recorded { former: self.networks(config), current: config.pod_networks().collect() };
        self.write([&recorded.former[..], &recorded.current].concat()).await;
        recorded
    }

    /// Waits until the network is settled and removes what is left inside former networks; then
    /// waits for ever.
    pub(crate) async fn clear(
        &self,
        Recorded { former, current }: Recorded,
        kernel: Arc<dyn Kernel>,
        footprint: Footprint,
        mut status: watch::Receiver<Arc<Status>>,
    ) -> Infallible {
        if !former.is_empty() && status.wait_for(is_settled).await.is_ok() {
            let removal = move || {
                let kept: Vec<_> = former
                    .into_iter()
                    .filter(|network| !remove(&*kernel, &footprint, *network))
                    .collect();
                kept.is_empty()
            };
            let done = match tokio::task::spawn_blocking(removal).await {
                Ok(done) => done,
                Err(panic) => std::panic::resume_unwind(panic.into_panic()),
            };
            // What the kernel refused is tried again at the next start.
            if done {
                self.write(current).await;
            }
        }
        std::future::pending().await
    }

    /// Those that are not the config's.
    pub(crate) fn networks(&self, config: &Config) -> Vec<Subnet> {
        let is_former = |network: &Subnet| config.pod_networks().all(|current| current != *network);
        state_dir::read_networks(&self.record).into_iter().filter(is_former).collect()
    }

    /// Mostly it is as noted already, and nothing is written.
    async fn write(&self, networks: Vec<Subnet>) {
        let text: String = networks.iter().map(|network| format!("{network}\n")).collect();
        let written = match state_dir::read(&self.record).map(Option::unwrap_or_default) {
            Ok(noted) if noted == text => return,
            // What cannot be read now is not lost for that.
            Err(error) => Err(error),
            Ok(_) => {
                let record = self.record.clone();
                run_blocking_in_order(move || state_dir::replace(&record, &text)).await
            }
        };
        if let Err(error) = written {
            tracing::warn!(
                "{}: {error} (see --state-dir): after the next change of the pod network, what this one leaves on the external \
                 interface stays",
                self.record.display()
            );
        }
    }
}

/// Removes what is left inside a network and says so; false if something of it stays.
fn remove(kernel: &dyn Kernel, footprint: &Footprint, former: Subnet) -> bool {
    match remove_former(kernel, footprint, former, false) {
        Ok(report) => {
            for change in &report.done {
                tracing::info!(
                    "left of the earlier pod network {former}, removed: {}",
                    change.object()
                );
            }
            for (change, error) in &report.failed {
                tracing::warn!(
                    "left of the earlier pod network {former}, and stays: {}: {error}",
                    change.object()
                );
            }
            report.failed.is_empty()
        }
        Err(error) => {
            tracing::warn!(
                "what is left of the earlier pod network {former} is not known, the kernel cannot be read: {error}"
            );
            false
        }
    }
}
