//! A kernel in memory that follows the rules of Linux. Tests can make its calls fail.

mod delivery;
mod rules;
mod tables;

use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard};

use async_trait::async_trait;
use libc::ENOBUFS;
use tokio::sync::mpsc;

use self::delivery::Delivery;
use self::tables::{Entry, Fault, Foreign, Listener, Tables};
use crate::address::Subnet;
use crate::kernel::{
    ChangedBy, Changes, Footprint, GoRouteKernel, GoRoutes, Invalidation, Kernel, KernelError,
    KernelEvent, NexthopIds, Outcome, Process, ProcessNames, ROUTE_PROTOCOL, RouteAnswer,
};
use crate::object::{Change, Key, Link, LinkName, Nexthop, Object, ObjectSet, Route, Via};
use crate::runtime::lock;

/// A kernel in memory. As in Linux, an object can only be put if the objects that it needs exist,
/// a deletion also deletes the objects that depend on the deleted object, and each change causes
/// the events of Linux. A test can make every call fail ([`FakeKernel::fail`]).
///
/// A clone is the same kernel, used by the same process. [`FakeKernel::other`] returns the same
/// kernel, used by another process: each of the two is notified of the changes of the other.
#[derive(Clone)]
pub struct FakeKernel {
    writer: u32,
    tables: Arc<Mutex<Tables>>,
}

/// A call of a method of the kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Call {
    /// The operation.
    pub operation: Operation,
    /// The key of the object or link. `None` for an operation without an object.
    pub key: Option<Key>,
}

/// The operation of a [`Call`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Operation {
    /// [`Kernel::nexthop_ids`] or [`Kernel::nexthop_users`].
    NexthopIds,
    /// [`Kernel::snapshot`].
    Snapshot,
    /// [`Change::Put`] of an object whose key does not exist.
    Create,
    /// [`Change::Put`] of an object whose key exists.
    Replace,
    /// [`Change::Delete`].
    Delete,
    /// [`Kernel::may_change`], for each link that may be put.
    MayChange,
    /// [`Kernel::lookup`].
    Lookup,
    /// [`Kernel::changes`].
    Listen,
}

impl fmt::Debug for FakeKernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FakeKernel").field("writer", &self.writer).finish_non_exhaustive()
    }
}

impl Default for FakeKernel {
    fn default() -> Self {
        Self { writer: 1, tables: Arc::new(Mutex::new(Tables { writers: 1, ..Tables::default() })) }
    }
}

impl FakeKernel {
    /// The port id in the events of [`FakeKernel::foreign_put`] and [`FakeKernel::foreign_delete`].
    pub const FOREIGN_PORT: u32 = 4711;

    /// A kernel with one foreign link: it is up, and the subnets `192.0.2.0/24` and `2001:db8::/64`
    /// are on it.
    ///
    /// # Panics
    /// `name` is not an interface name.
    pub fn with_uplink(name: &str) -> Self {
        let kernel = Self::default();
        let on_link = ["192.0.2.0/24", "2001:db8::/64"].map(|s| s.parse().expect("a subnet"));
        kernel.add_foreign_link(name, &on_link);
        kernel
    }

    /// Removes the support for nexthop objects, as before Linux 5.3. Call this before a nexthop
    /// object is put.
    pub fn without_nexthops(self) -> Self {
        self.lock().without_nexthops = true;
        self
    }

    /// Sets whether nexthop objects are [usable](NexthopIds::usable). They are usable at first.
    pub fn use_nexthops(&self, wanted: bool) {
        self.lock().unwanted_nexthops = !wanted;
    }

    /// Returns the same kernel, used by another process.
    pub fn other(&self) -> Self {
        let mut tables = self.lock();
        tables.writers += 1;
        Self { writer: tables.writers, tables: Arc::clone(&self.tables) }
    }

    /// Adds a foreign link that is up, with these subnets on it.
    ///
    /// # Panics
    /// `name` is not an interface name.
    pub fn add_foreign_link(&self, name: &str, on_link: &[Subnet]) {
        let name = name.parse().expect("an interface name");
        let mut tables = self.lock();
        tables.foreign.insert(name, Foreign { up: true, on_link: on_link.to_vec() });
        tables.publish(0, &Invalidation::Link(name));
        drop(tables);
        self.deliver(0);
    }

    /// Replaces the subnets on a foreign link, as a change of its addresses does. Does nothing if
    /// the link does not exist.
    ///
    /// # Panics
    /// `name` is not an interface name.
    pub fn set_on_link(&self, name: &str, on_link: &[Subnet]) {
        let mut tables = self.lock();
        let name = name.parse().expect("an interface name");
        let Some(foreign) = tables.foreign.get_mut(&name) else { return };
        let old = std::mem::replace(&mut foreign.on_link, on_link.to_vec());
        let routes = old
            .into_iter()
            .chain(on_link.iter().copied())
            .map(|s| KernelEvent::Unrepresentable(Key::Route(s)));
        let routes = routes.collect();
        tables.publish(0, &Invalidation::Objects(routes, None));
        drop(tables);
        self.deliver(0);
    }

    /// Sets a link up or down, as an administrator does. When a link goes down, the kernel deletes
    /// its IPv4 routes, nexthop objects and permanent neighbours. It sends only an event about the
    /// link.
    ///
    /// # Panics
    /// `name` is not an interface name.
    pub fn set_up(&self, name: &str, up: bool) {
        let mut tables = self.lock();
        let name: LinkName = name.parse().expect("an interface name");
        if let Some(foreign) = tables.foreign.get_mut(&name) {
            foreign.up = up;
        }
        if let Some(Entry { object: Object::Link(link), .. }) =
            tables.objects.get_mut(&Key::Link(name))
        {
            link.up = up;
        }
        if !up {
            tables.drop_by_down(name);
        }
        tables.publish(0, &Invalidation::Link(name));
        drop(tables);
        self.deliver(0);
    }

    /// Deletes a link with all objects on it. The link may be foreign.
    ///
    /// # Panics
    /// `name` is not an interface name.
    pub fn delete_link(&self, name: &str) {
        let mut tables = self.lock();
        let name = name.parse().expect("an interface name");
        tables.foreign.remove(&name);
        tables.drop_link(name);
        tables.publish(0, &Invalidation::Link(name));
        drop(tables);
        self.deliver(0);
    }

    /// Puts an object as another process does, with this route protocol. The put always succeeds.
    pub fn foreign_put(&self, object: impl Into<Object>, protocol: u8) {
        self.foreign_entry(Entry { object: object.into(), protocol, inexact: false });
    }

    /// Like [`FakeKernel::foreign_put`], for a route with attributes that [`Route`] does not
    /// express, such as a preferred source.
    pub fn foreign_put_inexact(&self, route: Route, protocol: u8) {
        self.foreign_entry(Entry { object: route.into(), protocol, inexact: true });
    }

    fn foreign_entry(&self, entry: Entry) {
        let object = entry.object.clone();
        let key = object.key();
        let invalidation = match object {
            Object::Link(link) => Invalidation::Link(link.name),
            _ => {
                let report = if entry.inexact {
                    KernelEvent::Inexact(object)
                } else {
                    KernelEvent::Present(object)
                };
                Invalidation::Objects(vec![report], foreigner(&key, Some(entry.protocol)))
            }
        };
        let mut tables = self.lock();
        tables.objects.insert(key, entry);
        tables.publish(0, &invalidation);
        drop(tables);
        self.deliver(0);
    }

    /// Deletes an object as another process does.
    pub fn foreign_delete(&self, key: Key) {
        let mut tables = self.lock();
        tables.objects.remove(&key);
        tables.drop_after(key);
        tables.publish(
            0,
            &Invalidation::Objects(vec![KernelEvent::Deleted(key)], foreigner(&key, None)),
        );
        if let Key::Addr(link, IpAddr::V4(_)) = key {
            tables.publish(0, &Invalidation::Link(link));
        }
        drop(tables);
        self.deliver(0);
    }

    /// Breaks every open stream of [`Kernel::changes`]. New streams work.
    pub fn break_listeners(&self) {
        let broken = std::mem::take(&mut self.lock().listeners);
        for Listener { sender, delivery, .. } in broken {
            drop(sender);
            delivery.wait_for_end();
        }
    }

    /// Reports [`Invalidation::Everything`] to every listener, as after lost messages.
    pub fn lose_messages(&self) {
        self.lock().publish(0, &Invalidation::Everything);
        self.deliver(0);
    }

    /// Makes the next `times` calls that `matches` fail with `errno`.
    pub fn fail(&self, times: usize, errno: i32, matches: impl Fn(&Call) -> bool + Send + 'static) {
        let error = KernelError::explained(errno, "planted fault");
        self.lock().faults.push(Fault { matches: Box::new(matches), error, times });
    }

    /// Removes all faults that [`FakeKernel::fail`] added. Returns whether each fault has failed as
    /// many calls as it had to fail.
    pub fn clear_faults(&self) -> bool {
        let faults = std::mem::take(&mut self.lock().faults);
        faults.iter().all(|fault| fault.times == 0)
    }

    /// The calls since the last call of `take_calls`.
    pub fn take_calls(&self) -> Vec<Call> {
        std::mem::take(&mut self.lock().calls)
    }

    /// The number of calls of [`ProcessNames::name`] since the last call of `take_name_lookups`.
    pub fn take_name_lookups(&self) -> usize {
        std::mem::take(&mut self.lock().name_lookups)
    }

    /// The number of changes in the largest batch ([`Kernel::apply`]) so far.
    pub fn largest_batch(&self) -> usize {
        self.lock().largest_batch
    }

    /// All objects of all processes as text, in the order of creation, without foreign links.
    pub fn dump(&self) -> Vec<String> {
        self.lock().objects.values().map(|entry| entry.object.to_string()).collect()
    }

    /// All objects of all processes, without foreign links.
    pub fn state(&self) -> ObjectSet {
        self.lock().objects.values().map(|entry| entry.object.clone()).collect()
    }

    /// Waits until the readers of all streams have taken the events, except for the readers of
    /// `writer`. So a test that uses a paused clock goes on after them.
    fn deliver(&self, writer: u32) {
        let tables = self.lock();
        let others = tables.listeners.iter().filter(|listener| listener.port != writer);
        let deliveries: Vec<_> = others.map(|listener| Arc::clone(&listener.delivery)).collect();
        drop(tables);
        deliveries.iter().for_each(|delivery| delivery.wait());
    }

    fn lock(&self) -> MutexGuard<'_, Tables> {
        lock(&self.tables)
    }
}

/// The author in the events of a foreign change. It is `None` in events about links and forwarding
/// entries. Only routes and nexthop objects have a protocol.
fn foreigner(key: &Key, protocol: Option<u8>) -> Option<ChangedBy> {
    let mut changed_by = ChangedBy::new(FakeKernel::FOREIGN_PORT);
    changed_by.protocol = protocol.filter(|_| matches!(key, Key::Route(_) | Key::Nexthop(_)));
    (!matches!(key, Key::Link(_) | Key::Fdb(..))).then_some(changed_by)
}

impl Kernel for FakeKernel {
    fn snapshot(&self, footprint: &Footprint) -> Result<ObjectSet, KernelError> {
        let mut tables = self.lock();
        tables.call(Operation::Snapshot, None)?;
        let ours = || tables.objects.values().filter(|entry| tables.owns(footprint, entry));
        let mut state: ObjectSet = ours().map(|entry| entry.object.clone()).collect();
        for entry in ours().filter(|entry| entry.inexact || entry.protocol != ROUTE_PROTOCOL) {
            if let Object::Route(route) = &entry.object {
                state.note_inexact(Key::Route(route.dst));
            }
        }
        Ok(state)
    }

    fn nexthop_ids(&self, footprint: &Footprint) -> Result<NexthopIds, KernelError> {
        let mut tables = self.lock();
        tables.call(Operation::NexthopIds, None)?;
        let mut there = NexthopIds {
            usable: !tables.without_nexthops && !tables.unwanted_nexthops,
            ..NexthopIds::default()
        };
        for entry in tables.objects.values() {
            let Object::Nexthop(Nexthop { id, .. }) = entry.object else { continue };
            let destinations = tables.routes_by(id);
            let are_inside = destinations
                .iter()
                .all(|dst| footprint.networks.iter().any(|network| network.covers(dst)));
            if entry.protocol != ROUTE_PROTOCOL || !are_inside {
                there.foreign.push(id);
            } else if !destinations.is_empty() {
                there.ours.push(id);
            }
        }
        Ok(there)
    }

    fn nexthop_users(&self, there: &ObjectSet) -> Result<BTreeMap<u32, String>, KernelError> {
        let mut tables = self.lock();
        tables.call(Operation::NexthopIds, None)?;
        let mut users = BTreeMap::new();
        for Entry { object, .. } in tables.objects.values() {
            let Object::Route(Route { via: Via::Nexthop(id), .. }) = object else { continue };
            let is_user = there.get(&object.key()) != Some(object);
            if is_user && there.get(&Key::Nexthop(*id)).is_some() {
                users.insert(*id, object.to_string());
            }
        }
        Ok(users)
    }

    fn may_change(&self, links: &[Link]) -> Result<(), KernelError> {
        let mut tables = self.lock();
        links
            .iter()
            .try_for_each(|link| tables.call(Operation::MayChange, Some(Key::Link(link.name))))
    }

    fn apply(&self, _: &Footprint, changes: &[Change]) -> Vec<Outcome> {
        let mut tables = self.lock();
        tables.largest_batch = tables.largest_batch.max(changes.len());
        let mut outcomes = Vec::new();
        for change in changes {
            outcomes.push(match change {
                Change::Put(object) => tables.put(self.writer, object),
                Change::Delete(object) => match tables.delete(self.writer, object) {
                    Err(error) if error.is_absent() => Outcome::Done,
                    result => result.into(),
                },
            });
        }
        drop(tables);
        self.deliver(self.writer);
        outcomes
    }

    fn lookup(&self, dst: IpAddr) -> Result<RouteAnswer, KernelError> {
        let mut tables = self.lock();
        tables.call(Operation::Lookup, None)?;
        Ok(tables
            .on_link(dst)
            .map_or_else(RouteAnswer::default, |link| RouteAnswer::via(link, None, None)))
    }

    fn changes(&self) -> Result<Box<dyn Changes>, KernelError> {
        let mut tables = self.lock();
        tables.call(Operation::Listen, None)?;
        let (sender, receiver) = mpsc::unbounded_channel();
        let delivery = Arc::new(Delivery::default());
        let listener = Listener { port: self.writer, sender, delivery: Arc::clone(&delivery) };
        tables.listeners.push(listener);
        Ok(Box::new(Queue { receiver, delivery }))
    }
}

impl GoRouteKernel for FakeKernel {
    fn go_routes(&self, which: &GoRoutes) -> Result<Vec<Route>, KernelError> {
        let mut tables = self.lock();
        tables.call(Operation::Snapshot, None)?;
        let routes = tables.objects.values().filter_map(|entry| match entry.object {
            Object::Route(route) if !entry.inexact => {
                which.include(&route, entry.protocol).then_some(route)
            }
            _ => None,
        });
        Ok(routes.collect())
    }

    fn delete_go_routes(&self, routes: &[Route]) -> Vec<Outcome> {
        let deletions = routes.iter().map(|route| Change::Delete((*route).into()));
        self.apply(&Footprint::default(), &deletions.collect::<Vec<_>>())
    }
}

impl ProcessNames for FakeKernel {
    fn name(&self, port: u32) -> Option<Process> {
        self.lock().name_lookups += 1;
        let is_foreign = port == Self::FOREIGN_PORT;
        is_foreign.then(|| Process { name: "foreigner".into(), pid: port, is_certain: true })
    }
}

struct Queue {
    receiver: mpsc::UnboundedReceiver<Invalidation>,
    delivery: Arc<Delivery>,
}

impl Drop for Queue {
    fn drop(&mut self) {
        self.delivery.end();
    }
}

#[async_trait]
impl Changes for Queue {
    async fn next(&mut self) -> Result<Invalidation, KernelError> {
        self.delivery.begin_read();
        let event = self.receiver.recv().await;
        self.delivery.end_read();
        event.ok_or(KernelError::new(ENOBUFS))
    }
}
