//! The [`Kernel`] implementation for one network namespace.

mod apply;
mod changes;
mod counters;
mod foreign_routes;
mod fou;
mod go_routes;
mod ports;
mod process_names;
pub(crate) mod query;
mod shadows;
mod snapshot;
mod wireguard;

use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard};

use flannel_core::Kernel;
use flannel_core::kernel::{
    Changes, Footprint, GoRouteKernel, GoRoutes, KernelError, NexthopIds, Outcome, Process,
    ProcessNames, RouteAnswer,
};
use flannel_core::object::{Change, Link, ObjectSet, Route};
use flannel_core::runtime::lock;

use self::apply::Writer;
use self::changes::NetlinkChanges;
use self::foreign_routes::ForeignRoutes;
pub use self::ports::PortHolder;
use self::process_names::Processes;
use self::query::lookup;
pub use self::shadows::{Shadow, Taken};
use self::snapshot::{nexthop_ids, nexthop_users, snapshot};
use self::wireguard::WireguardDevices;
pub use self::wireguard::{STALE, Session, Tunnel};
use crate::transport::namespace::Namespace;
use crate::transport::socket::Socket;

/// The links, addresses, neighbours, FDB entries, WireGuard peers, nexthop objects and routes of
/// one network namespace, over rtnetlink and generic netlink.
///
/// [`open`](Self::open) and reading need no privilege. [`Kernel::apply`], and reading WireGuard
/// devices, need `CAP_NET_ADMIN` in the user namespace that owns the network namespace. Devices
/// with UDP headers (`Fou`) need it in the user namespace of the host.
///
/// Several handles may be open at once, for the same network namespace or for different ones. Calls
/// that use the same `NetlinkKernel` wait for each other. The methods of [`Kernel`] need no tokio
/// runtime. [`Changes::next`] needs one with I/O and time.
///
/// ```no_run
/// use flannel_core::Kernel;
/// use flannel_core::kernel::Footprint;
/// use flannel_core::object::LinkName;
/// use flannel_netlink::NetlinkKernel;
///
/// # fn main() -> Result<(), flannel_core::kernel::KernelError> {
/// let kernel = NetlinkKernel::open()?;
/// let link: LinkName = "flannel.1".parse().unwrap();
/// let footprint = Footprint { links: [link].into(), ..Footprint::default() };
/// for object in kernel.snapshot(&footprint)?.iter() {
///     println!("{object}");
/// }
/// # Ok(()) }
/// ```
pub struct NetlinkKernel {
    place: Place,
    socket: Mutex<Socket>,
    processes: Mutex<Processes>,
    /// The port id of `socket`. Notifications carry it if this kernel handle made the change.
    port: u32,
    without_nexthops: bool,
}

/// A network namespace, and the entries of it that later requests depend on.
#[derive(Debug)]
pub(crate) struct Place {
    namespace: Arc<Namespace>,
    foreign: ForeignRoutes,
    wireguard: WireguardDevices,
}

impl Place {
    pub(crate) fn new(namespace: Namespace) -> Self {
        Self {
            namespace: Arc::new(namespace),
            foreign: ForeignRoutes::default(),
            wireguard: WireguardDevices::default(),
        }
    }
}

impl NetlinkKernel {
    /// Opens the network namespace of the calling thread.
    ///
    /// # Errors
    /// The kernel has no netlink, or `/proc` is not mounted.
    pub fn open() -> Result<Self, KernelError> {
        Self::of(Namespace::current()?)
    }

    /// Opens the network namespace of a file such as `/run/netns/red` or `/proc/1234/ns/net`.
    ///
    /// # Errors
    /// The file does not exist or is not a network namespace, or the process lacks `CAP_SYS_ADMIN`,
    /// which is needed to enter it.
    ///
    /// # Blocking
    /// Starts a thread inside the namespace and waits for its end, which takes microseconds.
    /// [`Kernel::changes`] does the same.
    pub fn open_in(path: impl AsRef<Path>) -> Result<Self, KernelError> {
        Self::of(Namespace::at(path.as_ref())?)
    }

    fn of(namespace: Namespace) -> Result<Self, KernelError> {
        let (socket, processes) = namespace.run(|| (Socket::open(), Processes::here()))?;
        let socket = socket?;
        Ok(Self {
            place: Place::new(namespace),
            port: socket.port(),
            socket: Mutex::new(socket),
            processes: Mutex::new(processes),
            without_nexthops: false,
        })
    }

    /// Makes [`Kernel::nexthop_ids`] report nexthop objects as unusable. The route engine then puts
    /// routes via gateways. They replace routes of an earlier run that use nexthop objects.
    pub fn without_nexthops(self) -> Self {
        Self { without_nexthops: true, ..self }
    }

    pub(crate) fn namespace(&self) -> &Namespace {
        &self.place.namespace
    }

    /// Locks the request socket. The lock stays usable after a panic of a thread that held it: the
    /// answers that the thread did not read have old sequence numbers, and are skipped.
    pub(crate) fn lock(&self) -> MutexGuard<'_, Socket> {
        lock(&self.socket)
    }
}

impl fmt::Debug for NetlinkKernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NetlinkKernel")
            .field("namespace", &self.place.namespace)
            .field("port", &self.port)
            .finish()
    }
}

impl Kernel for NetlinkKernel {
    fn snapshot(&self, footprint: &Footprint) -> Result<ObjectSet, KernelError> {
        snapshot(&mut self.lock(), &self.place, footprint)
    }

    fn nexthop_ids(&self, footprint: &Footprint) -> Result<NexthopIds, KernelError> {
        let ids = nexthop_ids(&mut self.lock(), footprint)?;
        Ok(NexthopIds { usable: ids.usable && !self.without_nexthops, ..ids })
    }

    fn nexthop_users(&self, there: &ObjectSet) -> Result<BTreeMap<u32, String>, KernelError> {
        nexthop_users(&mut self.lock(), there)
    }

    fn apply(&self, footprint: &Footprint, changes: &[Change]) -> Vec<Outcome> {
        let mut socket = self.lock();
        Writer::new(&mut socket, &self.place, footprint, changes).apply()
    }

    fn may_change(&self, links: &[Link]) -> Result<(), KernelError> {
        apply::link::may_change(&mut self.lock(), links)
    }

    fn lookup(&self, dst: IpAddr) -> Result<RouteAnswer, KernelError> {
        lookup(&mut self.lock(), dst)
    }

    fn changes(&self) -> Result<Box<dyn Changes>, KernelError> {
        let Place { namespace, foreign, wireguard } = &self.place;
        let changes = namespace.run(|| {
            NetlinkChanges::open(
                Arc::clone(namespace),
                self.port,
                foreign.clone(),
                wireguard.clone(),
            )
        })??;
        Ok(Box::new(changes))
    }
}

impl GoRouteKernel for NetlinkKernel {
    fn go_routes(&self, which: &GoRoutes) -> Result<Vec<Route>, KernelError> {
        go_routes::go_routes(&mut self.lock(), which)
    }

    fn delete_go_routes(&self, routes: &[Route]) -> Vec<Outcome> {
        go_routes::delete_go_routes(&mut self.lock(), routes)
    }
}

/// Names the processes that have sockets in the network namespace of this kernel handle.
impl ProcessNames for NetlinkKernel {
    fn name(&self, port: u32) -> Option<Process> {
        lock(&self.processes).name(port)
    }
}
