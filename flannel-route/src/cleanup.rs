//! Cleanup: removes the objects of a network from the kernel, all or only those that Go flannel
//! cannot handle.
//!
//! No lease is needed. The objects follow from the network config and the backend
//! ([`Backend::footprint`](flannel_core::Backend::footprint)), so a host without a lease can be
//! cleaned too. No network may run meanwhile: it would restore them.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::engine::BATCH;
use flannel_core::Kernel;
use flannel_core::Subnet;
use flannel_core::address::Dual;
use flannel_core::kernel::NexthopBlock;
use flannel_core::kernel::{Footprint, KernelError};
use flannel_core::object::{Change, Key, Nexthop, Object, Route, State, Via};

/// The pause after a batch, in which other users of the kernel handle get their turn.
const TURN: Duration = Duration::from_micros(200);
const EBUSY: i32 = 16;
const EINVAL: i32 = 22;

/// The changes of a cleanup. With `dry_run`, the changes that it would make.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Cleanup {
    /// Changes that were made, in order.
    pub done: Vec<Change>,
    /// Changes that the kernel refused, and changes that were not tried (with `EBUSY`): the kernel
    /// would delete a foreign route or group with a nexthop object.
    pub failed: Vec<(Change, KernelError)>,
}

/// Removes everything that `footprint` claims: routes, nexthop objects, forwarding entries,
/// neighbours, addresses, devices.
///
/// Goes on after a failure. With `dry_run` nothing is changed, and `done` holds the changes that
/// would be made.
///
/// A nexthop object on the external interface stays if something else uses it
/// ([`Kernel::nexthop_users`]). On a device that is removed, all objects go with the device.
///
/// ```
/// use flannel_core::testing::FakeKernel;
/// use flannel_core::kernel::{Footprint, ROUTE_PROTOCOL};
/// use flannel_core::object::{Route, Via};
/// use flannel_route::cleanup;
///
/// # fn main() -> Result<(), flannel_core::kernel::KernelError> {
/// let kernel = FakeKernel::with_uplink("eth0");
/// let via = Via::Gateway { gateway: [192, 0, 2, 7].into(), link: "eth0".parse().unwrap(), onlink: false };
/// kernel.foreign_put(Route { dst: "10.1.7.0/24".parse().unwrap(), via, mtu: None }, ROUTE_PROTOCOL);
/// let footprint = Footprint {
///     networks: vec!["10.1.0.0/16".parse().unwrap()],
///     routes_on: ["eth0".parse().unwrap()].into(),
///     ..Footprint::default()
/// };
/// let would = cleanup(&kernel, &footprint, true)?;
/// assert_eq!(would.done[0].to_string(), "delete route 10.1.7.0/24 via 192.0.2.7 dev eth0");
/// assert_eq!(kernel.dump().len(), 1);
/// assert_eq!(cleanup(&kernel, &footprint, false)?, would);
/// assert!(kernel.dump().is_empty());
/// # Ok(()) }
/// ```
///
/// # Errors
/// The kernel could not be read; nothing was changed.
///
/// # Blocking
/// As [`Kernel`]: some ten microseconds an object.
pub fn cleanup(
    kernel: &dyn Kernel,
    footprint: &Footprint,
    dry_run: bool,
) -> Result<Cleanup, KernelError> {
    remove(kernel, footprint, |_| true, dry_run)
}

/// Removes the objects that a network left inside its former pod network `former`: routes of our
/// protocol, and the nexthop objects that it chose for that network. Objects inside the network of
/// `footprint` stay, even if `former` covers it.
///
/// No other network may have `former` now: its routes look the same. For the first start with
/// another pod network, **while the network runs and is settled**. On devices of its own it removes
/// what nobody wants anyway; this is for what it left on the external interface. A nexthop object
/// stays if something else uses it, as in [`cleanup`]. With `dry_run` nothing is changed, and
/// `done` is what would be.
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

/// Removes those of the objects that `footprint` claims which are `meant`.
fn remove(
    kernel: &dyn Kernel,
    footprint: &Footprint,
    meant: impl Fn(&Object) -> bool,
    dry_run: bool,
) -> Result<Cleanup, KernelError> {
    let (footprint, there) = read(kernel, footprint)?;
    let users = kernel.nexthop_users(&there)?;
    let mut report = Cleanup::default();
    let mut changes = Vec::new();
    for object in there.iter().rev().filter(|object| meant(object)) {
        match object {
            Object::Nexthop(nexthop) if !footprint.links.contains(&nexthop.link) => {
                report.unless_used(*nexthop, &users, &mut changes);
            }
            object => changes.push(Change::Delete(object.clone())),
        }
    }
    report.carry_out(kernel, &footprint, changes, dry_run);
    Ok(report)
}

/// Makes the host ready for Go flannel, which knows no nexthop objects and fails to delete routes
/// by them: each such route of ours becomes a plain one in place, then our nexthop objects are
/// removed. A route of last resort ([`Via::LastResort`]) goes, since Go flannel makes its own
/// elsewhere and would leave ours for ever. No packet is lost.
///
/// A nexthop object whose route could not be replaced stays, and so does one that something else
/// uses ([`Kernel::nexthop_users`]), because the kernel would delete the route with it. With
/// `dry_run` nothing is changed, and `done` is what would be.
///
/// # Errors
/// The kernel could not be read; nothing was changed.
///
/// # Blocking
/// As [`Kernel`]. Plain IPv4 routes take quadratic time: 10,000 about a second, 50,000 about 40
/// seconds.
pub fn ready_for_go(
    kernel: &dyn Kernel,
    footprint: &Footprint,
    dry_run: bool,
) -> Result<Cleanup, KernelError> {
    let (footprint, there) = read(kernel, footprint)?;
    let users = kernel.nexthop_users(&there)?;
    let mut report = Cleanup::default();
    let mut changes = Vec::new();
    for object in there.iter() {
        let Object::Route(route) = object else { continue };
        let Via::Nexthop(id) = route.via else {
            if route.via == Via::LastResort {
                changes.push(Change::Delete(object.clone()));
            }
            continue;
        };
        match there.get(&Key::Nexthop(id)) {
            Some(Object::Nexthop(Nexthop { link, gateway, onlink, .. })) => {
                let via = Via::Gateway { gateway: *gateway, link: *link, onlink: *onlink };
                changes.push(Change::Put(Route { via, ..*route }.into()));
            }
            _ => {
                let detail = format!(
                    "nexthop id {id} is no single gateway of ours: replace or delete the route"
                );
                report
                    .failed
                    .push((Change::Put(object.clone()), KernelError::explained(EINVAL, detail)));
            }
        }
    }
    report.carry_out(kernel, &footprint, changes, dry_run);
    let failed = report.failed.iter().filter_map(|(change, _)| there.get(&change.object().key()));
    let needed: BTreeSet<u32> = failed
        .filter_map(|object| match object {
            Object::Route(Route { via: Via::Nexthop(id), .. }) => Some(*id),
            _ => None,
        })
        .collect();
    let mut changes = Vec::new();
    for object in there.iter() {
        if let Object::Nexthop(nexthop) = object
            && !needed.contains(&nexthop.id)
        {
            report.unless_used(*nexthop, &users, &mut changes);
        }
    }
    report.carry_out(kernel, &footprint, changes, dry_run);
    Ok(report)
}

/// Removes the routes that Go flannel left on the external interface (host-gw's, or vxlan's with
/// `DirectRouting`): it marks them as every script does, so they are recognized by their
/// attributes. `footprint` is the network's, `lens` the `SubnetLen` of each family; the route must
/// have Go's protocol, a gateway, the default metric and a destination of exactly that length
/// inside the pod networks.
///
/// For the first start where Go flannel ran before, and **while the network runs and is settled**:
/// whatever Go left on a wanted destination has been replaced by then, so what is still there is
/// nobody's, but where the kernel refused the network's own route: such a destination `keeps` what
/// it has. With `dry_run` nothing is changed, and `done` is what would be.
///
/// ```
/// use flannel_core::testing::FakeKernel;
/// use flannel_core::address::Dual;
/// use flannel_core::kernel::{GO_ROUTE_PROTOCOL, Footprint};
/// use flannel_core::object::{Route, Via};
/// use flannel_route::remove_go_routes;
///
/// # fn main() -> Result<(), flannel_core::kernel::KernelError> {
/// let kernel = FakeKernel::with_uplink("eth0");
/// let via = Via::Gateway { gateway: [192, 0, 2, 7].into(), link: "eth0".parse().unwrap(), onlink: false };
/// for dst in ["10.1.7.0/24", "10.1.9.0/24", "10.1.8.0/25", "10.2.7.0/24"] {
///     kernel.foreign_put(Route { dst: dst.parse().unwrap(), via, mtu: None }, GO_ROUTE_PROTOCOL);
/// }
/// let footprint = Footprint {
///     networks: vec!["10.1.0.0/16".parse().unwrap()],
///     routes_on: ["eth0".parse().unwrap()].into(),
///     ..Footprint::default()
/// };
/// let refused = "10.1.9.0/24".parse().unwrap();
/// let removed = remove_go_routes(&kernel, &footprint, Dual { v4: Some(24), v6: None }, |dst| *dst == refused, false)?;
/// assert_eq!(removed.done.len(), 1);
/// assert_eq!(removed.done[0].to_string(), "delete route 10.1.7.0/24 via 192.0.2.7 dev eth0");
/// assert_eq!(kernel.dump().len(), 3, "one leads where ours could not be put, the others are none that it would have made");
/// # Ok(()) }
/// ```
///
/// # Errors
/// The kernel could not be read; nothing was changed.
///
/// # Blocking
/// As [`Kernel`].
pub fn remove_go_routes(
    kernel: &dyn Kernel,
    footprint: &Footprint,
    lens: Dual<u8>,
    keeps: impl Fn(&Subnet) -> bool,
    dry_run: bool,
) -> Result<Cleanup, KernelError> {
    let (networks, routes_on) = (footprint.networks.clone(), footprint.routes_on.clone());
    let footprint =
        Footprint { networks, routes_on, go_routes: Some(lens), ..Footprint::default() };
    let there = kernel.snapshot(&footprint)?;
    let mut report = Cleanup::default();
    let kept = |object: &&Object| matches!(object, Object::Route(route) if keeps(&route.dst));
    let changes = there.iter().filter(|object| !kept(object)).cloned().map(Change::Delete);
    report.carry_out(kernel, &footprint, changes.collect(), dry_run);
    Ok(report)
}

/// What is there, and `footprint` with the ids that belong to it.
fn read(kernel: &dyn Kernel, footprint: &Footprint) -> Result<(Footprint, State), KernelError> {
    let mut footprint = footprint.clone();
    footprint.nexthops = NexthopBlock::choose(kernel, &footprint)?.0;
    let there = kernel.snapshot(&footprint)?;
    Ok((footprint, there))
}

impl Cleanup {
    /// A nexthop object is to be deleted, or stays and says why.
    fn unless_used(
        &mut self,
        nexthop: Nexthop,
        users: &BTreeMap<u32, String>,
        changes: &mut Vec<Change>,
    ) {
        let change = Change::Delete(nexthop.into());
        match users.get(&nexthop.id) {
            Some(user) => {
                let detail = format!("{user} is not ours and would go with it: delete that first");
                self.failed.push((change, KernelError::explained(EBUSY, detail)));
            }
            None => changes.push(change),
        }
    }

    #[allow(
        clippy::disallowed_methods,
        reason = "what is unfair is the lock: there is no condition to wait for"
    )]
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
            if n > 0 {
                std::thread::sleep(TURN);
            }
            for (change, result) in batch.iter().cloned().zip(kernel.apply(footprint, batch)) {
                match result {
                    Ok(()) => self.done.push(change),
                    Err(error) => self.failed.push((change, error)),
                }
            }
        }
    }
}
