//! Carries out changes: names become indexes, changes become requests, requests go in batches.
//!
//! Links, and objects that must be read before they are changed, are sent one at a time, after all
//! changes before them; all others go 128 to a `send`. The steps for each kind of object have a
//! module below this one.

mod addr;
mod link;
mod neigh;
mod nexthop;
mod route;

use std::collections::{BTreeMap, HashMap, btree_map};

use flannel_core::kernel::{Footprint, KernelError};
use flannel_core::object::{Change, LinkName, Object};

use crate::ask::find_link;
use crate::codec::addr::AddrMessage;
use crate::codec::nexthop::NexthopMessage;
use crate::foreign_routes::ForeignRoutes;
use crate::namespace::Namespace;
use crate::socket::Socket;
use crate::wire::Messages;

/// More gains nothing, and one `send` stays below a millisecond.
const BATCH: usize = 128;

const EEXIST: i32 = 17;
const EINVAL: i32 = 22;
const EOPNOTSUPP: i32 = 95;

/// The steps that change objects of one kind. `n` is the number of the change; `index` is that of
/// the object's link, 0 if it has none.
trait Steps {
    /// Puts the object, or adds the requests for that to the batch.
    fn put(&self, writer: &mut Writer<'_>, n: usize, index: u32) -> Result<(), KernelError>;

    /// Deletes the object, or adds the requests for that to the batch.
    fn delete(&self, writer: &mut Writer<'_>, n: usize, index: u32) -> Result<(), KernelError>;
}

fn steps(object: &Object) -> Result<&dyn Steps, KernelError> {
    match object {
        Object::Link(link) => Ok(link),
        Object::Addr(addr) => Ok(addr),
        Object::Neigh(neigh) => Ok(neigh),
        Object::Fdb(fdb) => Ok(fdb),
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
    changes: &'a [Change],
    results: Vec<Result<(), KernelError>>,
    batch: Batch,
    known: Known,
    /// Requests for routes have the metrics attribute.
    metrics: bool,
}

/// Requests that were not sent yet.
#[derive(Default)]
struct Batch {
    requests: Messages,
    /// For each request, the number of its change, and whether it deletes.
    origins: Vec<(usize, bool)>,
}

impl Batch {
    /// Where to write a request of change `n` that puts something.
    fn put(&mut self, n: usize) -> &mut Messages {
        self.origins.push((n, false));
        &mut self.requests
    }

    /// Where to write a request of change `n` that deletes something.
    fn delete(&mut self, n: usize) -> &mut Messages {
        self.origins.push((n, true));
        &mut self.requests
    }
}

/// What was read of the kernel during this call.
#[derive(Default)]
struct Known {
    indexes: BTreeMap<LinkName, Result<u32, KernelError>>,
    /// The addresses on a link.
    addrs: HashMap<u32, Vec<AddrMessage>>,
    /// The nexthop objects with ids that are to be deleted next.
    nexthops: HashMap<u32, Result<NexthopMessage, KernelError>>,
}

impl<'a> Writer<'a> {
    pub(crate) fn new(
        socket: &'a mut Socket,
        namespace: &'a Namespace,
        footprint: &'a Footprint,
        foreign: &'a ForeignRoutes,
        changes: &'a [Change],
    ) -> Self {
        Self {
            socket,
            namespace,
            footprint,
            foreign,
            changes,
            results: vec![Ok(()); changes.len()],
            batch: Batch::default(),
            known: Known::default(),
            metrics: foreign.has_metrics(),
        }
    }

    pub(crate) fn apply(mut self) -> Vec<Result<(), KernelError>> {
        for (n, change) in self.changes.iter().enumerate() {
            let result = self.change(n, change);
            if result.is_err() {
                self.results[n] = result;
            }
            if self.batch.requests.len() >= BATCH {
                self.flush();
            }
        }
        self.flush();
        self.results
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

    /// Sends the batch.
    fn flush(&mut self) {
        let results = self.socket.send(&mut self.batch.requests);
        self.batch.requests.clear();
        let sent = std::mem::take(&mut self.batch.origins);
        let (mut conflicts, mut hidden) = (Vec::new(), Vec::new());
        for ((n, deletes), result) in sent.iter().copied().zip(results) {
            let result = match (result, &self.changes[n]) {
                (result, _) if deletes => accept_absence(result),
                (Err(error), Change::Put(Object::Route(route))) => {
                    self.put_refused_route(n, route, error, &sent, &mut hidden)
                }
                (Err(error), Change::Put(Object::Nexthop(_))) => {
                    conflicts.extend(nexthop::is_conflict(&error).then_some(n));
                    Err(error)
                }
                (result, _) => result,
            };
            if result.is_err() {
                self.results[n] = result;
            }
        }
        if !conflicts.is_empty() {
            self.reclaim_ids(&sent, &conflicts);
        }
        self.remove_hidden(&hidden);
    }

    /// The index of the link that an object is on; 0 if it needs none.
    fn index_of(&mut self, object: &Object) -> Result<u32, KernelError> {
        object.link().map_or(Ok(0), |name| self.index(name))
    }

    fn index(&mut self, name: LinkName) -> Result<u32, KernelError> {
        match self.known.indexes.entry(name) {
            btree_map::Entry::Occupied(known) => known.get().clone(),
            btree_map::Entry::Vacant(unknown) => {
                let found = find_link(self.socket, name).map(|link| link.index);
                unknown.insert(found).clone()
            }
        }
    }
}

/// An object that is to be deleted may be absent already.
fn accept_absence(result: Result<(), KernelError>) -> Result<(), KernelError> {
    match result {
        Err(error) if error.is_absent() => Ok(()),
        // Without its nexthop object a route by it is gone as well, but the kernel calls it a
        // mistake to ask.
        Err(KernelError { errno: EINVAL, detail: Some(text) })
            if text.contains("Nexthop id does not exist") =>
        {
            Ok(())
        }
        result => result,
    }
}

fn unsupported(object: &Object) -> KernelError {
    KernelError::explained(EOPNOTSUPP, format!("this version cannot handle {object}"))
}
