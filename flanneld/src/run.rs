//! Runs the daemon: opens the store and follows it, one network after the other.
//!
//! **Source**: flannel `main.go`, for the order.

mod backends;
mod claims;
mod config_validator;
mod controllers;
mod network;
mod own_subnets;
mod proven;
mod refusals;
mod start;
mod trial;
mod uplink;

use std::convert::Infallible;
use std::net::IpAddr;
use std::path::Path;
use std::pin::{Pin, pin};
use std::sync::Arc;

use flannel_core::kernel::Footprint;
use flannel_core::{Kernel, SubnetManager, Subnets};
use flannel_netlink::NetlinkKernel;
use flannel_options::state_dir;
use flannel_subnet::{HolderId, Identity, remove_temporary_files, subnet_file};

use crate::blocking::BlockingQueue;
use crate::config::{DaemonConfig, NexthopObjects};
use crate::control::Servers;
use crate::error::Error;
use crate::observe::Observer;
use crate::store::{self, LeaseOptions, readiness};
use claims::Claims;
use controllers::leftovers::go_flannel::GoFlannel;
use controllers::leftovers::old_networks::record_subnet_file;
use network::DaemonContext;
use own_subnets::OwnSubnets;
use start::{Starter, StarterParts};
use trial::DeviceTrials;

/// Runs the daemon: see [`Daemon::run_until`](crate::Daemon::run_until).
pub(crate) async fn run<T>(
    settings: &DaemonConfig,
    observer: &Observer,
    stop: impl Future<Output = T>,
) -> Result<T, Error> {
    let mut stop = pin!(stop);
    // First, because another daemon that holds the lock may have the sockets too. Until then, the
    // record keepers are the other daemon's.
    let lock = tokio::select! {
        lock = state_dir::lock(&settings.state_dir) => lock?,
        stopped = &mut stop => return Ok(stopped),
    };
    let writes = BlockingQueue::new(lock);
    let ends = writes.another();
    let servers = Servers::open(&settings.control, &settings.subnet_file).await?;
    let stopped = tokio::select! {
        ended = networks(settings, observer, writes) => match ended? {},
        never = servers.serve(observer) => match never {},
        stopped = stop => stopped,
    };
    // The network has ended, and the lock is still held.
    ends.run(end_of_node(settings)).await;
    Ok(stopped)
}

/// [`run_networks`] in a box: a network that runs, and the next one, are too large for a small
/// stack. The crates that call the generic [`run`] do not compile it again.
fn networks<'a>(
    settings: &'a DaemonConfig,
    observer: &'a Observer,
    writes: BlockingQueue,
) -> Pin<Box<dyn Future<Output = Result<Infallible, Error>> + 'a>> {
    Box::pin(run_networks(settings, observer, writes))
}

/// What the backends do at an orderly end of the daemon.
fn end_of_node(settings: &DaemonConfig) -> impl FnOnce() + Send + use<> {
    let state_dir = Some(settings.state_dir.as_path());
    let record_keepers: Vec<_> =
        settings.backends.iter().flat_map(|backend| backend.record_keepers(state_dir)).collect();
    move || record_keepers.iter().for_each(|keeper| keeper.stop())
}

/// Opens the store and runs networks on it.
async fn run_networks(
    settings: &DaemonConfig,
    observer: &Observer,
    writes: BlockingQueue,
) -> Result<Infallible, Error> {
    let kernel = Arc::new(open_kernel(settings)?);
    let holder = state_dir::holder_id(&settings.state_dir)?;
    let claims = Claims::default();
    claims.claim_file(&settings.subnet_file).await?;
    clean_up(&settings.subnet_file);
    record_subnet_file(&settings.state_dir, &settings.subnet_file);
    let go_flannel =
        GoFlannel::find(&settings.subnet_file, &settings.state_dir)?.writing_in(writes.clone());
    let identity = Identity {
        holder,
        previous: previous_subnets(settings),
        local_addresses: addresses(&kernel, settings)?,
    };
    let options = LeaseOptions {
        renew_margin: settings.renew_margin,
        cache: state_dir::leases(&settings.state_dir),
        after_another_flannel: go_flannel.left_routes(),
    };
    let subnets = store::open(&settings.store, identity, options).await?;
    observer.opened(Arc::clone(&subnets));
    let trials = DeviceTrials::new(Arc::clone(&kernel), writes.another());
    trials.remove_stale().await;
    let parts = StarterParts {
        kernel,
        subnets: Arc::clone(&subnets),
        machine_id: machine_id(holder),
        writes,
        trials,
        own_subnets: OwnSubnets::new(settings.subnet_file.clone(), go_flannel.clone()),
        claims,
    };
    let starter = Starter::new(settings, parts);
    tokio::select! {
        ended = follow_store(settings, &*subnets, starter, &go_flannel, observer) => ended,
        never = readiness::publish(&*subnets, observer) => match never {},
    }
}

/// Runs one network after the other on an open store.
async fn follow_store(
    settings: &DaemonConfig,
    subnets: &dyn SubnetManager,
    mut starter: Starter<'_>,
    go_flannel: &GoFlannel,
    observer: &Observer,
) -> Result<Infallible, Error> {
    let mut ready = Box::pin(starter.next(None, observer)).await?;
    loop {
        starter.started(&ready);
        let starter = &starter;
        let daemon = DaemonContext { settings, subnets, starter, go_flannel, observer };
        ready = network::run(daemon, ready).await?;
    }
}

/// Opens the kernel, with or without its nexthop objects.
fn open_kernel(settings: &DaemonConfig) -> Result<NetlinkKernel, Error> {
    let kernel = NetlinkKernel::open()?;
    match settings.nexthop_objects {
        NexthopObjects::Off => Ok(kernel.without_nexthops()),
        NexthopObjects::On if !kernel.nexthop_ids(&Footprint::default())?.usable => {
            Err(Error::NoNexthopObjects)
        }
        NexthopObjects::Auto | NexthopObjects::On => Ok(kernel),
    }
}

/// Removes what a crashed writer of the subnet file left. Logs a failure, which only costs space.
fn clean_up(subnet_file: &Path) {
    if let Some(dir) = subnet_file.parent()
        && let name @ Some(_) = subnet_file.file_name()
        && let Err(error) = remove_temporary_files(dir, name)
    {
        tracing::warn!(path = %dir.display(), %error, "temporary files are not removed");
    }
}

/// The subnets in the subnet file of the last run; `None` if the file does not exist. A file that
/// cannot be read is logged and counts as missing.
fn previous_subnets(settings: &DaemonConfig) -> Option<Subnets> {
    subnet_file::previous(&settings.subnet_file).unwrap_or_else(|error| {
        tracing::warn!(%error, "the previous subnet is not known");
        None
    })
}

/// The addresses that identify a lease as this host's.
fn addresses(kernel: &NetlinkKernel, settings: &DaemonConfig) -> Result<Vec<IpAddr>, Error> {
    let interfaces = kernel.interfaces()?;
    let local = interfaces.iter().flat_map(|interface| &interface.addresses).map(|a| a.address);
    Ok(settings.interface.public.values().copied().chain(local).collect())
}

/// The identity of this machine among its clones: `/etc/machine-id`, else the holder ID.
fn machine_id(holder: HolderId) -> String {
    let id = std::fs::read_to_string("/etc/machine-id").unwrap_or_default();
    let id = id.trim();
    if id.is_empty() { holder.to_string() } else { id.to_owned() }
}
