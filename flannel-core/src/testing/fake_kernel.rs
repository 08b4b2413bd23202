//! A kernel in memory that behaves like Linux where it matters, and fails on demand.

mod rules;
mod tables;

use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;
use tokio::sync::mpsc;

use self::tables::{Entry, Fault, Foreign, Listener, Tables};
use crate::address::Subnet;
use crate::kernel::{
    ChangedBy, Changes, Footprint, Invalidation, Kernel, KernelError, KernelEvent, NexthopIds,
    ProcessNames, ROUTE_PROTOCOL, RouteAnswer,
};
use crate::object::{Change, Key, LinkName, Nexthop, Object, Route, State, Via};

const ENOBUFS: i32 = 105;

/// A kernel in memory. It has Linux's rules: which object needs which, which vanishes with which,
/// and who is notified of which change. A fault can be planted in every call.
///
/// Clones are the same kernel and the same writer. [`FakeKernel::other`] is the same kernel as
/// another process uses it, whose changes the first is notified of.
#[derive(Clone)]
pub struct FakeKernel {
    writer: u32,
    tables: Arc<Mutex<Tables>>,
}

/// One call to the kernel, as faults see it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Call {
    /// What was asked.
    pub operation: Operation,
    /// Of which object; `None` where none is meant.
    pub key: Option<Key>,
}

/// What a [`Call`] asks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Operation {
    /// [`Kernel::nexthop_ids`] and [`Kernel::nexthop_users`].
    NexthopIds,
    /// [`Kernel::snapshot`].
    Snapshot,
    /// [`Change::Put`] of something that is not there.
    Create,
    /// [`Change::Put`] of something that is there.
    Replace,
    /// [`Change::Delete`].
    Delete,
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
    /// The port id that changes by [`FakeKernel::foreign_put`] and [`FakeKernel::foreign_delete`]
    /// are reported with.
    pub const FOREIGN_PORT: u32 = 4711;

    /// A kernel with one link of others that is up and has `192.0.2.0/24` and `2001:db8::/64` on
    /// it.
    pub fn with_uplink(name: &str) -> Self {
        let kernel = Self::default();
        let on_link = ["192.0.2.0/24", "2001:db8::/64"].map(|s| s.parse().expect("a subnet"));
        kernel.add_foreign_link(name, &on_link);
        kernel
    }

    /// Has no nexthop objects from now on, as kernels before 5.3. (There must be none yet.)
    pub fn without_nexthops(self) -> Self {
        self.lock().without_nexthops = true;
        self
    }

    /// Whether networks are to use nexthop objects; they are, at first.
    pub fn use_nexthops(&self, wanted: bool) {
        self.lock().unwanted_nexthops = !wanted;
    }

    /// The same kernel, seen by another process.
    pub fn other(&self) -> Self {
        let mut tables = self.lock();
        tables.writers += 1;
        Self { writer: tables.writers, tables: Arc::clone(&self.tables) }
    }

    /// Adds a link of others, up, with these subnets on it.
    ///
    /// # Panics
    /// `name` is no interface name.
    pub fn add_foreign_link(&self, name: &str, on_link: &[Subnet]) {
        let name = name.parse().expect("an interface name");
        let mut tables = self.lock();
        tables.foreign.insert(name, Foreign { up: true, on_link: on_link.to_vec() });
        tables.publish(0, &Invalidation::Link(name));
    }

    /// Changes what is on a link of others, as an address change does.
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
    }

    /// Sets a link up or down, as an administrator does: down drops its IPv4 routes, nexthops and
    /// permanent neighbours, and says so only by a message about the link.
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
    }

    /// Deletes a link, ours or another's, with all that is on it.
    pub fn delete_link(&self, name: &str) {
        let mut tables = self.lock();
        let name = name.parse().expect("an interface name");
        tables.foreign.remove(&name);
        tables.drop_link(name);
        tables.publish(0, &Invalidation::Link(name));
    }

    /// Puts an object the way another process would, with this route protocol.
    pub fn foreign_put(&self, object: impl Into<Object>, protocol: u8) {
        self.foreign_entry(Entry { object: object.into(), protocol, inexact: false });
    }

    /// The same with a route that has more than [`Route`] expresses, such as a preferred source.
    pub fn foreign_put_inexact(&self, route: Route, protocol: u8) {
        self.foreign_entry(Entry { object: route.into(), protocol, inexact: true });
    }

    fn foreign_entry(&self, entry: Entry) {
        let (object, key) = (entry.object.clone(), entry.object.key());
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
    }

    /// Deletes an object the way another process would.
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
    }

    /// Breaks every listener for good; new ones can be had.
    pub fn break_listeners(&self) {
        self.lock().listeners.clear();
    }

    /// Makes every listener lose its messages.
    pub fn lose_messages(&self) {
        self.lock().publish(0, &Invalidation::Everything);
    }

    /// Makes the next `times` calls that `matches` fail with `errno`.
    pub fn fail(&self, times: usize, errno: i32, matches: impl Fn(&Call) -> bool + Send + 'static) {
        let error = KernelError::explained(errno, "planted fault");
        self.lock().faults.push(Fault { matches: Box::new(matches), error, times });
    }

    /// Takes all planted faults away; true if each of them fired as often as it was to.
    pub fn clear_faults(&self) -> bool {
        let faults = std::mem::take(&mut self.lock().faults);
        faults.iter().all(|fault| fault.times == 0)
    }

    /// The calls since the last time this was asked.
    pub fn take_calls(&self) -> Vec<Call> {
        std::mem::take(&mut self.lock().calls)
    }

    /// The number of calls of [`ProcessNames::name`] since the last call of this.
    pub fn take_name_lookups(&self) -> usize {
        std::mem::take(&mut self.lock().name_lookups)
    }

    /// How many changes it was given at once, at most.
    pub fn largest_batch(&self) -> usize {
        self.lock().largest_batch
    }

    /// All objects of all writers, as text.
    pub fn dump(&self) -> Vec<String> {
        self.lock().objects.values().map(|entry| entry.object.to_string()).collect()
    }

    /// All objects of all writers.
    pub fn state(&self) -> State {
        self.lock().objects.values().map(|entry| entry.object.clone()).collect()
    }

    fn lock(&self) -> MutexGuard<'_, Tables> {
        self.tables.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The author of a change: none for links and forwarding entries, and with a protocol for objects
/// that have one.
fn foreigner(key: &Key, protocol: Option<u8>) -> Option<ChangedBy> {
    let mut changed_by = ChangedBy::new(FakeKernel::FOREIGN_PORT);
    changed_by.protocol = protocol.filter(|_| matches!(key, Key::Route(_) | Key::Nexthop(_)));
    (!matches!(key, Key::Link(_) | Key::Fdb(..))).then_some(changed_by)
}

impl Kernel for FakeKernel {
    fn snapshot(&self, footprint: &Footprint) -> Result<State, KernelError> {
        let mut tables = self.lock();
        tables.call(Operation::Snapshot, None)?;
        let ours = || tables.objects.values().filter(|entry| tables.owns(footprint, entry));
        let mut state: State = ours().map(|entry| entry.object.clone()).collect();
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
        let route = |entry: &Entry, id| match &entry.object {
            Object::Route(Route { dst, via: Via::Nexthop(by), .. })
                if *by == id && entry.protocol == ROUTE_PROTOCOL =>
            {
                Some(footprint.networks.iter().any(|network| network.covers(dst)))
            }
            _ => None,
        };
        for entry in tables.objects.values() {
            let Object::Nexthop(Nexthop { id, .. }) = entry.object else { continue };
            let inside: Vec<bool> =
                tables.objects.values().filter_map(|entry| route(entry, id)).collect();
            if entry.protocol != ROUTE_PROTOCOL || inside.contains(&false) {
                there.foreign.push(id);
            } else if !inside.is_empty() {
                there.ours.push(id);
            }
        }
        Ok(there)
    }

    fn nexthop_users(&self, there: &State) -> Result<BTreeMap<u32, String>, KernelError> {
        let mut tables = self.lock();
        tables.call(Operation::NexthopIds, None)?;
        let user = |entry: &Entry| match &entry.object {
            Object::Route(Route { via: Via::Nexthop(id), .. })
                if there.get(&Key::Nexthop(*id)).is_some()
                    && there.get(&entry.object.key()) != Some(&entry.object) =>
            {
                Some((*id, entry.object.to_string()))
            }
            _ => None,
        };
        Ok(tables.objects.values().filter_map(user).collect())
    }

    fn apply(&self, _: &Footprint, changes: &[Change]) -> Vec<Result<(), KernelError>> {
        let mut tables = self.lock();
        tables.largest_batch = tables.largest_batch.max(changes.len());
        let one = |change: &Change| match change {
            Change::Put(object) => tables.put(self.writer, object),
            Change::Delete(object) => match tables.delete(self.writer, object) {
                Err(error) if error.is_absent() => Ok(()),
                result => result,
            },
        };
        changes.iter().map(one).collect()
    }

    fn lookup(&self, dst: IpAddr) -> Result<RouteAnswer, KernelError> {
        let mut tables = self.lock();
        tables.call(Operation::Lookup, None)?;
        Ok(tables
            .on_link(dst)
            .map_or_else(RouteAnswer::nowhere, |link| RouteAnswer::via(link, None, None)))
    }

    fn changes(&self) -> Result<Box<dyn Changes>, KernelError> {
        let mut tables = self.lock();
        tables.call(Operation::Listen, None)?;
        let (sender, receiver) = mpsc::unbounded_channel();
        tables.listeners.push(Listener { port: self.writer, sender });
        Ok(Box::new(Queue { receiver }))
    }
}

impl ProcessNames for FakeKernel {
    fn name(&self, port: u32) -> Option<String> {
        self.lock().name_lookups += 1;
        (port == Self::FOREIGN_PORT).then(|| format!("foreigner (process {port})"))
    }
}

struct Queue {
    receiver: mpsc::UnboundedReceiver<Invalidation>,
}

#[async_trait]
impl Changes for Queue {
    async fn next(&mut self) -> Result<Invalidation, KernelError> {
        self.receiver.recv().await.ok_or(KernelError::new(ENOBUFS))
    }
}
