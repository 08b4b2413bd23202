//! Removes objects of earlier pod networks: routes to old subnets of peers that stay on the
//! external interface.
//!
//! A route is ours if it has our protocol and lies inside our pod networks. So the pod networks are
//! recorded when a network starts, until none of their objects is left. An error of the record does
//! not end a network that runs.

use std::convert::Infallible;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use flannel_core::kernel::Footprint;
use flannel_core::runtime::blocking;
use flannel_core::status::Status;
use flannel_core::{Config, Kernel, Subnet};
use flannel_options::state_dir;
use flannel_route::remove_former;
use flannel_subnet::subnet_file;
use tokio::sync::watch;

use super::{is_settled, log_removal};
use crate::blocking::BlockingQueue;

/// The pod networks of this host in the record.
#[derive(Debug)]
pub(crate) struct OldNetworks {
    record: PathBuf,
    /// Earlier ones, of which objects may be left.
    former: Vec<Subnet>,
    current: Vec<Subnet>,
    writes: BlockingQueue,
}

/// Adds the networks of the subnet file to the record. Go flannel, or a daemon without its record,
/// left the file. It is removed if its networks are no longer the right ones.
pub(crate) fn record_subnet_file(state_dir: &Path, subnet_file: &Path) {
    let record = state_dir::networks(state_dir);
    let mut networks = state_dir::read_networks(&record);
    let of_file = subnet_file::read(subnet_file).map(|env| env.networks).unwrap_or_default();
    let known = networks.len();
    for network in of_file {
        if !networks.contains(&network) {
            networks.push(network);
        }
    }
    if networks.len() > known {
        state_dir::write_networks(&record, &networks);
    }
}

impl OldNetworks {
    /// Notes the config's networks before objects are put for them.
    pub(crate) async fn record(state_dir: &Path, config: &Config, writes: BlockingQueue) -> Self {
        let record = state_dir::networks(state_dir);
        let current: Vec<Subnet> = config.pod_networks().collect();
        let mut former = state_dir::read_networks(&record);
        former.retain(|network| !current.contains(network));
        let this = Self { record, former, current, writes };
        this.write([&this.former[..], &this.current].concat()).await;
        this
    }

    /// The pod networks that this host had earlier, of which objects may be left.
    pub(crate) fn former(&self) -> &[Subnet] {
        &self.former
    }

    /// Removes objects of earlier networks once the network is settled, then never returns.
    pub(crate) async fn clear(
        &self,
        kernel: Arc<dyn Kernel>,
        footprint: Footprint,
        mut status: watch::Receiver<Arc<Status>>,
    ) -> Infallible {
        if !self.former.is_empty() && status.wait_for(is_settled).await.is_ok() {
            let former = self.former.clone();
            let removal = move || {
                let mut gone = true;
                for network in former {
                    let removed = remove_former(&*kernel, &footprint, network, false);
                    gone &= log_removal(&format!("the earlier pod network {network}"), removed);
                }
                gone
            };
            // Objects that the kernel keeps are removed after the next start.
            if blocking(removal).await {
                self.write(self.current.clone()).await;
            }
        }
        std::future::pending().await
    }

    async fn write(&self, networks: Vec<Subnet>) {
        let record = self.record.clone();
        self.writes.run(move || state_dir::write_networks(&record, &networks)).await;
    }
}
