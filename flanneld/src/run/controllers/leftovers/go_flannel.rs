//! Removes the routes that Go flannel left on the external interface.
//!
//! Go flannel's routes have the same protocol as routes of scripts. So they are removed only on the
//! first start after a subnet file that we did not write, once the kernel has accepted or refused
//! all objects of the leases.

use std::cell::Cell;
use std::convert::Infallible;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use flannel_core::address::Dual;
use flannel_core::kernel::{Footprint, GoRouteKernel};
use flannel_core::object::Key;
use flannel_core::runtime::blocking;
use flannel_core::status::Status;
use flannel_core::{Subnet, Subnets};
use flannel_options::state_dir::{self, is_newer};
use flannel_route::remove_go_routes;
use tokio::sync::watch;

use super::{is_settled, log_removal};
use crate::blocking::BlockingQueue;
use crate::error::Error;

/// The record after a subnet file of another program was removed, whose routes may still be there.
const REMOVED: &str = "removed\n";

/// The leftovers of Go flannel. Clones share their state.
#[derive(Debug, Clone)]
pub(crate) struct GoFlannel {
    subnet_file: PathBuf,
    /// The state file with the identity of the subnet file that this daemon wrote.
    record: PathBuf,
    /// Another program wrote the subnet file, and its routes may still be there.
    left_routes: Arc<AtomicBool>,
    /// The queue of the writes of the subnet file, and of the record.
    pub(crate) writes: BlockingQueue,
}

impl GoFlannel {
    /// Reads the subnet file, before it is written.
    ///
    /// # Errors
    /// The record cannot be read.
    pub(crate) fn find(subnet_file: &Path, state_dir: &Path) -> Result<Self, Error> {
        let subnet_file = subnet_file.to_owned();
        let record = state_dir.join("subnet-file");
        let there = identity(&subnet_file);
        let ours = match state_dir::read(&record) {
            Ok(text) => text,
            // A newer build of this daemon ran here last, and not Go flannel.
            Err(error) if is_newer(&error) => {
                let path = record.display();
                tracing::warn!(%path, %error, "the subnet file counts as this daemon's");
                there.clone()
            }
            Err(error) => return Err(Error::file(&record, &error)),
        };
        let was_removed = ours.as_deref() == Some(REMOVED);
        let is_others = was_removed || (there.is_some() && there != ours);
        let left_routes = Arc::new(AtomicBool::new(is_others));
        Ok(Self { subnet_file, record, left_routes, writes: BlockingQueue::default() })
    }

    /// Writes its file in this queue.
    pub(crate) fn writing_in(self, writes: BlockingQueue) -> Self {
        Self { writes, ..self }
    }

    /// Records that this daemon wrote the subnet file, unless routes must be removed first. Call it
    /// together with the write ([`BlockingQueue::run`]). Otherwise the next start may treat the
    /// file as Go flannel's.
    pub(crate) fn wrote_subnet_file(&self) {
        if self.left_routes() {
            return;
        }
        let text = identity(&self.subnet_file).unwrap_or_default();
        if let Err(error) = state_dir::replace(&self.record, &text) {
            tracing::warn!(
                path = %self.record.display(), %error, subnet_file = %self.subnet_file.display(),
                "a state file cannot be written (see --state-dir): the next start treats the \
                 subnet file as Go flannel's"
            );
        }
    }

    /// Records that this daemon removed the subnet file. The routes of its writer may still be
    /// there after another start.
    pub(crate) fn removed_subnet_file(&self) {
        if self.left_routes()
            && let Err(error) = state_dir::replace(&self.record, REMOVED)
        {
            tracing::warn!(
                path = %self.record.display(), %error,
                "a state file cannot be written (see --state-dir): if the daemon is restarted now, \
                 routes of Go flannel may stay"
            );
        }
    }

    /// Waits until the network is settled, removes Go flannel's routes if it ran here before, then
    /// never returns.
    pub(crate) async fn clear(
        &self,
        kernel: Arc<dyn GoRouteKernel>,
        footprint: Footprint,
        own: &Subnets,
        mut status: watch::Receiver<Arc<Status>>,
    ) -> Infallible {
        // The subnets of all nodes have one length.
        let lens = Dual::from_fn(|family| own.family(family).map(|subnet| subnet.len()));
        let settled = async { status.wait_for(is_settled).await.map(|status| Arc::clone(&status)) };
        if self.left_routes()
            && let Ok(status) = settled.await
        {
            // Objects that the kernel keeps are removed after the next start.
            self.left_routes.store(
                !blocking(move || remove(&*kernel, &footprint, lens, &status)).await,
                Ordering::Relaxed,
            );
            let this = self.clone();
            self.writes.run(move || this.wrote_subnet_file()).await;
        }
        std::future::pending().await
    }

    /// Whether another program wrote the subnet file, and its routes may still be there.
    pub(crate) fn left_routes(&self) -> bool {
        self.left_routes.load(Ordering::Relaxed)
    }
}

/// Removes the routes, except those that the kernel refused to replace by ours. Returns whether all
/// are gone.
fn remove(
    kernel: &dyn GoRouteKernel,
    footprint: &Footprint,
    lens: Dual<u8>,
    status: &Status,
) -> bool {
    let spared = Cell::new(false);
    let refused = |dst: &Subnet| {
        let refused = status.failing.get(&Key::Route(*dst)).is_some();
        spared.set(spared.get() || refused);
        refused
    };
    let removal = remove_go_routes(kernel, footprint, lens, refused, false);
    log_removal("Go flannel", removal) && !spared.get()
}

/// Distinguishes this file from one that another program put in its place, even with the same
/// content. `None` without a file.
fn identity(path: &Path) -> Option<String> {
    let file = fs::metadata(path).ok()?;
    let inode = file.ino();
    let device = file.dev();
    let seconds = file.mtime();
    let nanos = file.mtime_nsec();
    Some(format!("{} {device} {inode} {seconds}.{nanos:09}\n", path.display()))
}

#[cfg(test)]
mod tests {
    use flannel_core::Config;
    use flannel_core::kernel::GO_ROUTE_PROTOCOL;
    use flannel_core::object::{Route, Via};
    use flannel_core::testing::FakeKernel;

    use super::*;

    #[test]
    fn only_a_subnet_file_of_another_program_leads_to_a_removal_of_routes() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("subnet.env");
        let state = dir.path();
        let find = || GoFlannel::find(&file, state).unwrap();
        let first = find();
        assert!(!first.left_routes(), "there is no file");
        fs::write(&file, "A=1\n").unwrap();
        assert!(find().left_routes(), "it is not recorded as ours");
        first.wrote_subnet_file();
        assert!(!find().left_routes(), "ours");
        // Another program writes a new file with the same content.
        fs::write(dir.path().join("new"), "A=1\n").unwrap();
        fs::rename(dir.path().join("new"), &file).unwrap();
        let second = find();
        assert!(second.left_routes(), "Go flannel ran meanwhile");
        second.wrote_subnet_file();
        assert!(find().left_routes(), "not before its routes are gone");
        second.removed_subnet_file();
        fs::remove_file(&file).unwrap();
        assert!(find().left_routes(), "its routes outlive its file");
        let third = find();
        third.left_routes.store(false, Ordering::Relaxed);
        fs::write(&file, "A=1\n").unwrap();
        third.wrote_subnet_file();
        assert!(!find().left_routes(), "its routes are gone");
        third.removed_subnet_file();
        fs::remove_file(&file).unwrap();
        assert!(!find().left_routes(), "the removed file was ours");
    }

    #[tokio::test]
    async fn routes_are_removed_when_the_network_is_settled() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("subnet.env");
        fs::write(&file, "A=1\n").unwrap();
        let config =
            Config::parse(r#"{"Network":"10.1.0.0/16","Backend":{"Type":"host-gw"}}"#).unwrap();
        let eth0 = "eth0".parse().unwrap();
        let networks = config.pod_networks().collect();
        let own: Subnets = "10.1.7.0-24".parse().unwrap();
        let routes_on = [eth0].into();
        let footprint = Footprint { networks, routes_on, ..Footprint::default() };
        let kernel = FakeKernel::with_uplink("eth0");
        let via = Via::Gateway { gateway: [192, 0, 2, 66].into(), link: eth0, onlink: false };
        let route = Route { dst: "10.1.66.0/24".parse().unwrap(), via, mtu: None };
        kernel.foreign_put(route, GO_ROUTE_PROTOCOL);
        for refused in [true, false] {
            if refused {
                kernel.fail(1, 1, |call| call.key.is_some());
            }
            let go_flannel = GoFlannel::find(&file, dir.path()).unwrap();
            let (sender, status) = watch::channel(Arc::new(Status::default()));
            let there = || !kernel.dump().is_empty();
            {
                let clear =
                    go_flannel.clear(Arc::new(kernel.clone()), footprint.clone(), &own, status);
                let mut clear = std::pin::pin!(clear);
                let quiet = async { tokio::task::yield_now().await };
                tokio::select! { biased; _ = &mut clear => unreachable!(), () = quiet => {} }
                assert!(kernel.take_calls().is_empty() && there(), "not settled yet");
                let mut settled = Status::default();
                settled.live = true;
                settled.settled = true;
                sender.send_replace(Arc::new(settled));
                let mut calls = 0;
                let done = async {
                    while calls < 2 || dir.path().join("subnet-file").exists() == refused {
                        calls += kernel.take_calls().len();
                        tokio::task::yield_now().await;
                    }
                };
                tokio::select! { biased; _ = &mut clear => unreachable!(), () = done => {} }
            }
            assert_eq!((there(), go_flannel.left_routes()), (refused, refused));
        }
        assert!(!GoFlannel::find(&file, dir.path()).unwrap().left_routes());
    }
}
