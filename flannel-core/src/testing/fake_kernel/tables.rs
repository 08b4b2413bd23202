//! The tables of the fake kernel, and the rules for objects of every kind.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use libc::{ENETDOWN, ENODEV, ENOENT};
use tokio::sync::mpsc;

use super::delivery::Delivery;
use super::rules::rules;
use super::{Call, Operation};
use crate::address::Subnet;
use crate::kernel::{Footprint, Invalidation, KernelError, KernelEvent, Outcome, ROUTE_PROTOCOL};
use crate::object::{Key, Link, LinkKind, LinkName, Object, Route, Via};

/// The state of the fake kernel, with its listeners and faults.
#[derive(Default)]
pub(super) struct Tables {
    pub(super) writers: u32,
    pub(super) foreign: BTreeMap<LinkName, Foreign>,
    pub(super) objects: BTreeMap<Key, Entry>,
    pub(super) listeners: Vec<Listener>,
    pub(super) faults: Vec<Fault>,
    pub(super) calls: Vec<Call>,
    pub(super) name_lookups: usize,
    pub(super) largest_batch: usize,
    pub(super) without_nexthops: bool,
    pub(super) unwanted_nexthops: bool,
}

/// A foreign link.
#[derive(Debug)]
pub(super) struct Foreign {
    pub(super) up: bool,
    pub(super) on_link: Vec<Subnet>,
}

#[derive(Debug, Clone)]
pub(super) struct Entry {
    pub(super) object: Object,
    /// The route protocol of a route or nexthop object. Other objects do not use it.
    pub(super) protocol: u8,
    /// The object in the kernel has attributes that `object` does not express.
    pub(super) inexact: bool,
}

/// An error that the next `times` matching calls return.
pub(super) struct Fault {
    pub(super) matches: Box<dyn Fn(&Call) -> bool + Send>,
    pub(super) error: KernelError,
    pub(super) times: usize,
}

/// Receives the changes of all writers except for `port`.
pub(super) struct Listener {
    pub(super) port: u32,
    pub(super) sender: mpsc::UnboundedSender<Invalidation>,
    pub(super) delivery: Arc<Delivery>,
}

impl Tables {
    /// Records a call, and fails it if a fault matches.
    pub(super) fn call(
        &mut self,
        operation: Operation,
        key: Option<Key>,
    ) -> Result<(), KernelError> {
        let call = Call { operation, key };
        let fault = self.faults.iter_mut().find(|fault| fault.times > 0 && (fault.matches)(&call));
        self.calls.push(call);
        match fault {
            Some(fault) => {
                fault.times -= 1;
                Err(fault.error.clone())
            }
            None => Ok(()),
        }
    }

    /// Notifies all listeners except for the writer. For writer 0, all listeners are notified.
    pub(super) fn publish(&mut self, writer: u32, invalidation: &Invalidation) {
        self.listeners.retain(|listener| {
            if listener.port == writer {
                return true;
            }
            listener.delivery.send();
            listener.sender.send(invalidation.clone()).is_ok()
        });
    }

    /// Whether a link is up. Fails with `ENODEV` if the link does not exist.
    pub(super) fn is_up(&self, name: LinkName) -> Result<bool, KernelError> {
        if let Some(foreign) = self.foreign.get(&name) {
            return Ok(foreign.up);
        }
        match self.objects.get(&Key::Link(name)) {
            Some(Entry { object: Object::Link(link), .. }) => Ok(link.up),
            _ => Err(KernelError::explained(ENODEV, format!("no interface named {name}"))),
        }
    }

    /// Deletes the objects that the kernel deletes when a device goes down.
    pub(super) fn drop_by_down(&mut self, name: LinkName) {
        self.objects.retain(|_, Entry { object, .. }| {
            object.link() != Some(name) || !rules(object).goes_when_device_is_down()
        });
        self.drop_orphans();
    }

    /// Deletes a link with all objects on it.
    pub(super) fn drop_link(&mut self, name: LinkName) {
        self.objects.remove(&Key::Link(name));
        self.objects.retain(|_, entry| entry.object.link() != Some(name));
        self.drop_orphans();
        for entry in self.objects.values_mut() {
            let Object::Link(Link { kind: LinkKind::Vxlan(vxlan), .. }) = &mut entry.object else {
                continue;
            };
            vxlan.lower = vxlan.lower.filter(|lower| *lower != name);
        }
    }

    /// Deletes the objects that the kernel deletes with the object of `key`: the routes that use a
    /// nexthop object, and with the last IPv4 address of a device all its IPv4 routes.
    pub(super) fn drop_after(&mut self, key: Key) {
        if let Key::Nexthop(_) = key {
            self.drop_orphans();
        }
        let Key::Addr(name, IpAddr::V4(_)) = key else { return };
        let left = self
            .objects
            .keys()
            .any(|key| matches!(key, Key::Addr(link, IpAddr::V4(_)) if *link == name));
        if !left {
            self.objects.retain(|key, entry| {
                !matches!(key, Key::Route(dst) if dst.base().is_ipv4())
                    || entry.object.link() != Some(name)
            });
        }
    }

    /// Deletes the routes whose nexthop objects do not exist.
    pub(super) fn drop_orphans(&mut self) {
        let id = |key: &Key| if let Key::Nexthop(id) = key { Some(*id) } else { None };
        let there: BTreeSet<u32> = self.objects.keys().filter_map(id).collect();
        self.objects.retain(|_, entry| match &entry.object {
            Object::Route(route) => !matches!(route.via, Via::Nexthop(id) if !there.contains(&id)),
            _ => true,
        });
    }

    /// The destinations of the routes with our protocol that use a nexthop object.
    pub(super) fn routes_by(&self, id: u32) -> Vec<Subnet> {
        let ours = self.objects.values().filter(|entry| entry.protocol == ROUTE_PROTOCOL);
        ours.filter_map(|entry| match &entry.object {
            Object::Route(Route { dst, via: Via::Nexthop(by), .. }) if *by == id => Some(*dst),
            _ => None,
        })
        .collect()
    }

    /// The device by which packets of a route leave, also if the route uses a nexthop object.
    pub(super) fn link_of(&self, object: &Object) -> Option<LinkName> {
        match object {
            Object::Route(Route { via: Via::Nexthop(id), .. }) => {
                self.objects.get(&Key::Nexthop(*id))?.object.link()
            }
            object => object.link(),
        }
    }

    /// The foreign link that has a subnet with this address on it.
    pub(super) fn on_link(&self, address: IpAddr) -> Option<LinkName> {
        let link = self.foreign.iter().find(|(_, foreign)| {
            foreign.up && foreign.on_link.iter().any(|subnet| subnet.contains(address))
        });
        link.map(|(name, _)| *name)
    }

    pub(super) fn put(&mut self, writer: u32, object: &Object) -> Outcome {
        if let Err(error) = self.may_put(object) {
            return Outcome::Failed(error);
        }
        let key = object.key();
        let rules = rules(object);
        if rules.waits_for_its_maker(self) {
            return Outcome::Started;
        }
        let old = self.objects.get(&key).map(|entry| entry.object.clone());
        if let Some(old) = &old {
            rules.before_replacing(old, self);
        }
        let entry = Entry { object: object.clone(), protocol: ROUTE_PROTOCOL, inexact: false };
        self.objects.insert(key, entry);
        if old.as_ref() != Some(object) {
            self.publish_event(writer, object, KernelEvent::Present(object.clone()));
        }
        Outcome::Done
    }

    /// Records the call of a put. Fails if a fault matches, or if a rule of the kernel forbids the
    /// put.
    fn may_put(&mut self, object: &Object) -> Result<(), KernelError> {
        let key = object.key();
        let exists = self.objects.contains_key(&key);
        let operation = if exists { Operation::Replace } else { Operation::Create };
        self.call(operation, Some(key))?;
        let rules = rules(object);
        if let Some(link) = object.link() {
            let up = self.is_up(link)?;
            if !up && rules.needs_device_up() {
                return Err(KernelError::explained(ENETDOWN, "Device for nexthop is not up"));
            }
        }
        rules.check(self)
    }

    pub(super) fn delete(&mut self, writer: u32, object: &Object) -> Result<(), KernelError> {
        let key = object.key();
        self.call(Operation::Delete, Some(key))?;
        if !self.objects.get(&key).is_some_and(|there| rules(object).deletes(&there.object)) {
            return Err(KernelError::new(ENOENT));
        }
        if let Key::Link(name) = key {
            self.drop_link(name);
        }
        self.objects.remove(&key);
        self.drop_after(key);
        self.publish_event(writer, object, KernelEvent::Deleted(key));
        Ok(())
    }

    /// Notifies the listeners of one event, as Linux does for objects of this kind.
    fn publish_event(&mut self, writer: u32, object: &Object, event: KernelEvent) {
        let invalidation = match object {
            Object::Link(link) => Invalidation::Link(link.name),
            _ => Invalidation::Objects(vec![event], None),
        };
        self.publish(if rules(object).names_writer() { writer } else { 0 }, &invalidation);
    }

    /// Whether a snapshot shows the entry.
    pub(super) fn owns(&self, footprint: &Footprint, entry: &Entry) -> bool {
        let link = self.link_of(&entry.object);
        rules(&entry.object).is_owned_by(footprint, link, entry.protocol)
    }
}
