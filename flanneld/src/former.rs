//! Starting with another pod network than before: the routes to peers' old subnets on the external
//! interface.
//!
//! The one thing to know: routes are known as ours by their protocol inside our pod networks, so
//! which these have been is noted as a network starts, and forgotten when nothing of them is left.
//! That it cannot be noted is no reason to end a network that runs.

use std::convert::Infallible;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use flannel_core::{Config, Kernel, Owned, Status, Subnet};
use flannel_route::remove_former;
use tokio::sync::watch;

use crate::disk::aside;
use crate::state;

/// Knows which pod networks this host has had of which something may be left.
#[derive(Debug)]
pub(crate) struct Former {
    record: PathBuf,
}

/// The pod networks that are noted.
#[derive(Debug)]
pub(crate) struct Noted {
    former: Vec<Subnet>,
    /// The config's.
    current: Vec<Subnet>,
}

impl Former {
    pub(crate) fn new(state_dir: &Path) -> Self {
        Self { record: state_dir.join("networks") }
    }

    /// Notes which networks there are, before anything is put for the config's.
    pub(crate) async fn note(&self, config: &Config) -> Noted {
        let noted =
            Noted { former: self.networks(config), current: config.pod_networks().collect() };
        self.write([&noted.former[..], &noted.current].concat()).await;
        noted
    }

    /// Waits until the network is settled and removes what is left inside former networks; then
    /// waits for ever.
    pub(crate) async fn clear(
        &self,
        Noted { former, current }: Noted,
        kernel: Arc<dyn Kernel>,
        owned: Owned,
        mut status: watch::Receiver<Arc<Status>>,
    ) -> Infallible {
        if !former.is_empty() && status.wait_for(is_settled).await.is_ok() {
            let removal = move || {
                let kept: Vec<_> = former
                    .into_iter()
                    .filter(|network| !remove(&*kernel, &owned, *network))
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
        self.read().into_iter().filter(is_former).collect()
    }

    /// One network a line.
    fn read(&self) -> Vec<Subnet> {
        let text = self.text().unwrap_or_else(|error| {
            tracing::warn!(
                "{}: {error} (see --state-dir): what other pod networks left on the external interface stays",
                self.record.display()
            );
            String::new()
        });
        let network = |line: &str| {
            let network = line.parse().ok();
            if network.is_none() {
                let path = self.record.display();
                tracing::warn!(
                    "{path}: {line:?} is no network, such as \"10.1.0.0/16\", and is passed over"
                );
            }
            network
        };
        text.lines().filter_map(network).collect()
    }

    /// Mostly it is as noted already, and nothing is written.
    async fn write(&self, networks: Vec<Subnet>) {
        let text: String = networks.iter().map(|network| format!("{network}\n")).collect();
        let written = match self.text() {
            Ok(noted) if noted == text => return,
            // What cannot be read now is not lost for that.
            Err(error) => Err(error),
            Ok(_) => {
                let record = self.record.clone();
                aside(move || state::replace(&record, &text)).await
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

    /// Nothing if there is no record yet.
    fn text(&self) -> io::Result<String> {
        Ok(state::read(&self.record)?.unwrap_or_default())
    }
}

/// All that the leases of the store want was put, as far as the kernel took it.
pub(crate) fn is_settled(status: &Arc<Status>) -> bool {
    status.live && status.settled && status.kernel_error.is_none()
}

/// Removes what is left inside a network and says so; false if something of it stays.
fn remove(kernel: &dyn Kernel, owned: &Owned, former: Subnet) -> bool {
    match remove_former(kernel, owned, former, false) {
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
