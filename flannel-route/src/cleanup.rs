//! Cleanup removes the objects of a network from the kernel, or only the objects that Go flannel
//! cannot handle.
//!
//! The network config determines the objects ([`Backend::footprint`](flannel_core::Backend)). So
//! cleanup needs no lease.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::engine::BATCH;
use crate::outcomes;
use flannel_core::address::Dual;
use flannel_core::kernel::{
    Footprint, GoRouteKernel, GoRoutes, KernelError, NexthopBlock, Outcome,
};
use flannel_core::object::{Change, Key, Nexthop, Object, ObjectSet, Route, Via};
use flannel_core::{Kernel, Subnet};
use libc::{EBUSY, EINVAL};

/// The pause between batches, so that other threads can use the kernel handle.
const PAUSE: Duration = Duration::from_micros(200);

/// The changes that a cleanup has made or, with `dry_run`, would make.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Cleanup {
    /// The changes that were made, in order.
    pub done: Vec<Change>,
    /// The changes that the kernel refused or that were not tried. Two errors mean that a change
    /// was not tried: `EBUSY`, because the kernel would delete a foreign route or group too, and
    /// `EINVAL`, because a route uses a foreign nexthop object.
    pub failed: Vec<(Change, KernelError)>,
}

/// Removes all objects that `footprint` owns. No network may run meanwhile: it would restore them.
///
/// For a backend with a record keeper, `kernel` must be
/// [waiting](crate::record_keepers::WithRecordKeepers::waiting): `WithRecordKeepers::new(kernel,
/// keeper).waiting()`. Otherwise the records stay.
///
/// A nexthop object on the external interface stays if another program uses it
/// ([`Kernel::nexthop_users`]). The kernel deletes a device together with all objects on it.
///
/// ```
/// use flannel_core::testing::FakeKernel;
/// use flannel_core::kernel::{Footprint, ROUTE_PROTOCOL};
/// use flannel_core::object::{Route, Via};
/// use flannel_route::cleanup;
///
/// # fn main() -> Result<(), flannel_core::kernel::KernelError> {
/// let kernel = FakeKernel::with_uplink("eth0");
/// let link = "eth0".parse().unwrap();
/// let via = Via::Gateway { gateway: [192, 0, 2, 7].into(), link, onlink: false };
/// let dst = "10.1.7.0/24".parse().unwrap();
/// kernel.foreign_put(Route { dst, via, mtu: None }, ROUTE_PROTOCOL);
/// let networks = vec!["10.1.0.0/16".parse().unwrap()];
/// let footprint = Footprint { networks, routes_on: [link].into(), ..Footprint::default() };
/// let removed = cleanup(&kernel, &footprint, false)?;
/// assert_eq!(removed.done[0].to_string(), "delete route 10.1.7.0/24 via 192.0.2.7 dev eth0");
/// assert!(kernel.dump().is_empty());
/// # Ok(()) }
/// ```
///
/// # Errors
/// The kernel could not be read; nothing was changed.
///
/// # Blocking
/// Blocks as [`Kernel`] does: from 10 µs to 1 ms per object. Deletions of nexthop objects, and of
/// thousands of IPv4 routes without nexthop objects, take longest.
pub fn cleanup(
    kernel: &dyn Kernel,
    footprint: &Footprint,
    dry_run: bool,
) -> Result<Cleanup, KernelError> {
    remove(kernel, footprint, |_| true, dry_run)
}

/// Removes the objects that a network left inside its former pod network: routes of our protocol,
/// and the nexthop objects that it chose for that network. Keeps the objects inside the network of
/// `footprint`, even if `former` covers it.
///
/// No other network may use `former`. Call it at the first start with another pod network, once the
/// new network is [`settled`](flannel_core::status::Status::settled). Objects on the network's own
/// devices are not included, because the network itself removes them.
///
/// # Errors
/// The kernel could not be read; nothing was changed.
///
/// # Blocking
/// As [`Kernel`].
pub fn remove_former(
    kernel: &dyn Kernel,
    footprint: &Footprint,
    former: Subnet,
    dry_run: bool,
) -> Result<Cleanup, KernelError> {
    let then = Footprint {
        networks: vec![former],
        routes_on: footprint.routes_on.clone(),
        blackholes: true,
        ..Footprint::default()
    };
    let block = NexthopBlock::choose(kernel, footprint)?.0;
    let is_former = |object: &Object| match object {
        Object::Route(route) => {
            !footprint.networks.iter().any(|network| network.covers(&route.dst))
        }
        Object::Nexthop(nexthop) => {
            !block.is_some_and(|block| block.contains(nexthop.id))
                && !footprint.links.contains(&nexthop.link)
        }
        _ => false,
    };
    remove(kernel, &then, is_former, dry_run)
}

/// Removes the objects of `footprint` for which `meant` returns true.
fn remove(
    kernel: &dyn Kernel,
    footprint: &Footprint,
    meant: impl Fn(&Object) -> bool,
    dry_run: bool,
) -> Result<Cleanup, KernelError> {
    let Present { footprint, objects } = read(kernel, footprint)?;
    let users = kernel.nexthop_users(&objects)?;
    let mut report = Cleanup::default();
    let mut changes = Vec::new();
    for object in objects.iter().rev().filter(|object| meant(object)) {
        match object {
            Object::Nexthop(nexthop) if !footprint.links.contains(&nexthop.link) => {
                changes.extend(report.unless_used(*nexthop, &users));
            }
            object => changes.push(Change::Delete(object.clone())),
        }
    }
    report.carry_out(kernel, &footprint, changes, dry_run);
    Ok(report)
}

/// Makes the host ready for Go flannel, which does not know nexthop objects and cannot delete the
/// routes that use them. Replaces each such route in place by a route with a gateway, then removes
/// the nexthop objects. No packet is lost. Removes routes without a next hop too
/// ([`Via::LastResort`], [`Via::Blackhole`]): Go flannel makes its own routes of this kind, and
/// would not remove ours. No network may run meanwhile: it would undo these changes.
///
/// A nexthop object stays if its route could not be replaced, or if another program uses it
/// ([`Kernel::nexthop_users`]): the kernel would delete the route with it.
///
/// # Errors
/// The kernel could not be read; nothing was changed.
///
/// # Blocking
/// As [`Kernel`]. Plain IPv4 routes take quadratic time: 1 s for 10,000, 40 s for 50,000.
pub fn ready_for_go(
    kernel: &dyn Kernel,
    footprint: &Footprint,
    dry_run: bool,
) -> Result<Cleanup, KernelError> {
    let Present { footprint, objects } = read(kernel, footprint)?;
    let users = kernel.nexthop_users(&objects)?;
    let mut report = Cleanup::default();
    let mut changes = Vec::new();
    for object in objects.iter() {
        let Object::Route(route) = object else { continue };
        match route.via {
            Via::Nexthop(id) => match objects.get(&Key::Nexthop(id)) {
                Some(Object::Nexthop(Nexthop { link, gateway, onlink, .. })) => {
                    let via = Via::Gateway { gateway: *gateway, link: *link, onlink: *onlink };
                    changes.push(Change::Put(Route { via, ..*route }.into()));
                }
                _ => {
                    let detail = format!(
                        "nexthop id {id} is a group or belongs to another program: replace the \
                         route by one without a nexthop object"
                    );
                    let error = KernelError::explained(EINVAL, detail);
                    report.failed.push((Change::Put(object.clone()), error));
                }
            },
            Via::LastResort | Via::Blackhole => changes.push(Change::Delete(object.clone())),
            _ => {}
        }
    }
    report.carry_out(kernel, &footprint, changes, dry_run);
    // A route that was not replaced still needs its nexthop object.
    let mut needed = BTreeSet::new();
    for (change, _) in &report.failed {
        if let Some(Object::Route(route)) = objects.get(&change.object().key())
            && let Via::Nexthop(id) = route.via
        {
            needed.insert(id);
        }
    }
    let mut changes = Vec::new();
    for object in objects.iter() {
        if let Object::Nexthop(nexthop) = object
            && !needed.contains(&nexthop.id)
        {
            changes.extend(report.unless_used(*nexthop, &users));
        }
    }
    report.carry_out(kernel, &footprint, changes, dry_run);
    Ok(report)
}

/// Removes the routes that Go flannel left on the external interface with host-gw, or with vxlan
/// and `DirectRouting`. They have the protocol of routes that scripts add
/// ([`GO_ROUTE_PROTOCOL`](flannel_core::kernel::GO_ROUTE_PROTOCOL)). So a route is removed only if
/// it also has a gateway, the default metric, and a destination inside the pod networks. The prefix
/// length of the destination must be the length in `lens` for its family, which is the `SubnetLen`
/// of the config.
///
/// Call it at the first start after Go flannel, once the network is
/// [`settled`](flannel_core::status::Status::settled). By then it has replaced the routes to its
/// peers, except for the routes that the kernel refused. `keeps` returns true for a destination
/// whose route must stay.
///
/// # Errors
/// The kernel could not be read; nothing was changed.
///
/// # Blocking
/// As [`Kernel`].
pub fn remove_go_routes(
    kernel: &dyn GoRouteKernel,
    footprint: &Footprint,
    lens: Dual<u8>,
    keeps: impl Fn(&Subnet) -> bool,
    dry_run: bool,
) -> Result<Cleanup, KernelError> {
    let links = footprint.routes_on.clone();
    let networks = footprint.networks.clone();
    let mut routes = kernel.go_routes(&GoRoutes { links, networks, lens })?;
    routes.retain(|route| !keeps(&route.dst));
    let mut report = Cleanup::default();
    let deletion = |route: &Route| Change::Delete((*route).into());
    if dry_run {
        report.done.extend(routes.iter().map(deletion));
        return Ok(report);
    }
    for (n, batch) in routes.chunks(BATCH).enumerate() {
        pause_before(n);
        let outcomes = kernel.delete_go_routes(batch);
        let outcomes = outcomes::one_for_each(batch.len(), outcomes, "the kernel");
        report.note(batch.iter().map(deletion), outcomes);
    }
    Ok(report)
}

/// What the kernel has of a footprint.
struct Present {
    /// The footprint with the ids of its nexthop objects.
    footprint: Footprint,
    objects: ObjectSet,
}

/// Reads the objects of `footprint`.
fn read(kernel: &dyn Kernel, footprint: &Footprint) -> Result<Present, KernelError> {
    let mut footprint = footprint.clone();
    footprint.nexthops = NexthopBlock::choose(kernel, &footprint)?.0;
    let objects = kernel.snapshot(&footprint)?;
    Ok(Present { footprint, objects })
}

impl Cleanup {
    /// The deletion of a nexthop object. If another program uses the nexthop object, adds the
    /// deletion to the failed changes and returns `None`.
    fn unless_used(&mut self, nexthop: Nexthop, users: &BTreeMap<u32, String>) -> Option<Change> {
        let change = Change::Delete(nexthop.into());
        let Some(user) = users.get(&nexthop.id) else { return Some(change) };
        let detail = format!(
            "{user} belongs to another program, and the kernel would delete it together with this \
             nexthop object: delete it first, then run the cleanup again"
        );
        self.failed.push((change, KernelError::explained(EBUSY, detail)));
        None
    }

    /// Makes the changes or, with `dry_run`, only lists them.
    fn carry_out(
        &mut self,
        kernel: &dyn Kernel,
        footprint: &Footprint,
        changes: Vec<Change>,
        dry_run: bool,
    ) {
        if dry_run {
            return self.done.extend(changes);
        }
        for (n, batch) in changes.chunks(BATCH).enumerate() {
            pause_before(n);
            let outcomes = outcomes::apply(kernel, footprint, batch);
            self.note(batch.iter().cloned(), outcomes);
        }
    }

    /// Notes changes with their outcomes.
    fn note(&mut self, changes: impl Iterator<Item = Change>, outcomes: Vec<Outcome>) {
        for (change, outcome) in changes.zip(outcomes) {
            match outcome.into_result() {
                Ok(()) => self.done.push(change),
                Err(error) => self.failed.push((change, error)),
            }
        }
    }
}

/// Pauses before each batch except the first one, which has the number 0.
#[allow(
    clippy::disallowed_methods,
    reason = "the lock of the kernel is unfair: there is no condition to wait for"
)]
fn pause_before(batch: usize) {
    if batch > 0 {
        std::thread::sleep(PAUSE);
    }
}
