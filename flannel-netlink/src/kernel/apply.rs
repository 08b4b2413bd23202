//! Applies changes: turns them into netlink requests, and sends the requests in batches.
//!
//! A change consists of one or more requests, its steps. The steps for each kind of object have a
//! module below this one. Requests wait in a batch until it has [`BATCH`] of them. Two sorts of
//! changes send the batch earlier: changes of links, and changes for which the kernel must be read
//! after the changes before them.

mod addr;
pub(super) mod link;
mod neigh;
mod nexthop;
mod peer;
mod route;

use std::collections::{BTreeMap, HashMap, btree_map};

use flannel_core::kernel::{Footprint, KernelError, Outcome};
use flannel_core::object::{Change, LinkName, Object};
use libc::{EEXIST, EINVAL, EOPNOTSUPP};

use self::peer::PeerBatch;
use crate::codec::addr::AddrMessage;
use crate::codec::nexthop::NexthopMessage;
use crate::kernel::Place;
use crate::kernel::foreign_routes::ForeignRoutes;
use crate::kernel::query::get_link;
use crate::kernel::wireguard::WireguardDevices;
use crate::transport::namespace::Namespace;
use crate::transport::socket::Socket;
use crate::transport::wire::Messages;

/// The number of requests at which a batch is sent. One `send` of this size takes less than a
/// millisecond. Larger batches are not faster.
const BATCH: usize = 128;

/// The steps that change objects of one kind. `n` is the number of the change, from 0, in the call
/// of [`Kernel::apply`](flannel_core::Kernel::apply). `index` is the index of the object's link; 0
/// if the object has none.
trait Steps {
    /// Puts the object, or adds the requests for it to the batch.
    fn put(&self, writer: &mut Writer<'_>, n: usize, index: u32) -> Result<(), KernelError>;

    /// Deletes the object, or adds the requests for it to the batch.
    fn delete(&self, writer: &mut Writer<'_>, n: usize, index: u32) -> Result<(), KernelError>;
}

fn steps(object: &Object) -> Result<&dyn Steps, KernelError> {
    match object {
        Object::Link(link) => Ok(link),
        Object::Addr(addr) => Ok(addr),
        Object::Neigh(neigh) => Ok(neigh),
        Object::Fdb(fdb) => Ok(fdb),
        Object::Peer(peer) => Ok(peer),
        Object::Nexthop(nexthop) => Ok(nexthop),
        Object::Route(route) => Ok(route),
        unknown => Err(unsupported(unknown)),
    }
}

/// One call of [`Kernel::apply`](flannel_core::Kernel::apply).
pub(crate) struct Writer<'a> {
    socket: &'a mut Socket,
    namespace: &'a Namespace,
    footprint: &'a Footprint,
    foreign: &'a ForeignRoutes,
    wireguard: &'a WireguardDevices,
    changes: &'a [Change],
    /// The outcome of each of `changes`.
    outcomes: Vec<Outcome>,
    batch: Batch,
    peers: PeerBatch,
    known: Known,
    /// Requests for routes that use nexthop objects get an empty metrics attribute. The reason is
    /// at `RouteMessage::has_metrics_by_nexthop`.
    send_metrics: bool,
}

/// Requests that wait to be sent.
#[derive(Default)]
struct Batch {
    requests: Messages,
    /// For each request, the number of its change, and whether the request is a deletion. A put
    /// may need a deletion as one of its steps.
    origins: Vec<(usize, bool)>,
}

impl Batch {
    /// The buffer for a request of change `n` that puts an object.
    fn put(&mut self, n: usize) -> &mut Messages {
        self.origins.push((n, false));
        &mut self.requests
    }

    /// The buffer for a request of change `n` that deletes an object.
    fn delete(&mut self, n: usize) -> &mut Messages {
        self.origins.push((n, true));
        &mut self.requests
    }
}

/// Kernel state that was read during this call.
#[derive(Default)]
struct Known {
    /// The index of a link, or the error of the query.
    indexes: BTreeMap<LinkName, Result<u32, KernelError>>,
    /// The addresses on a link, by its index. Puts and deletions of addresses update them.
    addrs: HashMap<u32, Vec<AddrMessage>>,
    /// Nexthop objects that were read ahead for the deletions that follow, by id.
    nexthops: HashMap<u32, Result<NexthopMessage, KernelError>>,
}

impl<'a> Writer<'a> {
    pub(crate) fn new(
        socket: &'a mut Socket,
        place: &'a Place,
        footprint: &'a Footprint,
        changes: &'a [Change],
    ) -> Self {
        let Place { namespace, foreign, wireguard } = place;
        Self {
            socket,
            namespace,
            footprint,
            foreign,
            wireguard,
            changes,
            outcomes: vec![Outcome::Done; changes.len()],
            batch: Batch::default(),
            peers: PeerBatch::default(),
            known: Known::default(),
            send_metrics: foreign.has_metrics(),
        }
    }

    pub(crate) fn apply(mut self) -> Vec<Outcome> {
        for (n, change) in self.changes.iter().enumerate() {
            if let Err(error) = self.change(n, change) {
                self.outcomes[n] = Outcome::Failed(error);
            }
            if self.batch.requests.len() >= BATCH {
                self.flush();
            }
        }
        self.flush();
        self.outcomes
    }

    fn change(&mut self, n: usize, change: &Change) -> Result<(), KernelError> {
        let steps = steps(change.object())?;
        match change {
            Change::Put(object) => {
                let index = self.index_of(object)?;
                steps.put(self, n, index)
            }
            Change::Delete(object) => {
                accept_absence(self.index_of(object).and_then(|index| steps.delete(self, n, index)))
            }
        }
    }

    /// Sends the batch and records the outcomes. Then tries again to put routes and nexthop objects
    /// that the kernel refused because of existing ones.
    fn flush(&mut self) {
        self.flush_peers();
        let results = self.socket.send(&mut self.batch.requests);
        self.batch.requests.clear();
        let sent = std::mem::take(&mut self.batch.origins);
        let mut conflicts = Vec::new();
        let mut hidden = Vec::new();
        for ((n, deletes), result) in sent.iter().copied().zip(results) {
            let result = match (result, &self.changes[n]) {
                (result, _) if deletes => accept_absence(result),
                (Err(error), Change::Put(Object::Route(route))) => {
                    self.put_refused_route(n, route, error, &sent, &mut hidden)
                }
                (Err(error), Change::Put(Object::Nexthop(nexthop))) => {
                    conflicts.extend(nexthop::is_conflict(&error).then_some((n, *nexthop)));
                    Err(error)
                }
                (result, _) => result,
            };
            if let Err(error) = result {
                self.outcomes[n] = Outcome::Failed(error);
            }
        }
        if !conflicts.is_empty() {
            self.reclaim_ids(&sent, &conflicts);
        }
        self.remove_hidden(&hidden);
    }

    /// The index of the object's link; 0 if it has none.
    fn index_of(&mut self, object: &Object) -> Result<u32, KernelError> {
        object.link().map_or(Ok(0), |name| self.index(name))
    }

    /// The index of a link; `ENODEV` if there is none. The kernel is asked once per call.
    fn index(&mut self, name: LinkName) -> Result<u32, KernelError> {
        match self.known.indexes.entry(name) {
            btree_map::Entry::Occupied(known) => known.get().clone(),
            btree_map::Entry::Vacant(unknown) => {
                let found = get_link(self.socket, name).map(|link| link.index);
                unknown.insert(found).clone()
            }
        }
    }
}

/// The result of a deletion. The absence of the object is a success.
pub(super) fn accept_absence(result: Result<(), KernelError>) -> Result<(), KernelError> {
    match result {
        Err(error) if error.is_absent() || lacks_nexthop(&error) => Ok(()),
        result => result,
    }
}

/// Whether the kernel refused to delete a route because the nexthop object of the route does not
/// exist. The kernel deletes the routes that use a nexthop object together with it.
fn lacks_nexthop(error: &KernelError) -> bool {
    let text = error.detail().unwrap_or_default();
    error.is(EINVAL) && text.contains("Nexthop id does not exist")
}

fn unsupported(object: &Object) -> KernelError {
    KernelError::explained(EOPNOTSUPP, format!("this version cannot handle {object}"))
}
