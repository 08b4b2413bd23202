//! Linux's rules for objects of each kind.

use libc::{EEXIST, EINVAL, ENETUNREACH, EOPNOTSUPP};

use super::tables::Tables;
use crate::kernel::{Footprint, KernelError};
use crate::object::{
    Addr, Fdb, Key, Link, LinkKind, LinkName, Neigh, Nexthop, Object, Peer, Record, Route, Via,
};

/// The rules for one kind of object.
pub(super) trait Rules {
    /// Whether a snapshot for this footprint shows the object, which has this protocol and this
    /// device.
    fn is_owned_by(&self, footprint: &Footprint, link: Option<LinkName>, protocol: u8) -> bool;

    /// The error with which the kernel refuses to put the object.
    fn check(&self, _tables: &Tables) -> Result<(), KernelError> {
        Ok(())
    }

    /// Whether the put is only started, because another program creates the object.
    fn waits_for_its_maker(&self, _tables: &Tables) -> bool {
        false
    }

    /// Deletes the objects that the kernel deletes when this object replaces `old`.
    fn before_replacing(&self, _old: &Object, _tables: &mut Tables) {}

    /// Whether a deletion of the object deletes `there`, which has the same key. A replacement with
    /// another link or gateway is not deleted.
    fn deletes(&self, _there: &Object) -> bool {
        true
    }

    /// Whether the object cannot be put while its device is down.
    fn needs_device_up(&self) -> bool {
        false
    }

    /// Whether the kernel deletes the object when its device goes down.
    fn goes_when_device_is_down(&self) -> bool {
        false
    }

    /// Whether events about the object name their author. The author is then not notified.
    fn names_writer(&self) -> bool {
        true
    }
}

pub(super) fn rules(object: &Object) -> &dyn Rules {
    match object {
        Object::Link(value) => value,
        Object::Addr(value) => value,
        Object::Neigh(value) => value,
        Object::Fdb(value) => value,
        Object::Peer(value) => value,
        Object::Nexthop(value) => value,
        Object::Route(value) => value,
        Object::Record(value) => value,
    }
}

impl Rules for Link {
    fn is_owned_by(&self, footprint: &Footprint, _: Option<LinkName>, _: u8) -> bool {
        footprint.links.contains(&self.name)
    }

    fn check(&self, tables: &Tables) -> Result<(), KernelError> {
        if tables.foreign.contains_key(&self.name) {
            let kind = self.kind.attributes().kind();
            let detail = format!("{} exists and is not a {kind} device", self.name);
            return Err(KernelError::explained(EEXIST, detail));
        }
        self.kind.attributes().lower().map_or(Ok(()), |lower| tables.is_up(lower).map(drop))
    }

    fn waits_for_its_maker(&self, tables: &Tables) -> bool {
        matches!(self.kind, LinkKind::Tun(_)) && !tables.objects.contains_key(&Key::Link(self.name))
    }

    fn before_replacing(&self, old: &Object, tables: &mut Tables) {
        let Object::Link(old) = old else { return };
        let attributes = old.kind.attributes();
        if !attributes.can_become(&self.kind) {
            tables.drop_link(self.name);
        } else if old.up && !self.up {
            tables.drop_by_down(self.name);
        } else if attributes.mac() != self.kind.attributes().mac() {
            tables
                .objects
                .retain(|key, _| !matches!(key, Key::Neigh(link, _) if *link == self.name));
        }
    }

    fn names_writer(&self) -> bool {
        false
    }
}

/// A kernel does not keep records.
impl Rules for Record {
    fn is_owned_by(&self, _: &Footprint, _: Option<LinkName>, _: u8) -> bool {
        false
    }

    fn check(&self, _: &Tables) -> Result<(), KernelError> {
        Err(KernelError::new(EOPNOTSUPP))
    }
}

impl Rules for Addr {
    fn is_owned_by(&self, footprint: &Footprint, _: Option<LinkName>, _: u8) -> bool {
        footprint.owns_addr(self)
    }
}

impl Rules for Neigh {
    fn is_owned_by(&self, footprint: &Footprint, _: Option<LinkName>, _: u8) -> bool {
        footprint.owns_entry(self.link, true)
    }

    fn goes_when_device_is_down(&self) -> bool {
        true
    }
}

impl Rules for Fdb {
    fn is_owned_by(&self, footprint: &Footprint, _: Option<LinkName>, _: u8) -> bool {
        footprint.owns_entry(self.link, true)
    }

    fn check(&self, tables: &Tables) -> Result<(), KernelError> {
        let is_foreign = tables.foreign.contains_key(&self.link);
        if is_foreign { Err(KernelError::new(EINVAL)) } else { Ok(()) }
    }

    fn names_writer(&self) -> bool {
        false
    }
}

impl Rules for Peer {
    fn is_owned_by(&self, footprint: &Footprint, _: Option<LinkName>, _: u8) -> bool {
        footprint.links.contains(&self.link)
    }

    fn check(&self, tables: &Tables) -> Result<(), KernelError> {
        match tables.objects.get(&Key::Link(self.link)).map(|entry| &entry.object) {
            Some(Object::Link(Link { kind: LinkKind::Wireguard(_), .. })) => Ok(()),
            _ => Err(KernelError::new(EOPNOTSUPP)),
        }
    }

    fn names_writer(&self) -> bool {
        false
    }
}

impl Rules for Nexthop {
    fn is_owned_by(&self, footprint: &Footprint, _: Option<LinkName>, protocol: u8) -> bool {
        footprint.owns_nexthop(self.id, self.link, protocol)
    }

    fn check(&self, tables: &Tables) -> Result<(), KernelError> {
        if tables.without_nexthops {
            return Err(KernelError::new(EOPNOTSUPP));
        }
        if !self.onlink && tables.on_link(self.gateway) != Some(self.link) {
            return Err(KernelError::explained(EINVAL, "Nexthop has invalid gateway"));
        }
        Ok(())
    }

    fn deletes(&self, there: &Object) -> bool {
        matches!(there, Object::Nexthop(there) if there.link == self.link)
    }

    fn needs_device_up(&self) -> bool {
        true
    }

    fn goes_when_device_is_down(&self) -> bool {
        true
    }
}

impl Rules for Route {
    fn is_owned_by(&self, footprint: &Footprint, link: Option<LinkName>, protocol: u8) -> bool {
        footprint.owns_route(self, link, protocol)
    }

    fn check(&self, tables: &Tables) -> Result<(), KernelError> {
        match self.via {
            Via::Gateway { gateway, link, onlink: false }
                if tables.on_link(gateway) != Some(link) =>
            {
                Err(KernelError::explained(ENETUNREACH, "Nexthop has invalid gateway"))
            }
            Via::Nexthop(id) if !tables.objects.contains_key(&Key::Nexthop(id)) => {
                Err(KernelError::explained(EINVAL, "Nexthop id does not exist"))
            }
            _ => Ok(()),
        }
    }

    fn deletes(&self, there: &Object) -> bool {
        matches!(there, Object::Route(there) if there.via == self.via)
    }

    fn needs_device_up(&self) -> bool {
        true
    }

    fn goes_when_device_is_down(&self) -> bool {
        self.dst.base().is_ipv4()
    }
}
